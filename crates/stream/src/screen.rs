//! A terminal's screen beside its log, for viewers that join too late for the bytes that drew it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;

use crate::{
    annotations::SequenceKinds,
    keyframe::{self, UntrackedModes},
    overlay,
    scanner::{OpenString, ScanResult, StringClass},
};

/// Maximum number of columns and of rows.
pub const MAX_SIDE: u16 = 1000;
/// Maximum size of a screen that is emulated: a 4K display in the smallest readable font. It takes 4 MiB, and as much
/// again for the alternate screen. Viewers of a larger screen get an empty keyframe.
const MAX_CELLS: u32 = 128 * 1024;
/// Minimum size that is emulated: a wide character must fit into a row.
const MIN_SIDE: u16 = 2;
/// A string longer than this is not replayed from its start, which may no longer be kept.
const MAX_STRING_REPLAY_BYTES: u64 = 4096;
/// What fits into a frame in base64. Only a screen of many hundred columns with a different color in every cell is
/// larger; its viewer gets an empty keyframe and then the output from there on.
const MAX_KEYFRAME_BYTES: usize = 704 * 1024;
/// Ends a sequence without printing anything.
const CANCEL: u8 = 0x18;
/// After this many panics the emulator is given up: the output breaks it on purpose. The screen is then empty.
const MAX_PANICS: u32 = 3;

/// A screen as bytes that make a terminal show it. The output that follows begins at `offset` of the log.
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
    emulator: Option<vt100::Parser<UntrackedModes>>,
    panics: u32,
    /// Offset of the next byte to be fed.
    at: u64,
    /// The beginning of a sequence or character whose rest has not arrived yet, and its offset.
    pending: Vec<u8>,
    pending_from: u64,
    open_string: Option<OpenString>,
}

impl Screen {
    pub fn new(cols: u16, rows: u16) -> Self {
        let (cols, rows) = (cols.clamp(1, MAX_SIDE), rows.clamp(1, MAX_SIDE));
        let emulator = emulator(cols, rows);
        Self { cols, rows, emulator, panics: 0, at: 0, pending: Vec::new(), pending_from: 0, open_string: None }
    }

    pub fn size(&self) -> (u16, u16) {
        (self.cols, self.rows)
    }

    /// Whether a program has enabled bracketed paste.
    pub fn wants_bracketed_paste(&self) -> bool {
        self.emulator.as_ref().is_some_and(|parser| parser.screen().bracketed_paste())
    }

    pub fn is_alternate(&self) -> bool {
        self.emulator.as_ref().is_some_and(|parser| parser.screen().alternate_screen())
    }

    /// Row and column, counted from 0.
    pub fn cursor(&self) -> (u16, u16) {
        self.emulator.as_ref().map_or((0, 0), |parser| parser.screen().cursor_position())
    }

    pub fn hides_cursor(&self) -> bool {
        self.emulator.as_ref().is_some_and(|parser| parser.screen().hide_cursor())
    }

    /// Whether a terminal that has received everything so far is between two sequences, so that other sequences may be
    /// sent to it.
    pub fn is_between_sequences(&self) -> bool {
        self.pending.is_empty() && self.open_string.is_none()
    }

    /// Bytes that overlay text on a row of a terminal that shows this screen. The text must fit and contain no
    /// controls.
    pub fn draw_overlay(&self, row: u16, text: &str) -> Vec<u8> {
        self.drawn(|parser| overlay::draw_overlay(parser, row, text))
    }

    /// Bytes that show the row again.
    pub fn restore_row(&self, row: u16) -> Vec<u8> {
        self.drawn(|parser| overlay::restore_row(parser, row))
    }

    /// Each row up to a width, to be drawn from the first column of an empty row.
    pub fn rows(&self, width: u16) -> Vec<Vec<u8>> {
        self.emulator
            .as_ref()
            .and_then(|parser| catch_unwind(AssertUnwindSafe(|| overlay::rows(parser, width).collect())).ok())
            .unwrap_or_default()
    }

