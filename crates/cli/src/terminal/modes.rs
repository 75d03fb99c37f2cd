//! Tracks the modes that remote programs switched on in this terminal, to switch them off when the programs no longer
//! can.

/// Bytes of a sequence's parameters; longer sequences set colours.
const MAX_PARAMETERS: usize = 64;
/// Maximum number of unknown modes to remember.
const MAX_UNKNOWN: usize = 32;

/// Modes that are on in a default terminal: wrapping, the cursor, key repeat.
const ON_BY_DEFAULT: [u16; 3] = [7, 8, 25];
/// Never changed: the behaviour of the wheel and the Alt key is the user's choice, and 1048 only saves the cursor.
const NEVER_CHANGED: [u16; 6] = [1007, 1034, 1035, 1036, 1039, 1048];
/// The alternate screen under its three mode numbers; each of them leaves it.
const ALTERNATE: [u16; 3] = [47, 1047, 1049];
/// Leaves the alternate screen and restores the cursor, which programs and full redraws save when they enter it.
const LEAVE_ALTERNATE: &[u8] = b"\x1b[?1049l";
/// Other modes that programs often change.
const COMMON: [u16; 8] = [1, 5, 6, 7, 12, 25, 2004, 2026];
/// Modes that make the terminal send reports: clicks, movements, focus, colours, sizes. Only for a participant, never
/// for an observer.
const REPORTS: [u16; 12] = [9, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1015, 1016, 2031, 2048];

/// The modes that are switched on.
#[derive(Debug, Default)]
pub struct Modes {
    state: ParserState,
    /// Private modes that differ from their default, except the alternate screen.
    changed: Vec<u16>,
    alternate: bool,
    keypad: bool,
    insert: bool,
    region: bool,
    pen: bool,
    line_drawing: bool,
    cursor_style: bool,
    link: bool,
    /// `modifyOtherKeys` of xterm; 0 is off.
    other_keys: u16,
    /// How often kitty's keyboard protocol was pushed; the flags are those of the last push.
    keyboard: u8,
    keyboard_flags: u16,
    /// Set when the palette, the foreground, the background or the cursor colour was changed.
    colours: bool,
}

#[derive(Debug, Default)]
enum ParserState {
    #[default]
    Text,
    Escape,
    Charset,
    Csi(Vec<u8>),
    /// An operating system command: its first bytes.
    Osc(Vec<u8>),
    String,
    /// After ESC in `Osc` or `String`.
    StringEscape,
}

impl Modes {
    pub fn track(&mut self, output: &[u8]) {
        let mut rest = output;
        while let Some((&byte, after)) = rest.split_first() {
            if matches!(self.state, ParserState::Text) && byte != 0x1b {
                // Fast path for plain text, the most frequent input.
                let skip = rest.iter().position(|b| *b == 0x1b).unwrap_or(rest.len());
                rest = &rest[skip..];
                continue;
            }
            self.step(byte);
            rest = after;
        }
    }

    fn step(&mut self, byte: u8) {
        self.state = match (std::mem::take(&mut self.state), byte) {
            (_, 0x18 | 0x1a) => ParserState::Text,
            (ParserState::Osc(command), 0x1b) => {
                self.osc(&command);
                ParserState::StringEscape
            }
            (ParserState::String, 0x1b) => ParserState::StringEscape,
            (_, 0x1b) => ParserState::Escape,
            (ParserState::StringEscape, b'\\') => ParserState::Text,
            (ParserState::Escape | ParserState::StringEscape, byte) => self.escape(byte),
            (ParserState::Charset, byte) => {
                self.line_drawing = byte == b'0';
                ParserState::Text
            }
            (ParserState::Csi(mut parameters), byte) => match byte {
                0x40..=0x7e => {
                    self.csi(&parameters, byte);
                    ParserState::Text
                }
                0x20..=0x3f => {
                    if parameters.len() < MAX_PARAMETERS {
                        parameters.push(byte);
                    }
                    ParserState::Csi(parameters)
                }
                _ => ParserState::Csi(parameters),
            },
            (ParserState::Osc(command), 0x07) => {
                self.osc(&command);
                ParserState::Text
            }
            (ParserState::Osc(mut command), byte) => {
                if command.len() < MAX_PARAMETERS {
                    command.push(byte);
                }
                ParserState::Osc(command)
            }
            (ParserState::String, _) => ParserState::String,
            (ParserState::Text, _) => ParserState::Text,
        };
    }

