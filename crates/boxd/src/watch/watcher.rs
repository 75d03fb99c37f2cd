//! The thread that watches files. It starts with the first reader and ends some time after the last has gone.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64, mpsc},
    time::{Duration, Instant},
};

use cobox_protocol::{ApiError, ErrorCode, RequestId};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    fs::{OFlags, inotify::ReadFlags},
};
use tokio::sync::oneshot;

use super::{
    inotify::{AddError, Inotify},
    journal::Journal,
    tree::{Teller, Tree},
};
use crate::files::{ChangeLog, FileStore, Root, SandboxPath, file_error, refuse_kernel_files};

/// Maximum number of different directories watched at once. Any number of readers share each.
const MAX_TREES: usize = 16;
/// How long a tree is watched after its last reader has gone. A reader that resumes in this time misses nothing.
const LINGER: Duration = Duration::from_secs(60);
/// Interval of checks whether watched directories still exist.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Handle to the watching thread.
pub struct Watching {
    life: String,
    numbers: Arc<AtomicU64>,
    limit: u32,
    running: Arc<Mutex<Option<Running>>>,
}

struct Running {
    commands: mpsc::Sender<Watch>,
    wake: Arc<OwnedFd>,
}

struct Watch {
    path: SandboxPath,
    recursive: bool,
    answer: oneshot::Sender<Result<Reader, ApiError>>,
}

/// A reader of a tree's journal.
pub struct Reader {
    pub journal: Arc<Journal>,
    wake: Arc<OwnedFd>,
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.journal.remove_reader();
        wake(&self.wake);
    }
}

fn wake(fd: &OwnedFd) {
    // Full means that the thread is being woken already.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

impl Watching {
    pub fn new(limit: u32) -> Self {
        let life = RequestId::new().as_str().trim_start_matches("req_").to_owned();
        Self { life, numbers: Arc::default(), limit, running: Arc::default() }
    }

    /// The prefix of this run's cursors.
    pub fn life(&self) -> &str {
        &self.life
    }

    /// Watches a directory, or joins the readers of one that is already watched.
    pub async fn watch(&self, store: &FileStore, path: SandboxPath, recursive: bool) -> Result<Reader, ApiError> {
        let (answer, answered) = oneshot::channel();
        self.ask(store, Watch { path, recursive, answer })?;
        answered.await.map_err(|_| failed("the watching thread ended"))?
    }

    fn ask(&self, store: &FileStore, watch: Watch) -> Result<(), ApiError> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if running.is_none() {
            *running = Some(self.start(store)?);
        }
        let Some(thread) = running.as_ref() else { return Err(failed("the watching thread ended")) };
        thread.commands.send(watch).map_err(|_| failed("the watching thread ended"))?;
        wake(&thread.wake);
        Ok(())
    }

    fn start(&self, store: &FileStore) -> Result<Running, ApiError> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?);
        let (commands, receiver) = mpsc::channel();
        let thread = Thread {
            inotify: Inotify::new(self.limit).map_err(|e| failed(format!("the kernel gives no more watching instances: {e}")))?,
            trees: HashMap::new(),
            next_tree: 0,
            commands: receiver,
            wake: wake.clone(),
            life: self.life.clone(),
            numbers: self.numbers.clone(),
            changes: store.changes(),
            running: self.running.clone(),
        };
        store.workers().spawn("watch", move |root| thread.run(root)).map_err(failed)?;
        Ok(Running { commands, wake })
    }
}

fn failed(why: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::Internal, format!("files can't be watched: {why}"))
}

struct Thread {
    inotify: Inotify,
    trees: HashMap<u64, Tree>,
    next_tree: u64,
    commands: mpsc::Receiver<Watch>,
    wake: Arc<OwnedFd>,
    life: String,
    numbers: Arc<AtomicU64>,
    changes: Arc<ChangeLog>,
    running: Arc<Mutex<Option<Running>>>,
}

impl Thread {
    fn run(mut self, root: &Root) {
        self.changes.set_watched(true);
        match cobox_kernel::own_working_directory() {
            Ok(()) => while self.step(root) {},
            // Without its own working directory, this thread would change that of all of boxd. The requester gets an
            // error because the answer channel is dropped.
            Err(error) => {
                tracing::error!(%error, "the watching thread could not have its own working directory");
                *self.running.lock().unwrap_or_else(PoisonError::into_inner) = None;
            }
        }
    }

