//! Input queue between a command's clients and its program: ordered, deduplicated and bounded.

use std::{collections::VecDeque, sync::Arc};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::{
    descriptor::Descriptor,
    input_dedup::{InputDeduplicator, InputSource},
};

/// Maximum input queued for the program; beyond it the clients' sockets aren't read.
const MAX_PENDING_BYTES: usize = 1024 * 1024;
/// Overhead charged per frame, so that empty frames count against the limit too.
const FRAME_COST_BYTES: usize = 128;
/// EOT (Ctrl-D): ends the input of a terminal, unless its program has chosen another character. Works only at the
/// beginning of a line; within a line it just submits the pending text.
const END_OF_TRANSMISSION: u8 = 4;

#[derive(Default)]
pub struct InputQueue {
    state: Mutex<State>,
    /// Notified when input arrives or the queue closes.
    arrived: Notify,
    /// Notified when the program has read some input.
    consumed: Notify,
}

#[derive(Default)]
struct State {
    pending: VecDeque<Bytes>,
    pending_bytes: usize,
    is_closed: bool,
    dedup: InputDeduplicator,
    connections: u64,
}

impl InputQueue {
    /// Registers a new connection that sends input frames.
    pub fn register_source(&self, principal: &str, client: Option<&str>) -> InputSource {
        let mut state = self.state();
        state.connections += 1;
        InputSource::new(principal, client, state.connections)
    }

    /// Queues a frame, unless the frame with this client and number was queued before. Returns `false` if the queue is
    /// closed.
    pub fn push(&self, numbered: Option<(&InputSource, u64)>, bytes: Bytes) -> bool {
        let mut state = self.state();
        let is_new = numbered.is_none_or(|(source, seq)| state.dedup.is_new(source, seq));
        if is_new && state.is_closed {
            return false;
        }
        if let Some((source, seq)) = numbered {
            state.dedup.record(source, seq);
        }
        if !is_new {
            return true;
        }
        state.pending_bytes += bytes.len() + FRAME_COST_BYTES;
        state.pending.push_back(bytes);
        drop(state);
        self.arrived.notify_one();
        true
    }

    /// No more input will come.
    pub fn close(&self) {
        self.state().is_closed = true;
        self.arrived.notify_one();
    }

    pub fn has_room(&self) -> bool {
        self.state().pending_bytes < MAX_PENDING_BYTES
    }

    /// Resolves when the queue has capacity for another frame.
    pub async fn wait_for_room(&self) {
        loop {
            // Before the check, so that a read in between is not missed.
            let consumed = self.consumed.notified();
            if self.has_room() {
                return;
            }
            consumed.await;
        }
    }

    /// Writes input to the program until the program stops reading or the queue closes; then closes the program's
    /// input.
    pub async fn feed(&self, program_input: Option<Arc<Descriptor>>, is_terminal: bool) {
        if let Some(program_input) = &program_input {
            let mut last = b'\n';
            while let Some(bytes) = self.next().await {
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    match program_input.write(rest).await {
                        Ok(n) => rest = &rest[n..],
                        // The program has closed its input, which is legitimate.
                        Err(_) => return self.close_and_discard(),
                    }
                }
                last = bytes.last().copied().unwrap_or(last);
                self.note_consumed(bytes.len() + FRAME_COST_BYTES);
            }
            if is_terminal {
                let is_within_a_line = !matches!(last, b'\n' | b'\r' | END_OF_TRANSMISSION);
                for _ in 0..=u8::from(is_within_a_line) {
                    // A terminal has no write side to close. A failed write means the terminal is gone, which needs no
                    // EOT.
                    let _ = program_input.write(&[END_OF_TRANSMISSION]).await;
                }
            }
        }
        self.close_and_discard();
    }

    async fn next(&self) -> Option<Bytes> {
        loop {
            let arrived = self.arrived.notified();
            {
                let mut state = self.state();
                if let Some(bytes) = state.pending.pop_front() {
                    return Some(bytes);
                }
                if state.is_closed {
                    return None;
                }
            }
            arrived.await;
        }
    }

    fn note_consumed(&self, count: usize) {
        self.state().pending_bytes -= count;
        self.consumed.notify_waiters();
    }

    /// Closes the queue and discards what it holds.
    pub fn close_and_discard(&self) {
        let mut state = self.state();
        state.is_closed = true;
        state.pending.clear();
        state.pending_bytes = 0;
        drop(state);
        self.consumed.notify_waiters();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything can panic.
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resent_frame_is_queued_once_and_each_client_has_its_own_numbering() {
        let input = InputQueue::default();
        let (a, b) = (input.register_source("ada", Some("a")), input.register_source("ada", None));
        for (name, source, seq) in [("a", &a, 0), ("a", &a, 1), ("a", &a, 0), ("b", &b, 0), ("a", &a, 1), ("b", &b, 1)] {
            assert!(input.push(Some((source, seq)), Bytes::from(format!("{name}{seq} "))));
        }
        assert!(input.push(None, Bytes::from_static(b"uncounted")));
        let consumed: Vec<u8> = input.state().pending.iter().flatten().copied().collect();
        assert_eq!(String::from_utf8(consumed).unwrap(), "a0 a1 b0 b1 uncounted");
        input.close();
        assert!(input.push(Some((&a, 1)), Bytes::new()), "accepted input is acknowledged again");
        for _ in 0..2 {
            assert!(!input.push(Some((&a, 2)), Bytes::new()), "rejected input is never accepted");
        }
    }

    #[test]
    fn empty_frames_count_against_the_limit() {
        let input = InputQueue::default();
        for _ in 0..MAX_PENDING_BYTES / FRAME_COST_BYTES {
            assert!(input.has_room() && input.push(None, Bytes::new()));
        }
        assert!(!input.has_room());
    }
}
