//! Input on its way: numbered, kept until the other side has it, and sent again over a new connection.

use std::{collections::VecDeque, time::Duration};

use bytes::Bytes;
use tokio::time::Instant;

use crate::nap::Moment;

/// Most that is kept of input nobody has acknowledged, in bytes; beyond it whoever types waits.
const MAX_UNACKED_BYTES: usize = 256 * 1024;
/// How much of it a new connection gets before it has acknowledged anything, in bytes; each acknowledgement doubles it. Over a network on
/// which no connection lasts, more would be lost each time together with the acknowledgements of what went before.
const FIRST_WINDOW_BYTES: usize = 16 * 1024;

#[derive(Debug)]
pub(crate) struct Typing {
    last_seq: u64,
    unacked: VecDeque<Typed>,
    bytes: usize,
    /// Of the unacknowledged, those sent on this connection: how many, and their bytes.
    sent: usize,
    sent_bytes: usize,
    window: usize,
    /// Keys pressed this long ago are not sent any more: the screen they were meant for is another one.
    max_age: Option<Duration>,
}

#[derive(Debug)]
struct Typed {
    seq: u64,
    bytes: Bytes,
    at: Moment,
}

impl Typing {
    pub fn new(max_age: Option<Duration>) -> Self {
        Self { last_seq: 0, unacked: VecDeque::new(), bytes: 0, sent: 0, sent_bytes: 0, window: FIRST_WINDOW_BYTES, max_age }
    }

    pub fn has_room(&self) -> bool {
        self.bytes < MAX_UNACKED_BYTES
    }

    pub fn push(&mut self, bytes: Bytes, at: Moment) {
        self.last_seq += 1;
        self.bytes += bytes.len();
        self.unacked.push_back(Typed { seq: self.last_seq, bytes, at });
    }

    /// A new connection has nothing yet.
    pub fn start_over(&mut self) {
        (self.sent, self.sent_bytes, self.window) = (0, 0, FIRST_WINDOW_BYTES);
    }

    /// What this connection may be sent next, and under which number.
    pub fn next(&mut self) -> Option<(u64, Bytes)> {
        let typed = self.unacked.get(self.sent).filter(|_| self.sent_bytes < self.window)?;
        self.sent += 1;
        self.sent_bytes += typed.bytes.len();
        Some((typed.seq, typed.bytes.clone()))
    }

    pub fn is_all_sent(&self) -> bool {
        self.sent == self.unacked.len()
    }

    /// Everything up to `seq` has arrived.
    pub fn acked(&mut self, seq: u64) {
        while self.unacked.front().is_some_and(|t| t.seq <= seq) {
            self.forget_first();
        }
        self.window = (self.window * 2).min(MAX_UNACKED_BYTES);
    }

    /// The first that was sent was not taken, and would not be if it were sent again.
    pub fn refused(&mut self) {
        if self.sent > 0 {
            self.forget_first();
        }
    }

    /// Forgets what is too old, and says how many bytes that were.
    pub fn expire(&mut self, now: Moment) -> usize {
        let Some(max_age) = self.max_age else { return 0 };
        let before = self.bytes;
        while self.unacked.front().is_some_and(|t| t.at.age(now) > max_age) {
            self.forget_first();
        }
        before - self.bytes
    }

    /// When the next of them is too old.
    pub fn next_expires_at(&self) -> Option<Instant> {
        // Only what is older than that is too old.
        Some(self.unacked.front()?.at.timer + self.max_age? + Duration::from_millis(1))
    }

    fn forget_first(&mut self) {
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
        let now = Moment::now();
        let ago = |seconds| now.earlier(Duration::from_secs(seconds), Duration::from_secs(seconds));
        let mut typing = Typing::new(Some(Duration::from_secs(5)));
        for (text, age) in [("a", 9), ("bc", 6), ("d", 1)] {
            typing.push(Bytes::from_static(text.as_bytes()), ago(age));
        }
        while typing.next().is_some() {}
        typing.acked(1);
        typing.start_over();
        assert_eq!(typing.expire(now), 2);
        assert_eq!((typing.next(), typing.next()), (Some((3, Bytes::from_static(b"d"))), None));
        assert!(typing.is_all_sent());

        let mut typing = Typing::new(None);
        typing.push(Bytes::from(vec![0; MAX_UNACKED_BYTES]), ago(3600));
        assert_eq!((typing.expire(now), typing.has_room()), (0, false));
        typing.acked(7);
        assert!(typing.has_room());
    }

    #[tokio::test]
    async fn keys_grow_old_while_the_machine_sleeps_and_those_pressed_after_it_are_young() {
        let mut typing = Typing::new(Some(Duration::from_secs(5)));
        assert_eq!(typing.next_expires_at(), None);
        let now = Moment::now();
        typing.push(Bytes::from_static(b"rm"), now.earlier(Duration::ZERO, Duration::from_secs(3600)));
        typing.push(Bytes::from_static(b"w"), now);
        assert!(typing.next_expires_at().is_some_and(|at| at > now.timer + Duration::from_secs(5)));
        assert_eq!(typing.expire(now), 2);
        assert_eq!(typing.next(), Some((2, Bytes::from_static(b"w"))));
    }

    #[tokio::test]
    async fn a_new_connection_gets_a_little_first_and_more_with_each_acknowledgement() {
        let mut typing = Typing::new(None);
        for _ in 0..16 {
            typing.push(Bytes::from(vec![0; FIRST_WINDOW_BYTES]), Moment::now());
        }
        let burst = |typing: &mut Typing| std::iter::from_fn(|| typing.next()).map(|(seq, _)| seq).collect::<Vec<_>>();
        assert_eq!(burst(&mut typing), [1]);
        typing.acked(1);
        assert_eq!(burst(&mut typing), [2, 3]);
        typing.acked(3);
        assert_eq!(burst(&mut typing), [4, 5, 6, 7]);
        typing.start_over();
        assert_eq!(burst(&mut typing), [4]);
        typing.refused();
        assert_eq!(burst(&mut typing), [5]);
    }
}
