//! The sandbox's programs, from boxd's side: started through `init`, which lives in the namespaces below boxd's.

mod init;
mod link;
mod namespace;
mod seccomp;

pub use namespace::start as start_init;

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use cobox_protocol::control::Workload;
use link::{ImageSpec, Order, Report, Step};
use rustix::{
    fs::{CWD, MemfdFlags, Mode, OFlags, memfd_create, open},
    pipe::{PipeFlags, pipe_with},
    pty::{OpenptFlags, ioctl_tiocgptpeer, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{oneshot, watch},
};

/// What to start.
#[derive(Clone, Debug)]
pub struct Command {
    pub argv: Vec<Vec<u8>>,
    /// On top of the sandbox's own environment.
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
    /// In the workloads' pid namespace: what the program itself sees.
    pub pid: i32,
    /// The write end, non-blocking.
    pub stdin: Option<OwnedFd>,
    /// The read ends, non-blocking.
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    /// The terminal's master, non-blocking, instead of the three.
    pub pty: Option<OwnedFd>,
    exit: watch::Receiver<Option<Exit>>,
    shared: Arc<Shared>,
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
}

/// The pid and its end to come, or why there is none.
type Spawned = io::Result<(i32, watch::Receiver<Option<Exit>>)>;

/// What is awaited from init.
#[derive(Default)]
struct Table {
    spawning: HashMap<u64, oneshot::Sender<Spawned>>,
    running: HashMap<i32, watch::Sender<Option<Exit>>>,
    killing: HashMap<u64, oneshot::Sender<()>>,
}

impl Workloads {
    /// Takes over the link to init that [`start_init`] gave. Resolves `init_ended` when init is gone, and all programs with it.
    pub fn new(link: OwnedFd, workload: Workload) -> io::Result<(Self, tokio::task::JoinHandle<()>)> {
        rustix::io::ioctl_fionbio(&link, true)?;
        let shared = Arc::new(Shared {
            link: cobox_kernel::watch(link, Interest::READABLE | Interest::WRITABLE)?,
            workload,
            seq: AtomicU64::new(1),
            table: Mutex::default(),
        });
        let init_ended = tokio::spawn(listen(shared.clone()));
        Ok((Self(shared), init_ended))
    }

    pub fn work_dir(&self) -> &str {
        &self.0.workload.work_dir
    }

    /// Starts a program. The errno is that of the failing step: `NotFound` for no such program; a working directory
    /// that can't be entered is told by [`is_bad_cwd`].
    pub async fn spawn(&self, command: Command) -> io::Result<Process> {
        let spec = self.image(&command)?;
        let image = memfd_create("image", MemfdFlags::CLOEXEC)?;
        let mut file = File::from(image);
        spec.write_to(&mut file)?;
        rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
        let (outcome_read, outcome_write) = pipe_with(PipeFlags::CLOEXEC)?;
        let Ends { theirs, stdin, stdout, stderr, pty } = Ends::open(command.stdio)?;

        let seq = self.0.seq.fetch_add(1, Ordering::Relaxed);
        let (tx, rx) = oneshot::channel();
        self.0.table().spawning.insert(seq, tx);
        let [a, b, c] = &theirs;
        let fds = [file.as_fd(), a.as_fd(), b.as_fd(), c.as_fd(), outcome_write.as_fd()];
        let is_terminal = matches!(command.stdio, Stdio::Pty { .. });
        if let Err(e) = self.0.send(&Order::Spawn { seq, is_terminal }, &fds).await {
            self.0.table().spawning.remove(&seq);
            return Err(e);
        }
        // Closed here, so that end-of-file on ours means the program closed it.
        drop((outcome_write, theirs));
        let (pid, exit) = rx.await.map_err(|_| init_gone())??;
        read_outcome(outcome_read).await?;
        Ok(Process { pid, stdin, stdout, stderr, pty, exit, shared: self.0.clone() })
    }

    /// Forbids every program to make files larger, or allows it again.
    pub async fn stop_writers(&self, stop: bool) -> io::Result<()> {
        self.0.send(&Order::StopWriters { stop }, &[]).await
    }

    fn image(&self, command: &Command) -> io::Result<ImageSpec> {
        let w = &self.0.workload;
        let mut env: Vec<(Vec<u8>, Vec<u8>)> = [
            ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
            ("HOME", &w.home),
            ("USER", &w.user),
            ("LOGNAME", &w.user),
            ("LANG", "C.UTF-8"),
            ("COBOX_SANDBOX", "1"),
        ]
        .into_iter()
        .map(|(k, v)| (k.as_bytes().to_vec(), v.as_bytes().to_vec()))
        .collect();
        for (name, value) in &command.env {
            if name.is_empty() || name.contains(&b'=') {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "a variable's name can't be empty or hold `=`"));
            }
            env.retain(|(k, _)| k != name);
            env.push((name.clone(), value.clone()));
        }
        Ok(ImageSpec {
            cwd: command.cwd.clone().unwrap_or_else(|| w.work_dir.clone().into_bytes()),
            argv: command.argv.clone(),
            env: env.into_iter().map(|(k, v)| [k.as_slice(), b"=", &v].concat()).collect(),
        })
    }
}