    fn escape(&mut self, byte: u8) -> ParserState {
        match byte {
            b'[' => return ParserState::Csi(Vec::new()),
            b']' => return ParserState::Osc(Vec::new()),
            b'P' | b'_' | b'^' | b'X' => return ParserState::String,
            b'(' => return ParserState::Charset,
            b'=' => self.keypad = true,
            b'>' => self.keypad = false,
            // Full reset of the terminal.
            b'c' => *self = Self::default(),
            _ => {}
        }
        ParserState::Text
    }

    fn csi(&mut self, parameters: &[u8], last: u8) {
        let numbers = |text: &[u8]| -> Vec<u16> {
            text.split(|b| matches!(b, b';' | b':'))
                .map(|n| std::str::from_utf8(n).ok().and_then(|n| n.parse().ok()).unwrap_or(0))
                .collect()
        };
        match (parameters, last) {
            ([b'?', rest @ ..], b'h' | b'l') => numbers(rest).into_iter().for_each(|mode| self.set_private_mode(mode, last == b'h')),
            ([b'>', rest @ ..], b'm') => {
                self.other_keys = match numbers(rest)[..] {
                    [4, n, ..] => n,
                    _ => 0,
                }
            }
            ([b'>', rest @ ..], b'u') => (self.keyboard, self.keyboard_flags) = (self.keyboard.saturating_add(1), numbers(rest)[0]),
            ([b'<', rest @ ..], b'u') => self.keyboard = self.keyboard.saturating_sub(numbers(rest)[0].clamp(1, 255) as u8),
            ([b'=', rest @ ..], b'u') => (self.keyboard, self.keyboard_flags) = (self.keyboard.max(1), numbers(rest)[0]),
            ([b'!'], b'p') => (self.insert, self.region, self.pen, self.keypad, self.line_drawing) = (false, false, false, false, false),
            ([style @ .., b' '], b'q') => self.cursor_style = numbers(style)[0] != 0,
            (plain, b'h' | b'l') if numbers(plain).contains(&4) => self.insert = last == b'h',
            ([], b'r') => self.region = false,
            ([b'0'..=b'9' | b';', ..], b'r') => self.region = true,
            ([] | [b'0'], b'm') => self.pen = false,
            ([b'0'..=b'9' | b';' | b':', ..], b'm') => self.pen = true,
            _ => {}
        }
    }

    fn set_private_mode(&mut self, mode: u16, is_on: bool) {
        if NEVER_CHANGED.contains(&mode) {
            return;
        }
        if ALTERNATE.contains(&mode) {
            self.alternate = is_on;
            return;
        }
        let is_changed = is_on != ON_BY_DEFAULT.contains(&mode);
        self.changed.retain(|known| *known != mode);
        let is_known = |mode: &u16| REPORTS.contains(mode) || COMMON.contains(mode);
        if is_changed && (is_known(&mode) || self.changed.iter().filter(|known| !is_known(known)).count() < MAX_UNKNOWN) {
            self.changed.push(mode);
        }
    }

    fn osc(&mut self, command: &[u8]) {
        let mut parts = command.splitn(3, |b| *b == b';');
        match (parts.next(), parts.next(), parts.next()) {
            (Some(b"8"), _, Some(address)) => self.link = !address.is_empty(),
            (Some(b"4" | b"10" | b"11" | b"12" | b"17" | b"19"), Some(value), more) if !more.unwrap_or(value).ends_with(b"?") => {
                self.colours = true;
            }
            _ => {}
        }
    }

    /// Whether a program uses the alternate screen.
    pub fn is_alternate(&self) -> bool {
        self.alternate
    }

