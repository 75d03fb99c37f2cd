//! Sends signals through a terminal.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

use crate::check;

/// Sends SIGINT, SIGQUIT or SIGTSTP to the foreground process group of a terminal, through its master. That is what
/// Ctrl-C does, but it also works while the terminal is in raw mode. The kernel accepts no other signals here.
pub fn interrupt_foreground(master: impl AsFd, signal: i32) -> io::Result<()> {
    // SAFETY: TIOCSIG takes an integer by value and accesses no memory of this process.
    check(unsafe { libc::ioctl(master.as_fd().as_raw_fd(), libc::TIOCSIG, signal) }.into()).map(|_| ())
}
