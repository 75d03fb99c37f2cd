//! Unacknowledged input of a stream: numbered, kept until the server acknowledges it, and resent after a reconnect.

use std::{collections::VecDeque, time::Duration};

use bytes::Bytes;
use tokio::time::Instant;

use crate::sleep_detector::SleepAwareInstant;

/// Maximum unacknowledged input, in bytes; when it is reached, the sender waits.
const MAX_UNACKED_BYTES: usize = 256 * 1024;
/// Initial send window of a new connection, in bytes; each acknowledgement doubles it. On a network with short-lived connections, a larger
/// window would lose more with each connection, together with the acknowledgements of earlier input.
const FIRST_WINDOW_BYTES: usize = 16 * 1024;

#[derive(Debug)]
pub(crate) struct PendingInput {
    last_seq: u64,
    unacked: VecDeque<InputChunk>,
    bytes: usize,
    /// Number and bytes of the unacknowledged chunks that were sent on this connection.
    sent: usize,
    sent_bytes: usize,
    window: usize,
    /// Older keystrokes are dropped, because the screen has changed since they were typed.
    max_age: Option<Duration>,
}

#[derive(Debug)]
struct InputChunk {
    seq: u64,
    bytes: Bytes,
    at: SleepAwareInstant,
}

impl PendingInput {
    pub fn new(max_age: Option<Duration>) -> Self {
        Self { last_seq: 0, unacked: VecDeque::new(), bytes: 0, sent: 0, sent_bytes: 0, window: FIRST_WINDOW_BYTES, max_age }
    }

    pub fn has_capacity(&self) -> bool {
        self.bytes < MAX_UNACKED_BYTES
    }

    pub fn push(&mut self, bytes: Bytes, at: SleepAwareInstant) {
        self.last_seq += 1;
        self.bytes += bytes.len();
        self.unacked.push_back(InputChunk { seq: self.last_seq, bytes, at });
    }

    /// Marks all chunks as unsent, for a new connection.
    pub fn reset_sent(&mut self) {
        (self.sent, self.sent_bytes, self.window) = (0, 0, FIRST_WINDOW_BYTES);
    }

    /// Next chunk within this connection's window, with its sequence number.
    pub fn next(&mut self) -> Option<(u64, Bytes)> {
        let chunk = self.unacked.get(self.sent).filter(|_| self.sent_bytes < self.window)?;
        self.sent += 1;
        self.sent_bytes += chunk.bytes.len();
        Some((chunk.seq, chunk.bytes.clone()))
    }

    pub fn is_all_sent(&self) -> bool {
        self.sent == self.unacked.len()
    }

    /// Removes everything up to `seq`, which the server has received.
    pub fn acked(&mut self, seq: u64) {
        while self.unacked.front().is_some_and(|t| t.seq <= seq) {
            self.drop_first();
        }
        self.window = (self.window * 2).min(MAX_UNACKED_BYTES);
    }

    /// Drops the first sent chunk: the server refused it and would refuse it again.
    pub fn refused(&mut self) {
        if self.sent > 0 {
            self.drop_first();
        }
    }

    /// Drops chunks that are too old and returns their size in bytes.
    pub fn expire(&mut self, now: SleepAwareInstant) -> usize {
        let Some(max_age) = self.max_age else { return 0 };
        let before = self.bytes;
        while self.unacked.front().is_some_and(|t| t.at.age(now) > max_age) {
            self.drop_first();
        }
        before - self.bytes
    }

    /// When the first chunk becomes too old.
    pub fn next_expires_at(&self) -> Option<Instant> {
        // `expire` drops chunks that are older than `max_age`, not equal to it.
        Some(self.unacked.front()?.at.timer + self.max_age? + Duration::from_millis(1))
    }

    fn drop_first(&mut self) {
        if let Some(first) = self.unacked.pop_front() {
            self.bytes -= first.bytes.len();
            if self.sent > 0 {
                self.sent -= 1;
                self.sent_bytes -= first.bytes.len();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn input_is_kept_until_acknowledged_and_old_keys_are_dropped() {
        let now = SleepAwareInstant::now();
        let ago = |seconds| now.earlier(Duration::from_secs(seconds), Duration::from_secs(seconds));
        let mut input = PendingInput::new(Some(Duration::from_secs(5)));
        for (text, age) in [("a", 9), ("bc", 6), ("d", 1)] {
            input.push(Bytes::from_static(text.as_bytes()), ago(age));
        }
        while input.next().is_some() {}
        input.acked(1);
        input.reset_sent();
        assert_eq!(input.expire(now), 2);
        assert_eq!((input.next(), input.next()), (Some((3, Bytes::from_static(b"d"))), None));
        assert!(input.is_all_sent());

        let mut input = PendingInput::new(None);
        input.push(Bytes::from(vec![0; MAX_UNACKED_BYTES]), ago(3600));
        assert_eq!((input.expire(now), input.has_capacity()), (0, false));
        input.acked(7);
        assert!(input.has_capacity());
    }

    #[tokio::test]
    async fn keystrokes_expire_by_wall_clock_while_the_machine_sleeps() {
        let mut input = PendingInput::new(Some(Duration::from_secs(5)));
        assert_eq!(input.next_expires_at(), None);
        let now = SleepAwareInstant::now();
        input.push(Bytes::from_static(b"rm"), now.earlier(Duration::ZERO, Duration::from_secs(3600)));
        input.push(Bytes::from_static(b"w"), now);
        assert!(input.next_expires_at().is_some_and(|at| at > now.timer + Duration::from_secs(5)));
        assert_eq!(input.expire(now), 2);
        assert_eq!(input.next(), Some((2, Bytes::from_static(b"w"))));
    }

    #[tokio::test]
    async fn the_send_window_of_a_new_connection_doubles_with_each_acknowledgement() {
        let mut input = PendingInput::new(None);
        for _ in 0..16 {
            input.push(Bytes::from(vec![0; FIRST_WINDOW_BYTES]), SleepAwareInstant::now());
        }
        let burst = |input: &mut PendingInput| std::iter::from_fn(|| input.next()).map(|(seq, _)| seq).collect::<Vec<_>>();
        assert_eq!(burst(&mut input), [1]);
        input.acked(1);
        assert_eq!(burst(&mut input), [2, 3]);
        input.acked(3);
        assert_eq!(burst(&mut input), [4, 5, 6, 7]);
        input.reset_sent();
        assert_eq!(burst(&mut input), [4]);
        input.refused();
        assert_eq!(burst(&mut input), [5]);
    }
}
