//! A server's address, and a blocking connection to it.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::fd::{AsFd, BorrowedFd},
    os::unix::net::UnixStream,
    time::Duration,
};

use serde::Deserialize;

/// Timeout for a response, after which something must have hung.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// `unix:/path` or `tcp:host:port`.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "String")]
pub enum Address {
    Unix(String),
    Tcp(String),
}

impl TryFrom<String> for Address {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("unix", path)) => Ok(Address::Unix(path.to_owned())),
            Some(("tcp", address)) => Ok(Address::Tcp(address.to_owned())),
            _ => Err(format!("{text} is neither unix:… nor tcp:…")),
        }
    }
}

pub enum Wire {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Wire {
    pub fn open(address: &Address) -> io::Result<Self> {
        let wire = match address {
            Address::Unix(path) => Wire::Unix(UnixStream::connect(path)?),
            Address::Tcp(address) => {
                let stream = TcpStream::connect(address)?;
                // A key must be sent as soon as it is pressed.
                stream.set_nodelay(true)?;
                Wire::Tcp(stream)
            }
        };
        match &wire {
            Wire::Unix(s) => s.set_read_timeout(Some(RESPONSE_TIMEOUT))?,
            Wire::Tcp(s) => s.set_read_timeout(Some(RESPONSE_TIMEOUT))?,
        }
        Ok(wire)
    }
}

impl Read for Wire {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Wire::Unix(s) => s.read(buf),
            Wire::Tcp(s) => s.read(buf),
        }
    }
}

impl Write for Wire {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Wire::Unix(s) => s.write(buf),
            Wire::Tcp(s) => s.write(buf),
        }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Wire::Unix(s) => s.as_fd(),
            Wire::Tcp(s) => s.as_fd(),
        }
    }
}
