//! One side of a sync: a folder, what is known of it, and the way content gets in. Both ends are made of this.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::File,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::fs::{Mode, OFlags};

use crate::{
    delta::{MAX_BLOCKS, MAX_SUMS, MIN_DELTA_BYTES, Signature, sign},
    dirs,
    entry::{Digest, Entry},
    error::SyncError,
    hooks::Hooks,
    memory::Memory,
    message::Need,
    path::RelPath,
    problem::Problem,
    rules::{Rules, rule_file},
    scan::{Found, Known, Scan},
    staging::{Staging, copy_all},
    stamp::Stamp,
    trash::Trash,
    tree::{Tree, Update},
    watch::Watch,
};

/// What one side may come to.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Files, folders and links; each costs a few hundred bytes of memory on both sides.
    pub entries: usize,
    /// Folders that are watched; beyond it changes are found by looking.
    pub watches: usize,
    /// Largest file, in bytes.
    pub file_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { entries: 1_000_000, watches: 500_000, file_bytes: 64 << 30 }
    }
}

/// Content to be sent, by its number among the needs, with what is known of an old version.
#[derive(Debug, PartialEq, Eq)]
pub struct Want {
    pub index: u32,
    pub signature: Signature,
}

pub struct Folder {
    pub(crate) root: Arc<OwnedFd>,
    pub(crate) hooks: Arc<dyn Hooks>,
    pub(crate) limits: Limits,
    pub(crate) tree: Tree,
    pub(crate) stamps: HashMap<RelPath, Stamp>,
    pub(crate) problems: BTreeMap<RelPath, Problem>,
    pub(crate) rules: Rules,
    pub(crate) staging: Staging,
    /// Where deleted and replaced versions go; the sandbox's end has none.
    pub(crate) trash: Option<Trash>,
    /// To be looked at with the next scan, whatever the watch says.
    pub(crate) again: BTreeSet<RelPath>,
    /// What is never looked into, and told as a problem.
    pub(crate) own: BTreeSet<RelPath>,
    watch: Option<Watch>,
    is_known: bool,
    /// Of an earlier run, until the first look.
    memory: Memory,
}

impl Known for (&Tree, &HashMap<RelPath, Stamp>, &Memory) {
    fn entry(&self, path: &RelPath) -> Option<(&Entry, &Stamp)> {
        self.0.get(path).zip(self.1.get(path)).or_else(|| self.2.get(path))
    }
}

impl Folder {
    /// Must be made on the thread that uses it. `tell` is called when something has changed.
    pub fn open(root: OwnedFd, limits: Limits, hooks: Arc<dyn Hooks>, tell: impl Fn() + Send + 'static) -> Result<Self, SyncError> {
        let root = Arc::new(root);
        let staging = Staging::new(root.clone());
        if hooks.may_write() {
            staging.sweep().map_err(|e| SyncError::writing("over what an earlier run left", e))?;
        }
        let watch = match Watch::start(limits.watches, &*hooks, tell) {
            Ok(watch) => Some(watch),
            Err(error) => {
                tracing::warn!(%error, "changes can't be watched for; the folder is looked through instead");
                None
            }
        };
        Ok(Self {
            root,
            hooks,
            limits,
            tree: Tree::default(),
            stamps: HashMap::new(),
            problems: BTreeMap::new(),
            rules: Rules::default(),
            staging,
            trash: None,
            again: BTreeSet::new(),
            own: BTreeSet::new(),
            watch,
            is_known: false,
            memory: Memory::default(),
        })
    }

    /// Takes what an earlier run knew: what is still so isn't read again.
    pub(crate) fn recall(&mut self, memory: Memory) {
        self.memory = memory;
    }

    /// For a later run.
    pub(crate) fn memory(&self) -> Memory {
        if self.is_known { Memory::of(&self.tree, &self.stamps) } else { self.memory.clone() }
    }

    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    pub fn problems(&self) -> &BTreeMap<RelPath, Problem> {
        &self.problems
    }

    pub(crate) fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Changes may go unseen until the next look at everything.
    pub fn is_partly_watched(&self) -> bool {
        self.watch.as_ref().is_none_or(Watch::is_partial)
    }

    /// What is to be tried again is not new.
    pub fn has_news(&self) -> bool {
        !self.is_known || self.watch.as_ref().is_some_and(Watch::has_dirty)
    }

