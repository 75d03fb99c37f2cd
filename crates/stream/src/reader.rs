//! A reader: a position in a log. The log stores nothing else for it, no matter how slow it is.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Bytes, BytesMut};

use crate::{
    SequenceKinds, WakePriority,
    annotations::Resize,
    log::{Log, State, UnlockAndWake},
    loom_sync::MutexGuard,
    wakers::ReaderSlot,
};

/// The result of a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    Chunk(Chunk),
    /// These bytes are no longer kept; the next read continues at `to`.
    Gap {
        from: u64,
        to: u64,
    },
    /// Everything was read and the output has ended.
    End,
    /// No bytes now; [`Reader::wait`] resolves when there are some.
    Pending,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub offset: u64,
    pub bytes: Bytes,
}

/// Attached to the log until it is dropped.
pub struct Reader {
    log: Log,
    id: usize,
}

impl Reader {
    pub(crate) fn new(log: Log, id: usize) -> Self {
        Self { log, id }
    }

    /// Reads the next bytes, at most `max`.
    pub fn read(&mut self, max: usize) -> Read {
        let mut bytes = BytesMut::new();
        match self.read_into(&mut bytes, max) {
            Read::Chunk(Chunk { offset, .. }) => Read::Chunk(Chunk { offset, bytes: bytes.freeze() }),
            other => other,
        }
    }

    /// Like `read`, but appends to a buffer (for example after a frame's header). The returned chunk has the offset and
    /// no bytes.
    pub fn read_into(&mut self, into: &mut BytesMut, max: usize) -> Read {
        let mut state = self.log.lock();
        let ReaderSlot { position, hides, next_size, .. } = *state.readers.slot(self.id);
        let base = state.base();
        if position < base {
            state.readers.slot(self.id).position = base;
            return self.moved(state, Read::Gap { from: position, to: base });
        }
        let end = state.stretch_end(position);
        // Output after a resize is not returned together with output from before it.
        let end = state.annotations.next_size(next_size).map_or(end, |(size, _)| end.min(size.offset));
        let end = state.annotations.visible_to(end, hides).min(position.saturating_add(max as u64));
        if end <= position {
            let is_over = state.is_finished && position == state.head();
            return if is_over { Read::End } else { Read::Pending };
        }
        let before = into.len();
        if !state.copy(position, into, (end - position) as usize) {
            // The spool can no longer be read: from now on there is only the ring.
            let to = state.base();
            state.readers.slot(self.id).position = to;
            return self.moved(state, Read::Gap { from: position, to });
        }
        if !hides.is_empty() {
            state.annotations.blank_hidden(position, &mut into[before..], hides);
        }
        state.readers.slot(self.id).position = end;
        self.moved(state, Read::Chunk(Chunk { offset: position, bytes: Bytes::new() }))
    }

    fn moved(&self, mut state: MutexGuard<'_, State>, read: Read) -> Read {
        state.release();
        state.unlock_and_wake(false);
        read
    }

    /// A new size that applies from this reader's position on. To be called before each read; a read stops before the
    /// next resize.
    pub fn next_size(&mut self) -> Option<Resize> {
        let mut state = self.log.lock();
        let ReaderSlot { position, next_size, .. } = *state.readers.slot(self.id);
        let (size, after) = state.annotations.next_size(next_size).filter(|(size, _)| size.offset <= position)?;
        state.readers.slot(self.id).next_size = after;
        Some(size)
    }

    /// Resolves when there is a new size, or when a read would return something other than [`Read::Pending`]. Cancel
    /// safe: it may be dropped and called again at any time.
    pub fn wait(&mut self) -> Wait<'_> {
        Wait(self)
    }

    /// Whether the next read is from the spool and may take as long as a disk access.
    pub fn reads_from_spool(&self) -> bool {
        let mut state = self.log.lock();
        let position = state.readers.slot(self.id).position;
        state.is_spooled(position)
    }

    pub fn position(&self) -> u64 {
        self.log.lock().readers.slot(self.id).position
    }

    /// Continues at another offset.
    pub fn seek(&mut self, offset: u64) {
        let mut state = self.log.lock();
        let to = offset.min(state.head());
        let next_size = state.annotations.sizes_until(to);
        let slot = state.readers.slot(self.id);
        (slot.position, slot.next_size) = (to, next_size);
        state.unlock_and_wake(false);
    }

    /// Records that this reader's client has everything before an offset. The log releases it, and from then on waits
    /// for this client's acknowledgements.
    pub fn acknowledge(&mut self, offset: u64) {
        let mut state = self.log.lock();
        let slot = state.readers.slot(self.id);
        // A client can't have more than it was given.
        let offset = offset.min(slot.position);
        if offset > slot.acknowledged {
            slot.largest_step = slot.largest_step.max(offset - slot.acknowledged);
            slot.acknowledged = offset;
            slot.acknowledges = true;
        }
        state.acknowledge(offset);
        state.unlock_and_wake(false);
    }

    /// Stops waiting for acknowledgements of a slow client: until it acknowledges again, the writer waits only for what
    /// it has yet to read.
    pub fn stop_expecting_acknowledgements(&mut self) {
        let mut state = self.log.lock();
        state.readers.slot(self.id).acknowledges = false;
        state.unlock_and_wake(false);
    }

    /// Sets whether the writer waits for this reader, in a log whose writer waits at all. It shouldn't wait for a
    /// reader that makes no progress.
    pub fn set_backpressure(&mut self, has_backpressure: bool) {
        let mut state = self.log.lock();
        state.readers.slot(self.id).has_backpressure = has_backpressure;
        state.unlock_and_wake(false);
    }

    /// Sets the kinds of sequences that this reader must not get.
    pub fn set_hidden(&mut self, kinds: SequenceKinds) {
        self.log.lock().readers.slot(self.id).hides = kinds;
    }

    pub fn set_wake_priority(&mut self, wake_priority: WakePriority) {
        self.log.lock().readers.slot(self.id).wake_priority = wake_priority;
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = self.log.lock();
        state.readers.detach(self.id);
        state.release();
        state.unlock_and_wake(false);
    }
}

/// See [`Reader::wait`].
#[must_use = "futures do nothing unless awaited"]
pub struct Wait<'a>(&'a mut Reader);

impl Future for Wait<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        // The check and the registration happen under one lock, which a writer takes too, so no wake-up is lost between
        // them.
        let mut state = self.0.log.lock();
        let ReaderSlot { position, hides, next_size, .. } = *state.readers.slot(self.0.id);
        let has_size = state.annotations.next_size(next_size).is_some_and(|(size, _)| size.offset <= position);
        if has_size || position < state.base() || state.is_finished || state.annotations.visible_to(state.head(), hides) > position {
            return Poll::Ready(());
        }
        state.readers.wait(self.0.id, context.waker());
        Poll::Pending
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.0.log.lock().readers.stop_waiting(self.0.id);
    }
}
