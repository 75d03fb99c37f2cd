//! Signals of a process that starts others.

use std::{
    io,
    os::fd::{FromRawFd, OwnedFd},
};

use crate::{check, raw::syscall};

/// The kernel's own, which the C library doesn't tell.
const LAST_SIGNAL: i32 = 64;

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

/// By the kernel's own call: the C library keeps two numbers for itself, which may be ignored like any other.
fn set_action(number: i32, action: libc::sighandler_t) {
    // As the kernel has it: the action first, then flags, the restorer and the mask, all of them none.
    let action = [action, 0, 0, 0];
    let args = [number as usize, std::ptr::from_ref(&action) as usize, 0, size_of::<u64>(), 0, 0];
    // SAFETY: the structure outlives the call, which only reads it. Two numbers can't be set, which is refused and changes nothing.
    unsafe { syscall(libc::SYS_rt_sigaction, args) };
}
