//! One side of a sync: a folder, what is known of it, and the way content gets in. Both ends are made of this.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::File,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::fs::{Mode, OFlags};

use crate::{
    beneath,
    delta::{MAX_BLOCKS, MAX_SUMS, MIN_DELTA_BYTES, Signature, compute_signature},
    digest_cache::DigestCache,
    entry::{Digest, Entry},
    error::SyncError,
    hooks::Hooks,
    ignore_rules::{IgnoreRules, ignore_file_index},
    message::Need,
    path::RelPath,
    problem::Problem,
    scan::{KnownFiles, Scan, ScanResult},
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
    pub(crate) ignore_rules: IgnoreRules,
    pub(crate) staging: Staging,
    /// Where deleted and replaced versions go; the sandbox's end has none.
    pub(crate) trash: Option<Trash>,
    /// To be looked at with the next scan, whatever the watch says.
    pub(crate) rescan: BTreeSet<RelPath>,
    /// What is never looked into, and told as a problem.
    pub(crate) excluded: BTreeSet<RelPath>,
    watch: Option<Watch>,
    is_scanned: bool,
    /// Of an earlier run, until the first look.
    digest_cache: DigestCache,
}

impl KnownFiles for (&Tree, &HashMap<RelPath, Stamp>, &DigestCache) {
    fn entry(&self, path: &RelPath) -> Option<(&Entry, &Stamp)> {
        self.0.get(path).zip(self.1.get(path)).or_else(|| self.2.get(path))
    }
}

