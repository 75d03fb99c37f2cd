//! A terminal's screen beside its log, for viewers who come too late for the bytes that made it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;

use crate::{
    cover,
    keyframe::{self, Extras},
    notes::Kinds,
    scan::{Class, Found, Inside},
};

/// Largest terminal, in either direction.
pub const MAX_SIDE: u16 = 1000;
/// Largest that is drawn: a 4K display in the smallest readable letters. It takes 4 MiB, and as much again for the alternate screen; viewers
/// of a larger one get an empty keyframe.
const MAX_CELLS: u32 = 128 * 1024;
/// Smallest emulated: a wide character must fit into a row.
const MIN_SIDE: u16 = 2;
/// A string longer than this is not given again from its start: it may no longer be kept.
const MAX_STRING_AGAIN_BYTES: u64 = 4096;
/// What fits into a frame in base64. Only a screen of many hundred columns with a colour of its own in every cell is larger; its viewer
/// gets an empty one, and what is drawn from then on.
const MAX_KEYFRAME_BYTES: usize = 704 * 1024;
/// Ends a sequence and shows nothing.
const CANCEL: u8 = 0x18;
/// Output that breaks the emulator so often is made to; then there is an empty screen.
const MAX_PANICS: u32 = 3;

/// A screen as bytes that make a terminal show it. What follows in the log is at `offset`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keyframe {
    pub offset: u64,
    pub cols: u16,
    pub rows: u16,
    pub ansi: Bytes,
}

pub struct Screen {
    cols: u16,
    rows: u16,
    emulator: Option<vt100::Parser<Extras>>,
    panics: u32,
    /// Everything before this has been taken.
    at: u64,
    /// From a sequence or character whose rest has not come yet, and where it begins.
    pending: Vec<u8>,
    pending_from: u64,
    inside: Option<Inside>,
}

impl Screen {
    pub fn new(cols: u16, rows: u16) -> Self {
        let (cols, rows) = (cols.clamp(1, MAX_SIDE), rows.clamp(1, MAX_SIDE));
        let emulator = emulator(cols, rows);
        Self { cols, rows, emulator, panics: 0, at: 0, pending: Vec::new(), pending_from: 0, inside: None }
    }

    pub fn size(&self) -> (u16, u16) {
        (self.cols, self.rows)
    }

    /// Whether a program wants pasted text to be marked as such.
    pub fn wants_marked_pastes(&self) -> bool {
        self.emulator.as_ref().is_some_and(|parser| parser.screen().bracketed_paste())
    }

    pub fn is_alternate(&self) -> bool {
        self.emulator.as_ref().is_some_and(|parser| parser.screen().alternate_screen())
    }

    /// Row and column, from 0.
    pub fn cursor(&self) -> (u16, u16) {
        self.emulator.as_ref().map_or((0, 0), |parser| parser.screen().cursor_position())
    }

    pub fn hides_cursor(&self) -> bool {
        self.emulator.as_ref().is_some_and(|parser| parser.screen().hide_cursor())
    }

    /// Whether a terminal that has got all of this is between two sequences, so that others may be sent to it.
    pub fn is_between_sequences(&self) -> bool {
        self.pending.is_empty() && self.inside.is_none()
    }

    /// What lays words over a row of a terminal that shows this screen. They must fit, and have no controls in them.
    pub fn cover(&self, row: u16, words: &str) -> Vec<u8> {
        self.drawn(|parser| cover::cover(parser, row, words))
    }

    /// What shows the row again.
    pub fn uncover(&self, row: u16) -> Vec<u8> {
        self.drawn(|parser| cover::uncover(parser, row))
    }

    /// Each row up to a width, to be drawn from its first column on a row that is empty.
    pub fn rows(&self, width: u16) -> Vec<Vec<u8>> {
        self.emulator
            .as_ref()
            .and_then(|parser| catch_unwind(AssertUnwindSafe(|| cover::rows(parser, width).collect())).ok())
            .unwrap_or_default()
    }

    /// What makes a terminal that has got everything show it anew, whatever has happened to it meanwhile.
    pub fn redraw(&self) -> Vec<u8> {
        let mut out = self.keyframe(Kinds::NONE).ansi.to_vec();
        match self.inside {
            // In the middle of a string, whose beginning may be gone: the rest must not be taken for text.
            Some(inside) if self.at - inside.from <= MAX_STRING_AGAIN_BYTES => out.extend_from_slice(opening(inside.class)),
            Some(_) => {}
            None => out.extend_from_slice(&self.pending),
        }
        out
    }

    fn drawn(&self, draw: impl FnOnce(&vt100::Parser<Extras>) -> Vec<u8>) -> Vec<u8> {
        let drawn = self.emulator.as_ref().and_then(|parser| catch_unwind(AssertUnwindSafe(|| draw(parser))).ok());
        drawn.unwrap_or_default()
    }

