//! The words between boxd and the workloads' init, over a socket pair of theirs: one packet a message.

use std::{
    io::{self, Read, Write},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

/// Packets are small: what can be long (arguments, environment) goes in a memory file beside them.
const MAX_PACKET_BYTES: usize = 512;
/// A spawn carries five: the image, three of standard I/O, and the pipe that tells how it went.
const MAX_FDS: usize = 5;
/// Arguments and environment together; the kernel's own limit is of this order.
pub const MAX_IMAGE_BYTES: usize = 4 * 1024 * 1024;

/// From boxd to init.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Start a program. Descriptors: image, stdin, stdout, stderr, outcome.
    Spawn { seq: u64, is_terminal: bool },
    /// Signal the process group a program leads.
    Signal { pid: i32, signal: i32 },
    /// End a program and all it started.
    KillTree { seq: u64, pid: i32 },
    /// Forbid (or allow again) every program to make a file larger.
    StopWriters { stop: bool },
}

/// From init to boxd.
#[derive(Debug, Serialize, Deserialize)]
pub enum Report {
    /// The namespaces stand; the user namespace waits for its id maps.
    Unshared,
    /// Init takes orders.
    Ready,
    /// Setting up failed.
    Failed {
        what: String,
    },
    Spawned {
        seq: u64,
        pid: i32,
    },
    NotSpawned {
        seq: u64,
        errno: i32,
    },
    TreeKilled {
        seq: u64,
    },
    Exited {
        pid: i32,
        code: i32,
        signal: Option<i32>,
    },
}

/// Where starting a program failed, as written to the outcome pipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    Setup = 0,
    WorkingDirectory = 1,
    Program = 2,
}

pub fn send<T: Serialize>(socket: impl AsFd, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MAX_PACKET_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a message to init is too long"));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    sendmsg(socket, &[io::IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The next message and its descriptors; `None` when the other side is gone.
pub fn receive<T: for<'de> Deserialize<'de>>(socket: impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = [0u8; MAX_PACKET_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got =
        rustix::io::retry_on_intr(|| recvmsg(&socket, &mut [io::IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC))?;
    if got.bytes == 0 {
        return Ok(None);
    }
    let fds = control
        .drain()
        .flat_map(|m| match m {
            RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
            _ => Vec::new(),
        })
        .collect();
    Ok(Some((serde_json::from_slice(&bytes[..got.bytes])?, fds)))
}

/// What to run: strings without NUL, so NUL ends each.
#[derive(Debug, PartialEq, Eq)]
pub struct ImageSpec {
    pub cwd: Vec<u8>,
    pub argv: Vec<Vec<u8>>,
    /// `NAME=value`.
    pub env: Vec<Vec<u8>>,
}

impl ImageSpec {
    pub fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        let mut bytes = Vec::new();
        for count in [self.argv.len(), self.env.len()] {
            bytes.extend_from_slice(&(count as u32).to_le_bytes());
        }
        for s in std::iter::once(&self.cwd).chain(&self.argv).chain(&self.env) {
            if s.contains(&0) {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "a NUL byte can't be in a command, its directory or its environment",
                ));
            }
            bytes.extend_from_slice(s);
            bytes.push(0);
        }
        if bytes.len() > MAX_IMAGE_BYTES {
            return Err(io::Error::from_raw_os_error(rustix::io::Errno::TOOBIG.raw_os_error()));
        }
        out.write_all(&bytes)
    }

    pub fn read_from(input: &mut impl Read) -> io::Result<Self> {
        let mut bytes = Vec::new();
        input.take(MAX_IMAGE_BYTES as u64 + 1).read_to_end(&mut bytes)?;
        let bad = || io::Error::new(io::ErrorKind::InvalidData, "a malformed image");
        let count = |at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes).ok_or_else(bad);
        let (argc, envc) = (count(0)? as usize, count(4)? as usize);
        let mut strings = bytes[8..].split(|b| *b == 0).map(<[u8]>::to_vec);
        let cwd = strings.next().ok_or_else(bad)?;
        let argv: Vec<_> = strings.by_ref().take(argc).collect();
        let env: Vec<_> = strings.by_ref().take(envc).collect();
        if argv.len() != argc || env.len() != envc || argc == 0 {
            return Err(bad());
        }
        Ok(Self { cwd, argv, env })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_comes_back_as_it_was() {
        let image = ImageSpec { cwd: b"/w".to_vec(), argv: vec![b"sh".to_vec(), b"".to_vec(), vec![0xff]], env: vec![b"A=\n".to_vec()] };
        let mut bytes = Vec::new();
        image.write_to(&mut bytes).unwrap();
        assert_eq!(ImageSpec::read_from(&mut bytes.as_slice()).unwrap(), image);
        for cut in 0..bytes.len() {
            // Cut short it may be refused or read as fewer bytes of the last string, but never panics.
            let _ = ImageSpec::read_from(&mut &bytes[..cut]);
        }
    }
}
