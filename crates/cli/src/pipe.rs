//! Connects blocking tar and zstd code with async HTTP bodies through a bounded channel.

use std::io::{self, Read, Write};

use bytes::{Buf, Bytes, BytesMut};
use futures_util::{Stream, StreamExt, stream};
use tokio::sync::mpsc;

/// Bytes of one chunk: large enough that sending it costs little compared to filling it.
const CHUNK: usize = 64 * 1024;
/// Chunks in flight: 1 MiB, so that packing and sending overlap.
const IN_FLIGHT: usize = 16;

/// An item of the channel. If the channel closes before `End`, the writer was lost.
enum PipeItem {
    Bytes(Bytes),
    End(io::Result<()>),
}

/// Returns a writer for a blocking thread, and the stream of the bytes that it writes.
pub fn writer() -> (PipeWriter, impl Stream<Item = io::Result<Bytes>> + Send + 'static) {
    let (sender, receiver) = mpsc::channel(IN_FLIGHT);
    let chunks = stream::unfold(Some(receiver), |receiver| async move {
        let mut receiver = receiver?;
        match receiver.recv().await {
            Some(PipeItem::Bytes(chunk)) => Some((Ok(chunk), Some(receiver))),
            Some(PipeItem::End(Ok(()))) => None,
            Some(PipeItem::End(Err(error))) => Some((Err(error), None)),
            None => Some((Err(io::Error::new(io::ErrorKind::UnexpectedEof, "packing was aborted")), None)),
        }
    });
    (PipeWriter { sender, buffer: BytesMut::with_capacity(CHUNK) }, chunks)
}

/// Must be ended with [`PipeWriter::finish`]: dropping it fails the stream, so that a partial archive is never taken
/// for a complete one.
pub struct PipeWriter {
    sender: mpsc::Sender<PipeItem>,
    buffer: BytesMut,
}

impl PipeWriter {
    /// Ends the stream, successfully or with the error that stopped the writing.
    pub fn finish(mut self, outcome: io::Result<()>) {
        let outcome = outcome.and_then(|()| self.flush());
        // The reader may be gone already; then there is no one to notify.
        let _ = self.sender.blocking_send(PipeItem::End(outcome));
    }
}

impl Write for PipeWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= CHUNK {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let chunk = self.buffer.split().freeze();
        self.buffer.reserve(CHUNK);
        self.sender.blocking_send(PipeItem::Bytes(chunk)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Returns a reader for a blocking thread over an async stream, and the future that feeds it.
pub fn reader<E>(chunks: impl Stream<Item = Result<Bytes, E>> + Send) -> (PipeReader, impl Future<Output = ()> + Send)
where
    E: std::error::Error + Send + Sync + 'static,
{
    let (sender, receiver) = mpsc::channel(IN_FLIGHT);
    let feeder = async move {
        let mut chunks = std::pin::pin!(chunks);
        while let Some(chunk) = chunks.next().await {
            if sender.send(chunk.map_err(io::Error::other)).await.is_err() {
                break;
            }
        }
    };
    (PipeReader { receiver, current: Bytes::new() }, feeder)
}

pub struct PipeReader {
    receiver: mpsc::Receiver<io::Result<Bytes>>,
    current: Bytes,
}

impl Read for PipeReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.receiver.blocking_recv() {
                Some(chunk) => self.current = chunk?,
                None => return Ok(0),
            }
        }
        let n = buffer.len().min(self.current.len());
        self.current.copy_to_slice(&mut buffer[..n]);
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stream_is_complete_or_ends_in_an_error() {
        let written = |outcome: Option<io::Result<()>>| async move {
            let (mut writer, chunks) = writer();
            let writing = tokio::task::spawn_blocking(move || {
                writer.write_all(&[7; 3 * CHUNK + 1]).unwrap();
                match outcome {
                    Some(outcome) => writer.finish(outcome),
                    None => drop(writer),
                }
            });
            let chunks: Vec<_> = chunks.collect().await;
            writing.await.unwrap();
            let last_is_error = chunks.last().is_some_and(Result::is_err);
            (chunks.into_iter().flatten().map(|c| c.len()).sum::<usize>(), last_is_error)
        };
        assert_eq!(written(Some(Ok(()))).await, (3 * CHUNK + 1, false));
        assert!(written(Some(Err(io::ErrorKind::Other.into()))).await.1);
        assert!(written(None).await.1);
    }
}
