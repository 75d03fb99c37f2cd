//! Annotations of a log: the terminal's sizes, and which spans of its output some viewers must not get.

use std::collections::VecDeque;

/// A set of kinds of sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceKinds(u8);

impl SequenceKinds {
    pub const NONE: Self = Self(0);
    /// Queries the viewer's terminal, which would type its answer into the shell.
    pub const QUERY: Self = Self(1);
    /// Reads or writes data of the viewer's machine: the clipboard, or programmed keys.
    pub const CLIPBOARD: Self = Self(2);
    /// Changes the viewer's window: its title, size or position.
    pub const TITLE: Self = Self(4);
    /// A mark that the shell sends to boxd; no viewer gets it.
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
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// A span of the output with its kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub from: u64,
    pub to: u64,
    pub kinds: SequenceKinds,
}

/// Maximum number of spans kept per log. Older spans are hidden from all viewers for good: an old query is of no use,
/// and a shell that sends marks around each of a thousand commands must not fill the memory.
const MAX_SPANS: usize = 2048;

/// Maximum number of sizes kept per log: a user who drags a window's corner creates dozens.
const MAX_SIZES: usize = 64;

/// The terminal's size from an offset on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resize {
    pub offset: u64,
    pub cols: u16,
    pub rows: u16,
}

#[derive(Default)]
pub(crate) struct Annotations {
    sizes: VecDeque<Resize>,
    /// Number of sizes that were dropped before the first one in `sizes`.
    sizes_gone: u64,
    spans: VecDeque<Span>,
    /// Offset of a sequence whose kind isn't known yet. Viewers that must not get some kinds wait there.
    undecided: Option<u64>,
}

impl Annotations {
    /// Returns the spans that exceed the limit. They must be blanked in the ring.
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

    /// The number of the first size that a reader at an offset has yet to get.
    pub fn sizes_until(&self, offset: u64) -> u64 {
        self.sizes_gone + self.sizes.partition_point(|size| size.offset <= offset) as u64
    }

    pub fn size_at(&self, offset: u64) -> Option<Resize> {
        self.sizes.iter().rev().find(|size| size.offset <= offset).or(self.sizes.front()).copied()
    }

    /// The size with this number, or the first after it if it was dropped, and the number of the next one.
    pub fn next_size(&self, number: u64) -> Option<(Resize, u64)> {
        let number = number.max(self.sizes_gone);
        self.sizes.get((number - self.sizes_gone) as usize).map(|size| (*size, number + 1))
    }

    /// Ends the output: a sequence that is still undecided stays hidden.
    pub fn finish(&mut self, head: u64) {
        if let Some(from) = self.undecided.take() {
            // May exceed the limit by one, which does no harm: it is the last span.
            self.spans.push_back(Span { from, to: head, kinds: SequenceKinds::ALL });
        }
    }

    pub fn forget(&mut self, before: u64) {
        while self.spans.front().is_some_and(|span| span.to <= before) {
            self.spans.pop_front();
        }
    }

    /// How far a viewer that must not get these kinds may read.
    pub fn visible_to(&self, head: u64, hides: SequenceKinds) -> u64 {
        match self.undecided {
            Some(from) if !hides.is_empty() => head.min(from),
            _ => head,
        }
    }

    /// Replaces what is hidden with NULs, which terminals ignore, so that every offset stays the same.
    pub fn blank_hidden(&self, at: u64, bytes: &mut [u8], hides: SequenceKinds) {
        let end = at + bytes.len() as u64;
        let first = self.spans.partition_point(|span| span.to <= at);
        for span in self.spans.range(first..).take_while(|span| span.from < end).filter(|span| span.kinds.intersects(hides)) {
            let (from, to) = (span.from.max(at) - at, span.to.min(end) - at);
            bytes[from as usize..to as usize].fill(0);
        }
    }
}
