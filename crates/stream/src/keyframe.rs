//! Renders an emulator's screen as bytes: both grids, cursors, the scrolling region and modes.
//!
//! The emulator doesn't expose all of this. The rest is found out by feeding sequences to a copy of it.

use vt100::{Callbacks, Parser, Screen};

/// Ends any sequence that a viewer's terminal is in the middle of, and resets the terminal to a known state: primary
/// screen, no region, no modes.
pub const CLEARED: &[u8] = b"\x18\x1b\\\x1b[?1049l\x1b[?6l\x1b[r\x1b[4l\x1b(B\x0f\x1b[?7h\x1b[?1004l\x1b[0 q\x1b[m\x1b[H\x1b[2J";
const ENTER_ALTERNATE: &[u8] = b"\x1b[?47h";
const LEAVE_ALTERNATE: &[u8] = b"\x1b[?47l";

/// Modes that the emulator doesn't track and that a viewer's terminal must have before further output.
#[derive(Clone, Debug, Default)]
pub struct UntrackedModes {
    no_wrap: bool,
    insert: bool,
    focus_events: bool,
    line_drawing: bool,
    /// As in DECSCUSR; 0 is the viewer's default.
    cursor_style: u8,
}

impl Callbacks for UntrackedModes {
    fn unhandled_csi(&mut self, _: &mut Screen, first: Option<u8>, _second: Option<u8>, params: &[&[u16]], last: char) {
        let is_set = last == 'h';
        match (first, last) {
            (Some(b'?'), 'h' | 'l') => {
                for param in params {
                    match param {
                        [7] => self.no_wrap = !is_set,
                        [1004] => self.focus_events = is_set,
                        _ => {}
                    }
                }
            }
            (None, 'h' | 'l') if params.contains(&[4u16].as_slice()) => self.insert = is_set,
            (Some(b' '), 'q') => self.cursor_style = params.first().and_then(|p| p.first()).map_or(0, |style| (*style).min(6) as u8),
            (Some(b'!'), 'p') => *self = Self::default(),
            _ => {}
        }
    }

    fn unhandled_escape(&mut self, _: &mut Screen, first: Option<u8>, _second: Option<u8>, last: u8) {
        if first == Some(b'(') {
            self.line_drawing = last == b'0';
        }
    }
}

impl UntrackedModes {
    fn write(&self, out: &mut Vec<u8>) {
        if self.focus_events {
            out.extend_from_slice(b"\x1b[?1004h");
        }
        self.write_print_modes(out);
        if self.cursor_style != 0 {
            out.extend_from_slice(format!("\x1b[{} q", self.cursor_style).as_bytes());
        }
    }

    /// Writes the modes that affect how text is printed.
    pub fn write_print_modes(&self, out: &mut Vec<u8>) {
        for (is_on, sequence) in [(self.no_wrap, b"\x1b[?7l".as_slice()), (self.insert, b"\x1b[4h"), (self.line_drawing, b"\x1b(0")] {
            if is_on {
                out.extend_from_slice(sequence);
            }
        }
    }
}

pub fn draw(parser: &Parser<UntrackedModes>) -> Vec<u8> {
    let screen = parser.screen();
    let mut out = CLEARED.to_vec();
    if screen.alternate_screen() {
        let mut primary = Probe::of(screen);
        primary.feed(LEAVE_ALTERNATE);
        draw_grid(primary.screen(), &mut out);
        out.extend_from_slice(ENTER_ALTERNATE);
    } else if let Some(alternate) = hidden_alternate_screen(screen) {
        out.extend_from_slice(ENTER_ALTERNATE);
        out.extend_from_slice(&alternate);
        out.extend_from_slice(LEAVE_ALTERNATE);
    }
    draw_grid(screen, &mut out);
    out.extend_from_slice(&screen.input_mode_formatted());
    if screen.hide_cursor() {
        out.extend_from_slice(b"\x1b[?25l");
    }
    parser.callbacks().write(&mut out);
    out
}

/// The content of the alternate screen while the primary one is shown: a program may switch back without clearing it.
/// `None` if there is none.
fn hidden_alternate_screen(screen: &Screen) -> Option<Vec<u8>> {
    let drawn = |mut probe: Probe| {
        probe.feed(ENTER_ALTERNATE);
        let mut out = Vec::new();
        draw_grid(probe.screen(), &mut out);
        out
    };
    let (rows, cols) = screen.size();
    let left = drawn(Probe::of(screen));
    (left != drawn(Probe::of(Parser::new(rows, cols, 0).screen()))).then_some(left)
}

