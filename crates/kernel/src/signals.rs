//! Signals of a process that starts others.

use std::{
    io,
    os::fd::{FromRawFd, OwnedFd},
};

use crate::check;

/// Blocks SIGCHLD and gives a descriptor that becomes readable when a child has ended.
pub fn child_events() -> io::Result<OwnedFd> {
    // SAFETY: the set is filled by sigemptyset and sigaddset before it is used.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGCHLD);
        check(libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()).into())?;
        let fd = check(libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK).into())?;
        Ok(OwnedFd::from_raw_fd(fd as i32))
    }
}

/// Blocks every signal that can be, here and in what is started from here, until that unblocks them. All get their default actions,
/// whatever whoever started us ignored; but for SIGXFSZ: a write past the limit of a file's size is to fail, as one to a full disk does,
/// and not to end the program.
pub fn settle_signals() {
    // SAFETY: a full set, the default action and none are valid; numbers that can't be set are refused, which changes nothing.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut set);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        for number in 1..=libc::SIGRTMAX() {
            libc::signal(number, libc::SIG_DFL);
        }
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}
