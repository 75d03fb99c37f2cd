//! Input queue between a command's clients and its program: ordered, deduplicated and bounded.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use tokio::sync::Notify;

use crate::{
    descriptor::Descriptor,
    typists::{Typist, Typists},
};

/// Maximum input queued for the program; beyond it the clients' sockets aren't read.
const MAX_PENDING_BYTES: usize = 1024 * 1024;
/// Overhead charged per frame, so that empty frames count against the limit too.
const FRAME_COST_BYTES: usize = 128;
/// EOT (Ctrl-D): ends the input of a terminal, unless its program has chosen another character. Works only at the
/// beginning of a line; within a line it just submits the pending text.
const END_OF_TRANSMISSION: u8 = 4;

#[derive(Default)]
pub struct Input {
    state: Mutex<State>,
    /// Notified when input arrives or the queue closes.
    came: Notify,
    /// Notified when the program has read some input.
    taken: Notify,
}

#[derive(Default)]
struct State {
    pending: VecDeque<Bytes>,
    pending_bytes: usize,
    is_closed: bool,
    typists: Typists,
    connections: u64,
}

impl Input {
    /// Registers a new connection that sends input frames.
    pub fn typist(&self, principal: &str, client: Option<&str>) -> Typist {
        let mut state = self.state();
        state.connections += 1;
        Typist::new(principal, client, state.connections)
    }

    /// Queues a frame, unless the frame with this client and number was queued before. Returns `false` if the queue is
    /// closed.
    pub fn push(&self, numbered: Option<(&Typist, u64)>, bytes: Bytes) -> bool {
        let mut state = self.state();
        let is_new = numbered.is_none_or(|(typist, seq)| state.typists.is_new(typist, seq));
        if is_new && state.is_closed {
            return false;
        }
        if let Some((typist, seq)) = numbered {
            state.typists.took(typist, seq);
        }
        if !is_new {
            return true;
        }
        state.pending_bytes += bytes.len() + FRAME_COST_BYTES;
        state.pending.push_back(bytes);
        drop(state);
        self.came.notify_one();
        true
    }

    /// No more input will come.
    pub fn close(&self) {
        self.state().is_closed = true;
        self.came.notify_one();
    }

    pub fn has_room(&self) -> bool {
        self.state().pending_bytes < MAX_PENDING_BYTES
    }

    /// Resolves when the queue has capacity for another frame.
    pub async fn room(&self) {
        loop {
            // Before the check, so that a read in between is not missed.
            let taken = self.taken.notified();
            if self.has_room() {
                return;
            }
            taken.await;
        }
    }

    /// Writes input to the program until the program stops reading or the queue closes; then closes the program's
    /// input.
    pub async fn feed(&self, to: Option<Arc<Descriptor>>, is_terminal: bool) {
        if let Some(to) = &to {
            let mut last = b'\n';
            while let Some(bytes) = self.next().await {
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    match to.write(rest).await {
                        Ok(n) => rest = &rest[n..],
                        // The program has closed its input, which is legitimate.
                        Err(_) => return self.refuse(),
                    }
                }
                last = bytes.last().copied().unwrap_or(last);
                self.took(bytes.len() + FRAME_COST_BYTES);
            }
            if is_terminal {
                let is_within_a_line = !matches!(last, b'\n' | b'\r' | END_OF_TRANSMISSION);
                for _ in 0..=u8::from(is_within_a_line) {
                    // A terminal has no write side to close. A failed write means the terminal is gone, which needs no
                    // EOT.
                    let _ = to.write(&[END_OF_TRANSMISSION]).await;
                }
            }
        }
        self.refuse();
    }

    async fn next(&self) -> Option<Bytes> {
        loop {
            let came = self.came.notified();
            {
                let mut state = self.state();
                if let Some(bytes) = state.pending.pop_front() {
                    return Some(bytes);
                }
                if state.is_closed {
                    return None;
                }
            }
            came.await;
        }
    }

    fn took(&self, count: usize) {
        self.state().pending_bytes -= count;
        self.taken.notify_waiters();
    }

    /// Closes the queue and discards what it holds.
    pub fn refuse(&self) {
        let mut state = self.state();
        state.is_closed = true;
        state.pending.clear();
        state.pending_bytes = 0;
        drop(state);
        self.taken.notify_waiters();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_sent_again_is_taken_once_and_each_client_counts_for_itself() {
        let input = Input::default();
        let (a, b) = (input.typist("ada", Some("a")), input.typist("ada", None));
        for (name, typist, seq) in [("a", &a, 0), ("a", &a, 1), ("a", &a, 0), ("b", &b, 0), ("a", &a, 1), ("b", &b, 1)] {
            assert!(input.push(Some((typist, seq)), Bytes::from(format!("{name}{seq} "))));
        }
        assert!(input.push(None, Bytes::from_static(b"uncounted")));
        let taken: Vec<u8> = input.state().pending.iter().flatten().copied().collect();
        assert_eq!(String::from_utf8(taken).unwrap(), "a0 a1 b0 b1 uncounted");
        input.close();
        assert!(input.push(Some((&a, 1)), Bytes::new()), "what was taken is acknowledged again");
        for _ in 0..2 {
            assert!(!input.push(Some((&a, 2)), Bytes::new()), "what was refused was not taken, however often it is sent");
        }
    }

    #[test]
    fn frames_without_a_byte_fill_the_room_too() {
        let input = Input::default();
        for _ in 0..MAX_PENDING_BYTES / FRAME_COST_BYTES {
            assert!(input.has_room() && input.push(None, Bytes::new()));
        }
        assert!(!input.has_room());
    }
}
