//! A UNIX stream socket that waits for buffer space only when there is none. The kernel wakes a thread that waits for
//! space each time the other end reads. tokio's own stream always waits for it, so it is woken once per message without
//! need, and interrupts the other end's work.

use std::{
    io::{self, IoSlice},
    os::fd::OwnedFd,
    pin::Pin,
    task::{Context, Poll, ready},
};

use rustix::{
    io::Errno,
    net::{
        Shutdown,
        sockopt::{set_socket_send_buffer_size, socket_send_buffer_size},
    },
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf, unix::AsyncFd},
    task::coop::poll_proceed,
};

use crate::{
    Peer,
    file_send::{FileSender, is_placeholder},
    message_received, message_sent, register_fd,
};

/// Send buffer size while a file is sent, as far as the machine allows it. The other end keeps reading while this
/// thread wakes up, and the buffer must not run empty. It holds pages that are in the page cache anyway, so it costs
/// almost no memory.
const FILE_SEND_BUFFER_BYTES: usize = 512 * 1024;

pub struct LocalSocketStream {
    socket: AsyncFd<OwnedFd>,
    /// The role of the other end.
    peer: Peer,
    /// The same socket, registered for write readiness. Created when the send buffer is full for the first time.
    writable: Option<AsyncFd<OwnedFd>>,
    file_sender: FileSender,
    /// The original send buffer size, set while the buffer is enlarged for a file.
    original_send_buffer: Option<usize>,
}

impl LocalSocketStream {
    /// Must be called within a runtime, to which the stream then belongs.
    pub fn new(stream: tokio::net::UnixStream, peer: Peer) -> io::Result<Self> {
        Ok(Self {
            socket: register_fd(stream.into_std()?.into(), Interest::READABLE)?,
            peer,
            writable: None,
            file_sender: FileSender::default(),
            original_send_buffer: None,
        })
    }

    /// Creates placeholders that this stream replaces by the bytes of files.
    pub fn file_sender(&self) -> FileSender {
        self.file_sender.clone()
    }

    /// Enlarges the send buffer for a file and shrinks it again for copied bytes: a client that doesn't read must not
    /// make us hold more of those.
    fn resize_send_buffer(&mut self, is_for_file: bool) {
        if is_for_file == self.original_send_buffer.is_some() {
            return;
        }
        let socket = self.socket.get_ref();
        // Ignored: a buffer of another size only changes the speed.
        match self.original_send_buffer.take() {
            // The kernel doubles the size that it is given, for its own bookkeeping, and returns the doubled size.
            Some(original) => _ = set_socket_send_buffer_size(socket, original / 2),
            None => {
                self.original_send_buffer = Some(socket_send_buffer_size(socket).unwrap_or(FILE_SEND_BUFFER_BYTES));
                let _ = set_socket_send_buffer_size(socket, FILE_SEND_BUFFER_BYTES);
            }
        }
    }

    fn poll_write_with(
        &mut self,
        cx: &mut Context<'_>,
        write: impl Fn(&OwnedFd, &FileSender) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        // A stream that can always write must still yield to the thread's other tasks.
        let turn = ready!(poll_proceed(cx));
        loop {
            match write(self.socket.get_ref(), &self.file_sender) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                done => {
                    turn.made_progress();
                    if let Ok(bytes) = done {
                        message_sent(self.peer, bytes);
                    }
                    return Poll::Ready(done);
                }
            }
            let writable = match &mut self.writable {
                Some(writable) => writable,
                none => none.insert(register_fd(self.socket.get_ref().try_clone()?, Interest::WRITABLE)?),
            };
            // Readiness seen before the attempt is out of date. Readiness that comes later wakes the task.
            ready!(writable.poll_write_ready(cx))?.clear_ready();
        }
    }
}

