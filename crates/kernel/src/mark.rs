//! A mark that a process passes on to all it ever starts, daemons too: the hard limit on file locks, which the kernel keeps,
//! inherits and, since 2.4.25, never looks at.

use std::mem::MaybeUninit;

/// The mark of a process that was started with one; `None` for any other, one that is gone included.
pub fn mark_of(pid: i32) -> Option<u64> {
    let mut limit = MaybeUninit::<libc::rlimit>::uninit();
    // SAFETY: with no new limit the call only fills the structure.
    let answer = unsafe { libc::prlimit(pid, libc::RLIMIT_LOCKS, std::ptr::null(), limit.as_mut_ptr()) };
    // SAFETY: filled where the call succeeded.
    (answer == 0).then(|| unsafe { limit.assume_init() }.rlim_max).filter(|mark| *mark != libc::RLIM_INFINITY)
}
