//! Filters a sandbox's output for the local terminal: escape sequences must not reach this machine's clipboard, title, printer,
//! notifications or files.

use bytes::Bytes;
use cobox_stream::SequenceKinds;

use crate::terminal::SequenceFilter;

/// Filter of one output stream.
pub struct OutputFilter {
    /// `None` if nothing is filtered: for a pipe or a file, or with `--raw`.
    filter: Option<SequenceFilter>,
    hidden: SequenceKinds,
}

impl OutputFilter {
    pub fn new(is_filtered: bool, hidden: SequenceKinds) -> Self {
        Self { filter: is_filtered.then(SequenceFilter::default), hidden }
    }

    /// Returns the bytes to write. A sequence that is cut off at the end is never written: later output would complete it.
    pub fn apply(&mut self, bytes: Bytes) -> Bytes {
        match &mut self.filter {
            Some(filter) => filter.apply(&bytes, self.hidden).0.into(),
            None => bytes,
        }
    }

    /// Returns the bytes to write after the last output, see [`SequenceFilter::finish`].
    pub fn finish(&self) -> &'static [u8] {
        self.filter.as_ref().map_or(b"", |filter| filter.finish(self.hidden))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &[u8] =
        b"a\x1b]52;c;aGk=\x07b\x1b]0;title\x07c\x1b[5id\x1b]9;note\x07e\x1b]777;notify;t;b\x07f\x1b_Gt=f;L2V0Yw==\x1b\\\x1b[31mg\x1b[6n";

    fn shown(mut filter: OutputFilter) -> Vec<u8> {
        HOSTILE.chunks(3).flat_map(|chunk| filter.apply(Bytes::from_static(chunk))).filter(|b| *b != 0).collect()
    }

    #[test]
    fn a_terminal_gets_no_sequence_that_acts_on_this_machine_and_a_pipe_gets_every_byte() {
        assert_eq!(shown(OutputFilter::new(true, SequenceKinds::ALL)), b"abcdef\x1b[31mg");
        let queries = SequenceKinds::ALL.without(SequenceKinds::QUERY);
        assert_eq!(shown(OutputFilter::new(true, queries)), b"abcdef\x1b[31mg\x1b[6n", "its own terminal replies");
        assert_eq!(shown(OutputFilter::new(false, SequenceKinds::ALL)), HOSTILE, "a pipe, or --raw");
    }

    #[test]
    fn an_unterminated_string_sequence_is_terminated() {
        for (output, is_filtered, end) in [
            (b"a\x1bXb".as_slice(), true, b"\x1b\\".as_slice()),
            (b"a\x1bXb\x1b\\", true, b""),
            (b"a\x1b]52;c;aGk=", true, b""),
            (b"a\x1bXb", false, b""),
        ] {
            let mut filter = OutputFilter::new(is_filtered, SequenceKinds::ALL);
            filter.apply(Bytes::from_static(output));
            assert_eq!(filter.finish(), end, "{output:?}");
        }
    }
}
