//! The screen of the shared shell: turns a sandbox's output into cells, and confines any output to the pane.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tui_term::widget::Screen as DrawnScreen;

/// Lines of scrollback above the screen.
const SCROLLBACK_LINES: usize = 1000;
/// Largest emulated screen, in cells: a 4K display with the smallest readable font.
const MAX_CELLS: u32 = 128 * 1024;
/// Smallest emulated side: a wide character must fit into a row.
const MIN_SIDE: u16 = 2;
/// After this many panics the output is assumed to be malicious, and the pane stays empty.
const MAX_PANICS: u32 = 3;

pub struct Emulator {
    parser: Option<vt100::Parser>,
    panics: u32,
}

impl Emulator {
    pub fn new(cols: u16, rows: u16) -> Self {
        Self { parser: new_parser(cols, rows), panics: 0 }
    }

    pub fn process(&mut self, bytes: &[u8]) {
        self.catch_panics(|parser| parser.process(bytes));
    }

    pub fn resize(&mut self, cols: u16, rows: u16) {
        if fits(cols, rows) && self.parser.is_some() {
            self.catch_panics(|parser| parser.screen_mut().set_size(rows.max(MIN_SIDE), cols.max(MIN_SIDE)));
        } else if self.panics < MAX_PANICS {
            self.parser = new_parser(cols, rows);
        }
    }

    /// Replaces the screen by an empty one of this size and processes the bytes.
    pub fn redraw(&mut self, cols: u16, rows: u16, bytes: &[u8]) {
        if self.panics < MAX_PANICS {
            self.parser = new_parser(cols, rows);
        }
        self.process(bytes);
    }

    pub fn screen(&self) -> Option<&vt100::Screen> {
        self.parser.as_ref().map(vt100::Parser::screen)
    }

    /// Scrolls up by a positive number, down by a negative one.
    pub fn scroll(&mut self, lines: isize) {
        self.catch_panics(|parser| {
            let at = parser.screen().scrollback().saturating_add_signed(lines);
            parser.screen_mut().set_scrollback(at);
        });
    }

    pub fn scroll_to_end(&mut self) {
        self.catch_panics(|parser| parser.screen_mut().set_scrollback(0));
    }

    /// The part of the screen that fits into `rows` rows and contains the cursor.
    pub fn window(&self, rows: u16) -> Option<Window<'_>> {
        let screen = self.screen()?;
        let (all_rows, _) = screen.size();
        let (cursor, _) = screen.cursor_position();
        let top = if screen.scrollback() > 0 { 0 } else { (cursor + 1).saturating_sub(rows).min(all_rows.saturating_sub(rows)) };
        Some(Window { screen, top })
    }

    fn catch_panics(&mut self, work: impl FnOnce(&mut vt100::Parser)) {
        let Some(parser) = &mut self.parser else { return };
        if catch_unwind(AssertUnwindSafe(|| work(parser))).is_err() {
            self.panics += 1;
            let (rows, cols) = catch_unwind(AssertUnwindSafe(|| parser.screen().size())).unwrap_or((MIN_SIDE, MIN_SIDE));
            self.parser = if self.panics < MAX_PANICS { new_parser(cols, rows) } else { None };
        }
    }
}

fn fits(cols: u16, rows: u16) -> bool {
    u32::from(cols) * u32::from(rows) <= MAX_CELLS
}

fn new_parser(cols: u16, rows: u16) -> Option<vt100::Parser> {
    fits(cols, rows).then(|| vt100::Parser::new(rows.max(MIN_SIDE), cols.max(MIN_SIDE), SCROLLBACK_LINES))
}

/// A part of a screen, from one of its rows downwards.
pub struct Window<'a> {
    screen: &'a vt100::Screen,
    top: u16,
}

impl Window<'_> {
    /// The first row of the screen that is visible.
    pub fn top(&self) -> u16 {
        self.top
    }
}

impl DrawnScreen for Window<'_> {
    type C = vt100::Cell;

    fn cell(&self, row: u16, col: u16) -> Option<&vt100::Cell> {
        self.screen.cell(row.checked_add(self.top)?, col)
    }
    fn hide_cursor(&self) -> bool {
        self.screen.hide_cursor() || self.screen.scrollback() > 0
    }
    fn cursor_position(&self) -> (u16, u16) {
        let (row, col) = self.screen.cursor_position();
        (row.saturating_sub(self.top), col)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_screen_taller_than_the_pane_shows_the_rows_around_the_cursor() {
        let mut emulator = Emulator::new(20, 10);
        for n in 0..10 {
            emulator.process(format!("line {n}{}", if n < 9 { "\r\n" } else { "" }).as_bytes());
        }
        let window = emulator.window(4).unwrap();
        let row = |n: u16| (0..6).map(|c| window.cell(n, c).unwrap().contents().to_owned()).collect::<String>();
        assert_eq!((row(0), row(3)), ("line 6".into(), "line 9".into()));
        assert_eq!(window.cursor_position().0, 3);
        emulator.redraw(20, 10, b"fresh");
        assert!(emulator.screen().unwrap().contents().starts_with("fresh"));
    }

    proptest! {
        #[test]
        fn no_output_or_size_makes_it_panic(parts in proptest::collection::vec((any::<Vec<u8>>(), 0u16..40, 0u16..40), 0..8)) {
            let mut emulator = Emulator::new(10, 3);
            for (bytes, cols, rows) in parts {
                emulator.process(&bytes);
                emulator.resize(cols, rows);
                emulator.scroll(3);
                emulator.process("\u{1b}[999;999Hwide 字\u{1b}[2J".as_bytes());
                let _ = emulator.window(5).map(|w| w.cell(4, 9).is_some());
            }
        }
    }
}
