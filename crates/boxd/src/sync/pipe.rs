//! A bounded pipe from the sync's thread to the client's connection. It fails when the client stops reading.

use std::io::{self, Write};

use bytes::{Bytes, BytesMut};
use tokio::{runtime::Handle, sync::mpsc};

use crate::body::STALL;

/// Maximum size of one piece: within the limit on a frame.
const PIECE_BYTES: usize = 256 * 1024;
/// Maximum number of pieces in the pipe.
const PIECES: usize = 3;

/// Must be called on the runtime.
pub fn outgoing() -> (Outgoing, mpsc::Receiver<Bytes>) {
    let (sender, receiver) = mpsc::channel(PIECES);
    (Outgoing { sender, runtime: Handle::current(), piece: BytesMut::new() }, receiver)
}

pub struct Outgoing {
    sender: mpsc::Sender<Bytes>,
    runtime: Handle,
    piece: BytesMut,
}

impl Write for Outgoing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(PIECE_BYTES - self.piece.len());
        self.piece.extend_from_slice(&bytes[..n]);
        if self.piece.len() == PIECE_BYTES {
            self.flush()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let piece = self.piece.split().freeze();
        let sent = self.runtime.block_on(async { tokio::time::timeout(STALL, self.sender.send(piece)).await });
        match sent {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(io::Error::new(io::ErrorKind::BrokenPipe, "the client has gone")),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the client stopped reading")),
        }
    }
}
