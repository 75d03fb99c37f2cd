//! Reads an API key from the user: piped in, or typed without echo. Never an argument, which other users could see.

use std::io::{self, IsTerminal, Read};

use cobox_protocol::Secret;

use crate::{
    credentials,
    failure::{Failure, INTERRUPTED},
    printer::Printer,
    terminal::RawMode,
};

/// Longest input, in bytes: a key has 74 characters.
const MAX_KEY_BYTES: usize = 4096;
const CTRL_C: u8 = 3;
const CTRL_D: u8 = 4;
const CTRL_U: u8 = 21;
const BACKSPACE: [u8; 2] = [8, 127];

pub fn read_key(printer: Printer, prompt: &str) -> Result<Secret, Failure> {
    let text = if io::stdin().is_terminal() { read_typed(printer, prompt)? } else { read_piped()? };
    credentials::parse_key(&text).map_err(|reason| {
        Failure::new(format!("invalid API key: {reason}")).with_advice(
            "pipe the key to standard input, for example `cat key | cobox config add NAME --url URL`, or paste it at the prompt",
        )
    })
}

fn read_piped() -> Result<String, Failure> {
    let mut text = String::new();
    io::stdin().lock().take(MAX_KEY_BYTES as u64).read_to_string(&mut text)?;
    Ok(text)
}

/// Raw mode, so that nothing is echoed and Ctrl-C can't end the process with echo still disabled.
fn read_typed(printer: Printer, prompt: &str) -> Result<String, Failure> {
    // Before the prompt: text typed immediately must not be echoed either.
    let raw = RawMode::enter()?;
    printer.err(format!("{prompt}: ").as_bytes());
    let outcome = edit_line(io::stdin().lock());
    drop(raw);
    printer.err(b"\n");
    outcome
}

fn edit_line(mut keyboard: impl Read) -> Result<String, Failure> {
    let mut text = Vec::new();
    let mut byte = [0];
    while keyboard.read(&mut byte)? == 1 {
        match byte[0] {
            b'\r' | b'\n' => break,
            CTRL_C => return Err(Failure::new("interrupted").with_exit_code(INTERRUPTED)),
            CTRL_D if text.is_empty() => break,
            CTRL_U => text.clear(),
            key if BACKSPACE.contains(&key) => drop(text.pop()),
            key if text.len() < MAX_KEY_BYTES => text.push(key),
            _ => {}
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_can_be_edited_while_it_is_typed() {
        assert_eq!(edit_line(&b"cbx_ax\x7fb\r"[..]).unwrap(), "cbx_ab");
        assert_eq!(edit_line(&b"wrong\x15cbx_a\n"[..]).unwrap(), "cbx_a");
        assert_eq!(edit_line(&b"\x04"[..]).unwrap(), "");
        assert_eq!(edit_line(&b"cbx\x03"[..]).unwrap_err().exit_code, INTERRUPTED);
    }
}
