//! Sends files into a socket without copying them through this process. The kernel passes the file's cached pages to
//! the reader, where a read and a write would copy each byte twice.
//!
//! HTTP is between the code that answers a request and the socket, and it takes bytes but no files. So a piece of a
//! file passes through HTTP as placeholder bytes that are never read or copied. The stream recognizes them by their
//! address in memory and sends the file's bytes in their place.

use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rustix::{io::Errno, net::SendFlags};

/// Maximum size of one piece: nearly what a socket accepts at once.
pub const MAX_PLACEHOLDER_BYTES: usize = 128 * 1024;
/// Bytes read at once if the kernel can't send the file itself. A piece of this size is still in the core's cache when
/// it is sent.
const COPIED_BYTES: usize = 64 * 1024;

/// The memory that placeholders refer to. It is never written or read, so it takes up no memory. It isn't zeroed,
/// because the compiler may merge equal constants.
static PLACEHOLDER: [u8; MAX_PLACEHOLDER_BYTES] = [b'?'; MAX_PLACEHOLDER_BYTES];

/// The pieces of files that are queued on one stream. Clones share the queue. It holds only what the writer has in
/// flight.
#[derive(Clone, Default)]
pub struct FileSender(Arc<Mutex<Pieces>>);

#[derive(Default)]
struct Pieces {
    next: VecDeque<Piece>,
    longest_send: Duration,
}

struct Piece {
    file: Arc<OwnedFd>,
    at: u64,
    sent: usize,
    left: usize,
}

impl FileSender {
    /// Placeholder bytes for a piece of a file, at most [`MAX_PLACEHOLDER_BYTES`]. They must be written to the stream
    /// completely, once, in the order of the calls, and from this address. The stream rejects everything else.
    pub fn placeholder(&self, file: Arc<OwnedFd>, at: u64, bytes: usize) -> &'static [u8] {
        let bytes = bytes.min(MAX_PLACEHOLDER_BYTES);
        self.pieces().next.push_back(Piece { file, at, sent: 0, left: bytes });
        &PLACEHOLDER[..bytes]
    }

    /// Longest time that the kernel took to accept a part of a piece since the last call. It is long when the file
    /// isn't in memory.
    pub fn take_longest_send(&self) -> Duration {
        std::mem::take(&mut self.pieces().longest_send)
    }

    /// Sends the bytes of the file that a placeholder refers to, or as many as the socket accepts.
    pub(crate) fn send(&self, socket: &OwnedFd, bytes: &[u8]) -> io::Result<usize> {
        let mut pieces = self.pieces();
        let out_of_order = || io::Error::new(io::ErrorKind::InvalidData, "placeholder bytes were written out of order");
        let piece = pieces.next.front_mut().ok_or_else(out_of_order)?;
        if offset(bytes) != Some(piece.sent) || bytes.len() != piece.left {
            return Err(out_of_order());
        }
        let began = Instant::now();
        let sent = match send_file(socket, piece) {
            Err(Errno::INVAL | Errno::NOSYS) => copy(socket, piece),
            sent => sent,
        }?;
        if sent == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file was truncated while it was being sent"));
        }
        (piece.at, piece.sent, piece.left) = (piece.at + sent as u64, piece.sent + sent, piece.left - sent);
        if piece.left == 0 {
            pieces.next.pop_front();
        }
        pieces.longest_send = pieces.longest_send.max(began.elapsed());
        Ok(sent)
    }

    fn pieces(&self) -> MutexGuard<'_, Pieces> {
        // The code that holds the lock can't panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether these bytes are a placeholder.
pub(crate) fn is_placeholder(bytes: &[u8]) -> bool {
    !bytes.is_empty() && offset(bytes).is_some()
}

fn offset(bytes: &[u8]) -> Option<usize> {
    (bytes.as_ptr() as usize).checked_sub(PLACEHOLDER.as_ptr() as usize).filter(|offset| *offset < PLACEHOLDER.len())
}

fn send_file(socket: &OwnedFd, piece: &Piece) -> Result<usize, Errno> {
    let mut at = piece.at;
    rustix::fs::sendfile(socket, &*piece.file, Some(&mut at), piece.left)
}

