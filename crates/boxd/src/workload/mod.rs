//! The sandbox's programs, from boxd's side: started through `init`, which lives in the namespaces below boxd's.

use std::{io, os::fd::OwnedFd};

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
    Pipes { stdin: bool },
    Pty { cols: u16, rows: u16 },
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
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// 128 + the signal's number when a signal ended it.
    pub code: i32,
    pub signal: Option<i32>,
}

/// The handle to everything that runs in the sandbox.
#[derive(Clone)]
pub struct Workloads {}

impl Workloads {
    /// Starts a program. An error is the errno of the failing step (no such program, no such directory…).
    pub async fn spawn(&self, _command: Command) -> io::Result<Process> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// The environment programs get unless told otherwise (PATH, HOME, USER, LANG, …), for display.
    pub fn work_dir(&self) -> &str {
        "/workspace"
    }
}

impl Process {
    /// Resolves when the program itself has ended; may be called again.
    pub async fn wait(&self) -> Exit {
        std::future::pending().await
    }
    /// Sends a signal to the program's process group.
    pub fn signal(&self, _signal: i32) {}
    /// Ends the program and everything it started, at once.
    pub async fn kill_tree(&self) {}
}
