//! The recent events of one watched tree. Each reader proceeds at its own speed and may resume from an earlier
//! position.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicUsize, Ordering},
};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

/// Per tree: about twenty thousand events. With the limit on trees this is at most 64 MiB.
const MAX_BYTES: usize = 4 * 1024 * 1024;
/// Maximum number of events returned to a reader at once.
const BATCH_EVENTS: usize = 256;

pub struct Journal {
    events: Mutex<Events>,
    /// Number of the last published event, which readers wait on.
    last: watch::Sender<u64>,
    readers: AtomicUsize,
}

struct Events {
    retained: VecDeque<(u64, Bytes)>,
    bytes: usize,
    /// All events after this number are available.
    complete_after: u64,
    /// Number of the last appended event, for which readers may not have been woken yet.
    last: u64,
    is_ended: bool,
}

pub enum JournalRead {
    /// Events, and the number of the last of them.
    Events(Vec<Bytes>, u64),
    /// Some events are no longer available. The next ones follow this number.
    Lost(u64),
    Empty,
    Ended,
}

impl Journal {
    /// Starts empty. Events up to `number` count as lost.
    pub fn new(number: u64) -> Self {
        let events = Events { retained: VecDeque::new(), bytes: 0, complete_after: number, last: number, is_ended: false };
        Self { events: Mutex::new(events), last: watch::Sender::new(number), readers: AtomicUsize::new(0) }
    }

    fn events(&self) -> MutexGuard<'_, Events> {
        self.events.lock()
    }

    pub fn append(&self, number: u64, event: Bytes) {
        let mut events = self.events();
        events.last = number;
        events.bytes += event.len();
        events.retained.push_back((number, event));
        while events.bytes > MAX_BYTES
            && let Some((number, oldest)) = events.retained.pop_front()
        {
            events.bytes -= oldest.len();
            events.complete_after = number;
        }
    }

    /// Wakes the readers. Called once after any number of appends.
    pub fn publish(&self, number: u64) {
        self.last.send_replace(number);
    }

    /// Ends the journal. Readers get the remaining events first.
    pub fn end(&self) {
        self.events().is_ended = true;
        self.last.send_modify(|_| {});
    }

    pub fn read_after(&self, cursor: u64) -> JournalRead {
        let events = self.events();
        if cursor < events.complete_after || cursor > events.last {
            return JournalRead::Lost(events.last);
        }
        let from = events.retained.partition_point(|(number, _)| *number <= cursor);
        let batch: Vec<_> = events.retained.iter().skip(from).take(BATCH_EVENTS).collect();
        match batch.last() {
            Some((number, _)) => JournalRead::Events(batch.iter().map(|(_, event)| event.clone()).collect(), *number),
            None if events.is_ended => JournalRead::Ended,
            None => JournalRead::Empty,
        }
    }

    pub fn last(&self) -> u64 {
        self.events().last
    }

    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }

    pub fn add_reader(&self) {
        self.readers.fetch_add(1, Ordering::Relaxed);
    }
    pub fn remove_reader(&self) {
        self.readers.fetch_sub(1, Ordering::Relaxed);
    }
    pub fn has_readers(&self) -> bool {
        self.readers.load(Ordering::Relaxed) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_gets_each_event_once_or_learns_that_some_are_lost() {
        let journal = Journal::new(10);
        assert!(matches!(journal.read_after(9), JournalRead::Lost(10)));
        assert!(matches!(journal.read_after(10), JournalRead::Empty));
        assert!(matches!(journal.read_after(11), JournalRead::Lost(10)), "a cursor beyond the end is invalid");
        for number in 11..=13 {
            journal.append(number, Bytes::from_static(b"x"));
            journal.publish(number);
        }
        assert!(matches!(journal.read_after(11), JournalRead::Events(events, 13) if events.len() == 2));
        for number in 14..=15 {
            journal.append(number, Bytes::from(vec![0; MAX_BYTES]));
            journal.publish(number);
        }
        assert!(matches!(journal.read_after(13), JournalRead::Lost(15)));
        assert!(matches!(journal.read_after(14), JournalRead::Events(events, 15) if events.len() == 1));
        journal.end();
        assert!(matches!(journal.read_after(15), JournalRead::Ended));
    }
}
