//! A copy of the terminal's screen contents. It allows showing and removing an overlay, redrawing the screen, and
//! showing a shell of a different size.

use cobox_stream::{Screen, SequenceKinds};

use super::gate::Gate;
use crate::terminal::{Modes, guarded};

/// Clears the screen from any state: cancels a partial sequence, the alternate screen, margins and colours.
const EMPTY: &[u8] = b"\x18\x1b\\\x1b[?1049l\x1b[?6l\x1b[r\x1b[m\x1b[H\x1b[2J";
const NO_WRAP: &[u8] = b"\x1b[?7l";
const WRAP: &[u8] = b"\x1b[?7h";

pub struct Picture {
    gate: Gate,
    /// What programs may do to this terminal besides printing.
    allows: SequenceKinds,
    screen: Screen,
    modes: Modes,
    /// Columns and rows of the local terminal.
    here: (u16, u16),
    /// Whether the terminal shows exactly this copy. Initially it still shows the user's earlier output, and new output
    /// appears below it.
    is_known: bool,
    /// Whether another participant controls the shell. The controller's terminal gets all modes that programs set; an
    /// observer's terminal doesn't report its mouse to them.
    is_watched: bool,
    /// Contents of each drawn row, in row-by-row mode: used while the shell and the local terminal differ in size.
    drawn: Option<Vec<Vec<u8>>>,
    /// The overlay text, and the row that it covers now.
    words: Option<String>,
    covered: Option<u16>,
}

impl Picture {
    pub fn new(here: (u16, u16), allows: SequenceKinds) -> Self {
        Self {
            gate: Gate::default(),
            allows,
            screen: Screen::new(here.0, here.1),
            modes: Modes::default(),
            here,
            is_known: false,
            is_watched: false,
            drawn: None,
            words: None,
            covered: None,
        }
    }

    /// Processes the next output and returns what to write to the terminal.
    pub fn output(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = self.lift();
        let shown = self.see(bytes);
        if self.is_row_by_row() {
            return self.draw_rows();
        }
        out.extend(shown);
        if self.is_watched {
            out.extend(self.modes.reports_off());
        }
        out.extend(self.lay());
        out
    }

    /// Replaces the screen with a keyframe after output was missed.
    pub fn keyframe(&mut self, cols: u16, rows: u16, bytes: &[u8]) -> Vec<u8> {
        let mut out = if self.drawn.is_some() { Vec::new() } else { self.modes.off() };
        (self.modes, self.covered) = (Modes::default(), None);
        (self.gate, self.screen) = (Gate::default(), Screen::new(cols, rows));
        self.see(EMPTY);
        let shown = self.see(bytes);
        out.extend(self.emptied());
        out.extend(self.redrawn(shown));
        out
    }

    /// The escape sequences to hide. An observer's terminal gets no queries, because its answers would be typed into a
    /// shell that it doesn't control.
    fn hides(&self) -> SequenceKinds {
        if self.is_watched { SequenceKinds::ALL } else { SequenceKinds::ALL.without(SequenceKinds::QUERY).without(self.allows) }
    }

    /// Applies output to the copy, and returns the part that the terminal may get.
    fn see(&mut self, bytes: &[u8]) -> Vec<u8> {
        let hides = self.hides();
        let (shown, found) = self.gate.admit(bytes, hides);
        self.modes.see(&shown);
        guarded(|| self.screen.feed(bytes, &found));
        shown
    }

    /// Handles a new size of the shell.
    pub fn shell_resized(&mut self, cols: u16, rows: u16) -> Vec<u8> {
        let was_row_by_row = self.is_row_by_row();
        guarded(|| self.screen.resize(cols, rows));
        // The terminal has moved an overlay together with the rest of the screen, so it has to be redrawn.
        if self.covered.is_some() || was_row_by_row || self.is_row_by_row() { self.redraw() } else { Vec::new() }
    }

    /// Handles a new size of the local terminal.
    pub fn resized_here(&mut self, here: (u16, u16)) -> Vec<u8> {
        let was_row_by_row = self.is_row_by_row();
        self.here = here;
        // The terminal has returned to the shell's size, perhaps before the shell was notified of the other one: its
        // programs will then not redraw the part that had been cut off.
        let is_back = here == self.screen.size();
        if was_row_by_row || is_back || self.is_row_by_row() { self.redraw() } else { Vec::new() }
    }

