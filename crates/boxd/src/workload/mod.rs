//! The sandbox's programs, from boxd's side. The `starter` makes their processes, which boxd tells what to become and hears the end of;
//! `init`, the first process of their namespaces, signals and ends them.

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
    sync::{oneshot, watch},
};

/// For a program to be found and begun: a moment, on a machine with far more to do than it can too.
const START_WITHIN: Duration = Duration::from_secs(10);
/// When one that has not begun by then may have been stopped.
const NUDGE_AFTER: Duration = Duration::from_millis(50);
/// Waiting processes that may turn out to be gone, one after the other: somebody ends all there are, again and again.
const MAX_TRIES: usize = 5;
/// Signals that may wait while init is busy: more than anybody sends who means each of them.
const MAX_WAITING_ORDERS: usize = 256;
/// Between two tries at an order that init had no room for.
const LINK_FULL_PAUSE: Duration = Duration::from_millis(1);

/// What to start.
#[derive(Clone, Debug)]
pub struct Command {
    pub argv: Vec<Vec<u8>>,
    /// On top of the sandbox's own environment; each name once.
    pub env: Vec<(Vec<u8>, Vec<u8>)>,
    /// Absolute; the shared folder when not given.
    pub cwd: Option<Vec<u8>>,
    pub stdio: Stdio,
}

/// A started program. Dropping it leaves the program running.
pub struct Process {
    /// The write end, non-blocking.
    pub stdin: Option<OwnedFd>,
    /// The read ends, non-blocking.
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    /// The terminal's master, non-blocking, instead of the three.
    pub pty: Option<OwnedFd>,
    /// What all it starts is marked with.
    seq: u64,
    given: Given,
    shared: Arc<Shared>,
}

/// A process that was told to become a program.
struct Given {
    /// Its number here, and in the sandbox: what the program itself sees.
    pid: i32,
    number: i32,
    /// Its end is closed when it has become the program; before that it says why it can't.
    socket: Arc<OwnedFd>,
    end: watch::Receiver<Option<End>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// 128 + the signal's number when a signal ended it.
    pub code: i32,
    pub signal: Option<i32>,
}

/// The handle to everything that runs in the sandbox.
#[derive(Clone)]
pub struct Workloads(Arc<Shared>);

struct Shared {
    init: AsyncFd<OwnedFd>,
    starter: AsyncFd<OwnedFd>,
    null: OwnedFd,
    workload: Workload,
    /// Whether init watches the programs' memory while there are any.
    is_watched: bool,
    /// Of programs and of orders.
    seq: AtomicU64,
    table: Mutex<Table>,
    spares: Spares,
    /// Signals that init had no room for yet, in their order. Whoever put the first here gives them all.
    waiting: Mutex<VecDeque<Order>>,
}

