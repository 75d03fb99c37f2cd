//! Output as text of exactly as many bytes, because the LangSmith SDKs compute their offsets from the length of the
//! text they received.
//!
//! A split character is held back until its remaining bytes arrive. Each byte that belongs to no character is shown as
//! one `?`: the usual replacement character has three bytes, so each one would shift all later offsets by two. Clients
//! that need such bytes unchanged download a file, or use `/v1/exec/ws` or the event stream, which carry bytes.

/// Replacement for a byte that is not valid text.
const INVALID_BYTE: char = '?';

/// Converts one stream to text, piece by piece.
#[derive(Default)]
pub struct TextConverter {
    /// The first bytes of an incomplete character, at most three.
    incomplete: Vec<u8>,
    /// The offset of its first byte.
    offset: u64,
}

impl TextConverter {
    /// Returns the text that can be shown and its offset; `None` while there is only an incomplete character.
    pub fn convert(&mut self, offset: u64, bytes: &[u8]) -> Option<(u64, String)> {
        if self.incomplete.is_empty() {
            self.offset = offset;
        }
        let offset = self.offset;
        let joined;
        let bytes = match self.incomplete.is_empty() {
            true => bytes,
            false => {
                joined = [self.incomplete.as_slice(), bytes].concat();
                joined.as_slice()
            }
        };
        let (text, rest) = complete_text(bytes);
        self.incomplete = rest.to_vec();
        self.offset = offset + text.len() as u64;
        (!text.is_empty()).then_some((offset, text))
    }

    /// Flushes an incomplete character as replacements, because the stream has ended or continues elsewhere.
    pub fn finish(&mut self) -> Option<(u64, String)> {
        let incomplete = std::mem::take(&mut self.incomplete);
        let text: String = incomplete.iter().map(|_| INVALID_BYTE).collect();
        (!text.is_empty()).then_some((self.offset, text))
    }
}

/// Returns the text of all complete characters, and the incomplete character at the end.
fn complete_text(mut bytes: &[u8]) -> (String, &[u8]) {
    let mut text = String::with_capacity(bytes.len());
    loop {
        let error = match std::str::from_utf8(bytes) {
            Ok(rest) => {
                text.push_str(rest);
                return (text, &[]);
            }
            Err(error) => error,
        };
        let (valid, rest) = bytes.split_at(error.valid_up_to());
        // Validated just now, up to this length.
        text.push_str(std::str::from_utf8(valid).unwrap_or_default());
        let Some(length) = error.error_len() else { return (text, rest) };
        text.extend(std::iter::repeat_n(INVALID_BYTE, length));
        bytes = &rest[length..];
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_split_character_is_completed_and_each_invalid_byte_becomes_one_character() {
        let mut converter = TextConverter::default();
        assert_eq!(converter.convert(10, b"a\xe2\x82"), Some((10, "a".to_owned())));
        assert_eq!(converter.convert(13, b"\xac!"), Some((11, "€!".to_owned())));
        assert_eq!(converter.convert(15, b"\xf0\x9f"), None);
        assert_eq!(converter.convert(17, b"x\xff"), Some((15, "??x?".to_owned())));
        assert_eq!(converter.convert(19, b"\xe2"), None);
        assert_eq!(converter.finish(), Some((19, "?".to_owned())));
        assert_eq!(converter.finish(), None);
    }

    proptest! {
        /// However the output is split, and wherever a client resumes: every byte is counted once, and valid text
        /// arrives unchanged.
        #[test]
        fn bytes_are_counted_once_however_they_are_split(
            bytes in proptest::collection::vec(
                prop_oneof![Just(0xe2u8), Just(0x82), Just(0xac), Just(0xf0), Just(0x9f), any::<u8>()],
                0..64,
            ),
            cuts in proptest::collection::vec(1usize..6, 1..32),
        ) {
            let mut converter = TextConverter::default();
            let (mut offset, mut next, mut all) = (0usize, 0u64, String::new());
            for cut in cuts.iter().cycle() {
                if offset == bytes.len() {
                    break;
                }
                let end = (offset + cut).min(bytes.len());
                if let Some((offset, text)) = converter.convert(offset as u64, &bytes[offset..end]) {
                    prop_assert_eq!(offset, next);
                    next += text.len() as u64;
                    all.push_str(&text);
                }
                offset = end;
            }
            if let Some((offset, text)) = converter.finish() {
                prop_assert_eq!(offset, next);
                all.push_str(&text);
            }
            prop_assert_eq!(all.len(), bytes.len());
            if let Ok(text) = std::str::from_utf8(&bytes) {
                prop_assert_eq!(all, text);
            }
        }
    }
}
