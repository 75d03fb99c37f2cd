//! Runs the sandbox's programs. The spawner creates their processes; boxd sends orders to these directly and, as their
//! parent, observes their end. `init`, the first process of their namespaces, signals and ends them.

mod init;
mod memory_limiter;
mod messages;
mod namespace;
mod process_table;
mod process_tree;
mod procfs;
mod protected_limits;
mod seccomp;
mod spawner;
mod standby_pool;
mod stdio;

pub use cobox_kernel::{MAX_EXEC_ARGS_BYTES, STRING_OVERHEAD_BYTES};
pub use namespace::{WorkloadSockets, start};
pub use stdio::Stdio;

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cobox_kernel::{MAX_INLINE_BYTES, Program, StartStep, child_events, is_stopped};
use cobox_protocol::control::{BoxdConfig, Workload};
use messages::{Order, ProgramRef, Report};
use parking_lot::{Mutex, MutexGuard};
use process_table::{ProcessOutcome, ProcessTable, RunningProgram};
use rustix::{
    fs::{MemfdFlags, Mode, OFlags, memfd_create, open},
    net::{RecvFlags, SendFlags, recv},
};
use standby_pool::{StandbyPool, StandbyProcess};
use stdio::StdioEnds;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{Notify, oneshot, watch},
};

/// Maximum time until a program has been found and executed. It takes milliseconds, and this is enough on an overloaded
/// machine too.
const START_WITHIN: Duration = Duration::from_secs(10);
/// A program that has not begun after this time may have been stopped, so it gets SIGCONT.
const RESUME_AFTER: Duration = Duration::from_millis(50);
/// Standby processes to try one after the other if each turns out to have been killed.
const MAX_ATTEMPTS: usize = 5;
/// Maximum number of signals queued while init is busy: more than any well-behaved client sends.
const MAX_WAITING_ORDERS: usize = 256;
/// Delay before an order is retried when the socket buffer was full.
const SOCKET_FULL_PAUSE: Duration = Duration::from_millis(1);

/// The program to start.
#[derive(Clone, Debug)]
pub struct ProgramSpec {
    pub argv: Vec<Vec<u8>>,
    /// In addition to the sandbox's own environment. Each name occurs once.
    pub env: Vec<(Vec<u8>, Vec<u8>)>,
    /// An absolute path. The default is the shared workspace directory.
    pub cwd: Option<Vec<u8>>,
    pub stdio: Stdio,
}

/// A started program. Dropping it does not end the program.
pub struct Process {
    /// Write end of the pipe, non-blocking.
    pub stdin: Option<OwnedFd>,
    /// Read ends of the pipes, non-blocking.
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    /// Master of the terminal, non-blocking. Replaces the three pipes.
    pub pty: Option<OwnedFd>,
    /// The mark of the process tree.
    seq: u64,
    assigned: AssignedProcess,
    state: Arc<WorkloadState>,
}

/// A standby process that has received its order.
struct AssignedProcess {
    /// The pid for boxd, and the pid in the sandbox, which the program itself sees.
    pid: i32,
    sandbox_pid: i32,
    /// The other end closes when the program is executed. Before that, the failed step can be read from it.
    socket: Arc<OwnedFd>,
    outcome: watch::Receiver<Option<ProcessOutcome>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// 128 + signal number if a signal ended it.
    pub code: i32,
    pub signal: Option<i32>,
}

/// Handle to all programs in the sandbox.
#[derive(Clone)]
pub struct Workloads(Arc<WorkloadState>);

struct WorkloadState {
    init: AsyncFd<OwnedFd>,
    spawner: AsyncFd<OwnedFd>,
    null: OwnedFd,
    workload: Workload,
    /// Whether init checks the programs' memory while any are running.
    init_checks_memory: bool,
    /// Sequence number of programs and of orders.
    seq: AtomicU64,
    table: Mutex<ProcessTable>,
    standby_pool: StandbyPool,
    /// Notified when an ended program was reaped late: it may have hidden others from [`process_table::reap_ended_children`].
    late_reap: Notify,
    /// Signals that did not fit into init's socket buffer yet, in order. The task started with the first of them sends
    /// all.
    queued_orders: Mutex<VecDeque<Order>>,
}

