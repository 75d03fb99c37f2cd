//! The local terminal while a shell has it: raw, its size told, and always given back as it was.

use std::io::{self, IsTerminal};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Raw mode for as long as it lives. Dropped on return, on error, on unwinding, and before a handled signal ends the program.
pub struct RawMode {
    before: Termios,
}

impl RawMode {
    /// `None` where stdin is not a terminal: then there is nothing to change.
    pub fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Flush, &raw)?;
        Ok(Some(Self { before }))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // A terminal that is gone (hung up) can't be restored, and nobody looks at it.
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &self.before);
    }
}

/// Columns and rows, where stdout or stdin is a terminal that knows them.
pub fn size() -> Option<(u16, u16)> {
    let known = |fd: Result<rustix::termios::Winsize, rustix::io::Errno>| fd.ok().filter(|w| w.ws_col > 0 && w.ws_row > 0);
    let size = known(tcgetwinsize(io::stdout())).or_else(|| known(tcgetwinsize(io::stdin())))?;
    Some((size.ws_col, size.ws_row))
}

/// Programs that take the whole screen ask for it with one of these, and give it back with the same and `l` for `h`.
const WHOLE_SCREEN: [&[u8]; 3] = [b"\x1b[?1049h", b"\x1b[?1047h", b"\x1b[?47h"];
/// Bytes of the longest of them, less one: what must be kept of an output to find one that is cut in two.
const KEPT: usize = 7;
/// Plain cursor keys and keypad, no bracketed paste, mouse or focus reports, the cursor shown, plain colours, and a fresh line.
const PLAIN: &[u8] = b"\x1b[?1l\x1b>\x1b[?2004l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1004l\x1b[?25h\x1b[0m\r\n";

/// An empty screen for a keyframe, whatever was going on before it: no half sequence, no whole screen, no margins, plain colours.
pub const EMPTY: &[u8] = b"\x18\x1b[?1049l\x1b[r\x1b[m\x1b[H\x1b[2J";

/// What the remote programs did to the screen, to be undone when they no longer can.
#[derive(Debug, Default)]
pub struct Screen {
    /// Leaving a whole screen nobody took would move the cursor to wherever it was once saved.
    taken_by: Option<&'static [u8]>,
    kept: Vec<u8>,
}

impl Screen {
    pub fn see(&mut self, output: &[u8]) {
        self.kept.extend_from_slice(output);
        for at in (0..self.kept.len()).filter(|at| self.kept[*at] == 0x1b) {
            let rest = &self.kept[at..];
            for taken in WHOLE_SCREEN {
                let (last, stem) = (taken.len() - 1, &taken[..taken.len() - 1]);
                if rest.starts_with(stem) {
                    match rest.get(last) {
                        Some(b'h') => self.taken_by = Some(taken),
                        Some(b'l') => self.taken_by = None,
                        _ => {}
                    }
                }
            }
        }
        self.kept.drain(..self.kept.len().saturating_sub(KEPT));
    }

    /// Whether a program has the whole screen: words of ours would stand in the middle of it.
    pub fn is_whole(&self) -> bool {
        self.taken_by.is_some()
    }

    /// What puts the terminal into a state fit for a prompt.
    pub fn reset(&self) -> Vec<u8> {
        let mut bytes = self.taken_by.map(<[u8]>::to_vec).unwrap_or_default();
        if let Some(last) = bytes.last_mut() {
            *last = b'l';
        }
        bytes.extend_from_slice(PLAIN);
        bytes
    }
}

/// Finds the keys that are meant for `cobox` itself: Enter, then `~` and a letter, as in ssh.
#[derive(Debug)]
pub struct EscapeScan {
    state: Escape,
}

#[derive(Debug, PartialEq, Eq)]
enum Escape {
    LineStart,
    Tilde,
    InLine,
}

/// What to do with what was typed.
#[derive(Debug, PartialEq, Eq)]
pub enum Typed {
    Send(Vec<u8>),
    Leave,
    Take,
    Release,
    Help,
}

impl EscapeScan {
    pub fn new() -> Self {
        Self { state: Escape::LineStart }
    }

    /// In order. A `~` after Enter is held back until the next byte shows what it was; `~~` is one `~`.
    pub fn scan(&mut self, bytes: &[u8]) -> Vec<Typed> {
        let mut typed = Vec::new();
        let mut send = Vec::with_capacity(bytes.len() + 1);
        for &byte in bytes {
            let own = match (&self.state, byte) {
                (Escape::LineStart, b'~') => {
                    self.state = Escape::Tilde;
                    continue;
                }
                (Escape::Tilde, b'.') => Some(Typed::Leave),
                (Escape::Tilde, b't') => Some(Typed::Take),
                (Escape::Tilde, b'r') => Some(Typed::Release),
                (Escape::Tilde, b'?') => Some(Typed::Help),
                (Escape::Tilde, b'~') => None,
                (Escape::Tilde, _) => {
                    send.push(b'~');
                    None
                }
                _ => None,
            };
            match own {
                Some(own) => {
                    if !send.is_empty() {
                        typed.push(Typed::Send(std::mem::take(&mut send)));
                    }
                    typed.push(own);
                    // As after Enter: two of them may follow each other.
                    self.state = Escape::LineStart;
                }
                None => {
                    send.push(byte);
                    self.state = if matches!(byte, b'\r' | b'\n') { Escape::LineStart } else { Escape::InLine };
                }
            }
        }
        if !send.is_empty() {
            typed.push(Typed::Send(send));
        }
        typed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_is_given_back_only_if_it_was_taken() {
        let leaves = |parts: &[&str]| {
            let mut screen = Screen::default();
            parts.iter().for_each(|part| screen.see(part.as_bytes()));
            String::from_utf8(screen.reset()).unwrap()
        };
        assert!(leaves(&["\x1b[?1049h", "vim"]).starts_with("\x1b[?1049l"));
        assert!(leaves(&["x\x1b[?10", "49h"]).starts_with("\x1b[?1049l"));
        assert!(leaves(&["\x1b[?47h"]).starts_with("\x1b[?47l"));
        for plain in [&["ls\r\n"][..], &["\x1b[?1049h..", "..\x1b[?1049l$ "]] {
            assert!(!leaves(plain).contains("1049"), "{plain:?}");
            assert!(leaves(plain).contains("\x1b[?25h") && leaves(plain).ends_with("\r\n"));
        }
    }

    #[test]
    fn keys_after_enter_and_tilde_are_ours_and_everything_else_is_sent_as_typed() {
        let scan = |parts: &[&str]| {
            let mut scan = EscapeScan::new();
            let words = parts.iter().flat_map(|part| scan.scan(part.as_bytes())).map(|typed| match typed {
                Typed::Send(bytes) => String::from_utf8(bytes).unwrap(),
                own => format!("<{own:?}>"),
            });
            words.collect::<String>()
        };
        assert_eq!(scan(&["ls\r", "~", "."]), "ls\r<Leave>");
        assert_eq!(scan(&["~."]), "<Leave>");
        assert_eq!(scan(&["cd ~.\r"]), "cd ~.\r");
        assert_eq!(scan(&["\r~~x"]), "\r~x");
        assert_eq!(scan(&["\r~", "/bin"]), "\r~/bin");
        assert_eq!(scan(&["\r~t~r~?x~."]), "\r<Take><Release><Help>x~.");
    }
}
