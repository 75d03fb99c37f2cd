//! The keys for `cobox` itself: Enter, `~` and a letter as in ssh, or a key that the user chose.

use std::str::FromStr;

/// Markers around pasted text in bracketed paste mode.
const PASTE_BEGINS: &[u8] = b"\x1b[200~";
const PASTE_ENDS: &[u8] = b"\x1b[201~";
const CTRL_Z: u8 = 0x1a;

/// The escape key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EscapeKey {
    /// At the beginning of a line.
    AfterEnter(u8),
    /// Anywhere, like the prefix key of tmux.
    Anywhere(u8),
    None,
}

impl Default for EscapeKey {
    fn default() -> Self {
        EscapeKey::AfterEnter(b'~')
    }
}

impl FromStr for EscapeKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.as_bytes() {
            b"none" => Ok(EscapeKey::None),
            [key] if key.is_ascii_punctuation() => Ok(EscapeKey::AfterEnter(*key)),
            // Control keys that every program needs can't be the escape key.
            [b'^', key] if !b"MJIHCD[".contains(&key.to_ascii_uppercase()) && (b'@'..=b'_').contains(&key.to_ascii_uppercase()) => {
                Ok(EscapeKey::Anywhere(key.to_ascii_uppercase() & 0x1f))
            }
            _ => Err("expected a single character such as ~, a control key such as ^], or none".to_owned()),
        }
    }
}

impl EscapeKey {
    /// How to press the escape key and then `key`, for messages.
    pub fn then(self, key: &str) -> String {
        match self {
            EscapeKey::AfterEnter(sign) => format!("Enter {}{key}", char::from(sign)),
            EscapeKey::Anywhere(code) => format!("Ctrl-{} {key}", char::from(code | 0x40)),
            EscapeKey::None => String::new(),
        }
    }

    /// All escape commands.
    pub fn help(self) -> String {
        let key = match self {
            EscapeKey::AfterEnter(sign) => format!("Enter {}", char::from(sign)),
            EscapeKey::Anywhere(code) => format!("Ctrl-{}", char::from(code | 0x40)),
            EscapeKey::None => return "escape keys are disabled (--escape none)".to_owned(),
        };
        format!("{key} and  . detach  t take  r release  s status  l redraw  ^Z stop")
    }
}

/// What the typed bytes mean.
#[derive(Debug, PartialEq, Eq)]
pub enum KeyAction {
    Send(Vec<u8>),
    Leave,
    Take,
    Release,
    Status,
    Redraw,
    Suspend,
    Help,
}

/// Finds the escape commands in typed input.
#[derive(Debug)]
pub struct EscapeScanner {
    key: EscapeKey,
    state: ScanState,
    /// Bytes matched so far of the marker that begins or ends a paste.
    matched: usize,
    is_pasting: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum ScanState {
    LineStart,
    Escape,
    InLine,
}

impl EscapeScanner {
    pub fn new(key: EscapeKey) -> Self {
        Self { key, state: ScanState::LineStart, matched: 0, is_pasting: false }
    }

    /// Returns the actions in order. The escape key is held back until the next byte decides its meaning; pressed
    /// twice, it is sent once. Pasted text is never interpreted.
    pub fn scan(&mut self, bytes: &[u8]) -> Vec<KeyAction> {
        let mut actions = Vec::new();
        let mut send = Vec::with_capacity(bytes.len() + 1);
        for &byte in bytes {
            if self.is_in_paste(byte) {
                send.push(byte);
                self.state = ScanState::InLine;
                continue;
            }
            if self.state != ScanState::Escape {
                if self.is_escape(byte) {
                    self.state = ScanState::Escape;
                } else {
                    send.push(byte);
                    self.state = if matches!(byte, b'\r' | b'\n') { ScanState::LineStart } else { ScanState::InLine };
                }
                continue;
            }
            let action = match byte {
                b'.' => KeyAction::Leave,
                b't' => KeyAction::Take,
                b'r' => KeyAction::Release,
                b's' => KeyAction::Status,
                b'l' => KeyAction::Redraw,
                b'?' => KeyAction::Help,
                CTRL_Z => KeyAction::Suspend,
                _ => {
                    if let Some(key) = self.byte() {
                        send.push(key);
                    }
                    if Some(byte) != self.byte() {
                        send.push(byte);
                    }
                    self.state = if matches!(byte, b'\r' | b'\n') { ScanState::LineStart } else { ScanState::InLine };
                    continue;
                }
            };
            if !send.is_empty() {
                actions.push(KeyAction::Send(std::mem::take(&mut send)));
            }
            actions.push(action);
            // As after Enter, so that another command may follow immediately.
            self.state = ScanState::LineStart;
        }
        if !send.is_empty() {
            actions.push(KeyAction::Send(send));
        }
        actions
    }

