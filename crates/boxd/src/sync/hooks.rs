//! How a sync changes the sandbox's files: as the workload's user, with the same locks as other writers, and recorded
//! for watchers and the activity feed.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use cobox_protocol::Capability;
use cobox_sync::{ChangeKind, DigestCache, Hooks, RelPath};
use cobox_token::Claims;
use rustix::{fs::Stat, io::Errno};

use super::Memories;
use crate::{
    FileWorkers,
    auth::Authority,
    files::{ChangeRecorder, Root, SandboxPath, WriteLog},
    happenings::HappeningLog,
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
    only_reads: bool,
    changes: Mutex<Changes>,
    memories: Arc<Memories>,
}

#[derive(Default)]
struct Changes {
    first: Vec<(SandboxPath, Option<u64>)>,
    count: u64,
}

impl SandboxFiles {
    pub fn new(server: &Server, claims: Arc<Claims>, path: SandboxPath, recorder: ChangeRecorder, only_reads: bool) -> Self {
        let files = Self {
            workers: server.files.workers().clone(),
            root: server.files.workers().root(),
            path,
            writes: server.files.writes(),
            recorder,
            authority: server.authority.clone(),
            claims: Mutex::new(claims.clone()),
            may_write: AtomicBool::new(false),
            only_reads,
            changes: Mutex::default(),
            memories: server.syncs.memories.clone(),
        };
        files.renew(claims);
        files
    }

    /// The renewed token may allow less.
    pub fn renew(&self, claims: Arc<Claims>) {
        self.may_write.store(!self.only_reads && claims.scope.contains(Capability::FsWrite), Ordering::Relaxed);
        *self.claims.lock().unwrap_or_else(PoisonError::into_inner) = claims;
    }

    /// Adds the changes since the last call to the activity feed.
    pub fn tell(&self, happenings: &HappeningLog) {
        let Changes { first, count } = std::mem::take(&mut *self.changes.lock().unwrap_or_else(PoisonError::into_inner));
        let claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if count > FEW_CHANGES as u64 {
            return happenings.written_beneath(&claims, &self.path, count);
        }
        for (path, size) in first {
            match size {
                Some(size) => happenings.written(&claims, &path, size),
                None => happenings.removed(&claims, &path, None),
            }
        }
    }

    fn note(&self, path: &RelPath, stat: Option<&Stat>) {
        let mut changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        changes.count += 1;
        if changes.first.len() < FEW_CHANGES
            && let Ok(path) = SandboxPath::new([self.path.bytes(), b"/", path.bytes()].concat())
        {
            changes.first.push((path, stat.map(|s| u64::try_from(s.st_size).unwrap_or(0))));
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
        self.note(path, stat.as_ref());
        Ok(stat)
    }

    fn is_root(&self, root: BorrowedFd) -> bool {
        match (self.root.stat(self.path.bytes()), rustix::fs::fstat(root)) {
            (Ok(now), Ok(opened)) => (now.st_dev, now.st_ino) == (opened.st_dev, opened.st_ino),
            _ => false,
        }
    }

    fn load_digests(&self) -> DigestCache {
        self.memories.take(&self.path)
    }

    fn save_digests(&self, memory: DigestCache) {
        self.memories.keep(&self.path, memory);
    }

    fn is_full(&self) -> bool {
        self.authority.view().disk_full
    }

    fn may_write(&self) -> bool {
        self.may_write.load(Ordering::Relaxed)
    }
}
