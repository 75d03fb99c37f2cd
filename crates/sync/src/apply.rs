//! Applies changes to one side. At every moment each path has its old or its new version, and concurrent edits by other
//! programs are kept.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    os::fd::{AsFd, OwnedFd},
    time::{Duration, SystemTime},
};

use rustix::{
    fs::{AtFlags, Mode, OFlags, RenameFlags, Stat},
    io::Errno,
};

use crate::{
    beneath,
    entry::{Digest, Entry},
    error::SyncError,
    file_stamp::Stamp,
    folder::Folder,
    hooks::ChangeKind,
    message::Outcome,
    path::RelPath,
    reconcile::Change,
    scan::stays_inside,
    staging::{DIRECTORY_MODE, MAX_SEPARATE_SYNCS, with_exec},
    trash::OpenBatch,
};

/// Files of at least this size, in bytes, are worth a short wait so that they need not be read again to be trusted.
const STAMP_WAIT_MIN_BYTES: u64 = 8 * 1024 * 1024;
/// Duration of that wait: slightly longer than a stamp stays racy.
const STAMP_WAIT: Duration = Duration::from_millis(35);

/// Orders changes so that each can be applied. Content is placed before anything is removed, so that a moved file
/// always exists somewhere.
pub fn order_changes(mut changes: Vec<Change>) -> Vec<Change> {
    changes.sort_by(|a, b| a.path.cmp(&b.path));
    // The contents of a directory that is replaced by something else have to be removed first.
    let replaced_directories: BTreeSet<RelPath> =
        changes.iter().filter(|c| is_dir(&c.old) && c.new.is_some() && !is_dir(&c.new)).map(|c| c.path.clone()).collect();
    let is_in_replaced_directory = |path: &RelPath| path.ancestors().any(|folder| replaced_directories.contains(&folder));
    let (mut first, rest): (Vec<_>, Vec<_>) = changes.into_iter().partition(|c| c.new.is_none() && is_in_replaced_directory(&c.path));
    let (mut last, middle): (Vec<_>, Vec<_>) = rest.into_iter().partition(|c| c.new.is_none());
    first.reverse();
    last.reverse();
    first.into_iter().chain(middle).chain(last).collect()
}

fn is_dir(entry: &Option<Entry>) -> bool {
    entry.as_ref().is_some_and(Entry::is_dir)
}

impl Folder {
    /// Applies the changes in this order as far as possible and returns the outcome of each. The content they need is
    /// staged; it is made durable first.
    pub(crate) fn apply(&mut self, changes: &[Change]) -> Result<Vec<Outcome>, SyncError> {
        if !self.hooks.may_write() {
            return Err(SyncError::NotAllowed);
        }
        self.staging.sync()?;
        let mut remaining_uses: HashMap<Digest, usize> = HashMap::new();
        for (digest, _) in changes.iter().filter(|c| needs_content(c)).filter_map(|c| c.new.as_ref().and_then(Entry::content)) {
            *remaining_uses.entry(digest).or_default() += 1;
        }
        let stamps = &self.stamps;
        let mode = |path: &RelPath| stamps.get(path).map_or(0, Stamp::mode);
        let trash_batch = match &mut self.trash {
            Some(trash) => trash.begin(changes, mode)?,
            None => None,
        };
        let mut parents = ParentDirectories::default();
        let mut outcomes = Vec::with_capacity(changes.len());
        for change in changes {
            let outcome = self.apply_one(change, &mut remaining_uses, &mut parents, trash_batch.as_ref())?;
            if outcome != Outcome::Done && outcome != Outcome::NotEmpty {
                self.rescan.insert(change.path.clone());
            }
            outcomes.push(outcome);
        }
        self.staging.clear();
        if let Some(trash_batch) = &trash_batch {
            trash_batch.sync().map_err(|e| SyncError::writing("write to the trash", e))?;
        }
        self.sync_parents(parents.changed)?;
        self.refresh_stamps(changes, &outcomes);
        Ok(outcomes)
    }

