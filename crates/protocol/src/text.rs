//! Text of a caller in messages and records.

/// Usual limit: as long as a name.
pub const MAX_SHOWN_CHARS: usize = 64;

/// The first characters of a text, without control characters: what a caller sent must not fill a message or control a terminal.
pub fn printable(text: &str, max_chars: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(max_chars).collect()
}