/// Draws one grid: its cells, its saved cursor, its region, then the cursor and the current attributes.
fn draw_grid(screen: &Screen, out: &mut Vec<u8>) {
    let mut saved = Probe::of(screen);
    saved.feed(b"\x1b8");
    let saved_origin = Probe::of(saved.screen()).is_in_origin_mode();
    let origin = Probe::of(screen).is_in_origin_mode();
    let (top, bottom) = region(screen);

    // First the cells, because this moves the cursor over the whole screen.
    out.extend_from_slice(b"\x1b[?6l\x1b[r");
    out.extend_from_slice(&screen.contents_formatted());
    // Setting the region or origin mode moves the cursor, so both cursors come after them.
    out.extend_from_slice(if saved_origin { b"\x1b[?6h" } else { b"\x1b[?6l" });
    if (top, bottom) != (0, screen.size().0 - 1) {
        out.extend_from_slice(format!("\x1b[{};{}r", top + 1, bottom + 1).as_bytes());
    }
    place_cursor(saved.screen(), saved_origin.then_some(top), out);
    out.extend_from_slice(b"\x1b7");
    if origin != saved_origin {
        out.extend_from_slice(if origin { b"\x1b[?6h" } else { b"\x1b[?6l" });
    }
    place_cursor(screen, origin.then_some(top), out);
}

/// First and last row of the scrolling region.
fn region(screen: &Screen) -> (u16, u16) {
    let mut probe = Probe::of(screen);
    probe.feed(b"\x1b[?6h\x1b[1;1H");
    let top = probe.screen().cursor_position().0;
    probe.feed(b"\x1b[9999;1H");
    (top, probe.screen().cursor_position().0)
}

pub fn has_region(screen: &Screen) -> bool {
    region(screen) != (0, screen.size().0 - 1)
}

/// The row that row numbers are relative to, or `None` if that is the first one.
pub fn origin(screen: &Screen) -> Option<u16> {
    if !Probe::of(screen).is_in_origin_mode() {
        return None;
    }
    let mut probe = Probe::of(screen);
    probe.feed(b"\x1b[1;1H");
    Some(probe.screen().cursor_position().0)
}

/// Sets the cursor and the current attributes. With an origin, row numbers are relative to it.
pub fn place_cursor(screen: &Screen, origin: Option<u16>, out: &mut Vec<u8>) {
    let (row, col) = screen.cursor_position();
    match origin {
        // The cursor can't be moved beyond the last column directly: writing the last cell again brings it there. A
        // cursor that moved from there to a row whose last cell is empty ends up one column to the left.
        None if col >= screen.size().1 && ends_with_a_character(screen, row) => {
            out.extend_from_slice(b"\x1b[m");
            out.extend_from_slice(&screen.cursor_state_formatted());
        }
        _ => {
            let row = (row + 1).saturating_sub(origin.unwrap_or(0)).max(1);
            out.extend_from_slice(format!("\x1b[{row};{}H", col + 1).as_bytes());
        }
    }
    out.extend_from_slice(&screen.attributes_formatted());
}

fn ends_with_a_character(screen: &Screen, row: u16) -> bool {
    screen.cell(row, screen.size().1 - 1).is_some_and(|cell| cell.has_contents() || cell.is_wide_continuation())
}

/// A copy of a screen that may be changed in order to inspect it.
struct Probe(Parser<()>);

impl Probe {
    fn of(screen: &Screen) -> Self {
        let (rows, cols) = screen.size();
        let mut parser = Parser::new(1, 1, 0);
        parser.screen_mut().clone_from(screen);
        debug_assert_eq!(parser.screen().size(), (rows, cols));
        Self(parser)
    }

    fn feed(&mut self, bytes: &[u8]) {
        self.0.process(bytes);
    }

    fn screen(&self) -> &Screen {
        self.0.screen()
    }

    /// In origin mode, with a region that doesn't begin at the top, the home position is not in the top row.
    fn is_in_origin_mode(&mut self) -> bool {
        self.feed(b"\x1b[2;9999r\x1b[1;1H");
        self.screen().cursor_position().0 != 0
    }
}
