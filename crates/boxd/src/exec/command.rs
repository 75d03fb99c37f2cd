//! A command with retained output: it runs independently of client connections, and a client that reconnects receives
//! every byte exactly once.

use std::{
    fs::File,
    os::fd::OwnedFd,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use cobox_protocol::{ApiError, frame::OutputStream};
use cobox_stream::{Limits, Log};
use parking_lot::{Mutex, MutexGuard};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::{
    io::Interest,
    sync::Notify,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{
    input::InputQueue,
    internal,
    run_spec::StreamSpec,
    spool::{DiskBudget, LazySpoolFile, SpoolFile},
    termination::wait_with_timeout,
};
use crate::{
    descriptor::Descriptor,
    processes::{Job, ListedJob},
    programs::StartedProgram,
    server::Server,
};

/// Per output stream, in memory: enough for what a client that acknowledges continuously has in flight. Allocated as it
/// fills.
const RING_BYTES: usize = 1024 * 1024;
/// Initial read buffer, and the one for programs that fill it: as large as a frame, for the same reason.
const SMALL_READ_BYTES: usize = 8 * 1024;
const LARGE_READ_BYTES: usize = 64 * 1024;
/// Pipe size for a program that prints a lot: a larger pipe means fewer context switches between the program and boxd.
const LARGE_PIPE_BYTES: usize = 1024 * 1024;
/// How long output is still read after the program has exited while one of its children holds the pipes open.
const LINGER: Duration = Duration::from_millis(100);
/// Maximum read by the final drain: the largest pipe an unprivileged user can create, so everything that the program
/// wrote before it exited.
const DRAIN_BYTES: usize = 1024 * 1024;

pub struct Command {
    pub listed: ListedJob,
    pub stdout: Log,
    /// `None` on a terminal, which has a single output stream.
    pub stderr: Option<Log>,
    pub input: InputQueue,
    pub has_input: bool,
    /// Closed when the command has ended, because the number of ptys is limited.
    pty: Mutex<Option<Arc<Descriptor>>>,
    kill_on_disconnect: bool,
    /// See [`LifetimePolicy`](super::LifetimePolicy).
    pub retention: Option<Duration>,
    attachments: AtomicUsize,
    /// Notified when the first client attaches or the last one detaches.
    attachment_changed: Notify,
}

impl Command {
    /// The second return value reads and writes the pipes; see [`CommandTask::run`]. `error_output` replaces the program's output
    /// where the program could not be started.
    pub fn new(
        listed: ListedJob,
        started: StartedProgram,
        spec: StreamSpec,
        error_output: Option<String>,
        server: &Server,
        budget: &Arc<DiskBudget>,
    ) -> Result<(Arc<Self>, CommandTask), ApiError> {
        let open = |fd: Option<OwnedFd>, interest| fd.map(|fd| Descriptor::new(fd, interest)).transpose().map_err(internal);
        let pty = open(started.pty, Interest::READABLE | Interest::WRITABLE)?.map(Arc::new);
        let stdin = match &pty {
            Some(pty) => Some(pty.clone()),
            None => open(started.stdin, Interest::WRITABLE)?.map(Arc::new),
        };
        let stdout = match &pty {
            Some(pty) => Some(pty.clone()),
            None => open(started.stdout, Interest::READABLE)?.map(Arc::new),
        };
        let stderr = open(started.stderr, Interest::READABLE)?.map(Arc::new);
        let is_terminal = pty.is_some();
        let (out, err) = (OutputPump::new(server, stdout, budget), OutputPump::new(server, stderr, budget));
        let command = Arc::new(Self {
            listed,
            stdout: out.log.clone(),
            stderr: (!is_terminal).then(|| err.log.clone()),
            input: InputQueue::default(),
            has_input: stdin.is_some(),
            pty: Mutex::new(pty),
            kill_on_disconnect: spec.kill_on_disconnect,
            retention: spec.retention,
            attachments: AtomicUsize::new(0),
            attachment_changed: Notify::new(),
        });
        if let Some(text) = spec.stdin {
            command.input.push(None, text);
        }
        if !spec.stdin_stays_open {
            command.input.close();
        }
        if let Some(error_output) = error_output {
            command.stderr.as_ref().unwrap_or(&command.stdout).append(error_output.as_bytes());
        }
        let task =
            CommandTask { command: command.clone(), stdin, is_terminal, out, err, timeout: spec.timeout, unattended: spec.unattended };
        Ok((command, task))
    }

    pub fn job(&self) -> &Arc<Job> {
        &self.listed.job
    }

    pub fn log(&self, stream: OutputStream) -> Option<&Log> {
        match stream {
            OutputStream::Stdout => Some(&self.stdout),
            OutputStream::Stderr => self.stderr.as_ref(),
        }
    }

    pub fn resize(&self, cols: u16, rows: u16) -> Result<(), ApiError> {
        let pty = self.pty().clone();
        let Some(pty) = pty else { return Err(ApiError::invalid("this command has no terminal or has exited; start it with `pty`")) };
        let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&*pty, size).map_err(|e| internal(format!("setting the terminal's size: {e}")))
    }

    fn pty(&self) -> MutexGuard<'_, Option<Arc<Descriptor>>> {
        // Each change is a single assignment, so the value is consistent even after a panic.
        self.pty.lock()
    }

    /// Registers a client connection.
    pub fn attach(self: &Arc<Self>) -> Attachment {
        self.attachments.fetch_add(1, Ordering::SeqCst);
        self.attachment_changed.notify_waiters();
        Attachment(self.clone())
    }

    /// Resolves when no client has been connected for `limit`.
    async fn wait_unattended(&self, limit: Duration) {
        loop {
            // Before the check, so that a client that attaches or detaches in between is not missed.
            let changed = self.attachment_changed.notified();
            if self.attachments.load(Ordering::SeqCst) > 0 {
                changed.await;
            } else if tokio::time::timeout(limit, changed).await.is_err() {
                return;
            }
        }
    }

    /// Memory held by its buffered output, in bytes.
    pub fn buffered_bytes(&self) -> usize {
        self.stdout.memory() + self.stderr.as_ref().map_or(0, Log::memory)
    }
}

