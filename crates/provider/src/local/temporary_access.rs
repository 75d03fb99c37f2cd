//! Opens files whose mode denies access to their owner, which a broker that runs as an ordinary user could not copy otherwise. The mode is
//! changed for as long as needed and then restored.

use std::{ffi::CString, os::fd::AsRawFd, path::Path};

use rustix::{
    fd::{BorrowedFd, OwnedFd},
    fs::{AtFlags, CWD, FileType, Mode, OFlags, chmodat, fchmod, fstat, openat},
    io::Errno,
};

/// Restores a file's mode when dropped. A directory needs the changed mode for as long as its entries are looked up.
pub struct ModeRestore {
    file: OwnedFd,
    mode: Mode,
}

impl Drop for ModeRestore {
    fn drop(&mut self) {
        if let Err(error) = fchmod(&self.file, self.mode) {
            tracing::warn!(%error, "restoring the mode of a copied file failed");
        }
    }
}

/// Opens a directory entry with any mode. With `needs_access`, its mode is changed even if it can be opened as it is.
pub fn open(at: BorrowedFd<'_>, name: &CString, flags: OFlags, needs_access: bool) -> rustix::io::Result<(OwnedFd, Option<ModeRestore>)> {
    if !needs_access {
        match openat(at, name, flags, Mode::empty()) {
            Err(Errno::ACCESS) => {}
            other => return Ok((other?, None)),
        }
    }
    // Through a descriptor: the name could have become a link to another file.
    let found = openat(at, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&found)?;
    if !matches!(FileType::from_raw_mode(stat.st_mode), FileType::Directory | FileType::RegularFile) {
        return Err(Errno::NXIO);
    }
    let path = Path::new("/proc/self/fd").join(found.as_raw_fd().to_string());
    let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
    chmodat(CWD, &path, Mode::RWXU, AtFlags::empty())?;
    let opened = openat(CWD, &path, flags.difference(OFlags::NOFOLLOW), Mode::empty())
        .and_then(|opened| Ok((rustix::io::fcntl_dupfd_cloexec(&opened, 0)?, opened)));
    match opened {
        Ok((file, opened)) => Ok((opened, Some(ModeRestore { file, mode }))),
        Err(e) => {
            chmodat(CWD, &path, mode, AtFlags::empty())?;
            Err(e)
        }
    }
}
