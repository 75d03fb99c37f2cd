//! What is known about stretches of a terminal's output: which of them some viewers must not get.

use std::collections::VecDeque;

/// Kinds of sequences, as a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds(u8);

impl Kinds {
    pub const NONE: Self = Self(0);
    /// Asks the viewer's terminal something, which it would answer into the shell's input.
    pub const QUERY: Self = Self(1);
    /// Reads or writes what the viewer's machine holds: the clipboard, or programmed keys.
    pub const CLIPBOARD: Self = Self(2);
    /// Changes the viewer's window: its title, its size, its place.
    pub const TITLE: Self = Self(4);
    /// A word from the shell to us; no viewer gets it.
    pub const MARK: Self = Self(8);
    /// Acts on the viewer's machine: prints, shows a notification, reads or writes a file. No viewer can allow it.
    pub const HOST: Self = Self(16);
    pub const ALL: Self = Self(31);

    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// A stretch of output of these kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub from: u64,
    pub to: u64,
    pub kinds: Kinds,
}

/// Spans kept for one log. Beyond them the oldest are hidden from everybody for good: nobody is helped by an old question, and a shell
/// that says something to us before and after each of a thousand commands must not cost a thousand notes.
const MAX_SPANS: usize = 2048;

/// Sizes kept for one log: somebody who drags a window's corner makes dozens.
const MAX_SIZES: usize = 64;

/// From an offset on a terminal had this size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resize {
    pub offset: u64,
    pub cols: u16,
    pub rows: u16,
}

#[derive(Default)]
pub(crate) struct Notes {
    sizes: VecDeque<Resize>,
    /// How many sizes there were before those.
    sizes_gone: u64,
    spans: VecDeque<Span>,
    /// Where a sequence begins that nobody can name yet: viewers who might not get it wait there.
    undecided: Option<u64>,
}

impl Notes {
    /// Gives the spans there is no more room for: they are to be covered where they are kept.
    #[must_use]
    pub fn add(&mut self, spans: &[Span], undecided: Option<u64>) -> Vec<Span> {
        for span in spans {
            match self.spans.back_mut() {
                Some(last) if last.kinds == span.kinds && last.to >= span.from => last.to = last.to.max(span.to),
                _ => self.spans.push_back(*span),
            }
        }
        self.undecided = undecided;
        self.spans.drain(..self.spans.len().saturating_sub(MAX_SPANS)).collect()
    }

    pub fn resize(&mut self, resize: Resize) {
        if self.sizes.len() >= MAX_SIZES {
            self.sizes.pop_front();
            self.sizes_gone += 1;
        }
        self.sizes.push_back(resize);
    }

    /// The number of the first size that somebody at an offset has not been told with it.
    pub fn sizes_until(&self, offset: u64) -> u64 {
        self.sizes_gone + self.sizes.partition_point(|size| size.offset <= offset) as u64
    }

    pub fn size_at(&self, offset: u64) -> Option<Resize> {
        self.sizes.iter().rev().find(|size| size.offset <= offset).or(self.sizes.front()).copied()
    }

    /// The size with this number or, where it is gone, the first after it; and the number of the next.
    pub fn next_size(&self, number: u64) -> Option<(Resize, u64)> {
        let number = number.max(self.sizes_gone);
        self.sizes.get((number - self.sizes_gone) as usize).map(|size| (*size, number + 1))
    }

    /// Nothing more comes: what is still undecided stays hidden.
    pub fn finish(&mut self, head: u64) {
        if let Some(from) = self.undecided.take() {
            // One more than there is room for does no harm: it is the last.
            self.spans.push_back(Span { from, to: head, kinds: Kinds::ALL });
        }
    }

    pub fn forget(&mut self, before: u64) {
        while self.spans.front().is_some_and(|span| span.to <= before) {
            self.spans.pop_front();
        }
    }

    /// How far a viewer may read that mustn't get these kinds.
    pub fn visible_to(&self, head: u64, hides: Kinds) -> u64 {
        match self.undecided {
            Some(from) if !hides.is_empty() => head.min(from),
            _ => head,
        }
    }

    /// Puts NULs, which terminals ignore, over what is hidden, so that every offset stays what it was.
    pub fn cover(&self, at: u64, bytes: &mut [u8], hides: Kinds) {
        let end = at + bytes.len() as u64;
        let first = self.spans.partition_point(|span| span.to <= at);
        for span in self.spans.range(first..).take_while(|span| span.from < end).filter(|span| span.kinds.meets(hides)) {
            let (from, to) = (span.from.max(at) - at, span.to.min(end) - at);
            bytes[from as usize..to as usize].fill(0);
        }
    }
}
