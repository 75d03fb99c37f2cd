//! Runs the sandbox's programs. The spawner creates their processes; boxd sends orders to these directly and, as their
//! parent, observes their end. `init`, the first process of their namespaces, signals and ends them.

mod init;
mod limits;
mod link;
mod memory;
mod namespace;
mod proc;
mod running;
mod seccomp;
mod spares;
mod starter;
mod stdio;
mod tree;

pub use cobox_kernel::{MAX_EXEC_ARGS_BYTES, STRING_OVERHEAD_BYTES};
pub use namespace::{Links, start};
pub use stdio::Stdio;

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cobox_kernel::{MAX_INLINE_BYTES, Program, StartStep, child_events, is_stopped};
use cobox_protocol::control::{BoxdConfig, Workload};
use link::{Order, Report, Root};
use running::{End, Running, Table};
use rustix::{
    fs::{MemfdFlags, Mode, OFlags, memfd_create, open},
    net::{RecvFlags, SendFlags, recv},
};
use spares::{Spare, Spares};
use stdio::Ends;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{Notify, oneshot, watch},
};

/// Maximum time until a program has been found and executed. It takes milliseconds, and this is enough on an overloaded
/// machine too.
const START_WITHIN: Duration = Duration::from_secs(10);
/// A program that has not begun after this time may have been stopped, so it gets SIGCONT.
const NUDGE_AFTER: Duration = Duration::from_millis(50);
/// Standby processes to try one after the other if each turns out to have been killed.
const MAX_TRIES: usize = 5;
/// Maximum number of signals queued while init is busy: more than any well-behaved client sends.
const MAX_WAITING_ORDERS: usize = 256;
/// Delay before an order is retried when the socket buffer was full.
const LINK_FULL_PAUSE: Duration = Duration::from_millis(1);

/// The program to start.
#[derive(Clone, Debug)]
pub struct Command {
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
    given: Given,
    shared: Arc<Shared>,
}

/// A standby process that has received its order.
struct Given {
    /// The pid for boxd, and the pid in the sandbox, which the program itself sees.
    pid: i32,
    number: i32,
    /// The other end closes when the program is executed. Before that, the failed step can be read from it.
    socket: Arc<OwnedFd>,
    end: watch::Receiver<Option<End>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// 128 + signal number if a signal ended it.
    pub code: i32,
    pub signal: Option<i32>,
}

/// Handle to all programs in the sandbox.
#[derive(Clone)]
pub struct Workloads(Arc<Shared>);

struct Shared {
    init: AsyncFd<OwnedFd>,
    starter: AsyncFd<OwnedFd>,
    null: OwnedFd,
    workload: Workload,
    /// Whether init checks the programs' memory while any are running.
    is_watched: bool,
    /// Sequence number of programs and of orders.
    seq: AtomicU64,
    table: Mutex<Table>,
    spares: Spares,
    /// Notified when an ended program was reaped late: it may have hidden others from [`running::reap`].
    reaped_late: Notify,
    /// Signals that did not fit into init's socket buffer yet, in order. The task started with the first of them sends
    /// all.
    waiting: Mutex<VecDeque<Order>>,
}

