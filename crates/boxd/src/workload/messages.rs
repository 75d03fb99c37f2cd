//! Messages between boxd and the two processes that serve it in the workload namespaces, the spawner and init. Each has
//! a socket pair, with one packet per message.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

/// A message contains a few numbers or an error text.
const MAX_PACKET_BYTES: usize = 512;
/// Descriptors received with a message: the socket of a standby process.
const MAX_FDS: usize = 1;
/// Descriptors sent to a standby process: standard I/O and a memory file.
const MAX_SENT_FDS: usize = 4;

/// An order from boxd. Orders whose completion boxd waits for have a sequence number, which `Report::Completed` repeats.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// To the spawner: create another standby process.
    CreateStandby,
    /// To the spawner and to init: forbid all programs to enlarge files, or allow it again.
    StopWriters { seq: u64, stop: bool },
    /// To init: signal a process group.
    Signal { seq: u64, group: i32, signal: i32 },
    /// To init: signal a program and all its descendants, including those that have left its session.
    SignalTree { seq: u64, program: ProgramRef, signal: i32 },
    /// To init: end a program and all its descendants.
    KillTree { seq: u64, program: ProgramRef },
    /// To init: programs are running, so check their memory use.
    WatchMemory,
}

/// A program and its descendants.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProgramRef {
    /// The mark that all of them carry, where marks are available.
    pub mark: u64,
    /// Pid of the program itself, until it is reaped.
    pub pid: Option<i32>,
}

/// A report to boxd.
#[derive(Debug, Serialize, Deserialize)]
pub enum Report {
    /// From init: the namespaces exist, and the user namespace needs its id maps.
    Unshared,
    /// The sender accepts orders.
    Ready,
    /// Setup failed.
    Failed { what: String },
    /// From the spawner: a new standby process, whose socket is attached. `pid` is its pid for boxd, `sandbox_pid` its pid
    /// in the sandbox.
    StandbyCreated { pid: i32, sandbox_pid: i32 },
    /// From the spawner: creating a standby process failed.
    StandbyFailed { errno: i32 },
    /// An order was carried out.
    Completed { seq: u64 },
}

pub fn send<T: Serialize>(socket: impl AsFd, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MAX_PACKET_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a message is too long"));
    }
    send_packet(socket, &bytes, fds, SendFlags::empty())
}

/// Sends bytes without encoding them.
pub fn send_packet(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SENT_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    sendmsg(socket, &[io::IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL)?;
    Ok(())
}

/// A received message with its descriptor.
pub struct ReceivedMessage<T> {
    pub message: T,
    pub fd: Option<OwnedFd>,
}

/// The next message; `None` if the other side has exited.
pub fn receive<T: for<'de> Deserialize<'de>>(socket: impl AsFd) -> io::Result<Option<ReceivedMessage<T>>> {
    let mut bytes = [0u8; MAX_PACKET_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        rustix::io::retry_on_intr(|| recvmsg(&socket, &mut [io::IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC))?;
    if received.bytes == 0 {
        return Ok(None);
    }
    let fd = control.drain().find_map(|m| match m {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok(Some(ReceivedMessage { message: serde_json::from_slice(&bytes[..received.bytes])?, fd }))
}
