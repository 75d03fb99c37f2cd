//! Restores files from the trash. Nothing is overwritten: if a path has changed, its old version is restored under
//! another name, and unchanged files written by sync are moved to the trash.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::{AsFd, OwnedFd},
    time::SystemTime,
};

use rustix::{
    fs::{FileType, Mode},
    io::Errno,
};

use super::{
    LockedTrash, Trash,
    batch::{Batch, is_entry},
    journal::JournalRecord,
    millis, now_millis, trash_error,
};
use crate::{
    beneath,
    entry::Entry,
    error::SyncError,
    path::RelPath,
    resolve::alternative_name,
    staging::{DIRECTORY_MODE, rename_noreplace},
};

/// Selects the files to restore.
#[derive(Clone, Debug)]
pub enum RestoreScope {
    /// The last batch created by sync.
    LastBatch,
    /// Everything that sync deleted or replaced since a given time.
    Since(SystemTime),
    /// Items by id.
    Items(BTreeSet<String>),
}

/// A restored file or directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredPath {
    pub path: RelPath,
    /// Its new location: the path itself, or another name next to it.
    pub to: RelPath,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoreFailure {
    pub path: RelPath,
    pub reason: String,
}

#[derive(Clone, Debug, Default)]
pub struct RestoreReport {
    pub restored: Vec<RestoredPath>,
    pub failed: Vec<RestoreFailure>,
}

/// All records of one path within the scope, oldest first, each with the index of its batch.
type History = Vec<(usize, JournalRecord)>;

impl Trash {
    /// Restores the oldest version of each path in the scope. Later versions stay in the trash, in a batch that `undo`
    /// skips.
    pub fn restore(&self, scope: &RestoreScope) -> Result<RestoreReport, SyncError> {
        let Some(top) = self.lock(false)? else { return Ok(RestoreReport::default()) };
        let batches = top.recovered()?;
        let mut histories: BTreeMap<RelPath, History> = BTreeMap::new();
        for (number, record) in in_scope(&batches, scope)? {
            histories.entry(record.path.clone()).or_default().push((number, record));
        }
        let mut restorer = Restorer { trash: self, top: &top, batches: &batches, undo: None, next: 0, relocated: BTreeMap::new() };
        let (mut report, mut handled) = (RestoreReport::default(), BTreeSet::new());
        // In path order, so that a directory precedes its contents.
        for (path, history) in &histories {
            match restorer.restore_path(history) {
                Ok(to) => {
                    report.restored.extend(to.map(|to| RestoredPath { path: path.clone(), to }));
                    handled.extend(history.iter().map(|(batch, record)| (*batch, record.number)));
                }
                Err(e) => report.failed.push(RestoreFailure { path: path.clone(), reason: std::io::Error::from(e).to_string() }),
            }
        }
        rustix::fs::syncfs(&self.root).map_err(trash_error)?;
        for (number, batch) in batches.iter().enumerate() {
            let records = batch.records().map_err(trash_error)?;
            let kept: Vec<JournalRecord> = records.iter().filter(|record| !handled.contains(&(number, record.number))).cloned().collect();
            if kept.len() < records.len() {
                batch.retain(&top.0, &kept).map_err(trash_error)?;
            }
        }
        Ok(report)
    }
}

/// The records of a scope, oldest first, with the index of their batch.
fn in_scope(batches: &[Batch], scope: &RestoreScope) -> Result<Vec<(usize, JournalRecord)>, SyncError> {
    let last = batches.iter().rposition(|batch| !batch.name.is_undo);
    let mut found = Vec::new();
    for (number, batch) in batches.iter().enumerate() {
        let is_meant = |record: &JournalRecord| match scope {
            RestoreScope::LastBatch => Some(number) == last,
            RestoreScope::Since(at) => !batch.name.is_undo && record.at >= millis(*at),
            RestoreScope::Items(ids) => ids.contains(&format!("{}/{}", batch.name, record.number)),
        };
        let records = batch.records().map_err(trash_error)?;
        found.extend(records.into_iter().filter(is_meant).map(|record| (number, record)));
    }
    Ok(found)
}

struct Restorer<'a> {
    trash: &'a Trash,
    top: &'a LockedTrash,
    batches: &'a [Batch],
    /// Receives versions that a restore replaces; created when it is first needed.
    undo: Option<Batch>,
    next: u64,
    /// Directories whose name is taken by something else, with the directory that is used instead.
    relocated: BTreeMap<RelPath, RelPath>,
}

