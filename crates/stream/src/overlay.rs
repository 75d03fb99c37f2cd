//! Overlays text on a row of a terminal that shows a screen, and restores the row exactly.
//!
//! The program behind it isn't involved: its cursor and its modes are known from the emulator and are restored.

use vt100::Parser;

use crate::keyframe::{UntrackedModes, has_region, origin, place_cursor};

/// Resets everything that would change how the text is printed: origin and insert mode, wrapping, line drawing, colors.
const PLAIN_WRITING: &[u8] = b"\x1b[?6l\x1b[4l\x1b[?7h\x1b(B\x0f\x1b[m";

/// Draws text over a row in reverse video, and restores the program's cursor and modes.
pub fn draw_overlay(parser: &Parser<UntrackedModes>, row: u16, text: &str) -> Vec<u8> {
    let mut out = PLAIN_WRITING.to_vec();
    out.extend_from_slice(format!("\x1b[{};1H\x1b[7m{text}\x1b[m\x1b[K", row + 1).as_bytes());
    restore_cursor_and_modes(parser, &mut out);
    out
}

/// Draws the row itself again.
pub fn restore_row(parser: &Parser<UntrackedModes>, row: u16) -> Vec<u8> {
    let screen = parser.screen();
    let mut out = PLAIN_WRITING.to_vec();
    out.extend_from_slice(format!("\x1b[{};1H\x1b[K", row + 1).as_bytes());
    out.extend(rows(parser, u16::MAX).nth(usize::from(row)).unwrap_or_default());
    if screen.row_wrapped(row) && row + 1 < screen.size().0 && !has_region(screen) {
        // A row that wraps into the next one must still do so afterwards, or it would be copied as two lines. With a
        // scrolling region this could scroll, so it is left out.
        out.extend_from_slice(b"\x1b[m");
        out.extend(screen.rows_formatted(0, screen.size().1).nth(usize::from(row) + 1).unwrap_or_default());
    }
    restore_cursor_and_modes(parser, &mut out);
    out
}

/// Each row up to a width, to be drawn from the first column of an empty row.
pub fn rows(parser: &Parser<UntrackedModes>, width: u16) -> impl Iterator<Item = Vec<u8>> {
    let screen = parser.screen();
    // With the exact width, the emulator would rely on the previous row to wrap into this one.
    let width = if width == screen.size().1 { u16::MAX } else { width };
    screen.rows_formatted(0, width)
}

fn restore_cursor_and_modes(parser: &Parser<UntrackedModes>, out: &mut Vec<u8>) {
    let screen = parser.screen();
    let origin = origin(screen);
    if origin.is_some() {
        out.extend_from_slice(b"\x1b[?6h");
    }
    place_cursor(screen, origin, out);
    parser.callbacks().write_print_modes(out);
}