    /// Looks at what changed, or at everything, and says what is different from the last time.
    pub fn scan(&mut self, all: bool) -> Result<Vec<Update>, SyncError> {
        if !self.hooks.is_root(self.root.as_fd()) {
            return Err(SyncError::RootGone);
        }
        let mut dirty = self.watch.as_ref().map(Watch::take).unwrap_or_default();
        dirty.paths.append(&mut self.again);
        let tops = self.tops(dirty.paths);
        let is_whole = all || dirty.all || !self.is_known || tops.is_none();
        let tops = if is_whole { None } else { tops };
        let found = self.look(tops.as_ref()).inspect_err(|_| {
            // What was taken from the watch is not known now.
            self.is_known = false;
        })?;
        self.is_known = true;
        self.memory = Memory::default();
        Ok(self.take_in(found, tops))
    }

    /// The topmost paths to be looked at; nothing where that is everything.
    fn tops(&self, dirty: BTreeSet<RelPath>) -> Option<BTreeSet<RelPath>> {
        let mut tops: BTreeSet<RelPath> = BTreeSet::new();
        for mut path in dirty {
            if rule_file(path.name()).is_some() {
                // Other rules for the whole folder that holds them.
                path = path.parent()?;
            }
            while let Some(parent) = path.parent() {
                if self.tree.get(&parent).is_some_and(Entry::is_dir) {
                    break;
                }
                path = parent;
            }
            tops.insert(path);
        }
        // In this order a path comes after those it is within.
        let mut last: Option<RelPath> = None;
        tops.retain(|path| {
            let is_covered = last.as_ref().is_some_and(|last| path.is_within(last));
            if !is_covered {
                last = Some(path.clone());
            }
            !is_covered
        });
        Some(tops)
    }

    fn look(&mut self, tops: Option<&BTreeSet<RelPath>>) -> Result<Found, SyncError> {
        match tops {
            None => self.rules.forget(None),
            Some(tops) => tops.iter().filter(|t| self.tree.get(t).is_some_and(Entry::is_dir)).for_each(|t| self.rules.forget(Some(t))),
        }
        let known = (&self.tree, &self.stamps, &self.memory);
        let scan = Scan::new(&self.root, &known, &mut self.rules, self.watch.as_ref(), &self.limits, &self.hooks, &self.own)?;
        match tops {
            None => scan.whole(),
            Some(tops) => scan.parts(tops.iter()),
        }
    }

    fn take_in(&mut self, found: Found, tops: Option<BTreeSet<RelPath>>) -> Vec<Update> {
        let mut updates: Vec<Update> = Vec::new();
        // One that is just being written is what it was until that is over.
        let is_gone = |path: &&RelPath| {
            let is_changing = found.problems.get(*path) == Some(&Problem::Changing) && self.tree.get(path).is_some_and(Entry::is_file);
            !found.entries.contains_key(*path) && !is_changing
        };
        let gone: Vec<RelPath> = match &tops {
            None => self.tree.iter().map(|(path, _)| path).filter(is_gone).cloned().collect(),
            Some(tops) => {
                let within = |top| self.tree.get(top).map(|_| top).into_iter().chain(self.tree.beneath(top).map(|(path, _)| path));
                tops.iter().flat_map(within).filter(is_gone).cloned().collect()
            }
        };
        for path in gone {
            self.stamps.remove(&path);
            self.tree.set(path.clone(), None);
            updates.push((path, None));
        }
        for (path, (entry, stamp)) in found.entries {
            self.stamps.insert(path.clone(), stamp);
            if self.tree.get(&path) != Some(&entry) {
                updates.push((path.clone(), Some(entry.clone())));
                self.tree.set(path, Some(entry));
            }
        }
        match tops {
            None => self.problems.clear(),
            // A clash is seen where a whole folder is listed.
            Some(tops) => self.problems.retain(|path, p| match p {
                Problem::Clash => !found.relisted.contains(&path.parent()) && !tops.iter().any(|top| path.is_beneath(top)),
                _ => !tops.iter().any(|top| path.is_within(top)),
            }),
        }
        self.again.extend(found.problems.iter().filter(|(_, p)| **p == Problem::Changing).map(|(path, _)| path.clone()));
        self.problems.extend(found.problems);
        updates
    }

