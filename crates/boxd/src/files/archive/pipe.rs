//! A bounded pipe between the worker thread that reads or writes an archive and the connection. A stalled transfer is
//! aborted.

use std::io::{self, Read, Write};

use bytes::{Buf, Bytes, BytesMut};
use futures_util::{Stream, stream};
use tokio::{runtime::Handle, sync::mpsc};

use crate::body::STALL;

/// Size of one piece.
const PIECE_BYTES: usize = 256 * 1024;
/// Pieces in the pipe: one being sent, one waiting, one to hide the latency of the worker.
const PIECES: usize = 3;

/// Pipe from a worker to a client. Must be created on the runtime.
pub fn outgoing() -> (Outgoing, impl Stream<Item = io::Result<Bytes>>) {
    let (sender, receiver) = mpsc::channel(PIECES);
    let pieces = stream::unfold(Some(receiver), async |receiver| {
        let mut receiver = receiver?;
        match receiver.recv().await {
            Some(Piece::Bytes(bytes)) => Some((Ok(bytes), Some(receiver))),
            Some(Piece::End) => None,
            // Without its end marker an archive must not look complete, regardless of why the worker stopped.
            None => Some((Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive ended early")), None)),
        }
    });
    (Outgoing { sender, runtime: Handle::current() }, pieces)
}

enum Piece {
    Bytes(Bytes),
    End,
}

/// Dropping this without `finish` ends the stream with an error.
pub struct Outgoing {
    sender: mpsc::Sender<Piece>,
    runtime: Handle,
}

impl Outgoing {
    pub fn writer(&self) -> OutgoingWriter<'_> {
        OutgoingWriter { out: self, piece: BytesMut::with_capacity(PIECE_BYTES) }
    }

    pub fn finish(self) -> io::Result<()> {
        self.send(Piece::End)
    }

    fn send(&self, piece: Piece) -> io::Result<()> {
        let sent = self.runtime.block_on(async { tokio::time::timeout(STALL, self.sender.send(piece)).await });
        match sent {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(io::Error::new(io::ErrorKind::BrokenPipe, "the client has gone")),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the client stopped reading")),
        }
    }
}

pub struct OutgoingWriter<'a> {
    out: &'a Outgoing,
    piece: BytesMut,
}

impl Write for OutgoingWriter<'_> {
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
        let piece = std::mem::replace(&mut self.piece, BytesMut::with_capacity(PIECE_BYTES)).freeze();
        self.out.send(Piece::Bytes(piece))
    }
}

/// Pipe from a client to a worker. `None` is the end; dropping the sender without it means that the body was truncated.
pub fn incoming() -> (mpsc::Sender<Option<Bytes>>, Incoming) {
    let (sender, receiver) = mpsc::channel(PIECES);
    (sender, Incoming { receiver, piece: Bytes::new(), is_at_end: false })
}

pub struct Incoming {
    receiver: mpsc::Receiver<Option<Bytes>>,
    piece: Bytes,
    is_at_end: bool,
}

impl Read for Incoming {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.is_at_end {
            match self.receiver.blocking_recv() {
                Some(Some(piece)) => self.piece = piece,
                Some(None) => self.is_at_end = true,
                None => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the body broke off")),
            }
        }
        let n = buf.len().min(self.piece.len());
        self.piece.copy_to_slice(&mut buf[..n]);
        Ok(n)
    }
}