impl Workloads {
    /// Takes over the links returned by [`start`]. `ended` resolves when init or the spawner has exited, and all
    /// programs with it. Must be called while the process has one thread, because it blocks a signal.
    pub fn new(links: Links, config: &BoxdConfig) -> io::Result<(Self, tokio::task::JoinHandle<()>)> {
        let watched = |link: OwnedFd| {
            rustix::io::ioctl_fionbio(&link, true)?;
            cobox_kernel::register_fd(link, Interest::READABLE)
        };
        let children = watched(child_events()?)?;
        let shared = Arc::new(Shared {
            init: watched(links.init)?,
            starter: watched(links.starter)?,
            null: open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?,
            workload: config.workload.clone(),
            is_watched: config.limits.memory_bytes.is_some(),
            seq: AtomicU64::new(1),
            table: Mutex::default(),
            spares: Spares::default(),
            reaped_late: Notify::new(),
            waiting: Mutex::default(),
        });
        shared.keep_spares();
        let of_all = shared.clone();
        let ended = tokio::spawn(async move {
            tokio::select! {
                () = listen(&of_all, &of_all.init) => {}
                () = listen(&of_all, &of_all.starter) => {}
                () = running::reap(&of_all, children) => {}
            }
            // Dropping the senders wakes everything that waits.
            *of_all.table() = Table::default();
            of_all.spares.clear();
        });
        Ok((Self(shared), ended))
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
    pub async fn spawn(&self, command: Command) -> io::Result<Process> {
        let process = self.launch(command).await?;
        match tokio::time::timeout(START_WITHIN, process.begun()).await {
            Ok(begun) => begun.map(|()| process),
            // Another program may have stopped the process before it executed the program. It would then never report
            // anything.
            Err(_) => {
                process.kill_tree().await;
                let message =
                    format!("it didn't begin within {} s, and was ended; is something stopping all programs?", START_WITHIN.as_secs());
                Err(io::Error::new(io::ErrorKind::TimedOut, message))
            }
        }
    }

    /// Starts a program without waiting for its execution. If that fails, the process ends at once and
    /// [`Process::start_failure`] returns the reason. If this future is dropped before it completes, nothing was
    /// started.
    pub async fn launch(&self, command: Command) -> io::Result<Process> {
        let shared = &self.0;
        let seq = shared.next();
        let block = self.program(&command, seq)?.encode()?;
        let file = if block.len() > MAX_INLINE_BYTES { Some(memory_file(&block)?) } else { None };
        // A long order is in the file, and the packet contains its length.
        let length = (block.len() as u64).to_ne_bytes();
        let packet = if file.is_some() { &length } else { block.as_slice() };
        for _ in 0..MAX_TRIES {
            let mut spare = shared.spare().await?;
            let ends = match (command.stdio, spare.ends.take()) {
                (Stdio::Pipes { stdin: false }, Some(ends)) => ends,
                (stdio, _) => Ends::open(stdio)?,
            };
            let fds: Vec<_> = ends.theirs(shared.null.as_fd()).into_iter().chain(file.as_ref().map(AsFd::as_fd)).collect();
            if let Some(given) = shared.give(spare, seq, packet, &fds)? {
                shared.keep_spares();
                let Ends { stdin, stdout, stderr, pty, .. } = ends;
                let process = Process { stdin, stdout, stderr, pty, seq, given, shared: shared.clone() };
                // Programs that run as the same user may have stopped the standby process.
                if is_stopped(process.given.pid) {
                    process.signal(libc::SIGCONT);
                }
                return Ok(process);
            }
        }
        Err(io::Error::other("every process that was to become it was ended; is something ending all programs?"))
    }

    /// Forbids all programs to enlarge files, or allows it again.
    pub async fn stop_writers(&self, stop: bool) -> io::Result<()> {
        // First the limit that new programs inherit, then the running ones.
        for link in [&self.0.starter, &self.0.init] {
            let seq = self.0.next();
            let obeyed = self.0.table().order(seq, None);
            self.0.give_order(link, seq, Order::StopWriters { seq, stop }, obeyed).await?;
        }
        Ok(())
    }

    fn program(&self, command: &Command, mark: u64) -> io::Result<Program> {
        let w = &self.0.workload;
        let defaults: [(&str, &str); 6] = [
            ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
            ("HOME", &w.home),
            ("USER", &w.user),
            ("LOGNAME", &w.user),
            ("LANG", "C.UTF-8"),
            ("COBOX_SANDBOX", "1"),
        ];
        if command.env.iter().any(|(name, _)| name.is_empty() || name.contains(&b'=')) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a variable's name can't be empty or hold `=`"));
        }
        // Precedence: the variables of this command, then those of the sandbox, then the defaults.
        let made_with = w.env.0.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let is_set = |name: &str| command.env.iter().any(|(other, _)| other == name.as_bytes());
        let defaults = defaults.into_iter().filter(|(name, _)| !w.env.0.contains_key(*name)).chain(made_with);
        let defaults = defaults.filter(|(name, _)| !is_set(name)).map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        let env = defaults.chain(command.env.iter().map(|(name, value)| (name.as_slice(), value.as_slice())));
        Ok(Program {
            mark,
            is_terminal: matches!(command.stdio, Stdio::Pty { .. }),
            cwd: command.cwd.clone().unwrap_or_else(|| w.work_dir.clone().into_bytes()),
            argv: command.argv.clone(),
            env: env.map(|(name, value)| [name, b"=", value].concat()).collect(),
        })
    }
}

