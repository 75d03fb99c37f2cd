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
    Peer, heard,
    outgoing::{Outgoing, is_stand_in},
    said, watch,
};

/// What may be under way of files' bytes, or as much as the machine allows: while a processor wakes up the other end reads on, and it must
/// not run dry. They are pages that the kernel has anyway, so that it costs next to nothing.
const FILE_ROOM_BYTES: usize = 512 * 1024;

pub struct QuietStream {
    socket: AsyncFd<OwnedFd>,
    /// Who is at the other end.
    peer: Peer,
    /// The same socket, waited on for room; made when it first has none.
    room: Option<AsyncFd<OwnedFd>>,
    outgoing: Outgoing,
    /// What may be under way of other bytes, while it is a file's.
    narrow: Option<usize>,
}

impl QuietStream {
    /// Must be called within a runtime, which the stream belongs to from then on.
    pub fn new(stream: tokio::net::UnixStream, peer: Peer) -> io::Result<Self> {
        Ok(Self {
            socket: watch(stream.into_std()?.into(), Interest::READABLE)?,
            peer,
            room: None,
            outgoing: Outgoing::default(),
            narrow: None,
        })
    }

    /// Whose bytes may stand for a file's.
    pub fn outgoing(&self) -> Outgoing {
        self.outgoing.clone()
    }

    /// Widens the socket's room for a file, and takes it back for what is copied: a client that doesn't read must not hold more of that.
    fn make_room(&mut self, is_for_file: bool) {
        if is_for_file == self.narrow.is_some() {
            return;
        }
        let socket = self.socket.get_ref();
        // With another room it only goes faster or slower.
        match self.narrow.take() {
            // The kernel takes twice what it is told, for its own needs, and tells all of it.
            Some(narrow) => _ = set_socket_send_buffer_size(socket, narrow / 2),
            None => {
                self.narrow = Some(socket_send_buffer_size(socket).unwrap_or(FILE_ROOM_BYTES));
                let _ = set_socket_send_buffer_size(socket, FILE_ROOM_BYTES);
            }
        }
    }

    fn poll_write_by(&mut self, cx: &mut Context<'_>, write: impl Fn(&OwnedFd, &Outgoing) -> io::Result<usize>) -> Poll<io::Result<usize>> {
        // Who always finds room still lets the thread's other tasks have their turn.
        let turn = ready!(poll_proceed(cx));
        loop {
            match write(self.socket.get_ref(), &self.outgoing) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                done => {
                    turn.made_progress();
                    if let Ok(bytes) = done {
                        said(self.peer, bytes);
                    }
                    return Poll::Ready(done);
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
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, parts: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let parts = &parts[parts.iter().take_while(|part| part.is_empty()).count()..];
        let first = parts.iter().position(|part| is_stand_in(part));
        this.make_room(first == Some(0));
        // Who ignores SIGPIPE, as every Rust program does, may write without saying so again.
        this.poll_write_by(cx, |socket, outgoing| match first {
            Some(0) => outgoing.send(socket, &parts[0]),
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
    async fn there_is_more_room_for_a_file_and_none_of_it_for_what_is_copied() {
        let (mut one, _other) = pair();
        let room = |stream: &QuietStream| socket_send_buffer_size(stream.socket.get_ref()).unwrap();
        let narrow = room(&one);
        let file = std::sync::Arc::new(std::fs::File::open("/proc/self/exe").unwrap().into());
        let piece = one.outgoing().stand_in(file, 0, 10);
        one.write_all(b"a message").await.unwrap();
        assert_eq!(room(&one), narrow);
        one.write_all(piece).await.unwrap();
        assert!(room(&one) > narrow);
        one.write_all(b"another").await.unwrap();
        assert_eq!(room(&one), narrow);
    }

    #[tokio::test]
    async fn the_other_ends_end_is_an_error_and_no_signal() {
        let (mut one, other) = pair();
        drop(other);
        assert_eq!(one.write_all(b"x").await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(one.read(&mut [0; 8]).await.unwrap(), 0);
    }
}
