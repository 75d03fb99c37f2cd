//! Traits for starting programs, which allow testing the routes without namespaces.

use std::{io, os::fd::OwnedFd, sync::Arc};

use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;

use crate::workload::{Exit, Process, ProgramSpec, Workloads};

/// Starts programs.
pub trait Spawn: Send + Sync + 'static {
    /// Starts a program and waits until it has been executed, or returns why it can't be.
    fn spawn(&self, spec: ProgramSpec) -> BoxFuture<'_, io::Result<StartedProgram>>;
    /// Starts a program without waiting for its execution. If that fails, the process ends at once and
    /// [`Program::start_failure`] returns the reason. If the future is dropped before it completes, nothing was
    /// started.
    fn launch(&self, spec: ProgramSpec) -> BoxFuture<'_, io::Result<StartedProgram>>;
    /// Forbids all programs to enlarge files, or allows it again.
    fn stop_writers(&self, stop: bool) -> BoxFuture<'_, io::Result<()>>;
    /// The default working directory of programs.
    fn work_dir(&self) -> &str;
    /// The user that programs run as.
    fn user(&self) -> &str;
}

/// Starts a program for a caller that may be cancelled. In that case the program is ended again and not left running.
pub async fn start(programs: &Arc<dyn Spawn>, tasks: &TaskTracker, spec: ProgramSpec) -> io::Result<StartedProgram> {
    let (result_sender, result) = oneshot::channel();
    let programs = programs.clone();
    tasks.spawn(async move {
        if let Err(Ok(unwanted)) = result_sender.send(programs.spawn(spec).await) {
            unwanted.program.kill_tree().await;
        }
    });
    result.await.map_err(io::Error::other)?
}

/// A started program, and boxd's ends of its pipes or terminal, all non-blocking.
pub struct StartedProgram {
    pub program: Arc<dyn Program>,
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    pub pty: Option<OwnedFd>,
}

pub trait Program: Send + Sync + 'static {
    /// Resolves when the program itself has ended. May be called repeatedly.
    fn wait(&self) -> BoxFuture<'_, Exit>;
    /// The program's pid in the sandbox; `None` if it was never executed.
    fn pid(&self) -> Option<i32>;
    /// Continues a launched program if it was stopped before it was executed.
    fn resume_if_stopped(&self);
    /// Why an ended program was never executed.
    fn start_failure(&self) -> Option<io::Error>;
    /// Signals the program's process group.
    fn signal(&self, signal: i32);
    /// Signals the program and all its descendants.
    fn signal_tree(&self, signal: i32);
    /// Ends the program and all its descendants, including daemons, at once. If the program has already ended, this
    /// ends what it left behind.
    fn kill_tree(&self) -> BoxFuture<'_, ()>;
}

impl Spawn for Workloads {
    fn spawn(&self, spec: ProgramSpec) -> BoxFuture<'_, io::Result<StartedProgram>> {
        Box::pin(async move { Ok(Workloads::spawn(self, spec).await?.into()) })
    }

    fn launch(&self, spec: ProgramSpec) -> BoxFuture<'_, io::Result<StartedProgram>> {
        Box::pin(async move { Ok(Workloads::launch(self, spec).await?.into()) })
    }

    fn stop_writers(&self, stop: bool) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(Workloads::stop_writers(self, stop))
    }

    fn work_dir(&self) -> &str {
        Workloads::work_dir(self)
    }

    fn user(&self) -> &str {
        Workloads::user(self)
    }
}

impl From<Process> for StartedProgram {
    fn from(mut process: Process) -> Self {
        Self {
            stdin: process.stdin.take(),
            stdout: process.stdout.take(),
            stderr: process.stderr.take(),
            pty: process.pty.take(),
            program: Arc::new(process),
        }
    }
}

impl Program for Process {
    fn resume_if_stopped(&self) {
        Process::resume_if_stopped(self);
    }
    fn pid(&self) -> Option<i32> {
        Process::pid(self)
    }
    fn start_failure(&self) -> Option<io::Error> {
        Process::start_failure(self)
    }
    fn signal_tree(&self, signal: i32) {
        Process::signal_tree(self, signal);
    }
    fn wait(&self) -> BoxFuture<'_, Exit> {
        Box::pin(Process::wait(self))
    }
    fn signal(&self, signal: i32) {
        Process::signal(self, signal);
    }
    fn kill_tree(&self) -> BoxFuture<'_, ()> {
        Box::pin(Process::kill_tree(self))
    }
}
