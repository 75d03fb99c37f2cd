//! Draws an emulator's screen as bytes: both grids, cursors, the scrolling region and modes, also those that the emulator doesn't tell.
//!
//! What it doesn't tell is found out on a copy of it, by asking the copy to go there.

use vt100::{Callbacks, Parser, Screen};

/// Ends whatever a viewer's terminal was in the middle of, and brings it to a known state: primary screen, no region, no modes.
pub const CLEARED: &[u8] = b"\x18\x1b\\\x1b[?1049l\x1b[?6l\x1b[r\x1b[4l\x1b(B\x0f\x1b[?7h\x1b[?1004l\x1b[0 q\x1b[m\x1b[H\x1b[2J";
const ENTER_ALTERNATE: &[u8] = b"\x1b[?47h";
const LEAVE_ALTERNATE: &[u8] = b"\x1b[?47l";

/// What the emulator leaves to others, and a viewer needs to go on from.
#[derive(Clone, Debug, Default)]
pub struct Extras {
    no_wrap: bool,
    insert: bool,
    focus_events: bool,
    line_drawing: bool,
    /// As in DECSCUSR; 0 is the viewer's own choice.
    cursor_style: u8,
}

impl Callbacks for Extras {
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

impl Extras {
    fn write(&self, out: &mut Vec<u8>) {
        if self.focus_events {
            out.extend_from_slice(b"\x1b[?1004h");
        }
        self.write_writing(out);
        if self.cursor_style != 0 {
            out.extend_from_slice(format!("\x1b[{} q", self.cursor_style).as_bytes());
        }
    }

    /// How what is printed next is written.
    pub fn write_writing(&self, out: &mut Vec<u8>) {
        for (is_on, sequence) in [(self.no_wrap, b"\x1b[?7l".as_slice()), (self.insert, b"\x1b[4h"), (self.line_drawing, b"\x1b(0")] {
            if is_on {
                out.extend_from_slice(sequence);
            }
        }
    }
}

pub fn draw(parser: &Parser<Extras>) -> Vec<u8> {
    let screen = parser.screen();
    let mut out = CLEARED.to_vec();
    if screen.alternate_screen() {
        let mut primary = Probe::of(screen);
        primary.say(LEAVE_ALTERNATE);
        draw_grid(primary.screen(), &mut out);
        out.extend_from_slice(ENTER_ALTERNATE);
    } else if let Some(alternate) = left_alternate(screen) {
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

/// What was left on the alternate screen: a program may go back there without clearing it. `None` where there is nothing.
fn left_alternate(screen: &Screen) -> Option<Vec<u8>> {
    let drawn = |mut probe: Probe| {
        probe.say(ENTER_ALTERNATE);
        let mut out = Vec::new();
        draw_grid(probe.screen(), &mut out);
        out
    };
    let (rows, cols) = screen.size();
    let left = drawn(Probe::of(screen));
    (left != drawn(Probe::of(Parser::new(rows, cols, 0).screen()))).then_some(left)
}

/// One grid: its cells, the cursor that was saved in it, its region, then the cursor and the attributes of what comes next.
fn draw_grid(screen: &Screen, out: &mut Vec<u8>) {
    let mut saved = Probe::of(screen);
    saved.say(b"\x1b8");
    let saved_origin = Probe::of(saved.screen()).is_in_origin_mode();
    let origin = Probe::of(screen).is_in_origin_mode();
    let (top, bottom) = region(screen);

    // The cells first, by a cursor that moves over the whole screen.
    out.extend_from_slice(b"\x1b[?6l\x1b[r");
    out.extend_from_slice(&screen.contents_formatted());
    // Setting the region or that mode moves the cursor, so both cursors come after.
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

/// First and last row of what scrolls.
fn region(screen: &Screen) -> (u16, u16) {
    let mut probe = Probe::of(screen);
    probe.say(b"\x1b[?6h\x1b[1;1H");
    let top = probe.screen().cursor_position().0;
    probe.say(b"\x1b[9999;1H");
    (top, probe.screen().cursor_position().0)
}

pub fn has_region(screen: &Screen) -> bool {
    region(screen) != (0, screen.size().0 - 1)
}

/// The row that rows count from, where that is not the first.
pub fn origin(screen: &Screen) -> Option<u16> {
    if !Probe::of(screen).is_in_origin_mode() {
        return None;
    }
    let mut probe = Probe::of(screen);
    probe.say(b"\x1b[1;1H");
    Some(probe.screen().cursor_position().0)
}

/// The cursor and the attributes of what comes next. With an origin, rows count from there.
pub fn place_cursor(screen: &Screen, origin: Option<u16>, out: &mut Vec<u8>) {
    let (row, col) = screen.cursor_position();
    match origin {
        // A cursor beyond the last column can't be gone to: it is brought there by writing the last cell again. One that went on
        // from there to a row whose last cell is empty comes out one column to the left.
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

/// A copy of a screen that may be changed to find something out.
struct Probe(Parser<()>);

impl Probe {
    fn of(screen: &Screen) -> Self {
        let (rows, cols) = screen.size();
        let mut parser = Parser::new(1, 1, 0);
        parser.screen_mut().clone_from(screen);
        debug_assert_eq!(parser.screen().size(), (rows, cols));
        Self(parser)
    }

    fn say(&mut self, bytes: &[u8]) {
        self.0.process(bytes);
    }

    fn screen(&self) -> &Screen {
        self.0.screen()
    }

    /// With a region that doesn't begin at the top, home is not the top row in that mode.
    fn is_in_origin_mode(&mut self) -> bool {
        self.say(b"\x1b[2;9999r\x1b[1;1H");
        self.screen().cursor_position().0 != 0
    }
}
