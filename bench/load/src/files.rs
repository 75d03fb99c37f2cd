//! Uploads and downloads files over HTTP, one after another on one kept-alive connection or simultaneously on many.

use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::{
    contender::{Contender, Endpoint},
    http::{Connection, Length},
};

/// Chunk size for large bodies: more than a socket's buffer holds.
const PIECE_BYTES: usize = 1024 * 1024;

pub struct Put {
    connection: Connection,
    endpoint: Endpoint,
    bytes: usize,
    names: u64,
    headers: Vec<(String, String)>,
    suffix: String,
    next: u64,
    piece: Vec<u8>,
}

impl Put {
    pub fn new(endpoint: Endpoint, bytes: usize, names: u64, headers: Vec<(String, String)>, suffix: String) -> anyhow::Result<Self> {
        // Varying bytes, because a file system may store a run of zeros as a hole.
        let piece = (0..bytes.min(PIECE_BYTES)).map(|i| (i % 251) as u8).collect();
        Ok(Self { connection: Connection::open(&endpoint)?, endpoint, bytes, names, headers, suffix, next: 0, piece })
    }
}

impl Contender for Put {
    fn once(&mut self) -> anyhow::Result<Duration> {
        let path = format!("{}{}{}", self.endpoint.path, self.next % self.names, self.suffix);
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
                    // A server that rejects the body sends a response before it closes the connection.
                    self.connection.expect_success()?;
                    return Err(broken);
                }
                left -= n;
            }
        }
        let length = self.connection.expect_success()?;
        self.connection.skip(length)?;
        Ok(began.elapsed())
    }
}

pub struct Get {
    connection: Connection,
    endpoint: Endpoint,
    bytes: u64,
    names: u64,
    suffix: String,
    next: u64,
}

impl Get {
    pub fn new(endpoint: Endpoint, bytes: u64, names: u64, suffix: String) -> anyhow::Result<Self> {
        Ok(Self { connection: Connection::open(&endpoint)?, endpoint, bytes, names, suffix, next: 0 })
    }
}

impl Contender for Get {
    fn once(&mut self) -> anyhow::Result<Duration> {
        let path = format!("{}{}{}", self.endpoint.path, self.next % self.names, self.suffix);
        self.next += 1;
        self.connection.refresh()?;
        let head = self.connection.head("GET", &path, &[], 0);
        let began = Instant::now();
        self.connection.send(&head)?;
        let length = self.connection.expect_success()?;
        let got = self.connection.skip(length)?;
        let taken = began.elapsed();
        ensure!(got == self.bytes && length != Length::Chunked, "received {got} bytes, as {length:?}");
        Ok(taken)
    }
}

/// Many connections that each request one file at the same time. The time until the last one has it is measured.
pub struct Crowd {
    connections: Vec<Connection>,
    endpoint: Endpoint,
    bytes: u64,
}

impl Crowd {
    pub fn new(endpoint: Endpoint, bytes: u64, connections: usize) -> anyhow::Result<Self> {
        let connections = (0..connections).map(|_| Connection::open(&endpoint)).collect::<anyhow::Result<_>>()?;
        Ok(Self { connections, endpoint, bytes })
    }
}

impl Contender for Crowd {
    fn once(&mut self) -> anyhow::Result<Duration> {
        for connection in &mut self.connections {
            connection.refresh()?;
        }
        let Some(head) = self.connections.first().map(|c| c.head("GET", &self.endpoint.path, &[], 0)) else { return Ok(Duration::ZERO) };
        let began = Instant::now();
        for connection in &mut self.connections {
            connection.send(&head)?;
        }
        for connection in &mut self.connections {
            let length = connection.expect_success()?;
            let got = connection.skip(length)?;
            ensure!(got == self.bytes, "received {got} bytes, as {length:?}");
        }
        Ok(began.elapsed())
    }
}
