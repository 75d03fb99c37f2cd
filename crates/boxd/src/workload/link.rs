//! The words between boxd and the workloads' init, over a socket pair of theirs: one packet a message.

use std::{
    ffi::CString,
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use cobox_kernel::{Image, Program};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

/// What a message may be without what is to be run.
const MAX_HEAD_BYTES: usize = 512;
/// An image up to this goes in the packet; a longer one in a memory file beside it. Most are below 2 KiB.
pub const MAX_INLINE_BYTES: usize = 16 * 1024;
const MAX_PACKET_BYTES: usize = 2 + MAX_HEAD_BYTES + MAX_INLINE_BYTES;
/// A spawn carries at most five: three of standard I/O, the pipe that tells how it went, and a long image.
const MAX_FDS: usize = 5;
/// Arguments and environment together, with a pointer for each; the kernel's own limit is of this order.
pub const MAX_IMAGE_BYTES: usize = 4 * 1024 * 1024;
/// What a string takes beside its bytes: a pointer and a NUL, as the kernel counts it.
pub const STRING_BYTES: usize = size_of::<usize>() + 1;
/// The kernel's own limit of a name in a directory.
const MAX_NAME_BYTES: usize = 255;
/// Where programs are looked for when the environment doesn't say.
const DEFAULT_PATH: &[u8] = b"/usr/bin:/bin";

/// From boxd to init. A program is known by the number of the order that started it, which also marks all it starts in turn.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Start a program. Descriptors: stdin where there is one, stdout, stderr, then `outcome`, then a long image.
    Spawn { seq: u64, is_terminal: bool, has_stdin: bool, has_outcome: bool },
    /// Report a running program's pid. Not done unasked: for a short command it would be one more thing to wake up for.
    TellPid { seq: u64 },
    /// Signal the process group a program leads, while the program runs.
    Signal { seq: u64, signal: i32 },
    /// Signal a program and all it started, wherever it is.
    SignalTree { seq: u64, signal: i32 },
    /// End a program and all it started. The report has this order's own number.
    KillTree { seq: u64, program: u64 },
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
    /// There is no such program: where and why starting it failed.
    NotStarted {
        seq: u64,
        step: u8,
        errno: i32,
    },
    TreeKilled {
        seq: u64,
    },
    Exited {
        seq: u64,
        pid: i32,
        code: i32,
        signal: Option<i32>,
    },
}

pub fn send<T: Serialize>(socket: impl AsFd, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_with(socket, message, &[], fds)
}

/// The same with bytes behind the message.
pub fn send_with<T: Serialize>(socket: impl AsFd, message: &T, tail: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let head = serde_json::to_vec(message)?;
    if head.len() > MAX_HEAD_BYTES || tail.len() > MAX_INLINE_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a message to init is too long"));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    let length = (head.len() as u16).to_le_bytes();
    let parts = [io::IoSlice::new(&length), io::IoSlice::new(&head), io::IoSlice::new(tail)];
    sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// A message as it came.
pub struct Received<T> {
    pub message: T,
    pub tail: Vec<u8>,
    pub fds: Vec<OwnedFd>,
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
    let fds = control
        .drain()
        .flat_map(|m| match m {
            RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
            _ => Vec::new(),
        })
        .collect();
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, "a malformed message");
    let (length, rest) = bytes[..got.bytes].split_first_chunk::<2>().ok_or_else(malformed)?;
    let (head, tail) = rest.split_at_checked(u16::from_le_bytes(*length) as usize).ok_or_else(malformed)?;
    Ok(Some(Received { message: serde_json::from_slice(head)?, tail: tail.to_vec(), fds }))
}

/// What to run: strings without NUL, so NUL ends each.
pub struct ImageSpec {
    pub cwd: Vec<u8>,
    pub argv: Vec<Vec<u8>>,
    /// `NAME=value`.
    pub env: Vec<Vec<u8>>,
}

