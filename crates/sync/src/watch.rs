//! Watches a folder with inotify and collects the paths to scan again, or the fact that everything has to be scanned.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
    io::Errno,
};

use crate::{hooks::Hooks, ignore_rules::IgnoreRules, path::RelPath};

/// Bytes per read: about two thousand events.
const BUFFER_BYTES: usize = 64 * 1024;
/// Maximum number of changed paths to track; beyond it a full scan is cheaper.
const MAX_DIRTY: usize = 4096;
/// An open file written this recently is incomplete: a program that saves it closes it soon, and a log has pauses.
const OPEN_FILE_WAIT: WriteWait = WriteWait { idle: Duration::from_millis(50), total: Duration::from_secs(1) };
/// A file that became shorter was truncated to be rewritten, and the kernel reports a long write only when it is done.
const TRUNCATED_FILE_WAIT: WriteWait = WriteWait { idle: Duration::from_secs(2), total: Duration::from_secs(5) };
const EVENTS: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR)
    .union(WatchFlags::DONT_FOLLOW)
    .union(WatchFlags::EXCL_UNLINK);

/// How long to wait for an open file since its last write (`idle`) and its first (`total`). After that it is synced as
/// it is.
struct WriteWait {
    idle: Duration,
    total: Duration,
}

impl WriteWait {
    fn is_pending(&self, (first, last): (Instant, Instant), now: Instant) -> bool {
        now.duration_since(last) < self.idle && now.duration_since(first) < self.total
    }
}

/// Paths that have to be scanned again.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct DirtyPaths {
    pub paths: BTreeSet<RelPath>,
    pub all: bool,
}

impl DirtyPaths {
    pub fn is_empty(&self) -> bool {
        self.paths.is_empty() && !self.all
    }

    pub fn add(&mut self, path: RelPath) {
        if self.paths.len() < MAX_DIRTY {
            self.paths.insert(path);
        } else {
            self.all = true;
        }
    }
}

struct WatchState {
    inotify: OwnedFd,
    stop: OwnedFd,
    folders: Mutex<HashMap<i32, Option<RelPath>>>,
    dirty: Mutex<DirtyPaths>,
    /// Files created or written and not closed yet, with the times of the first and the last write. At most
    /// [`MAX_DIRTY`].
    writing: Mutex<HashMap<RelPath, (Instant, Instant)>>,
    /// Some directories could not be watched.
    is_partial: AtomicBool,
    limit: usize,
    /// Shared by both readers: the watch thread, and a scan that needs the latest events.
    buffer: Mutex<Vec<MaybeUninit<u8>>>,
}

/// Stops its thread when dropped.
pub struct Watch(Arc<WatchState>);

impl Watch {
    /// Has to be called on the thread that scans the folder. The thread gets a working directory of its own: there may
    /// be no /proc to name a descriptor by, so the thread changes into each directory and watches `.`. `notify` is
    /// called on another thread after a change.
    pub fn start(limit: usize, hooks: &dyn Hooks, notify: impl Fn() + Send + 'static) -> io::Result<Self> {
        cobox_kernel::own_working_directory()?;
        let shared = Arc::new(WatchState {
            inotify: inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?,
            stop: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            folders: Mutex::default(),
            dirty: Mutex::default(),
            writing: Mutex::default(),
            is_partial: AtomicBool::new(false),
            limit,
            buffer: Mutex::new(vec![MaybeUninit::uninit(); BUFFER_BYTES]),
        });
        let listener = shared.clone();
        hooks.spawn("sync-watch", Box::new(move || listener.listen(&notify)))?;
        Ok(Self(shared))
    }

    /// Watches a directory, or updates its name if it was renamed.
    pub fn add(&self, folder: &OwnedFd, path: Option<&RelPath>) {
        let mut folders = self.0.folders();
        if folders.len() >= self.0.limit {
            self.0.is_partial.store(true, Ordering::Relaxed);
            return;
        }
        match rustix::process::fchdir(folder).and_then(|()| inotify::add_watch(&self.0.inotify, ".", EVENTS)) {
            Ok(descriptor) => drop(folders.insert(descriptor, path.cloned())),
            // The kernel's limit is reached. A directory that may not be read is reported by its scan.
            Err(Errno::NOSPC | Errno::NOMEM) => self.0.is_partial.store(true, Ordering::Relaxed),
            Err(_) => {}
        }
    }

    /// Takes the paths to scan again, including all events so far.
    pub fn take_dirty(&self) -> DirtyPaths {
        self.0.read();
        std::mem::take(&mut *self.0.dirty())
    }

    pub fn has_dirty(&self) -> bool {
        !self.0.dirty().is_empty()
    }

