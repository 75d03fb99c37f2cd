//! Filter for the shell output that this terminal receives. The sandbox filters escape sequences too, but it is
//! untrusted, so they are filtered again here.

use cobox_stream::{ScanResult, Scanner, SequenceKinds};

#[derive(Default)]
pub struct Gate {
    scanner: Scanner,
    /// Offset of the next output byte.
    at: u64,
    /// The beginning of a sequence that can't be classified yet; bounded, because the scanner decides after a few
    /// bytes.
    held: Vec<u8>,
}

impl Gate {
    /// Returns the part of the next output that may be shown now, with NULs in place of hidden sequences, and the scan
    /// result of all of it.
    pub fn admit(&mut self, bytes: &[u8], hides: SequenceKinds) -> (Vec<u8>, ScanResult) {
        let found = self.scanner.scan(bytes);
        let start = self.at - self.held.len() as u64;
        self.at += bytes.len() as u64;
        let mut shown = std::mem::take(&mut self.held);
        shown.extend_from_slice(bytes);
        let place = |offset: u64| offset.clamp(start, self.at).saturating_sub(start) as usize;
        for span in found.spans.iter().filter(|span| span.kinds.intersects(hides)) {
            shown[place(span.from)..place(span.to)].fill(0);
        }
        if let Some(undecided) = found.undecided {
            self.held = shown.split_off(place(undecided));
        }
        (shown, found)
    }

    /// Returns the terminator of a string sequence that was shown without its end. Otherwise a terminal would treat the
    /// next prompt as part of the string.
    pub fn finish(&self, hides: SequenceKinds) -> &'static [u8] {
        if self.scanner.shows_open_string(hides) { b"\x1b\\" } else { b"" }
    }

    /// Output that was received and is not shown yet.
    pub fn held(&self) -> &[u8] {
        &self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_that_leaves_nothing_out_still_reaches_neither_clipboard_nor_title_nor_keyboard() {
        let output = "one\x1b]52;c;aGVsbG8=\x07 two\x1b]0;title\x1b\\ \x1b[31mred\x1b[m\x1b[6n \x1bPtmux;copy\x1b\\é\u{9d}2;t\x07.";
        let plain = "one two \x1b[31mred\x1b[m é.";
        let asked = "one two \x1b[31mred\x1b[m\x1b[6n é.";
        for (hides, wanted) in [(SequenceKinds::ALL, plain), (SequenceKinds::ALL.without(SequenceKinds::QUERY), asked)] {
            for size in 1..output.len() {
                let mut gate = Gate::default();
                let shown: Vec<u8> =
                    output.as_bytes().chunks(size).flat_map(|piece| gate.admit(piece, hides).0).filter(|b| *b != 0).collect();
                assert_eq!(String::from_utf8_lossy(&shown), wanted, "in pieces of {size}");
                assert!(gate.held().is_empty());
            }
        }
    }

    #[test]
    fn what_is_held_back_is_little_however_long_nobody_can_say_what_it_is() {
        for unfinished in ["\x1b[0;", "\x1b]", "\x1bP1;", "\x1b]4;1;", "\x1b(\x01"] {
            let mut gate = Gate::default();
            for _ in 0..10_000 {
                gate.admit(unfinished.as_bytes(), SequenceKinds::ALL);
                gate.admit(b"\x01\x01\x01\x01;1", SequenceKinds::ALL);
                assert!(gate.held().len() < 2048, "{unfinished:?}");
            }
        }
    }
}