    /// Waits for work and does it. Returns false when there is no reader left.
    fn step(&mut self, root: &Root) -> bool {
        self.wait();
        while let Ok(watch) = self.commands.try_recv() {
            self.take(root, watch);
        }
        self.read_events();
        let (now, teller) = (Instant::now(), Teller { life: &self.life, numbers: &self.numbers, changes: &self.changes });
        for tree in self.trees.values_mut() {
            if tree.due().is_some_and(|at| at <= now) {
                tree.flush(&mut self.inotify, &teller);
            }
            tree.check_top(&mut self.inotify, &teller);
            tree.unread_since = if tree.journal.has_readers() { None } else { tree.unread_since.or(Some(now)) };
        }
        let is_over = |tree: &Tree| tree.is_gone || tree.unread_since.is_some_and(|since| since + LINGER <= now);
        for (_, mut tree) in self.trees.extract_if(|_, tree| is_over(tree)) {
            tree.stop(&mut self.inotify);
        }
        if !self.trees.is_empty() {
            return true;
        }
        // While the lock is held no request can be added.
        let running = self.running.clone();
        let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
        match self.commands.try_recv() {
            Ok(watch) => {
                drop(running);
                self.take(root, watch);
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
        let due = self.trees.values().filter_map(Tree::due).min();
        let timeout = due.map_or(LOOK_EVERY, |at| at.saturating_duration_since(Instant::now()).min(LOOK_EVERY));
        let timeout = Timespec::try_from(timeout).ok();
        let mut fds =
            [PollFd::new(&self.inotify, PollFlags::IN), PollFd::from_borrowed_fd(std::os::fd::AsFd::as_fd(&*self.wake), PollFlags::IN)];
        // Whether interrupted or not, the caller then checks everything.
        let _ = poll(&mut fds, timeout.as_ref());
        // Empty if something else ended the wait.
        let _ = rustix::io::read(&*self.wake, &mut [0u8; 8]);
    }

    fn read_events(&mut self) {
        let teller = Teller { life: &self.life, numbers: &self.numbers, changes: &self.changes };
        for event in self.inotify.read() {
            if event.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                for tree in self.trees.values_mut() {
                    tree.kernel_overflow(&mut self.inotify, &teller);
                }
                continue;
            }
            for tree in self.trees.values_mut().filter(|t| t.is_watching(event.wd)) {
                if event.flags.contains(ReadFlags::IGNORED) {
                    tree.ignored(event.wd, &mut self.inotify);
                } else {
                    tree.take(event.wd, event.flags, event.cookie, event.name.as_deref(), &mut self.inotify, &teller);
                }
            }
        }
    }

    fn take(&mut self, root: &Root, watch: Watch) {
        let reader = self.reader(root, &watch);
        // An error means that the request has gone. It returns the reader, which is dropped.
        let _ = watch.answer.send(reader);
    }

    fn reader(&mut self, root: &Root, watch: &Watch) -> Result<Reader, ApiError> {
        let key = (crate::fs::path_prefix(&watch.path), watch.recursive);
        let journal = match self.trees.values().find(|t| t.key == key && !t.is_gone) {
            Some(tree) => tree.journal.clone(),
            None => self.plant(root, &watch.path, key)?,
        };
        journal.add_reader();
        Ok(Reader { journal, wake: self.wake.clone() })
    }

    fn plant(&mut self, root: &Root, path: &SandboxPath, key: (Vec<u8>, bool)) -> Result<Arc<Journal>, ApiError> {
        if self.trees.len() >= MAX_TREES {
            let unread = self.trees.iter().filter(|(_, t)| !t.journal.has_readers()).min_by_key(|(_, t)| t.unread_since).map(|(id, _)| *id);
            let Some(mut oldest) = unread.and_then(|id| self.trees.remove(&id)) else {
                let message =
                    format!("{MAX_TREES} different directories are already being watched here; watch one above them, or try again later");
                return Err(ApiError::new(ErrorCode::RateLimited, message));
            };
            oldest.stop(&mut self.inotify);
        }
        let opened = root.open(path.bytes(), OFlags::RDONLY | OFlags::DIRECTORY).and_then(|fd| refuse_kernel_files(&fd).map(|()| fd));
        let directory = opened.map_err(|e| file_error(e, path))?;
        let teller = Teller { life: &self.life, numbers: &self.numbers, changes: &self.changes };
        let tree = Tree::start(key, directory, &mut self.inotify, &teller).map_err(|e| match e {
            AddError::Limit(message) => ApiError::new(ErrorCode::RateLimited, message),
            AddError::Refused(errno) => file_error(errno, path),
        })?;
        let journal = tree.journal.clone();
        self.next_tree += 1;
        self.trees.insert(self.next_tree, tree);
        Ok(journal)
    }
}
