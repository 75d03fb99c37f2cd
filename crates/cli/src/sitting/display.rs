//! Writes to the screen from its own thread, because a terminal that accepts no output must not block the detach.

use std::{collections::VecDeque, io, time::Duration};

use tokio::sync::{mpsc, oneshot};

use crate::printer::Printer;

/// Chunks queued for a slow terminal; beyond that, output from the sandbox is held back.
const PIECES: usize = 4;
/// Chunks of local origin (status changes, resizes) that wait for a blocked terminal; further ones are dropped.
const MAX_WAITING: usize = 16;

enum Piece {
    Bytes(Vec<u8>),
    /// Answered when everything before it has been written.
    Mark(oneshot::Sender<()>),
}

pub struct Display {
    /// Chunks that the channel can't take yet.
    waiting: VecDeque<Piece>,
    pieces: mpsc::Sender<Piece>,
    failure: oneshot::Receiver<io::Error>,
}

impl Display {
    pub fn new(printer: Printer) -> Self {
        let (pieces, mut to_write) = mpsc::channel(PIECES);
        let (fails, failure) = oneshot::channel();
        std::thread::spawn(move || {
            while let Some(piece) = to_write.blocking_recv() {
                match piece {
                    Piece::Bytes(bytes) => {
                        if let Err(error) = printer.stream(&bytes) {
                            // The receiver is gone only if the attachment has ended already.
                            let _ = fails.send(error);
                            return;
                        }
                    }
                    Piece::Mark(written) => {
                        let _ = written.send(());
                    }
                }
            }
        });
        Self { waiting: VecDeque::new(), pieces, failure }
    }

    /// `false` if the bytes were dropped, so that the screen is outdated.
    #[must_use]
    pub fn show(&mut self, bytes: Vec<u8>) -> bool {
        if bytes.is_empty() {
            return true;
        }
        let has_place = self.waiting.len() < MAX_WAITING;
        if has_place {
            self.waiting.push_back(Piece::Bytes(bytes));
        }
        has_place
    }

    /// Queues bytes regardless of the limit: they restore the terminal.
    pub fn show_last(&mut self, bytes: Vec<u8>) {
        self.waiting.push_back(Piece::Bytes(bytes));
    }

    /// Whether the queue is empty. If it isn't, no further output should be requested.
    pub fn has_room(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Sends queued chunks to the thread. Cancel-safe.
    pub async fn pass_on(&mut self) -> io::Result<()> {
        while !self.waiting.is_empty() {
            match self.pieces.reserve().await {
                Ok(permit) => {
                    if let Some(piece) = self.waiting.pop_front() {
                        permit.send(piece);
                    }
                }
                // The thread ends with a failure or with this value.
                Err(_) => return Err((&mut self.failure).await.unwrap_or_else(|_| io::ErrorKind::BrokenPipe.into())),
            }
        }
        Ok(())
    }

    /// Waits until everything is written; `false` if the terminal does not accept it in time.
    pub async fn settle(&mut self, within: Duration) -> bool {
        let (written, is_written) = oneshot::channel();
        self.waiting.push_back(Piece::Mark(written));
        let settling = async { self.pass_on().await.is_ok() && is_written.await.is_ok() };
        tokio::time::timeout(within, settling).await.unwrap_or(false)
    }
}
