//! Putting and getting files over HTTP, one after another on one kept-alive connection, or one at once on each of many.

use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::{
    contender::{Contender, Door},
    http::{Connection, Length},
};

/// Sent at once of a large body: more than a socket's buffer holds.
const PIECE_BYTES: usize = 1024 * 1024;

pub struct Put {
    connection: Connection,
    door: Door,
    bytes: usize,
    names: u64,
    headers: Vec<(String, String)>,
    suffix: String,
    next: u64,
    piece: Vec<u8>,
}

impl Put {
    pub fn new(door: Door, bytes: usize, names: u64, headers: Vec<(String, String)>, suffix: String) -> anyhow::Result<Self> {
        // Not all the same byte: a file system may store a run of zeros as a hole.
        let piece = (0..bytes.min(PIECE_BYTES)).map(|i| (i % 251) as u8).collect();
        Ok(Self { connection: Connection::open(&door)?, door, bytes, names, headers, suffix, next: 0, piece })
    }
}

impl Contender for Put {
    fn once(&mut self) -> anyhow::Result<Duration> {
        let path = format!("{}{}{}", self.door.path, self.next % self.names, self.suffix);
        self.next += 1;
        self.connection.refresh()?;
        let mut head = self.connection.head("PUT", &path, &self.headers, self.bytes as u64);
        let began = Instant::now();
        if self.bytes <= PIECE_BYTES {
            head.extend_from_slice(&self.piece);
            self.connection.send(&head)?;
        } else {
            self.connection.send(&head)?;
            let mut left = self.bytes;
            while left > 0 {
                let n = left.min(PIECE_BYTES);
                if let Err(broken) = self.connection.send(&self.piece[..n]) {
                    // A server that has had enough says so before it closes.
                    self.connection.good()?;
                    return Err(broken);
                }
                left -= n;
            }
        }
        let length = self.connection.good()?;
        self.connection.skip(length)?;
        Ok(began.elapsed())
    }
}

pub struct Get {
    connection: Connection,
    door: Door,
    bytes: u64,
    names: u64,
    suffix: String,
    next: u64,
}

impl Get {
    pub fn new(door: Door, bytes: u64, names: u64, suffix: String) -> anyhow::Result<Self> {
        Ok(Self { connection: Connection::open(&door)?, door, bytes, names, suffix, next: 0 })
    }
}

impl Contender for Get {
    fn once(&mut self) -> anyhow::Result<Duration> {
        let path = format!("{}{}{}", self.door.path, self.next % self.names, self.suffix);
        self.next += 1;
        self.connection.refresh()?;
        let head = self.connection.head("GET", &path, &[], 0);
        let began = Instant::now();
        self.connection.send(&head)?;
        let length = self.connection.good()?;
        let got = self.connection.skip(length)?;
        let taken = began.elapsed();
        ensure!(got == self.bytes && length != Length::Chunked, "{got} bytes came, as {length:?}");
        Ok(taken)
    }
}

/// Many connections that each ask for one file at once. What is measured is the time until the last of them has it.
pub struct Crowd {
    connections: Vec<Connection>,
    door: Door,
    bytes: u64,
}

impl Crowd {
    pub fn new(door: Door, bytes: u64, connections: usize) -> anyhow::Result<Self> {
        let connections = (0..connections).map(|_| Connection::open(&door)).collect::<anyhow::Result<_>>()?;
        Ok(Self { connections, door, bytes })
    }
}

impl Contender for Crowd {
    fn once(&mut self) -> anyhow::Result<Duration> {
        for connection in &mut self.connections {
            connection.refresh()?;
        }
        let Some(head) = self.connections.first().map(|c| c.head("GET", &self.door.path, &[], 0)) else { return Ok(Duration::ZERO) };
        let began = Instant::now();
        for connection in &mut self.connections {
            connection.send(&head)?;
        }
        for connection in &mut self.connections {
            let length = connection.good()?;
            let got = connection.skip(length)?;
            ensure!(got == self.bytes, "{got} bytes came, as {length:?}");
        }
        Ok(began.elapsed())
    }
}
