//! A minimal HTTP/1.1 client on one kept-alive connection: a request is one write, and bodies are read in large chunks.

use std::{
    io::{Read, Write},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};

use crate::{connection::Wire, contender::Endpoint};

/// Chunk size for bodies: larger than any socket's buffer.
const PIECE_BYTES: usize = 1024 * 1024;
/// A connection that was idle for longer is replaced before a measurement, because servers close idle connections; boxd
/// after 30 s.
const MAX_IDLE: Duration = Duration::from_secs(10);
/// Maximum number of a response's bytes that are shown in an error.
const SHOWN_BYTES: usize = 300;

pub struct Connection {
    endpoint: Endpoint,
    wire: Wire,
    used: Instant,
    host_and_token: String,
    /// Bytes that were read beyond the last response's head.
    rest: Vec<u8>,
    piece: Vec<u8>,
}

pub struct ResponseHead {
    pub status: u16,
    pub length: Length,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    Known(u64),
    Chunked,
}

impl Connection {
    pub fn open(endpoint: &Endpoint) -> anyhow::Result<Self> {
        let wire = Wire::open(&endpoint.at).with_context(|| format!("connecting to {:?}", endpoint.at))?;
        let token = endpoint.token.as_ref().map(|t| format!("authorization: Bearer {t}\r\n")).unwrap_or_default();
        let used = Instant::now();
        Ok(Self {
            endpoint: endpoint.clone(),
            wire,
            used,
            host_and_token: format!("host: bench\r\n{token}"),
            rest: Vec::new(),
            piece: vec![0; PIECE_BYTES],
        })
    }

    /// Replaces an idle connection. To be called before a measurement begins.
    pub fn refresh(&mut self) -> anyhow::Result<()> {
        if self.used.elapsed() > MAX_IDLE {
            *self = Self::open(&self.endpoint)?;
        }
        self.used = Instant::now();
        Ok(())
    }

    /// The bytes of a request's head; a small body may follow in the same write.
    pub fn head(&self, method: &str, path: &str, headers: &[(String, String)], length: u64) -> Vec<u8> {
        let more: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        format!("{method} {path} HTTP/1.1\r\n{}{more}content-length: {length}\r\n\r\n", self.host_and_token).into_bytes()
    }

    pub fn send(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(self.wire.write_all(bytes)?)
    }

    /// Reads the response's head. The body must be read next.
    pub fn response_head(&mut self) -> anyhow::Result<ResponseHead> {
        let end = loop {
            if let Some(at) = find(&self.rest, b"\r\n\r\n") {
                break at + 4;
            }
            self.more()?;
        };
        let head = String::from_utf8_lossy(&self.rest[..end]).to_ascii_lowercase();
        self.rest.drain(..end);
        let status = head.split_ascii_whitespace().nth(1).and_then(|s| s.parse().ok()).context("a response without a status")?;
        let field = |name: &str| head.lines().find_map(|l| Some(l.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()));
        let length = match field("content-length") {
            Some(length) => Length::Known(length.parse()?),
            None if field("transfer-encoding").is_some_and(|v| v == "chunked") => Length::Chunked,
            // An upgrade, or a response that never has a body.
            None if matches!(status, 101 | 204 | 304) => Length::Known(0),
            None => bail!("a response of unknown length"),
        };
        Ok(ResponseHead { status, length })
    }

    /// Reads a body and discards it.
    pub fn skip(&mut self, length: Length) -> anyhow::Result<u64> {
        let Length::Known(length) = length else { return Ok(self.read(length)?.len() as u64) };
        let mut left = length - (self.rest.len() as u64).min(length);
        self.rest.drain(..self.rest.len().min(usize::try_from(length)?));
        while left > 0 {
            let most = usize::try_from(left.min(PIECE_BYTES as u64))?;
            let n = self.wire.read(&mut self.piece[..most])?;
            ensure!(n > 0, "the connection ended {left} bytes early");
            left -= n as u64;
        }
        Ok(length)
    }

    pub fn read(&mut self, length: Length) -> anyhow::Result<Vec<u8>> {
        match length {
            Length::Known(length) => {
                let length = usize::try_from(length)?;
                while self.rest.len() < length {
                    self.more()?;
                }
                Ok(self.rest.drain(..length).collect())
            }
            Length::Chunked => self.read_chunks(),
        }
    }

    fn read_chunks(&mut self) -> anyhow::Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let end = loop {
                match find(&self.rest, b"\r\n") {
                    Some(at) => break at,
                    None => self.more()?,
                }
            };
            let size = usize::from_str_radix(String::from_utf8_lossy(&self.rest[..end]).trim(), 16).context("a chunk without a size")?;
            while self.rest.len() < end + 2 + size + 2 {
                self.more()?;
            }
            body.extend_from_slice(&self.rest[end + 2..end + 2 + size]);
            self.rest.drain(..end + 2 + size + 2);
            if size == 0 {
                return Ok(body);
            }
        }
    }

    fn more(&mut self) -> anyhow::Result<()> {
        let n = self.wire.read(&mut self.piece)?;
        ensure!(n > 0, "the connection ended before the response did");
        self.rest.extend_from_slice(&self.piece[..n]);
        Ok(())
    }

    /// Reads the head of a response that must be a success; the error contains the body otherwise.
    pub fn expect_success(&mut self) -> anyhow::Result<Length> {
        let answer = self.response_head()?;
        if (200..300).contains(&answer.status) {
            return Ok(answer.length);
        }
        let body = self.read(answer.length)?;
        bail!("the server responded with {}: {}", answer.status, String::from_utf8_lossy(&body[..body.len().min(SHOWN_BYTES)]))
    }

    /// The stream after an upgrade, and the bytes of it that were already read.
    pub fn into_wire(self) -> (Wire, Vec<u8>) {
        (self.wire, self.rest)
    }
}

pub fn find(in_bytes: &[u8], what: &[u8]) -> Option<usize> {
    in_bytes.windows(what.len()).position(|w| w == what)
}
