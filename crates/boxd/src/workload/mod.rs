//! The sandbox's programs, from boxd's side: started through `init`, which lives in the namespaces below boxd's.

mod init;
mod link;
mod memory;
mod namespace;
mod proc;
mod seccomp;
mod tree;

pub use link::{MAX_IMAGE_BYTES, STRING_BYTES};
pub use namespace::start as start_init;

use std::{
    collections::{HashMap, VecDeque},
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cobox_kernel::Step;
use cobox_protocol::control::Workload;
use link::{ImageSpec, MAX_INLINE_BYTES, Order, Report};
use rustix::{
    fs::{MemfdFlags, Mode, OFlags, memfd_create, open},
    pipe::{PipeFlags, pipe_with},
    pty::{OpenptFlags, ioctl_tiocgptpeer, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{oneshot, watch},
};

/// For a program to be found and begun: a moment, on a machine with far more to do than it can too.
const START_WITHIN: Duration = Duration::from_secs(10);
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

#[derive(Clone, Copy, Debug)]
pub enum Stdio {
    /// Three pipes. `stdin: false` gives it /dev/null.
    Pipes {
        stdin: bool,
    },
    Pty {
        cols: u16,
        rows: u16,
    },
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
    /// What init knows it by.
    seq: u64,
    fate: watch::Receiver<Fate>,
    shared: Arc<Shared>,
}

/// What init has told of a program so far.
#[derive(Clone, Copy, Debug, Default)]
struct Fate {
    /// In the workloads' pid namespace: what the program itself sees.
    pid: Option<i32>,
    end: Option<End>,
}

#[derive(Clone, Copy, Debug)]
enum End {
    Exited(Exit),
    NotStarted { step: u8, errno: i32 },
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
    link: AsyncFd<OwnedFd>,
    workload: Workload,
    seq: AtomicU64,
    table: Mutex<Table>,
    /// Signals that init had no room for yet, in their order. Whoever put the first here gives them all.
    waiting: Mutex<VecDeque<Order>>,
}

/// What is awaited from init.
#[derive(Default)]
struct Table {
    running: HashMap<u64, watch::Sender<Fate>>,
    killing: HashMap<u64, oneshot::Sender<()>>,
}

impl Workloads {
    /// Takes over the link to init that [`start_init`] gave. Resolves `init_ended` when init is gone, and all programs with it.
    pub fn new(link: OwnedFd, workload: Workload) -> io::Result<(Self, tokio::task::JoinHandle<()>)> {
        rustix::io::ioctl_fionbio(&link, true)?;
        let shared = Arc::new(Shared {
            link: cobox_kernel::watch(link, Interest::READABLE)?,
            workload,
            seq: AtomicU64::new(1),
            table: Mutex::default(),
            waiting: Mutex::default(),
        });
        let init_ended = tokio::spawn(listen(shared.clone()));
        Ok((Self(shared), init_ended))
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
        let (outcome_read, outcome_write) = pipe_with(PipeFlags::CLOEXEC)?;
        let process = self.order(command, Some(outcome_write)).await?;
        let started = async {
            match process.pid().await {
                Some(_) => read_outcome(outcome_read).await,
                None => Err(process.start_failure().unwrap_or_else(init_gone)),
            }
        };
        match tokio::time::timeout(START_WITHIN, started).await {
            Ok(started) => started.map(|()| process),
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
        self.order(command, None).await
    }

    async fn order(&self, command: Command, outcome: Option<OwnedFd>) -> io::Result<Process> {
        let image = self.image(&command)?.to_bytes()?;
        let Ends { theirs, stdin, stdout, stderr, pty } = Ends::open(command.stdio)?;
        let long_image = if image.len() > MAX_INLINE_BYTES { Some(memory_file(&image)?) } else { None };
        let fds: Vec<_> = theirs.iter().chain(&outcome).chain(&long_image).map(AsFd::as_fd).collect();
        let seq = self.0.seq.fetch_add(1, Ordering::Relaxed);
        let order = Order::Spawn {
            seq,
            is_terminal: matches!(command.stdio, Stdio::Pty { .. }),
            has_stdin: !matches!(command.stdio, Stdio::Pipes { stdin: false }),
            has_outcome: outcome.is_some(),
        };
        let tail = if long_image.is_some() { &[] } else { image.as_slice() };
        let (tell, fate) = watch::channel(Fate::default());
        self.0.table().running.insert(seq, tell);
        let forget = Forget { shared: &self.0, seq: Some(seq) };
        self.0.send(&order, tail, &fds).await?;
        forget.never();
        // Their ends are closed here, so that end-of-file on ours means the program closed it.
        Ok(Process { seq, stdin, stdout, stderr, pty, fate, shared: self.0.clone() })
    }

    /// Forbids every program to make files larger, or allows it again.
    pub async fn stop_writers(&self, stop: bool) -> io::Result<()> {
        self.0.send(&Order::StopWriters { stop }, &[], &[]).await
    }

    fn image(&self, command: &Command) -> io::Result<ImageSpec> {
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
        Ok(ImageSpec {
            cwd: command.cwd.clone().unwrap_or_else(|| w.work_dir.clone().into_bytes()),
            argv: command.argv.clone(),
            env: env.map(|(name, value)| [name, b"=", value].concat()).collect(),
        })
    }
}

impl Process {
    /// The program's number in the sandbox, when it has one; `None` if it never got one.
    pub async fn pid(&self) -> Option<i32> {
        let mut fate = self.fate.clone();
        if fate.borrow().pid.is_none() {
            // Init gone means that nothing more will be told.
            let _ = self.shared.send(&Order::TellPid { seq: self.seq }, &[], &[]).await;
        }
        // Init gone: what it told before still holds.
        let _ = fate.wait_for(|fate| fate.pid.is_some() || fate.end.is_some()).await;
        fate.borrow().pid
    }

    /// Resolves when the program itself has ended; may be called again.
    pub async fn wait(&self) -> Exit {
        let mut fate = self.fate.clone();
        match fate.wait_for(|fate| fate.end.is_some()).await {
            Ok(fate) => match fate.end {
                Some(End::Exited(exit)) => exit,
                Some(End::NotStarted { .. }) => NOT_STARTED,
                None => KILLED,
            },
            // Init is gone, and the program with it.
            Err(_) => KILLED,
        }
    }

    /// Why the program, which has ended, never ran.
    pub fn start_failure(&self) -> Option<io::Error> {
        match self.fate.borrow().end {
            Some(End::NotStarted { step, errno }) => Some(failure(step, errno)),
            _ => None,
        }
    }

    /// Sends a signal to the program's process group.
    pub fn signal(&self, signal: i32) {
        self.order(Order::Signal { seq: self.seq, signal });
    }

    /// Sends a signal to the program and all it started.
    pub fn signal_tree(&self, signal: i32) {
        self.order(Order::SignalTree { seq: self.seq, signal });
    }

    fn order(&self, order: Order) {
        self.shared.post(order);
    }

    /// Ends the program and all it started, daemons too, at once; also what it left behind when it ended by itself.
    pub async fn kill_tree(&self) {
        let seq = self.shared.seq.fetch_add(1, Ordering::Relaxed);
        let (tx, rx) = oneshot::channel();
        self.shared.table().killing.insert(seq, tx);
        if self.shared.send(&Order::KillTree { seq, program: self.seq }, &[], &[]).await.is_ok() {
            // A dropped sender means init is gone, and the tree with it.
            let _ = rx.await;
        }
    }
}

/// Takes an order's place in the table away again unless the order was given.
struct Forget<'a> {
    shared: &'a Shared,
    seq: Option<u64>,
}

impl Forget<'_> {
    fn never(mut self) {
        self.seq = None;
    }
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        if let Some(seq) = self.seq {
            self.shared.table().running.remove(&seq);
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
    fn table(&self) -> MutexGuard<'_, Table> {
        // A panic while it is held leaves a table that is still whole: every change is one insert or remove.
        self.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Order>> {
        // Each change is one push or pop.
        self.waiting.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Gives an order that nobody waits for, behind those given before it. Init gone means that what it is about is gone too.
    fn post(self: &Arc<Self>, order: Order) {
        let mut waiting = self.waiting();
        if waiting.is_empty() {
            match link::send_with(self.link.get_ref(), &order, &[], &[]) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                _ => return,
            }
            let shared = self.clone();
            tokio::spawn(async move {
                loop {
                    let Some(order) = shared.waiting().front().cloned() else { return };
                    // As above.
                    let _ = shared.send(&order, &[], &[]).await;
                    shared.waiting().pop_front();
                }
            });
        }
        match waiting.len() < MAX_WAITING_ORDERS {
            true => waiting.push_back(order),
            false => tracing::warn!(?order, "init is busy, and so many signals wait for it that this one is not sent"),
        }
    }

    async fn send(&self, order: &Order, tail: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) -> io::Result<()> {
        // The link is not watched for room, which would wake boxd each time init takes an order; it is full only while init is busy.
        loop {
            match link::send_with(self.link.get_ref(), order, tail, fds) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(LINK_FULL_PAUSE).await,
                other => return other,
            }
        }
    }
}

/// Hears init out until it is gone, then lets everybody who waits for it know.
async fn listen(shared: Arc<Shared>) {
    while let Ok(Some(received)) = shared.link.async_io(Interest::READABLE, |socket| link::receive::<Report>(socket)).await {
        let mut table = shared.table();
        match received.message {
            Report::Spawned { seq, pid } => {
                if let Some(tell) = table.running.get(&seq) {
                    tell.send_modify(|fate| fate.pid = Some(pid));
                }
            }
            Report::NotStarted { seq, step, errno } => end(&mut table, seq, None, End::NotStarted { step, errno }),
            Report::Exited { seq, pid, code, signal } => end(&mut table, seq, Some(pid), End::Exited(Exit { code, signal })),
            Report::TreeKilled { seq } => {
                table.killing.remove(&seq).map(|tx| tx.send(()));
            }
            Report::Unshared | Report::Ready | Report::Failed { .. } => {}
        }
    }
    *shared.table() = Table::default();
}

fn end(table: &mut Table, seq: u64, pid: Option<i32>, end: End) {
    if let Some(tell) = table.running.remove(&seq) {
        tell.send_replace(Fate { pid, end: Some(end) });
    }
}

/// Whether a spawn failed because its working directory can't be entered.
pub fn is_bad_cwd(e: &io::Error) -> bool {
    e.get_ref().is_some_and(|inner| inner.is::<BadCwd>())
}

#[derive(Debug, thiserror::Error)]
#[error("the working directory can't be entered: {0}")]
struct BadCwd(io::Error);

/// The pipe closes without a word when exec succeeded.
async fn read_outcome(pipe: OwnedFd) -> io::Result<()> {
    rustix::io::ioctl_fionbio(&pipe, true)?;
    let pipe = cobox_kernel::watch(pipe, Interest::READABLE)?;
    let mut bytes = [0u8; 5];
    let got = pipe.async_io(Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut bytes)?)).await?;
    if got == 0 {
        return Ok(());
    }
    Err(failure(bytes[0], i32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]])))
}

