//! A mark that a process passes on to all its descendants, including daemons. It is stored in the hard limit on file
//! locks, which the kernel keeps and inherits but has ignored since 2.4.25.

use std::mem::MaybeUninit;

/// The mark of a process that was started with one. `None` for any other process, and for one that no longer exists.
pub fn mark_of(pid: i32) -> Option<u64> {
    let mut limit = MaybeUninit::<libc::rlimit>::uninit();
    // SAFETY: with no new limit the call only fills the structure.
    let answer = unsafe { libc::prlimit(pid, libc::RLIMIT_LOCKS, std::ptr::null(), limit.as_mut_ptr()) };
    // SAFETY: the call succeeded, so it filled the structure.
    (answer == 0).then(|| unsafe { limit.assume_init() }.rlim_max).filter(|mark| *mark != libc::RLIM_INFINITY)
}
