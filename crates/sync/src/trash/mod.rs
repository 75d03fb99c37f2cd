//! The trash of the local folder. Every file that sync deletes or replaces locally is renamed into it first, and stays
//! until it expires or the user empties the trash. The sandbox has no trash.
//!
//! It is a hidden directory at the top of the folder. Only there a rename is certain to stay on one file system: the
//! parent directory may be on another one or read-only, and so may the user's state directory. Scans skip it by name,
//! and git by the `.gitignore` in it.
//!
//! A batch is a directory with a journal and the stored files, named by number. Its records are durable before the
//! first rename, and each file is moved by one rename, so after a kill at any moment a file is in its place or in the
//! trash.

mod batch;
mod journal;
mod restore;

use std::{
    fmt,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rustix::{
    fs::{AtFlags, FlockOperation, Mode, OFlags},
    io::Errno,
};

pub(crate) use self::batch::OpenBatch;
pub use self::restore::{RestoreFailure, RestoreReport, RestoreScope, RestoredPath};
use self::{
    batch::{Batch, BatchName},
    journal::JournalRecord,
};
use crate::{
    beneath,
    entry::Entry,
    error::SyncError,
    folder::open_root,
    ignore_rules::TRASH_DIRECTORY,
    path::RelPath,
    reconcile::Change,
    staging::{GITIGNORE, list},
};

/// 4 GiB: the changes of an agent in a usual repository over a day, and a small part of a laptop's disk.
const DEFAULT_BYTES: u64 = 4 << 30;
/// One week: long enough to notice a loss.
const DEFAULT_MAX_AGE: Duration = Duration::from_secs(7 * 24 * 3600);
/// Minimum size charged for a stored file, in bytes: the block it occupies, so that empty files are limited too.
const BLOCK_BYTES: u64 = 4096;
/// Changes closer together than this belong to one batch: `rm -rf` of a large tree takes several rounds.
const BATCH_IDLE: Duration = Duration::from_secs(2);
/// Maximum duration of a batch, so that `undo` of the last one stays a small step while an agent works continuously.
const MAX_BATCH_DURATION: Duration = Duration::from_secs(60);
/// Interval at which a running sync measures the trash again and removes expired batches.
const RECOUNT_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum wait for another process that uses the trash. It only holds the lock for renames.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);
const FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Limits of the trash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrashLimits {
    /// Maximum total size of stored files, in bytes; sync halts when a change would exceed it.
    pub bytes: u64,
    /// Age after which batches are removed, plus as much again, but no more than a day.
    pub age: Duration,
}

impl Default for TrashLimits {
    fn default() -> Self {
        Self { bytes: DEFAULT_BYTES, age: DEFAULT_MAX_AGE }
    }
}

/// The trash has not enough space for the next changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrashFull {
    pub needed: u64,
    pub used: u64,
    pub limit: u64,
}

impl fmt::Display for TrashFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64);
        let Self { needed, used, limit } = *self;
        write!(f, "the trash is full: {} would be deleted or replaced here, and {} of {} are used", mib(needed), mib(used), mib(limit))
    }
}

/// A file in the trash.
#[derive(Clone, Debug)]
pub struct TrashItem {
    /// `BATCH/NUMBER`.
    pub id: String,
    pub batch: String,
    pub at: SystemTime,
    pub path: RelPath,
    pub old: Entry,
    pub size: u64,
    /// Whether sync replaced the file; otherwise it was deleted.
    pub is_replaced: bool,
    /// Whether a restore moved the file here instead of sync.
    pub is_from_undo: bool,
}

/// Number and total size of the files that were erased.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EmptiedTrash {
    pub files: usize,
    pub bytes: u64,
}

pub struct Trash {
    root: Arc<OwnedFd>,
    /// Path of the folder, for messages.
    folder: PathBuf,
    limits: TrashLimits,
    /// Size at the last count plus this process's additions since, in bytes.
    used: u64,
    counted_at: Option<Instant>,
    current: Option<CurrentBatch>,
}

/// The batch that still accepts changes.
struct CurrentBatch {
    name: BatchName,
    next: u64,
    began: Instant,
    last: Instant,
}

impl CurrentBatch {
    fn is_open(&self, now: Instant) -> bool {
        now.duration_since(self.last) < BATCH_IDLE && now.duration_since(self.began) < MAX_BATCH_DURATION
    }
}

/// The trash directory, locked for this process until it is dropped.
struct LockedTrash(OwnedFd);

impl Trash {
    pub(crate) fn new(root: Arc<OwnedFd>, folder: &Path, limits: TrashLimits) -> Self {
        Self { root, folder: folder.to_owned(), limits, used: 0, counted_at: None, current: None }
    }

    /// Opens the trash of a folder.
    pub fn open(folder: &Path, limits: TrashLimits) -> Result<Self, SyncError> {
        Ok(Self::new(Arc::new(open_root(folder).map_err(SyncError::Root)?), folder, limits))
    }

