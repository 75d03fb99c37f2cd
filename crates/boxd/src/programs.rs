//! Starting programs as the routes see it: a seam, so that they can be tested without namespaces.

use std::{io, os::fd::OwnedFd, sync::Arc};

use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;

use crate::workload::{Command, Exit, Process, Workloads};

/// What can start a program.
pub trait Spawn: Send + Sync + 'static {
    /// Starts a program and waits until it runs, or says why it can't.
    fn spawn(&self, command: Command) -> BoxFuture<'_, io::Result<Started>>;
    /// Starts a program without waiting for it: one that can't run ends at once, and [`Program::start_failure`] says why.
    /// Dropped before it is done, it has started nothing.
    fn launch(&self, command: Command) -> BoxFuture<'_, io::Result<Started>>;
    /// Forbids every program to make files larger, or allows it again.
    fn stop_writers(&self, stop: bool) -> BoxFuture<'_, io::Result<()>>;
    /// The folder a program starts in unless told otherwise.
    fn work_dir(&self) -> &str;
    /// Whom a program runs as.
    fn user(&self) -> &str;
}

/// Starts a program for somebody who may leave meanwhile; then it is ended again, and not left running for nobody.
pub async fn start(programs: &Arc<dyn Spawn>, tasks: &TaskTracker, command: Command) -> io::Result<Started> {
    let (answer, answered) = oneshot::channel();
    let programs = programs.clone();
    tasks.spawn(async move {
        if let Err(Ok(unwanted)) = answer.send(programs.spawn(command).await) {
            unwanted.program.kill_tree().await;
        }
    });
    answered.await.map_err(io::Error::other)?
}

/// A program under way and our ends of its pipes or terminal, all non-blocking.
pub struct Started {
    pub program: Arc<dyn Program>,
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    pub pty: Option<OwnedFd>,
}

pub trait Program: Send + Sync + 'static {
    /// Resolves when the program itself has ended; may be called again.
    fn wait(&self) -> BoxFuture<'_, Exit>;
    /// The program's number in the sandbox; `None` if it never ran.
    fn pid(&self) -> Option<i32>;
    /// Lets a launched program go on if somebody has stopped it before it began.
    fn nudge(&self);
    /// Why a launched program, which has ended, never ran.
    fn start_failure(&self) -> Option<io::Error>;
    /// Signals the program's process group.
    fn signal(&self, signal: i32);
    /// Signals the program and everything it started.
    fn signal_tree(&self, signal: i32);
    /// Ends the program and everything it started, daemons too, at once; also what it left behind when it ended by itself.
    fn kill_tree(&self) -> BoxFuture<'_, ()>;
}

impl Spawn for Workloads {
    fn spawn(&self, command: Command) -> BoxFuture<'_, io::Result<Started>> {
        Box::pin(async move { Ok(Workloads::spawn(self, command).await?.into()) })
    }

    fn launch(&self, command: Command) -> BoxFuture<'_, io::Result<Started>> {
        Box::pin(async move { Ok(Workloads::launch(self, command).await?.into()) })
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

impl From<Process> for Started {
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
    fn nudge(&self) {
        Process::nudge(self);
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
