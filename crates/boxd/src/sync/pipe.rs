//! A bounded pipe from the sync's thread to the client's connection. It fails when the client stops reading.

use std::io::{self, Write};

use bytes::{Bytes, BytesMut};
use tokio::{runtime::Handle, sync::mpsc};

use crate::body::STALL_TIMEOUT;

/// Maximum size of one piece: within the limit on a frame.
const CHUNK_BYTES: usize = 256 * 1024;
/// Maximum number of pieces in the pipe.
const MAX_CHUNKS: usize = 3;

/// Must be called on the runtime.
pub fn sync_pipe() -> (SyncWriter, mpsc::Receiver<Bytes>) {
    let (sender, receiver) = mpsc::channel(MAX_CHUNKS);
    (SyncWriter { sender, runtime: Handle::current(), chunk: BytesMut::new() }, receiver)
}

pub struct SyncWriter {
    sender: mpsc::Sender<Bytes>,
    runtime: Handle,
    chunk: BytesMut,
}

impl Write for SyncWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(CHUNK_BYTES - self.chunk.len());
        self.chunk.extend_from_slice(&bytes[..n]);
        if self.chunk.len() == CHUNK_BYTES {
            self.flush()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        let chunk = self.chunk.split().freeze();
        let sent = self.runtime.block_on(async { tokio::time::timeout(STALL_TIMEOUT, self.sender.send(chunk)).await });
        match sent {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(io::Error::new(io::ErrorKind::BrokenPipe, "the client disconnected")),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the client stopped reading")),
        }
    }
}
