//! The credentials of a thread: its capabilities, and the ids that the kernel checks its file accesses against.

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use crate::check;

/// Drops every capability of this thread permanently.
pub fn drop_all_capabilities() -> io::Result<()> {
    keep_capabilities(CapabilitySet::empty())
}

/// Drops every capability of this thread except these.
pub fn keep_capabilities(keep: CapabilitySet) -> io::Result<()> {
    let sets = CapabilitySets { effective: keep, permitted: keep, inheritable: CapabilitySet::empty() };
    Ok(set_capabilities(None, sets)?)
}

/// Empties the bounding set, so that no program executed from here on can gain a capability.
pub fn drop_bounding_set() -> io::Result<()> {
    for capability in 0..64 {
        // SAFETY: PR_CAPBSET_DROP takes a number and changes only this thread's set.
        match check(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) }.into()) {
            Ok(_) => {}
            // The first number that the kernel doesn't know: all known capabilities are dropped.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) && capability > 0 => break,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Makes the kernel check this thread's file accesses as those of another user. The thread's other rights don't change.
pub fn set_fs_ids(uid: u32, gid: u32) -> io::Result<()> {
    // The calls return the previous id and never an error. A second call with an invalid id returns the current one.
    // SAFETY: both accept any number and affect only this thread.
    let (gid_now, uid_now) = unsafe {
        libc::setfsgid(gid);
        libc::setfsuid(uid);
        (libc::setfsgid(u32::MAX), libc::setfsuid(u32::MAX))
    };
    if gid_now as u32 == gid && uid_now as u32 == uid { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EPERM)) }
}

/// Gives this thread its own working directory, so that changing it doesn't affect other threads.
pub fn own_working_directory() -> io::Result<()> {
    // SAFETY: CLONE_FS affects only the working directory, the root and the umask, which are copied for this thread.
    check(unsafe { libc::unshare(libc::CLONE_FS) }.into()).map(|_| ())
}
