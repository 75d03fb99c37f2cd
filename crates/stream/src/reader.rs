//! A reader: a position in a log. It costs the log nothing but that, however slow it is.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Bytes, BytesMut};

use crate::{
    Kinds, Urgency,
    log::{Log, State, UnlockAndWake},
    notes::Resize,
    sync::MutexGuard,
    waiting::Slot,
};

/// What a read gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    Chunk(Chunk),
    /// These are no longer kept; the next read goes on at `to`.
    Gap {
        from: u64,
        to: u64,
    },
    /// Everything was read and nothing more comes.
    End,
    /// Nothing now; [`Reader::wait`] says when to look again.
    Pending,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub offset: u64,
    pub bytes: Bytes,
}

/// Attached for as long as it lives.
pub struct Reader {
    log: Log,
    id: usize,
}

impl Reader {
    pub(crate) fn new(log: Log, id: usize) -> Self {
        Self { log, id }
    }

    /// The next bytes, at most `max`.
    pub fn read(&mut self, max: usize) -> Read {
        let mut bytes = BytesMut::new();
        match self.read_into(&mut bytes, max) {
            Read::Chunk(Chunk { offset, .. }) => Read::Chunk(Chunk { offset, bytes: bytes.freeze() }),
            other => other,
        }
    }

    /// The same, behind what a buffer holds already (a frame's header). The chunk that is returned has the offset and no bytes.
    pub fn read_into(&mut self, into: &mut BytesMut, max: usize) -> Read {
        let mut state = self.log.lock();
        let Slot { position, hides, next_size, .. } = *state.readers.slot(self.id);
        let base = state.base();
        if position < base {
            state.readers.slot(self.id).position = base;
            return self.moved(state, Read::Gap { from: position, to: base });
        }
        let end = state.stretch_end(position);
        // What follows a new size is not given with what came before it.
        let end = state.notes.next_size(next_size).map_or(end, |(size, _)| end.min(size.offset));
        let end = state.notes.visible_to(end, hides).min(position.saturating_add(max as u64));
        if end <= position {
            let is_over = state.is_finished && position == state.head();
            return if is_over { Read::End } else { Read::Pending };
        }
        let before = into.len();
        if !state.copy(position, into, (end - position) as usize) {
            // The spool can't be read any more: from now on the ring is all there is.
            let to = state.base();
            state.readers.slot(self.id).position = to;
            return self.moved(state, Read::Gap { from: position, to });
        }
        if !hides.is_empty() {
            state.notes.cover(position, &mut into[before..], hides);
        }
        state.readers.slot(self.id).position = end;
        self.moved(state, Read::Chunk(Chunk { offset: position, bytes: Bytes::new() }))
    }

    fn moved(&self, mut state: MutexGuard<'_, State>, read: Read) -> Read {
        state.release();
        state.unlock_and_wake(false);
        read
    }

    /// A new size that holds from this reader's position on; to be asked for before each read, which stops short of it.
    pub fn next_size(&mut self) -> Option<Resize> {
        let mut state = self.log.lock();
        let Slot { position, next_size, .. } = *state.readers.slot(self.id);
        let (size, after) = state.notes.next_size(next_size).filter(|(size, _)| size.offset <= position)?;
        state.readers.slot(self.id).next_size = after;
        Some(size)
    }

    /// Resolves when there is a new size, or when a read would give something else than [`Read::Pending`]. May be dropped and called again at any time.
    pub fn wait(&mut self) -> Wait<'_> {
        Wait(self)
    }

    /// Whether the next read is from the spool, and may take as long as a disk does.
    pub fn is_behind_the_ring(&self) -> bool {
        let mut state = self.log.lock();
        let position = state.readers.slot(self.id).position;
        state.is_spooled(position)
    }

    pub fn position(&self) -> u64 {
        self.log.lock().readers.slot(self.id).position
    }

    /// Goes on at another offset.
    pub fn seek(&mut self, offset: u64) {
        let mut state = self.log.lock();
        let to = offset.min(state.head());
        let next_size = state.notes.sizes_until(to);
        let slot = state.readers.slot(self.id);
        (slot.position, slot.next_size) = (to, next_size);
        state.unlock_and_wake(false);
    }

    /// This reader's client has everything before an offset. The log lets go of it, and waits for this client from there on.
    pub fn acknowledge(&mut self, offset: u64) {
        let mut state = self.log.lock();
        let slot = state.readers.slot(self.id);
        // A client can't have what it was not given.
        let offset = offset.min(slot.position);
        if offset > slot.acknowledged {
            slot.largest_step = slot.largest_step.max(offset - slot.acknowledged);
            slot.acknowledged = offset;
            slot.acknowledges = true;
        }
        state.acknowledge(offset);
        state.unlock_and_wake(false);
    }

    /// This reader's client has been slow to acknowledge: until it does again, the writer waits only for what it has yet to read.
    pub fn stop_expecting_acknowledgements(&mut self) {
        let mut state = self.log.lock();
        state.readers.slot(self.id).acknowledges = false;
        state.unlock_and_wake(false);
    }

    /// Whether the writer waits for this reader, where it waits at all. One that makes no progress shouldn't be waited for.
    pub fn set_holding(&mut self, is_holding: bool) {
        let mut state = self.log.lock();
        state.readers.slot(self.id).is_holding = is_holding;
        state.unlock_and_wake(false);
    }

    /// What this reader must not get.
    pub fn set_hidden(&mut self, kinds: Kinds) {
        self.log.lock().readers.slot(self.id).hides = kinds;
    }

    pub fn set_urgency(&mut self, urgency: Urgency) {
        self.log.lock().readers.slot(self.id).urgency = urgency;
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
        // The look and the registration are under one lock, which a writer takes too: no wake-up falls between them.
        let mut state = self.0.log.lock();
        let Slot { position, hides, next_size, .. } = *state.readers.slot(self.0.id);
        let has_size = state.notes.next_size(next_size).is_some_and(|(size, _)| size.offset <= position);
        if has_size || position < state.base() || state.is_finished || state.notes.visible_to(state.head(), hides) > position {
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