impl Workloads {
    /// Takes over the links returned by [`start`]. `ended` resolves when init or the spawner has exited, and all
    /// programs with it. Must be called while the process has one thread, because it blocks a signal.
    pub fn new(sockets: WorkloadSockets, config: &BoxdConfig) -> io::Result<(Self, tokio::task::JoinHandle<()>)> {
        let register = |socket: OwnedFd| {
            rustix::io::ioctl_fionbio(&socket, true)?;
            cobox_kernel::register_fd(socket, Interest::READABLE)
        };
        let children = register(child_events()?)?;
        let state = Arc::new(WorkloadState {
            init: register(sockets.init)?,
            spawner: register(sockets.spawner)?,
            null: open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?,
            workload: config.workload.clone(),
            init_checks_memory: config.limits.memory_bytes.is_some(),
            seq: AtomicU64::new(1),
            table: Mutex::default(),
            standby_pool: StandbyPool::default(),
            late_reap: Notify::new(),
            queued_orders: Mutex::default(),
        });
        state.replenish_standby();
        let task_state = state.clone();
        let ended = tokio::spawn(async move {
            tokio::select! {
                () = handle_reports(&task_state, &task_state.init) => {}
                () = handle_reports(&task_state, &task_state.spawner) => {}
                () = process_table::reap_ended_children(&task_state, children) => {}
            }
            // Dropping the senders wakes everything that waits.
            *task_state.table() = ProcessTable::default();
            task_state.standby_pool.clear();
        });
        Ok((Self(state), ended))
    }

    pub fn work_dir(&self) -> &str {
        &self.0.workload.work_dir
    }

    /// The user that programs run as.
    pub fn user(&self) -> &str {
        &self.0.workload.user
    }

    /// Starts a program and waits until it has been executed. The error is that of the failed step: `NotFound` if there
    /// is no such program. [`is_bad_cwd`] recognizes a working directory that can't be entered.
    pub async fn spawn(&self, spec: ProgramSpec) -> io::Result<Process> {
        let process = self.launch(spec).await?;
        match tokio::time::timeout(START_WITHIN, process.wait_until_executed()).await {
            Ok(executed) => executed.map(|()| process),
            // Another program may have stopped the process before it executed the program. It would then never report
            // anything.
            Err(_) => {
                process.kill_tree().await;
                let message = format!(
                    "the program did not start within {} s and was killed; check whether a program stops all others",
                    START_WITHIN.as_secs()
                );
                Err(io::Error::new(io::ErrorKind::TimedOut, message))
            }
        }
    }

    /// Starts a program without waiting for its execution. If that fails, the process ends at once and
    /// [`Process::start_failure`] returns the reason. If this future is dropped before it completes, nothing was
    /// started.
    pub async fn launch(&self, spec: ProgramSpec) -> io::Result<Process> {
        let state = &self.0;
        let seq = state.next_seq();
        let block = self.build_program(&spec, seq)?.encode()?;
        let file = if block.len() > MAX_INLINE_BYTES { Some(memory_file(&block)?) } else { None };
        // A long order is in the file, and the packet contains its length.
        let length = (block.len() as u64).to_ne_bytes();
        let packet = if file.is_some() { &length } else { block.as_slice() };
        for _ in 0..MAX_ATTEMPTS {
            let mut standby = state.take_standby().await?;
            let ends = match (spec.stdio, standby.ends.take()) {
                (Stdio::Pipes { stdin: false }, Some(ends)) => ends,
                (stdio, _) => StdioEnds::open(stdio)?,
            };
            let fds: Vec<_> = ends.child_fds(state.null.as_fd()).into_iter().chain(file.as_ref().map(AsFd::as_fd)).collect();
            if let Some(assigned) = state.assign(standby, seq, packet, &fds)? {
                state.replenish_standby();
                let StdioEnds { stdin, stdout, stderr, pty, .. } = ends;
                let process = Process { stdin, stdout, stderr, pty, seq, assigned, state: state.clone() };
                // Programs that run as the same user may have stopped the standby process.
                if is_stopped(process.assigned.pid) {
                    process.signal(libc::SIGCONT);
                }
                return Ok(process);
            }
        }
        Err(io::Error::other("every standby process for the program was killed; check whether a program kills all others"))
    }