/// For file systems that don't support `sendfile`.
fn copy(socket: &OwnedFd, piece: &Piece) -> Result<usize, Errno> {
    let mut copied = Vec::with_capacity(piece.left.min(COPIED_BYTES));
    rustix::io::pread(&*piece.file, rustix::buffer::spare_capacity(&mut copied), piece.at)?;
    copied.truncate(piece.left);
    if copied.is_empty() { Ok(0) } else { rustix::net::send(socket, &copied, SendFlags::NOSIGNAL) }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        io::{IoSlice, Write},
    };

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::UnixStream,
    };

    use super::*;
    use crate::{LocalSocketStream, Peer};

    fn streams() -> (LocalSocketStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (LocalSocketStream::new(ours, Peer::Client).unwrap(), theirs)
    }

    fn file_of(content: &[u8]) -> Arc<OwnedFd> {
        let name = format!("cobox-file-send-{}-{:?}", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        File::create(&path).unwrap().write_all(content).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        fs::remove_file(path).unwrap();
        Arc::new(file.into())
    }

    fn content(bytes: u32) -> Vec<u8> {
        (0..bytes).map(|i| (i % 251) as u8 + 1).collect()
    }

    #[tokio::test]
    async fn placeholders_are_replaced_by_the_bytes_of_the_file() {
        let (mut ours, mut theirs) = streams();
        let content = content(1_000_003);
        let (file, sender) = (file_of(&content), ours.file_sender());
        let expected = [b"head".as_slice(), &content, b"between", &content[7..12], b"end"].concat();
        let writer = async {
            ours.write_all(b"head").await.unwrap();
            for at in (0..content.len()).step_by(MAX_PLACEHOLDER_BYTES) {
                let piece = sender.placeholder(file.clone(), at as u64, content.len() - at);
                ours.write_all(piece).await.unwrap();
            }
            // All parts in one vectored write, as HTTP does.
            let piece = sender.placeholder(file.clone(), 7, 5);
            let parts: [&[u8]; 4] = [b"", b"between", piece, b"end"];
            let mut left: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
            let mut left = left.as_mut_slice();
            while !left.is_empty() {
                let sent = ours.write_vectored(left).await.unwrap();
                IoSlice::advance_slices(&mut left, sent);
            }
            drop(ours);
        };
        let mut got = Vec::new();
        let ((), read) = tokio::join!(writer, theirs.read_to_end(&mut got));
        read.unwrap();
        assert!(got == expected, "{} bytes of {}", got.len(), expected.len());
    }

    #[tokio::test]
    async fn a_file_that_was_truncated_is_an_error() {
        let (mut ours, _theirs) = streams();
        let file = file_of(&content(10_000));
        let piece = ours.file_sender().placeholder(file.clone(), 0, 10_000);
        rustix::fs::ftruncate(&file, 4000).unwrap();
        assert_eq!(ours.write(piece).await.unwrap(), 4000);
        assert_eq!(ours.write(&piece[4000..]).await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn unknown_placeholders_and_those_out_of_order_are_rejected() {
        let (mut ours, _theirs) = streams();
        let (file, sender) = (file_of(&content(1000)), ours.file_sender());
        let refused = |written: io::Result<usize>| assert_eq!(written.unwrap_err().kind(), io::ErrorKind::InvalidData);
        refused(ours.write(&PLACEHOLDER[..10]).await);
        let piece = sender.placeholder(file, 0, 100);
        refused(ours.write(&piece[1..]).await);
        refused(ours.write(&piece[..99]).await);
        assert_eq!(ours.write(piece).await.unwrap(), 100);
        refused(ours.write(piece).await);
    }

    #[tokio::test]
    async fn a_file_that_the_kernel_can_not_send_is_copied() {
        let (mut ours, mut theirs) = streams();
        let content = fs::read("/proc/self/environ").unwrap();
        let file: Arc<OwnedFd> = Arc::new(File::open("/proc/self/environ").unwrap().into());
        let unsent = Piece { file: file.clone(), at: 0, sent: 0, left: content.len() };
        assert_eq!(send_file(&rustix::io::dup(&theirs).unwrap(), &unsent), Err(Errno::INVAL));
        let piece = ours.file_sender().placeholder(file, 0, content.len());
        ours.write_all(piece).await.unwrap();
        let mut got = vec![0; content.len()];
        theirs.read_exact(&mut got).await.unwrap();
        assert_eq!(got, content);
    }
}
