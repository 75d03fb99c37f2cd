//! The recent events of one watched tree. Each reader proceeds at its own speed and may resume from an earlier
//! position.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
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
    kept: VecDeque<(u64, Bytes)>,
    bytes: usize,
    /// All events after this number are available.
    complete_after: u64,
    /// Number of the last appended event, for which readers may not have been woken yet.
    last: u64,
    is_over: bool,
}

pub enum Next {
    /// Events, and the number of the last of them.
    Events(Vec<Bytes>, u64),
    /// Some events are no longer available. The next ones follow this number.
    Lost(u64),
    Nothing,
    Over,
}

impl Journal {
    /// Starts empty. Events up to `number` count as lost.
    pub fn new(number: u64) -> Self {
        let events = Events { kept: VecDeque::new(), bytes: 0, complete_after: number, last: number, is_over: false };
        Self { events: Mutex::new(events), last: watch::Sender::new(number), readers: AtomicUsize::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn append(&self, number: u64, event: Bytes) {
        let mut events = self.lock();
        events.last = number;
        events.bytes += event.len();
        events.kept.push_back((number, event));
        while events.bytes > MAX_BYTES
            && let Some((number, oldest)) = events.kept.pop_front()
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
        self.lock().is_over = true;
        self.last.send_modify(|_| {});
    }

    pub fn after(&self, cursor: u64) -> Next {
        let events = self.lock();
        if cursor < events.complete_after || cursor > events.last {
            return Next::Lost(events.last);
        }
        let from = events.kept.partition_point(|(number, _)| *number <= cursor);
        let batch: Vec<_> = events.kept.iter().skip(from).take(BATCH_EVENTS).collect();
        match batch.last() {
            Some((number, _)) => Next::Events(batch.iter().map(|(_, event)| event.clone()).collect(), *number),
            None if events.is_over => Next::Over,
            None => Next::Nothing,
        }
    }

    pub fn last(&self) -> u64 {
        self.lock().last
    }

    pub fn changed(&self) -> watch::Receiver<u64> {
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
    fn a_reader_gets_each_event_once_or_is_told_that_some_are_gone() {
        let journal = Journal::new(10);
        assert!(matches!(journal.after(9), Next::Lost(10)));
        assert!(matches!(journal.after(10), Next::Nothing));
        assert!(matches!(journal.after(11), Next::Lost(10)), "a cursor of the future is not ours");
        for number in 11..=13 {
            journal.append(number, Bytes::from_static(b"x"));
            journal.publish(number);
        }
        assert!(matches!(journal.after(11), Next::Events(events, 13) if events.len() == 2));
        for number in 14..=15 {
            journal.append(number, Bytes::from(vec![0; MAX_BYTES]));
            journal.publish(number);
        }
        assert!(matches!(journal.after(13), Next::Lost(15)));
        assert!(matches!(journal.after(14), Next::Events(events, 15) if events.len() == 1));
        journal.end();
        assert!(matches!(journal.after(15), Next::Over));
    }
}