impl ImageSpec {
    pub fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let strings = || std::iter::once(&self.cwd).chain(&self.argv).chain(&self.env);
        if strings().map(|s| s.len() + STRING_BYTES).sum::<usize>() > MAX_IMAGE_BYTES {
            return Err(io::Error::from_raw_os_error(libc::E2BIG));
        }
        let mut bytes = Vec::with_capacity(1024);
        for count in [self.argv.len(), self.env.len()] {
            bytes.extend_from_slice(&(count as u32).to_le_bytes());
        }
        for s in strings() {
            if s.contains(&0) {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "a NUL byte can't be in a command, its directory or its environment",
                ));
            }
            bytes.extend_from_slice(s);
            bytes.push(0);
        }
        Ok(bytes)
    }
}

/// The same as init uses it.
pub struct Unpacked {
    pub cwd: CString,
    pub program: Program,
    pub image: Image,
}

impl Unpacked {
    pub fn from_bytes(bytes: Vec<u8>) -> io::Result<Self> {
        let bad = || io::Error::new(io::ErrorKind::InvalidData, "a malformed image");
        let count = |at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes).ok_or_else(bad);
        let (argc, envc) = (count(0)? as usize, count(4)? as usize);
        let mut strings = bytes[8..].split(|b| *b == 0);
        let cwd = CString::new(strings.next().ok_or_else(bad)?)?;
        let program = strings.next().filter(|_| argc > 0).ok_or_else(bad)?;
        let program = match program.contains(&b'/') {
            true => Program::At(CString::new(program)?),
            false if program.len() > MAX_NAME_BYTES => return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG)),
            false => {
                let path = strings.skip(argc - 1).take(envc).find_map(|variable| variable.strip_prefix(b"PATH="));
                Program::Along { name: program.to_vec(), path: path.unwrap_or(DEFAULT_PATH).to_vec() }
            }
        };
        let start = 8 + cwd.count_bytes() + 1;
        let image = Image::from_block(bytes, start, argc, envc).ok_or_else(bad)?;
        Ok(Self { cwd, program, image })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(argv: &[&[u8]], env: &[&[u8]]) -> ImageSpec {
        let owned = |list: &[&[u8]]| list.iter().map(|s| s.to_vec()).collect();
        ImageSpec { cwd: b"/w".to_vec(), argv: owned(argv), env: owned(env) }
    }

    #[test]
    fn an_image_comes_back_as_it_was() {
        let bytes = spec(&[b"sh", b"", &[0xff]], &[b"A=\n", b"PATH=/a:/b"]).to_bytes().unwrap();
        let unpacked = Unpacked::from_bytes(bytes.clone()).unwrap();
        assert_eq!(unpacked.cwd.as_bytes(), b"/w");
        assert!(matches!(unpacked.program, Program::Along { name, path } if name == b"sh" && path == b"/a:/b"));
        for cut in 0..bytes.len() {
            assert!(Unpacked::from_bytes(bytes[..cut].to_vec()).is_err());
        }
    }

    #[test]
    fn a_path_among_the_arguments_is_not_the_environments() {
        let unpacked = Unpacked::from_bytes(spec(&[b"sh", b"PATH=/arguments"], &[b"A=b"]).to_bytes().unwrap()).unwrap();
        assert!(matches!(unpacked.program, Program::Along { path, .. } if path == DEFAULT_PATH));
    }

    #[test]
    fn strings_count_with_what_points_to_them() {
        let empty = vec![&b""[..]; MAX_IMAGE_BYTES / STRING_BYTES + 1];
        let refused = spec(&empty, &[]).to_bytes().unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::E2BIG));
        assert!(spec(&empty[..empty.len() - 100], &[]).to_bytes().is_ok());
    }

    #[test]
    fn a_name_longer_than_any_is_not_looked_for() {
        let name = [b'x'; MAX_NAME_BYTES + 1];
        let refused = Unpacked::from_bytes(spec(&[&name], &[]).to_bytes().unwrap()).err().unwrap();
        assert_eq!(refused.raw_os_error(), Some(libc::ENAMETOOLONG));
    }
}