    /// `trash_batch` receives the versions that are removed or replaced.
    fn apply_one(
        &mut self,
        change: &Change,
        remaining_uses: &mut HashMap<Digest, usize>,
        parents: &mut ParentDirectories,
        trash_batch: Option<&OpenBatch>,
    ) -> Result<Outcome, SyncError> {
        let Change { path, old, new } = change;
        if self.tree.get(path) != old.as_ref() {
            return Ok(Outcome::Changed);
        }
        if let Some(Entry::Link { target }) = new
            && !stays_inside(path, target)
        {
            return Ok(Outcome::Failed);
        }
        let parent = match parents.open(self, path) {
            Ok(parent) => parent,
            Err(_) => return Ok(Outcome::Changed),
        };
        let applied = match (old, new) {
            (None, Some(Entry::Dir)) => self.create_directory(path, &parent),
            (Some(Entry::Dir), None) => self.remove_directory(path, &parent),
            (Some(_), None) => match trash_batch {
                Some(trash_batch) => self.remove_to_trash(path, &parent, trash_batch),
                None => self.remove(path, &parent),
            },
            (Some(Entry::File { digest: a, .. }), Some(Entry::File { digest: b, exec, .. })) if a == b => {
                self.set_exec(path, &parent, *exec)
            }
            (old, Some(new)) => match self.staged(path, old.as_ref(), new, remaining_uses) {
                Ok(staged) if is_dir(&change.old) => self.replace_directory(path, &parent, &staged),
                Ok(staged) if old.is_none() => self.place_new(path, &parent, &staged),
                Ok(staged) => match trash_batch {
                    Some(trash_batch) => self.replace_to_trash(path, &parent, &staged, trash_batch),
                    None => self.replace(path, &parent, &staged),
                },
                Err(e) => Err(e),
            },
            (None, None) => return Ok(Outcome::Done),
        };
        match applied {
            Ok(stat) => {
                parents.changed.insert(path.parent_bytes().to_vec());
                match stat {
                    Some(stat) => self.stamps.insert(path.clone(), Stamp::of(&stat, SystemTime::now())),
                    None => self.stamps.remove(path),
                };
                self.tree.set(path.clone(), new.clone());
                Ok(Outcome::Done)
            }
            Err(Errno::EXIST | Errno::AGAIN | Errno::NOENT | Errno::ISDIR | Errno::NOTDIR | Errno::LOOP) => Ok(Outcome::Changed),
            Err(Errno::NOTEMPTY) => Ok(Outcome::NotEmpty),
            Err(Errno::NODATA) => Ok(Outcome::NoContent),
            Err(e @ (Errno::NOSPC | Errno::DQUOT)) => Err(SyncError::writing("write a file", e)),
            Err(error) => {
                tracing::debug!(%path, %error, "failed to apply a change");
                Ok(Outcome::Failed)
            }
        }
    }

    /// Prepares the new entry of a path in the staging directory, ready to be renamed into place.
    fn staged(
        &mut self,
        path: &RelPath,
        old: Option<&Entry>,
        new: &Entry,
        remaining_uses: &mut HashMap<Digest, usize>,
    ) -> Result<String, Errno> {
        match new {
            Entry::Dir => self.staging.stage_empty_directory(),
            Entry::Link { target } => self.staging.stage_link(target),
            Entry::File { digest, exec, .. } => {
                let remaining = remaining_uses.entry(*digest).or_default();
                *remaining = remaining.saturating_sub(1);
                let is_last = *remaining == 0;
                if !self.staging.has(digest) {
                    return Err(Errno::NODATA);
                }
                let name = self.staging.take_content(digest, is_last)?;
                let mode_from = old.filter(|old| old.is_file()).and_then(|_| self.stamps.get(path)).map(Stamp::mode);
                self.staging.set_mode(&name, mode_from, *exec)?;
                Ok(name)
            }
        }
    }

    fn create_directory(&mut self, path: &RelPath, parent: &OwnedFd) -> Result<Option<Stat>, Errno> {
        let hooks = self.hooks.clone();
        hooks.change(parent.as_fd(), path, ChangeKind::Created, &mut || {
            rustix::fs::mkdirat(parent, path.name(), DIRECTORY_MODE)?;
            beneath::stat(parent.as_fd(), path.name())
        })
    }

    fn remove_directory(&mut self, path: &RelPath, parent: &OwnedFd) -> Result<Option<Stat>, Errno> {
        let hooks = self.hooks.clone();
        hooks.change(parent.as_fd(), path, ChangeKind::Removed, &mut || {
            match rustix::fs::unlinkat(parent, path.name(), AtFlags::REMOVEDIR) {
                Err(Errno::NOENT) => Ok(None),
                // Some file systems report a directory that is not empty with EEXIST.
                Err(Errno::EXIST) => Err(Errno::NOTEMPTY),
                other => other.map(|()| None),
            }
        })
    }

    fn place_new(&mut self, path: &RelPath, parent: &OwnedFd, staged: &str) -> Result<Option<Stat>, Errno> {
        let (hooks, staging) = (self.hooks.clone(), &mut self.staging);
        hooks.change(parent.as_fd(), path, ChangeKind::Created, &mut || {
            staging.rename(staged, parent.as_fd(), path.name(), RenameFlags::NOREPLACE)?;
            beneath::stat(parent.as_fd(), path.name())
        })
    }

