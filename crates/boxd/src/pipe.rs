//! Bounded pipes between a blocking thread and a client's connection, for archives and syncs.

use std::io::{self, Read, Write};

use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt, stream};
use tokio::{runtime::Handle, sync::mpsc, time::timeout};
use tokio_util::io::{StreamReader, SyncIoBridge};

use crate::body::STALL_TIMEOUT;

/// Maximum size of one chunk that is sent: within the limit on a frame.
const CHUNK_BYTES: usize = 256 * 1024;
/// Chunks in a pipe: one being sent, one waiting, one to hide the latency of the thread.
const MAX_CHUNKS: usize = 3;

/// Pipe from a thread to a client. Must be created on the runtime.
pub fn to_client() -> (ChunkWriter, mpsc::Receiver<Bytes>) {
    let (sender, receiver) = mpsc::channel(MAX_CHUNKS);
    (ChunkWriter { sender, runtime: Handle::current(), chunk: BytesMut::new() }, receiver)
}

/// Fails when the client has gone, or has not read for [`STALL_TIMEOUT`].
pub struct ChunkWriter {
    sender: mpsc::Sender<Bytes>,
    runtime: Handle,
    chunk: BytesMut,
}

impl Write for ChunkWriter {
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
        match self.runtime.block_on(async { timeout(STALL_TIMEOUT, self.sender.send(chunk)).await }) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(io::Error::new(io::ErrorKind::BrokenPipe, "the client has gone")),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the client stopped reading")),
        }
    }
}

/// Pipe from a client to a thread. Must be created on the runtime. `None` is the end; dropping the sender without it
/// means that the body was truncated.
pub fn from_client() -> (mpsc::Sender<Option<Bytes>>, impl Read + Send) {
    let (sender, receiver) = mpsc::channel::<Option<Bytes>>(MAX_CHUNKS);
    let chunks = stream::unfold(receiver, |mut receiver| async move {
        let chunk = match receiver.recv().await {
            Some(chunk) => Ok(chunk?),
            None => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the body broke off")),
        };
        Some((chunk, receiver))
    });
    (sender, SyncIoBridge::new(StreamReader::new(Box::pin(chunks.fuse()))))
}
