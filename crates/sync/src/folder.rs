//! One side of a sync: a folder, its known contents, and the staging of new content. Both ends use it.

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
    file_stamp::Stamp,
    hooks::Hooks,
    ignore_rules::{IgnoreRules, ignore_file_index},
    message::MissingContent,
    path::RelPath,
    problem::Problem,
    scan::{KnownFiles, Scan, ScanResult},
    staging::{Staging, copy_all},
    trash::Trash,
    tree::{Tree, Update},
    watch::Watch,
};

/// Limits of one side.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of files, directories and links; each takes a few hundred bytes of memory on both sides.
    pub entries: usize,
    /// Maximum number of watched directories; changes in further ones are found by full scans.
    pub watches: usize,
    /// Maximum size of a file, in bytes.
    pub file_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { entries: 1_000_000, watches: 500_000, file_bytes: 64 << 30 }
    }
}

/// A request for content, by its index among the needs, with the signature of an old version.
#[derive(Debug, PartialEq, Eq)]
pub struct ContentRequest {
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
    /// Receives deleted and replaced versions; `None` in the sandbox.
    pub(crate) trash: Option<Trash>,
    /// Paths that the next scan includes even if the watch reports no change.
    pub(crate) rescan: BTreeSet<RelPath>,
    /// Paths that are never scanned and are reported as a problem.
    pub(crate) excluded: BTreeSet<RelPath>,
    watch: Option<Watch>,
    is_scanned: bool,
    /// Digests from an earlier run, used until the first scan is complete.
    digest_cache: DigestCache,
}

impl KnownFiles for (&Tree, &HashMap<RelPath, Stamp>, &DigestCache) {
    fn entry(&self, path: &RelPath) -> Option<(&Entry, &Stamp)> {
        self.0.get(path).zip(self.1.get(path)).or_else(|| self.2.get(path))
    }
}

impl Folder {
    /// Has to be called on the thread that uses the folder. `notify` is called after a change.
    pub fn open(root: OwnedFd, limits: Limits, hooks: Arc<dyn Hooks>, notify: impl Fn() + Send + 'static) -> Result<Self, SyncError> {
        let root = Arc::new(root);
        let staging = Staging::new(root.clone());
        if hooks.may_write() {
            staging.sweep().map_err(|e| SyncError::writing("remove the leftovers of an earlier run", e))?;
        }
        let watch = match Watch::start(limits.watches, &*hooks, notify) {
            Ok(watch) => Some(watch),
            Err(error) => {
                tracing::warn!(%error, "can't watch the folder for changes; falling back to periodic scans");
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

    /// Sets digests from an earlier run, so that unchanged files are not read again.
    pub(crate) fn set_digest_cache(&mut self, digest_cache: DigestCache) {
        self.digest_cache = digest_cache;
    }

    /// The digests to save for a later run.
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

    /// Whether some changes are only found by the next full scan.
    pub fn is_partly_watched(&self) -> bool {
        self.watch.as_ref().is_none_or(Watch::is_partial)
    }

    /// Paths that only wait for a rescan do not count as changes.
    pub fn has_changes(&self) -> bool {
        !self.is_scanned || self.watch.as_ref().is_some_and(Watch::has_dirty)
    }

    /// Scans the changed paths or everything, and returns the differences from the last scan.
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
            // The changes that were taken from the watch are lost.
            self.is_scanned = false;
        })?;
        self.is_scanned = true;
        self.digest_cache = DigestCache::default();
        Ok(self.merge(result, scan_roots))
    }

    /// The topmost paths to scan; `None` means everything.
    fn scan_roots(&self, dirty: BTreeSet<RelPath>) -> Option<BTreeSet<RelPath>> {
        let mut scan_roots: BTreeSet<RelPath> = BTreeSet::new();
        for mut path in dirty {
            if ignore_file_index(path.name()).is_some() {
                // Changed ignore rules affect the whole directory.
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
        // In this order a path comes after the directories that contain it.
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
        // A file that is being written keeps its known version until the write ends.
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
            // Name clashes are only found when a whole directory is listed.
            Some(scan_roots) => self.problems.retain(|path, p| match p {
                Problem::NameClash => !result.relisted.contains(&path.parent()) && !scan_roots.iter().any(|top| path.is_beneath(top)),
                _ => !scan_roots.iter().any(|top| path.is_within(top)),
            }),
        }
        self.rescan.extend(result.problems.iter().filter(|(_, p)| **p == Problem::Changing).map(|(path, _)| path.clone()));
        self.problems.extend(result.problems);
        updates
    }

    /// Stages the content that this side has already, and returns requests for the rest.
    pub(crate) fn prepare(&mut self, needs: &[MissingContent]) -> Result<Vec<ContentRequest>, SyncError> {
        let mut local_copies: HashMap<Digest, Option<RelPath>> = needs.iter().map(|n| (n.digest, None)).collect();
        for (path, entry) in self.tree.iter() {
            if let Some((digest, _)) = entry.content()
                && let Some(source) = local_copies.get_mut(&digest)
            {
                source.get_or_insert_with(|| path.clone());
            }
        }
        let (mut wants, mut sum_count): (Vec<ContentRequest>, usize) = (Vec::new(), 0);
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
                wants.push(ContentRequest { index: index as u32, signature });
            }
        }
        Ok(wants)
    }

    /// Stages a copy of a local file if it has not changed.
    fn copy(&mut self, from: Option<&RelPath>, need: &MissingContent) -> Result<bool, SyncError> {
        let mut copy = self.staging.begin().map_err(|e| SyncError::writing("copy a file", e))?;
        if let Some(from) = from {
            let Ok(file) = beneath::open_file(&self.root, from.bytes()) else {
                self.staging.abandon(copy);
                return Ok(false);
            };
            if let Err(e) = copy_all(&mut File::from(file), &mut copy) {
                self.staging.abandon(copy);
                return Err(SyncError::writing_io("copy a file", e));
            }
        }
        Ok(self.staging.finish(copy, need.digest, need.size))
    }

    /// Signature of the existing version; empty if a delta is not worthwhile.
    fn signature(&self, path: &RelPath) -> Signature {
        let Some((_, size)) = self.tree.get(path).and_then(Entry::content) else { return Signature::default() };
        if size < MIN_DELTA_BYTES {
            return Signature::default();
        }
        // If the old version turns out to be unusable when it is copied, the whole file is sent.
        beneath::open_file(&self.root, path.bytes())
            .ok()
            .and_then(|file| compute_signature(&mut File::from(file), size).ok())
            .unwrap_or_default()
    }

    /// Opens a file to send if it has not changed since the last scan.
    pub(crate) fn open_content(&self, need: &MissingContent) -> Option<(File, Stamp)> {
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

/// Opens a folder as the root for [`Folder::open`].
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
        let digest = Digest::of(b"the content as it was read");
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
