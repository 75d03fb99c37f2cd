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
    Author, Place, Root, SandboxPath, Temp, WriteLog, current, kind, locate_name, make_directory, not_a_file, open_beneath, refusal,
    refuse_kernel_files, split, sync_directory, temp_name,
};

/// Maximum number of parent directories checked to find out whether a tree would be copied into itself.
const MAX_ABOVE: usize = 4096;

pub struct Transfer<'a> {
    pub root: &'a Root,
    pub from: &'a SandboxPath,
    pub to: &'a SandboxPath,
    pub overwrite: bool,
    pub recursive: bool,
    pub author: &'a Author,
    pub writes: &'a WriteLog,
    pub stop: &'a Stop,
    pub is_full: &'a dyn Fn() -> bool,
}

/// `POST /v1/fs/move`. A link itself is moved.
pub fn move_(t: &Transfer<'_>) -> Result<ChangeResponse, ApiError> {
    let source = locate_name(t.root, t.from.bytes()).map_err(|e| refusal(e, t.from))?;
    let existing = source.existing.ok_or_else(|| refusal(Errno::NOENT, t.from))?;
    let (parent, name) = t.destination()?;
    let removal = t.author.removes(&source.parent, &source.name);
    let moved = {
        // Held so that no conditional write through boxd happens in between.
        let mut writes = t.writes.lock();
        let moved = rustix::fs::renameat_with(&source.parent, source.name.as_slice(), &parent, name, t.flags());
        if let (Ok(()), Ok(Some(stat))) = (&moved, current(&parent, name)) {
            writes.record(&stat);
            t.author.placed(&parent, name, &stat, !t.overwrite);
        }
        moved
    };
    match moved {
        Ok(()) => removal.done(),
        // On another file system, or a directory of the root's lower layer, which can't be renamed.
        Err(Errno::XDEV) => {
            drop(removal);
            return t.move_by_copy(&source, kind(&existing), &parent, name);
        }
        Err(e) => return Err(t.not_placed(e)),
    }
    sync_directory(&parent).and_then(|()| sync_directory(&source.parent)).map_err(|e| refusal(e, t.to))?;
    Ok(t.done(Copied { entries: 1, ..Copied::default() }))
}

