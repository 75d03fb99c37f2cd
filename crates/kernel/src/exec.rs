//! Replacing the running program, and which descriptors it keeps.

use std::{
    ffi::CStr,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
};

use crate::check;

/// Arguments and environment laid out as execve wants them, made before a fork so that the child allocates nothing.
pub struct Image {
    /// What the pointers point into; it is never changed.
    _strings: Vec<u8>,
    argv_pointers: Vec<*const libc::c_char>,
    env_pointers: Vec<*const libc::c_char>,
}

impl Image {
    pub fn new(argv: &[&CStr], env: &[&CStr]) -> Self {
        let strings: Vec<u8> = argv.iter().chain(env).flat_map(|s| s.to_bytes_with_nul()).copied().collect();
        let mut each = strings.split_inclusive(|byte| *byte == 0).map(|s| s.as_ptr().cast());
        let mut pointers = |count| each.by_ref().take(count).chain([std::ptr::null()]).collect();
        let (argv_pointers, env_pointers) = (pointers(argv.len()), pointers(env.len()));
        Self { argv_pointers, env_pointers, _strings: strings }
    }
}

/// Runs the program behind a descriptor. Returns only when that failed.
pub fn exec_fd(program: BorrowedFd<'_>, image: &Image) -> io::Error {
    // SAFETY: the pointers are to NUL-terminated strings owned by `image`, each list ends with a null.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            program.as_raw_fd(),
            c"".as_ptr(),
            image.argv_pointers.as_ptr(),
            image.env_pointers.as_ptr(),
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
    // SAFETY: the caller answers for who owned them.
    check(unsafe { libc::syscall(libc::SYS_close_range, first as libc::c_uint, libc::c_uint::MAX, 0) }).map(drop)
}

/// Puts these descriptors at 0, 1, 2 … in their order, inheritable, and closes all others.
///
/// # Safety
/// Every descriptor of the process but the listed ones is closed: nothing may use one afterwards.
pub unsafe fn keep_only(fds: Vec<OwnedFd>) -> io::Result<()> {
    let count = fds.len() as RawFd;
    // First out of the way of the targets, so that no dup overwrites one still to be placed.
    let mut moved = Vec::with_capacity(fds.len());
    for fd in fds {
        // SAFETY: F_DUPFD_CLOEXEC on a descriptor we own makes a new one.
        moved.push(check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, count + 64) }.into())? as RawFd);
        // The copies outlive this: every original is closed below by its number.
        let _ = fd.into_raw_fd();
    }
    for (target, fd) in moved.iter().enumerate() {
        // SAFETY: dup2 onto a low number; whoever held that number is closed by the caller's promise.
        check(unsafe { libc::dup2(*fd, target as RawFd) }.into())?;
    }
    // SAFETY: as promised by the caller.
    unsafe { close_from(count) }
}

/// Takes ownership of an inherited descriptor. Fails when there is none of that number.
///
/// # Safety
/// Nobody else in the process may own that number.
pub unsafe fn adopt(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_SETFD fails with EBADF on a closed number and changes nothing but close-on-exec.
    check(unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) }.into())?;
    // SAFETY: open, and the caller's alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
