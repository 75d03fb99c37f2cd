//! Signal handling of processes that start other processes.

use std::{
    io,
    os::fd::{FromRawFd, OwnedFd},
};

use crate::{check, raw_syscall::syscall};

/// The kernel's highest signal number, which the C library doesn't export.
const LAST_SIGNAL: i32 = 64;

/// Blocks SIGCHLD and returns a descriptor that becomes readable when a child has ended.
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

/// Blocks every signal that can be blocked, here and in all processes started from here, until they unblock them. All
/// signals get their default actions, even those that the parent process ignored. The exception is SIGXFSZ, which is
/// ignored: a write past the file size limit should fail, as on a full disk, and not end the program.
pub fn reset_signals() {
    // SAFETY: a full set is valid.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut set);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
    for number in 1..=LAST_SIGNAL {
        set_action(number, libc::SIG_DFL);
    }
    set_action(libc::SIGXFSZ, libc::SIG_IGN);
}

/// Uses the system call, because the C library reserves two signals for itself and refuses to change them. A parent may
/// have ignored these too.
fn set_action(number: i32, action: libc::sighandler_t) {
    // The kernel's layout: the action, then flags, restorer and mask, all of them empty.
    let action = [action, 0, 0, 0];
    let args = [number as usize, std::ptr::from_ref(&action) as usize, 0, size_of::<u64>(), 0, 0];
    // SAFETY: the structure outlives the call, which only reads it. SIGKILL and SIGSTOP can't be changed: the call
    // fails for them and changes nothing.
    unsafe { syscall(libc::SYS_rt_sigaction, args) };
}
