//! The log itself: a ring in memory, perhaps a spool behind it, and the rule for when it is full.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use crate::{
    notes::{Notes, Resize},
    reader::Reader,
    scan::Found,
    spool::{Spool, Spooled},
    sync::{Arc, Mutex, MutexGuard},
    waiting::{Readers, Slot, Urgency, Wakes},
};

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Kept in memory. An idle log takes little of it.
    pub ring_bytes: usize,
    /// Whether a writer waits for attached readers that hold it, as on a pipe: for the one that is furthest along, so that another
    /// who is slow costs nobody anything and finds the rest in the spool. Without one attached it never waits.
    pub writer_waits: bool,
}

/// Readers who could wait, woken in one go: some hundred microseconds of their work.
const WOKEN_AT_ONCE: usize = 8;
/// The first memory a log takes: a prompt and a few lines.
const FIRST_BYTES: usize = 4096;
/// A waiting writer goes on when this part of the ring is free, so that it doesn't come back for every few bytes.
const WORTHWHILE_PART: usize = 4;

/// Output with its offsets. Clones are the same log.
#[derive(Clone)]
pub struct Log(pub(crate) Arc<Mutex<State>>);

pub(crate) struct State {
    ring: VecDeque<u8>,
    /// Offset of the ring's first byte.
    ring_from: u64,
    limits: Limits,
    spool: Option<Spooled>,
    acknowledged: u64,
    pub is_finished: bool,
    pub readers: Readers,
    writer: Option<Waker>,
    pub notes: Notes,
}

