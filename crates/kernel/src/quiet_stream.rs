//! A UNIX stream socket that waits for room only when there is none. The kernel wakes whoever waits for room each time the other end reads;
//! tokio's own stream always waits for it, and so is woken once a message for nothing, in the middle of the other end's work.

use std::{
    io::{self, IoSlice},
    os::fd::OwnedFd,
    pin::Pin,
    task::{Context, Poll, ready},
};

use rustix::{
    io::Errno,
    net::{SendFlags, Shutdown},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf, unix::AsyncFd},
    task::coop::poll_proceed,
};

use crate::{Peer, heard, said, watch};

pub struct QuietStream {
    socket: AsyncFd<OwnedFd>,
    /// Who is at the other end.
    peer: Peer,
    /// The same socket, waited on for room; made when it first has none.
    room: Option<AsyncFd<OwnedFd>>,
}

impl QuietStream {
    /// Must be called within a runtime, which the stream belongs to from then on.
    pub fn new(stream: tokio::net::UnixStream, peer: Peer) -> io::Result<Self> {
        Ok(Self { socket: watch(stream.into_std()?.into(), Interest::READABLE)?, peer, room: None })
    }

    fn poll_write_by(&mut self, cx: &mut Context<'_>, write: impl Fn(&OwnedFd) -> rustix::io::Result<usize>) -> Poll<io::Result<usize>> {
        // Who always finds room still lets the thread's other tasks have their turn.
        let turn = ready!(poll_proceed(cx));
        loop {
            match rustix::io::retry_on_intr(|| write(self.socket.get_ref())) {
                Err(Errno::AGAIN) => {}
                done => {
                    turn.made_progress();
                    if let Ok(bytes) = done {
                        said(self.peer, bytes);
                    }
                    return Poll::Ready(done.map_err(Into::into));
                }
            }
            let room = match &mut self.room {
                Some(room) => room,
                none => none.insert(watch(self.socket.get_ref().try_clone()?, Interest::WRITABLE)?),
            };
            // What was known of before the attempt is out of date; what comes after it wakes.
            ready!(room.poll_write_ready(cx))?.clear_ready();
        }
    }
}

impl AsyncRead for QuietStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let wanted = buf.remaining();
        loop {
            let mut ready = ready!(self.socket.poll_read_ready(cx))?;
            // SAFETY: the kernel only writes to it, so that nothing in it becomes uninitialised.
            let spare = unsafe { buf.unfilled_mut() };
            match rustix::io::read(self.socket.get_ref(), spare) {
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
                Ok((read, _)) => {
                    let count = read.len();
                    // SAFETY: the kernel has just written these.
                    unsafe { buf.assume_init(count) };
                    buf.advance(count);
                    heard(self.peer, count);
                    // Less than was asked for is all there was; what comes next is told anew.
                    if 0 < count && count < wanted {
                        ready.clear_ready();
                    }
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for QuietStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().poll_write_by(cx, |socket| rustix::net::send(socket, bytes, SendFlags::NOSIGNAL))
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, parts: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        // Who ignores SIGPIPE, as every Rust program does, may write without saying so again.
        self.get_mut().poll_write_by(cx, |socket| rustix::io::writev(socket, parts))
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

    fn pair() -> (QuietStream, QuietStream) {
        let (one, other) = tokio::net::UnixStream::pair().unwrap();
        (QuietStream::new(one, Peer::Asked).unwrap(), QuietStream::new(other, Peer::Asking).unwrap())
    }

    #[tokio::test]
    async fn what_is_more_than_fits_arrives_whole_and_ends() {
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
    async fn who_reads_wakes_nobody_who_does_not_wait_for_room() {
        let (mut one, mut other) = pair();
        one.write_all(b"a message").await.unwrap();
        assert!(one.room.is_none());
        let mut byte = [0; 64];
        assert_eq!(other.read(&mut byte).await.unwrap(), 9);
        // Only a word of the other end's would be a reason to look.
        let woken = tokio::time::timeout(std::time::Duration::ZERO, one.socket.readable()).await;
        assert!(woken.is_err(), "nothing was said");
        other.write_all(b"!").await.unwrap();
        assert_eq!(one.read_u8().await.unwrap(), b'!');
    }

    #[tokio::test]
    async fn the_other_ends_end_is_an_error_and_no_signal() {
        let (mut one, other) = pair();
        drop(other);
        assert_eq!(one.write_all(b"x").await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(one.read(&mut [0; 8]).await.unwrap(), 0);
    }
}
