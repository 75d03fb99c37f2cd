//! Moves and copies: the new name appears complete or not at all, and never replaces anything unless requested.

use std::os::fd::OwnedFd;

use cobox_protocol::{ApiError, fs::ChangeResponse};
use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, RenameFlags},
    io::Errno,
};

use super::{
    copy::{AbortCheck, CopyStats, copy_file, copy_tree},
    mkdir::already_exists,
    remove::remove_tree,
    stop_signal::StopSignal,
};
use crate::files::{
    ChangeRecorder, EntryLocation, Root, SandboxPath, TempFile, WriteLog, create_directories, file_error, kind, locate_entry,
    not_a_regular_file, open_beneath, refuse_kernel_files, split_parent, stat_entry, sync_directory, temp_file_name,
};

/// Maximum number of parent directories checked to find out whether a tree would be copied into itself.
const MAX_PARENTS: usize = 4096;

pub struct Transfer<'a> {
    pub root: &'a Root,
    pub from: &'a SandboxPath,
    pub to: &'a SandboxPath,
    pub overwrite: bool,
    pub recursive: bool,
    pub recorder: &'a ChangeRecorder,
    pub writes: &'a WriteLog,
    pub stop: &'a StopSignal,
    pub is_full: &'a dyn Fn() -> bool,
}

/// `POST /v1/fs/move`. A link itself is moved.
pub fn move_(transfer: &Transfer<'_>) -> Result<ChangeResponse, ApiError> {
    let source = locate_entry(transfer.root, transfer.from.bytes()).map_err(|e| file_error(e, transfer.from))?;
    let existing = source.existing.ok_or_else(|| file_error(Errno::NOENT, transfer.from))?;
    let (parent, name) = transfer.destination()?;
    let removal = transfer.recorder.begin_removal(&source.parent, &source.name);
    let moved = {
        // Held so that no conditional write through boxd happens in between.
        let mut writes = transfer.writes.lock();
        let moved = rustix::fs::renameat_with(&source.parent, source.name.as_slice(), &parent, name, transfer.flags());
        if let (Ok(()), Ok(Some(stat))) = (&moved, stat_entry(&parent, name)) {
            writes.record(&stat);
            transfer.recorder.record_placed(&parent, name, &stat, !transfer.overwrite);
        }
        moved
    };
    match moved {
        Ok(()) => removal.commit(),
        // On another file system, or a directory of the root's lower layer, which can't be renamed.
        Err(Errno::XDEV) => {
            drop(removal);
            return transfer.move_by_copy(&source, kind(&existing), &parent, name);
        }
        Err(e) => return Err(transfer.rename_error(e)),
    }
    sync_directory(&parent).and_then(|()| sync_directory(&source.parent)).map_err(|e| file_error(e, transfer.to))?;
    Ok(transfer.response(CopyStats { entries: 1, ..CopyStats::default() }))
}

/// `POST /v1/fs/copy`. If the source is a link it is followed, as by GET; links within a tree are copied as links.
pub fn copy(transfer: &Transfer<'_>) -> Result<ChangeResponse, ApiError> {
    let to_api_error = |e| file_error(e, transfer.from);
    let stat = transfer.root.stat(transfer.from.bytes()).map_err(to_api_error)?;
    match kind(&stat) {
        FileType::RegularFile => {}
        FileType::Directory if transfer.recursive => {
            let directory = transfer.root.open(transfer.from.bytes(), OFlags::RDONLY | OFlags::DIRECTORY).map_err(to_api_error)?;
            refuse_kernel_files(&directory).map_err(to_api_error)?;
            let (parent, name) = transfer.destination()?;
            return Ok(transfer.response(transfer.write_tree_copy(directory, &parent, name)?));
        }
        FileType::Directory => return Err(ApiError::invalid(format!("{} is a directory; set `recursive` to copy it", transfer.from))),
        other => return Err(not_a_regular_file(other, transfer.from)),
    }
    let (file, stat) =
        transfer.root.open_regular(transfer.from.bytes()).map_err(to_api_error)?.map_err(|k| not_a_regular_file(k, transfer.from))?;
    let (parent, name) = transfer.destination()?;
    if let Some(existing) = stat_entry(&parent, name).map_err(|e| file_error(e, transfer.to))? {
        if !transfer.overwrite {
            return Err(already_exists(transfer.to));
        }
        if (existing.st_dev, existing.st_ino) == (stat.st_dev, stat.st_ino) {
            return Err(ApiError::invalid(format!("{} and {} are the same file", transfer.from, transfer.to)));
        }
    }
    Ok(transfer.response(transfer.write_copy(&file, &stat, parent, name)?))
}

