//! A minimal WebSocket client: it sends text and binary messages, and receives complete messages.

use std::io::{Read, Write};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::{connection::Wire, contender::Endpoint, http::Connection};

/// Twice the protocol's largest frame, so that there is always space to read on.
const BUFFER_BYTES: usize = 2 * 1024 * 1024;
const FIN: u8 = 0x80;
const TEXT: u8 = 1;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

pub struct Socket {
    wire: Wire,
    buffer: Vec<u8>,
    from: usize,
    to: usize,
}

#[derive(Debug)]
pub enum Message<'a> {
    Text(&'a [u8]),
    Binary(&'a [u8]),
}

impl Socket {
    pub fn open(endpoint: &Endpoint) -> anyhow::Result<Self> {
        let mut http = Connection::open(endpoint)?;
        let headers = [("connection", "Upgrade"), ("upgrade", "websocket"), ("sec-websocket-version", "13")];
        // Any sixteen bytes will do: the key protects against caches between client and server, and there are none
        // here.
        let headers: Vec<_> = headers.into_iter().chain([("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA==")]).collect();
        let more: Vec<_> = headers.into_iter().map(|(n, v)| (n.to_owned(), v.to_owned())).collect();
        let head = String::from_utf8(http.head("GET", &endpoint.path, &more, 0))?.replace("content-length: 0\r\n", "");
        http.send(head.as_bytes())?;
        let answer = http.response_head()?;
        if answer.status != 101 {
            let body = http.read(answer.length)?;
            bail!("the WebSocket upgrade failed: {} {}", answer.status, String::from_utf8_lossy(&body));
        }
        let (wire, rest) = http.into_wire();
        let mut buffer = vec![0; BUFFER_BYTES];
        buffer[..rest.len()].copy_from_slice(&rest);
        Ok(Self { wire, buffer, from: 0, to: rest.len() })
    }

    pub fn send_json(&mut self, value: &Value) -> anyhow::Result<()> {
        self.send(TEXT, value.to_string().as_bytes())
    }

    pub fn send_binary(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.send(BINARY, bytes)
    }

    fn send(&mut self, kind: u8, payload: &[u8]) -> anyhow::Result<()> {
        const MASKED: u8 = 0x80;
        let mut frame = Vec::with_capacity(payload.len() + 14);
        frame.push(FIN | kind);
        match payload.len() {
            short @ 0..126 => frame.push(MASKED | short as u8),
            middle @ 126..65536 => {
                frame.push(MASKED | 126);
                frame.extend_from_slice(&(middle as u16).to_be_bytes());
            }
            long => {
                frame.push(MASKED | 127);
                frame.extend_from_slice(&(long as u64).to_be_bytes());
            }
        }
        // A mask of zeros changes nothing and costs nothing.
        frame.extend_from_slice(&[0; 4]);
        frame.extend_from_slice(payload);
        Ok(self.wire.write_all(&frame)?)
    }

    /// The next message; `None` if the server closed the connection.
    pub fn next(&mut self) -> anyhow::Result<Option<Message<'_>>> {
        loop {
            let (first, start, length) = self.header()?;
            self.fill(start + length)?;
            let payload = self.from + start..self.from + start + length;
            self.from = payload.end;
            ensure!(first & FIN != 0, "a fragmented message, which the protocol does not use");
            match first & 0x0f {
                TEXT => return Ok(Some(Message::Text(&self.buffer[payload]))),
                BINARY => return Ok(Some(Message::Binary(&self.buffer[payload]))),
                CLOSE => return Ok(None),
                PING => {
                    let echoed = self.buffer[payload].to_vec();
                    self.send(PONG, &echoed)?;
                }
                PONG => {}
                other => bail!("a frame of unknown kind {other}"),
            }
        }
    }

    /// The first byte, the payload's offset from `from`, and its length.
    fn header(&mut self) -> anyhow::Result<(u8, usize, usize)> {
        self.fill(2)?;
        let (first, second) = (self.buffer[self.from], self.buffer[self.from + 1]);
        ensure!(second & 0x80 == 0, "a masked frame from a server");
        let (start, length) = match second {
            126 => {
                self.fill(4)?;
                (4, usize::from(u16::from_be_bytes(self.bytes(2))))
            }
            127 => {
                self.fill(10)?;
                (10, usize::try_from(u64::from_be_bytes(self.bytes(2)))?)
            }
            short => (2, usize::from(short)),
        };
        ensure!(start + length <= BUFFER_BYTES, "a frame of {length} bytes, beyond the protocol's limit");
        Ok((first, start, length))
    }

    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.buffer[self.from + at..self.from + at + N]);
        bytes
    }

    /// Reads until this many bytes are available after `from`.
    fn fill(&mut self, wanted: usize) -> anyhow::Result<()> {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        }
        if self.from + wanted > self.buffer.len() {
            self.buffer.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        while self.to - self.from < wanted {
            let n = self.wire.read(&mut self.buffer[self.to..]).context("reading from a WebSocket")?;
            ensure!(n > 0, "the connection ended without a close");
            self.to += n;
        }
        Ok(())
    }

    /// For callers that only discard data, or don't read at all.
    pub fn into_wire(self) -> Wire {
        self.wire
    }
}