    /// Turns off reports and extended key encodings, so that cobox's own keys are recognized. [`Modes::reports_on`]
    /// restores them.
    pub fn reports_off(&self) -> Vec<u8> {
        let mut out = self.reports('l');
        if self.keyboard > 0 {
            out.extend_from_slice(b"\x1b[=0u");
        }
        if self.other_keys > 0 {
            out.extend_from_slice(b"\x1b[>4m");
        }
        out
    }

    pub fn reports_on(&self) -> Vec<u8> {
        let mut out = self.reports('h');
        if self.keyboard > 0 {
            out.extend_from_slice(format!("\x1b[={}u", self.keyboard_flags).as_bytes());
        }
        if self.other_keys > 0 {
            out.extend_from_slice(format!("\x1b[>4;{}m", self.other_keys).as_bytes());
        }
        out
    }

    fn reports(&self, last: char) -> Vec<u8> {
        let known = self.changed.iter().filter(|mode| REPORTS.contains(mode));
        known.flat_map(|mode| format!("\x1b[?{mode}{last}").into_bytes()).collect()
    }

    /// Switches off everything that is on and nothing else. This can move the cursor: see [`Modes::moves_cursor`].
    pub fn reset_sequences(&self) -> Vec<u8> {
        let mut out = Vec::new();
        if !matches!(self.state, ParserState::Text) {
            // Ends an unfinished sequence.
            out.extend_from_slice(b"\x18\x1b\\");
        }
        for (is_on, sequence) in [
            (self.link, b"\x1b]8;;\x1b\\".as_slice()),
            (self.pen, b"\x1b[m"),
            (self.insert, b"\x1b[4l"),
            (self.line_drawing, b"\x1b(B\x0f"),
            (self.keypad, b"\x1b>"),
            (self.other_keys > 0, b"\x1b[>4m"),
            (self.cursor_style, b"\x1b[0 q"),
            (self.colours, b"\x1b]104\x1b\\\x1b]110\x1b\\\x1b]111\x1b\\\x1b]112\x1b\\\x1b]117\x1b\\\x1b]119\x1b\\"),
        ] {
            if is_on {
                out.extend_from_slice(sequence);
            }
        }
        match self.region {
            // Resetting the scroll region moves the cursor to the top, so it is saved and restored around that.
            true if !self.is_alternate() => out.extend_from_slice(b"\x1b7\x1b[r\x1b8"),
            // Leaving the alternate screen restores the cursor from the position that was saved before.
            true => out.extend_from_slice(b"\x1b[r"),
            false => {}
        }
        if self.keyboard > 0 {
            out.extend_from_slice(format!("\x1b[<{}u\x1b[=0u", self.keyboard).as_bytes());
        }
        for mode in &self.changed {
            out.extend_from_slice(format!("\x1b[?{mode}{}", if ON_BY_DEFAULT.contains(mode) { 'h' } else { 'l' }).as_bytes());
        }
        if self.alternate {
            // Last: the normal screen has its own cursor.
            out.extend_from_slice(LEAVE_ALTERNATE);
        }
        out
    }

    /// Switching off origin mode (6) moves the cursor to the first row, also a saved cursor.
    pub fn moves_cursor(&self) -> bool {
        self.changed.contains(&6) && !self.is_alternate()
    }