fn failure(step: u8, errno: i32) -> io::Error {
    let error = io::Error::from_raw_os_error(errno);
    match Step::from_number(step) {
        Some(Step::WorkingDirectory) => io::Error::new(error.kind(), BadCwd(error)),
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

/// Both sides of a program's standard I/O.
struct Ends {
    theirs: Vec<OwnedFd>,
    stdin: Option<OwnedFd>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    pty: Option<OwnedFd>,
}

impl Ends {
    fn open(stdio: Stdio) -> io::Result<Self> {
        match stdio {
            Stdio::Pipes { stdin } => {
                let (out_read, out_write) = pipe_with(PipeFlags::CLOEXEC)?;
                let (err_read, err_write) = pipe_with(PipeFlags::CLOEXEC)?;
                let (in_read, in_write) =
                    if stdin { pipe_with(PipeFlags::CLOEXEC).map(|(r, w)| (Some(r), Some(w)))? } else { (None, None) };
                for ours in [Some(&out_read), Some(&err_read), in_write.as_ref()].into_iter().flatten() {
                    rustix::io::ioctl_fionbio(ours, true)?;
                }
                Ok(Self {
                    theirs: in_read.into_iter().chain([out_write, err_write]).collect(),
                    stdin: in_write,
                    stdout: Some(out_read),
                    stderr: Some(err_read),
                    pty: None,
                })
            }
            Stdio::Pty { cols, rows } => {
                let master = open("/dev/pts/ptmx", OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?;
                unlockpt(&master)?;
                let peer = ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
                tcsetwinsize(&peer, Winsize { ws_col: cols, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 })?;
                rustix::io::ioctl_fionbio(&master, true)?;
                let (a, b) = (rustix::io::fcntl_dupfd_cloexec(&peer, 0)?, rustix::io::fcntl_dupfd_cloexec(&peer, 0)?);
                Ok(Self { theirs: vec![peer, a, b], stdin: None, stdout: None, stderr: None, pty: Some(master) })
            }
        }
    }
}