impl Transfer<'_> {
    fn flags(&self) -> RenameFlags {
        if self.overwrite { RenameFlags::empty() } else { RenameFlags::NOREPLACE }
    }

    fn abort_check(&self) -> AbortCheck<'_> {
        AbortCheck { stop: self.stop, is_full: self.is_full }
    }

    fn response(&self, copied: CopyStats) -> ChangeResponse {
        let (path, path_b64) = self.to.to_json();
        ChangeResponse { path, path_b64, changed: true, entries: copied.entries, bytes: copied.bytes, skipped: copied.skipped }
    }

    /// The directory for the new name, created if missing, and the name.
    fn destination(&self) -> Result<(OwnedFd, &[u8]), ApiError> {
        let bytes = self.to.bytes();
        let end = bytes.iter().rposition(|b| *b != b'/').map_or(0, |i| i + 1);
        let (parent_path, name) = split_parent(&bytes[..end]).ok_or_else(|| already_exists(self.to))?;
        Ok((create_directories(self.root, parent_path, true, self.recorder).map_err(|e| file_error(e, self.to))?, name))
    }

    /// The error for a failed rename.
    fn rename_error(&self, errno: Errno) -> ApiError {
        match errno {
            Errno::EXIST | Errno::NOTEMPTY => already_exists(self.to),
            Errno::ISDIR | Errno::NOTDIR => {
                ApiError::new(cobox_protocol::ErrorCode::FileExists, format!("{} already exists and has another type", self.to))
            }
            Errno::INVAL => ApiError::invalid(format!("{} can't be copied or moved into itself", self.from)),
            other => file_error(other, self.to),
        }
    }

    fn write_copy(&self, file: &OwnedFd, stat: &rustix::fs::Stat, parent: OwnedFd, name: &[u8]) -> Result<CopyStats, ApiError> {
        let to_api_error = |e| file_error(e, self.to);
        let temp = TempFile::create(parent, Mode::RUSR | Mode::WUSR, None).map_err(to_api_error)?;
        let bytes = copy_file(file, &temp.file, stat, &self.abort_check()).map_err(to_api_error)?;
        rustix::fs::fsync(&temp.file).map_err(to_api_error)?;
        {
            let mut writes = self.writes.lock();
            temp.rename_to(name, !self.overwrite).map_err(|e| self.rename_error(e))?;
            let stat = rustix::fs::fstat(&temp.file).map_err(to_api_error)?;
            writes.record(&stat);
            self.recorder.record_placed(&temp.directory, name, &stat, !self.overwrite);
        }
        sync_directory(&temp.directory).map_err(to_api_error)?;
        Ok(CopyStats { entries: 1, bytes, skipped: 0 })
    }

    fn write_tree_copy(&self, from: OwnedFd, parent: &OwnedFd, name: &[u8]) -> Result<CopyStats, ApiError> {
        let to_api_error = |e| file_error(e, self.to);
        if is_within(parent, &from).map_err(to_api_error)? {
            return Err(self.rename_error(Errno::INVAL));
        }
        if stat_entry(parent, name).map_err(to_api_error)?.is_some() {
            return Err(already_exists(self.to));
        }
        let temp = temp_file_name().map_err(to_api_error)?;
        rustix::fs::mkdirat(parent, temp.as_str(), Mode::RWXU).map_err(to_api_error)?;
        let filled = open_beneath(parent, temp.as_bytes(), OFlags::RDONLY | OFlags::DIRECTORY)
            .and_then(|to| copy_tree(from, to.try_clone().map_err(|_| Errno::MFILE)?, &self.abort_check()).map(|stats| (to, stats)))
            // One call for all files: syncing each takes a thousand times as long for a thousand small ones.
            .and_then(|(to, stats)| rustix::fs::syncfs(to).map(|()| stats))
            .map_err(to_api_error)
            .and_then(|stats| {
                rustix::fs::renameat_with(parent, temp.as_str(), parent, name, RenameFlags::NOREPLACE).map_err(|e| self.rename_error(e))?;
                Ok(stats)
            });
        match filled {
            Ok(stats) => {
                if let Ok(Some(stat)) = stat_entry(parent, name) {
                    self.recorder.record_placed(parent, name, &stat, true);
                }
                sync_directory(parent).map_err(to_api_error)?;
                Ok(stats)
            }
            Err(e) => {
                // The first error is reported. What can't be removed has a temporary name, which listings omit.
                let _ = remove_tree(parent, temp.as_bytes(), self.recorder, &StopSignal::new(None));
                Err(e)
            }
        }
    }

    fn move_by_copy(&self, source: &EntryLocation, kind: FileType, parent: &OwnedFd, name: &[u8]) -> Result<ChangeResponse, ApiError> {
        let to_api_error = |e| file_error(e, self.from);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let open = |flags| rustix::fs::openat(&source.parent, source.name.as_slice(), flags, Mode::empty()).map_err(to_api_error);
        let copied = match kind {
            FileType::Directory => self.write_tree_copy(open(flags | OFlags::DIRECTORY)?, parent, name)?,
            FileType::RegularFile => {
                let file = open(flags)?;
                let stat = rustix::fs::fstat(&file).map_err(to_api_error)?;
                self.write_copy(&file, &stat, parent.try_clone().map_err(|_| to_api_error(Errno::MFILE))?, name)?
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(&source.parent, source.name.as_slice(), Vec::new()).map_err(to_api_error)?;
                let temp = temp_file_name().map_err(to_api_error)?;
                rustix::fs::symlinkat(&target, parent, temp.as_str()).map_err(to_api_error)?;
                rustix::fs::renameat_with(parent, temp.as_str(), parent, name, self.flags()).map_err(|e| {
                    // The first error is reported.
                    let _ = rustix::fs::unlinkat(parent, temp.as_str(), AtFlags::empty());
                    self.rename_error(e)
                })?;
                CopyStats { entries: 1, ..CopyStats::default() }
            }
            other => return Err(not_a_regular_file(other, self.from)),
        };
        if copied.skipped > 0 {
            return Err(ApiError::invalid(format!(
                "{} was copied to {} and also kept: it contains fifos, sockets or devices, which can't be moved to another file system",
                self.from, self.to
            )));
        }
        if kind == FileType::Directory {
            remove_tree(&source.parent, &source.name, self.recorder, self.stop).map_err(to_api_error)?;
        } else {
            let removal = self.recorder.begin_removal(&source.parent, &source.name);
            rustix::fs::unlinkat(&source.parent, source.name.as_slice(), AtFlags::empty()).map_err(to_api_error)?;
            removal.commit();
        }
        sync_directory(&source.parent).map_err(to_api_error)?;
        Ok(self.response(copied))
    }
}

/// Whether a directory is another one or below it.
fn is_within(inner: &OwnedFd, outer: &OwnedFd) -> Result<bool, Errno> {
    let id = |fd: &OwnedFd| rustix::fs::fstat(fd).map(|s| (s.st_dev, s.st_ino));
    let outer = id(outer)?;
    let mut directory = inner.try_clone().map_err(|_| Errno::MFILE)?;
    let mut last = None;
    for _ in 0..MAX_PARENTS {
        let here = id(&directory)?;
        if here == outer {
            return Ok(true);
        }
        // The root is its own parent.
        if last == Some(here) {
            return Ok(false);
        }
        last = Some(here);
        directory = rustix::fs::openat(&directory, "..", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    }
    Ok(true)
}
