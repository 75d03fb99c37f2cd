//! Measures a program's output from its first byte to its last: through a pipe, and over the exec WebSocket.

use std::{
    io::Read,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use crate::{
    contender::{Contender, Endpoint},
    ws::{Message, Socket},
};

/// Read at once from a pipe: more than it holds.
const PIECE_BYTES: usize = 1024 * 1024;
/// Number of bytes between two acknowledgements.
const ACK_BYTES: u64 = 4 * 1024 * 1024;
const STDOUT: u8 = 1;
/// Kind and offset, which precede the data of a binary frame.
const FRAME_HEADER_BYTES: usize = 9;

pub struct CommandStream {
    argv: Vec<String>,
    bytes: u64,
    piece: Vec<u8>,
}

impl CommandStream {
    pub fn new(argv: Vec<String>, bytes: u64) -> Self {
        Self { argv, bytes, piece: vec![0; PIECE_BYTES] }
    }
}

impl Contender for CommandStream {
    fn once(&mut self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let mut child = Command::new(&self.argv[0])
            .args(&self.argv[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", self.argv[0]))?;
        let mut out = child.stdout.take().context("the program's stdout is a pipe")?;
        let mut got = 0;
        loop {
            match out.read(&mut self.piece)? {
                0 => break,
                n => got += n as u64,
            }
        }
        let status = child.wait()?;
        let taken = began.elapsed();
        ensure!(status.success() && got == self.bytes, "the program exited with {status} after {got} bytes");
        Ok(taken)
    }
}

/// Opens a connection for each run, as a client would; the time for that is included.
pub struct ExecStream {
    endpoint: Endpoint,
    start: Value,
    bytes: u64,
}

impl ExecStream {
    pub fn new(endpoint: Endpoint, start: Value, bytes: u64) -> Self {
        Self { endpoint, start, bytes }
    }
}

impl Contender for ExecStream {
    fn once(&mut self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let mut socket = Socket::open(&self.endpoint)?;
        socket.send_json(&self.start)?;
        let (mut got, mut acknowledged, mut taken) = (0u64, 0u64, None);
        while taken.is_none() {
            match socket.next()? {
                Some(Message::Binary(frame)) => {
                    ensure!(frame.len() >= FRAME_HEADER_BYTES && frame[0] == STDOUT, "a binary frame of an unexpected kind");
                    let mut offset = [0; 8];
                    offset.copy_from_slice(&frame[1..FRAME_HEADER_BYTES]);
                    ensure!(u64::from_be_bytes(offset) == got, "a frame at offset {} instead of {got}", u64::from_be_bytes(offset));
                    got += (frame.len() - FRAME_HEADER_BYTES) as u64;
                }
                Some(Message::Text(text)) => {
                    let frame: Value = serde_json::from_slice(text)?;
                    match frame["type"].as_str() {
                        Some("exit") => {
                            ensure!(frame["exit_code"] == 0, "the program failed: {frame}");
                            taken = Some(began.elapsed());
                        }
                        Some("error" | "gap") => bail!("{frame}"),
                        _ => {}
                    }
                }
                None => bail!("the connection was closed after {got} bytes"),
            }
            if got - acknowledged >= ACK_BYTES {
                acknowledged = got;
                socket.send_json(&json!({ "type": "ack", "offset": got }))?;
            }
        }
        ensure!(got == self.bytes, "received {got} bytes");
        taken.context("the loop ends with an exit frame")
    }
}
