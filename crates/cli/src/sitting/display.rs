//! The way to the screen: a thread of its own writes, because a terminal that takes nothing must not keep us from leaving.

use std::{collections::VecDeque, io, time::Duration};

use tokio::sync::{mpsc, oneshot};

use crate::printer::Printer;

/// Pieces between us and a slow terminal; beyond it what comes from the sandbox waits.
const PIECES: usize = 4;
/// Pieces of our own that wait for a terminal that takes nothing: words that change, another size. Beyond it they are left out.
const MAX_WAITING: usize = 16;

enum Piece {
    Bytes(Vec<u8>),
    /// Answered when everything before it has been written.
    Mark(oneshot::Sender<()>),
}

pub struct Display {
    /// What the thread has no room for yet.
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
                            // Nobody to tell means that we have left already.
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

    /// `false` where it was left out, and what is shown is no longer what it should be.
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

    /// What must be shown, however much waits: it leaves the terminal as it should be.
    pub fn show_last(&mut self, bytes: Vec<u8>) {
        self.waiting.push_back(Piece::Bytes(bytes));
    }

    /// Whether more may be shown: while it is not, nothing new is to be asked for.
    pub fn has_room(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Hands on what waits. May be dropped at any moment.
    pub async fn pass_on(&mut self) -> io::Result<()> {
        while !self.waiting.is_empty() {
            match self.pieces.reserve().await {
                Ok(permit) => {
                    if let Some(piece) = self.waiting.pop_front() {
                        permit.send(piece);
                    }
                }
                // The thread ends with a failure or with us.
                Err(_) => return Err((&mut self.failure).await.unwrap_or_else(|_| io::ErrorKind::BrokenPipe.into())),
            }
        }
        Ok(())
    }

    /// Waits until everything is on the screen, but not for a terminal that takes nothing: `false` then.
    pub async fn settle(&mut self, within: Duration) -> bool {
        let (written, is_written) = oneshot::channel();
        self.waiting.push_back(Piece::Mark(written));
        let settling = async { self.pass_on().await.is_ok() && is_written.await.is_ok() };
        tokio::time::timeout(within, settling).await.unwrap_or(false)
    }
}