    /// Returns the files that are being written, including all events so far. Each path comes with whether the file
    /// became shorter.
    pub fn half_written<'a>(&self, paths: impl Iterator<Item = (&'a RelPath, bool)>) -> HashSet<RelPath> {
        self.0.read();
        let now = Instant::now();
        let mut writing = self.0.writing();
        writing.retain(|_, times| TRUNCATED_FILE_WAIT.is_pending(*times, now));
        if writing.is_empty() {
            return HashSet::new();
        }
        let is_mid_write = |path: &RelPath, wait: &WriteWait| writing.get(path).is_some_and(|times| wait.is_pending(*times, now));
        paths
            .filter(|(path, is_shorter)| is_mid_write(path, if *is_shorter { &TRUNCATED_FILE_WAIT } else { &OPEN_FILE_WAIT }))
            .map(|(path, _)| path.clone())
            .collect()
    }

    /// Whether some changes are only found by the next full scan.
    pub fn is_partial(&self) -> bool {
        self.0.is_partial.load(Ordering::Relaxed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // If the counter is full, the thread is awake already.
        let _ = rustix::io::write(&self.0.stop, &1u64.to_ne_bytes());
    }
}

impl WatchState {
    fn folders(&self) -> MutexGuard<'_, HashMap<i32, Option<RelPath>>> {
        self.folders.lock()
    }

    fn dirty(&self) -> MutexGuard<'_, DirtyPaths> {
        self.dirty.lock()
    }

    fn writing(&self) -> MutexGuard<'_, HashMap<RelPath, (Instant, Instant)>> {
        self.writing.lock()
    }

    fn listen(&self, notify: &dyn Fn()) {
        loop {
            let mut fds = [PollFd::new(&self.inotify, PollFlags::IN), PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) if fds[1].revents().contains(PollFlags::IN) => return,
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::warn!(%error, "the watch failed; falling back to periodic scans");
                    self.is_partial.store(true, Ordering::Relaxed);
                    return;
                }
            }
            if self.read() {
                notify();
            }
        }
    }

    /// Reads all pending events. Returns whether any of them requires a scan.
    fn read(&self) -> bool {
        let mut buffer = self.buffer.lock();
        let mut reader = Reader::new(&self.inotify, &mut buffer);
        let mut has_events = false;
        // Ends when a further read would block.
        while let Ok(event) = reader.next() {
            has_events |= self.record_event(event.wd(), event.events(), event.file_name().map(|n| n.to_bytes()));
        }
        has_events
    }

    /// Returns whether the event requires a scan.
    fn record_event(&self, descriptor: i32, flags: ReadFlags, name: Option<&[u8]>) -> bool {
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.dirty().all = true;
            return true;
        }
        if flags.contains(ReadFlags::IGNORED) {
            self.folders().remove(&descriptor);
            return false;
        }
        let Some(folder) = self.folders().get(&descriptor).cloned() else { return false };
        match (folder, name) {
            (folder, Some(name)) => {
                let Some(path) = RelPath::join(folder.as_ref(), name) else { return false };
                // Rules without any file still exclude reserved paths.
                if IgnoreRules::default().is_ignored(&path, false) {
                    return false;
                }
                if !self.record_writing(&path, flags) {
                    return false;
                }
                self.dirty().add(path);
                true
            }
            (None, None) if flags.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF) => {
                self.dirty().all = true;
                true
            }
            // The deletion or move of a directory is reported by its parent.
            _ => false,
        }
    }

    /// Returns whether the path has to be scanned; a close without a write requires nothing.
    fn record_writing(&self, path: &RelPath, flags: ReadFlags) -> bool {
        let mut writing = self.writing();
        if flags.contains(ReadFlags::ISDIR) {
            return true;
        }
        if flags.intersects(ReadFlags::CREATE | ReadFlags::MODIFY) {
            let now = Instant::now();
            if let Some((_, last)) = writing.get_mut(path) {
                *last = now;
            } else if writing.len() < MAX_DIRTY {
                writing.insert(path.clone(), (now, now));
            }
            return true;
        }
        let is_over = flags.intersects(ReadFlags::CLOSE_WRITE | ReadFlags::DELETE | ReadFlags::MOVED_FROM | ReadFlags::MOVED_TO);
        let was_written = is_over && writing.remove(path).is_some();
        was_written || !flags.contains(ReadFlags::CLOSE_WRITE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hooks::LocalHooks;

    #[test]
    fn a_file_counts_as_half_written_until_it_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let watch = Watch::start(10, &LocalHooks::new(folder.path().to_owned()), || ()).unwrap();
        let path = RelPath::new(b"f").unwrap();
        assert!(watch.0.record_writing(&path, ReadFlags::CREATE));
        assert!(watch.0.writing().contains_key(&path));
        assert!(watch.0.record_writing(&path, ReadFlags::MODIFY));
        assert!(watch.0.record_writing(&path, ReadFlags::CLOSE_WRITE), "it is scanned now");
        assert!(watch.0.writing().is_empty());
        assert!(!watch.0.record_writing(&path, ReadFlags::CLOSE_WRITE), "nothing was written that time");
        let now = Instant::now();
        watch.0.writing().insert(path.clone(), (now - OPEN_FILE_WAIT.total, now));
        assert!(
            watch.half_written([(&path, false)].into_iter()).is_empty(),
            "a file that is written continuously is synced in its current state"
        );
        assert!(watch.half_written([(&path, true)].into_iter()).contains(&path), "but not a file that was truncated");
        watch.0.writing().insert(path.clone(), (now - TRUNCATED_FILE_WAIT.total, now));
        assert!(watch.half_written([(&path, true)].into_iter()).is_empty(), "for ever");
    }
}
