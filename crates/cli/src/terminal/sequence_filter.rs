//! Filter for the shell output that this terminal receives. The sandbox filters escape sequences too, but it is
//! untrusted, so they are filtered again here.

use cobox_stream::{ScanResult, Scanner, SequenceKinds};

#[derive(Default)]
pub struct SequenceFilter {
    scanner: Scanner,
    /// Offset of the next output byte.
    next_offset: u64,
    /// The beginning of a sequence that can't be classified yet; bounded, because the scanner decides after a few
    /// bytes.
    pending: Vec<u8>,
}

impl SequenceFilter {
    /// Returns the part of the next output that may be shown now, with NULs in place of hidden sequences, and the scan
    /// result of all of it.
    pub fn apply(&mut self, bytes: &[u8], hidden: SequenceKinds) -> (Vec<u8>, ScanResult) {
        let scan = self.scanner.scan(bytes);
        let start = self.next_offset - self.pending.len() as u64;
        self.next_offset += bytes.len() as u64;
        let mut shown = std::mem::take(&mut self.pending);
        shown.extend_from_slice(bytes);
        let index = |offset: u64| offset.clamp(start, self.next_offset).saturating_sub(start) as usize;
        for span in scan.spans.iter().filter(|span| span.kinds.intersects(hidden)) {
            shown[index(span.from)..index(span.to)].fill(0);
        }
        if let Some(undecided) = scan.undecided {
            self.pending = shown.split_off(index(undecided));
        }
        (shown, scan)
    }

    /// Returns the terminator of a string sequence that was shown without its end. Otherwise a terminal would treat the
    /// next prompt as part of the string.
    pub fn finish(&self, hidden: SequenceKinds) -> &'static [u8] {
        if self.scanner.shows_open_string(hidden) { b"\x1b\\" } else { b"" }
    }

    /// Output that was received and is not shown yet.
    pub fn pending(&self) -> &[u8] {
        &self.pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unfiltered_output_reaches_neither_clipboard_nor_title_nor_keyboard() {
        let output = "one\x1b]52;c;aGVsbG8=\x07 two\x1b]0;title\x1b\\ \x1b[31mred\x1b[m\x1b[6n \x1bPtmux;copy\x1b\\é\u{9d}2;t\x07.";
        let plain = "one two \x1b[31mred\x1b[m é.";
        let with_queries = "one two \x1b[31mred\x1b[m\x1b[6n é.";
        for (hidden, expected) in [(SequenceKinds::ALL, plain), (SequenceKinds::ALL.without(SequenceKinds::QUERY), with_queries)] {
            for size in 1..output.len() {
                let mut filter = SequenceFilter::default();
                let shown: Vec<u8> =
                    output.as_bytes().chunks(size).flat_map(|chunk| filter.apply(chunk, hidden).0).filter(|b| *b != 0).collect();
                assert_eq!(String::from_utf8_lossy(&shown), expected, "in pieces of {size}");
                assert!(filter.pending().is_empty());
            }
        }
    }

    #[test]
    fn undecided_sequences_hold_back_a_bounded_amount() {
        for unfinished in ["\x1b[0;", "\x1b]", "\x1bP1;", "\x1b]4;1;", "\x1b(\x01"] {
            let mut filter = SequenceFilter::default();
            for _ in 0..10_000 {
                filter.apply(unfinished.as_bytes(), SequenceKinds::ALL);
                filter.apply(b"\x01\x01\x01\x01;1", SequenceKinds::ALL);
                assert!(filter.pending().len() < 2048, "{unfinished:?}");
            }
        }
    }
}