impl Folder {
    /// Must be made on the thread that uses it. `tell` is called when something has changed.
    pub fn open(root: OwnedFd, limits: Limits, hooks: Arc<dyn Hooks>, notify: impl Fn() + Send + 'static) -> Result<Self, SyncError> {
        let root = Arc::new(root);
        let staging = Staging::new(root.clone());
        if hooks.may_write() {
            staging.sweep().map_err(|e| SyncError::writing("over what an earlier run left", e))?;
        }
        let watch = match Watch::start(limits.watches, &*hooks, notify) {
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
            ignore_rules: IgnoreRules::default(),
            staging,
            trash: None,
            rescan: BTreeSet::new(),
            excluded: BTreeSet::new(),
            watch,
            is_scanned: false,
            digest_cache: DigestCache::default(),
        })
    }

    /// Takes what an earlier run knew: what is still so isn't read again.
    pub(crate) fn set_digest_cache(&mut self, digest_cache: DigestCache) {
        self.digest_cache = digest_cache;
    }

    /// For a later run.
    pub(crate) fn digest_cache(&self) -> DigestCache {
        if self.is_scanned { DigestCache::of(&self.tree, &self.stamps) } else { self.digest_cache.clone() }
    }

    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    pub fn problems(&self) -> &BTreeMap<RelPath, Problem> {
        &self.problems
    }

    pub(crate) fn ignore_rules(&self) -> &IgnoreRules {
        &self.ignore_rules
    }

    /// Changes may go unseen until the next look at everything.
    pub fn is_partly_watched(&self) -> bool {
        self.watch.as_ref().is_none_or(Watch::is_partial)
    }

    /// What is to be tried again is not new.
    pub fn has_changes(&self) -> bool {
        !self.is_scanned || self.watch.as_ref().is_some_and(Watch::has_dirty)
    }

    /// Looks at what changed, or at everything, and says what is different from the last time.
    pub fn scan(&mut self, all: bool) -> Result<Vec<Update>, SyncError> {
        if !self.hooks.is_root(self.root.as_fd()) {
            return Err(SyncError::RootGone);
        }
        let mut dirty = self.watch.as_ref().map(Watch::take_dirty).unwrap_or_default();
        dirty.paths.append(&mut self.rescan);
        let scan_roots = self.scan_roots(dirty.paths);
        let is_whole = all || dirty.all || !self.is_scanned || scan_roots.is_none();
        let scan_roots = if is_whole { None } else { scan_roots };
        let result = self.run_scan(scan_roots.as_ref()).inspect_err(|_| {
            // What was taken from the watch is not known now.
            self.is_scanned = false;
        })?;
        self.is_scanned = true;
        self.digest_cache = DigestCache::default();
        Ok(self.merge(result, scan_roots))
    }

    /// The topmost paths to be looked at; nothing where that is everything.
    fn scan_roots(&self, dirty: BTreeSet<RelPath>) -> Option<BTreeSet<RelPath>> {
        let mut scan_roots: BTreeSet<RelPath> = BTreeSet::new();
        for mut path in dirty {
            if ignore_file_index(path.name()).is_some() {
                // Other rules for the whole folder that holds them.
                path = path.parent()?;
            }
            while let Some(parent) = path.parent() {
                if self.tree.get(&parent).is_some_and(Entry::is_dir) {
                    break;
                }
                path = parent;
            }
            scan_roots.insert(path);
        }
        // In this order a path comes after those it is within.
        let mut last: Option<RelPath> = None;
        scan_roots.retain(|path| {
            let is_covered = last.as_ref().is_some_and(|last| path.is_within(last));
            if !is_covered {
                last = Some(path.clone());
            }
            !is_covered
        });
        Some(scan_roots)
    }

    fn run_scan(&mut self, scan_roots: Option<&BTreeSet<RelPath>>) -> Result<ScanResult, SyncError> {
        match scan_roots {
            None => self.ignore_rules.forget(None),
            Some(scan_roots) => {
                scan_roots.iter().filter(|t| self.tree.get(t).is_some_and(Entry::is_dir)).for_each(|t| self.ignore_rules.forget(Some(t)))
            }
        }
        let known = (&self.tree, &self.stamps, &self.digest_cache);
        let scan = Scan::new(&self.root, &known, &mut self.ignore_rules, self.watch.as_ref(), &self.limits, &self.hooks, &self.excluded)?;
        match scan_roots {
            None => scan.scan_all(),
            Some(scan_roots) => scan.scan_paths(scan_roots.iter()),
        }
    }

    fn merge(&mut self, result: ScanResult, scan_roots: Option<BTreeSet<RelPath>>) -> Vec<Update> {
        let mut updates: Vec<Update> = Vec::new();
        // One that is just being written is what it was until that is over.
        let is_gone = |path: &&RelPath| {
            let is_changing = result.problems.get(*path) == Some(&Problem::Changing) && self.tree.get(path).is_some_and(Entry::is_file);
            !result.entries.contains_key(*path) && !is_changing
        };
        let gone: Vec<RelPath> = match &scan_roots {
            None => self.tree.iter().map(|(path, _)| path).filter(is_gone).cloned().collect(),
            Some(scan_roots) => {
                let within = |top| self.tree.get(top).map(|_| top).into_iter().chain(self.tree.beneath(top).map(|(path, _)| path));
                scan_roots.iter().flat_map(within).filter(is_gone).cloned().collect()
            }
        };
        for path in gone {
            self.stamps.remove(&path);
            self.tree.set(path.clone(), None);
            updates.push((path, None));
        }
        for (path, (entry, stamp)) in result.entries {
            self.stamps.insert(path.clone(), stamp);
            if self.tree.get(&path) != Some(&entry) {
                updates.push((path.clone(), Some(entry.clone())));
                self.tree.set(path, Some(entry));
            }
        }
        match scan_roots {
            None => self.problems.clear(),
            // A clash is seen where a whole folder is listed.
            Some(scan_roots) => self.problems.retain(|path, p| match p {
                Problem::NameClash => !result.relisted.contains(&path.parent()) && !scan_roots.iter().any(|top| path.is_beneath(top)),
                _ => !scan_roots.iter().any(|top| path.is_within(top)),
            }),
        }
        self.rescan.extend(result.problems.iter().filter(|(_, p)| **p == Problem::Changing).map(|(path, _)| path.clone()));
        self.problems.extend(result.problems);
        updates
    }

    /// Stages what is here already, and says what has to come from the other side.
    pub(crate) fn prepare(&mut self, needs: &[Need]) -> Result<Vec<Want>, SyncError> {
        let mut local_copies: HashMap<Digest, Option<RelPath>> = needs.iter().map(|n| (n.digest, None)).collect();
        for (path, entry) in self.tree.iter() {
            if let Some((digest, _)) = entry.content()
                && let Some(source) = local_copies.get_mut(&digest)
            {
                source.get_or_insert_with(|| path.clone());
            }
        }
        let (mut wants, mut sum_count): (Vec<Want>, usize) = (Vec::new(), 0);
        let mut seen: BTreeSet<Digest> = BTreeSet::new();
        for (index, need) in needs.iter().enumerate() {
            if need.size > self.limits.file_bytes || !seen.insert(need.digest) || self.staging.has(&need.digest) {
                continue;
            }
            let source = local_copies.get(&need.digest).cloned().flatten();
            let is_staged = match source {
                _ if need.size == 0 => self.copy(None, need)?,
                Some(source) => self.copy(Some(&source), need)?,
                None => false,
            };
            if !is_staged {
                let is_worth_delta = need.size >= MIN_DELTA_BYTES && sum_count + MAX_BLOCKS <= MAX_SUMS;
                let signature = if is_worth_delta { self.signature(&need.path) } else { Signature::default() };
                sum_count += signature.sums.len();
                wants.push(Want { index: index as u32, signature });
            }
        }
        Ok(wants)
    }

    /// From a file of this side, if it still is what it was.
    fn copy(&mut self, from: Option<&RelPath>, need: &Need) -> Result<bool, SyncError> {
        let mut copy = self.staging.begin().map_err(|e| SyncError::writing("a copy", e))?;
        if let Some(from) = from {
            let Ok(file) = beneath::open_file(&self.root, from.bytes()) else {
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
        beneath::open_file(&self.root, path.bytes())
            .ok()
            .and_then(|file| compute_signature(&mut File::from(file), size).ok())
            .unwrap_or_default()
    }

    /// A file to send, if it still is what the last look saw.
    pub(crate) fn open_content(&self, need: &Need) -> Option<(File, Stamp)> {
        let known = self.stamps.get(&need.path)?;
        let is_expected = self.tree.get(&need.path).and_then(Entry::content) == Some((need.digest, need.size));
        let file = beneath::open_file(&self.root, need.path.bytes()).ok().filter(|_| is_expected)?;
        let stat = rustix::fs::fstat(&file).ok()?;
        known.matches(&Stamp::of(&stat, std::time::SystemTime::now())).then(|| (File::from(file), *known))
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
    use crate::hooks::LocalHooks;

    #[test]
    fn cached_digests_are_reused_and_changed_files_are_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = RelPath::new(b"f").unwrap();
        std::fs::write(dir.path().join("f"), "now").unwrap();
        let stamp = Stamp::of(&rustix::fs::stat(dir.path().join("f")).unwrap(), SystemTime::now() + Duration::from_secs(1));
        let digest = Digest::of(b"as it was read then");
        let tree = [(path.clone(), Entry::File { digest, size: 3, exec: false })].into_iter().collect();
        let digest_cache = DigestCache::of(&tree, &[(path.clone(), stamp)].into_iter().collect());
        let scanned = || {
            let hooks = Arc::new(LocalHooks::new(dir.path().to_owned()));
            let mut folder = Folder::open(open_root(dir.path()).unwrap(), Limits::default(), hooks, || ()).unwrap();
            folder.set_digest_cache(digest_cache.clone());
            folder.scan(true).unwrap();
            folder.tree().get(&path).and_then(Entry::content).unwrap().0
        };
        assert_eq!(scanned(), digest);
        std::fs::write(dir.path().join("f"), "new").unwrap();
        std::fs::File::open(dir.path().join("f")).unwrap().set_modified(SystemTime::now() + Duration::from_secs(5)).unwrap();
        assert_eq!(scanned(), Digest::of(b"new"));
    }
}