    /// Sets whether another participant controls the shell.
    pub fn set_watched(&mut self, is_watched: bool) -> Vec<u8> {
        if self.is_watched == is_watched {
            return Vec::new();
        }
        let was_row_by_row = self.is_row_by_row();
        self.is_watched = is_watched;
        match is_watched {
            _ if was_row_by_row || self.is_row_by_row() => self.redraw(),
            true => self.modes.reports_off(),
            false => self.modes.reports_on(),
        }
    }

    /// Shows an overlay, or removes it.
    pub fn say(&mut self, words: Option<String>) -> Vec<u8> {
        if self.words == words {
            return Vec::new();
        }
        let mut out = self.lift();
        self.words = words;
        if self.is_row_by_row() {
            return self.draw_rows();
        }
        out.extend(self.lay());
        out
    }

    /// Redraws everything, on a terminal in any state.
    pub fn redraw(&mut self) -> Vec<u8> {
        self.covered = None;
        let mut out = self.emptied();
        let mut itself = guarded(|| self.screen.redraw());
        // The screen's redraw includes the beginning of an incomplete sequence; the bytes that the filter still holds
        // back must not be written yet.
        if itself.ends_with(self.gate.held()) {
            itself.truncate(itself.len() - self.gate.held().len());
        }
        out.extend(self.redrawn(itself));
        out
    }

    /// Clears the screen; the first time, the user's earlier output is scrolled into the scrollback first.
    fn emptied(&mut self) -> Vec<u8> {
        if std::mem::replace(&mut self.is_known, true) {
            return EMPTY.to_vec();
        }
        let rows = self.here.1;
        let scrolled = format!("\x18\x1b\\\x1b[?1049l\x1b[?6l\x1b[r\x1b[m\x1b[{rows};1H{}", "\n".repeat(usize::from(rows)));
        [scrolled.as_bytes(), EMPTY].concat()
    }

    /// Draws on a cleared screen: directly if the shell fits, otherwise row by row.
    fn redrawn(&mut self, itself: Vec<u8>) -> Vec<u8> {
        let was_row_by_row = self.drawn.take().is_some();
        if self.is_row_by_row() {
            // Modes that programs set are meant for a terminal of the shell's size that controls it.
            let off = if was_row_by_row { Vec::new() } else { self.modes.off() };
            return [off, NO_WRAP.to_vec(), self.draw_rows()].concat();
        }
        let mut out = if was_row_by_row { WRAP.to_vec() } else { Vec::new() };
        // Modes that were switched off in between are tracked as on again.
        self.modes.see(&itself);
        out.extend(itself);
        if self.is_watched {
            out.extend(self.modes.reports_off());
        }
        out.extend(self.lay());
        out
    }

    /// Restores the terminal to a state fit for a prompt, below the output.
    pub fn leave(&mut self, is_exit: bool) -> Vec<u8> {
        self.words = None;
        let mut out = self.lift();
        if self.drawn.take().is_some() {
            out.extend(self.draw_rows());
            out.extend_from_slice(format!("{}\x1b[?25h\x1b[m\x1b[{};1H\r\n", String::from_utf8_lossy(WRAP), self.here.1).as_bytes());
            return out;
        }
        let (row, col) = self.screen.cursor();
        let is_alternate = self.modes.is_alternate();
        out.extend_from_slice(self.gate.finish(self.hides()));
        out.extend(self.modes.off());
        if self.modes.moves_cursor() {
            let row = if self.is_known { row + 1 } else { self.here.1 };
            out.extend_from_slice(format!("\x1b[{row};{}H", col + 1).as_bytes());
        }
        // A program that exited by itself has left the cursor where it wants the next prompt.
        if is_alternate || (!is_exit && col > 0) {
            out.extend_from_slice(b"\r\n");
        }
        self.modes = Modes::default();
        out
    }

    /// Whether the terminal shows the alternate screen.
    pub fn is_alternate(&self) -> bool {
        self.modes.is_alternate() && self.drawn.is_none()
    }

    pub fn shell_size(&self) -> (u16, u16) {
        self.screen.size()
    }

    /// Whether rows are drawn one by one: an observer's terminal may differ in size from the shell, whose programs rely
    /// on the shell's size.
    fn is_row_by_row(&self) -> bool {
        self.is_watched && self.here != self.screen.size()
    }

