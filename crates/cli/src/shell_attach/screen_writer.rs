//! Writes to the screen from its own thread, because a terminal that accepts no output must not block the detach.

use std::{collections::VecDeque, io, time::Duration};

use tokio::sync::{mpsc, oneshot};

use crate::printer::Printer;

/// Chunks queued for a slow terminal; beyond that, output from the sandbox is held back.
const QUEUED_CHUNKS: usize = 4;
/// Chunks of local origin (status changes, resizes) that wait for a blocked terminal; further ones are dropped.
const MAX_PENDING: usize = 16;

enum WriterMessage {
    Bytes(Vec<u8>),
    /// Answered when everything before it has been written.
    Flush(oneshot::Sender<()>),
}

pub struct ScreenWriter {
    /// Chunks that the channel can't take yet.
    pending: VecDeque<WriterMessage>,
    sender: mpsc::Sender<WriterMessage>,
    failure: oneshot::Receiver<io::Error>,
}

impl ScreenWriter {
    pub fn new(printer: Printer) -> Self {
        let (sender, mut receiver) = mpsc::channel(QUEUED_CHUNKS);
        let (failure_sender, failure) = oneshot::channel();
        std::thread::spawn(move || {
            while let Some(message) = receiver.blocking_recv() {
                match message {
                    WriterMessage::Bytes(bytes) => {
                        if let Err(error) = printer.stream(&bytes) {
                            // The receiver is gone only if the attachment has ended already.
                            let _ = failure_sender.send(error);
                            return;
                        }
                    }
                    WriterMessage::Flush(written) => {
                        let _ = written.send(());
                    }
                }
            }
        });
        Self { pending: VecDeque::new(), sender, failure }
    }

    /// `false` if the bytes were dropped, so that the screen is outdated.
    #[must_use]
    pub fn queue(&mut self, bytes: Vec<u8>) -> bool {
        if bytes.is_empty() {
            return true;
        }
        let has_capacity = self.pending.len() < MAX_PENDING;
        if has_capacity {
            self.pending.push_back(WriterMessage::Bytes(bytes));
        }
        has_capacity
    }

    /// Queues bytes regardless of the limit: they restore the terminal.
    pub fn queue_unlimited(&mut self, bytes: Vec<u8>) {
        self.pending.push_back(WriterMessage::Bytes(bytes));
    }

    /// Whether the queue is empty. If it isn't, no further output should be requested.
    pub fn has_capacity(&self) -> bool {
        self.pending.is_empty()
    }

    /// Sends queued chunks to the thread. Cancel-safe.
    pub async fn drain(&mut self) -> io::Result<()> {
        while !self.pending.is_empty() {
            match self.sender.reserve().await {
                Ok(permit) => {
                    if let Some(message) = self.pending.pop_front() {
                        permit.send(message);
                    }
                }
                // The thread ends with a failure or with this value.
                Err(_) => return Err((&mut self.failure).await.unwrap_or_else(|_| io::ErrorKind::BrokenPipe.into())),
            }
        }
        Ok(())
    }

    /// Waits until everything is written; `false` if the terminal does not accept it in time.
    pub async fn flush(&mut self, within: Duration) -> bool {
        let (written, flushed) = oneshot::channel();
        self.pending.push_back(WriterMessage::Flush(written));
        let flushing = async { self.drain().await.is_ok() && flushed.await.is_ok() };
        tokio::time::timeout(within, flushing).await.unwrap_or(false)
    }
}
