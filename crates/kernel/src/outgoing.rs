//! Files on their way into a socket without passing through this process: the kernel hands the pages it has of them to whoever reads
//! there, where a read and a write would copy each byte twice.
//!
//! Between who answers a request and the socket is HTTP, which takes bytes and no files. So a piece of a file goes through it as bytes
//! that stand for it, and the stream, which knows them by where they are in memory, sends the file's instead. Nobody reads or copies them.

use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rustix::{io::Errno, net::SendFlags};

/// Most that one piece stands for: what a socket takes at once, nearly.
pub const MAX_STAND_IN_BYTES: usize = 128 * 1024;
/// Read at once where a file can't be sent by the kernel: it is still in the core's own cache when it is sent.
const COPIED_BYTES: usize = 64 * 1024;

/// Never written and never read, so they take no memory. Not zeros: the compiler may put equal constants in one place.
static STAND_IN: [u8; MAX_STAND_IN_BYTES] = [b'?'; MAX_STAND_IN_BYTES];

/// The files that are under way on one stream. Clones are of the same one. There are no more than the writer keeps in hand.
#[derive(Clone, Default)]
pub struct Outgoing(Arc<Mutex<Pieces>>);

#[derive(Default)]
struct Pieces {
    next: VecDeque<Piece>,
    slowest: Duration,
}

struct Piece {
    file: Arc<OwnedFd>,
    at: u64,
    sent: usize,
    left: usize,
}

impl Outgoing {
    /// Bytes that stand for so many of a file's, [`MAX_STAND_IN_BYTES`] at most. They must be written to the stream whole, once, in the
    /// order they were asked for, and where they are: the stream refuses anything else.
    pub fn stand_in(&self, file: Arc<OwnedFd>, at: u64, bytes: usize) -> &'static [u8] {
        let bytes = bytes.min(MAX_STAND_IN_BYTES);
        self.pieces().next.push_back(Piece { file, at, sent: 0, left: bytes });
        &STAND_IN[..bytes]
    }

    /// The longest that the kernel took to take some since this was last asked: a file that isn't in memory makes one wait.
    pub fn slowest(&self) -> Duration {
        std::mem::take(&mut self.pieces().slowest)
    }

    /// Sends what the bytes stand for, or as much of it as there is room for.
    pub(crate) fn send(&self, socket: &OwnedFd, bytes: &[u8]) -> io::Result<usize> {
        let mut pieces = self.pieces();
        let out_of_order = || io::Error::new(io::ErrorKind::InvalidData, "bytes that stand for a file's came out of order");
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
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter while it was sent"));
        }
        (piece.at, piece.sent, piece.left) = (piece.at + sent as u64, piece.sent + sent, piece.left - sent);
        if piece.left == 0 {
            pieces.next.pop_front();
        }
        pieces.slowest = pieces.slowest.max(began.elapsed());
        Ok(sent)
    }

    fn pieces(&self) -> MutexGuard<'_, Pieces> {
        // Nothing in between can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether these bytes stand for others.
pub(crate) fn is_stand_in(bytes: &[u8]) -> bool {
    !bytes.is_empty() && offset(bytes).is_some()
}

fn offset(bytes: &[u8]) -> Option<usize> {
    (bytes.as_ptr() as usize).checked_sub(STAND_IN.as_ptr() as usize).filter(|offset| *offset < STAND_IN.len())
}

fn send_file(socket: &OwnedFd, piece: &Piece) -> Result<usize, Errno> {
    let mut at = piece.at;
    rustix::fs::sendfile(socket, &*piece.file, Some(&mut at), piece.left)
}

/// For file systems that hand out no pages.
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
    use crate::{Peer, QuietStream};

    fn streams() -> (QuietStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (QuietStream::new(ours, Peer::Asking).unwrap(), theirs)
    }

    fn file_of(content: &[u8]) -> Arc<OwnedFd> {
        let name = format!("cobox-outgoing-{}-{:?}", std::process::id(), std::thread::current().id());
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
    async fn a_files_bytes_come_in_the_place_of_those_that_stand_for_them() {
        let (mut ours, mut theirs) = streams();
        let content = content(1_000_003);
        let (file, outgoing) = (file_of(&content), ours.outgoing());
        let expected = [b"head".as_slice(), &content, b"between", &content[7..12], b"end"].concat();
        let writer = async {
            ours.write_all(b"head").await.unwrap();
            for at in (0..content.len()).step_by(MAX_STAND_IN_BYTES) {
                let piece = outgoing.stand_in(file.clone(), at as u64, content.len() - at);
                ours.write_all(piece).await.unwrap();
            }
            // All at once, as HTTP does.
            let piece = outgoing.stand_in(file.clone(), 7, 5);
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
    async fn a_file_that_became_shorter_is_an_error() {
        let (mut ours, _theirs) = streams();
        let file = file_of(&content(10_000));
        let piece = ours.outgoing().stand_in(file.clone(), 0, 10_000);
        rustix::fs::ftruncate(&file, 4000).unwrap();
        assert_eq!(ours.write(piece).await.unwrap(), 4000);
        assert_eq!(ours.write(&piece[4000..]).await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn whatever_was_not_asked_for_or_is_out_of_order_is_refused() {
        let (mut ours, _theirs) = streams();
        let (file, outgoing) = (file_of(&content(1000)), ours.outgoing());
        let refused = |written: io::Result<usize>| assert_eq!(written.unwrap_err().kind(), io::ErrorKind::InvalidData);
        refused(ours.write(&STAND_IN[..10]).await);
        let piece = outgoing.stand_in(file, 0, 100);
        refused(ours.write(&piece[1..]).await);
        refused(ours.write(&piece[..99]).await);
        assert_eq!(ours.write(piece).await.unwrap(), 100);
        refused(ours.write(piece).await);
    }

    #[tokio::test]
    async fn one_that_the_kernel_can_not_send_is_copied() {
        let (mut ours, mut theirs) = streams();
        let content = fs::read("/proc/self/environ").unwrap();
        let file: Arc<OwnedFd> = Arc::new(File::open("/proc/self/environ").unwrap().into());
        let unsent = Piece { file: file.clone(), at: 0, sent: 0, left: content.len() };
        assert_eq!(send_file(&rustix::io::dup(&theirs).unwrap(), &unsent), Err(Errno::INVAL));
        let piece = ours.outgoing().stand_in(file, 0, content.len());
        ours.write_all(piece).await.unwrap();
        let mut got = vec![0; content.len()];
        theirs.read_exact(&mut got).await.unwrap();
        assert_eq!(got, content);
    }
}