    pub fn resize(&mut self, cols: u16, rows: u16) {
        (self.cols, self.rows) = (cols.clamp(1, MAX_SIDE), rows.clamp(1, MAX_SIDE));
        let (cols, rows) = (self.cols.max(MIN_SIDE), self.rows.max(MIN_SIDE));
        if u32::from(cols) * u32::from(rows) > MAX_CELLS {
            self.emulator = None;
        } else if self.emulator.is_none() && self.panics < MAX_PANICS {
            self.emulator = emulator(cols, rows);
        }
        self.guarded(|emulator| emulator.screen_mut().set_size(rows, cols));
    }

    /// Takes the next piece of output and what the scanner found in it. The emulator gets whole sequences only, so that it is always
    /// between two, and never a string, which would change nothing and could be of any length.
    pub fn feed(&mut self, bytes: &[u8], found: &Found) {
        let mut joined = std::mem::take(&mut self.pending);
        let whole: &[u8] = if joined.is_empty() {
            bytes
        } else {
            joined.extend_from_slice(bytes);
            &joined
        };
        let start = self.at + bytes.len() as u64 - whole.len() as u64;
        self.at += bytes.len() as u64;

        let ground = found.ground.clamp(start, self.at);
        let mut next = start;
        for (from, to) in &found.strings {
            self.process(whole, start, next, (*from).clamp(next, ground.max(next)));
            next = (*to).max(next);
            // It also cuts short what came before it.
            self.guarded(|emulator| emulator.process(&[CANCEL]));
        }
        let ready = ground - incomplete_character(&whole[..(ground - start) as usize]) as u64;
        self.process(whole, start, next, ready.max(next));
        // What a string under way has brought is let go of: it can be read again from the log, or not at all.
        let rest = next.max(ready).min(self.at);
        self.pending = whole[(rest - start) as usize..].to_vec();
        self.pending_from = rest;
        self.inside = found.inside;
    }

    fn process(&mut self, whole: &[u8], start: u64, from: u64, to: u64) {
        if from < to {
            let piece = &whole[(from - start) as usize..(to - start) as usize];
            self.guarded(|emulator| emulator.process(piece));
        }
    }

    /// The emulator reads whatever a program prints; a fault in it costs the screen, not the shell.
    fn guarded(&mut self, work: impl FnOnce(&mut vt100::Parser<Extras>)) {
        let Some(parser) = &mut self.emulator else { return };
        if catch_unwind(AssertUnwindSafe(|| work(parser))).is_err() {
            self.panics += 1;
            self.emulator = if self.panics < MAX_PANICS { emulator(self.cols, self.rows) } else { None };
        }
    }

    /// For a viewer that mustn't get these kinds.
    pub fn keyframe(&self, hides: Kinds) -> Keyframe {
        let drawn = Some(self.drawn(keyframe::draw)).filter(|ansi| !ansi.is_empty() && ansi.len() <= MAX_KEYFRAME_BYTES);
        let mut ansi = drawn.unwrap_or_else(|| keyframe::CLEARED.to_vec());
        let mut offset = self.pending_from;
        if let Some(inside) = self.inside {
            offset = inside.from;
            if self.at - inside.from > MAX_STRING_AGAIN_BYTES {
                // In the middle of it. Who gets it must be told that what follows is no text; who doesn't gets nothing of it.
                offset = self.pending_from;
                if !inside.kinds.meets(hides) {
                    ansi.extend_from_slice(opening(inside.class));
                }
            }
        }
        Keyframe { offset, cols: self.cols, rows: self.rows, ansi: ansi.into() }
    }
}

fn emulator(cols: u16, rows: u16) -> Option<vt100::Parser<Extras>> {
    let (cols, rows) = (cols.max(MIN_SIDE), rows.max(MIN_SIDE));
    (u32::from(cols) * u32::from(rows) <= MAX_CELLS).then(|| vt100::Parser::new_with_callbacks(rows, cols, 0, Extras::default()))
}

/// What begins a string of the kind that no terminal does anything with.
fn opening(class: Class) -> &'static [u8] {
    match class {
        Class::Osc => b"\x1b]9999;",
        Class::Other => b"\x1b_",
        Class::Csi => b"\x1b[ 0",
        Class::OldTitle => b"",
    }
}

/// Bytes at the end that begin a character and don't finish it.
fn incomplete_character(bytes: &[u8]) -> usize {
    let tail = &bytes[bytes.len().saturating_sub(3)..];
    (1..=tail.len())
        .find(|n| tail[tail.len() - n] & 0xc0 == 0xc0)
        .filter(|n| std::str::from_utf8(&tail[tail.len() - n..]).is_err_and(|e| e.error_len().is_none()))
        .unwrap_or(0)
}