    /// Forbids all programs to enlarge files, or allows it again.
    pub async fn stop_writers(&self, stop: bool) -> io::Result<()> {
        // First the limit that new programs inherit, then the running ones.
        for socket in [&self.0.spawner, &self.0.init] {
            let seq = self.0.next_seq();
            let completed = self.0.table().register_order(seq, None);
            self.0.execute_order(socket, seq, Order::StopWriters { seq, stop }, completed).await?;
        }
        Ok(())
    }

    fn build_program(&self, spec: &ProgramSpec, mark: u64) -> io::Result<Program> {
        let workload = &self.0.workload;
        let defaults: [(&str, &str); 6] = [
            ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
            ("HOME", &workload.home),
            ("USER", &workload.user),
            ("LOGNAME", &workload.user),
            ("LANG", "C.UTF-8"),
            ("COBOX_SANDBOX", "1"),
        ];
        if spec.env.iter().any(|(name, _)| name.is_empty() || name.contains(&b'=')) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a variable's name can't be empty or contain `=`"));
        }
        // Precedence: the variables of this command, then those of the sandbox, then the defaults.
        let sandbox_env = workload.env.0.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let is_set = |name: &str| spec.env.iter().any(|(other, _)| other == name.as_bytes());
        let defaults = defaults.into_iter().filter(|(name, _)| !workload.env.0.contains_key(*name)).chain(sandbox_env);
        let defaults = defaults.filter(|(name, _)| !is_set(name)).map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        let env = defaults.chain(spec.env.iter().map(|(name, value)| (name.as_slice(), value.as_slice())));
        Ok(Program {
            mark,
            is_terminal: matches!(spec.stdio, Stdio::Pty { .. }),
            cwd: spec.cwd.clone().unwrap_or_else(|| workload.work_dir.clone().into_bytes()),
            argv: spec.argv.clone(),
            env: env.map(|(name, value)| [name, b"=", value].concat()).collect(),
        })
    }
}

