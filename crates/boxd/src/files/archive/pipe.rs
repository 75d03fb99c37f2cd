//! A bounded pipe between the worker thread that reads or writes an archive and the connection. A stalled transfer is
//! aborted.

use std::io::{self, Read, Write};

use bytes::{Buf, Bytes, BytesMut};
use futures_util::{Stream, stream};
use tokio::{runtime::Handle, sync::mpsc};

use crate::body::STALL_TIMEOUT;

/// Size of one piece.
const CHUNK_BYTES: usize = 256 * 1024;
/// Pieces in the pipe: one being sent, one waiting, one to hide the latency of the worker.
const MAX_CHUNKS: usize = 3;

/// Pipe from a worker to a client. Must be created on the runtime.
pub fn response_pipe() -> (ResponsePipe, impl Stream<Item = io::Result<Bytes>>) {
    let (sender, receiver) = mpsc::channel(MAX_CHUNKS);
    let chunks = stream::unfold(Some(receiver), async |receiver| {
        let mut receiver = receiver?;
        match receiver.recv().await {
            Some(Chunk::Bytes(bytes)) => Some((Ok(bytes), Some(receiver))),
            Some(Chunk::End) => None,
            // Without its end marker an archive must not look complete, regardless of why the worker stopped.
            None => Some((Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive ended early")), None)),
        }
    });
    (ResponsePipe { sender, runtime: Handle::current() }, chunks)
}

enum Chunk {
    Bytes(Bytes),
    End,
}

/// Dropping this without `finish` ends the stream with an error.
pub struct ResponsePipe {
    sender: mpsc::Sender<Chunk>,
    runtime: Handle,
}

impl ResponsePipe {
    pub fn writer(&self) -> ResponseWriter<'_> {
        ResponseWriter { out: self, chunk: BytesMut::with_capacity(CHUNK_BYTES) }
    }

    pub fn finish(self) -> io::Result<()> {
        self.send(Chunk::End)
    }

    fn send(&self, chunk: Chunk) -> io::Result<()> {
        let sent = self.runtime.block_on(async { tokio::time::timeout(STALL_TIMEOUT, self.sender.send(chunk)).await });
        match sent {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(io::Error::new(io::ErrorKind::BrokenPipe, "the client has gone")),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the client stopped reading")),
        }
    }
}

pub struct ResponseWriter<'a> {
    out: &'a ResponsePipe,
    chunk: BytesMut,
}

impl Write for ResponseWriter<'_> {
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
        let chunk = std::mem::replace(&mut self.chunk, BytesMut::with_capacity(CHUNK_BYTES)).freeze();
        self.out.send(Chunk::Bytes(chunk))
    }
}

/// Pipe from a client to a worker. `None` is the end; dropping the sender without it means that the body was truncated.
pub fn request_pipe() -> (mpsc::Sender<Option<Bytes>>, RequestReader) {
    let (sender, receiver) = mpsc::channel(MAX_CHUNKS);
    (sender, RequestReader { receiver, chunk: Bytes::new(), is_at_end: false })
}

pub struct RequestReader {
    receiver: mpsc::Receiver<Option<Bytes>>,
    chunk: Bytes,
    is_at_end: bool,
}

impl Read for RequestReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while self.chunk.is_empty() && !self.is_at_end {
            match self.receiver.blocking_recv() {
                Some(Some(chunk)) => self.chunk = chunk,
                Some(None) => self.is_at_end = true,
                None => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the body broke off")),
            }
        }
        let n = buf.len().min(self.chunk.len());
        self.chunk.copy_to_slice(&mut buf[..n]);
        Ok(n)
    }
}
