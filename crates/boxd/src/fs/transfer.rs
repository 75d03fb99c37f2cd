//! Moves and copies: the new name appears complete or not at all, and never replaces anything unless requested.

use std::os::fd::OwnedFd;

use cobox_protocol::{ApiError, fs::ChangeResponse};
use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, RenameFlags},
    io::Errno,
};

use super::{
    copy::{Copied, Watch, copy_file, copy_tree},
    make::taken,
    remove::empty_and_remove,
    stop::Stop,
};
use crate::files::{
    ChangeRecorder, EntryLocation, Root, SandboxPath, TempFile, WriteLog, create_directories, file_error, kind, locate_entry,
    not_a_regular_file, open_beneath, refuse_kernel_files, split_parent, stat_entry, sync_directory, temp_file_name,
};

/// Maximum number of parent directories checked to find out whether a tree would be copied into itself.
const MAX_ABOVE: usize = 4096;

pub struct Transfer<'a> {
    pub root: &'a Root,
    pub from: &'a SandboxPath,
    pub to: &'a SandboxPath,
    pub overwrite: bool,
    pub recursive: bool,
    pub recorder: &'a ChangeRecorder,
    pub writes: &'a WriteLog,
    pub stop: &'a Stop,
    pub is_full: &'a dyn Fn() -> bool,
}

/// `POST /v1/fs/move`. A link itself is moved.
pub fn move_(t: &Transfer<'_>) -> Result<ChangeResponse, ApiError> {
    let source = locate_entry(t.root, t.from.bytes()).map_err(|e| file_error(e, t.from))?;
    let existing = source.existing.ok_or_else(|| file_error(Errno::NOENT, t.from))?;
    let (parent, name) = t.destination()?;
    let removal = t.recorder.begin_removal(&source.parent, &source.name);
    let moved = {
        // Held so that no conditional write through boxd happens in between.
        let mut writes = t.writes.lock();
        let moved = rustix::fs::renameat_with(&source.parent, source.name.as_slice(), &parent, name, t.flags());
        if let (Ok(()), Ok(Some(stat))) = (&moved, stat_entry(&parent, name)) {
            writes.record(&stat);
            t.recorder.record_placed(&parent, name, &stat, !t.overwrite);
        }
        moved
    };
    match moved {
        Ok(()) => removal.commit(),
        // On another file system, or a directory of the root's lower layer, which can't be renamed.
        Err(Errno::XDEV) => {
            drop(removal);
            return t.move_by_copy(&source, kind(&existing), &parent, name);
        }
        Err(e) => return Err(t.not_placed(e)),
    }
    sync_directory(&parent).and_then(|()| sync_directory(&source.parent)).map_err(|e| file_error(e, t.to))?;
    Ok(t.done(Copied { entries: 1, ..Copied::default() }))
}

/// `POST /v1/fs/copy`. If the source is a link it is followed, as by GET; links within a tree are copied as links.
pub fn copy(t: &Transfer<'_>) -> Result<ChangeResponse, ApiError> {
    let to_api_error = |e| file_error(e, t.from);
    let stat = t.root.stat(t.from.bytes()).map_err(to_api_error)?;
    match kind(&stat) {
        FileType::RegularFile => {}
        FileType::Directory if t.recursive => {
            let directory = t.root.open(t.from.bytes(), OFlags::RDONLY | OFlags::DIRECTORY).map_err(to_api_error)?;
            refuse_kernel_files(&directory).map_err(to_api_error)?;
            let (parent, name) = t.destination()?;
            return Ok(t.done(t.place_tree(directory, &parent, name)?));
        }
        FileType::Directory => return Err(ApiError::invalid(format!("{} is a directory; set `recursive` to copy it", t.from))),
        other => return Err(not_a_regular_file(other, t.from)),
    }
    let (file, stat) = t.root.open_regular(t.from.bytes()).map_err(to_api_error)?.map_err(|k| not_a_regular_file(k, t.from))?;
    let (parent, name) = t.destination()?;
    if let Some(there) = stat_entry(&parent, name).map_err(|e| file_error(e, t.to))? {
        if !t.overwrite {
            return Err(taken(t.to));
        }
        if (there.st_dev, there.st_ino) == (stat.st_dev, stat.st_ino) {
            return Err(ApiError::invalid(format!("{} and {} are the same file", t.from, t.to)));
        }
    }
    Ok(t.done(t.place_file(&file, &stat, parent, name)?))
}

