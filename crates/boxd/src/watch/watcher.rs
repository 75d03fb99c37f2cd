//! The thread that watches files. It starts with the first reader and ends some time after the last has gone.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{Arc, atomic::AtomicU64, mpsc},
    time::{Duration, Instant},
};

use cobox_protocol::{ApiError, ErrorCode, RequestId};
use parking_lot::Mutex;
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    fs::{OFlags, inotify::ReadFlags},
};
use tokio::sync::oneshot;

use super::{
    inotify::{AddError, Inotify},
    journal::Journal,
    watched_tree::{EventPublisher, WatchedTree},
};
use crate::files::{ChangeLog, FileStore, Root, SandboxPath, file_error, refuse_kernel_files};

/// Maximum number of different directories watched at once. Any number of readers share each.
const MAX_TREES: usize = 16;
/// How long a tree is watched after its last reader has gone. A reader that resumes in this time misses nothing.
const LINGER: Duration = Duration::from_secs(60);
/// Interval of checks whether watched directories still exist.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Handle to the watching thread.
pub struct WatchService {
    run_id: String,
    numbers: Arc<AtomicU64>,
    limit: u32,
    running: Arc<Mutex<Option<RunningThread>>>,
}

struct RunningThread {
    requests: mpsc::Sender<WatchRequest>,
    wake_fd: Arc<OwnedFd>,
}

struct WatchRequest {
    path: SandboxPath,
    recursive: bool,
    result_sender: oneshot::Sender<Result<JournalReader, ApiError>>,
}

/// A reader of a tree's journal.
pub struct JournalReader {
    pub journal: Arc<Journal>,
    wake_fd: Arc<OwnedFd>,
}

impl Drop for JournalReader {
    fn drop(&mut self) {
        self.journal.remove_reader();
        wake_thread(&self.wake_fd);
    }
}

fn wake_thread(fd: &OwnedFd) {
    // Full means that the thread is being woken already.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

impl WatchService {
    pub fn new(limit: u32) -> Self {
        let run_id = RequestId::new().as_str().trim_start_matches("req_").to_owned();
        Self { run_id, numbers: Arc::default(), limit, running: Arc::default() }
    }

    /// The prefix of this run's cursors.
    pub fn run_id(&self) -> &str {
        &self.run_id
    }

    /// Watches a directory, or joins the readers of one that is already watched.
    pub async fn watch(&self, store: &FileStore, path: SandboxPath, recursive: bool) -> Result<JournalReader, ApiError> {
        let (result_sender, result) = oneshot::channel();
        self.send_request(store, WatchRequest { path, recursive, result_sender })?;
        result.await.map_err(|_| watch_failed("the watching thread ended"))?
    }

    fn send_request(&self, store: &FileStore, request: WatchRequest) -> Result<(), ApiError> {
        let mut running = self.running.lock();
        if running.is_none() {
            *running = Some(self.start(store)?);
        }
        let Some(watch_thread) = running.as_ref() else { return Err(watch_failed("the watching thread ended")) };
        watch_thread.requests.send(request).map_err(|_| watch_failed("the watching thread ended"))?;
        wake_thread(&watch_thread.wake_fd);
        Ok(())
    }

    fn start(&self, store: &FileStore) -> Result<RunningThread, ApiError> {
        let wake_fd = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(watch_failed)?);
        let (requests, receiver) = mpsc::channel();
        let watch_thread = WatchThread {
            inotify: Inotify::new(self.limit).map_err(|e| watch_failed(format!("creating an inotify instance: {e}")))?,
            trees: HashMap::new(),
            next_tree: 0,
            requests: receiver,
            wake_fd: wake_fd.clone(),
            run_id: self.run_id.clone(),
            numbers: self.numbers.clone(),
            changes: store.changes(),
            running: self.running.clone(),
        };
        store.workers().spawn("watch", move |root| watch_thread.run(root)).map_err(watch_failed)?;
        Ok(RunningThread { requests, wake_fd })
    }
}

fn watch_failed(why: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::Internal, format!("watching files is not available: {why}"))
}

struct WatchThread {
    inotify: Inotify,
    trees: HashMap<u64, WatchedTree>,
    next_tree: u64,
    requests: mpsc::Receiver<WatchRequest>,
    wake_fd: Arc<OwnedFd>,
    run_id: String,
    numbers: Arc<AtomicU64>,
    changes: Arc<ChangeLog>,
    running: Arc<Mutex<Option<RunningThread>>>,
}

impl WatchThread {
    fn run(mut self, root: &Root) {
        self.changes.set_watched(true);
        match cobox_kernel::own_working_directory() {
            Ok(()) => while self.step(root) {},
            // Without its own working directory, this thread would change that of all of boxd. The requester gets an
            // error because the answer channel is dropped.
            Err(error) => {
                tracing::error!(%error, "the watch thread could not unshare its working directory");
                *self.running.lock() = None;
            }
        }
    }

