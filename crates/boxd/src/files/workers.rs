//! Threads that touch the sandbox's files as the workload's user, so that the kernel refuses a client what it would refuse a program.

use std::{
    any::Any,
    cell::Cell,
    io,
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Once,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cobox_protocol::{ApiError, ErrorCode};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::{queue::Queue, root::Root};

/// For steps that take micro- to milliseconds: open, read a piece, write a piece. Enough to keep a disk busy.
const STEP_WORKERS: usize = 8;
/// Steps waiting for a worker; beyond it requests wait where they are.
const STEP_QUEUE: usize = 64;
/// For archives, which keep a thread for as long as they last.
const ARCHIVE_WORKERS: usize = 4;
/// For searches and for whole trees being copied or removed. A search takes two, which is as many cores as a sandbox mostly has.
const LONG_WORKERS: usize = 4;
/// Longest a search waits for others to be done before it is told to come again.
const LONG_WAIT: Duration = Duration::from_secs(30);
/// A quick step that took longer is taken for a disk that makes one wait: a busy machine takes the core away for less.
const QUICK: Duration = Duration::from_millis(10);
/// For so long afterwards quick steps go to the workers too, and no more than one such wait in this time is everybody's.
const DISTRUST: Duration = Duration::from_secs(2);
/// A worker's deepest call is the tar reader with its 32 KiB of buffers on the heap.
const STACK_BYTES: usize = 512 * 1024;

type Job = Box<dyn FnOnce(&Root) + Send>;

/// The pool. Clones share it; its threads end with the last clone.
#[derive(Clone)]
pub struct FileWorkers {
    root: Arc<Root>,
    steps: Arc<Pool>,
    archives: Arc<Pool>,
    archive_slots: Arc<Semaphore>,
    long: Arc<Pool>,
    long_slots: Arc<Semaphore>,
    patience: Arc<Patience>,
}

thread_local! {
    /// Set on a thread that serves requests and has the workload's user.
    static IS_SHARED: Cell<bool> = const { Cell::new(false) };
}

impl FileWorkers {
    /// `setup` takes on the workload's user for the thread that calls it; whether it can is seen here. `root` is the sandbox's `/`.
    /// The threads start with the first request for files: a sandbox that only runs commands does without them.
    pub fn start(root: OwnedFd, setup: impl Fn() -> io::Result<()> + Send + Sync + 'static) -> io::Result<Self> {
        let root = Arc::new(Root::new(root));
        let setup: Setup = Arc::new(setup);
        let probe = setup.clone();
        thread::spawn(move || probe()).join().map_err(|_| io::Error::other("taking on the workload's user panicked"))??;
        let pool = |name, count, queue| Arc::new(Pool::new(name, count, queue, root.clone(), setup.clone()));
        let (steps, archives) = (pool("files", STEP_WORKERS, STEP_QUEUE), pool("archive", ARCHIVE_WORKERS, ARCHIVE_WORKERS));
        let long = pool("long", LONG_WORKERS, LONG_WORKERS);
        let slots = |count| Arc::new(Semaphore::new(count));
        Ok(Self {
            root,
            steps,
            archives,
            archive_slots: slots(ARCHIVE_WORKERS),
            long,
            long_slots: slots(LONG_WORKERS),
            patience: Arc::default(),
        })
    }

    /// The sandbox's root directory, for threads that [`FileWorkers::spawn`] has started.
    pub(crate) fn root(&self) -> Arc<Root> {
        self.root.clone()
    }

    /// Takes on the workload's user for the thread that calls this, which then does [`FileWorkers::run_quick`]'s steps itself:
    /// to wake a worker and be woken by it takes longer than to open and read a small file.
    pub fn share_this_thread(&self) -> io::Result<()> {
        (self.steps.setup)()?;
        IS_SHARED.set(true);
        Ok(())
    }

    /// Runs a step that waits for the disk only when something is wrong with it: where it is asked for, as long as such steps are
    /// quick, and else on a worker.
    pub async fn run_quick<T: Send + 'static>(&self, step: impl FnOnce(&Root) -> T + Send + 'static) -> Result<T, ApiError> {
        if !IS_SHARED.get() || !self.patience.is_left() {
            return self.run(step).await;
        }
        let began = Instant::now();
        let done = catch_unwind(AssertUnwindSafe(|| step(&self.root)));
        self.patience.took(began.elapsed());
        done.map_err(|panic| {
            tracing::error!(message = panic_message(&panic), "a file operation panicked");
            gone()
        })
    }

    /// Whether what waits for the disk only when something is wrong with it may be done by the thread that serves everybody.
    pub(super) fn has_patience(&self) -> bool {
        self.patience.is_left()
    }

    /// Something of the kind took so long there.
    pub(super) fn waited(&self, time: Duration) {
        self.patience.took(time);
    }

    /// Runs one short step on a worker.
    pub async fn run<T: Send + 'static>(&self, step: impl FnOnce(&Root) -> T + Send + 'static) -> Result<T, ApiError> {
        self.submit(step).await?.await.map_err(|_| gone())
    }

    /// Hands a step to the workers and comes back while it runs.
    pub async fn submit<T: Send + 'static>(
        &self,
        step: impl FnOnce(&Root) -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, ApiError> {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move |root| {
            // Nobody to answer means that the request has gone.
            let _ = answer.send(step(root));
        });
        self.steps.queue().push(job).await;
        Ok(answered)
    }

    /// A thread of its own with the workload's user, for something that lasts.
    pub(crate) fn spawn(&self, name: &str, work: impl FnOnce(&Root) + Send + 'static) -> io::Result<()> {
        let (root, setup) = (self.root.clone(), self.steps.setup.clone());
        let thread = thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES);
        thread.spawn(move || match setup() {
            Ok(()) => work(&root),
            // It worked before; without it this thread must not touch a file.
            Err(error) => tracing::error!(%error, "a thread for files could not take on the workload's user"),
        })?;
        Ok(())
    }

    /// Runs a step nobody waits for, from wherever this is called.
    pub(super) fn run_detached(&self, step: impl FnOnce(&Root) + Send + 'static) {
        let Err(job) = self.steps.queue().try_push(Box::new(step)) else { return };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => {
                let steps = self.steps.clone();
                runtime.spawn(async move { steps.queue().push(job).await });
            }
            // Outside the runtime this is a worker already.
            Err(_) => job(&self.root),
        }
    }

    /// A worker of its own for something long.
    pub fn archive_slot(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.archive_slots.clone().try_acquire_owned().map_err(|_| {
            ApiError::new(
                ErrorCode::RateLimited,
                format!("{ARCHIVE_WORKERS} archives are already being transferred here; try again when one is done"),
            )
        })
    }

    /// Workers for a search or a whole tree, at most [`LONG_WORKERS`]; waits its turn.
    pub async fn long_slots(&self, count: u32) -> Result<OwnedSemaphorePermit, ApiError> {
        match tokio::time::timeout(LONG_WAIT, self.long_slots.clone().acquire_many_owned(count)).await {
            Ok(slots) => slots.map_err(|_| gone()),
            Err(_) => {
                Err(ApiError::new(ErrorCode::RateLimited, "too many searches and copies are under way here; try again when one is done"))
            }
        }
    }

    /// Runs a search, or work on a whole tree.
    pub async fn run_long<T: Send + 'static>(
        &self,
        slot: OwnedSemaphorePermit,
        work: impl FnOnce(&Root) -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, ApiError> {
        keep_busy(&self.long, slot, work).await
    }

    /// Runs an archive; the slot shows that there is a worker for it.
    pub async fn run_archive<T: Send + 'static>(
        &self,
        slot: OwnedSemaphorePermit,
        work: impl FnOnce(&Root) -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, ApiError> {
        keep_busy(&self.archives, slot, work).await
    }
}

