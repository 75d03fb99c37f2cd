//! Walks an untrusted tree with several threads. It uses descriptors, so that no link is followed and a concurrent
//! rename can't lead elsewhere. The depth is bounded, and work is handed over only to idle threads, so that memory
//! doesn't grow with the tree.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use parking_lot::{Condvar, Mutex};
use rustix::{
    fs::{Dir, FileType, Mode, OFlags, Stat},
    io::Errno,
};

use super::{directory_names::entry_type, ignore_rules::IgnoreRules, stop_signal::StopSignal};
use crate::files::{is_temp_file_name, kind, open_beneath, refuse_kernel_files};

/// Maximum depth of directories. Each level holds one descriptor. Deeper directories are reported as omitted.
const MAX_DEPTH: usize = 128;
/// Number of files handed over to an idle thread at once.
const BATCH_FILES: usize = 32;

/// The state of a walk, shared by its threads.
pub struct Walk {
    queue: Mutex<WalkQueue>,
    ready: Condvar,
    /// Number of idle threads.
    idle: AtomicUsize,
    is_too_deep: AtomicBool,
    /// Number of unreadable directories.
    unreadable: AtomicU64,
    hidden: bool,
    stop: StopSignal,
}

#[derive(Default)]
struct WalkQueue {
    jobs: Vec<WalkJob>,
    busy: usize,
}

enum WalkJob {
    Directory(DirectoryJob),
    Files(FileBatch),
}

struct DirectoryJob {
    directory: OwnedFd,
    /// Path of the directory with a trailing slash; empty for the start.
    path: Vec<u8>,
    depth: usize,
    rules: Option<Arc<IgnoreRules>>,
}

struct FileBatch {
    directory: OwnedFd,
    path: Vec<u8>,
    names: Vec<Vec<u8>>,
}

/// An entry. `path` is relative to the start of the walk.
pub struct WalkEntry<'a> {
    pub directory: BorrowedFd<'a>,
    pub name: &'a [u8],
    pub path: &'a [u8],
    pub kind: FileType,
}

impl WalkEntry<'_> {
    /// Opens the file if it is still a readable regular file. Never blocks, even if it was replaced by a fifo.
    pub fn open(&self) -> Result<(OwnedFd, Stat), Errno> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(self.directory, self.name, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&file)?;
        if kind(&stat) == FileType::RegularFile { Ok((file, stat)) } else { Err(Errno::INVAL) }
    }
}

/// Receives the entries found, and decides whether to enter a directory.
pub trait WalkVisitor {
    fn should_enter(&mut self, _directory: &WalkEntry<'_>) -> bool {
        true
    }
    fn visit(&mut self, entry: &WalkEntry<'_>);
}

impl Walk {
    pub fn new(directory: OwnedFd, rules: Option<Arc<IgnoreRules>>, hidden: bool, stop: StopSignal) -> Self {
        let rules = rules.map(|parent| IgnoreRules::with_directory(parent, &directory, 0));
        let root_job = WalkJob::Directory(DirectoryJob { directory, path: Vec::new(), depth: 1, rules });
        Self {
            queue: Mutex::new(WalkQueue { jobs: vec![root_job], busy: 0 }),
            ready: Condvar::new(),
            idle: AtomicUsize::new(0),
            is_too_deep: AtomicBool::new(false),
            unreadable: AtomicU64::new(0),
            hidden,
            stop,
        }
    }

    pub fn is_too_deep(&self) -> bool {
        self.is_too_deep.load(Ordering::Relaxed)
    }

    pub fn unreadable(&self) -> u64 {
        self.unreadable.load(Ordering::Relaxed)
    }

