//! Encodes keys and mouse events as a terminal sends them, for the shell in the pane; no I/O.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers, MouseButton, MouseEvent, MouseEventKind};
use vt100::{MouseProtocolEncoding, MouseProtocolMode};

/// Empty for a key that terminals have no encoding for.
pub fn encode_key(key: &KeyEvent, has_application_cursor: bool) -> Vec<u8> {
    let (alt, ctrl, shift) = (
        key.modifiers.contains(KeyModifiers::ALT),
        key.modifiers.contains(KeyModifiers::CONTROL),
        key.modifiers.contains(KeyModifiers::SHIFT),
    );
    // Modifier number of xterm.
    let modifier = 1 + u8::from(shift) + 2 * u8::from(alt) + 4 * u8::from(ctrl);
    let arrow = |letter: char| match modifier {
        1 if has_application_cursor => format!("\x1bO{letter}"),
        1 => format!("\x1b[{letter}"),
        m => format!("\x1b[1;{m}{letter}"),
    };
    let numbered = |number: u8| match modifier {
        1 => format!("\x1b[{number}~"),
        m => format!("\x1b[{number};{m}~"),
    };
    let escaped = |bytes: Vec<u8>| if alt { [b"\x1b".to_vec(), bytes].concat() } else { bytes };
    match key.code {
        KeyCode::Char(c) if ctrl => control(c).map(|byte| escaped(vec![byte])).unwrap_or_default(),
        KeyCode::Char(c) => escaped(c.to_string().into_bytes()),
        KeyCode::Enter => escaped(b"\r".to_vec()),
        KeyCode::Tab => escaped(b"\t".to_vec()),
        KeyCode::BackTab => b"\x1b[Z".to_vec(),
        KeyCode::Backspace if ctrl => escaped(b"\x08".to_vec()),
        KeyCode::Backspace => escaped(b"\x7f".to_vec()),
        KeyCode::Esc => escaped(b"\x1b".to_vec()),
        KeyCode::Up => arrow('A').into_bytes(),
        KeyCode::Down => arrow('B').into_bytes(),
        KeyCode::Right => arrow('C').into_bytes(),
        KeyCode::Left => arrow('D').into_bytes(),
        KeyCode::Home => arrow('H').into_bytes(),
        KeyCode::End => arrow('F').into_bytes(),
        KeyCode::Insert => numbered(2).into_bytes(),
        KeyCode::Delete => numbered(3).into_bytes(),
        KeyCode::PageUp => numbered(5).into_bytes(),
        KeyCode::PageDown => numbered(6).into_bytes(),
        KeyCode::F(n @ 1..=4) if modifier == 1 => format!("\x1bO{}", char::from(b'O' + n)).into_bytes(),
        KeyCode::F(n @ 1..=4) => format!("\x1b[1;{modifier}{}", char::from(b'O' + n)).into_bytes(),
        KeyCode::F(n @ 5..=12) => numbered([15, 17, 18, 19, 20, 21, 23, 24][usize::from(n) - 5]).into_bytes(),
        _ => Vec::new(),
    }
}

/// Encodes pasted text, with bracketed paste markers if the program enabled them. An end marker within the text is
/// removed: the text after it would run as typed input.
pub fn encode_paste(text: &str, is_bracketed: bool) -> Vec<u8> {
    let text = text.replace("\r\n", "\r").replace('\n', "\r");
    if is_bracketed {
        format!("\x1b[200~{}\x1b[201~", text.replace("\x1b[201~", "").replace('\x1b', "")).into_bytes()
    } else {
        text.into_bytes()
    }
}

/// Encodes a mouse event at this column and row; `None` if the program did not enable it.
pub fn encode_mouse(mouse: &MouseEvent, at: (u16, u16), mode: MouseProtocolMode, encoding: MouseProtocolEncoding) -> Option<Vec<u8>> {
    use MouseProtocolMode as Mode;
    let is_enabled = match mouse.kind {
        MouseEventKind::Down(_) => mode != Mode::None,
        MouseEventKind::Drag(_) => matches!(mode, Mode::ButtonMotion | Mode::AnyMotion),
        MouseEventKind::Moved => mode == Mode::AnyMotion,
        _ => !matches!(mode, Mode::None | Mode::Press),
    };
    if !is_enabled {
        return None;
    }
    let button = |button: MouseButton| match button {
        MouseButton::Left => 0,
        MouseButton::Middle => 1,
        MouseButton::Right => 2,
    };
    let is_sgr = encoding == MouseProtocolEncoding::Sgr;
    let code: u16 = match mouse.kind {
        MouseEventKind::Up(_) if !is_sgr => 3,
        MouseEventKind::Down(b) | MouseEventKind::Up(b) => button(b),
        MouseEventKind::Drag(b) => 32 + button(b),
        MouseEventKind::Moved => 32 + 3,
        MouseEventKind::ScrollUp => 64,
        MouseEventKind::ScrollDown => 65,
        MouseEventKind::ScrollLeft => 66,
        MouseEventKind::ScrollRight => 67,
    };
    let modifier_bit = |modifier, bit: u16| if mouse.modifiers.contains(modifier) { bit } else { 0 };
    let code = code + modifier_bit(KeyModifiers::SHIFT, 4) + modifier_bit(KeyModifiers::ALT, 8) + modifier_bit(KeyModifiers::CONTROL, 16);
    let (col, row) = (at.0.saturating_add(1), at.1.saturating_add(1));
    let encoded_bytes = [code, col, row].map(|n| n.saturating_add(32));
    match encoding {
        MouseProtocolEncoding::Sgr => {
            let last = if matches!(mouse.kind, MouseEventKind::Up(_)) { 'm' } else { 'M' };
            Some(format!("\x1b[<{code};{col};{row}{last}").into_bytes())
        }
        MouseProtocolEncoding::Utf8 => {
            let letters: Option<String> = encoded_bytes.into_iter().map(|n| char::from_u32(u32::from(n))).collect();
            Some([b"\x1b[M", letters?.as_bytes()].concat())
        }
        // Fails for a position beyond the range of a byte.
        MouseProtocolEncoding::Default => {
            let bytes: Result<Vec<u8>, _> = encoded_bytes.into_iter().map(u8::try_from).collect();
            Some([b"\x1b[M".to_vec(), bytes.ok()?].concat())
        }
    }
}