    /// Swaps the staged and the existing file and verifies the one that came out; an unexpected version is swapped
    /// back.
    fn replace(&mut self, path: &RelPath, parent: &OwnedFd, staged: &str) -> Result<Option<Stat>, Errno> {
        let expected = self.verify_unchanged(path, parent)?;
        let (hooks, staging) = (self.hooks.clone(), &mut self.staging);
        let staged = &staging.rename_for_swap(staged, &expected)?;
        hooks.change(parent.as_fd(), path, ChangeKind::Replaced, &mut || {
            match staging.rename(staged, parent.as_fd(), path.name(), RenameFlags::EXCHANGE) {
                // The file system can't swap two names, so the check made a moment ago has to suffice.
                Err(Errno::INVAL) => staging.rename(staged, parent.as_fd(), path.name(), RenameFlags::empty())?,
                other => {
                    other?;
                    let is_expected = staging.stat(staged)?.is_some_and(|s| expected.matches_content(&Stamp::of(&s, SystemTime::now())));
                    if !is_expected {
                        staging.rename(staged, parent.as_fd(), path.name(), RenameFlags::EXCHANGE)?;
                        return Err(Errno::AGAIN);
                    }
                    staging.remove(staged)?;
                }
            }
            beneath::stat(parent.as_fd(), path.name())
        })
    }

    /// Replaces a directory by something else. The directory is removed first: if it turns out not to be empty, it
    /// stays where it is and visible.
    fn replace_directory(&mut self, path: &RelPath, parent: &OwnedFd, staged: &str) -> Result<Option<Stat>, Errno> {
        self.remove_directory(path, parent)?;
        self.tree.set(path.clone(), None);
        self.place_new(path, parent, staged)
    }

    /// Moves the file to the staging directory and verifies it before it is deleted; an unexpected version is moved
    /// back.
    fn remove(&mut self, path: &RelPath, parent: &OwnedFd) -> Result<Option<Stat>, Errno> {
        let expected = match self.verify_unchanged(path, parent) {
            Err(Errno::NOENT) => return Ok(None),
            other => other?,
        };
        let (hooks, staging) = (self.hooks.clone(), &mut self.staging);
        hooks.change(parent.as_fd(), path, ChangeKind::Removed, &mut || {
            let aside = staging.move_in(parent.as_fd(), path.name(), &expected)?;
            let is_expected = staging.stat(&aside)?.is_some_and(|s| expected.matches_content(&Stamp::of(&s, SystemTime::now())));
            if is_expected {
                staging.remove(&aside)?;
                return Ok(None);
            }
            if staging.rename(&aside, parent.as_fd(), path.name(), RenameFlags::NOREPLACE).is_err() {
                // Another program created the name in that moment: both versions are kept.
                let kept_name = [path.name(), b".cobox-kept"].concat();
                staging.rename(&aside, parent.as_fd(), &kept_name, RenameFlags::NOREPLACE)?;
            }
            Err(Errno::AGAIN)
        })
    }

    /// Like [`Folder::remove`], but moves the file to the trash.
    fn remove_to_trash(&mut self, path: &RelPath, parent: &OwnedFd, trash_batch: &OpenBatch) -> Result<Option<Stat>, Errno> {
        let expected = match self.verify_unchanged(path, parent) {
            Err(Errno::NOENT) => return Ok(None),
            other => other?,
        };
        self.hooks.clone().change(parent.as_fd(), path, ChangeKind::Removed, &mut || {
            let taken = trash_batch.store(path, parent.as_fd())?;
            if expected.matches_content(&Stamp::of(&taken, SystemTime::now())) {
                return Ok(None);
            }
            if trash_batch.give_back(path, parent.as_fd(), path.name()).is_err() {
                // Another program created the name in that moment: both versions are kept.
                trash_batch.give_back(path, parent.as_fd(), &[path.name(), b".cobox-kept"].concat())?;
            }
            Err(Errno::AGAIN)
        })
    }

    /// Like [`Folder::replace`], but moves the old version to the trash.
    fn replace_to_trash(&mut self, path: &RelPath, parent: &OwnedFd, staged: &str, trash_batch: &OpenBatch) -> Result<Option<Stat>, Errno> {
        let expected = self.verify_unchanged(path, parent)?;
        let (folder, incoming) = trash_batch.incoming(path)?;
        self.staging.rename(staged, folder, incoming.as_bytes(), RenameFlags::NOREPLACE)?;
        self.hooks.clone().change(parent.as_fd(), path, ChangeKind::Replaced, &mut || {
            trash_batch.swap(path, parent.as_fd(), |stat| expected.matches_content(&Stamp::of(stat, SystemTime::now())))?;
            beneath::stat(parent.as_fd(), path.name())
        })
    }

