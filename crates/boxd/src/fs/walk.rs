//! Walks an untrusted tree with several threads. It uses descriptors, so that no link is followed and a concurrent
//! rename can't lead elsewhere. The depth is bounded, and work is handed over only to idle threads, so that memory
//! doesn't grow with the tree.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use rustix::{
    fs::{Dir, FileType, Mode, OFlags, Stat},
    io::Errno,
};

use super::{ignore_rules::Rules, names::kind_of, stop::Stop};
use crate::files::{is_temp_file_name, kind, open_beneath, refuse_kernel_files};

/// Maximum depth of directories. Each level holds one descriptor. Deeper directories are reported as omitted.
const MAX_DEPTH: usize = 128;
/// Number of files handed over to an idle thread at once.
const BATCH_FILES: usize = 32;

/// The state of a walk, shared by its threads.
pub struct Walk {
    queue: Mutex<Queue>,
    ready: Condvar,
    /// Number of idle threads.
    idle: AtomicUsize,
    is_too_deep: AtomicBool,
    /// Number of unreadable directories.
    unreadable: AtomicU64,
    hidden: bool,
    stop: Stop,
}

#[derive(Default)]
struct Queue {
    jobs: Vec<Job>,
    busy: usize,
}

enum Job {
    Directory(Start),
    Files(Batch),
}

struct Start {
    directory: OwnedFd,
    /// Path of the directory with a trailing slash; empty for the start.
    path: Vec<u8>,
    depth: usize,
    rules: Option<Arc<Rules>>,
}

struct Batch {
    directory: OwnedFd,
    path: Vec<u8>,
    names: Vec<Vec<u8>>,
}

/// An entry. `path` is relative to the start of the walk.
pub struct Found<'a> {
    pub directory: BorrowedFd<'a>,
    pub name: &'a [u8],
    pub path: &'a [u8],
    pub kind: FileType,
}

impl Found<'_> {
    /// Opens the file if it is still a readable regular file. Never blocks, even if it was replaced by a fifo.
    pub fn open(&self) -> Result<(OwnedFd, Stat), Errno> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(self.directory, self.name, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&file)?;
        if kind(&stat) == FileType::RegularFile { Ok((file, stat)) } else { Err(Errno::INVAL) }
    }
}

/// Receives the entries found, and decides whether to enter a directory.
pub trait Visit {
    fn enter(&mut self, _directory: &Found<'_>) -> bool {
        true
    }
    fn see(&mut self, found: &Found<'_>);
}

impl Walk {
    pub fn new(directory: OwnedFd, rules: Option<Arc<Rules>>, hidden: bool, stop: Stop) -> Self {
        let rules = rules.map(|above| Rules::below(above, &directory, 0));
        let top = Job::Directory(Start { directory, path: Vec::new(), depth: 1, rules });
        Self {
            queue: Mutex::new(Queue { jobs: vec![top], busy: 0 }),
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
    pub fn take_part(&self, visit: &mut dyn Visit) {
        while let Some(job) = self.next_job() {
            match job {
                Job::Directory(start) => self.descend(start, visit),
                Job::Files(batch) => self.see_all(batch.directory.as_fd(), &batch.path, &batch.names, visit),
            }
            self.lock().busy -= 1;
            self.ready.notify_all();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_job(&self) -> Option<Job> {
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
            queue = self.ready.wait(queue).unwrap_or_else(PoisonError::into_inner);
            self.idle.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn hand_over(&self, job: Job) {
        self.lock().jobs.push(job);
        self.ready.notify_one();
    }

    fn somebody_is_idle(&self) -> bool {
        self.idle.load(Ordering::Relaxed) > 0
    }

    fn descend(&self, start: Start, visit: &mut dyn Visit) {
        let mut path = start.path;
        let Ok(entries) = Dir::new(start.directory) else { return };
        let mut levels = vec![Level { entries, prefix: path.len(), rules: start.rules, batch: Vec::new() }];
        loop {
            let depth = start.depth + levels.len();
            let Some(level) = levels.last_mut() else { break };
            path.truncate(level.prefix);
            if self.stop.is_stopped() {
                return;
            }
            let Some(Ok(entry)) = level.entries.read() else {
                self.flush(level, &path, visit);
                levels.pop();
                continue;
            };
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") || is_temp_file_name(name) || (!self.hidden && name[0] == b'.') {
                continue;
            }
            let Ok(directory) = level.entries.fd() else { return };
            let kind = kind_of(directory, name, entry.file_type());
            path.extend_from_slice(name);
            let is_directory = kind == FileType::Directory;
            if level.rules.as_ref().is_some_and(|r| r.leave_out(&path, is_directory)) {
                continue;
            }
            if kind == FileType::RegularFile && self.somebody_is_idle() {
                level.batch.push(name.to_vec());
                if level.batch.len() == BATCH_FILES {
                    let prefix = level.prefix;
                    self.flush(level, &path[..prefix], visit);
                }
                continue;
            }
            let found = Found { directory, name, path: &path, kind };
            visit.see(&found);
            if !is_directory || !visit.enter(&found) {
                continue;
            }
            if depth > MAX_DEPTH {
                self.is_too_deep.store(true, Ordering::Relaxed);
                continue;
            }
            // A directory that was deleted, or is on a kernel file system, is skipped.
            let below = open_beneath(directory, name, OFlags::RDONLY | OFlags::DIRECTORY);
            if matches!(below, Err(Errno::ACCESS)) {
                self.unreadable.fetch_add(1, Ordering::Relaxed);
            }
            let below = below.and_then(|fd| refuse_kernel_files(&fd).map(|()| fd));
            let (Ok(below), Some(level)) = (below, levels.last()) else { continue };
            path.push(b'/');
            let rules = level.rules.clone().map(|above| Rules::below(above, &below, path.len()));
            if self.somebody_is_idle() {
                self.hand_over(Job::Directory(Start { directory: below, path: path.clone(), depth, rules }));
            } else if let Ok(entries) = Dir::new(below) {
                levels.push(Level { entries, prefix: path.len(), rules, batch: Vec::new() });
            }
        }
    }

    fn flush(&self, level: &mut Level, path: &[u8], visit: &mut dyn Visit) {
        if level.batch.is_empty() {
            return;
        }
        let names = std::mem::take(&mut level.batch);
        let Ok(directory) = level.entries.fd() else { return };
        if self.somebody_is_idle()
            && let Ok(directory) = directory.try_clone_to_owned()
        {
            return self.hand_over(Job::Files(Batch { directory, path: path.to_vec(), names }));
        }
        self.see_all(directory, path, &names, visit);
    }

    fn see_all(&self, directory: BorrowedFd<'_>, path: &[u8], names: &[Vec<u8>], visit: &mut dyn Visit) {
        for name in names {
            if self.stop.is_stopped() {
                return;
            }
            visit.see(&Found { directory, name, path: &[path, name].concat(), kind: FileType::RegularFile });
        }
    }
}

struct Level {
    entries: Dir,
    prefix: usize,
    rules: Option<Arc<Rules>>,
    /// Files reserved for a thread that was idle when they were found.
    batch: Vec<Vec<u8>>,
}