    /// Used and permitted size, in bytes.
    pub(crate) fn usage(&self) -> (u64, u64) {
        (self.used, self.limits.bytes)
    }

    /// Name of the current batch.
    pub(crate) fn batch(&self) -> Option<String> {
        self.current.as_ref().map(|current| current.name.to_string())
    }

    /// Checks whether these changes fit. Measures the trash again if its content may have changed, and removes expired
    /// batches.
    pub(crate) fn check_capacity(&mut self, changes: &[Change]) -> Result<Option<TrashFull>, SyncError> {
        let stored =
            changes.iter().filter_map(|change| displaced(change).filter(|r| r.is_stored())).map(|record| charged_bytes(&record.old));
        let needed = stored.fold(0, u64::saturating_add);
        let is_old = self.counted_at.is_none_or(|at| at.elapsed() >= RECOUNT_INTERVAL);
        if is_old || self.used.saturating_add(needed) > self.limits.bytes {
            self.recount(now_millis())?;
        }
        let is_full = needed > 0 && self.used.saturating_add(needed) > self.limits.bytes;
        Ok(is_full.then_some(TrashFull { needed, used: self.used, limit: self.limits.bytes }))
    }

    fn recount(&mut self, now: u64) -> Result<(), SyncError> {
        self.used = 0;
        if let Some(top) = self.lock(false)? {
            let max_age = u64::try_from(self.limits.age.as_millis()).unwrap_or(u64::MAX);
            for batch in top.batches()? {
                if batch.is_expired(now, max_age).map_err(trash_error)? {
                    let EmptiedTrash { files, bytes } = batch.remove(&top.0).map_err(trash_error)?;
                    tracing::info!(batch = %batch.name, files, bytes, "a trash batch has expired");
                    continue;
                }
                batch.recover().map_err(trash_error)?;
                self.used += batch.bytes().map_err(trash_error)?;
            }
        }
        self.counted_at = Some(Instant::now());
        Ok(())
    }

    /// Records the versions that these changes remove, durably, and returns the batch that receives them. `mode` looks
    /// up a path's permission bits.
    pub(crate) fn begin(&mut self, changes: &[Change], mode: impl Fn(&RelPath) -> u32) -> Result<Option<OpenBatch>, SyncError> {
        let mut records: Vec<JournalRecord> = changes.iter().filter_map(displaced).collect();
        if records.is_empty() {
            return Ok(None);
        }
        let top = self.lock(true)?.ok_or_else(|| trash_error(Errno::NOENT))?;
        let now = Instant::now();
        let open = match self.current.take().filter(|current| current.is_open(now)) {
            // `None` if another command has emptied or restored the batch.
            Some(current) => Batch::open(&top.0, current.name).map_err(trash_error)?.map(|batch| (batch, current.next, current.began)),
            None => None,
        };
        let (batch, mut next, began) = match open {
            Some(open) => open,
            None => (Batch::create(&top.0, false).map_err(trash_error)?, 0, now),
        };
        let at = now_millis();
        for record in &mut records {
            (record.number, record.at, record.mode) = (next, at, mode(&record.path));
            next += 1;
        }
        batch.append(&records).map_err(trash_error)?;
        self.used += records.iter().filter(|r| r.is_stored()).map(|r| charged_bytes(&r.old)).sum::<u64>();
        self.current = Some(CurrentBatch { name: batch.name, next, began, last: now });
        Ok(Some(OpenBatch::new(top.0, batch, &records)))
    }

    /// The stored files, oldest first.
    pub fn items(&self) -> Result<Vec<TrashItem>, SyncError> {
        let Some(top) = self.lock(false)? else { return Ok(Vec::new()) };
        let mut items = Vec::new();
        for batch in top.recovered()? {
            for (record, size) in batch.stored().map_err(trash_error)? {
                items.push(TrashItem {
                    id: format!("{}/{}", batch.name, record.number),
                    batch: batch.name.to_string(),
                    at: UNIX_EPOCH + Duration::from_millis(record.at),
                    size,
                    is_replaced: record.new.is_some(),
                    is_from_undo: batch.name.is_undo,
                    path: record.path,
                    old: record.old,
                });
            }
        }
        Ok(items)
    }

    /// Erases all batches, or those older than a given time.
    pub fn empty(&self, before: Option<SystemTime>) -> Result<EmptiedTrash, SyncError> {
        let mut erased = EmptiedTrash::default();
        let Some(top) = self.lock(false)? else { return Ok(erased) };
        let before = before.map_or(u64::MAX, millis);
        for batch in top.batches()?.into_iter().filter(|batch| batch.name.at < before) {
            let EmptiedTrash { files, bytes } = batch.remove(&top.0).map_err(trash_error)?;
            (erased.files, erased.bytes) = (erased.files + files, erased.bytes + bytes);
        }
        if top.batches()?.is_empty() {
            // A directory that can't be removed does no harm.
            let _ = rustix::fs::unlinkat(&top.0, GITIGNORE.0, AtFlags::empty());
            let _ = rustix::fs::unlinkat(&self.root, TRASH_DIRECTORY, AtFlags::REMOVEDIR);
        }
        Ok(erased)
    }