    /// The first row of the shell that is visible on this terminal when the cursor's row is visible too.
    fn top(&self) -> u16 {
        (self.screen.cursor().0 + 1).saturating_sub(self.here.1)
    }

    /// The row farthest from the cursor, where the user types.
    fn row_for_words(&self) -> u16 {
        let rows = if self.is_row_by_row() { self.here.1 } else { self.here.1.min(self.screen.size().1) };
        let cursor = self.screen.cursor().0 - self.top().min(self.screen.cursor().0);
        if cursor < rows / 2 { rows.saturating_sub(1) } else { 0 }
    }

    fn lift(&mut self) -> Vec<u8> {
        match self.covered.take() {
            Some(row) if !self.is_row_by_row() => guarded(|| self.screen.restore_row(row)),
            _ => Vec::new(),
        }
    }

    /// Draws the overlay. Within a sequence it is deferred until the sequence is complete.
    fn lay(&mut self) -> Vec<u8> {
        let Some(words) = self.words.clone() else { return Vec::new() };
        if !self.screen.is_between_sequences() {
            return Vec::new();
        }
        if !self.is_known {
            return self.redraw();
        }
        let row = self.row_for_words();
        self.covered = Some(row);
        let words = clipped(&words, self.here.0);
        guarded(|| self.screen.draw_overlay(row, &words))
    }

    fn draw_rows(&mut self) -> Vec<u8> {
        let (cols, rows) = self.here;
        let top = usize::from(self.top());
        let mut now: Vec<Vec<u8>> = guarded(|| self.screen.rows(cols)).into_iter().skip(top).take(usize::from(rows)).collect();
        now.resize(usize::from(rows), Vec::new());
        if let Some(words) = &self.words
            && let Some(row) = now.get_mut(usize::from(self.row_for_words()))
        {
            *row = format!("\x1b[7m{}", clipped(words, cols)).into_bytes();
        }
        let mut out = Vec::new();
        let before = self.drawn.take().unwrap_or_default();
        for (at, row) in now.iter().enumerate().filter(|(at, row)| before.get(*at) != Some(*row)) {
            out.extend_from_slice(format!("\x1b[m\x1b[{};1H\x1b[K", at + 1).as_bytes());
            out.extend_from_slice(row);
        }
        self.drawn = Some(now);
        let (row, col) = self.screen.cursor();
        let shown = if self.screen.hides_cursor() || col >= cols { 'l' } else { 'h' };
        let row = row.saturating_sub(self.top());
        out.extend_from_slice(format!("\x1b[m\x1b[{};{}H\x1b[?25{shown}", row + 1, col.min(cols.saturating_sub(1)) + 1).as_bytes());
        out
    }
}