/// `POST /v1/fs/copy`. If the source is a link it is followed, as by GET; links within a tree are copied as links.
pub fn copy(t: &Transfer<'_>) -> Result<ChangeResponse, ApiError> {
    let refused = |e| refusal(e, t.from);
    let stat = t.root.stat(t.from.bytes()).map_err(refused)?;
    match kind(&stat) {
        FileType::RegularFile => {}
        FileType::Directory if t.recursive => {
            let directory = t.root.open(t.from.bytes(), OFlags::RDONLY | OFlags::DIRECTORY).map_err(refused)?;
            refuse_kernel_files(&directory).map_err(refused)?;
            let (parent, name) = t.destination()?;
            return Ok(t.done(t.place_tree(directory, &parent, name)?));
        }
        FileType::Directory => return Err(ApiError::invalid(format!("{} is a directory; set `recursive` to copy it", t.from))),
        other => return Err(not_a_file(other, t.from)),
    }
    let (file, stat) = t.root.regular(t.from.bytes()).map_err(refused)?.map_err(|k| not_a_file(k, t.from))?;
    let (parent, name) = t.destination()?;
    if let Some(there) = current(&parent, name).map_err(|e| refusal(e, t.to))? {
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
        let (path, path_b64) = self.to.in_json();
        ChangeResponse { path, path_b64, changed: true, entries: copied.entries, bytes: copied.bytes, skipped: copied.skipped }
    }

    /// The directory for the new name, created if missing, and the name.
    fn destination(&self) -> Result<(OwnedFd, &[u8]), ApiError> {
        let bytes = self.to.bytes();
        let end = bytes.iter().rposition(|b| *b != b'/').map_or(0, |i| i + 1);
        let (above, name) = split(&bytes[..end]).ok_or_else(|| taken(self.to))?;
        Ok((make_directory(self.root, above, true, self.author).map_err(|e| refusal(e, self.to))?, name))
    }

    /// The error for a failed rename.
    fn not_placed(&self, errno: Errno) -> ApiError {
        match errno {
            Errno::EXIST | Errno::NOTEMPTY => taken(self.to),
            Errno::ISDIR | Errno::NOTDIR => {
                ApiError::new(cobox_protocol::ErrorCode::FileExists, format!("{} is there already and of another kind", self.to))
            }
            Errno::INVAL => ApiError::invalid(format!("{} can't be put into itself", self.from)),
            other => refusal(other, self.to),
        }
    }

    fn place_file(&self, file: &OwnedFd, stat: &rustix::fs::Stat, parent: OwnedFd, name: &[u8]) -> Result<Copied, ApiError> {
        let refused = |e| refusal(e, self.to);
        let temp = Temp::create(parent, Mode::RUSR | Mode::WUSR, None).map_err(refused)?;
        let bytes = copy_file(file, &temp.file, stat, &self.watch()).map_err(refused)?;
        rustix::fs::fsync(&temp.file).map_err(refused)?;
        {
            let mut writes = self.writes.lock();
            temp.rename_to(name, !self.overwrite).map_err(|e| self.not_placed(e))?;
            let stat = rustix::fs::fstat(&temp.file).map_err(refused)?;
            writes.record(&stat);
            self.author.placed(&temp.directory, name, &stat, !self.overwrite);
        }
        sync_directory(&temp.directory).map_err(refused)?;
        Ok(Copied { entries: 1, bytes, skipped: 0 })
    }

    fn place_tree(&self, from: OwnedFd, parent: &OwnedFd, name: &[u8]) -> Result<Copied, ApiError> {
        let refused = |e| refusal(e, self.to);
        if is_within(parent, &from).map_err(refused)? {
            return Err(self.not_placed(Errno::INVAL));
        }
        if current(parent, name).map_err(refused)?.is_some() {
            return Err(taken(self.to));
        }
        let temp = temp_name().map_err(refused)?;
        rustix::fs::mkdirat(parent, temp.as_str(), Mode::RWXU).map_err(refused)?;
        let filled = open_beneath(parent, temp.as_bytes(), OFlags::RDONLY | OFlags::DIRECTORY)
            .and_then(|to| copy_tree(from, to.try_clone().map_err(|_| Errno::MFILE)?, &self.watch()).map(|done| (to, done)))
            // One call for all files: syncing each takes a thousand times as long for a thousand small ones.
            .and_then(|(to, done)| rustix::fs::syncfs(to).map(|()| done))
            .map_err(refused)
            .and_then(|done| {
                rustix::fs::renameat_with(parent, temp.as_str(), parent, name, RenameFlags::NOREPLACE).map_err(|e| self.not_placed(e))?;
                Ok(done)
            });
        match filled {
            Ok(done) => {
                if let Ok(Some(stat)) = current(parent, name) {
                    self.author.placed(parent, name, &stat, true);
                }
                sync_directory(parent).map_err(refused)?;
                Ok(done)
            }
            Err(e) => {
                // The first error is reported. What can't be removed has a temporary name, which listings omit.
                let _ = empty_and_remove(parent, temp.as_bytes(), self.author, &Stop::new(None));
                Err(e)
            }
        }
    }

    fn move_by_copy(&self, source: &Place, kind: FileType, parent: &OwnedFd, name: &[u8]) -> Result<ChangeResponse, ApiError> {
        let refused = |e| refusal(e, self.from);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let open = |flags| rustix::fs::openat(&source.parent, source.name.as_slice(), flags, Mode::empty()).map_err(refused);
        let copied = match kind {
            FileType::Directory => self.place_tree(open(flags | OFlags::DIRECTORY)?, parent, name)?,
            FileType::RegularFile => {
                let file = open(flags)?;
                let stat = rustix::fs::fstat(&file).map_err(refused)?;
                self.place_file(&file, &stat, parent.try_clone().map_err(|_| refused(Errno::MFILE))?, name)?
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(&source.parent, source.name.as_slice(), Vec::new()).map_err(refused)?;
                let temp = temp_name().map_err(refused)?;
                rustix::fs::symlinkat(&target, parent, temp.as_str()).map_err(refused)?;
                rustix::fs::renameat_with(parent, temp.as_str(), parent, name, self.flags()).map_err(|e| {
                    // The first error is reported.
                    let _ = rustix::fs::unlinkat(parent, temp.as_str(), AtFlags::empty());
                    self.not_placed(e)
                })?;
                Copied { entries: 1, ..Copied::default() }
            }
            other => return Err(not_a_file(other, self.from)),
        };
        if copied.skipped > 0 {
            return Err(ApiError::invalid(format!(
                "{} was copied to {} and stays too: it has fifos, sockets or devices in it, which can't be moved to another file system",
                self.from, self.to
            )));
        }
        if kind == FileType::Directory {
            empty_and_remove(&source.parent, &source.name, self.author, self.stop).map_err(refused)?;
        } else {
            let removal = self.author.removes(&source.parent, &source.name);
            rustix::fs::unlinkat(&source.parent, source.name.as_slice(), AtFlags::empty()).map_err(refused)?;
            removal.done();
        }
        sync_directory(&source.parent).map_err(refused)?;
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