impl Transfer<'_> {
    fn flags(&self) -> RenameFlags {
        if self.overwrite { RenameFlags::empty() } else { RenameFlags::NOREPLACE }
    }

    fn watch(&self) -> Watch<'_> {
        Watch { stop: self.stop, is_full: self.is_full }
    }

    fn done(&self, copied: Copied) -> ChangeResponse {
        let (path, path_b64) = self.to.to_json();
        ChangeResponse { path, path_b64, changed: true, entries: copied.entries, bytes: copied.bytes, skipped: copied.skipped }
    }

    /// The directory for the new name, created if missing, and the name.
    fn destination(&self) -> Result<(OwnedFd, &[u8]), ApiError> {
        let bytes = self.to.bytes();
        let end = bytes.iter().rposition(|b| *b != b'/').map_or(0, |i| i + 1);
        let (above, name) = split_parent(&bytes[..end]).ok_or_else(|| taken(self.to))?;
        Ok((create_directories(self.root, above, true, self.recorder).map_err(|e| file_error(e, self.to))?, name))
    }

    /// The error for a failed rename.
    fn not_placed(&self, errno: Errno) -> ApiError {
        match errno {
            Errno::EXIST | Errno::NOTEMPTY => taken(self.to),
            Errno::ISDIR | Errno::NOTDIR => {
                ApiError::new(cobox_protocol::ErrorCode::FileExists, format!("{} is there already and of another kind", self.to))
            }
            Errno::INVAL => ApiError::invalid(format!("{} can't be put into itself", self.from)),
            other => file_error(other, self.to),
        }
    }

    fn place_file(&self, file: &OwnedFd, stat: &rustix::fs::Stat, parent: OwnedFd, name: &[u8]) -> Result<Copied, ApiError> {
        let to_api_error = |e| file_error(e, self.to);
        let temp = TempFile::create(parent, Mode::RUSR | Mode::WUSR, None).map_err(to_api_error)?;
        let bytes = copy_file(file, &temp.file, stat, &self.watch()).map_err(to_api_error)?;
        rustix::fs::fsync(&temp.file).map_err(to_api_error)?;
        {
            let mut writes = self.writes.lock();
            temp.rename_to(name, !self.overwrite).map_err(|e| self.not_placed(e))?;
            let stat = rustix::fs::fstat(&temp.file).map_err(to_api_error)?;
            writes.record(&stat);
            self.recorder.record_placed(&temp.directory, name, &stat, !self.overwrite);
        }
        sync_directory(&temp.directory).map_err(to_api_error)?;
        Ok(Copied { entries: 1, bytes, skipped: 0 })
    }

    fn place_tree(&self, from: OwnedFd, parent: &OwnedFd, name: &[u8]) -> Result<Copied, ApiError> {
        let to_api_error = |e| file_error(e, self.to);
        if is_within(parent, &from).map_err(to_api_error)? {
            return Err(self.not_placed(Errno::INVAL));
        }
        if stat_entry(parent, name).map_err(to_api_error)?.is_some() {
            return Err(taken(self.to));
        }
        let temp = temp_file_name().map_err(to_api_error)?;
        rustix::fs::mkdirat(parent, temp.as_str(), Mode::RWXU).map_err(to_api_error)?;
        let filled = open_beneath(parent, temp.as_bytes(), OFlags::RDONLY | OFlags::DIRECTORY)
            .and_then(|to| copy_tree(from, to.try_clone().map_err(|_| Errno::MFILE)?, &self.watch()).map(|done| (to, done)))
            // One call for all files: syncing each takes a thousand times as long for a thousand small ones.
            .and_then(|(to, done)| rustix::fs::syncfs(to).map(|()| done))
            .map_err(to_api_error)
            .and_then(|done| {
                rustix::fs::renameat_with(parent, temp.as_str(), parent, name, RenameFlags::NOREPLACE).map_err(|e| self.not_placed(e))?;
                Ok(done)
            });
        match filled {
            Ok(done) => {
                if let Ok(Some(stat)) = stat_entry(parent, name) {
                    self.recorder.record_placed(parent, name, &stat, true);
                }
                sync_directory(parent).map_err(to_api_error)?;
                Ok(done)
            }
            Err(e) => {
                // The first error is reported. What can't be removed has a temporary name, which listings omit.
                let _ = empty_and_remove(parent, temp.as_bytes(), self.recorder, &Stop::new(None));
                Err(e)
            }
        }
    }

    fn move_by_copy(&self, source: &EntryLocation, kind: FileType, parent: &OwnedFd, name: &[u8]) -> Result<ChangeResponse, ApiError> {
        let to_api_error = |e| file_error(e, self.from);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let open = |flags| rustix::fs::openat(&source.parent, source.name.as_slice(), flags, Mode::empty()).map_err(to_api_error);
        let copied = match kind {
            FileType::Directory => self.place_tree(open(flags | OFlags::DIRECTORY)?, parent, name)?,
            FileType::RegularFile => {
                let file = open(flags)?;
                let stat = rustix::fs::fstat(&file).map_err(to_api_error)?;
                self.place_file(&file, &stat, parent.try_clone().map_err(|_| to_api_error(Errno::MFILE))?, name)?
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(&source.parent, source.name.as_slice(), Vec::new()).map_err(to_api_error)?;
                let temp = temp_file_name().map_err(to_api_error)?;
                rustix::fs::symlinkat(&target, parent, temp.as_str()).map_err(to_api_error)?;
                rustix::fs::renameat_with(parent, temp.as_str(), parent, name, self.flags()).map_err(|e| {
                    // The first error is reported.
                    let _ = rustix::fs::unlinkat(parent, temp.as_str(), AtFlags::empty());
                    self.not_placed(e)
                })?;
                Copied { entries: 1, ..Copied::default() }
            }
            other => return Err(not_a_regular_file(other, self.from)),
        };
        if copied.skipped > 0 {
            return Err(ApiError::invalid(format!(
                "{} was copied to {} and stays too: it has fifos, sockets or devices in it, which can't be moved to another file system",
                self.from, self.to
            )));
        }
        if kind == FileType::Directory {
            empty_and_remove(&source.parent, &source.name, self.recorder, self.stop).map_err(to_api_error)?;
        } else {
            let removal = self.recorder.begin_removal(&source.parent, &source.name);
            rustix::fs::unlinkat(&source.parent, source.name.as_slice(), AtFlags::empty()).map_err(to_api_error)?;
            removal.commit();
        }
        sync_directory(&source.parent).map_err(to_api_error)?;
        Ok(self.done(copied))
    }
}

/// Whether a directory is another one or below it.
fn is_within(inner: &OwnedFd, outer: &OwnedFd) -> Result<bool, Errno> {
    let id = |fd: &OwnedFd| rustix::fs::fstat(fd).map(|s| (s.st_dev, s.st_ino));
    let outer = id(outer)?;
    let mut at = inner.try_clone().map_err(|_| Errno::MFILE)?;
    let mut last = None;
    for _ in 0..MAX_ABOVE {
        let here = id(&at)?;
        if here == outer {
            return Ok(true);
        }
        // The root is its own parent.
        if last == Some(here) {
            return Ok(false);
        }
        last = Some(here);
        at = rustix::fs::openat(&at, "..", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    }
    Ok(true)
}