impl Process {
    /// Resolves when the process has executed the program or has failed to.
    async fn begun(&self) -> io::Result<()> {
        let socket = cobox_kernel::register_fd(self.given.socket.try_clone()?, Interest::READABLE)?;
        let hear = |fd: &OwnedFd| {
            let mut said = [0; 5];
            // Only peeks: the code that handles the end of the process reads it too.
            let (_, length) = recv(fd, &mut said, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
            Ok((length > 0).then_some(said))
        };
        let mut heard = pin!(socket.async_io(Interest::READABLE, hear));
        let said = match tokio::time::timeout(NUDGE_AFTER, &mut heard).await {
            Ok(heard) => heard?,
            Err(_) => {
                self.nudge();
                heard.await?
            }
        };
        match said {
            None => Ok(()),
            Some([step, a, b, c, d]) => Err(failure(step, i32::from_le_bytes([a, b, c, d]))),
        }
    }

    /// Continues the process if it was stopped before it executed the program. The stop signal may have been pending
    /// when the process received its order.
    pub fn nudge(&self) {
        let has_begun = recv(&*self.given.socket, &mut [0u8; 5], RecvFlags::PEEK | RecvFlags::DONTWAIT).is_ok();
        if !has_begun {
            self.signal(libc::SIGCONT);
        }
    }

    /// The program's pid in the sandbox; `None` if it was never executed.
    pub fn pid(&self) -> Option<i32> {
        self.start_failure().is_none().then_some(self.given.number)
    }

    /// Resolves when the program itself has ended. May be called repeatedly.
    pub async fn wait(&self) -> Exit {
        let mut end = self.given.end.clone();
        match end.wait_for(Option::is_some).await.map(|end| *end) {
            Ok(Some(End::Exited(exit))) => exit,
            Ok(Some(End::NotStarted { .. })) => NOT_STARTED,
            // Init has exited, and the program with it.
            Ok(None) | Err(_) => KILLED,
        }
    }

    /// Why an ended program was never executed.
    pub fn start_failure(&self) -> Option<io::Error> {
        match *self.given.end.borrow() {
            Some(End::NotStarted { step, errno }) => Some(failure(step, errno)),
            _ => None,
        }
    }

    /// Signals the program's process group while the program runs.
    pub fn signal(&self, signal: i32) {
        let (seq, group) = (self.shared.next(), self.given.number);
        self.post(seq, |is_running| is_running.then_some(Order::Signal { seq, group, signal }));
    }

    /// Signals the program and all its descendants.
    pub fn signal_tree(&self, signal: i32) {
        let seq = self.shared.next();
        self.post(seq, |is_running| Some(Order::SignalTree { seq, program: self.root(is_running), signal }));
    }

    /// Ends the program and all its descendants, including daemons, at once. If the program has already ended, this
    /// ends what it left behind.
    pub async fn kill_tree(&self) {
        let seq = self.shared.next();
        let (is_running, obeyed) = self.shared.table().expect(seq, (self.given.pid, self.seq));
        let order = Order::KillTree { seq, program: self.root(is_running) };
        // An error means that init has exited, and the process tree with it.
        let _ = self.shared.give_order(&self.shared.init, seq, order, obeyed).await;
    }

    fn root(&self, is_running: bool) -> Root {
        Root { mark: self.seq, pid: is_running.then_some(self.given.number) }
    }

    /// Sends an order without waiting for its completion.
    fn post(&self, seq: u64, order: impl FnOnce(bool) -> Option<Order>) {
        let (is_running, _) = self.shared.table().expect(seq, (self.given.pid, self.seq));
        match order(is_running) {
            Some(order) => self.shared.post(seq, order),
            None => self.shared.obeyed(seq),
        }
    }
}

/// Exit code that a shell reports for a program that can't be executed.
const NOT_STARTED: Exit = Exit { code: 126, signal: None };
const KILLED: Exit = Exit { code: 128 + libc::SIGKILL, signal: Some(libc::SIGKILL) };

fn init_gone() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the sandbox's init is gone")
}