/// The part of the text that fits into the columns; characters that may be wide count as wide.
fn clipped(words: &str, cols: u16) -> String {
    let mut left = usize::from(cols);
    let fits = |c: &char| {
        let width = if c.is_ascii() || "·×…".contains(*c) { 1 } else { 2 };
        let has_room = left >= width;
        left = left.saturating_sub(width);
        has_room
    };
    words.chars().take_while(fits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Terminal(vt100::Parser);

    impl Terminal {
        fn new((cols, rows): (u16, u16)) -> Self {
            Self(vt100::Parser::new(rows, cols, 0))
        }
        fn gets(&mut self, bytes: &[u8]) -> String {
            self.0.process(bytes);
            self.0.screen().contents()
        }
        fn row(&self, row: usize) -> String {
            self.0.screen().rows(0, 80).nth(row).unwrap()
        }
    }

    #[test]
    fn words_lie_over_the_picture_and_leave_no_trace() {
        let mut picture = Picture::new((20, 5), SequenceKinds::NONE);
        let mut terminal = Terminal::new((20, 5));
        let mut plain = Terminal::new((20, 5));
        for part in ["\x1b[31mone\r\n", "two\x1b[?25l", "\r\nthree\r\nfour\r\n", "\x1b[44mfi", "ve", "\r\nsix \x1b[", "1mseven"] {
            terminal.gets(&picture.say(Some("cobox: hello".into())));
            terminal.gets(&picture.output(part.as_bytes()));
            assert!(terminal.row(0).starts_with("cobox") || terminal.row(4).starts_with("cobox") || part.ends_with('['), "{part}");
            plain.gets(part.as_bytes());
            terminal.gets(&picture.say(None));
            assert_eq!(terminal.0.screen().contents_formatted(), plain.0.screen().contents_formatted(), "{part}");
            assert_eq!(terminal.0.screen().cursor_position(), plain.0.screen().cursor_position(), "{part}");
        }
    }

    #[test]
    fn a_watcher_of_another_size_sees_the_shell_as_it_is() {
        for here in [(30, 4), (80, 24), (120, 40)] {
            let mut picture = Picture::new(here, SequenceKinds::NONE);
            let mut terminal = Terminal::new(here);
            terminal.gets(&picture.set_watched(true));
            terminal.gets(&picture.keyframe(
                80,
                24,
                b"\x1b[?1049h\x1b[?1002htitle\x1b[12;1H\x1b[7min the middle\x1b[m\x1b[24;1Hstatus\x1b[12;5H",
            ));
            terminal.gets(&picture.output(b"\x1b[13;1Hwide \xe6\xbc\xa2\xe5\xad\x97 line that is longer than the narrow one\x1b[12;5H"));
            assert_eq!(terminal.0.screen().mouse_protocol_mode(), vt100::MouseProtocolMode::None, "{here:?}");
            let shown = terminal.0.screen().contents();
            assert!(shown.contains("in the middle"), "{here:?}: {shown}");
            assert_eq!(shown.contains("title") && shown.contains("status"), here.1 >= 24, "{here:?}: {shown}");
            let (row, col) = terminal.0.screen().cursor_position();
            assert_eq!((terminal.row(usize::from(row)).trim_end(), col), ("in the middle", 4), "{here:?}");
            // Show an overlay, and remove it.
            assert!(terminal.gets(&picture.say(Some("cobox: hi".into()))).contains("cobox: hi"));
            terminal.gets(&picture.say(None));
            assert_eq!(terminal.0.screen().contents(), shown, "{here:?}");
            // With control, the terminal is passed through to the program again.
            terminal.0.screen_mut().set_size(24, 80);
            terminal.gets(&picture.resized_here((80, 24)));
            terminal.gets(&picture.set_watched(false));
            assert!(terminal.0.screen().alternate_screen());
            assert_eq!(terminal.0.screen().mouse_protocol_mode(), vt100::MouseProtocolMode::ButtonMotion);
            terminal.gets(&picture.leave(false));
            assert!(!terminal.0.screen().alternate_screen());
            assert_eq!(terminal.0.screen().mouse_protocol_mode(), vt100::MouseProtocolMode::None);
        }
    }

    #[test]
    fn what_the_user_had_on_the_screen_is_scrolled_away_before_anything_is_drawn_over_it() {
        let mut picture = Picture::new((20, 5), SequenceKinds::NONE);
        let mut terminal = Terminal(vt100::Parser::new(5, 20, 100));
        terminal.gets(b"mine\r\n$ cobox\r\n");
        assert_eq!(terminal.gets(&picture.output(b"sandbox$ ")), "mine\n$ cobox\nsandbox$ ");
        let shown = terminal.gets(&picture.say(Some("cobox: hello".into())));
        assert_eq!(shown.trim_end(), "sandbox$ \n\n\n\ncobox: hello");
        assert_eq!(terminal.gets(&picture.say(None)).trim_end(), "sandbox$");
        terminal.0.screen_mut().set_scrollback(5);
        assert!(terminal.0.screen().contents().contains("mine\n$ cobox"));
    }

    #[test]
    fn a_terminal_made_small_and_large_again_before_anybody_heard_of_it_shows_everything() {
        let mut picture = Picture::new((20, 5), SequenceKinds::NONE);
        let mut terminal = Terminal::new((20, 5));
        let shown = terminal.gets(&picture.output(b"\x1b[?1049h\x1b[Htop left\x1b[5;12Hlow right\x1b[2;3H"));
        for (cols, rows) in [(9, 3), (20, 5)] {
            terminal.0.screen_mut().set_size(rows, cols);
            terminal.gets(&picture.resized_here((cols, rows)));
        }
        assert_eq!(terminal.0.screen().contents(), shown);
        assert_eq!(terminal.0.screen().cursor_position(), (1, 2));
    }

    #[test]
    fn words_are_clipped_to_the_terminal() {
        assert_eq!(clipped("cobox: ada · 80×24", 12), "cobox: ada ·");
        assert_eq!(clipped("漢字漢字", 5), "漢字");
    }
}