impl Restorer<'_> {
    /// Returns the restored location; `None` if there was nothing to do.
    fn restore_path(&mut self, history: &History) -> Result<Option<RelPath>, Errno> {
        let is_restorable = |(batch, record): &(usize, JournalRecord)| match record.is_stored() {
            true => matches!(self.batches[*batch].stat(record), Ok(Some(_))),
            false => record.old.is_dir(),
        };
        let Some(at) = history.iter().position(is_restorable) else { return self.restore_mode(history) };
        let (batch, oldest) = &history[at];
        // Entries that sync has placed at the path since.
        let written_by_sync: Vec<&Entry> = history.iter().filter_map(|(_, record)| record.new.as_ref()).collect();
        let to = match oldest.old.is_dir() {
            true => self.restore_directory(oldest, &written_by_sync)?,
            false => Some(self.restore_file(&self.batches[*batch], oldest, &written_by_sync)?),
        };
        // The stored file has the mode that sync had given it before.
        if let (Some(to), Some((_, first))) = (&to, history[..at].iter().find(|(_, record)| record.is_mode_change())) {
            self.set_mode(to, first.mode)?;
        }
        for (batch, record) in &history[at + 1..] {
            self.set_aside_version(&self.batches[*batch], record)?;
        }
        Ok(to)
    }

    fn restore_file(&mut self, batch: &Batch, record: &JournalRecord, written_by_sync: &[&Entry]) -> Result<RelPath, Errno> {
        let path = self.create_parents(&record.path)?;
        let parent = beneath::open_directory(&self.trash.root, path.parent_bytes())?;
        let stored = record.number.to_string();
        self.clear_path(&path, &parent, record, written_by_sync)?;
        match rename_noreplace(batch.folder.as_fd(), stored.as_bytes(), parent.as_fd(), path.name()) {
            // The user has restored the same content already.
            Err(Errno::EXIST) if is_entry(parent.as_fd(), path.name(), &record.old) => {
                return self.set_aside_version(batch, record).map(|()| path);
            }
            Err(Errno::EXIST) => {}
            other => return other.map(|()| path),
        }
        try_alternative_names(&path, |alternative| {
            rename_noreplace(batch.folder.as_fd(), stored.as_bytes(), parent.as_fd(), alternative.name())
        })
    }

    fn restore_directory(&mut self, record: &JournalRecord, written_by_sync: &[&Entry]) -> Result<Option<RelPath>, Errno> {
        let path = self.create_parents(&record.path)?;
        let parent = beneath::open_directory(&self.trash.root, path.parent_bytes())?;
        self.clear_path(&path, &parent, record, written_by_sync)?;
        match rustix::fs::mkdirat(&parent, path.name(), DIRECTORY_MODE) {
            // The directory exists, or its name is taken by a changed file: then its contents, if any, are restored in
            // another directory.
            Err(Errno::EXIST) => return Ok(None),
            other => other?,
        }
        let folder = rustix::fs::openat(&parent, path.name(), super::FLAGS, Mode::empty())?;
        rustix::fs::fchmod(folder, Mode::from_raw_mode(record.mode & 0o7777))?;
        Ok(Some(path))
    }

    /// Restores a file's first mode if it still has the content and mode that sync last gave it.
    fn restore_mode(&self, history: &History) -> Result<Option<RelPath>, Errno> {
        let mut changes = history.iter().map(|(_, record)| record).filter(|record| record.is_mode_change());
        let Some(first) = changes.next() else { return Ok(None) };
        let last = changes.next_back().unwrap_or(first);
        let Ok(parent) = beneath::open_directory(&self.trash.root, last.path.parent_bytes()) else { return Ok(None) };
        let Some(new) = last.new.as_ref().filter(|new| is_entry(parent.as_fd(), last.path.name(), new)) else { return Ok(None) };
        let is_executable = beneath::stat(parent.as_fd(), last.path.name())?.is_some_and(|stat| stat.st_mode & 0o100 != 0);
        if !matches!(new, Entry::File { exec, .. } if *exec == is_executable) {
            return Ok(None);
        }
        self.set_mode(&first.path, first.mode)?;
        Ok(Some(first.path.clone()))
    }

    fn set_mode(&self, path: &RelPath, mode: u32) -> Result<(), Errno> {
        let file = beneath::open_file(&self.trash.root, path.bytes())?;
        rustix::fs::fchmod(file, Mode::from_raw_mode(mode & 0o7777))
    }

    /// Moves the entry at the path to the trash if it is unchanged since sync placed it.
    fn clear_path(&mut self, path: &RelPath, parent: &OwnedFd, record: &JournalRecord, written_by_sync: &[&Entry]) -> Result<(), Errno> {
        let Some(before) = beneath::stat(parent.as_fd(), path.name())? else { return Ok(()) };
        let Some(now) = written_by_sync.iter().find(|entry| is_entry(parent.as_fd(), path.name(), entry)) else { return Ok(()) };
        if now.is_dir() {
            // Only an empty directory is certain to contain nothing but sync's own work.
            return match rustix::fs::unlinkat(parent, path.name(), rustix::fs::AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
                Err(e) => Err(e),
            };
        }
        let aside = JournalRecord {
            path: path.clone(),
            old: (*now).clone(),
            mode: before.st_mode & 0o7777,
            new: Some(record.old.clone()),
            ..record.clone()
        };
        let name = self.record_aside(aside)?;
        let undo = self.undo.as_ref().ok_or(Errno::NOENT)?.folder.as_fd();
        rename_noreplace(parent.as_fd(), path.name(), undo, name.as_bytes())?;
        let after = beneath::stat(undo, name.as_bytes())?.ok_or(Errno::NOENT)?;
        let content = |stat: &rustix::fs::Stat| (stat.st_ino, stat.st_size, stat.st_mtime, stat.st_mtime_nsec);
        if content(&before) != content(&after) {
            // Changed in that moment: it is moved back, and the old version is restored under another name.
            rename_noreplace(undo, name.as_bytes(), parent.as_fd(), path.name())?;
        }
        Ok(())
    }

    /// Moves a version newer than the restored one to a batch that `undo` skips.
    fn set_aside_version(&mut self, batch: &Batch, record: &JournalRecord) -> Result<(), Errno> {
        if !record.is_stored() || batch.stat(record)?.is_none() {
            return Ok(());
        }
        let name = self.record_aside(record.clone())?;
        let undo = self.undo.as_ref().ok_or(Errno::NOENT)?.folder.as_fd();
        rename_noreplace(batch.folder.as_fd(), record.number.to_string().as_bytes(), undo, name.as_bytes())
    }

    /// Records a file that is about to move to the undo batch, and returns its name there.
    fn record_aside(&mut self, mut record: JournalRecord) -> Result<String, Errno> {
        let undo = match self.undo.take() {
            Some(undo) => undo,
            None => Batch::create(&self.top.0, true)?,
        };
        (record.number, record.at) = (self.next, now_millis());
        self.next += 1;
        let appended = undo.append(std::slice::from_ref(&record));
        self.undo = Some(undo);
        appended.map(|()| record.number.to_string())
    }

    /// Creates the directories that contain a path. A directory whose name is taken is created under another name.
    fn create_parents(&mut self, path: &RelPath) -> Result<RelPath, Errno> {
        let mut at: Option<RelPath> = None;
        let parts: Vec<&[u8]> = path.parts().collect();
        for (depth, part) in parts.iter().enumerate() {
            let next = RelPath::join(at.as_ref(), part).ok_or(Errno::NAMETOOLONG)?;
            at = Some(if depth + 1 == parts.len() { next } else { self.create_parent(next)? });
        }
        at.ok_or(Errno::INVAL)
    }

    fn create_parent(&mut self, path: RelPath) -> Result<RelPath, Errno> {
        if let Some(new_path) = self.relocated.get(&path) {
            return Ok(new_path.clone());
        }
        let parent = beneath::open_directory(&self.trash.root, path.parent_bytes())?;
        match beneath::stat(parent.as_fd(), path.name())? {
            Some(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => Ok(path),
            Some(_) => {
                let new_path =
                    try_alternative_names(&path, |alternative| rustix::fs::mkdirat(&parent, alternative.name(), DIRECTORY_MODE))?;
                self.relocated.insert(path, new_path.clone());
                Ok(new_path)
            }
            None => rustix::fs::mkdirat(&parent, path.name(), DIRECTORY_MODE).map(|()| path),
        }
    }
}

/// Tries alternative names for a path until one is free.
fn try_alternative_names(path: &RelPath, put: impl Fn(&RelPath) -> Result<(), Errno>) -> Result<RelPath, Errno> {
    for number in 1..1000 {
        let name = alternative_name(path.name(), "restored", number);
        let alternative = RelPath::join(path.parent().as_ref(), &name).ok_or(Errno::NAMETOOLONG)?;
        match put(&alternative) {
            Err(Errno::EXIST) => {}
            other => return other.map(|()| alternative),
        }
    }
    Err(Errno::EXIST)
}
