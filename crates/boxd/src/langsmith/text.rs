//! Output as text of exactly as many bytes, because the LangSmith SDKs compute their offsets from the length of the
//! text they received.
//!
//! A split character is held back until its remaining bytes arrive. Each byte that belongs to no character is shown as
//! one `?`: the usual replacement character has three bytes, so each one would shift all later offsets by two. Clients
//! that need such bytes unchanged download a file, or use `/v1/exec/ws` or the event stream, which carry bytes.

/// Replacement for a byte that is not valid text.
const STANDS_FOR_A_BYTE: char = '?';

/// Converts one stream to text, piece by piece.
#[derive(Default)]
pub struct Characters {
    /// The first bytes of an incomplete character, at most three.
    begun: Vec<u8>,
    /// The offset of its first byte.
    at: u64,
}

impl Characters {
    /// Returns the text that can be shown and its offset; `None` while there is only an incomplete character.
    pub fn take(&mut self, offset: u64, bytes: &[u8]) -> Option<(u64, String)> {
        if self.begun.is_empty() {
            self.at = offset;
        }
        let at = self.at;
        let joined;
        let bytes = match self.begun.is_empty() {
            true => bytes,
            false => {
                joined = [self.begun.as_slice(), bytes].concat();
                joined.as_slice()
            }
        };
        let (text, rest) = shown(bytes);
        self.begun = rest.to_vec();
        self.at = at + text.len() as u64;
        (!text.is_empty()).then_some((at, text))
    }

    /// Flushes an incomplete character as replacements, because the stream has ended or continues elsewhere.
    pub fn end(&mut self) -> Option<(u64, String)> {
        let begun = std::mem::take(&mut self.begun);
        let text: String = begun.iter().map(|_| STANDS_FOR_A_BYTE).collect();
        (!text.is_empty()).then_some((self.at, text))
    }
}

/// Returns the text of all complete characters, and the incomplete character at the end.
fn shown(mut bytes: &[u8]) -> (String, &[u8]) {
    let mut text = String::with_capacity(bytes.len());
    loop {
        let error = match std::str::from_utf8(bytes) {
            Ok(rest) => {
                text.push_str(rest);
                return (text, &[]);
            }
            Err(error) => error,
        };
        let (good, bad) = bytes.split_at(error.valid_up_to());
        // Validated just now, up to this length.
        text.push_str(std::str::from_utf8(good).unwrap_or_default());
        let Some(length) = error.error_len() else { return (text, bad) };
        text.extend(std::iter::repeat_n(STANDS_FOR_A_BYTE, length));
        bytes = &bad[length..];
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_character_waits_for_its_rest_and_a_byte_that_is_none_is_shown_by_one() {
        let mut characters = Characters::default();
        assert_eq!(characters.take(10, b"a\xe2\x82"), Some((10, "a".to_owned())));
        assert_eq!(characters.take(13, b"\xac!"), Some((11, "€!".to_owned())));
        assert_eq!(characters.take(15, b"\xf0\x9f"), None);
        assert_eq!(characters.take(17, b"x\xff"), Some((15, "??x?".to_owned())));
        assert_eq!(characters.take(19, b"\xe2"), None);
        assert_eq!(characters.end(), Some((19, "?".to_owned())));
        assert_eq!(characters.end(), None);
    }

    proptest! {
        /// However the output is split, and wherever a client resumes: every byte is counted once, and valid text
        /// arrives unchanged.
        #[test]
        fn bytes_are_counted_once_however_they_are_cut(
            bytes in proptest::collection::vec(
                prop_oneof![Just(0xe2u8), Just(0x82), Just(0xac), Just(0xf0), Just(0x9f), any::<u8>()],
                0..64,
            ),
            cuts in proptest::collection::vec(1usize..6, 1..32),
        ) {
            let mut characters = Characters::default();
            let (mut at, mut next, mut all) = (0usize, 0u64, String::new());
            for cut in cuts.iter().cycle() {
                if at == bytes.len() {
                    break;
                }
                let end = (at + cut).min(bytes.len());
                if let Some((offset, text)) = characters.take(at as u64, &bytes[at..end]) {
                    prop_assert_eq!(offset, next);
                    next += text.len() as u64;
                    all.push_str(&text);
                }
                at = end;
            }
            if let Some((offset, text)) = characters.end() {
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