/// Whether the thread that serves everybody may do quick steps itself.
struct Patience {
    since: Instant,
    /// Milliseconds after that.
    again_at: AtomicU64,
}

impl Default for Patience {
    fn default() -> Self {
        Self { since: Instant::now(), again_at: AtomicU64::new(0) }
    }
}

impl Patience {
    fn is_left(&self) -> bool {
        self.now() >= self.again_at.load(Ordering::Relaxed)
    }

    fn took(&self, time: Duration) {
        if time > QUICK {
            self.again_at.store(self.now() + DISTRUST.as_millis() as u64, Ordering::Relaxed);
        }
    }

    fn now(&self) -> u64 {
        self.since.elapsed().as_millis() as u64
    }
}

async fn keep_busy<T: Send + 'static>(
    pool: &Pool,
    slot: OwnedSemaphorePermit,
    work: impl FnOnce(&Root) -> T + Send + 'static,
) -> Result<oneshot::Receiver<T>, ApiError> {
    let (answer, answered) = oneshot::channel();
    let job: Job = Box::new(move |root| {
        let result = work(root);
        drop(slot);
        // Nobody to answer means that the request has gone.
        let _ = answer.send(result);
    });
    pool.queue().push(job).await;
    Ok(answered)
}

pub fn gone() -> ApiError {
    ApiError::new(ErrorCode::Internal, "the file operation was given up half-way")
}

