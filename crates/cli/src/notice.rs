//! Words of ours in a terminal that is lent to somebody else's program, without spoiling what it shows.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    printer::{Printer, visible},
    terminal::Screen,
};

/// Between two bells: somebody who goes on typing where it does nothing is told, not shouted at.
const BELL_PERIOD: Duration = Duration::from_secs(1);
const BELL: &[u8] = b"\x07";
/// Keeps the window's title, to be put back.
const KEEP_TITLE: &[u8] = b"\x1b[22;2t";
const PUT_TITLE_BACK: &[u8] = b"\x1b[23;2t";

pub struct Notices {
    printer: Printer,
    /// There is a terminal to write in.
    is_shown: bool,
    has_title: bool,
    rang_at: Option<Instant>,
    last: String,
}

impl Notices {
    pub fn new(printer: Printer, is_shown: bool) -> Self {
        Self { printer, is_shown, has_title: false, rang_at: None, last: String::new() }
    }

    /// A line of its own, or the window's title while a program has the whole screen. The same twice is said once.
    pub fn say(&mut self, screen: &Screen, words: &str) {
        if !self.is_shown || self.last == words {
            return;
        }
        self.last = words.to_owned();
        let words = visible(words);
        let bytes = if screen.is_whole() {
            let keep = if std::mem::replace(&mut self.has_title, true) { &b""[..] } else { KEEP_TITLE };
            [keep, format!("\x1b]2;cobox: {words}\x07\x07").as_bytes()].concat()
        } else {
            format!("\r\n\x1b[2m[cobox: {words}]\x1b[22m\r\n").into_bytes()
        };
        // A terminal that is gone is noticed where its output is written.
        let _ = self.printer.stream(&bytes);
    }

    /// What was said may be said again.
    pub fn forget(&mut self) {
        self.last.clear();
    }

    pub fn ring(&mut self) {
        let now = Instant::now();
        if self.is_shown && self.rang_at.is_none_or(|at| now.duration_since(at) >= BELL_PERIOD) {
            self.rang_at = Some(now);
            let _ = self.printer.stream(BELL);
        }
    }
}

impl Drop for Notices {
    fn drop(&mut self) {
        if self.has_title {
            let _ = self.printer.stream(PUT_TITLE_BACK);
        }
    }
}
