//! Classifies a sequence once its deciding part is known.

use crate::annotations::SequenceKinds;

/// The number of an operating system command (OSC); `None` without one.
pub fn number(digits: &[u8]) -> Option<u32> {
    (!digits.is_empty()).then(|| digits.iter().fold(0u32, |n, d| n.saturating_mul(10).saturating_add(u32::from(d - b'0'))))
}

pub fn osc(number: Option<u32>) -> SequenceKinds {
    match number {
        // Some terminals take a command without a number for a title. Konsole uses 30 for its tab's title and 32 for
        // the icon.
        None | Some(0..=3 | 30 | 32) => SequenceKinds::TITLE,
        // The clipboard of xterm and of kitty; iTerm2's commands that copy, download and report.
        Some(52 | 5522 | 1337) => SequenceKinds::CLIPBOARD,
        // Notifications of iTerm2 (and ConEmu's progress), kitty and rxvt; xterm's log file; calls into Vim and Emacs;
        // kitty's file transfer.
        Some(9 | 99 | 777 | 46 | 51 | 5113) => SequenceKinds::HOST,
        Some(_) => SequenceKinds::NONE,
    }
}

/// `ESC` with intermediate characters: character sets and sizes. With `%` it selects another encoding than UTF-8, in
/// which bytes that are parts of characters here would be controls.
pub fn escape(header: &[u8]) -> SequenceKinds {
    if header.first() == Some(&b'%') { SequenceKinds::CLIPBOARD } else { SequenceKinds::NONE }
}

/// Colors, fonts, pointers: a value sets them, a question mark queries them.
pub fn may_query(number: Option<u32>) -> bool {
    matches!(number, Some(4 | 5 | 10..=19 | 21 | 22 | 50 | 60 | 61))
}

pub fn is_query(values: &[u8]) -> bool {
    values.contains(&b'?')
}

pub fn dcs(header: &[u8], last: u8) -> SequenceKinds {
    match last {
        b'q' | b'Q' if header.iter().any(|b| matches!(b, b'$' | b'+')) => SequenceKinds::QUERY,
        // `tmux;` passes the rest to the outer terminal; `|` programs keys; `@` is kitty's remote control.
        b't' if header.is_empty() => SequenceKinds::CLIPBOARD,
        b'|' | b'@' => SequenceKinds::CLIPBOARD,
        // `1000p` starts tmux control mode, in which iTerm2 executes what follows. Other parameters are ReGIS graphics, which can report.
        b'p' if !header.iter().any(|b| (0x20..=0x2f).contains(b)) => SequenceKinds::HOST,
        _ => SequenceKinds::NONE,
    }
}

/// Terminals may answer kitty's graphics commands. An image outside of the sequence (not `t=d`) is a file or shared
/// memory of the viewer's machine, which the terminal reads, and with `t=t` deletes.
pub fn graphics(header: &[u8]) -> SequenceKinds {
    let header: Vec<u8> = header.iter().copied().filter(|b| !b.is_ascii_control() && *b != b' ').collect();
    let is_external = |pair: &[u8]| pair.strip_prefix(b"t=").is_some_and(|medium| medium != b"d");
    if header.split(|b| *b == b',').any(is_external) { SequenceKinds::QUERY.with(SequenceKinds::HOST) } else { SequenceKinds::QUERY }
}

pub fn csi(header: &[u8], last: u8) -> SequenceKinds {
    let private = header.first().copied().filter(|b| (b'<'..=b'?').contains(b));
    let intermediate = header.iter().copied().find(|b| (0x20..=0x2f).contains(b));
    match (last, private, intermediate) {
        // Prints the screen, or all output that follows.
        (b'i', _, _) => SequenceKinds::HOST,
        // Device attributes and status reports. `CSI > … n` sets a key mode and queries nothing.
        (b'c', _, None) => SequenceKinds::QUERY,
        (b'n', None | Some(b'?'), None) => SequenceKinds::QUERY,
        // Queries of modes, the version, the keyboard's flags and modifiers.
        (b'p', _, Some(b'$')) | (b'q', Some(b'>'), None) | (b'u' | b'm', Some(b'?'), None) => SequenceKinds::QUERY,
        // Queries of parameters, checksums, presentation state, the locator, graphics attributes, pushed colors.
        (b'x', _, None) | (b'y' | b'z' | b'x', _, Some(b'*')) | (b'w' | b'u' | b'v', _, Some(b'$')) => SequenceKinds::QUERY,
        (b'u', _, Some(b'&')) | (b'|' | b'w' | b'{', _, Some(b'\'')) | (b'S', Some(b'?'), None) => SequenceKinds::QUERY,
        (b'R' | b'|', _, Some(b'#')) => SequenceKinds::QUERY,
        (b't', None, None) => window(header),
        (b't', Some(b'>'), None) => SequenceKinds::TITLE,
        _ => SequenceKinds::NONE,
    }
}

/// `CSI … t`: reports are queries; the rest moves, resizes or names the window.
fn window(header: &[u8]) -> SequenceKinds {
    let digits = header.split(|b| !b.is_ascii_digit()).next().unwrap_or_default();
    match number(digits) {
        Some(11 | 13..=16 | 18..=21) => SequenceKinds::QUERY,
        _ => SequenceKinds::TITLE,
    }
}
