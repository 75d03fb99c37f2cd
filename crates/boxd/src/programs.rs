//! Starting programs as the routes see it: a seam, so that they can be tested without namespaces.

use std::{io, os::fd::OwnedFd, sync::Arc};

use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;

use crate::workload::{Command, Exit, Process, Workloads};

/// What can start a program.
pub trait Spawn: Send + Sync + 'static {
    fn spawn(&self, command: Command) -> BoxFuture<'_, io::Result<Started>>;
    /// Forbids every program to make files larger, or allows it again.
    fn stop_writers(&self, stop: bool) -> BoxFuture<'_, io::Result<()>>;
    /// The folder a program starts in unless told otherwise.
    fn work_dir(&self) -> &str;
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
    fn signal(&self, signal: i32);
    /// Ends the program and everything it started, at once.
    fn kill_tree(&self) -> BoxFuture<'_, ()>;
}

impl Spawn for Workloads {
    fn spawn(&self, command: Command) -> BoxFuture<'_, io::Result<Started>> {
        Box::pin(async move {
            let mut process = Workloads::spawn(self, command).await?;
            Ok(Started {
                stdin: process.stdin.take(),
                stdout: process.stdout.take(),
                stderr: process.stderr.take(),
                pty: process.pty.take(),
                program: Arc::new(process),
            })
        })
    }

    fn stop_writers(&self, stop: bool) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(Workloads::stop_writers(self, stop))
    }

    fn work_dir(&self) -> &str {
        Workloads::work_dir(self)
    }
}

impl Program for Process {
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
