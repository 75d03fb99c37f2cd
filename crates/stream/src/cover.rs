//! Words laid over a row of a terminal that shows a screen, and taken away again as if they had never been there.
//!
//! Nothing is asked of the program behind: where its cursor is and how it writes is known from the emulator, and put back.

use vt100::Parser;

use crate::keyframe::{Extras, has_region, origin, place_cursor};

/// Whatever the program has set that would change how words come out: origin and insert mode, wrapping, line drawing, colours.
const PLAINLY: &[u8] = b"\x1b[?6l\x1b[4l\x1b[?7h\x1b(B\x0f\x1b[m";

/// Draws `words` over a row, in reverse, and goes back to where the program was.
pub fn cover(parser: &Parser<Extras>, row: u16, words: &str) -> Vec<u8> {
    let mut out = PLAINLY.to_vec();
    out.extend_from_slice(format!("\x1b[{};1H\x1b[7m{words}\x1b[m\x1b[K", row + 1).as_bytes());
    go_back(parser, &mut out);
    out
}

/// Draws the row itself again.
pub fn uncover(parser: &Parser<Extras>, row: u16) -> Vec<u8> {
    let screen = parser.screen();
    let mut out = PLAINLY.to_vec();
    out.extend_from_slice(format!("\x1b[{};1H\x1b[K", row + 1).as_bytes());
    out.extend(rows(parser, u16::MAX).nth(usize::from(row)).unwrap_or_default());
    if screen.row_wrapped(row) && row + 1 < screen.size().0 && !has_region(screen) {
        // So does the line that goes on in the next row, or it would be two when it is copied. In a region that could scroll.
        out.extend_from_slice(b"\x1b[m");
        out.extend(screen.rows_formatted(0, screen.size().1).nth(usize::from(row) + 1).unwrap_or_default());
    }
    go_back(parser, &mut out);
    out
}

/// Each row up to a width, to be drawn from its first column on a row that is empty.
pub fn rows(parser: &Parser<Extras>, width: u16) -> impl Iterator<Item = Vec<u8>> {
    let screen = parser.screen();
    // Told the exact width the emulator would count on the row before to wrap into this one.
    let width = if width == screen.size().1 { u16::MAX } else { width };
    screen.rows_formatted(0, width)
}

fn go_back(parser: &Parser<Extras>, out: &mut Vec<u8>) {
    let screen = parser.screen();
    let origin = origin(screen);
    if origin.is_some() {
        out.extend_from_slice(b"\x1b[?6h");
    }
    place_cursor(screen, origin, out);
    parser.callbacks().write_writing(out);
}
