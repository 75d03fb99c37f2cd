//! The words between boxd and the two that serve it in the workloads' namespaces, the starter and init: a socket pair each, one packet
//! a message.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

/// A message is a few numbers, or why something failed.
const MAX_PACKET_BYTES: usize = 512;
/// Of a message: a waiting process's socket.
const MAX_FDS: usize = 1;
/// Of what a waiting process is sent: standard I/O, and a memory file.
const MAX_SENT_FDS: usize = 4;

/// From boxd. Those whose end is waited for have a number of their own, which the report that it was obeyed has too.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// To the starter: make one more process that waits to become a program.
    Spare,
    /// To the starter and to init: forbid (or allow again) every program to make a file larger.
    StopWriters { seq: u64, stop: bool },
    /// To init: signal a process group.
    Signal { seq: u64, group: i32, signal: i32 },
    /// To init: signal a program and all it started, wherever it is.
    SignalTree { seq: u64, program: Root, signal: i32 },
    /// To init: end a program and all it started.
    KillTree { seq: u64, program: Root },
    /// To init: programs run, whose memory is to be watched.
    Watch,
}

/// A program and what it started.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Root {
    /// What all of it carries, where there are marks.
    pub mark: u64,
    /// The program itself, while it has not been let go of.
    pub pid: Option<i32>,
}

/// To boxd.
#[derive(Debug, Serialize, Deserialize)]
pub enum Report {
    /// From init: the namespaces stand; the user namespace waits for its id maps.
    Unshared,
    /// Orders are taken.
    Ready,
    /// Setting up failed.
    Failed { what: String },
    /// From the starter: a process waits at the other end of the socket that comes with this. Its number here, and in the sandbox.
    Spare { pid: i32, number: i32 },
    /// From the starter: one could not be made.
    NoSpare { errno: i32 },
    /// An order was obeyed.
    Obeyed { seq: u64 },
}

pub fn send<T: Serialize>(socket: impl AsFd, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MAX_PACKET_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a message is too long"));
    }
    send_packet(socket, &bytes, fds, SendFlags::empty())
}

/// Bytes as they are.
pub fn send_packet(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SENT_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    sendmsg(socket, &[io::IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL)?;
    Ok(())
}

/// A message as it came.
pub struct Received<T> {
    pub message: T,
    pub fd: Option<OwnedFd>,
}

/// The next message; `None` when the other side is gone.
pub fn receive<T: for<'de> Deserialize<'de>>(socket: impl AsFd) -> io::Result<Option<Received<T>>> {
    let mut bytes = [0u8; MAX_PACKET_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got =
        rustix::io::retry_on_intr(|| recvmsg(&socket, &mut [io::IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC))?;
    if got.bytes == 0 {
        return Ok(None);
    }
    let fd = control.drain().find_map(|m| match m {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok(Some(Received { message: serde_json::from_slice(&bytes[..got.bytes])?, fd }))
}