/// One client connection to a command; dropping it detaches.
pub struct Attachment(pub Arc<Command>);

impl Drop for Attachment {
    fn drop(&mut self) {
        let is_last = self.0.attachments.fetch_sub(1, Ordering::SeqCst) == 1;
        if is_last {
            self.0.attachment_changed.notify_waiters();
        }
        if is_last && self.0.kill_on_disconnect && self.0.job().ended().is_none() {
            let command = self.0.clone();
            tokio::spawn(async move { command.job().program.kill_tree().await });
        }
    }
}

/// One output stream of a program and the log it is copied to.
struct OutputPump {
    source: Option<Arc<Descriptor>>,
    log: Log,
    lazy_file: LazySpoolFile,
}

/// The task that runs a command, independently of its viewers.
pub struct CommandTask {
    command: Arc<Command>,
    stdin: Option<Arc<Descriptor>>,
    is_terminal: bool,
    out: OutputPump,
    err: OutputPump,
    timeout: Duration,
    unattended: Option<Duration>,
}

impl CommandTask {
    /// Runs until the program has exited and all its output is in the logs.
    pub async fn run(self, server: &Server) {
        let CommandTask { command, stdin, is_terminal, out, err, timeout, unattended } = self;
        let exited = CancellationToken::new();
        let ended = async {
            let program = &*command.job().program;
            let mut ended = pin!(wait_with_timeout(program, timeout));
            let ended = match unattended {
                None => ended.await,
                Some(limit) => tokio::select! {
                    ended = &mut ended => ended,
                    () = command.wait_unattended(limit) => {
                        program.kill_tree().await;
                        ended.await
                    }
                },
            };
            exited.cancel();
            ended
        };
        let feed = async {
            // Ends with the program: no other process will read the input.
            tokio::select! {
                () = command.input.feed(stdin, is_terminal) => {}
                () = exited.cancelled() => command.input.close_and_discard(),
            }
        };
        let (ended, (), out, err) = tokio::join!(ended, feed, out.copy_to_log(server, &exited), err.copy_to_log(server, &exited));
        // A terminal needs no reader: processes that still hold it get a hangup when it closes.
        for pipe in [out, err].into_iter().flatten().filter(|_| !is_terminal) {
            server.commands.pipe_drainer.drain(server, pipe);
        }
        *command.pty() = None;
        command.job().end(ended);
        for log in std::iter::once(&command.stdout).chain(&command.stderr) {
            log.finish();
        }
    }
}

