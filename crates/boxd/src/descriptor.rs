//! Reads and writes the non-blocking descriptors of programs without occupying a thread.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::io::Errno;
use tokio::io::{Interest, unix::AsyncFd};

/// One end of a pipe or a terminal.
pub struct Descriptor(AsyncFd<OwnedFd>);

impl Descriptor {
    pub fn new(fd: OwnedFd, interest: Interest) -> io::Result<Self> {
        Ok(Self(cobox_kernel::register_fd(fd, interest)?))
    }

    /// Waits for data and reads it; 0 means end-of-file.
    pub async fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.async_io(Interest::READABLE, |fd| read_now(fd, buf)).await
    }

    /// Reads available data without waiting; `WouldBlock` if there is none.
    pub fn try_read(&self, buf: &mut [u8]) -> io::Result<usize> {
        read_now(self.0.get_ref(), buf)
    }

    /// Waits until it can write, and returns the number of bytes written.
    pub async fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.0.async_io(Interest::WRITABLE, |fd| Ok(rustix::io::retry_on_intr(|| rustix::io::write(fd, bytes))?)).await
    }
}

impl Descriptor {
    /// Writes without waiting; `WouldBlock` if nothing can be written.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| rustix::io::write(self.0.get_ref(), bytes))?)
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}

/// Reads available data without waiting; `WouldBlock` if there is none.
pub fn read_now(fd: impl AsFd, buf: &mut [u8]) -> io::Result<usize> {
    match rustix::io::retry_on_intr(|| rustix::io::read(&fd, &mut *buf)) {
        // A terminal that no program has open any more returns an error instead of end-of-file.
        Err(Errno::IO) => Ok(0),
        other => Ok(other?),
    }
}
