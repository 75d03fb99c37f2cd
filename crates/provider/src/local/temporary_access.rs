//! Opening what a sandbox's program has closed to itself, which an ordinary user then may not read either: for as long as it takes, it has
//! another mode.

use std::{ffi::CString, os::fd::AsRawFd, path::Path};

use rustix::{
    fd::{BorrowedFd, OwnedFd},
    fs::{AtFlags, CWD, FileType, Mode, OFlags, chmodat, fchmod, fstat, openat},
    io::Errno,
};

/// Gives what was opened the mode back that it had. A directory needs the other for as long as its entries are looked up.
pub struct ModeRestore {
    file: OwnedFd,
    mode: Mode,
}

impl Drop for ModeRestore {
    fn drop(&mut self) {
        if let Err(error) = fchmod(&self.file, self.mode) {
            tracing::warn!(%error, "a file that was opened to be copied could not be closed again");
        }
    }
}

/// Opens an entry of a directory, of whatever mode; `is_shut` says that its mode won't do even where it can be opened.
pub fn open(at: BorrowedFd<'_>, name: &CString, flags: OFlags, needs_access: bool) -> rustix::io::Result<(OwnedFd, Option<ModeRestore>)> {
    if !needs_access {
        match openat(at, name, flags, Mode::empty()) {
            Err(Errno::ACCESS) => {}
            other => return Ok((other?, None)),
        }
    }
    // By a descriptor: by its name it could be a link to something else by now.
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
