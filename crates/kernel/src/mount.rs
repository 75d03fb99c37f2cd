//! Attributes of mounts: flags such as read-only, and id mapping.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

use crate::check;

/// What a mount forbids.
#[derive(Clone, Copy, Default)]
pub struct MountFlags {
    pub read_only: bool,
    pub no_dev: bool,
    pub no_exec: bool,
}

/// Sets flags on a mount and, if `recursive`, on all mounts below it. Set-user-id programs are always forbidden.
pub fn set_mount_flags(mount: impl AsFd, flags: MountFlags, recursive: bool) -> io::Result<()> {
    let mut set = libc::MOUNT_ATTR_NOSUID;
    for (on, bit) in
        [(flags.read_only, libc::MOUNT_ATTR_RDONLY), (flags.no_dev, libc::MOUNT_ATTR_NODEV), (flags.no_exec, libc::MOUNT_ATTR_NOEXEC)]
    {
        if on {
            set |= bit;
        }
    }
    mount_setattr(mount, recursive, set, None)
}

/// Maps the owners of files on a detached mount through a user namespace: files of uid 0 on disk belong to uid 0 of the
/// namespace.
pub fn idmap(mount: impl AsFd, user_namespace: impl AsFd) -> io::Result<()> {
    mount_setattr(mount, false, libc::MOUNT_ATTR_IDMAP, Some(user_namespace.as_fd().as_raw_fd()))
}

fn mount_setattr(mount: impl AsFd, recursive: bool, set: u64, userns: Option<i32>) -> io::Result<()> {
    let attr = libc::mount_attr { attr_set: set, attr_clr: 0, propagation: 0, userns_fd: userns.unwrap_or(0) as u64 };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the structure outlives the call and its size is given.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    })
    .map(drop)
}
