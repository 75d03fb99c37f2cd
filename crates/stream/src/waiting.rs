//! Who waits for the log, and in which order they are woken: kept under the log's lock, woken after it is released.

use std::task::Waker;

/// Which of several waiting readers is woken first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Urgency {
    /// Somebody types and waits for the echo.
    First,
    #[default]
    Later,
}

/// Wakers taken out under the lock, to be woken without it: a waker runs somebody else's code.
#[derive(Default)]
#[must_use]
pub(crate) struct Wakes {
    first: Vec<Waker>,
    later: Vec<Waker>,
}

impl Wakes {
    pub fn push(&mut self, waker: Waker, urgency: Urgency) {
        match urgency {
            Urgency::First => self.first.push(waker),
            Urgency::Later => self.later.push(waker),
        }
    }

    pub fn wake(self) {
        for waker in self.first.into_iter().chain(self.later) {
            waker.wake();
        }
    }
}

/// The attached readers. Few in an exec, a few hundred in a shell.
#[derive(Default)]
pub(crate) struct Readers {
    slots: Vec<Option<Slot>>,
    /// Numbers of slots with a waker, so that an append doesn't look at those without.
    waiting: Vec<usize>,
}

pub(crate) struct Slot {
    pub position: u64,
    /// What this reader's client has said to have, or where it began.
    pub acknowledged: u64,
    pub acknowledges: bool,
    /// The largest step between two acknowledgements.
    pub largest_step: u64,
    pub is_holding: bool,
    /// Number of the next size it is to be told.
    pub next_size: u64,
    pub hides: crate::Kinds,
    pub urgency: Urgency,
    waker: Option<Waker>,
    is_listed: bool,
}

impl Readers {
    pub fn attach(&mut self, position: u64, next_size: u64) -> usize {
        let slot = Slot {
            position,
            acknowledged: position,
            acknowledges: false,
            largest_step: 0,
            is_holding: true,
            next_size,
            hides: crate::Kinds::NONE,
            urgency: Urgency::default(),
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

    /// An attached reader's slot: it exists for as long as its [`crate::Reader`] does.
    pub fn slot(&mut self, id: usize) -> &mut Slot {
        self.slots[id].as_mut().expect("a reader's slot lives as long as the reader")
    }

    pub fn iter(&self) -> impl Iterator<Item = &Slot> {
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

    /// Whoever waited has gone away; its place in the list is taken out with the next wake.
    pub fn stop_waiting(&mut self, id: usize) {
        self.slot(id).waker = None;
    }

    /// Whoever is first, and at most so many of the others.
    pub fn take_waiting(&mut self, most_later: usize) -> Wakes {
        let mut wakes = Wakes::default();
        let slots = &mut self.slots;
        self.waiting.retain(|id| {
            let Some(slot) = slots[*id].as_mut() else { return false };
            if slot.urgency == Urgency::Later && slot.waker.is_some() && wakes.later.len() == most_later {
                return true;
            }
            slot.is_listed = false;
            if let Some(waker) = slot.waker.take() {
                wakes.push(waker, slot.urgency);
            }
            false
        });
        wakes
    }

    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }
}
