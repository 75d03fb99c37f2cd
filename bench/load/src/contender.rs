//! Who is measured: one way to do a work, as the plan names it, and what it becomes when the measuring begins.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::{
    echo::{CommandTerminal, Echo, RawTerminal, ShellTerminal},
    exec::{Post, Spawn, SpawnAndRead},
    files::{Crowd, Get, Put},
    sshx::SshxTerminal,
    stream::{CommandStream, ExecStream},
    wire::Address,
};

/// One measurement, as often as it is asked for.
pub trait Contender {
    fn once(&mut self) -> anyhow::Result<Duration>;
}

/// A door to a server and what to show there.
#[derive(Clone, Debug, Deserialize)]
pub struct Door {
    pub at: Address,
    pub path: String,
    #[serde(default)]
    pub token: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Spec {
    /// Starts a program and waits for its end, with nothing on its standard I/O.
    Spawn {
        argv: Vec<String>,
    },
    /// The same with two pipes, read to their ends.
    SpawnAndRead {
        argv: Vec<String>,
    },
    /// One JSON request on a kept-alive connection, whose answer must hold some words.
    Post {
        #[serde(flatten)]
        door: Door,
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
        door: Door,
        start: Value,
        bytes: u64,
    },
    /// One key until its echo, on a terminal of our own.
    EchoPty {
        argv: Vec<String>,
    },
    /// Through the pipes of a program that has a terminal elsewhere.
    EchoCommand {
        argv: Vec<String>,
    },
    EchoShell {
        #[serde(flatten)]
        door: Door,
        start: Value,
        #[serde(default)]
        observers: usize,
        /// Of the observers, those that never read.
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
    /// Files `{path}{n}`, n counting up from 0 and round again at `names`.
    Put {
        #[serde(flatten)]
        door: Door,
        bytes: usize,
        names: u64,
        #[serde(default)]
        headers: Vec<(String, String)>,
        /// After the number, such as a query.
        #[serde(default)]
        suffix: String,
    },
    Get {
        #[serde(flatten)]
        door: Door,
        bytes: u64,
        names: u64,
        #[serde(default)]
        suffix: String,
    },
    /// One small file, asked for at once on each of many connections.
    Crowd {
        #[serde(flatten)]
        door: Door,
        bytes: u64,
        connections: usize,
    },
}

impl Spec {
    /// Connects, starts, and does what is not to be measured.
    pub fn prepare(&self) -> anyhow::Result<Box<dyn Contender>> {
        Ok(match self.clone() {
            Spec::Spawn { argv } => Box::new(Spawn::new(argv)),
            Spec::SpawnAndRead { argv } => Box::new(SpawnAndRead::new(argv)),
            Spec::Post { door, body, expect } => Box::new(Post::new(&door, &body, expect)?),
            Spec::CommandStream { argv, bytes } => Box::new(CommandStream::new(argv, bytes)),
            Spec::ExecStream { door, start, bytes } => Box::new(ExecStream::new(door, start, bytes)),
            Spec::EchoPty { argv } => Box::new(Echo::new(RawTerminal::open(&argv)?)?),
            Spec::EchoCommand { argv } => Box::new(Echo::new(CommandTerminal::start(&argv)?)?),
            Spec::EchoShell { door, start, observers, stalled, flood } => {
                Box::new(Echo::new(ShellTerminal::open(&door, start, observers, stalled, flood)?)?)
            }
            Spec::EchoSshx { at, session, key } => Box::new(Echo::new(SshxTerminal::open(&at, &session, &key)?)?),
            Spec::Put { door, bytes, names, headers, suffix } => Box::new(Put::new(door, bytes, names, headers, suffix)?),
            Spec::Get { door, bytes, names, suffix } => Box::new(Get::new(door, bytes, names, suffix)?),
            Spec::Crowd { door, bytes, connections } => Box::new(Crowd::new(door, bytes, connections)?),
        })
    }
}
