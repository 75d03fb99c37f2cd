//! Input on its way: numbered, kept until the other side has it, and sent again over a new connection.

use std::{collections::VecDeque, time::Duration};

use bytes::Bytes;
use tokio::time::Instant;

/// Most that is kept of input nobody has acknowledged, in bytes; beyond it whoever types waits.
const MAX_UNACKED_BYTES: usize = 256 * 1024;

#[derive(Debug)]
pub(crate) struct Typing {
    last_seq: u64,
    unacked: VecDeque<Typed>,
    bytes: usize,
    /// Keys pressed this long ago are not sent any more: the screen they were meant for is another one.
    max_age: Option<Duration>,
}

#[derive(Debug)]
struct Typed {
    seq: u64,
    bytes: Bytes,
    at: Instant,
}

impl Typing {
    pub fn new(max_age: Option<Duration>) -> Self {
        Self { last_seq: 0, unacked: VecDeque::new(), bytes: 0, max_age }
    }

    pub fn has_room(&self) -> bool {
        self.bytes < MAX_UNACKED_BYTES
    }

    /// Gives the number it is sent under.
    pub fn push(&mut self, bytes: Bytes, at: Instant) -> u64 {
        self.last_seq += 1;
        self.bytes += bytes.len();
        self.unacked.push_back(Typed { seq: self.last_seq, bytes, at });
        self.last_seq
    }

    /// Everything up to `seq` has arrived.
    pub fn acked(&mut self, seq: u64) {
        while self.unacked.front().is_some_and(|t| t.seq <= seq) {
            self.forget_first();
        }
    }

    /// Forgets what is too old, and says how many bytes that were.
    pub fn expire(&mut self, now: Instant) -> usize {
        let Some(max_age) = self.max_age else { return 0 };
        let before = self.bytes;
        while self.unacked.front().is_some_and(|t| now.saturating_duration_since(t.at) > max_age) {
            self.forget_first();
        }
        before - self.bytes
    }

    /// What has to be sent again, in order.
    pub fn unacked(&self) -> impl Iterator<Item = (u64, &Bytes)> {
        self.unacked.iter().map(|t| (t.seq, &t.bytes))
    }

    fn forget_first(&mut self) {
        if let Some(first) = self.unacked.pop_front() {
            self.bytes -= first.bytes.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn input_is_kept_until_acknowledged_and_old_keys_are_dropped() {
        let now = Instant::now();
        let mut typing = Typing::new(Some(Duration::from_secs(5)));
        for (text, age) in [("a", 9), ("bc", 6), ("d", 1)] {
            typing.push(Bytes::from_static(text.as_bytes()), now - Duration::from_secs(age));
        }
        typing.acked(1);
        assert_eq!(typing.expire(now), 2);
        assert_eq!(typing.unacked().map(|(seq, b)| (seq, b.to_vec())).collect::<Vec<_>>(), [(3, b"d".to_vec())]);

        let mut typing = Typing::new(None);
        typing.push(Bytes::from(vec![0; MAX_UNACKED_BYTES]), now - Duration::from_secs(3600));
        assert_eq!((typing.expire(now), typing.has_room()), (0, false));
        typing.acked(7);
        assert!(typing.has_room());
    }
}
