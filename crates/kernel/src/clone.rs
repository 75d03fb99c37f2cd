//! Creates processes in new namespaces.

use std::{
    io,
    os::fd::{FromRawFd, OwnedFd},
};

use crate::check;

/// The side of the clone on which the caller finds itself.
pub enum Cloned {
    Child,
    Parent { pid: i32, pidfd: OwnedFd },
}

/// clone3 with the given `CLONE_NEW*` flags; otherwise like fork.
///
/// # Safety
/// The process must have one thread: in a child of a threaded process other threads' locks stay locked for ever,
/// the allocator's included.
pub unsafe fn clone_process(namespaces: libc::c_int) -> io::Result<Cloned> {
    let mut pidfd: libc::c_int = -1;
    // SAFETY: all zeroes is a valid clone_args.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = (namespaces | libc::CLONE_PIDFD) as u64;
    args.pidfd = (&raw mut pidfd) as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    // SAFETY: the structure outlives the call and its size is given; without CLONE_VM the child gets a copy of this stack.
    let pid = check(unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) })?;
    Ok(if pid == 0 {
        Cloned::Child
    } else {
        // SAFETY: the kernel has just made this descriptor for us.
        Cloned::Parent { pid: pid as i32, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } }
    })
}

/// A plain fork: the child's pid in the parent, `None` in the child.
///
/// # Safety
/// As for [`clone_process`]: the process must have only one thread.
pub unsafe fn fork() -> io::Result<Option<i32>> {
    // SAFETY: promised by the caller.
    let pid = check(unsafe { libc::fork() }.into())?;
    Ok((pid != 0).then_some(pid as i32))
}

/// Ends a cloned child without running the parent's exit handlers in it.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: _exit takes any code and doesn't return.
    unsafe { libc::_exit(code) }
}