impl Log {
    /// Without a spool: what leaves the ring is gone.
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Mutex::new(State {
            ring: VecDeque::new(),
            ring_from: 0,
            limits: Limits { ring_bytes: limits.ring_bytes.max(1), ..limits },
            spool: None,
            acknowledged: 0,
            is_finished: false,
            readers: Readers::default(),
            writer: None,
            notes: Notes::default(),
        })))
    }

    pub fn with_spool(limits: Limits, spool: Box<dyn Spool>, spool_bytes: u64) -> Self {
        let log = Self::new(limits);
        log.lock().spool = Some(Spooled { spool, from: 0, limit: spool_bytes, failed: None });
        log
    }

    /// Adds bytes and says how many were taken: fewer than given only where the writer is to wait for [`Log::room`].
    pub fn append(&self, bytes: &[u8]) -> usize {
        let mut state = self.lock();
        let taken = state.append(bytes);
        state.unlock_and_wake(taken > 0);
        taken
    }

    /// A terminal's output with what the scanner found in it. Only for logs whose writer never waits: all of it is taken. Of those who wait
    /// only the first are woken: `true` where there are more, for [`Log::wake_some`].
    #[must_use = "who isn't woken waits on"]
    pub fn append_found(&self, bytes: &[u8], found: &Found) -> bool {
        let mut state = self.lock();
        state.append(bytes);
        for span in state.notes.add(&found.spans, found.undecided) {
            state.cover(span.from, span.to);
        }
        state.unlock_and_wake_some()
    }

    /// Wakes a few more of those who wait; `true` where there are still more. To be called until there are none, a moment between: hundreds at
    /// once would hold up whoever was first, whose next key is already on its way.
    #[must_use = "who isn't woken waits on"]
    pub fn wake_some(&self) -> bool {
        self.lock().unlock_and_wake_some()
    }

    /// From here on the terminal has this size.
    pub fn resize(&self, cols: u16, rows: u16) {
        let mut state = self.lock();
        let offset = state.head();
        state.notes.resize(Resize { offset, cols, rows });
        state.unlock_and_wake(true);
    }

    /// The size of the terminal at an offset, as far back as is known; `None` where there never was one.
    pub fn size_at(&self, offset: u64) -> Option<Resize> {
        self.lock().notes.size_at(offset)
    }

    /// Resolves when an append is worth trying again.
    pub fn room(&self) -> Room<'_> {
        Room(self)
    }

    /// Whether taking this many more bytes moves some to the spool, which may take as long as a disk does.
    pub fn would_spool(&self, more: usize) -> bool {
        let state = self.lock();
        state.spool.as_ref().is_some_and(|spooled| spooled.failed.is_none())
            && state.limits.ring_bytes - state.ring.len() < more
            && state.evictable() > 0
    }

    /// Bytes in memory.
    pub fn memory(&self) -> usize {
        self.lock().ring.capacity()
    }

    /// Nothing more comes. Readers get what there is, then the end.
    pub fn finish(&self) {
        let mut state = self.lock();
        state.is_finished = true;
        let head = state.head();
        state.notes.finish(head);
        state.unlock_and_wake(true);
    }

    pub fn is_finished(&self) -> bool {
        self.lock().is_finished
    }

    /// The first offset that is kept, and the one the next byte will have.
    pub fn range(&self) -> std::ops::Range<u64> {
        let state = self.lock();
        state.base()..state.head()
    }

    pub fn head(&self) -> u64 {
        self.lock().head()
    }

    /// Lets go of what is before, once the attached readers have read it.
    pub fn acknowledge(&self, offset: u64) {
        let mut state = self.lock();
        state.acknowledge(offset);
        state.unlock_and_wake(false);
    }

    /// A reader from an offset on. One that is no longer kept shows as a gap in the first read; one not yet written is the head.
    pub fn reader(&self, from: u64) -> Reader {
        let mut state = self.lock();
        let from = from.min(state.head());
        let next_size = state.notes.sizes_until(from);
        let id = state.readers.attach(from, next_size);
        drop(state);
        Reader::new(self.clone(), id)
    }

    pub fn readers(&self) -> usize {
        self.lock().readers.iter().count()
    }

    /// Why the spool is no longer used, told once.
    pub fn spool_failure(&self) -> Option<std::io::Error> {
        let mut state = self.lock();
        let failed = state.spool.as_mut().and_then(|spooled| spooled.failed.take());
        if failed.is_some() {
            state.spool = None;
        }
        failed
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing here panics half way but a spool, and then the state is that of before or after it.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Unlocks first and wakes then.
pub(crate) trait UnlockAndWake {
    fn unlock_and_wake(self, readers: bool);
    /// As above, for readers and a few at a time: whether some are left.
    fn unlock_and_wake_some(self) -> bool;
}

impl UnlockAndWake for MutexGuard<'_, State> {
    fn unlock_and_wake(mut self, readers: bool) {
        let mut wakes = if readers { self.readers.take_waiting(usize::MAX) } else { Wakes::default() };
        if self.writer.is_some()
            && self.has_room()
            && let Some(writer) = self.writer.take()
        {
            wakes.push(writer, Urgency::First);
        }
        drop(self);
        wakes.wake();
    }

    fn unlock_and_wake_some(mut self) -> bool {
        let wakes = self.readers.take_waiting(WOKEN_AT_ONCE);
        let has_more = self.readers.has_waiting();
        drop(self);
        wakes.wake();
        has_more
    }
}

impl State {
    pub fn head(&self) -> u64 {
        self.ring_from + self.ring.len() as u64
    }

    /// Puts NULs over what nobody is to get, as far as it is still in memory; what is read from the log has the same there already.
    fn cover(&mut self, from: u64, to: u64) {
        let within = |offset: u64| offset.clamp(self.ring_from, self.head()) - self.ring_from;
        let (from, to) = (within(from) as usize, within(to) as usize);
        self.ring.range_mut(from..to).for_each(|byte| *byte = 0);
    }

    pub fn base(&self) -> u64 {
        match &self.spool {
            Some(spooled) if spooled.failed.is_none() => spooled.from.min(self.ring_from),
            _ => self.ring_from,
        }
    }

    fn append(&mut self, bytes: &[u8]) -> usize {
        let mut taken = 0;
        while taken < bytes.len() {
            let room = self.make_room(bytes.len() - taken);
            if room == 0 {
                break;
            }
            self.grow_for(room);
            self.ring.extend(&bytes[taken..taken + room]);
            taken += room;
        }
        taken
    }

    /// By doubling, up to the limit and never beyond it.
    fn grow_for(&mut self, more: usize) {
        let needed = self.ring.len() + more;
        if needed > self.ring.capacity() {
            let wanted = needed.max(FIRST_BYTES).next_power_of_two().min(self.limits.ring_bytes).max(needed);
            self.ring.reserve_exact(wanted - self.ring.len());
        }
    }

