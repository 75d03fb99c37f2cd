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

/// Finds the way to leave a shell that no longer answers: Enter, then `~.`, as in ssh.
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
    /// Send this, then leave.
    Leave(Vec<u8>),
}

impl EscapeScan {
    pub fn new() -> Self {
        Self { state: Escape::LineStart }
    }

    /// A `~` after Enter is held back until the next byte shows what it was; `~~` is one `~`.
    pub fn scan(&mut self, bytes: &[u8]) -> Typed {
        let mut send = Vec::with_capacity(bytes.len() + 1);
        for &byte in bytes {
            match (&self.state, byte) {
                (Escape::LineStart, b'~') => {
                    self.state = Escape::Tilde;
                    continue;
                }
                (Escape::Tilde, b'.') => return Typed::Leave(send),
                (Escape::Tilde, b'~') => {}
                (Escape::Tilde, _) => send.push(b'~'),
                _ => {}
            }
            send.push(byte);
            self.state = if matches!(byte, b'\r' | b'\n') { Escape::LineStart } else { Escape::InLine };
        }
        Typed::Send(send)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enter_tilde_dot_leaves_and_everything_else_is_sent_as_typed() {
        let scan = |parts: &[&str]| {
            let mut scan = EscapeScan::new();
            let mut sent = Vec::new();
            for part in parts {
                match scan.scan(part.as_bytes()) {
                    Typed::Send(bytes) => sent.extend(bytes),
                    Typed::Leave(bytes) => {
                        sent.extend(bytes);
                        return (String::from_utf8(sent).unwrap(), true);
                    }
                }
            }
            (String::from_utf8(sent).unwrap(), false)
        };
        assert_eq!(scan(&["ls\r", "~", "."]), ("ls\r".into(), true));
        assert_eq!(scan(&["~."]), (String::new(), true));
        assert_eq!(scan(&["cd ~.\r"]), ("cd ~.\r".into(), false));
        assert_eq!(scan(&["\r~~x"]), ("\r~x".into(), false));
        assert_eq!(scan(&["\r~", "/bin"]), ("\r~/bin".into(), false));
    }
}
