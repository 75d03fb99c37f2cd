//! Signals through a terminal.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

use crate::check;

/// Sends SIGINT, SIGQUIT or SIGTSTP to whatever runs in the foreground of a terminal, by its master: what Ctrl-C does, also where the
/// terminal is raw. The kernel takes no other signals this way.
pub fn interrupt_foreground(master: impl AsFd, signal: i32) -> io::Result<()> {
    // SAFETY: TIOCSIG takes an integer by value and touches no memory of ours.
    check(unsafe { libc::ioctl(master.as_fd().as_raw_fd(), libc::TIOCSIG, signal) }.into()).map(|_| ())
}