    /// Stages what is here already, and says what has to come from the other side.
    pub(crate) fn prepare(&mut self, needs: &[Need]) -> Result<Vec<Want>, SyncError> {
        let mut places: HashMap<Digest, Option<RelPath>> = needs.iter().map(|n| (n.digest, None)).collect();
        for (path, entry) in self.tree.iter() {
            if let Some((digest, _)) = entry.content()
                && let Some(place) = places.get_mut(&digest)
            {
                place.get_or_insert_with(|| path.clone());
            }
        }
        let (mut wants, mut sums): (Vec<Want>, usize) = (Vec::new(), 0);
        let mut seen: BTreeSet<Digest> = BTreeSet::new();
        for (index, need) in needs.iter().enumerate() {
            if need.size > self.limits.file_bytes || !seen.insert(need.digest) || self.staging.has(&need.digest) {
                continue;
            }
            let place = places.get(&need.digest).cloned().flatten();
            let is_staged = match place {
                _ if need.size == 0 => self.copy(None, need)?,
                Some(place) => self.copy(Some(&place), need)?,
                None => false,
            };
            if !is_staged {
                let is_worth_it = need.size >= MIN_DELTA_BYTES && sums + MAX_BLOCKS <= MAX_SUMS;
                let signature = if is_worth_it { self.signature(&need.path) } else { Signature::default() };
                sums += signature.sums.len();
                wants.push(Want { index: index as u32, signature });
            }
        }
        Ok(wants)
    }

    /// From a file of this side, if it still is what it was.
    fn copy(&mut self, from: Option<&RelPath>, need: &Need) -> Result<bool, SyncError> {
        let mut copy = self.staging.begin().map_err(|e| SyncError::writing("a copy", e))?;
        if let Some(from) = from {
            let Ok(file) = dirs::readable(&self.root, from.bytes()) else {
                self.staging.abandon(copy);
                return Ok(false);
            };
            if let Err(e) = copy_all(&mut File::from(file), &mut copy) {
                self.staging.abandon(copy);
                return Err(SyncError::writing_io("a copy", e));
            }
        }
        Ok(self.staging.finish(copy, need.digest, need.size))
    }

    /// Of the version that is here; empty where it isn't worth it.
    fn signature(&self, path: &RelPath) -> Signature {
        let Some((_, size)) = self.tree.get(path).and_then(Entry::content) else { return Signature::default() };
        if size < MIN_DELTA_BYTES {
            return Signature::default();
        }
        // What is wrong with it shows where it is read for the copy: then all comes from the other side.
        dirs::readable(&self.root, path.bytes()).ok().and_then(|file| sign(&mut File::from(file), size).ok()).unwrap_or_default()
    }

    /// A file to send, if it still is what the last look saw.
    pub(crate) fn open_content(&self, need: &Need) -> Option<(File, Stamp)> {
        let known = self.stamps.get(&need.path)?;
        let is_it = self.tree.get(&need.path).and_then(Entry::content) == Some((need.digest, need.size));
        let file = dirs::readable(&self.root, need.path.bytes()).ok().filter(|_| is_it)?;
        let stat = rustix::fs::fstat(&file).ok()?;
        known.is_same(&Stamp::of(&stat, std::time::SystemTime::now())).then(|| (File::from(file), *known))
    }

    pub(crate) fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }
}

/// Opens a folder, as a root for [`Folder::open`].
pub fn open_root(path: &std::path::Path) -> std::io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::hooks::Own;

    #[test]
    fn what_an_earlier_run_knew_is_not_read_again_and_what_changed_since_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = RelPath::new(b"f").unwrap();
        std::fs::write(dir.path().join("f"), "now").unwrap();
        let stamp = Stamp::of(&rustix::fs::stat(dir.path().join("f")).unwrap(), SystemTime::now() + Duration::from_secs(1));
        let digest = Digest::of(b"as it was read then");
        let tree = [(path.clone(), Entry::File { digest, size: 3, exec: false })].into_iter().collect();
        let memory = Memory::of(&tree, &[(path.clone(), stamp)].into_iter().collect());
        let scanned = || {
            let hooks = Arc::new(Own::new(dir.path().to_owned()));
            let mut folder = Folder::open(open_root(dir.path()).unwrap(), Limits::default(), hooks, || ()).unwrap();
            folder.recall(memory.clone());
            folder.scan(true).unwrap();
            folder.tree().get(&path).and_then(Entry::content).unwrap().0
        };
        assert_eq!(scanned(), digest);
        std::fs::write(dir.path().join("f"), "new").unwrap();
        std::fs::File::open(dir.path().join("f")).unwrap().set_modified(SystemTime::now() + Duration::from_secs(5)).unwrap();
        assert_eq!(scanned(), Digest::of(b"new"));
    }
}