    /// Participates in the walk until it ends. Called by each of its threads.
    pub fn run(&self, visitor: &mut dyn WalkVisitor) {
        while let Some(job) = self.next_job() {
            match job {
                WalkJob::Directory(directory_job) => self.descend(directory_job, visitor),
                WalkJob::Files(batch) => self.visit_files(batch.directory.as_fd(), &batch.path, &batch.names, visitor),
            }
            self.lock().busy -= 1;
            self.ready.notify_all();
        }
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, WalkQueue> {
        self.queue.lock()
    }

    fn next_job(&self) -> Option<WalkJob> {
        let mut queue = self.lock();
        loop {
            if self.stop.is_stopped() {
                return None;
            }
            if let Some(job) = queue.jobs.pop() {
                queue.busy += 1;
                return Some(job);
            }
            if queue.busy == 0 {
                return None;
            }
            self.idle.fetch_add(1, Ordering::Relaxed);
            self.ready.wait(&mut queue);
            self.idle.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn enqueue(&self, job: WalkJob) {
        self.lock().jobs.push(job);
        self.ready.notify_one();
    }

    fn has_idle_thread(&self) -> bool {
        self.idle.load(Ordering::Relaxed) > 0
    }

    fn descend(&self, directory_job: DirectoryJob, visitor: &mut dyn WalkVisitor) {
        let mut path = directory_job.path;
        let Ok(entries) = Dir::new(directory_job.directory) else { return };
        let mut levels = vec![Level { entries, prefix: path.len(), rules: directory_job.rules, batch: Vec::new() }];
        loop {
            let depth = directory_job.depth + levels.len();
            let Some(level) = levels.last_mut() else { break };
            path.truncate(level.prefix);
            if self.stop.is_stopped() {
                return;
            }
            let Some(Ok(listed)) = level.entries.read() else {
                self.flush(level, &path, visitor);
                levels.pop();
                continue;
            };
            let name = listed.file_name().to_bytes();
            if matches!(name, b"." | b"..") || is_temp_file_name(name) || (!self.hidden && name[0] == b'.') {
                continue;
            }
            let Ok(directory) = level.entries.fd() else { return };
            let kind = entry_type(directory, name, listed.file_type());
            path.extend_from_slice(name);
            let is_directory = kind == FileType::Directory;
            if level.rules.as_ref().is_some_and(|r| r.ignores(&path, is_directory)) {
                continue;
            }
            if kind == FileType::RegularFile && self.has_idle_thread() {
                level.batch.push(name.to_vec());
                if level.batch.len() == BATCH_FILES {
                    let prefix = level.prefix;
                    self.flush(level, &path[..prefix], visitor);
                }
                continue;
            }
            let entry = WalkEntry { directory, name, path: &path, kind };
            visitor.visit(&entry);
            if !is_directory || !visitor.should_enter(&entry) {
                continue;
            }
            if depth > MAX_DEPTH {
                self.is_too_deep.store(true, Ordering::Relaxed);
                continue;
            }
            // A directory that was deleted, or is on a kernel file system, is skipped.
            let child = open_beneath(directory, name, OFlags::RDONLY | OFlags::DIRECTORY);
            if matches!(child, Err(Errno::ACCESS)) {
                self.unreadable.fetch_add(1, Ordering::Relaxed);
            }
            let child = child.and_then(|fd| refuse_kernel_files(&fd).map(|()| fd));
            let (Ok(child), Some(level)) = (child, levels.last()) else { continue };
            path.push(b'/');
            let rules = level.rules.clone().map(|parent| IgnoreRules::with_directory(parent, &child, path.len()));
            if self.has_idle_thread() {
                self.enqueue(WalkJob::Directory(DirectoryJob { directory: child, path: path.clone(), depth, rules }));
            } else if let Ok(entries) = Dir::new(child) {
                levels.push(Level { entries, prefix: path.len(), rules, batch: Vec::new() });
            }
        }
    }

    fn flush(&self, level: &mut Level, path: &[u8], visitor: &mut dyn WalkVisitor) {
        if level.batch.is_empty() {
            return;
        }
        let names = std::mem::take(&mut level.batch);
        let Ok(directory) = level.entries.fd() else { return };
        if self.has_idle_thread()
            && let Ok(directory) = directory.try_clone_to_owned()
        {
            return self.enqueue(WalkJob::Files(FileBatch { directory, path: path.to_vec(), names }));
        }
        self.visit_files(directory, path, &names, visitor);
    }

    fn visit_files(&self, directory: BorrowedFd<'_>, path: &[u8], names: &[Vec<u8>], visitor: &mut dyn WalkVisitor) {
        for name in names {
            if self.stop.is_stopped() {
                return;
            }
            visitor.visit(&WalkEntry { directory, name, path: &[path, name].concat(), kind: FileType::RegularFile });
        }
    }
}

struct Level {
    entries: Dir,
    prefix: usize,
    rules: Option<Arc<IgnoreRules>>,
    /// Files reserved for a thread that was idle when they were found.
    batch: Vec<Vec<u8>>,
}