    /// Makes room in the ring as far as the reader that holds it allows; says for how many bytes there is some.
    fn make_room(&mut self, wanted: usize) -> usize {
        let free = self.limits.ring_bytes - self.ring.len();
        if free >= wanted {
            return wanted;
        }
        let leaving = (wanted - free).min(self.evictable());
        self.evict(leaving);
        free + leaving
    }

    /// Bytes at the ring's tail that may leave it: those that the furthest of the readers that hold it needs no longer.
    fn evictable(&self) -> usize {
        let held = match self.limits.writer_waits {
            true => self.readers.iter().filter(|slot| slot.is_holding).map(|slot| self.held_from(slot)).max(),
            false => None,
        };
        match held {
            Some(offset) => usize::try_from(offset.saturating_sub(self.ring_from)).unwrap_or(usize::MAX).min(self.ring.len()),
            None => self.ring.len(),
        }
    }

    /// A reader that acknowledges often enough is waited for until it has; one that does so rarely, or not at all, until it has read.
    /// The former keeps what it may have to send again in memory, out of the spool.
    fn held_from(&self, slot: &Slot) -> u64 {
        let is_often = slot.acknowledges && slot.largest_step <= self.limits.ring_bytes as u64 / 2;
        if is_often { slot.acknowledged } else { slot.position }
    }

    fn has_room(&self) -> bool {
        let room = self.limits.ring_bytes - self.ring.len() + self.evictable();
        room >= (self.limits.ring_bytes / WORTHWHILE_PART).max(1)
    }

    fn evict(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        if let Some(spooled) = &mut self.spool {
            let (a, b) = self.ring.as_slices();
            let of_a = count.min(a.len());
            spooled.take(self.ring_from, [&a[..of_a], &b[..count - of_a]]);
        }
        self.drop_front(count);
    }

    fn drop_front(&mut self, count: usize) {
        self.ring.drain(..count);
        self.ring_from += count as u64;
        let base = self.base();
        self.notes.forget(base);
    }

    pub fn acknowledge(&mut self, offset: u64) {
        self.acknowledged = self.acknowledged.max(offset.min(self.head()));
        self.release();
    }

    /// Lets go of what was acknowledged and no attached reader still has to read.
    pub fn release(&mut self) {
        if self.acknowledged <= self.base() {
            return;
        }
        let before = self.readers.iter().map(|slot| slot.position).fold(self.acknowledged, u64::min);
        if let Some(spooled) = &mut self.spool {
            spooled.let_go(before);
        }
        if before > self.ring_from {
            self.drop_front((before - self.ring_from) as usize);
        }
    }

    /// Copies from an offset that is kept to the end of a buffer.
    pub fn copy(&mut self, from: u64, into: &mut bytes::BytesMut, count: usize) -> bool {
        if from < self.ring_from {
            let Some(spooled) = self.spool.as_mut() else { return false };
            let at = into.len();
            into.resize(at + count, 0);
            if let Err(error) = spooled.spool.read_at(from, &mut into[at..]) {
                into.truncate(at);
                spooled.failed = Some(error);
                return false;
            }
            return true;
        }
        let start = (from - self.ring_from) as usize;
        let (a, b) = self.ring.as_slices();
        let of_a = a.get(start..).unwrap_or_default();
        let of_a = &of_a[..count.min(of_a.len())];
        let of_b = &b[start.saturating_sub(a.len())..][..count - of_a.len()];
        into.reserve(count);
        into.extend_from_slice(of_a);
        into.extend_from_slice(of_b);
        true
    }

    pub fn is_spooled(&self, offset: u64) -> bool {
        offset < self.ring_from && offset >= self.base()
    }

    /// How far one read reaches: a spool and a ring are not mixed in it.
    pub fn stretch_end(&self, from: u64) -> u64 {
        if from < self.ring_from { self.ring_from } else { self.head() }
    }
}

/// See [`Log::room`].
#[must_use = "futures do nothing unless awaited"]
pub struct Room<'a>(&'a Log);

impl Future for Room<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.lock();
        if state.has_room() || state.is_finished {
            return Poll::Ready(());
        }
        state.writer = Some(context.waker().clone());
        Poll::Pending
    }
}
