//! An API key from whoever types the command: piped in, or typed where nobody sees it. Never an argument.

use std::io::{self, IsTerminal, Read};

use cobox_protocol::Secret;

use crate::{
    credentials,
    failure::{Failure, INTERRUPTED},
    printer::Printer,
    terminal::RawMode,
};

/// Most that is taken, in bytes: a key is 74 characters.
const MAX_KEY: usize = 4096;
const CTRL_C: u8 = 3;
const CTRL_D: u8 = 4;
const CTRL_U: u8 = 21;
const BACKSPACE: [u8; 2] = [8, 127];

pub fn read(printer: Printer, prompt: &str) -> Result<Secret, Failure> {
    let text = if io::stdin().is_terminal() { typed(printer, prompt)? } else { piped()? };
    credentials::parse(&text).map_err(|why| {
        Failure::new(format!("that is no API key: {why}"))
            .advise("pipe it in, as in `cat key | cobox config add NAME --url URL`, or paste it when asked")
    })
}

fn piped() -> Result<String, Failure> {
    let mut text = String::new();
    io::stdin().lock().take(MAX_KEY as u64).read_to_string(&mut text)?;
    Ok(text)
}

/// Raw, so that nothing is shown and Ctrl-C can't end us with the terminal still silent.
fn typed(printer: Printer, prompt: &str) -> Result<String, Failure> {
    // Before anybody is asked: what is typed at once must not be shown either.
    let raw = RawMode::enter()?;
    printer.err(format!("{prompt}: ").as_bytes());
    let outcome = keys(io::stdin().lock());
    drop(raw);
    printer.err(b"\n");
    outcome
}

fn keys(mut keyboard: impl Read) -> Result<String, Failure> {
    let mut text = Vec::new();
    let mut byte = [0];
    while keyboard.read(&mut byte)? == 1 {
        match byte[0] {
            b'\r' | b'\n' => break,
            CTRL_C => return Err(Failure::new("interrupted").exit_with(INTERRUPTED)),
            CTRL_D if text.is_empty() => break,
            CTRL_U => text.clear(),
            key if BACKSPACE.contains(&key) => drop(text.pop()),
            key if text.len() < MAX_KEY => text.push(key),
            _ => {}
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_can_be_mended_while_it_is_typed() {
        assert_eq!(keys(&b"cbx_ax\x7fb\r"[..]).unwrap(), "cbx_ab");
        assert_eq!(keys(&b"wrong\x15cbx_a\n"[..]).unwrap(), "cbx_a");
        assert_eq!(keys(&b"\x04"[..]).unwrap(), "");
        assert_eq!(keys(&b"cbx\x03"[..]).unwrap_err().exit_code, INTERRUPTED);
    }
}