impl OutputPump {
    fn new(server: &Server, source: Option<Arc<Descriptor>>, budget: &Arc<DiskBudget>) -> Self {
        let limits = Limits { ring_bytes: RING_BYTES, writer_waits: true };
        let (lazy_file, limit) = (LazySpoolFile::default(), server.limits.exec_spool_bytes);
        let log = match limit {
            0 => Log::new(limits),
            limit => {
                Log::with_spool(limits, Box::new(SpoolFile { lazy_file: lazy_file.clone(), limit, budget: budget.clone(), used: 0 }), limit)
            }
        };
        Self { source, log, lazy_file }
    }

    /// Copies the program's output to the log until end of file. Returns the pipe if another process still holds it
    /// open after the program has exited.
    async fn copy_to_log(self, server: &Server, exited: &CancellationToken) -> Option<Arc<Descriptor>> {
        let source = self.source.as_ref()?;
        let mut buf = vec![0; SMALL_READ_BYTES];
        let mut deadline = None;
        loop {
            let read = tokio::select! {
                biased;
                read = source.read(&mut buf) => read,
                () = exited.cancelled(), if deadline.is_none() => {
                    deadline = Some(Instant::now() + LINGER);
                    continue;
                }
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => break,
            };
            let Ok(n @ 1..) = read else { return None };
            self.append_all(server, &buf[..n]).await;
            if n == buf.len() && buf.len() < LARGE_READ_BYTES {
                buf = vec![0; LARGE_READ_BYTES];
                // Fails on a terminal, which has no pipe size, or when the user's pipe quota is used up: the pipe then
                // keeps its size.
                let _ = rustix::pipe::fcntl_setpipe_size(&**source, LARGE_PIPE_BYTES);
            }
            // Also bounds the wait for a background child that prints without pause.
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                break;
            }
        }
        let mut drained = 0;
        while drained < DRAIN_BYTES
            && let Ok(n @ 1..) = source.try_read(&mut buf)
        {
            drained += n;
            self.append_all(server, &buf[..n]).await;
        }
        self.source
    }

    async fn append_all(&self, server: &Server, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let appended = if self.log.would_spool(rest.len()) { self.spool(server, rest).await } else { self.log.append(rest) };
            rest = &rest[appended..];
            if !rest.is_empty() {
                self.log.writable().await;
            }
        }
    }

    /// Appends bytes to the log on a blocking thread, because this may wait for the disk.
    async fn spool(&self, server: &Server, bytes: &[u8]) -> usize {
        if self.lazy_file.get().is_none() {
            let file = match server.authority.pushed_state().disk_full {
                true => None,
                false => server
                    .files
                    .create_unnamed(server.programs.work_dir())
                    .await
                    .map_err(|error| tracing::warn!(%error, "creating the spool file failed"))
                    .ok(),
            };
            // Only this task sets it.
            let _ = self.lazy_file.set(file.map(File::from));
        }
        let (log, length, bytes) = (self.log.clone(), bytes.len(), bytes.to_vec());
        let appended = tokio::task::spawn_blocking(move || log.append(&bytes)).await;
        if let Some(error) = self.log.take_spool_failure() {
            tracing::warn!(%error, "spooling output failed; keeping it in memory only");
        }
        // `None` only after a panic in that thread; these bytes are then lost together with the spool.
        appended.unwrap_or(length)
    }
}
