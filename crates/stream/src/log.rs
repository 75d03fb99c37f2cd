//! The log itself: a ring buffer in memory, optionally a spool behind it, and the rules for a full ring.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use crate::{
    annotations::{Annotations, Resize},
    loom_sync::{Arc, Mutex, MutexGuard},
    reader::Reader,
    scanner::ScanResult,
    spool::{Spool, Spooled},
    wakers::{ReaderSlot, Readers, WakeList, WakePriority},
};

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum size of the ring in memory. An idle log uses little of it.
    pub ring_bytes: usize,
    /// Whether a full ring blocks the writer while readers with backpressure are attached, as on a pipe. The writer
    /// waits for the one of them that is furthest along, so a slow reader beside it costs nothing and finds the rest in
    /// the spool. Without such a reader the writer never waits.
    pub writer_waits: bool,
}

/// Number of background readers that are woken at once: some hundred microseconds of work for them.
const WAKE_BATCH: usize = 8;
/// Initial capacity of the ring: a prompt and a few lines.
const INITIAL_RING_BYTES: usize = 4096;
/// A waiting writer continues when one part in this many of the ring is free, so that it isn't woken for every few
/// bytes.
const WRITABLE_FRACTION: usize = 4;

/// A log of output, addressed by offset. Clones share the log.
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
    pub annotations: Annotations,
}

