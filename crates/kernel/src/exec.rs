//! Replaces the running program, and controls which descriptors the new one inherits.

use std::{
    ffi::CStr,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
};

use crate::check;

/// Arguments and environment in the form that execve takes. They are prepared before a fork, so that the child
/// allocates nothing.
pub struct ExecArgs {
    /// The memory that the pointers refer to. It is never changed.
    _strings: Vec<u8>,
    argv_pointers: Vec<*const libc::c_char>,
    env_pointers: Vec<*const libc::c_char>,
}

impl ExecArgs {
    pub fn new(argv: &[&CStr], env: &[&CStr]) -> Self {
        let strings: Vec<u8> = argv.iter().chain(env).flat_map(|s| s.to_bytes_with_nul()).copied().collect();
        let mut each = strings.split_inclusive(|byte| *byte == 0).map(|s| s.as_ptr().cast());
        let mut pointers = |count| each.by_ref().take(count).chain([std::ptr::null()]).collect();
        let (argv_pointers, env_pointers) = (pointers(argv.len()), pointers(env.len()));
        Self { argv_pointers, env_pointers, _strings: strings }
    }
}

/// Executes the program behind a descriptor. Returns only on failure.
pub fn exec_fd(program: BorrowedFd<'_>, args: &ExecArgs) -> io::Error {
    // SAFETY: the pointers refer to NUL-terminated strings owned by `args`, and each list ends with a null.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            program.as_raw_fd(),
            c"".as_ptr(),
            args.argv_pointers.as_ptr(),
            args.env_pointers.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
    }
    io::Error::last_os_error()
}

/// Closes every descriptor from `first` on.
///
/// # Safety
/// Nothing may use a descriptor from `first` on afterwards.
pub unsafe fn close_from(first: RawFd) -> io::Result<()> {
    // SAFETY: the caller promises that these descriptors are no longer used.
    check(unsafe { libc::syscall(libc::SYS_close_range, first as libc::c_uint, libc::c_uint::MAX, 0) }).map(drop)
}

/// Moves these descriptors to 0, 1, 2 … in their order, makes them inheritable, and closes all others.
///
/// # Safety
/// Every other descriptor of the process is closed: no code may use one afterwards.
pub unsafe fn keep_only(fds: Vec<OwnedFd>) -> io::Result<()> {
    let count = fds.len() as RawFd;
    // First move all out of the way of the targets, so that no dup2 overwrites a descriptor that is still to be moved.
    let mut moved = Vec::with_capacity(fds.len());
    for fd in fds {
        // SAFETY: F_DUPFD_CLOEXEC on a descriptor we own makes a new one.
        moved.push(check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, count + 64) }.into())? as RawFd);
        // The originals must not be dropped: they are closed below by their numbers.
        let _ = fd.into_raw_fd();
    }
    for (target, fd) in moved.iter().enumerate() {
        // SAFETY: dup2 onto a low number. The caller promises that no code uses the descriptor that had it.
        check(unsafe { libc::dup2(*fd, target as RawFd) }.into())?;
    }
    // SAFETY: as promised by the caller.
    unsafe { close_from(count) }
}

/// Takes ownership of an inherited descriptor. Fails if no descriptor has this number.
///
/// # Safety
/// No other code in the process may own this number.
pub unsafe fn adopt(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_SETFD fails with EBADF on a closed number and changes nothing but close-on-exec.
    check(unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) }.into())?;
    // SAFETY: the descriptor is open, and only the caller owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
