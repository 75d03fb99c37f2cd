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
        let strings = argv.iter().chain(env).flat_map(|s| s.to_bytes_with_nul()).copied().collect();
        Self::from_block(strings, 0, argv.len(), env.len()).unwrap_or_else(|| unreachable!("as many strings as were counted"))
    }

    /// From strings one behind the other, each ended by a NUL: the arguments from `start` on, then the environment. `None` where there
    /// are fewer. In one piece, so that a million strings cost no more than their bytes and pointers.
    pub fn from_block(strings: Vec<u8>, start: usize, argc: usize, envc: usize) -> Option<Self> {
        let mut ended = strings.get(start..)?.split_inclusive(|byte| *byte == 0).take_while(|s| s.ends_with(&[0]));
        let mut pointers = |count: usize| -> Option<Vec<*const libc::c_char>> {
            let mut list: Vec<_> = ended.by_ref().take(count).map(|s| s.as_ptr().cast()).collect();
            list.push(std::ptr::null());
            (list.len() == count + 1).then_some(list)
        };
        let (argv_pointers, env_pointers) = (pointers(argc)?, pointers(envc)?);
        Some(Self { argv_pointers, env_pointers, _strings: strings })
    }

    pub(crate) fn pointers(&self) -> (*const *const libc::c_char, *const *const libc::c_char) {
        (self.argv_pointers.as_ptr(), self.env_pointers.as_ptr())
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

/// Runs the program at a path. Returns only when that failed.
pub fn exec_path(path: &CStr, image: &Image) -> io::Error {
    // SAFETY: as in `exec_fd`.
    unsafe { libc::execve(path.as_ptr(), image.argv_pointers.as_ptr(), image.env_pointers.as_ptr()) };
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
