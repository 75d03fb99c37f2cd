//! Runs a small program: directly, which is the lower bound, and through servers.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::{
    contender::{Contender, Endpoint},
    http::{Connection, find},
};

/// Uses `posix_spawn`, as the standard library does where possible.
pub struct Spawn(Command);

impl Spawn {
    pub fn new(argv: Vec<String>) -> Self {
        let mut command = Command::new(&argv[0]);
        command.args(&argv[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command)
    }
}

impl Contender for Spawn {
    fn once(&mut self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let status = self.0.spawn().context("starting the program")?.wait()?;
        let taken = began.elapsed();
        ensure!(status.success(), "the program exited with {status}");
        Ok(taken)
    }
}

pub struct SpawnAndRead(Command);

impl SpawnAndRead {
    pub fn new(argv: Vec<String>) -> Self {
        let mut command = Command::new(&argv[0]);
        command.args(&argv[1..]).stdin(Stdio::null());
        Self(command)
    }
}

impl Contender for SpawnAndRead {
    fn once(&mut self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let output = self.0.output().context("starting the program")?;
        let taken = began.elapsed();
        ensure!(output.status.success(), "the program exited with {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
        Ok(taken)
    }
}

pub struct Post {
    connection: Connection,
    request: Vec<u8>,
    expect: String,
}

impl Post {
    pub fn new(endpoint: &Endpoint, body: &Value, expect: String) -> anyhow::Result<Self> {
        let connection = Connection::open(endpoint)?;
        let body = body.to_string().into_bytes();
        let json = [("content-type".to_owned(), "application/json".to_owned())];
        let mut request = connection.head("POST", &endpoint.path, &json, body.len() as u64);
        request.extend_from_slice(&body);
        Ok(Self { connection, request, expect })
    }
}

impl Contender for Post {
    fn once(&mut self) -> anyhow::Result<Duration> {
        self.connection.refresh()?;
        let began = Instant::now();
        self.connection.send(&self.request)?;
        let length = self.connection.expect_success()?;
        let body = self.connection.read(length)?;
        let taken = began.elapsed();
        let is_expected = find(&body, self.expect.as_bytes()).is_some();
        ensure!(is_expected, "the response does not contain {}: {}", self.expect, String::from_utf8_lossy(&body[..body.len().min(300)]));
        Ok(taken)
    }
}
