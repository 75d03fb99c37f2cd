//! The readers of a log and the order in which they are woken. Wakers are collected while the log is locked and woken
//! after it is unlocked.

use std::task::Waker;

/// Decides which of several waiting readers is woken first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WakePriority {
    /// The reader of a user who types and waits for the echo.
    Interactive,
    #[default]
    Background,
}

/// Wakers taken while the log is locked, to be woken after it is unlocked: a waker runs code of others.
#[derive(Default)]
#[must_use]
pub(crate) struct WakeList {
    interactive: Vec<Waker>,
    background: Vec<Waker>,
}

impl WakeList {
    pub fn push(&mut self, waker: Waker, wake_priority: WakePriority) {
        match wake_priority {
            WakePriority::Interactive => self.interactive.push(waker),
            WakePriority::Background => self.background.push(waker),
        }
    }

    pub fn wake(self) {
        for waker in self.interactive.into_iter().chain(self.background) {
            waker.wake();
        }
    }
}

/// The attached readers: a few in an exec, some hundred in a shell.
#[derive(Default)]
pub(crate) struct Readers {
    slots: Vec<Option<ReaderSlot>>,
    /// Indexes of the slots with a waker, so that an append doesn't have to check the others.
    waiting: Vec<usize>,
}

pub(crate) struct ReaderSlot {
    pub position: u64,
    /// The last offset that this reader's client has acknowledged, or where it began.
    pub acknowledged: u64,
    pub acknowledges: bool,
    /// The largest step between two acknowledgements so far.
    pub largest_step: u64,
    pub has_backpressure: bool,
    /// Number of the next size that this reader gets.
    pub next_size: u64,
    pub hides: crate::SequenceKinds,
    pub wake_priority: WakePriority,
    waker: Option<Waker>,
    is_listed: bool,
}

impl Readers {
    pub fn attach(&mut self, position: u64, next_size: u64) -> usize {
        let slot = ReaderSlot {
            position,
            acknowledged: position,
            acknowledges: false,
            largest_step: 0,
            has_backpressure: true,
            next_size,
            hides: crate::SequenceKinds::NONE,
            wake_priority: WakePriority::default(),
            waker: None,
            is_listed: false,
        };
        match self.slots.iter().position(Option::is_none) {
            Some(free) => {
                self.slots[free] = Some(slot);
                free
            }
            None => {
                self.slots.push(Some(slot));
                self.slots.len() - 1
            }
        }
    }

    pub fn detach(&mut self, id: usize) {
        self.waiting.retain(|waiting| *waiting != id);
        if let Some(slot) = self.slots.get_mut(id) {
            *slot = None;
        }
    }

    /// An attached reader's slot, which exists as long as its [`crate::Reader`].
    pub fn slot(&mut self, id: usize) -> &mut ReaderSlot {
        self.slots[id].as_mut().expect("a slot exists as long as its reader")
    }

    pub fn iter(&self) -> impl Iterator<Item = &ReaderSlot> {
        self.slots.iter().flatten()
    }

    pub fn wait(&mut self, id: usize, waker: &Waker) {
        let slot = self.slot(id);
        match &mut slot.waker {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        if !std::mem::replace(&mut slot.is_listed, true) {
            self.waiting.push(id);
        }
    }

    /// Called when a wait is dropped. The slot's index leaves the list with the next wake-up.
    pub fn stop_waiting(&mut self, id: usize) {
        self.slot(id).waker = None;
    }

    /// Takes the wakers of all interactive readers, and at most `max_background` of the others.
    pub fn take_waiting(&mut self, max_background: usize) -> WakeList {
        let mut wakes = WakeList::default();
        let slots = &mut self.slots;
        self.waiting.retain(|id| {
            let Some(slot) = slots[*id].as_mut() else { return false };
            if slot.wake_priority == WakePriority::Background && slot.waker.is_some() && wakes.background.len() == max_background {
                return true;
            }
            slot.is_listed = false;
            if let Some(waker) = slot.waker.take() {
                wakes.push(waker, slot.wake_priority);
            }
            false
        });
        wakes
    }

    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }
}
