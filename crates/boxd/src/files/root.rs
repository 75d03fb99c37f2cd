//! The sandbox's root directory. The kernel resolves every client path beneath it, and only regular files are served.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::{
    fs::{FileType, Mode, OFlags, ResolveFlags, Stat},
    io::Errno,
};

/// Maximum number of attempts to resolve a path. The kernel returns EAGAIN if a directory was renamed in the meantime.
const RESOLVE_TRIES: usize = 64;
/// File systems that expose kernel state instead of stored data: /proc, /sys, control groups, debugging, firmware
/// variables.
const KERNEL_FILE_SYSTEMS: [i64; 10] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x27_e0eb,   // cgroup
    0x6367_7270, // cgroup2
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0xcafe_4a11, // bpf
    0xde5e_81e4, // efivarfs
    0x1980_0202, // mqueue
];

pub struct Root {
    directory: OwnedFd,
    links: SymbolicLinks,
}

/// Whether a path may go through symbolic links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SymbolicLinks {
    Follow,
    Refuse,
}

impl AsFd for Root {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

impl Root {
    pub fn new(root: OwnedFd) -> Self {
        Self { directory: root, links: SymbolicLinks::Follow }
    }

    /// The same directory, but the kernel refuses paths that go through a link when it opens them. A check before
    /// opening would be a race: a program could replace the file by a link.
    pub fn refusing_links(&self) -> Result<Self, Errno> {
        let directory = rustix::io::fcntl_dupfd_cloexec(&self.directory, 0)?;
        Ok(Self { directory, links: SymbolicLinks::Refuse })
    }

    pub fn refuses_links(&self) -> bool {
        self.links == SymbolicLinks::Refuse
    }

    /// Opens a path as if this directory were `/`: `..` and links stay within it, and the kernel's magic links are
    /// refused.
    pub fn open(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        let links = if self.refuses_links() { ResolveFlags::NO_SYMLINKS } else { ResolveFlags::empty() };
        resolve(&self.directory, path, flags, ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | links)
    }

    /// Opens a directory for operations on names in it.
    pub fn open_directory(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        let fd = self.open(path, OFlags::PATH | OFlags::DIRECTORY)?;
        refuse_kernel_files(&fd)?;
        Ok(fd)
    }

    /// Metadata of what a path leads to, without opening it.
    pub fn stat(&self, path: &[u8]) -> Result<Stat, Errno> {
        let fd = self.open(path, OFlags::PATH)?;
        refuse_kernel_files(&fd)?;
        rustix::fs::fstat(&fd)
    }

    /// Opens a regular file for reading. Its type is checked before opening, because opening can have side effects, and
    /// again after.
    pub fn open_regular(&self, path: &[u8]) -> Result<Result<(OwnedFd, Stat), FileType>, Errno> {
        let before = self.stat(path)?;
        if kind(&before) != FileType::RegularFile {
            return Ok(Err(kind(&before)));
        }
        // Without blocking: it may have become a fifo in the meantime.
        let fd = self.open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
        refuse_kernel_files(&fd)?;
        let stat = rustix::fs::fstat(&fd)?;
        match kind(&stat) {
            FileType::RegularFile => Ok(Ok((fd, stat))),
            other => Ok(Err(other)),
        }
    }
}

/// Opens a path beneath a directory. A path that leaves the directory or goes through any link is refused.
pub fn open_beneath(directory: impl AsFd, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve_flags = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    resolve(directory, path, flags, resolve_flags)
}

fn resolve(directory: impl AsFd, path: &[u8], flags: OFlags, resolve_flags: ResolveFlags) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { b"." } else { path };
    for _ in 0..RESOLVE_TRIES {
        match rustix::fs::openat2(&directory, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve_flags) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
    Err(Errno::BUSY)
}

pub fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// EPERM if a descriptor is on a file system that the files API never touches.
pub fn refuse_kernel_files(fd: impl AsFd) -> Result<(), Errno> {
    #[allow(clippy::unnecessary_cast, reason = "the field is 32 bits wide on some machines")]
    let kind = rustix::fs::fstatfs(fd)?.f_type as i64;
    if KERNEL_FILE_SYSTEMS.contains(&kind) { Err(Errno::PERM) } else { Ok(()) }
}
