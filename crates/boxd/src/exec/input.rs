//! What clients type for a command, from the frame to the program: kept in order, taken once, never more than a bit of it waiting.

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

/// Waiting for the program to read it; beyond it clients' sockets aren't read.
const MAX_PENDING_BYTES: usize = 1024 * 1024;
/// What a frame takes beside its bytes: an empty one is not for nothing.
const FRAME_COST_BYTES: usize = 128;
/// What ends the input of a terminal whose program hasn't chosen something else, at the beginning of a line. Within one it only hands
/// over what there is of it.
const END_OF_TRANSMISSION: u8 = 4;

#[derive(Default)]
pub struct Input {
    state: Mutex<State>,
    /// Something came, or nothing more will.
    came: Notify,
    /// The program took something.
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
    /// Who sends frames on a new connection.
    pub fn typist(&self, principal: &str, client: Option<&str>) -> Typist {
        let mut state = self.state();
        state.connections += 1;
        Typist::new(principal, client, state.connections)
    }

    /// Takes a frame, unless the one of that client and number was taken already. `false` where nothing more is taken at all.
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

    /// Nothing more comes.
    pub fn close(&self) {
        self.state().is_closed = true;
        self.came.notify_one();
    }

    pub fn has_room(&self) -> bool {
        self.state().pending_bytes < MAX_PENDING_BYTES
    }

    /// Resolves when another frame may be taken.
    pub async fn room(&self) {
        loop {
            // Before the look, so that what is taken in between is not missed.
            let taken = self.taken.notified();
            if self.has_room() {
                return;
            }
            taken.await;
        }
    }

    /// Gives the program what comes, until it wants no more or nothing more comes; then its input is closed.
    pub async fn feed(&self, to: Option<Arc<Descriptor>>, is_terminal: bool) {
        if let Some(to) = &to {
            let mut last = b'\n';
            while let Some(bytes) = self.next().await {
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    match to.write(rest).await {
                        Ok(n) => rest = &rest[n..],
                        // The program doesn't want the rest, which is its right.
                        Err(_) => return self.refuse(),
                    }
                }
                last = bytes.last().copied().unwrap_or(last);
                self.took(bytes.len() + FRAME_COST_BYTES);
            }
            if is_terminal {
                let is_within_a_line = !matches!(last, b'\n' | b'\r' | END_OF_TRANSMISSION);
                for _ in 0..=u8::from(is_within_a_line) {
                    // A terminal has no end of its own to close: one that is gone doesn't need it either.
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

    /// Nothing more is taken, and what waits goes.
    pub fn refuse(&self) {
        let mut state = self.state();
        state.is_closed = true;
        state.pending.clear();
        state.pending_bytes = 0;
        drop(state);
        self.taken.notify_waiters();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is whole before anything can panic.
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