    /// Opens and locks the directory; `None` if it does not exist and `create` is false.
    fn lock(&self, create: bool) -> Result<Option<LockedTrash>, SyncError> {
        let began = Instant::now();
        loop {
            let top = match self.open_directory(create) {
                Ok(top) => top,
                Err(Errno::NOENT) if !create => return Ok(None),
                Err(Errno::NOTDIR | Errno::LOOP) => return Err(SyncError::TrashBlocked(self.folder.join(TRASH_DIRECTORY))),
                Err(e) => return Err(trash_error(e)),
            };
            match rustix::fs::flock(&top, FlockOperation::NonBlockingLockExclusive) {
                // `empty` removes the directory while it holds the lock, so the current directory has to be opened
                // again.
                Ok(()) if beneath::is_same_file(&top, &self.root, TRASH_DIRECTORY.as_bytes()) => return Ok(Some(LockedTrash(top))),
                Ok(()) => {}
                Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(LOCK_RETRY_INTERVAL),
                Err(e) => return Err(trash_error(e)),
            }
            if began.elapsed() > LOCK_TIMEOUT {
                return Err(SyncError::TrashBusy);
            }
        }
    }

    fn open_directory(&self, create: bool) -> Result<OwnedFd, Errno> {
        if create {
            match rustix::fs::mkdirat(&self.root, TRASH_DIRECTORY, Mode::from_raw_mode(0o700)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(e),
            }
        }
        let top = beneath::open_beneath(&self.root, TRASH_DIRECTORY.as_bytes(), FLAGS)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if create && let Ok(file) = rustix::fs::openat(&top, GITIGNORE.0, flags, Mode::from_raw_mode(0o600)) {
            // Without it git only shows the directory as untracked.
            let _ = rustix::io::write(&file, GITIGNORE.1);
        }
        Ok(top)
    }
}

impl LockedTrash {
    /// All batches, oldest first.
    fn batches(&self) -> Result<Vec<Batch>, SyncError> {
        let mut names: Vec<BatchName> = list(&self.0).map_err(trash_error)?.iter().filter_map(|name| BatchName::parse(name)).collect();
        names.sort_unstable();
        let open = |name| Batch::open(&self.0, name).map_err(trash_error);
        names.into_iter().map(open).filter_map(Result::transpose).collect()
    }

    /// Like [`LockedTrash::batches`], after recovery from killed processes.
    fn recovered(&self) -> Result<Vec<Batch>, SyncError> {
        let batches = self.batches()?;
        batches.iter().try_for_each(|batch| batch.recover().map_err(trash_error))?;
        Ok(batches)
    }
}

/// The record of the version that a change removes; `None` if it only adds.
fn displaced(change: &Change) -> Option<JournalRecord> {
    let Change { path, old, new } = change;
    let old = old.clone().filter(|old| Some(old) != new.as_ref())?;
    Some(JournalRecord { number: 0, at: 0, path: path.clone(), old, mode: 0, new: new.clone() })
}

/// Size charged for a stored version, in bytes.
fn charged_bytes(old: &Entry) -> u64 {
    whole_blocks(old.content().map_or(0, |(_, size)| size))
}

fn whole_blocks(size: u64) -> u64 {
    size.max(1).div_ceil(BLOCK_BYTES).saturating_mul(BLOCK_BYTES)
}

fn trash_error(e: Errno) -> SyncError {
    SyncError::writing("write to the trash", e)
}

fn now_millis() -> u64 {
    millis(SystemTime::now())
}

fn millis(at: SystemTime) -> u64 {
    u64::try_from(at.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_set_forward_expires_nothing_until_a_further_day_has_passed() {
        const DAY: u64 = 24 * 3600 * 1000;
        let dir = tempfile::tempdir().unwrap();
        let mut trash = Trash::open(dir.path(), TrashLimits::default()).unwrap();
        let old = Entry::File { digest: crate::entry::Digest::of(b"x"), size: 1, exec: false };
        let change = Change { path: RelPath::new(b"x").unwrap(), old: Some(old), new: None };
        drop(trash.begin(&[change], |_| 0o644).unwrap().unwrap());
        let batches = |trash: &Trash| trash.lock(false).unwrap().unwrap().batches().unwrap().len();
        let began = now_millis();
        for (now, why) in [
            (began + 8 * DAY, "set forward"),
            (began + 8 * DAY + DAY - 1, "for less than a day"),
            (began + DAY, "set back"),
            (began + 30 * DAY, "set forward again"),
            (began + 8 * DAY, "set back, but the batch is older than the limit"),
            (began + 9 * DAY - 1, "less than a day later"),
        ] {
            trash.recount(now).unwrap();
            assert_eq!(batches(&trash), 1, "{why}");
        }
        trash.recount(began + 9 * DAY).unwrap();
        assert_eq!(batches(&trash), 0, "a day later");
    }
}