impl Log {
    /// A log without a spool: bytes that leave the ring are lost.
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
            annotations: Annotations::default(),
        })))
    }

    pub fn with_spool(limits: Limits, spool: Box<dyn Spool>, spool_bytes: u64) -> Self {
        let log = Self::new(limits);
        log.lock().spool = Some(Spooled { spool, from: 0, limit: spool_bytes, failed: None });
        log
    }

    /// Appends bytes and returns how many were accepted. If these are fewer than given, the writer has to wait for
    /// [`Log::writable`].
    pub fn append(&self, bytes: &[u8]) -> usize {
        let mut state = self.lock();
        let taken = state.append(bytes);
        state.unlock_and_wake(taken > 0);
        taken
    }

    /// Appends a terminal's output with the scanner's result. Only for logs whose writer never waits: all bytes are
    /// accepted. Only the first waiting readers are woken; returns `true` if more are waiting, for [`Log::wake_more`].
    #[must_use = "readers that are not woken keep waiting"]
    pub fn append_scanned(&self, bytes: &[u8], found: &ScanResult) -> bool {
        let mut state = self.lock();
        state.append(bytes);
        for span in state.annotations.add(&found.spans, found.undecided) {
            state.blank(span.from, span.to);
        }
        state.unlock_and_wake_more()
    }

    /// Wakes some more waiting readers; returns `true` if there are still more. To be called until there are none, with
    /// a short pause between the calls: waking hundreds at once would delay the first reader, whose next key is already
    /// on its way.
    #[must_use = "readers that are not woken keep waiting"]
    pub fn wake_more(&self) -> bool {
        self.lock().unlock_and_wake_more()
    }

    /// Records that the terminal has this size from here on.
    pub fn resize(&self, cols: u16, rows: u16) {
        let mut state = self.lock();
        let offset = state.head();
        state.annotations.resize(Resize { offset, cols, rows });
        state.unlock_and_wake(true);
    }

    /// The terminal's size at an offset, as far back as it is known; `None` if no size was ever set.
    pub fn size_at(&self, offset: u64) -> Option<Resize> {
        self.lock().annotations.size_at(offset)
    }

    /// Resolves when an append is worth another attempt.
    pub fn writable(&self) -> Writable<'_> {
        Writable(self)
    }

    /// Whether appending this many bytes would move some to the spool, which may take as long as a disk access.
    pub fn would_spool(&self, more: usize) -> bool {
        let state = self.lock();
        state.spool.as_ref().is_some_and(|spooled| spooled.failed.is_none())
            && state.limits.ring_bytes - state.ring.len() < more
            && state.evictable() > 0
    }

    /// Bytes allocated in memory.
    pub fn memory(&self) -> usize {
        self.lock().ring.capacity()
    }

    /// Ends the output. Readers get the rest, then the end.
    pub fn finish(&self) {
        let mut state = self.lock();
        state.is_finished = true;
        let head = state.head();
        state.annotations.finish(head);
        state.unlock_and_wake(true);
    }

    pub fn is_finished(&self) -> bool {
        self.lock().is_finished
    }

    /// The first offset that is kept, and the offset of the next byte.
    pub fn range(&self) -> std::ops::Range<u64> {
        let state = self.lock();
        state.base()..state.head()
    }

    pub fn head(&self) -> u64 {
        self.lock().head()
    }

    /// Releases everything before an offset, once the attached readers have read it.
    pub fn acknowledge(&self, offset: u64) {
        let mut state = self.lock();
        state.acknowledge(offset);
        state.unlock_and_wake(false);
    }

    /// A reader that starts at an offset. If that is no longer kept, the first read reports a gap; if it is not written
    /// yet, the reader starts at the head.
    pub fn reader(&self, from: u64) -> Reader {
        let mut state = self.lock();
        let from = from.min(state.head());
        let next_size = state.annotations.sizes_until(from);
        let id = state.readers.attach(from, next_size);
        drop(state);
        Reader::new(self.clone(), id)
    }

    pub fn readers(&self) -> usize {
        self.lock().readers.iter().count()
    }

    /// Why the spool is no longer used; returned once.
    pub fn take_spool_failure(&self) -> Option<std::io::Error> {
        let mut state = self.lock();
        let failed = state.spool.as_mut().and_then(|spooled| spooled.failed.take());
        if failed.is_some() {
            state.spool = None;
        }
        failed
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // Only a spool can panic here, and then the state is as before or after its call.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Unlocks the state first and wakes tasks afterwards.
pub(crate) trait UnlockAndWake {
    fn unlock_and_wake(self, readers: bool);
    /// Wakes a batch of readers only; returns whether more are waiting.
    fn unlock_and_wake_more(self) -> bool;
}

impl UnlockAndWake for MutexGuard<'_, State> {
    fn unlock_and_wake(mut self, readers: bool) {
        let mut wakes = if readers { self.readers.take_waiting(usize::MAX) } else { WakeList::default() };
        if self.writer.is_some()
            && self.is_writable()
            && let Some(writer) = self.writer.take()
        {
            wakes.push(writer, WakePriority::Interactive);
        }
        drop(self);
        wakes.wake();
    }

    fn unlock_and_wake_more(mut self) -> bool {
        let wakes = self.readers.take_waiting(WAKE_BATCH);
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

    /// Replaces bytes that no viewer may get with NULs, as far as they are still in memory. All readers already get
    /// NULs for them.
    fn blank(&mut self, from: u64, to: u64) {
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
            let space = self.make_space(bytes.len() - taken);
            if space == 0 {
                break;
            }
            self.grow_for(space);
            self.ring.extend(&bytes[taken..taken + space]);
            taken += space;
        }
        taken
    }

    /// Grows by doubling, up to the limit and never beyond it.
    fn grow_for(&mut self, more: usize) {
        let needed = self.ring.len() + more;
        if needed > self.ring.capacity() {
            let wanted = needed.max(INITIAL_RING_BYTES).next_power_of_two().min(self.limits.ring_bytes).max(needed);
            self.ring.reserve_exact(wanted - self.ring.len());
        }
    }

    /// Makes space in the ring, as far as the readers with backpressure allow it. Returns for how many bytes there is
    /// space.
    fn make_space(&mut self, wanted: usize) -> usize {
        let free = self.limits.ring_bytes - self.ring.len();
        if free >= wanted {
            return wanted;
        }
        let leaving = (wanted - free).min(self.evictable());
        self.evict(leaving);
        free + leaving
    }

    /// Number of bytes that may be evicted from the ring's tail: those that the furthest of the readers with
    /// backpressure no longer needs.
    fn evictable(&self) -> usize {
        let held = match self.limits.writer_waits {
            true => self.readers.iter().filter(|slot| slot.has_backpressure).map(|slot| self.held_from(slot)).max(),
            false => None,
        };
        match held {
            Some(offset) => usize::try_from(offset.saturating_sub(self.ring_from)).unwrap_or(usize::MAX).min(self.ring.len()),
            None => self.ring.len(),
        }
    }

    /// The writer waits for a reader that acknowledges often enough until it has acknowledged. This keeps bytes that
    /// may have to be sent again in memory, out of the spool. For a reader that acknowledges rarely or never, the
    /// writer waits until it has read.
    fn held_from(&self, slot: &ReaderSlot) -> u64 {
        let is_often = slot.acknowledges && slot.largest_step <= self.limits.ring_bytes as u64 / 2;
        if is_often { slot.acknowledged } else { slot.position }
    }

    fn is_writable(&self) -> bool {
        let space = self.limits.ring_bytes - self.ring.len() + self.evictable();
        space >= (self.limits.ring_bytes / WRITABLE_FRACTION).max(1)
    }

    fn evict(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        if let Some(spooled) = &mut self.spool {
            let (a, b) = self.ring.as_slices();
            let of_a = count.min(a.len());
            spooled.append(self.ring_from, [&a[..of_a], &b[..count - of_a]]);
        }
        self.drop_front(count);
    }

    fn drop_front(&mut self, count: usize) {
        self.ring.drain(..count);
        self.ring_from += count as u64;
        let base = self.base();
        self.annotations.forget(base);
    }

    pub fn acknowledge(&mut self, offset: u64) {
        self.acknowledged = self.acknowledged.max(offset.min(self.head()));
        self.release();
    }

    /// Releases bytes that were acknowledged and that all attached readers have read.
    pub fn release(&mut self) {
        if self.acknowledged <= self.base() {
            return;
        }
        let before = self.readers.iter().map(|slot| slot.position).fold(self.acknowledged, u64::min);
        if let Some(spooled) = &mut self.spool {
            spooled.discard_before(before);
        }
        if before > self.ring_from {
            self.drop_front((before - self.ring_from) as usize);
        }
    }

    /// Copies bytes, starting at an offset that is kept, to the end of a buffer.
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

    /// The end of what one read can return: a read never combines spool and ring.
    pub fn stretch_end(&self, from: u64) -> u64 {
        if from < self.ring_from { self.ring_from } else { self.head() }
    }
}

/// See [`Log::writable`].
#[must_use = "futures do nothing unless awaited"]
pub struct Writable<'a>(&'a Log);

impl Future for Writable<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.lock();
        if state.is_writable() || state.is_finished {
            return Poll::Ready(());
        }
        state.writer = Some(context.waker().clone());
        Poll::Pending
    }
}