    fn set_exec(&mut self, path: &RelPath, parent: &OwnedFd, exec: bool) -> Result<Option<Stat>, Errno> {
        let expected = self.verify_unchanged(path, parent)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(parent, path.name(), flags, Mode::empty())?;
        if !expected.matches(&Stamp::of(&rustix::fs::fstat(&file)?, SystemTime::now())) {
            return Err(Errno::AGAIN);
        }
        let hooks = self.hooks.clone();
        hooks.change(parent.as_fd(), path, ChangeKind::Replaced, &mut || {
            rustix::fs::fchmod(&file, Mode::from_raw_mode(with_exec(expected.mode() & 0o777, exec)))?;
            beneath::stat(parent.as_fd(), path.name())
        })
    }

    /// Returns the stamp from the last scan if the path still has it.
    fn verify_unchanged(&self, path: &RelPath, parent: &OwnedFd) -> Result<Stamp, Errno> {
        let expected = *self.stamps.get(path).ok_or(Errno::AGAIN)?;
        let now = beneath::stat(parent.as_fd(), path.name())?.ok_or(Errno::NOENT)?;
        if expected.matches(&Stamp::of(&now, SystemTime::now())) { Ok(expected) } else { Err(Errno::AGAIN) }
    }

    /// Makes the new names durable, which has to happen before both sides are recorded as equal.
    fn sync_parents(&self, parents: BTreeSet<Vec<u8>>) -> Result<(), SyncError> {
        let synced = if parents.len() <= MAX_SEPARATE_SYNCS {
            parents.iter().try_for_each(|parent| match beneath::open_beneath(self.root(), parent, OFlags::RDONLY | OFlags::DIRECTORY) {
                Ok(folder) => rustix::fs::fsync(folder),
                // The directory was deleted or can't be read; its names become durable with the file system's next
                // commit.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP) => Ok(()),
                Err(e) => Err(e),
            })
        } else {
            rustix::fs::syncfs(self.root())
        };
        synced.map_err(|e| SyncError::writing("sync directories to disk", e))
    }

    /// Takes new stamps of the placed files. After a moment without changes a stamp is no longer racy, and the file
    /// need not be read again to be trusted.
    fn refresh_stamps(&mut self, changes: &[Change], outcomes: &[Outcome]) {
        let applied_changes = || changes.iter().zip(outcomes).filter(|(_, o)| **o == Outcome::Done).map(|(c, _)| c);
        let is_large = |c: &Change| c.new.as_ref().and_then(Entry::content).is_some_and(|(_, size)| size >= STAMP_WAIT_MIN_BYTES);
        if applied_changes().any(is_large) {
            std::thread::sleep(STAMP_WAIT);
        }
        let mut parents = ParentDirectories::default();
        for change in applied_changes().filter(|c| c.new.as_ref().is_some_and(Entry::is_file)) {
            let (Some(at_start), Ok(parent)) = (self.stamps.get(&change.path), parents.open(self, &change.path)) else { continue };
            if let Ok(Some(stat)) = beneath::stat(parent.as_fd(), change.path.name()) {
                let now = Stamp::of(&stat, SystemTime::now());
                if at_start.matches(&now) {
                    self.stamps.insert(change.path.clone(), now);
                }
            }
        }
    }
}

/// Whether a change needs content that the path does not have yet.
pub fn needs_content(change: &Change) -> bool {
    let content = |e: &Option<Entry>| e.as_ref().and_then(Entry::content);
    content(&change.new).is_some() && content(&change.new) != content(&change.old)
}

/// Open parent directories. Only the last one is kept open, because consecutive changes are mostly in the same
/// directory.
#[derive(Default)]
struct ParentDirectories {
    last: BTreeMap<Vec<u8>, std::sync::Arc<OwnedFd>>,
    changed: BTreeSet<Vec<u8>>,
}

impl ParentDirectories {
    fn open(&mut self, folder: &Folder, path: &RelPath) -> Result<std::sync::Arc<OwnedFd>, Errno> {
        let parent = path.parent_bytes();
        if let Some(open) = self.last.get(parent) {
            return Ok(open.clone());
        }
        let open = std::sync::Arc::new(beneath::open_directory(folder.root(), parent)?);
        self.last.clear();
        self.last.insert(parent.to_vec(), open.clone());
        Ok(open)
    }
}
