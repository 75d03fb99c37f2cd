//! Threads that access the sandbox's files as the workload's user, so that the kernel refuses a client what it would
//! refuse a program.

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

use super::{job_queue::JobQueue, root::Root};

/// For steps that take micro- to milliseconds, such as opening a file or reading or writing a piece. Enough to keep a
/// disk busy.
const STEP_WORKERS: usize = 8;
/// Steps that may wait for a worker. Beyond this the requests themselves wait.
const STEP_QUEUE: usize = 64;
/// For archives, each of which occupies a thread for its whole duration.
const ARCHIVE_WORKERS: usize = 4;
/// For searches and for copying or removing trees. A search takes two, which matches the cores that most sandboxes
/// have.
const LONG_WORKERS: usize = 4;
/// Maximum time that a search waits for other long operations before it is refused as rate limited.
const LONG_WAIT: Duration = Duration::from_secs(30);
/// A quick step that took longer indicates a slow disk. Preemption on a busy machine takes less.
const MAX_QUICK_STEP: Duration = Duration::from_millis(10);
/// Quick steps then run on workers for this long, so that at most one such delay in this time affects all requests.
const INLINE_PAUSE: Duration = Duration::from_secs(2);
/// The deepest call is the tar reader, whose buffers of 32 KiB are on the heap.
const STACK_BYTES: usize = 512 * 1024;

type Job = Box<dyn FnOnce(&Root) + Send>;

/// The pools. Clones share them; the threads end with the last clone.
#[derive(Clone)]
pub struct FileWorkers {
    root: Arc<Root>,
    steps: Arc<Pool>,
    archives: Arc<Pool>,
    archive_slots: Arc<Semaphore>,
    long: Arc<Pool>,
    long_slots: Arc<Semaphore>,
    inline_policy: Arc<InlinePolicy>,
}

thread_local! {
    /// True on a thread that serves requests and has switched to the workload's user.
    static MAY_RUN_INLINE: Cell<bool> = const { Cell::new(false) };
}

impl FileWorkers {
    /// `setup` switches the calling thread to the workload's user; whether it can is checked here. `root` is the
    /// sandbox's `/`. The threads start with the first file request, so a sandbox that only runs commands has none.
    pub fn start(root: OwnedFd, setup: impl Fn() -> io::Result<()> + Send + Sync + 'static) -> io::Result<Self> {
        let root = Arc::new(Root::new(root));
        let setup: Setup = Arc::new(setup);
        let probe = setup.clone();
        thread::spawn(move || probe()).join().map_err(|_| io::Error::other("switching to the workload's user panicked"))??;
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
            inline_policy: Arc::default(),
        })
    }

    /// The sandbox's root directory, for threads started by [`FileWorkers::spawn`].
    pub(crate) fn root(&self) -> Arc<Root> {
        self.root.clone()
    }

    /// Switches the calling thread to the workload's user, so that it runs the steps of [`FileWorkers::run_quick`]
    /// itself. Waking a worker and being woken takes longer than opening and reading a small file.
    pub fn allow_inline_steps(&self) -> io::Result<()> {
        (self.steps.setup)()?;
        MAY_RUN_INLINE.set(true);
        Ok(())
    }

    /// Runs a step that should not block on the disk: on the calling thread as long as such steps are quick, otherwise
    /// on a worker.
    pub async fn run_quick<T: Send + 'static>(&self, step: impl FnOnce(&Root) -> T + Send + 'static) -> Result<T, ApiError> {
        if !MAY_RUN_INLINE.get() || !self.inline_policy.allows_inline() {
            return self.run(step).await;
        }
        let started = Instant::now();
        let done = catch_unwind(AssertUnwindSafe(|| step(&self.root)));
        self.inline_policy.record(started.elapsed());
        done.map_err(|panic| {
            tracing::error!(message = panic_message(&panic), "a file operation panicked");
            operation_aborted()
        })
    }

    /// Whether steps that should not block on the disk may run on the thread that serves all requests.
    pub(super) fn may_run_inline(&self) -> bool {
        self.inline_policy.allows_inline()
    }

    /// Records how long such a step took.
    pub(super) fn record_inline_duration(&self, time: Duration) {
        self.inline_policy.record(time);
    }

    /// Runs one short step on a worker and waits for its result.
    pub async fn run<T: Send + 'static>(&self, step: impl FnOnce(&Root) -> T + Send + 'static) -> Result<T, ApiError> {
        self.submit(step).await?.await.map_err(|_| operation_aborted())
    }

    /// Queues a step for the workers and returns a receiver for its result.
    pub async fn submit<T: Send + 'static>(
        &self,
        step: impl FnOnce(&Root) -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, ApiError> {
        let (result_sender, result) = oneshot::channel();
        let job: Job = Box::new(move |root| {
            // An error means that the request has gone.
            let _ = result_sender.send(step(root));
        });
        self.steps.queue().push(job).await;
        Ok(result)
    }

    /// Starts a thread of its own, with the workload's user, for long-running work.
    pub(crate) fn spawn(&self, name: &str, work: impl FnOnce(&Root) + Send + 'static) -> io::Result<()> {
        let (root, setup) = (self.root.clone(), self.steps.setup.clone());
        let thread = thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES);
        thread.spawn(move || match setup() {
            Ok(()) => work(&root),
            // The same call worked at the start. Without it this thread must not access files.
            Err(error) => tracing::error!(%error, "a file thread could not switch to the workload's user"),
        })?;
        Ok(())
    }

    /// Runs a step without waiting for its result, from any thread.
    pub(super) fn run_detached(&self, step: impl FnOnce(&Root) + Send + 'static) {
        let Err(job) = self.steps.queue().try_push(Box::new(step)) else { return };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => {
                let steps = self.steps.clone();
                runtime.spawn(async move { steps.queue().push(job).await });
            }
            // A thread outside the runtime is a worker already.
            Err(_) => job(&self.root),
        }
    }

    /// Reserves a worker for an archive.
    pub fn archive_slot(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.archive_slots.clone().try_acquire_owned().map_err(|_| {
            ApiError::new(
                ErrorCode::RateLimited,
                format!("{ARCHIVE_WORKERS} archive transfers are already running, which is the limit; try again later"),
            )
        })
    }

    /// Reserves workers for a search or a whole tree, at most [`LONG_WORKERS`]. Waits until they are free.
    pub async fn long_slots(&self, count: u32) -> Result<OwnedSemaphorePermit, ApiError> {
        match tokio::time::timeout(LONG_WAIT, self.long_slots.clone().acquire_many_owned(count)).await {
            Ok(slots) => slots.map_err(|_| operation_aborted()),
            Err(_) => Err(ApiError::new(ErrorCode::RateLimited, "too many searches and copies are already running; try again later")),
        }
    }

    /// Runs a search, or work on a whole tree.
    pub async fn run_long<T: Send + 'static>(
        &self,
        slot: OwnedSemaphorePermit,
        work: impl FnOnce(&Root) -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, ApiError> {
        run_on_pool(&self.long, slot, work).await
    }

    /// Runs an archive. The permit guarantees a free worker.
    pub async fn run_archive<T: Send + 'static>(
        &self,
        slot: OwnedSemaphorePermit,
        work: impl FnOnce(&Root) -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, ApiError> {
        run_on_pool(&self.archives, slot, work).await
    }
}