impl Process {
    /// Resolves when the process has executed the program or has failed to.
    async fn wait_until_executed(&self) -> io::Result<()> {
        let socket = cobox_kernel::register_fd(self.assigned.socket.try_clone()?, Interest::READABLE)?;
        let peek_failure = |fd: &OwnedFd| {
            let mut failure_bytes = [0; 5];
            // Only peeks: the code that handles the end of the process reads it too.
            let (_, length) = recv(fd, &mut failure_bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
            Ok((length > 0).then_some(failure_bytes))
        };
        let mut pending = pin!(socket.async_io(Interest::READABLE, peek_failure));
        let failure_bytes = match tokio::time::timeout(RESUME_AFTER, &mut pending).await {
            Ok(failure) => failure?,
            Err(_) => {
                self.resume_if_stopped();
                pending.await?
            }
        };
        match failure_bytes {
            None => Ok(()),
            Some([step, a, b, c, d]) => Err(start_error(step, i32::from_le_bytes([a, b, c, d]))),
        }
    }

    /// Continues the process if it was stopped before it executed the program. The stop signal may have been pending
    /// when the process received its order.
    pub fn resume_if_stopped(&self) {
        let has_begun = recv(&*self.assigned.socket, &mut [0u8; 5], RecvFlags::PEEK | RecvFlags::DONTWAIT).is_ok();
        if !has_begun {
            self.signal(libc::SIGCONT);
        }
    }

    /// The program's pid in the sandbox; `None` if it was never executed.
    pub fn pid(&self) -> Option<i32> {
        self.start_failure().is_none().then_some(self.assigned.sandbox_pid)
    }

    /// Resolves when the program itself has ended. May be called repeatedly.
    pub async fn wait(&self) -> Exit {
        let mut outcome = self.assigned.outcome.clone();
        match outcome.wait_for(Option::is_some).await.map(|outcome| *outcome) {
            Ok(Some(ProcessOutcome::Exited(exit))) => exit,
            Ok(Some(ProcessOutcome::NotStarted { .. })) => NOT_STARTED,
            // Init has exited, and the program with it.
            Ok(None) | Err(_) => KILLED,
        }
    }

    /// Why an ended program was never executed.
    pub fn start_failure(&self) -> Option<io::Error> {
        match *self.assigned.outcome.borrow() {
            Some(ProcessOutcome::NotStarted { step, errno }) => Some(start_error(step, errno)),
            _ => None,
        }
    }

    /// Signals the program's process group while the program runs.
    pub fn signal(&self, signal: i32) {
        let (seq, group) = (self.state.next_seq(), self.assigned.sandbox_pid);
        self.queue_order(seq, |is_running| is_running.then_some(Order::Signal { seq, group, signal }));
    }

    /// Signals the program and all its descendants.
    pub fn signal_tree(&self, signal: i32) {
        let seq = self.state.next_seq();
        self.queue_order(seq, |is_running| Some(Order::SignalTree { seq, program: self.program_ref(is_running), signal }));
    }

    /// Ends the program and all its descendants, including daemons, at once. If the program has already ended, this
    /// ends what it left behind.
    pub async fn kill_tree(&self) {
        let seq = self.state.next_seq();
        let (is_running, completed) = self.state.table().register_order_for(seq, (self.assigned.pid, self.seq));
        let order = Order::KillTree { seq, program: self.program_ref(is_running) };
        // An error means that init has exited, and the process tree with it.
        let _ = self.state.execute_order(&self.state.init, seq, order, completed).await;
    }

    fn program_ref(&self, is_running: bool) -> ProgramRef {
        ProgramRef { mark: self.seq, pid: is_running.then_some(self.assigned.sandbox_pid) }
    }

    /// Sends an order without waiting for its completion.
    fn queue_order(&self, seq: u64, order: impl FnOnce(bool) -> Option<Order>) {
        let (is_running, _) = self.state.table().register_order_for(seq, (self.assigned.pid, self.seq));
        match order(is_running) {
            Some(order) => self.state.queue_order(seq, order),
            None => self.state.complete_order(seq),
        }
    }
}

/// Exit code that a shell reports for a program that can't be executed.
const NOT_STARTED: Exit = Exit { code: 126, signal: None };
const KILLED: Exit = Exit { code: 128 + libc::SIGKILL, signal: Some(libc::SIGKILL) };

fn init_exited() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the sandbox's init process has exited")
}

impl WorkloadState {
    fn next_seq(&self) -> u64 {
        self.seq.fetch_add(1, Ordering::Relaxed)
    }

