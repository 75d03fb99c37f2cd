//! What a sequence is, once its deciding part is known.

use crate::notes::Kinds;

/// The number of an operating system command; `None` without one.
pub fn number(digits: &[u8]) -> Option<u32> {
    (!digits.is_empty()).then(|| digits.iter().fold(0u32, |n, d| n.saturating_mul(10).saturating_add(u32::from(d - b'0'))))
}

pub fn of_osc(number: Option<u32>) -> Kinds {
    match number {
        // A command without a number is a title to some.
        // Konsole has 30 for its tab's and 32 for the icon.
        None | Some(0..=3 | 30 | 32) => Kinds::TITLE,
        // The clipboard of xterm and of kitty; iTerm2's commands copy, download and report.
        Some(52 | 5522 | 1337) => Kinds::CLIPBOARD,
        // Notifications of iTerm2 (and ConEmu's progress), kitty and rxvt; xterm's log file; calls into Vim and Emacs; kitty's file transfer.
        Some(9 | 99 | 777 | 46 | 51 | 5113) => Kinds::HOST,
        Some(_) => Kinds::NONE,
    }
}

/// `ESC` and a character after others: character sets, sizes, and with `%` another coding than UTF-8, in which bytes that pass here as
/// parts of characters would be controls.
pub fn of_escape(header: &[u8]) -> Kinds {
    if header.first() == Some(&b'%') { Kinds::CLIPBOARD } else { Kinds::NONE }
}

/// Colours, fonts, pointers: set by a value, asked for by a question mark.
pub fn may_ask(number: Option<u32>) -> bool {
    matches!(number, Some(4 | 5 | 10..=19 | 21 | 22 | 50 | 60 | 61))
}

pub fn asks(values: &[u8]) -> bool {
    values.contains(&b'?')
}

pub fn of_dcs(header: &[u8], last: u8) -> Kinds {
    match last {
        b'q' | b'Q' if header.iter().any(|b| matches!(b, b'$' | b'+')) => Kinds::QUERY,
        // `tmux;` hands the rest to the terminal outside; `|` programs keys; `@` is kitty's remote control.
        b't' if header.is_empty() => Kinds::CLIPBOARD,
        b'|' | b'@' => Kinds::CLIPBOARD,
        _ => Kinds::NONE,
    }
}

/// kitty's graphics may be answered. An image that is not in the sequence itself (`t=d`) is a file or shared memory of the viewer's machine,
/// which the terminal reads, and with `t=t` deletes.
pub fn of_graphics(header: &[u8]) -> Kinds {
    let header: Vec<u8> = header.iter().copied().filter(|b| !b.is_ascii_control() && *b != b' ').collect();
    let is_elsewhere = |pair: &[u8]| pair.strip_prefix(b"t=").is_some_and(|medium| medium != b"d");
    if header.split(|b| *b == b',').any(is_elsewhere) { Kinds::QUERY.with(Kinds::HOST) } else { Kinds::QUERY }
}

pub fn of_csi(header: &[u8], last: u8) -> Kinds {
    let private = header.first().copied().filter(|b| (b'<'..=b'?').contains(b));
    let intermediate = header.iter().copied().find(|b| (0x20..=0x2f).contains(b));
    match (last, private, intermediate) {
        // Prints the screen, or all that follows.
        (b'i', _, _) => Kinds::HOST,
        // Device attributes; status reports. `CSI > … n` sets a key mode and asks nothing.
        (b'c', _, None) => Kinds::QUERY,
        (b'n', None | Some(b'?'), None) => Kinds::QUERY,
        // Modes, the version, the keyboard's flags and modifiers.
        (b'p', _, Some(b'$')) | (b'q', Some(b'>'), None) | (b'u' | b'm', Some(b'?'), None) => Kinds::QUERY,
        // Parameters, checksums, presentation state, the locator, graphics' attributes, pushed colours.
        (b'x', _, None) | (b'y' | b'z' | b'x', _, Some(b'*')) | (b'w' | b'u' | b'v', _, Some(b'$')) => Kinds::QUERY,
        (b'u', _, Some(b'&')) | (b'|' | b'w' | b'{', _, Some(b'\'')) | (b'S', Some(b'?'), None) => Kinds::QUERY,
        (b'R' | b'|', _, Some(b'#')) => Kinds::QUERY,
        (b't', None, None) => of_window(header),
        (b't', Some(b'>'), None) => Kinds::TITLE,
        _ => Kinds::NONE,
    }
}

/// `CSI … t`: reports are queries, the rest moves, resizes or names the window.
fn of_window(header: &[u8]) -> Kinds {
    let digits = header.split(|b| !b.is_ascii_digit()).next().unwrap_or_default();
    match number(digits) {
        Some(11 | 13..=16 | 18..=21) => Kinds::QUERY,
        _ => Kinds::TITLE,
    }
}