impl Workloads {
    /// Takes over the links that [`start`] gave. Resolves `ended` when one of the two at their ends is gone, and all programs with it. Must be
    /// called before there is a second thread: it blocks a signal.
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
            // Whoever waits for something is told by its end.
            *of_all.table() = Table::default();
            of_all.spares.clear();
        });
        Ok((Self(shared), ended))
    }

    pub fn work_dir(&self) -> &str {
        &self.0.workload.work_dir
    }

    /// Whom programs run as.
    pub fn user(&self) -> &str {
        &self.0.workload.user
    }

    /// Starts a program and waits until it runs. The errno is that of the failing step: `NotFound` for no such program; a working
    /// directory that can't be entered is told by [`is_bad_cwd`].
    pub async fn spawn(&self, command: Command) -> io::Result<Process> {
        let process = self.launch(command).await?;
        match tokio::time::timeout(START_WITHIN, process.begun()).await {
            Ok(begun) => begun.map(|()| process),
            // Others may stop it before it is a program, and then nobody would hear of it again.
            Err(_) => {
                process.kill_tree().await;
                let message =
                    format!("it didn't begin within {} s, and was ended; is something stopping all programs?", START_WITHIN.as_secs());
                Err(io::Error::new(io::ErrorKind::TimedOut, message))
            }
        }
    }

    /// Starts a program without waiting for it to run: one that can't be run ends at once, and [`Process::start_failure`] says why.
    /// If this is dropped before it is done, nothing was started.
    pub async fn launch(&self, command: Command) -> io::Result<Process> {
        let shared = &self.0;
        let seq = shared.next();
        let block = self.program(&command, seq)?.encode()?;
        let file = if block.len() > MAX_INLINE_BYTES { Some(memory_file(&block)?) } else { None };
        // A long one is in the file, and the packet says how long it is.
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
                // Or stop it.
                if is_stopped(process.given.pid) {
                    process.signal(libc::SIGCONT);
                }
                return Ok(process);
            }
        }
        Err(io::Error::other("every process that was to become it was ended; is something ending all programs?"))
    }

    /// Forbids every program to make files larger, or allows it again.
    pub async fn stop_writers(&self, stop: bool) -> io::Result<()> {
        // First what new ones start with, then those there are.
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
        // Whoever starts a program has the last word, then what the sandbox was made with.
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
    /// Resolves when the process has become the program, or with why it couldn't.
    async fn begun(&self) -> io::Result<()> {
        let socket = cobox_kernel::register_fd(self.given.socket.try_clone()?, Interest::READABLE)?;
        let hear = |fd: &OwnedFd| {
            let mut said = [0; 5];
            // Left there: who hears of its end looks for it too.
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

    /// Lets it go on if somebody has stopped it before it became the program: the signal may have been on its way when it was given its order.
    pub fn nudge(&self) {
        let has_begun = recv(&*self.given.socket, &mut [0u8; 5], RecvFlags::PEEK | RecvFlags::DONTWAIT).is_ok();
        if !has_begun {
            self.signal(libc::SIGCONT);
        }
    }

    /// The program's number in the sandbox; `None` if it never ran.
    pub fn pid(&self) -> Option<i32> {
        self.start_failure().is_none().then_some(self.given.number)
    }

    /// Resolves when the program itself has ended; may be called again.
    pub async fn wait(&self) -> Exit {
        let mut end = self.given.end.clone();
        match end.wait_for(Option::is_some).await.map(|end| *end) {
            Ok(Some(End::Exited(exit))) => exit,
            Ok(Some(End::NotStarted { .. })) => NOT_STARTED,
            // Init is gone, and the program with it.
            Ok(None) | Err(_) => KILLED,
        }
    }

    /// Why the program, which has ended, never ran.
    pub fn start_failure(&self) -> Option<io::Error> {
        match *self.given.end.borrow() {
            Some(End::NotStarted { step, errno }) => Some(failure(step, errno)),
            _ => None,
        }
    }

    /// Sends a signal to the program's process group, while the program runs.
    pub fn signal(&self, signal: i32) {
        let (seq, group) = (self.shared.next(), self.given.number);
        self.post(seq, |is_running| is_running.then_some(Order::Signal { seq, group, signal }));
    }

    /// Sends a signal to the program and all it started.
    pub fn signal_tree(&self, signal: i32) {
        let seq = self.shared.next();
        self.post(seq, |is_running| Some(Order::SignalTree { seq, program: self.root(is_running), signal }));
    }

    /// Ends the program and all it started, daemons too, at once; also what it left behind when it ended by itself.
    pub async fn kill_tree(&self) {
        let seq = self.shared.next();
        let (is_running, obeyed) = self.shared.table().expect(seq, (self.given.pid, self.seq));
        let order = Order::KillTree { seq, program: self.root(is_running) };
        // Init gone means that the tree is, too.
        let _ = self.shared.give_order(&self.shared.init, seq, order, obeyed).await;
    }

    fn root(&self, is_running: bool) -> Root {
        Root { mark: self.seq, pid: is_running.then_some(self.given.number) }
    }

    /// Gives an order that nobody waits for.
    fn post(&self, seq: u64, order: impl FnOnce(bool) -> Option<Order>) {
        let (is_running, _) = self.shared.table().expect(seq, (self.given.pid, self.seq));
        match order(is_running) {
            Some(order) => self.shared.post(seq, order),
            None => self.shared.table().obeyed(seq),
        }
    }
}

/// What a shell answers for a program that can't be run.
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
        // A panic while it is held leaves a table that is still whole: every change is one insert or remove.
        self.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Order>> {
        // Each change is one push or pop.
        self.waiting.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Tells a waiting process what to become. `None` if it can't any more.
    fn give(self: &Arc<Self>, spare: Spare, seq: u64, packet: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<Option<Given>> {
        let Spare { pid, number, socket, .. } = spare;
        let (tell, end) = watch::channel(None);
        let mut table = self.table();
        if let Err(e) = link::send_packet(&socket, packet, fds, SendFlags::DONTWAIT) {
            // Where programs have the user it was made as, they can end it.
            return if e.kind() == io::ErrorKind::BrokenPipe { Ok(None) } else { Err(e) };
        }
        let socket = Arc::new(socket);
        // It lives, so its number is its own, and stays so while the table is held.
        table.add(pid, Running { seq, socket: socket.clone(), tell, orders: 0 });
        drop(table);
        if self.is_watched {
            self.post(self.next(), Order::Watch);
        }
        Ok(Some(Given { pid, number, socket, end }))
    }

    /// Gives an order and waits until it was obeyed.
    async fn give_order(&self, link: &AsyncFd<OwnedFd>, seq: u64, order: Order, obeyed: oneshot::Receiver<()>) -> io::Result<()> {
        let unsent = Unsent { shared: self, seq: Some(seq) };
        send(link, &order).await?;
        unsent.sent();
        obeyed.await.map_err(|_| init_gone())
    }

    /// Gives init an order that nobody waits for, behind those given before it. Init gone means that what it is about is gone too.
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
                    // As above.
                    let _ = send(&shared.init, &order).await;
                    shared.waiting().pop_front();
                }
            });
        }
        if waiting.len() < MAX_WAITING_ORDERS {
            waiting.push_back(order);
        } else {
            tracing::warn!(?order, "init is busy, and so many signals wait for it that this one is not sent");
            self.table().obeyed(seq);
        }
    }
}

/// Takes an order back that was never given: nothing is held for it any more.
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
            self.shared.table().obeyed(seq);
        }
    }
}

/// Gives an order as soon as there is room for it.
async fn send(link: &AsyncFd<OwnedFd>, order: &Order) -> io::Result<()> {
    // The link is not watched for room, which would wake boxd each time an order is taken; it is full only while they are busy.
    loop {
        match link::send(link.get_ref(), order, &[]) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(LINK_FULL_PAUSE).await,
            other => return other,
        }
    }
}

/// Hears out whoever is at the other end until they are gone.
async fn listen(shared: &Shared, link: &AsyncFd<OwnedFd>) {
    while let Ok(Some(received)) = link.async_io(Interest::READABLE, |socket| link::receive::<Report>(socket)).await {
        match (received.message, received.fd) {
            (Report::Spare { pid, number }, Some(socket)) => shared.spare_was_made(Spare { pid, number, socket, ends: None }),
            (Report::NoSpare { errno }, _) => shared.spares.not_made(errno),
            (Report::Obeyed { seq }, _) => shared.table().obeyed(seq),
            (Report::Spare { .. } | Report::Unshared | Report::Ready | Report::Failed { .. }, _) => {}
        }
    }
}

/// Whether a spawn failed because its working directory can't be entered.
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