    /// Waits for work and does it. Returns false when there is no reader left.
    fn step(&mut self, root: &Root) -> bool {
        self.wait();
        while let Ok(request) = self.requests.try_recv() {
            self.answer_request(root, request);
        }
        self.read_events();
        let (now, publisher) = (Instant::now(), EventPublisher { run_id: &self.run_id, numbers: &self.numbers, changes: &self.changes });
        for tree in self.trees.values_mut() {
            if tree.due().is_some_and(|at| at <= now) {
                tree.flush(&mut self.inotify, &publisher);
            }
            tree.check_root(&mut self.inotify, &publisher);
            tree.unread_since = if tree.journal.has_readers() { None } else { tree.unread_since.or(Some(now)) };
        }
        let is_unused = |tree: &WatchedTree| tree.is_gone || tree.unread_since.is_some_and(|since| since + LINGER <= now);
        for (_, mut tree) in self.trees.extract_if(|_, tree| is_unused(tree)) {
            tree.stop(&mut self.inotify);
        }
        if !self.trees.is_empty() {
            return true;
        }
        // While the lock is held no request can be added.
        let running = self.running.clone();
        let mut running = running.lock();
        match self.requests.try_recv() {
            Ok(request) => {
                drop(running);
                self.answer_request(root, request);
                true
            }
            Err(_) => {
                // Before the next thread starts, which sets it to true.
                self.changes.set_watched(false);
                *running = None;
                false
            }
        }
    }

    fn wait(&self) {
        let due = self.trees.values().filter_map(WatchedTree::due).min();
        let timeout = due.map_or(CHECK_INTERVAL, |at| at.saturating_duration_since(Instant::now()).min(CHECK_INTERVAL));
        let timeout = Timespec::try_from(timeout).ok();
        let mut fds =
            [PollFd::new(&self.inotify, PollFlags::IN), PollFd::from_borrowed_fd(std::os::fd::AsFd::as_fd(&*self.wake_fd), PollFlags::IN)];
        // Whether interrupted or not, the caller then checks everything.
        let _ = poll(&mut fds, timeout.as_ref());
        // Empty if something else ended the wait.
        let _ = rustix::io::read(&*self.wake_fd, &mut [0u8; 8]);
    }

    fn read_events(&mut self) {
        let publisher = EventPublisher { run_id: &self.run_id, numbers: &self.numbers, changes: &self.changes };
        for event in self.inotify.read() {
            if event.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                for tree in self.trees.values_mut() {
                    tree.kernel_overflow(&mut self.inotify, &publisher);
                }
                continue;
            }
            for tree in self.trees.values_mut().filter(|t| t.is_watching(event.wd)) {
                if event.flags.contains(ReadFlags::IGNORED) {
                    tree.handle_removed_watch(event.wd, &mut self.inotify);
                } else {
                    tree.handle_event(event.wd, event.flags, event.cookie, event.name.as_deref(), &mut self.inotify, &publisher);
                }
            }
        }
    }

    fn answer_request(&mut self, root: &Root, request: WatchRequest) {
        let reader = self.reader(root, &request);
        // An error means that the request has gone. It returns the reader, which is dropped.
        let _ = request.result_sender.send(reader);
    }

    fn reader(&mut self, root: &Root, request: &WatchRequest) -> Result<JournalReader, ApiError> {
        let key = (crate::fs::path_prefix(&request.path), request.recursive);
        let journal = match self.trees.values().find(|t| t.key == key && !t.is_gone) {
            Some(tree) => tree.journal.clone(),
            None => self.start_tree(root, &request.path, key)?,
        };
        journal.add_reader();
        Ok(JournalReader { journal, wake_fd: self.wake_fd.clone() })
    }

    fn start_tree(&mut self, root: &Root, path: &SandboxPath, key: (Vec<u8>, bool)) -> Result<Arc<Journal>, ApiError> {
        if self.trees.len() >= MAX_TREES {
            let longest_unread =
                self.trees.iter().filter(|(_, t)| !t.journal.has_readers()).min_by_key(|(_, t)| t.unread_since).map(|(id, _)| *id);
            let Some(mut oldest) = longest_unread.and_then(|id| self.trees.remove(&id)) else {
                let message = format!(
                    "{MAX_TREES} directories are already being watched, which is the limit; watch a common parent directory, or try again later"
                );
                return Err(ApiError::new(ErrorCode::RateLimited, message));
            };
            oldest.stop(&mut self.inotify);
        }
        let opened = root.open(path.bytes(), OFlags::RDONLY | OFlags::DIRECTORY).and_then(|fd| refuse_kernel_files(&fd).map(|()| fd));
        let directory = opened.map_err(|e| file_error(e, path))?;
        let publisher = EventPublisher { run_id: &self.run_id, numbers: &self.numbers, changes: &self.changes };
        let tree = WatchedTree::start(key, directory, &mut self.inotify, &publisher).map_err(|e| match e {
            AddError::Limit(message) => ApiError::new(ErrorCode::RateLimited, message),
            AddError::Refused(errno) => file_error(errno, path),
        })?;
        let journal = tree.journal.clone();
        self.next_tree += 1;
        self.trees.insert(self.next_tree, tree);
        Ok(journal)
    }
}