impl Process {
    /// Resolves when the program itself has ended; may be called again.
    pub async fn wait(&self) -> Exit {
        let mut exit = self.exit.clone();
        match exit.wait_for(Option::is_some).await {
            Ok(exit) => (*exit).unwrap_or(KILLED),
            // Init is gone, and the program with it.
            Err(_) => KILLED,
        }
    }

    /// Sends a signal to the program's process group.
    pub fn signal(&self, signal: i32) {
        let (shared, order) = (self.shared.clone(), Order::Signal { pid: self.pid, signal });
        // Init gone means the program is gone too.
        tokio::spawn(async move { shared.send(&order, &[]).await.ok() });
    }

    /// Ends the program, its session and its descendants, at once. One that left both (a daemon) lives on until the sandbox ends.
    pub async fn kill_tree(&self) {
        let seq = self.shared.seq.fetch_add(1, Ordering::Relaxed);
        let (tx, rx) = oneshot::channel();
        self.shared.table().killing.insert(seq, tx);
        if self.shared.send(&Order::KillTree { seq, pid: self.pid }, &[]).await.is_ok() {
            // A dropped sender means init is gone, and the tree with it.
            let _ = rx.await;
        }
    }
}

const KILLED: Exit = Exit { code: 128 + libc::SIGKILL, signal: Some(libc::SIGKILL) };

fn init_gone() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the sandbox's init is gone")
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        // A panic while it is held leaves a table that is still whole: every change is one insert or remove.
        self.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    async fn send(&self, order: &Order, fds: &[std::os::fd::BorrowedFd<'_>]) -> io::Result<()> {
        self.link.async_io(Interest::WRITABLE, |socket| link::send(socket, order, fds)).await
    }
}

/// Hears init out until it is gone, then lets everybody who waits for it know.
async fn listen(shared: Arc<Shared>) {
    while let Ok(Some((report, _))) = shared.link.async_io(Interest::READABLE, |socket| link::receive::<Report>(socket)).await {
        let mut table = shared.table();
        match report {
            Report::Spawned { seq, pid } => {
                let (tx, rx) = watch::channel(None);
                table.running.insert(pid, tx);
                if let Some(waiting) = table.spawning.remove(&seq) {
                    // Whoever asked may have left.
                    let _ = waiting.send(Ok((pid, rx)));
                }
            }
            Report::NotSpawned { seq, errno } => {
                if let Some(waiting) = table.spawning.remove(&seq) {
                    let _ = waiting.send(Err(io::Error::from_raw_os_error(errno)));
                }
            }
            Report::Exited { pid, code, signal } => {
                if let Some(tx) = table.running.remove(&pid) {
                    tx.send_replace(Some(Exit { code, signal }));
                }
            }
            Report::TreeKilled { seq } => {
                table.killing.remove(&seq).map(|tx| tx.send(()));
            }
            Report::Unshared | Report::Ready | Report::Failed { .. } => {}
        }
    }
    *shared.table() = Table::default();
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
    let error = io::Error::from_raw_os_error(i32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]));
    Err(if bytes[0] == Step::WorkingDirectory as u8 { io::Error::new(error.kind(), BadCwd(error)) } else { error })
}

/// Both sides of a program's standard I/O.
struct Ends {
    theirs: [OwnedFd; 3],
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
                let (in_read, in_write) = if stdin {
                    let (r, w) = pipe_with(PipeFlags::CLOEXEC)?;
                    (r, Some(w))
                } else {
                    (null()?, None)
                };
                for ours in [Some(&out_read), Some(&err_read), in_write.as_ref()].into_iter().flatten() {
                    rustix::io::ioctl_fionbio(ours, true)?;
                }
                Ok(Self {
                    theirs: [in_read, out_write, err_write],
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
                Ok(Self { theirs: [peer, a, b], stdin: None, stdout: None, stderr: None, pty: Some(master) })
            }
        }
    }
}

fn null() -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(CWD, "/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}