fn control(c: char) -> Option<u8> {
    match c.to_ascii_lowercase() {
        c @ 'a'..='z' => Some(c as u8 - b'a' + 1),
        ' ' | '@' | '2' => Some(0),
        '[' | '3' => Some(0x1b),
        '\\' | '4' => Some(0x1c),
        ']' | '5' => Some(0x1d),
        '^' | '6' => Some(0x1e),
        '_' | '/' | '7' => Some(0x1f),
        '?' | '8' => Some(0x7f),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_encoded_as_by_xterm() {
        let key = |code, modifiers| String::from_utf8(encode_key(&KeyEvent::new(code, modifiers), false)).unwrap();
        let (none, ctrl, alt) = (KeyModifiers::NONE, KeyModifiers::CONTROL, KeyModifiers::ALT);
        for (code, modifiers, bytes) in [
            (KeyCode::Char('é'), none, "é"),
            (KeyCode::Char('c'), ctrl, "\x03"),
            (KeyCode::Char('x'), alt, "\x1bx"),
            (KeyCode::Enter, none, "\r"),
            (KeyCode::Up, none, "\x1b[A"),
            (KeyCode::Left, ctrl, "\x1b[1;5D"),
            (KeyCode::F(1), none, "\x1bOP"),
            (KeyCode::F(5), none, "\x1b[15~"),
            (KeyCode::F(12), none, "\x1b[24~"),
            (KeyCode::Delete, none, "\x1b[3~"),
            (KeyCode::CapsLock, none, ""),
        ] {
            assert_eq!(key(code, modifiers), bytes, "{code:?}");
        }
        assert_eq!(encode_key(&KeyEvent::new(KeyCode::Up, none), true), b"\x1bOA");
    }

    #[test]
    fn mouse_events_are_encoded_as_by_xterm() {
        use MouseProtocolEncoding as Encoding;
        use MouseProtocolMode as Mode;
        let (left, right) = (MouseButton::Left, MouseButton::Right);
        let encoded =
            |kind, modifiers, mode, encoding| encode_mouse(&MouseEvent { kind, column: 0, row: 0, modifiers }, (4, 2), mode, encoding);
        let (none, ctrl) = (KeyModifiers::NONE, KeyModifiers::CONTROL);
        for (kind, modifiers, mode, encoding, bytes) in [
            (MouseEventKind::Down(left), none, Mode::PressRelease, Encoding::Sgr, Some("\x1b[<0;5;3M")),
            (MouseEventKind::Up(right), none, Mode::PressRelease, Encoding::Sgr, Some("\x1b[<2;5;3m")),
            (MouseEventKind::ScrollDown, ctrl, Mode::PressRelease, Encoding::Sgr, Some("\x1b[<81;5;3M")),
            (MouseEventKind::Down(right), none, Mode::Press, Encoding::Default, Some("\x1b[M\"%#")),
            (MouseEventKind::Up(right), none, Mode::PressRelease, Encoding::Utf8, Some("\x1b[M#%#")),
            (MouseEventKind::Drag(left), none, Mode::ButtonMotion, Encoding::Sgr, Some("\x1b[<32;5;3M")),
            (MouseEventKind::Moved, none, Mode::AnyMotion, Encoding::Sgr, Some("\x1b[<35;5;3M")),
            (MouseEventKind::Moved, none, Mode::ButtonMotion, Encoding::Sgr, None),
            (MouseEventKind::Drag(left), none, Mode::PressRelease, Encoding::Sgr, None),
            (MouseEventKind::Up(left), none, Mode::Press, Encoding::Sgr, None),
            (MouseEventKind::Down(left), none, Mode::None, Encoding::Sgr, None),
        ] {
            let encoded = encoded(kind, modifiers, mode, encoding).map(|bytes| String::from_utf8(bytes).unwrap());
            assert_eq!(encoded.as_deref(), bytes, "{kind:?} {mode:?}");
        }
        let click = MouseEvent { kind: MouseEventKind::Down(left), column: 0, row: 0, modifiers: none };
        assert_eq!(encode_mouse(&click, (300, 2), Mode::Press, Encoding::Default), None, "the position does not fit in a byte");
    }

    #[test]
    fn a_paste_cannot_contain_its_end_marker() {
        assert_eq!(encode_paste("a\nb", false), b"a\rb");
        assert_eq!(encode_paste("a\x1b[201~rm\n", true), b"\x1b[200~arm\r\x1b[201~");
    }
}