    fn is_escape(&self, byte: u8) -> bool {
        match self.key {
            EscapeKey::AfterEnter(key) => self.state == ScanState::LineStart && byte == key,
            EscapeKey::Anywhere(key) => byte == key,
            EscapeKey::None => false,
        }
    }

    fn byte(&self) -> Option<u8> {
        match self.key {
            EscapeKey::AfterEnter(key) | EscapeKey::Anywhere(key) => Some(key),
            EscapeKey::None => None,
        }
    }

    /// Whether a byte belongs to a paste, including its markers once they are complete.
    fn is_in_paste(&mut self, byte: u8) -> bool {
        let was_pasting = self.is_pasting;
        let mark = if was_pasting { PASTE_ENDS } else { PASTE_BEGINS };
        self.matched = match byte == mark[self.matched] {
            true => self.matched + 1,
            false => usize::from(byte == mark[0]),
        };
        if self.matched == mark.len() {
            (self.matched, self.is_pasting) = (0, !was_pasting);
        }
        was_pasting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scanned(key: &str, parts: &[&str]) -> String {
        let mut scan = EscapeScanner::new(key.parse().unwrap());
        let texts = parts.iter().flat_map(|part| scan.scan(part.as_bytes())).map(|action| match action {
            KeyAction::Send(bytes) => String::from_utf8(bytes).unwrap(),
            action => format!("<{action:?}>"),
        });
        texts.collect()
    }

    #[test]
    fn escape_commands_are_recognized_after_enter_and_other_input_is_sent() {
        let scan = |parts: &[&str]| scanned("~", parts);
        assert_eq!(scan(&["ls\r", "~", "."]), "ls\r<Leave>");
        assert_eq!(scan(&["~."]), "<Leave>");
        assert_eq!(scan(&["cd ~.\r"]), "cd ~.\r");
        assert_eq!(scan(&["\r~~x"]), "\r~x");
        assert_eq!(scan(&["\r~", "/bin"]), "\r~/bin");
        assert_eq!(scan(&["\r~\r~."]), "\r~\r<Leave>");
        assert_eq!(scan(&["\r~t~r~?~s~l~\x1ax~."]), "\r<Take><Release><Help><Status><Redraw><Suspend>x~.");
    }

    #[test]
    fn the_escape_key_is_configurable() {
        assert_eq!(scanned("^]", &["in a line\x1d", ".", "\r~."]), "in a line<Leave>\r~.");
        assert_eq!(scanned("^a", &["\x01\x01\x01x"]), "\x01\x01x");
        assert_eq!(scanned("%", &["\r%.", "\r~."]), "\r<Leave>\r~.");
        assert_eq!(scanned("none", &["\r~.\x1d."]), "\r~.\x1d.");
        for invalid in ["", "a", "~~", "^M", "^c", "ä", "^1"] {
            assert!(invalid.parse::<EscapeKey>().is_err(), "{invalid}");
        }
        assert_eq!((EscapeKey::default().then("t"), EscapeKey::Anywhere(0x1d).then("t")), ("Enter ~t".to_owned(), "Ctrl-] t".to_owned()));
    }

    #[test]
    fn pasted_text_is_never_interpreted() {
        let pasted = "\x1b[200~one\r~.\r~t\x1b[201~";
        assert_eq!(scanned("~", &[pasted]), pasted);
        for cut in 1..pasted.len() {
            assert_eq!(scanned("~", &[&pasted[..cut], &pasted[cut..], "\r~."]), format!("{pasted}\r<Leave>"), "{cut}");
        }
        assert_eq!(scanned("~", &["\x1b\x1b[200~\r~.\x1b\x1b[201~\r~."]), "\x1b\x1b[200~\r~.\x1b\x1b[201~\r<Leave>");
    }
}