impl Shared {
    fn next(&self) -> u64 {
        self.seq.fetch_add(1, Ordering::Relaxed)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // A panic while the lock is held leaves the table consistent: every change is one insert or remove.
        self.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// An order was carried out, or never will be.
    fn obeyed(&self, order: u64) {
        if self.table().obeyed(order) {
            self.reaped_late.notify_one();
        }
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Order>> {
        // Each change is one push or pop, so a panic leaves the queue consistent.
        self.waiting.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Sends a standby process its order. `None` if the process has ended.
    fn give(self: &Arc<Self>, spare: Spare, seq: u64, packet: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<Option<Given>> {
        let Spare { pid, number, socket, .. } = spare;
        let (tell, end) = watch::channel(None);
        let mut table = self.table();
        if let Err(e) = link::send_packet(&socket, packet, fds, SendFlags::DONTWAIT) {
            // Where programs run as the same user as standby processes, they can kill them.
            return if e.kind() == io::ErrorKind::BrokenPipe { Ok(None) } else { Err(e) };
        }
        let socket = Arc::new(socket);
        // The process is alive, so the pid is its own, and remains so while the table is locked.
        table.add(pid, Running { seq, socket: socket.clone(), tell, orders: 0 });
        drop(table);
        if self.is_watched {
            self.post(self.next(), Order::Watch);
        }
        Ok(Some(Given { pid, number, socket, end }))
    }

    /// Sends an order and waits for its completion.
    async fn give_order(&self, link: &AsyncFd<OwnedFd>, seq: u64, order: Order, obeyed: oneshot::Receiver<()>) -> io::Result<()> {
        let unsent = Unsent { shared: self, seq: Some(seq) };
        send(link, &order).await?;
        unsent.sent();
        obeyed.await.map_err(|_| init_gone())
    }

    /// Sends an order to init without waiting for its completion, after all earlier ones. Errors are ignored: if init
    /// has exited, so have the programs.
    fn post(self: &Arc<Self>, seq: u64, order: Order) {
        let mut waiting = self.waiting();
        if waiting.is_empty() {
            match link::send(self.init.get_ref(), &order, &[]) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                _ => return,
            }
            let shared = self.clone();
            tokio::spawn(async move {
                loop {
                    let Some(order) = shared.waiting().front().cloned() else { return };
                    // An error means that init has exited.
                    let _ = send(&shared.init, &order).await;
                    shared.waiting().pop_front();
                }
            });
        }
        if waiting.len() < MAX_WAITING_ORDERS {
            waiting.push_back(order);
        } else {
            tracing::warn!(?order, "init is busy, and so many signals wait for it that this one is not sent");
            self.obeyed(seq);
        }
    }
}

/// Unregisters an order that was never sent, so that it no longer keeps a pid reserved.
struct Unsent<'a> {
    shared: &'a Shared,
    seq: Option<u64>,
}

impl Unsent<'_> {
    fn sent(mut self) {
        self.seq = None;
    }
}

impl Drop for Unsent<'_> {
    fn drop(&mut self) {
        if let Some(seq) = self.seq {
            self.shared.obeyed(seq);
        }
    }
}

/// Sends an order as soon as the socket buffer has space.
async fn send(link: &AsyncFd<OwnedFd>, order: &Order) -> io::Result<()> {
    // Polls instead of waiting for writability, which would wake boxd each time an order is taken. The buffer is only
    // full while the receiver is busy.
    loop {
        match link::send(link.get_ref(), order, &[]) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(LINK_FULL_PAUSE).await,
            other => return other,
        }
    }
}

/// Handles reports until the other end has exited.
async fn listen(shared: &Shared, link: &AsyncFd<OwnedFd>) {
    while let Ok(Some(received)) = link.async_io(Interest::READABLE, |socket| link::receive::<Report>(socket)).await {
        match (received.message, received.fd) {
            (Report::Spare { pid, number }, Some(socket)) => shared.spare_was_made(Spare { pid, number, socket, ends: None }),
            (Report::NoSpare { errno }, _) => shared.spares.not_made(errno),
            (Report::Obeyed { seq }, _) => shared.obeyed(seq),
            (Report::Spare { .. } | Report::Unshared | Report::Ready | Report::Failed { .. }, _) => {}
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

fn failure(step: u8, errno: i32) -> io::Error {
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
