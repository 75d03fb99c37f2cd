//! How a sync changes the sandbox's files: as the workload's user, with the same locks as other writers, and recorded
//! for watchers and the activity feed.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use cobox_protocol::Capability;
use cobox_sync::{ChangeKind, DigestCache, Hooks, RelPath};
use cobox_token::Claims;
use parking_lot::Mutex;
use rustix::{fs::Stat, io::Errno};

use super::DigestCaches;
use crate::{
    FileWorkers,
    activity_log::ActivityLog,
    auth::Authority,
    files::{ChangeRecorder, Root, SandboxPath, WriteLog},
    server::Server,
};

/// Maximum number of changes reported one by one; more within one interval are reported as one.
const FEW_CHANGES: usize = 8;

pub struct SandboxFiles {
    workers: FileWorkers,
    root: Arc<Root>,
    path: SandboxPath,
    writes: Arc<WriteLog>,
    recorder: ChangeRecorder,
    authority: Arc<Authority>,
    claims: Mutex<Arc<Claims>>,
    may_write: AtomicBool,
    is_read_only: bool,
    changes: Mutex<Changes>,
    digest_caches: Arc<DigestCaches>,
}

#[derive(Default)]
struct Changes {
    first_changes: Vec<(SandboxPath, Option<u64>)>,
    count: u64,
}

impl SandboxFiles {
    pub fn new(server: &Server, claims: Arc<Claims>, path: SandboxPath, recorder: ChangeRecorder, is_read_only: bool) -> Self {
        let files = Self {
            workers: server.files.workers().clone(),
            root: server.files.workers().root(),
            path,
            writes: server.files.writes(),
            recorder,
            authority: server.authority.clone(),
            claims: Mutex::new(claims.clone()),
            may_write: AtomicBool::new(false),
            is_read_only,
            changes: Mutex::default(),
            digest_caches: server.syncs.digest_caches.clone(),
        };
        files.renew(claims);
        files
    }

    /// The renewed token may allow less.
    pub fn renew(&self, claims: Arc<Claims>) {
        self.may_write.store(!self.is_read_only && claims.scope.contains(Capability::FsWrite), Ordering::Relaxed);
        *self.claims.lock() = claims;
    }

    /// Adds the changes since the last call to the activity feed.
    pub fn report_changes(&self, activity_log: &ActivityLog) {
        let Changes { first_changes, count } = std::mem::take(&mut *self.changes.lock());
        let claims = self.claims.lock().clone();
        if count > FEW_CHANGES as u64 {
            return activity_log.record_writes_beneath(&claims, &self.path, count);
        }
        for (path, size) in first_changes {
            match size {
                Some(size) => activity_log.record_write(&claims, &path, size),
                None => activity_log.record_removal(&claims, &path, None),
            }
        }
    }

    fn record_change(&self, path: &RelPath, stat: Option<&Stat>) {
        let mut changes = self.changes.lock();
        changes.count += 1;
        if changes.first_changes.len() < FEW_CHANGES
            && let Ok(path) = SandboxPath::new([self.path.bytes(), b"/", path.bytes()].concat())
        {
            changes.first_changes.push((path, stat.map(|s| u64::try_from(s.st_size).unwrap_or(0))));
        }
    }
}

impl Hooks for SandboxFiles {
    fn spawn(&self, name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        self.workers.spawn(name, move |_| work())
    }

    fn change(
        &self,
        directory: BorrowedFd,
        path: &RelPath,
        kind: ChangeKind,
        step: &mut dyn FnMut() -> Result<Option<Stat>, Errno>,
    ) -> Result<Option<Stat>, Errno> {
        // Held over the check and the change, so that only one of two concurrent boxd writers succeeds.
        let mut writes = self.writes.lock();
        let removal = (kind == ChangeKind::Removed).then(|| self.recorder.begin_removal(directory, path.name()));
        let stat = step()?;
        if let Some(removal) = removal {
            removal.commit();
        }
        if let Some(stat) = &stat {
            writes.record(stat);
            self.recorder.record_placed(directory, path.name(), stat, kind == ChangeKind::Created);
        }
        drop(writes);
        self.record_change(path, stat.as_ref());
        Ok(stat)
    }

    fn is_root(&self, root: BorrowedFd) -> bool {
        match (self.root.stat(self.path.bytes()), rustix::fs::fstat(root)) {
            (Ok(now), Ok(opened)) => (now.st_dev, now.st_ino) == (opened.st_dev, opened.st_ino),
            _ => false,
        }
    }

    fn load_digests(&self) -> DigestCache {
        self.digest_caches.take(&self.path)
    }

    fn save_digests(&self, digests: DigestCache) {
        self.digest_caches.store(&self.path, digests);
    }

    fn is_full(&self) -> bool {
        self.authority.pushed_state().disk_full
    }

    fn may_write(&self) -> bool {
        self.may_write.load(Ordering::Relaxed)
    }
}