    /// Bytes that make a terminal that has received everything show the screen again, regardless of its current
    /// content.
    pub fn redraw(&self) -> Vec<u8> {
        let mut out = self.keyframe(SequenceKinds::NONE).ansi.to_vec();
        match self.open_string {
            // In the middle of a string whose beginning may no longer be kept: the rest must not be taken for text.
            Some(open_string) if self.at - open_string.from <= MAX_STRING_REPLAY_BYTES => out.extend_from_slice(opening(open_string.class)),
            Some(_) => {}
            None => out.extend_from_slice(&self.pending),
        }
        out
    }

    fn drawn(&self, draw: impl FnOnce(&vt100::Parser<UntrackedModes>) -> Vec<u8>) -> Vec<u8> {
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

    /// Takes the next chunk of output with the scanner's result. The emulator gets only complete sequences, so that it
    /// is always between two of them. It never gets strings, which would change nothing and could have any length.
    pub fn feed(&mut self, bytes: &[u8], found: &ScanResult) {
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
            // The emulator also needs the cancellation that a string causes to an unfinished sequence before it.
            self.guarded(|emulator| emulator.process(&[CANCEL]));
        }
        let ready = ground - incomplete_character(&whole[..(ground - start) as usize]) as u64;
        self.process(whole, start, next, ready.max(next));
        // The bytes of an unfinished string are dropped: they can be read again from the log, or not at all.
        let rest = next.max(ready).min(self.at);
        self.pending = whole[(rest - start) as usize..].to_vec();
        self.pending_from = rest;
        self.open_string = found.open_string;
    }

    fn process(&mut self, whole: &[u8], start: u64, from: u64, to: u64) {
        if from < to {
            let piece = &whole[(from - start) as usize..(to - start) as usize];
            self.guarded(|emulator| emulator.process(piece));
        }
    }

    /// The emulator parses output of arbitrary programs; a bug in it must cost only the screen, not the shell.
    fn guarded(&mut self, work: impl FnOnce(&mut vt100::Parser<UntrackedModes>)) {
        let Some(parser) = &mut self.emulator else { return };
        if catch_unwind(AssertUnwindSafe(|| work(parser))).is_err() {
            self.panics += 1;
            self.emulator = if self.panics < MAX_PANICS { emulator(self.cols, self.rows) } else { None };
        }
    }

    /// A keyframe for a viewer that must not get these kinds.
    pub fn keyframe(&self, hides: SequenceKinds) -> Keyframe {
        let drawn = Some(self.drawn(keyframe::draw)).filter(|ansi| !ansi.is_empty() && ansi.len() <= MAX_KEYFRAME_BYTES);
        let mut ansi = drawn.unwrap_or_else(|| keyframe::CLEARED.to_vec());
        let mut offset = self.pending_from;
        if let Some(open_string) = self.open_string {
            offset = open_string.from;
            if self.at - open_string.from > MAX_STRING_REPLAY_BYTES {
                // In the middle of a string. A viewer that gets the rest needs an opening, so that its terminal doesn't
                // print it as text. A viewer that doesn't get it sees only NULs.
                offset = self.pending_from;
                if !open_string.kinds.intersects(hides) {
                    ansi.extend_from_slice(opening(open_string.class));
                }
            }
        }
        Keyframe { offset, cols: self.cols, rows: self.rows, ansi: ansi.into() }
    }
}

fn emulator(cols: u16, rows: u16) -> Option<vt100::Parser<UntrackedModes>> {
    let (cols, rows) = (cols.max(MIN_SIDE), rows.max(MIN_SIDE));
    (u32::from(cols) * u32::from(rows) <= MAX_CELLS).then(|| vt100::Parser::new_with_callbacks(rows, cols, 0, UntrackedModes::default()))
}

/// The beginning of a string of this class that terminals ignore.
fn opening(class: StringClass) -> &'static [u8] {
    match class {
        StringClass::Osc => b"\x1b]9999;",
        StringClass::Other => b"\x1b_",
        StringClass::Csi => b"\x1b[ 0",
        StringClass::ScreenTitle => b"",
    }
}

/// Number of bytes at the end that begin a character without completing it.
fn incomplete_character(bytes: &[u8]) -> usize {
    let tail = &bytes[bytes.len().saturating_sub(3)..];
    (1..=tail.len())
        .find(|n| tail[tail.len() - n] & 0xc0 == 0xc0)
        .filter(|n| std::str::from_utf8(&tail[tail.len() - n..]).is_err_and(|e| e.error_len().is_none()))
        .unwrap_or(0)
}