type Setup = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

/// Threads that share one queue, started when the first job comes. They end with it.
struct Pool {
    name: &'static str,
    count: usize,
    jobs: Arc<Queue<Job>>,
    root: Arc<Root>,
    setup: Setup,
    started: Once,
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.jobs.close();
    }
}

impl Pool {
    fn new(name: &'static str, count: usize, queue: usize, root: Arc<Root>, setup: Setup) -> Self {
        Self { name, count, jobs: Arc::new(Queue::new(queue)), root, setup, started: Once::new() }
    }

    fn queue(&self) -> &Queue<Job> {
        self.started.call_once(|| (0..self.count).for_each(|i| self.start_thread(i)));
        &self.jobs
    }

    fn start_thread(&self, number: usize) {
        let (jobs, root, setup) = (self.jobs.clone(), self.root.clone(), self.setup.clone());
        let thread = thread::Builder::new().name(format!("{}-{number}", self.name)).stack_size(STACK_BYTES);
        let started = thread.spawn(move || match setup() {
            Ok(()) => work(&jobs, &root),
            // It worked before; without it this thread must not touch a file.
            Err(error) => tracing::error!(%error, "a file worker could not take on the workload's user"),
        });
        if let Err(error) = started {
            tracing::error!(%error, "a file worker could not be started");
        }
    }
}

fn work(jobs: &Queue<Job>, root: &Root) {
    while let Some(job) = jobs.take() {
        // A bug in one request must not take the worker from all others; that request is told by the answer that never comes.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(root))) {
            tracing::error!(message = panic_message(&panic), "a file operation panicked");
        }
    }
}

fn panic_message(panic: &Box<dyn Any + Send>) -> &str {
    panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use std::thread::ThreadId;

    use super::*;

    async fn where_quick_steps_run(workers: &FileWorkers) -> ThreadId {
        workers.run_quick(|_| thread::current().id()).await.unwrap()
    }

    #[tokio::test]
    async fn quick_steps_run_where_they_are_asked_for_until_one_was_slow() {
        let root = rustix::fs::open("/", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let workers = FileWorkers::start(root, || Ok(())).unwrap();
        let here = thread::current().id();
        assert_ne!(where_quick_steps_run(&workers).await, here, "this thread hasn't the workload's user yet");
        workers.share_this_thread().unwrap();
        assert_eq!(where_quick_steps_run(&workers).await, here);
        workers.patience.took(QUICK + Duration::from_micros(1));
        assert_ne!(where_quick_steps_run(&workers).await, here);
    }

    #[tokio::test]
    async fn a_quick_step_that_panics_costs_its_own_request_only() {
        let root = rustix::fs::open("/", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let workers = FileWorkers::start(root, || Ok(())).unwrap();
        workers.share_this_thread().unwrap();
        let broken: Result<(), ApiError> = workers.run_quick(|_| panic!("a bug")).await;
        broken.unwrap_err();
        where_quick_steps_run(&workers).await;
    }
}
