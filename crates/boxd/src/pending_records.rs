//! Records for the broker, in memory until it has stored them.

use std::collections::VecDeque;

use cobox_protocol::{
    RequestId,
    report::{MAX_BATCH, MAX_BATCH_BYTES, Report, ReportBatch, ReportCursor},
};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::Notify;

/// The newest records of one kind, numbered. When the buffer is full, the oldest is dropped and counted.
pub struct PendingRecords<T> {
    run_id: String,
    capacity: usize,
    /// No change can panic halfway, so its state is consistent.
    buffer: Mutex<Buffer<T>>,
    added: Notify,
}

struct Buffer<T> {
    records: VecDeque<T>,
    last_seq: u64,
    lost: u64,
}

impl<T: Report + Clone + Serialize> PendingRecords<T> {
    pub fn new(capacity: usize) -> Self {
        let run_id = RequestId::new().as_str().trim_start_matches("req_").to_owned();
        let buffer = Buffer { records: VecDeque::new(), last_seq: 0, lost: 0 };
        Self { run_id, capacity, buffer: Mutex::new(buffer), added: Notify::new() }
    }

    /// Adds the record that `numbered` makes with its number.
    pub fn add(&self, numbered: impl FnOnce(u64) -> T) {
        {
            let mut buffer = self.buffer.lock();
            buffer.last_seq += 1;
            let record = numbered(buffer.last_seq);
            buffer.records.push_back(record);
            if buffer.records.len() > self.capacity {
                buffer.records.pop_front();
                buffer.lost += 1;
            }
        }
        // Only has an effect while the broker waits. After it, the broker doesn't wait again before the batch is
        // delivered.
        self.added.notify_waiters();
    }

    /// Drops the records that the broker has stored.
    pub fn acknowledge(&self, stored: &ReportCursor) {
        if stored.run_id == self.run_id {
            let mut buffer = self.buffer.lock();
            while buffer.records.front().is_some_and(|record| record.seq() <= stored.seq) {
                buffer.records.pop_front();
            }
        }
    }

    /// The oldest records, as many as a response may have.
    pub fn batch(&self) -> ReportBatch<T> {
        let buffer = self.buffer.lock();
        let (mut items, mut bytes) = (Vec::new(), 0);
        for record in buffer.records.iter().take(MAX_BATCH) {
            bytes += serde_json::to_vec(record).map_or(0, |json| json.len() + 1);
            // At least one, so that the broker never waits for a record that is too long.
            if bytes > MAX_BATCH_BYTES && !items.is_empty() {
                break;
            }
            items.push(record.clone());
        }
        ReportBatch { run_id: self.run_id.clone(), more: items.len() < buffer.records.len(), items, lost: buffer.lost }
    }

    pub fn is_empty(&self) -> bool {
        self.buffer.lock().records.is_empty()
    }

    /// Returns when there is a record.
    pub async fn available(&self) {
        loop {
            // Registers before checking, so that no record is missed in between.
            let mut added = std::pin::pin!(self.added.notified());
            added.as_mut().enable();
            if !self.is_empty() {
                return;
            }
            added.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: usize = 2 * MAX_BATCH;

    #[derive(Clone, Debug, PartialEq, Serialize)]
    struct Numbered(u64, String);

    impl Report for Numbered {
        fn seq(&self) -> u64 {
            self.0
        }
    }

    fn pending(count: usize, text: &str) -> PendingRecords<Numbered> {
        let pending = PendingRecords::new(CAPACITY);
        (0..count).for_each(|_| pending.add(|seq| Numbered(seq, text.to_owned())));
        pending
    }

    #[test]
    fn records_are_kept_until_they_are_acknowledged_and_dropped_ones_are_counted() {
        let pending = pending(3, "");
        let fetch = |seq, run_id: &str| {
            pending.acknowledge(&ReportCursor { run_id: run_id.to_owned(), seq });
            pending.batch()
        };
        let seqs = |batch: &ReportBatch<Numbered>| batch.items.iter().map(|record| record.0).collect::<Vec<_>>();
        let first = fetch(0, "");
        assert_eq!(seqs(&first), [1, 2, 3]);
        assert_eq!(fetch(2, "of another run").items.len(), 3, "a number from another run acknowledges nothing");
        assert_eq!(seqs(&fetch(2, &first.run_id)), [3]);
        (0..CAPACITY + 4).for_each(|_| pending.add(|seq| Numbered(seq, String::new())));
        let later = fetch(3, &first.run_id);
        assert_eq!((later.items.len(), later.more, later.lost), (MAX_BATCH, true, 5));
    }

    #[test]
    fn a_batch_of_long_records_is_delivered_in_parts_of_bounded_size() {
        let pending = pending(MAX_BATCH, &"\u{1}".repeat(1024));
        let (mut fetched, mut parts) = (0, 0);
        while !pending.is_empty() {
            let batch = pending.batch();
            assert!(serde_json::to_vec(&batch.items).unwrap().len() <= MAX_BATCH_BYTES + 2);
            fetched += batch.items.len();
            parts += 1;
            let is_last = !batch.more;
            pending.acknowledge(&ReportCursor { run_id: batch.run_id, seq: batch.items.last().unwrap().0 });
            assert_eq!(is_last, pending.is_empty());
        }
        assert_eq!(fetched, MAX_BATCH);
        assert!(parts > 1, "a whole batch would be too long");
        pending.add(|seq| Numbered(seq, "x".repeat(2 * MAX_BATCH_BYTES)));
        assert_eq!(pending.batch().items.len(), 1, "one record is always delivered");
    }
}