/// Decides whether the thread that serves all requests may run quick steps itself.
struct InlinePolicy {
    since: Instant,
    /// Milliseconds after `since` from which quick steps are allowed again.
    allowed_from_ms: AtomicU64,
}

impl Default for InlinePolicy {
    fn default() -> Self {
        Self { since: Instant::now(), allowed_from_ms: AtomicU64::new(0) }
    }
}

impl InlinePolicy {
    fn allows_inline(&self) -> bool {
        self.now() >= self.allowed_from_ms.load(Ordering::Relaxed)
    }

    fn record(&self, time: Duration) {
        if time > MAX_QUICK_STEP {
            self.allowed_from_ms.store(self.now() + INLINE_PAUSE.as_millis() as u64, Ordering::Relaxed);
        }
    }

    fn now(&self) -> u64 {
        self.since.elapsed().as_millis() as u64
    }
}

async fn run_on_pool<T: Send + 'static>(
    pool: &Pool,
    slot: OwnedSemaphorePermit,
    work: impl FnOnce(&Root) -> T + Send + 'static,
) -> Result<oneshot::Receiver<T>, ApiError> {
    let (result_sender, result) = oneshot::channel();
    let job: Job = Box::new(move |root| {
        let result = work(root);
        drop(slot);
        // An error means that the request has gone.
        let _ = result_sender.send(result);
    });
    pool.queue().push(job).await;
    Ok(result)
}

pub fn operation_aborted() -> ApiError {
    ApiError::new(ErrorCode::Internal, "the file operation was cancelled")
}

type Setup = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

/// Threads that share one queue, started with the first job. They end when the pool is dropped.
struct Pool {
    name: &'static str,
    count: usize,
    jobs: Arc<JobQueue<Job>>,
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
        Self { name, count, jobs: Arc::new(JobQueue::new(queue)), root, setup, started: Once::new() }
    }

    fn queue(&self) -> &JobQueue<Job> {
        self.started.call_once(|| (0..self.count).for_each(|i| self.start_thread(i)));
        &self.jobs
    }

    fn start_thread(&self, number: usize) {
        let (jobs, root, setup) = (self.jobs.clone(), self.root.clone(), self.setup.clone());
        let thread = thread::Builder::new().name(format!("{}-{number}", self.name)).stack_size(STACK_BYTES);
        let started = thread.spawn(move || match setup() {
            Ok(()) => work(&jobs, &root),
            // The same call worked at the start. Without it this thread must not access files.
            Err(error) => tracing::error!(%error, "a file worker could not switch to the workload's user"),
        });
        if let Err(error) = started {
            tracing::error!(%error, "starting a file worker failed");
        }
    }
}

fn work(jobs: &JobQueue<Job>, root: &Root) {
    while let Some(job) = jobs.take() {
        // A bug in one request must not end the worker for all others. That request gets an error because its answer
        // channel is dropped.
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

    async fn thread_of_quick_steps(workers: &FileWorkers) -> ThreadId {
        workers.run_quick(|_| thread::current().id()).await.unwrap()
    }

    #[tokio::test]
    async fn quick_steps_run_on_the_calling_thread_until_one_was_slow() {
        let root = rustix::fs::open("/", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let workers = FileWorkers::start(root, || Ok(())).unwrap();
        let this_thread = thread::current().id();
        assert_ne!(thread_of_quick_steps(&workers).await, this_thread, "this thread has not switched to the workload's user yet");
        workers.allow_inline_steps().unwrap();
        assert_eq!(thread_of_quick_steps(&workers).await, this_thread);
        workers.inline_policy.record(MAX_QUICK_STEP + Duration::from_micros(1));
        assert_ne!(thread_of_quick_steps(&workers).await, this_thread);
    }

    #[tokio::test]
    async fn a_panicking_quick_step_fails_only_its_own_request() {
        let root = rustix::fs::open("/", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let workers = FileWorkers::start(root, || Ok(())).unwrap();
        workers.allow_inline_steps().unwrap();
        let broken: Result<(), ApiError> = workers.run_quick(|_| panic!("a bug")).await;
        broken.unwrap_err();
        thread_of_quick_steps(&workers).await;
    }
}