    fn table(&self) -> MutexGuard<'_, ProcessTable> {
        self.table.lock()
    }

    /// An order was carried out, or never will be.
    fn complete_order(&self, order: u64) {
        if self.table().complete_order(order) {
            self.late_reap.notify_one();
        }
    }

    fn queued_orders(&self) -> MutexGuard<'_, VecDeque<Order>> {
        self.queued_orders.lock()
    }

    /// Sends a standby process its order. `None` if the process has ended.
    fn assign(
        self: &Arc<Self>,
        standby: StandbyProcess,
        seq: u64,
        packet: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<Option<AssignedProcess>> {
        let StandbyProcess { pid, sandbox_pid, socket, .. } = standby;
        let (outcome_sender, outcome) = watch::channel(None);
        let mut table = self.table();
        if let Err(e) = messages::send_packet(&socket, packet, fds, SendFlags::DONTWAIT) {
            // Where programs run as the same user as standby processes, they can kill them.
            return if e.kind() == io::ErrorKind::BrokenPipe { Ok(None) } else { Err(e) };
        }
        let socket = Arc::new(socket);
        // The process is alive, so the pid is its own, and remains so while the table is locked.
        table.add(pid, RunningProgram { seq, socket: socket.clone(), outcome_sender, pending_orders: 0 });
        drop(table);
        if self.init_checks_memory {
            self.queue_order(self.next_seq(), Order::WatchMemory);
        }
        Ok(Some(AssignedProcess { pid, sandbox_pid, socket, outcome }))
    }

    /// Sends an order and waits for its completion.
    async fn execute_order(&self, socket: &AsyncFd<OwnedFd>, seq: u64, order: Order, completed: oneshot::Receiver<()>) -> io::Result<()> {
        let unsent = UnsentOrder { state: self, seq: Some(seq) };
        send(socket, &order).await?;
        unsent.disarm();
        completed.await.map_err(|_| init_exited())
    }

    /// Sends an order to init without waiting for its completion, after all earlier ones. Errors are ignored: if init
    /// has exited, so have the programs.
    fn queue_order(self: &Arc<Self>, seq: u64, order: Order) {
        let mut queued = self.queued_orders();
        if queued.is_empty() {
            match messages::send(self.init.get_ref(), &order, &[]) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                _ => return,
            }
            let state = self.clone();
            tokio::spawn(async move {
                loop {
                    let Some(order) = state.queued_orders().front().cloned() else { return };
                    // An error means that init has exited.
                    let _ = send(&state.init, &order).await;
                    state.queued_orders().pop_front();
                }
            });
        }
        if queued.len() < MAX_WAITING_ORDERS {
            queued.push_back(order);
        } else {
            tracing::warn!(?order, "init is busy and its signal queue is full; the signal was not sent");
            self.complete_order(seq);
        }
    }
}

/// Unregisters an order that was never sent, so that it no longer keeps a pid reserved.
struct UnsentOrder<'a> {
    state: &'a WorkloadState,
    seq: Option<u64>,
}

impl UnsentOrder<'_> {
    fn disarm(mut self) {
        self.seq = None;
    }
}

impl Drop for UnsentOrder<'_> {
    fn drop(&mut self) {
        if let Some(seq) = self.seq {
            self.state.complete_order(seq);
        }
    }
}

/// Sends an order as soon as the socket buffer has space.
async fn send(socket: &AsyncFd<OwnedFd>, order: &Order) -> io::Result<()> {
    // Polls instead of waiting for writability, which would wake boxd each time an order is taken. The buffer is only
    // full while the receiver is busy.
    loop {
        match messages::send(socket.get_ref(), order, &[]) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(SOCKET_FULL_PAUSE).await,
            other => return other,
        }
    }
}

/// Handles reports until the other end has exited.
async fn handle_reports(state: &WorkloadState, socket: &AsyncFd<OwnedFd>) {
    while let Ok(Some(received)) = socket.async_io(Interest::READABLE, |socket| messages::receive::<Report>(socket)).await {
        match (received.message, received.fd) {
            (Report::StandbyCreated { pid, sandbox_pid }, Some(socket)) => {
                state.standby_created(StandbyProcess { pid, sandbox_pid, socket, ends: None })
            }
            (Report::StandbyFailed { errno }, _) => state.standby_pool.fail_requests(errno),
            (Report::Completed { seq }, _) => state.complete_order(seq),
            (Report::StandbyCreated { .. } | Report::Unshared | Report::Ready | Report::Failed { .. }, _) => {}
        }
    }
}

/// Whether a start failed because the working directory can't be entered.
pub fn is_bad_cwd(e: &io::Error) -> bool {
    e.get_ref().is_some_and(|inner| inner.is::<BadCwd>())
}

#[derive(Debug, thiserror::Error)]
#[error("the working directory can't be entered: {0}")]
struct BadCwd(io::Error);

fn start_error(step: u8, errno: i32) -> io::Error {
    let error = io::Error::from_raw_os_error(errno);
    match StartStep::from_number(step) {
        Some(StartStep::WorkingDirectory) => io::Error::new(error.kind(), BadCwd(error)),
        _ => error,
    }
}

fn memory_file(bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = memfd_create("image", MemfdFlags::CLOEXEC)?;
    let mut rest = bytes;
    while !rest.is_empty() {
        rest = &rest[rustix::io::write(&file, rest)?..];
    }
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
    Ok(file)
}
