//! The contenders of a benchmark: each is one way to do a task, described in the plan and prepared before the
//! measurements.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::{
    connection::Address,
    echo::{CommandTerminal, Echo, RawTerminal, ShellTerminal},
    exec::{Post, Spawn, SpawnAndRead},
    files::{Crowd, Get, Put},
    sshx::SshxTerminal,
    stream::{CommandStream, ExecStream},
};

/// One measurement; called repeatedly.
pub trait Contender {
    fn once(&mut self) -> anyhow::Result<Duration>;
}

/// A server's address, and the path and token to use there.
#[derive(Clone, Debug, Deserialize)]
pub struct Endpoint {
    pub at: Address,
    pub path: String,
    #[serde(default)]
    pub token: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ContenderSpec {
    /// Starts a program and waits until it has exited, with null standard I/O.
    Spawn {
        argv: Vec<String>,
    },
    /// The same with two pipes, which are read to their ends.
    SpawnAndRead {
        argv: Vec<String>,
    },
    /// One JSON request on a kept-alive connection. The response must contain `expect`.
    Post {
        #[serde(flatten)]
        endpoint: Endpoint,
        body: Value,
        expect: String,
    },
    /// A program's standard output through a pipe.
    CommandStream {
        argv: Vec<String>,
        bytes: u64,
    },
    /// The same program over the exec WebSocket.
    ExecStream {
        #[serde(flatten)]
        endpoint: Endpoint,
        start: Value,
        bytes: u64,
    },
    /// The time from a key to its echo, on a local terminal.
    EchoPty {
        argv: Vec<String>,
    },
    /// The same through the pipes of a program that has a remote terminal.
    EchoCommand {
        argv: Vec<String>,
    },
    EchoShell {
        #[serde(flatten)]
        endpoint: Endpoint,
        start: Value,
        #[serde(default)]
        observers: usize,
        /// Number of observers that never read.
        #[serde(default)]
        stalled: usize,
        /// Whether the program waits for a line and prints a lot before it echoes.
        #[serde(default)]
        flood: bool,
    },
    EchoSshx {
        at: Address,
        session: String,
        key: String,
    },
    /// Files `{path}{n}{suffix}`, where n counts up from 0 and restarts at `names`.
    Put {
        #[serde(flatten)]
        endpoint: Endpoint,
        bytes: usize,
        names: u64,
        #[serde(default)]
        headers: Vec<(String, String)>,
        /// Appended to the path, such as a query.
        #[serde(default)]
        suffix: String,
    },
    Get {
        #[serde(flatten)]
        endpoint: Endpoint,
        bytes: u64,
        names: u64,
        #[serde(default)]
        suffix: String,
    },
    /// One small file, requested simultaneously on each of many connections.
    Crowd {
        #[serde(flatten)]
        endpoint: Endpoint,
        bytes: u64,
        connections: usize,
    },
}

impl ContenderSpec {
    /// Connects, starts programs, and does everything else that is not to be measured.
    pub fn prepare(&self) -> anyhow::Result<Box<dyn Contender>> {
        Ok(match self.clone() {
            ContenderSpec::Spawn { argv } => Box::new(Spawn::new(argv)),
            ContenderSpec::SpawnAndRead { argv } => Box::new(SpawnAndRead::new(argv)),
            ContenderSpec::Post { endpoint, body, expect } => Box::new(Post::new(&endpoint, &body, expect)?),
            ContenderSpec::CommandStream { argv, bytes } => Box::new(CommandStream::new(argv, bytes)),
            ContenderSpec::ExecStream { endpoint, start, bytes } => Box::new(ExecStream::new(endpoint, start, bytes)),
            ContenderSpec::EchoPty { argv } => Box::new(Echo::new(RawTerminal::open(&argv)?)?),
            ContenderSpec::EchoCommand { argv } => Box::new(Echo::new(CommandTerminal::start(&argv)?)?),
            ContenderSpec::EchoShell { endpoint, start, observers, stalled, flood } => {
                Box::new(Echo::new(ShellTerminal::open(&endpoint, start, observers, stalled, flood)?)?)
            }
            ContenderSpec::EchoSshx { at, session, key } => Box::new(Echo::new(SshxTerminal::open(&at, &session, &key)?)?),
            ContenderSpec::Put { endpoint, bytes, names, headers, suffix } => Box::new(Put::new(endpoint, bytes, names, headers, suffix)?),
            ContenderSpec::Get { endpoint, bytes, names, suffix } => Box::new(Get::new(endpoint, bytes, names, suffix)?),
            ContenderSpec::Crowd { endpoint, bytes, connections } => Box::new(Crowd::new(endpoint, bytes, connections)?),
        })
    }
}
