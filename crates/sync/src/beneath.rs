//! Opens files and directories within the synced folder by descriptor. The kernel keeps every path beneath the root and
//! follows no links.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::{
    fs::{AtFlags, Mode, OFlags, ResolveFlags, Stat},
    io::Errno,
};

/// Number of attempts when a concurrent rename disturbs path resolution (the kernel reports EAGAIN).
const MAX_RESOLVE_ATTEMPTS: usize = 64;

pub fn open_beneath(root: impl AsFd, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { b"." } else { path };
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
    for _ in 0..MAX_RESOLVE_ATTEMPTS {
        match rustix::fs::openat2(&root, path, flags | OFlags::CLOEXEC, Mode::empty(), how) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
    Err(Errno::BUSY)
}

/// Opens a directory as the parent for other calls.
pub fn open_directory(root: impl AsFd, path: &[u8]) -> Result<OwnedFd, Errno> {
    open_beneath(root, path, OFlags::PATH | OFlags::DIRECTORY)
}

/// Opens a regular file for reading, without blocking if the name turns out to be a pipe.
pub fn open_file(root: impl AsFd, path: &[u8]) -> Result<OwnedFd, Errno> {
    open_beneath(root, path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)
}

/// Whether a name in a directory still refers to this open file.
pub fn is_same_file(open: impl AsFd, directory: impl AsFd, name: &[u8]) -> bool {
    match (rustix::fs::fstat(open), stat(directory.as_fd(), name)) {
        (Ok(open), Ok(Some(named))) => (open.st_dev, open.st_ino) == (named.st_dev, named.st_ino),
        _ => false,
    }
}

/// Status of a name, without following links.
pub fn stat(directory: BorrowedFd, name: &[u8]) -> Result<Option<Stat>, Errno> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e),
    }
}