    /// Leaves the alternate screen and starts a line below the previous content.
    pub const fn leave_alternate() -> &'static [u8] {
        b"\x1b[?1049l\r\n"
    }

    /// Switches off all modes that programs commonly use, except the alternate screen: for callers that have no record
    /// of the modes that are on.
    pub fn reset_all_sequences() -> &'static [u8] {
        b"\x18\x1b\\\x1b[?1l\x1b>\x1b[?2004l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1004l\x1b[?1006l\x1b[>4m\x1b[?7h\x1b[?25h\x1b[4l\x1b(B\x0f\x1b[m\r\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reset_after(parts: &[&str]) -> String {
        let mut modes = Modes::default();
        parts.iter().for_each(|part| modes.track(part.as_bytes()));
        String::from_utf8(modes.reset_sequences()).unwrap()
    }

    #[test]
    fn only_modes_that_are_on_are_reset() {
        assert_eq!(reset_after(&["ls\r\nplain text\r\n"]), "");
        assert_eq!(reset_after(&["\x1b[?1049h\x1b[?25l vim \x1b[?25h\x1b[?1049l", "\x1b[1mbold\x1b[0m"]), "");
        assert_eq!(reset_after(&["\x1b[?1049h", "vim"]), "\x1b[?1049l");
        assert_eq!(reset_after(&["x\x1b[?10", "49h"]), "\x1b[?1049l");
        assert_eq!(reset_after(&["\x1b[?47h\x1b[?1000;1006h\x1b[?25l"]), "\x1b[?1000l\x1b[?1006l\x1b[?25h\x1b[?1049l");
        assert_eq!(reset_after(&["\x1b[?1049h\x1b[?1049l\x1b[?47h\x1b[?1049l"]), "");
        assert_eq!(reset_after(&["\x1b[?2004h\x1b[?7l"]), "\x1b[?2004l\x1b[?7h");
        assert_eq!(
            reset_after(&["\x1b[1;38;5;9m\x1b(0\x1b[5 q\x1b=\x1b[4h\x1b[2;9r"]),
            "\x1b[m\x1b[4l\x1b(B\x0f\x1b>\x1b[0 q\x1b7\x1b[r\x1b8"
        );
        assert_eq!(reset_after(&["\x1b[?1049h\x1b[2;9r"]), "\x1b[r\x1b[?1049l");
        assert_eq!(reset_after(&["\x1b[>4;2m\x1b[>1u"]), "\x1b[>4m\x1b[<1u\x1b[=0u");
        assert_eq!(reset_after(&["\x1b[>4;2m\x1b[>1u\x1b[<u\x1b[>4;0m"]), "");
        assert_eq!(reset_after(&["\x1b]8;;http://x\x07link"]), "\x1b]8;;\x1b\\");
        assert_eq!(reset_after(&["\x1b]8;;http://x\x07link\x1b]8;;\x1b\\ and \x1b]0;title\x07"]), "");
        assert!(reset_after(&["\x1b]11;#000000\x07"]).contains("\x1b]111\x1b\\"));
        assert_eq!(reset_after(&["\x1b]11;?\x07\x1b]10;?\x1b\\\x1b[c\x1b[6n\x1bP+q544e\x1b\\"]), "");
        assert_eq!(reset_after(&["\x1b[?1000h\x1b[?2004h\x1b[3m\x1bc"]), "");
        assert_eq!(reset_after(&["\x1b]0;never ended"]), "\x18\x1b\\");
    }

    #[test]
    fn observers_get_no_terminal_reports() {
        let mut modes = Modes::default();
        modes.track(b"\x1b[?1002h\x1b[?2004h\x1b[?1006h");
        assert_eq!(modes.reports_off(), b"\x1b[?1002l\x1b[?1006l");
        assert_eq!(modes.reports_on(), b"\x1b[?1002h\x1b[?1006h");
        // With another key encoding, Ctrl-T would not be recognized.
        let mut modes = Modes::default();
        modes.track(b"\x1b[>5u\x1b[>4;2m");
        assert_eq!(modes.reports_off(), b"\x1b[=0u\x1b[>4m");
        assert_eq!(modes.reports_on(), b"\x1b[=5u\x1b[>4;2m");
    }

    #[test]
    fn tracked_state_is_bounded_for_any_output() {
        let mut modes = Modes::default();
        for mode in 0..10_000 {
            modes.track(format!("\x1b[?{mode}h\x1b[{}m\x1b]{}", "1;".repeat(1000), "x".repeat(1000)).as_bytes());
        }
        assert!(modes.reset_sequences().len() < 4096);
        modes.track(b"\x18\x1b[?1003h");
        assert!(!modes.reports_off().is_empty(), "relevant sequences are still detected");
    }
}