impl AsyncRead for LocalSocketStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let wanted = buf.remaining();
        loop {
            let mut ready = ready!(self.socket.poll_read_ready(cx))?;
            // SAFETY: the kernel only writes to it, so nothing in it becomes uninitialized.
            let spare = unsafe { buf.unfilled_mut() };
            match rustix::io::read(self.socket.get_ref(), spare) {
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
                Ok((read, _)) => {
                    let count = read.len();
                    // SAFETY: the kernel has just written these bytes.
                    unsafe { buf.assume_init(count) };
                    buf.advance(count);
                    message_received(self.peer, count);
                    // A short read means that the socket is empty. New data triggers another readiness event.
                    if 0 < count && count < wanted {
                        ready.clear_ready();
                    }
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for LocalSocketStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, parts: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let parts = &parts[parts.iter().take_while(|part| part.is_empty()).count()..];
        let first = parts.iter().position(|part| is_placeholder(part));
        this.resize_send_buffer(first == Some(0));
        // `writev` has no MSG_NOSIGNAL flag. That is safe, because every Rust program ignores SIGPIPE.
        this.poll_write_with(cx, |socket, file_sender| match first {
            Some(0) => file_sender.send(socket, &parts[0]),
            first => Ok(rustix::io::writev(socket, &parts[..first.unwrap_or(parts.len())])?),
        })
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(rustix::net::shutdown(self.socket.get_ref(), Shutdown::Write).map_err(Into::into))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn pair() -> (LocalSocketStream, LocalSocketStream) {
        let (one, other) = tokio::net::UnixStream::pair().unwrap();
        (LocalSocketStream::new(one, Peer::Server).unwrap(), LocalSocketStream::new(other, Peer::Client).unwrap())
    }

    #[tokio::test]
    async fn data_larger_than_the_buffer_arrives_complete_and_ends() {
        let (mut one, mut other) = pair();
        let sent: Vec<u8> = (0..8_000_003u32).map(|i| (i % 251) as u8).collect();
        let (writing, expected) = (sent.clone(), sent);
        let writer = async move {
            one.write_all(&writing).await.unwrap();
            one.shutdown().await.unwrap();
            let mut answer = String::new();
            one.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let reader = async move {
            let mut got = Vec::new();
            other.read_to_end(&mut got).await.unwrap();
            assert!(got == expected, "{} bytes of {}", got.len(), expected.len());
            other.write_all(b"all here").await.unwrap();
        };
        assert_eq!(tokio::join!(writer, reader).0, "all here");
    }

    #[tokio::test]
    async fn a_read_does_not_wake_a_peer_that_waits_for_no_space() {
        let (mut one, mut other) = pair();
        one.write_all(b"a message").await.unwrap();
        assert!(one.writable.is_none());
        let mut byte = [0; 64];
        assert_eq!(other.read(&mut byte).await.unwrap(), 9);
        // Only data from the other end may make the socket readable.
        let woken = tokio::time::timeout(std::time::Duration::ZERO, one.socket.readable()).await;
        assert!(woken.is_err(), "nothing was written");
        other.write_all(b"!").await.unwrap();
        assert_eq!(one.read_u8().await.unwrap(), b'!');
    }

    #[tokio::test]
    async fn the_send_buffer_is_enlarged_only_while_a_file_is_sent() {
        let (mut one, _other) = pair();
        let send_buffer = |stream: &LocalSocketStream| socket_send_buffer_size(stream.socket.get_ref()).unwrap();
        let original = send_buffer(&one);
        let file = std::sync::Arc::new(std::fs::File::open("/proc/self/exe").unwrap().into());
        let piece = one.file_sender().placeholder(file, 0, 10);
        one.write_all(b"a message").await.unwrap();
        assert_eq!(send_buffer(&one), original);
        one.write_all(piece).await.unwrap();
        assert!(send_buffer(&one) > original);
        one.write_all(b"another").await.unwrap();
        assert_eq!(send_buffer(&one), original);
    }

    #[tokio::test]
    async fn writing_to_a_closed_peer_is_an_error_without_a_signal() {
        let (mut one, other) = pair();
        drop(other);
        assert_eq!(one.write_all(b"x").await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(one.read(&mut [0; 8]).await.unwrap(), 0);
    }
}
