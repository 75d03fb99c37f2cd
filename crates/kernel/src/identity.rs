//! Who a thread is to the kernel: capabilities and the ids its file accesses are judged by.

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use crate::check;

/// Drops every capability of this thread for good.
pub fn drop_all_capabilities() -> io::Result<()> {
    keep_capabilities(CapabilitySet::empty())
}

/// Drops every capability of this thread but these.
pub fn keep_capabilities(keep: CapabilitySet) -> io::Result<()> {
    let sets = CapabilitySets { effective: keep, permitted: keep, inheritable: CapabilitySet::empty() };
    Ok(set_capabilities(None, sets)?)
}

/// Empties the bounding set, so that no program run from here on ever gains a capability.
pub fn drop_bounding_set() -> io::Result<()> {
    for capability in 0..64 {
        // SAFETY: PR_CAPBSET_DROP takes a number and changes only this thread's set.
        match check(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) }.into()) {
            Ok(_) => {}
            // The first number the kernel doesn't know: all it knows are gone.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) && capability > 0 => break,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Has this thread's file accesses judged as another user's; its other rights stay.
pub fn set_fs_ids(uid: u32, gid: u32) -> io::Result<()> {
    // The calls tell the previous id, never an error: asking again with an impossible id tells whether it took.
    // SAFETY: both take any number and touch this thread only.
    let (gid_now, uid_now) = unsafe {
        libc::setfsgid(gid);
        libc::setfsuid(uid);
        (libc::setfsgid(u32::MAX), libc::setfsuid(u32::MAX))
    };
    if gid_now as u32 == gid && uid_now as u32 == uid { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EPERM)) }
}

/// Gives this thread a working directory of its own, so that changing it changes nobody else's.
pub fn own_working_directory() -> io::Result<()> {
    // SAFETY: CLONE_FS concerns only the working directory, the root and the umask, which are copied for this thread.
    check(unsafe { libc::unshare(libc::CLONE_FS) }.into()).map(|_| ())
}
