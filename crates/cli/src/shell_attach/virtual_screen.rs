//! A copy of the terminal's screen contents. It allows showing and removing an overlay, redrawing the screen, and
//! showing a shell of a different size.

use cobox_stream::{Screen, SequenceKinds};

use crate::terminal::{Modes, SequenceFilter, without_panic_hook};

/// Clears the screen from any state: cancels a partial sequence, the alternate screen, margins and colours.
const CLEAR_SCREEN: &[u8] = b"\x18\x1b\\\x1b[?1049l\x1b[?6l\x1b[r\x1b[m\x1b[H\x1b[2J";
const WRAP_OFF: &[u8] = b"\x1b[?7l";
const WRAP_ON: &[u8] = b"\x1b[?7h";

pub struct VirtualScreen {
    filter: SequenceFilter,
    /// What programs may do to this terminal besides printing.
    allowed_sequences: SequenceKinds,
    screen: Screen,
    modes: Modes,
    /// Columns and rows of the local terminal.
    terminal_size: (u16, u16),
    /// Whether the terminal shows exactly this copy. Initially it still shows the user's earlier output, and new output
    /// appears below it.
    is_synced: bool,
    /// Whether another participant controls the shell. The controller's terminal gets all modes that programs set; an
    /// observer's terminal doesn't report its mouse to them.
    is_passive: bool,
    /// Contents of each drawn row, in row-by-row mode: used while the shell and the local terminal differ in size.
    drawn_rows: Option<Vec<Vec<u8>>>,
    /// The overlay text, and the row that it covers now.
    overlay: Option<String>,
    overlay_row: Option<u16>,
}

impl VirtualScreen {
    pub fn new(terminal_size: (u16, u16), allowed_sequences: SequenceKinds) -> Self {
        Self {
            filter: SequenceFilter::default(),
            allowed_sequences,
            screen: Screen::new(terminal_size.0, terminal_size.1),
            modes: Modes::default(),
            terminal_size,
            is_synced: false,
            is_passive: false,
            drawn_rows: None,
            overlay: None,
            overlay_row: None,
        }
    }

    /// Processes the next output and returns what to write to the terminal.
    pub fn output(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = self.remove_overlay();
        let shown = self.track(bytes);
        if self.draws_by_row() {
            return self.draw_rows();
        }
        out.extend(shown);
        if self.is_passive {
            out.extend(self.modes.reports_off());
        }
        out.extend(self.draw_overlay());
        out
    }

    /// Replaces the screen with a keyframe after output was missed.
    pub fn keyframe(&mut self, cols: u16, rows: u16, bytes: &[u8]) -> Vec<u8> {
        let mut out = if self.drawn_rows.is_some() { Vec::new() } else { self.modes.reset_sequences() };
        (self.modes, self.overlay_row) = (Modes::default(), None);
        (self.filter, self.screen) = (SequenceFilter::default(), Screen::new(cols, rows));
        self.track(CLEAR_SCREEN);
        let shown = self.track(bytes);
        out.extend(self.clear_sequences());
        out.extend(self.draw_cleared(shown));
        out
    }

    /// The escape sequences to hide. An observer's terminal gets no queries, because its answers would be typed into a
    /// shell that it doesn't control.
    fn hidden_sequences(&self) -> SequenceKinds {
        if self.is_passive { SequenceKinds::ALL } else { SequenceKinds::ALL.without(SequenceKinds::QUERY).without(self.allowed_sequences) }
    }

    /// Applies output to the copy, and returns the part that the terminal may get.
    fn track(&mut self, bytes: &[u8]) -> Vec<u8> {
        let hidden_sequences = self.hidden_sequences();
        let (shown, scan) = self.filter.apply(bytes, hidden_sequences);
        self.modes.track(&shown);
        without_panic_hook(|| self.screen.feed(bytes, &scan));
        shown
    }

    /// Handles a new size of the shell.
    pub fn resize_shell(&mut self, cols: u16, rows: u16) -> Vec<u8> {
        let drew_by_row = self.draws_by_row();
        without_panic_hook(|| self.screen.resize(cols, rows));
        // The terminal has moved an overlay together with the rest of the screen, so it has to be redrawn.
        if self.overlay_row.is_some() || drew_by_row || self.draws_by_row() { self.redraw() } else { Vec::new() }
    }

    /// Handles a new size of the local terminal.
    pub fn resize_terminal(&mut self, terminal_size: (u16, u16)) -> Vec<u8> {
        let drew_by_row = self.draws_by_row();
        self.terminal_size = terminal_size;
        // The terminal has returned to the shell's size, perhaps before the shell was notified of the other one: its
        // programs will then not redraw the part that had been cut off.
        let fits_again = terminal_size == self.screen.size();
        if drew_by_row || fits_again || self.draws_by_row() { self.redraw() } else { Vec::new() }
    }

    /// Sets whether another participant controls the shell.
    pub fn set_passive(&mut self, is_passive: bool) -> Vec<u8> {
        if self.is_passive == is_passive {
            return Vec::new();
        }
        let drew_by_row = self.draws_by_row();
        self.is_passive = is_passive;
        match is_passive {
            _ if drew_by_row || self.draws_by_row() => self.redraw(),
            true => self.modes.reports_off(),
            false => self.modes.reports_on(),
        }
    }

    /// Shows an overlay, or removes it.
    pub fn set_overlay(&mut self, overlay: Option<String>) -> Vec<u8> {
        if self.overlay == overlay {
            return Vec::new();
        }
        let mut out = self.remove_overlay();
        self.overlay = overlay;
        if self.draws_by_row() {
            return self.draw_rows();
        }
        out.extend(self.draw_overlay());
        out
    }

    /// Redraws everything, on a terminal in any state.
    pub fn redraw(&mut self) -> Vec<u8> {
        self.overlay_row = None;
        let mut out = self.clear_sequences();
        let mut contents = without_panic_hook(|| self.screen.redraw());
        // The screen's redraw includes the beginning of an incomplete sequence; the bytes that the filter still holds
        // back must not be written yet.
        if contents.ends_with(self.filter.pending()) {
            contents.truncate(contents.len() - self.filter.pending().len());
        }
        out.extend(self.draw_cleared(contents));
        out
    }

    /// Clears the screen; the first time, the user's earlier output is scrolled into the scrollback first.
    fn clear_sequences(&mut self) -> Vec<u8> {
        if std::mem::replace(&mut self.is_synced, true) {
            return CLEAR_SCREEN.to_vec();
        }
        let rows = self.terminal_size.1;
        let scrolled = format!("\x18\x1b\\\x1b[?1049l\x1b[?6l\x1b[r\x1b[m\x1b[{rows};1H{}", "\n".repeat(usize::from(rows)));
        [scrolled.as_bytes(), CLEAR_SCREEN].concat()
    }

    /// Draws on a cleared screen: directly if the shell fits, otherwise row by row.
    fn draw_cleared(&mut self, contents: Vec<u8>) -> Vec<u8> {
        let drew_by_row = self.drawn_rows.take().is_some();
        if self.draws_by_row() {
            // Modes that programs set are meant for a terminal of the shell's size that controls it.
            let off = if drew_by_row { Vec::new() } else { self.modes.reset_sequences() };
            return [off, WRAP_OFF.to_vec(), self.draw_rows()].concat();
        }
        let mut out = if drew_by_row { WRAP_ON.to_vec() } else { Vec::new() };
        // Modes that were switched off in between are tracked as on again.
        self.modes.track(&contents);
        out.extend(contents);
        if self.is_passive {
            out.extend(self.modes.reports_off());
        }
        out.extend(self.draw_overlay());
        out
    }

    /// Restores the terminal to a state fit for a prompt, below the output.
    pub fn finish(&mut self, is_exit: bool) -> Vec<u8> {
        self.overlay = None;
        let mut out = self.remove_overlay();
        if self.drawn_rows.take().is_some() {
            out.extend(self.draw_rows());
            out.extend_from_slice(
                format!("{}\x1b[?25h\x1b[m\x1b[{};1H\r\n", String::from_utf8_lossy(WRAP_ON), self.terminal_size.1).as_bytes(),
            );
            return out;
        }
        let (row, col) = self.screen.cursor();
        let is_alternate = self.modes.is_alternate();
        out.extend_from_slice(self.filter.finish(self.hidden_sequences()));
        out.extend(self.modes.reset_sequences());
        if self.modes.moves_cursor() {
            let row = if self.is_synced { row + 1 } else { self.terminal_size.1 };
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
        self.modes.is_alternate() && self.drawn_rows.is_none()
    }

    pub fn shell_size(&self) -> (u16, u16) {
        self.screen.size()
    }

    /// Whether rows are drawn one by one: an observer's terminal may differ in size from the shell, whose programs rely
    /// on the shell's size.
    fn draws_by_row(&self) -> bool {
        self.is_passive && self.terminal_size != self.screen.size()
    }

    /// The first row of the shell that is visible on this terminal when the cursor's row is visible too.
    fn top_row(&self) -> u16 {
        (self.screen.cursor().0 + 1).saturating_sub(self.terminal_size.1)
    }

    /// The row farthest from the cursor, where the user types.
    fn overlay_target_row(&self) -> u16 {
        let rows = if self.draws_by_row() { self.terminal_size.1 } else { self.terminal_size.1.min(self.screen.size().1) };
        let cursor = self.screen.cursor().0 - self.top_row().min(self.screen.cursor().0);
        if cursor < rows / 2 { rows.saturating_sub(1) } else { 0 }
    }

    fn remove_overlay(&mut self) -> Vec<u8> {
        match self.overlay_row.take() {
            Some(row) if !self.draws_by_row() => without_panic_hook(|| self.screen.restore_row(row)),
            _ => Vec::new(),
        }
    }

    /// Draws the overlay. Within a sequence it is deferred until the sequence is complete.
    fn draw_overlay(&mut self) -> Vec<u8> {
        let Some(overlay) = self.overlay.clone() else { return Vec::new() };
        if !self.screen.is_between_sequences() {
            return Vec::new();
        }
        if !self.is_synced {
            return self.redraw();
        }
        let row = self.overlay_target_row();
        self.overlay_row = Some(row);
        let text = clip(&overlay, self.terminal_size.0);
        without_panic_hook(|| self.screen.draw_overlay(row, &text))
    }

    fn draw_rows(&mut self) -> Vec<u8> {
        let (cols, rows) = self.terminal_size;
        let top_row = usize::from(self.top_row());
        let mut rows_now: Vec<Vec<u8>> =
            without_panic_hook(|| self.screen.rows(cols)).into_iter().skip(top_row).take(usize::from(rows)).collect();
        rows_now.resize(usize::from(rows), Vec::new());
        if let Some(overlay) = &self.overlay
            && let Some(row) = rows_now.get_mut(usize::from(self.overlay_target_row()))
        {
            *row = format!("\x1b[7m{}", clip(overlay, cols)).into_bytes();
        }
        let mut out = Vec::new();
        let rows_before = self.drawn_rows.take().unwrap_or_default();
        for (at, row) in rows_now.iter().enumerate().filter(|(at, row)| rows_before.get(*at) != Some(*row)) {
            out.extend_from_slice(format!("\x1b[m\x1b[{};1H\x1b[K", at + 1).as_bytes());
            out.extend_from_slice(row);
        }
        self.drawn_rows = Some(rows_now);
        let (row, col) = self.screen.cursor();
        let shown = if self.screen.hides_cursor() || col >= cols { 'l' } else { 'h' };
        let row = row.saturating_sub(self.top_row());
        out.extend_from_slice(format!("\x1b[m\x1b[{};{}H\x1b[?25{shown}", row + 1, col.min(cols.saturating_sub(1)) + 1).as_bytes());
        out
    }
}

/// The part of the text that fits into the columns; characters that may be wide count as wide.
fn clip(text: &str, cols: u16) -> String {
    let mut left = usize::from(cols);
    let fits = |c: &char| {
        let width = if c.is_ascii() || "·×…".contains(*c) { 1 } else { 2 };
        let has_room = left >= width;
        left = left.saturating_sub(width);
        has_room
    };
    text.chars().take_while(fits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Terminal(vt100::Parser);

    impl Terminal {
        fn new((cols, rows): (u16, u16)) -> Self {
            Self(vt100::Parser::new(rows, cols, 0))
        }
        fn process(&mut self, bytes: &[u8]) -> String {
            self.0.process(bytes);
            self.0.screen().contents()
        }
        fn row(&self, row: usize) -> String {
            self.0.screen().rows(0, 80).nth(row).unwrap()
        }
    }

    #[test]
    fn an_overlay_is_removed_without_a_trace() {
        let mut screen = VirtualScreen::new((20, 5), SequenceKinds::NONE);
        let mut terminal = Terminal::new((20, 5));
        let mut plain = Terminal::new((20, 5));
        for part in ["\x1b[31mone\r\n", "two\x1b[?25l", "\r\nthree\r\nfour\r\n", "\x1b[44mfi", "ve", "\r\nsix \x1b[", "1mseven"] {
            terminal.process(&screen.set_overlay(Some("cobox: hello".into())));
            terminal.process(&screen.output(part.as_bytes()));
            assert!(terminal.row(0).starts_with("cobox") || terminal.row(4).starts_with("cobox") || part.ends_with('['), "{part}");
            plain.process(part.as_bytes());
            terminal.process(&screen.set_overlay(None));
            assert_eq!(terminal.0.screen().contents_formatted(), plain.0.screen().contents_formatted(), "{part}");
            assert_eq!(terminal.0.screen().cursor_position(), plain.0.screen().cursor_position(), "{part}");
        }
    }

    #[test]
    fn an_observer_of_another_size_sees_the_shell_unchanged() {
        for terminal_size in [(30, 4), (80, 24), (120, 40)] {
            let mut screen = VirtualScreen::new(terminal_size, SequenceKinds::NONE);
            let mut terminal = Terminal::new(terminal_size);
            terminal.process(&screen.set_passive(true));
            terminal.process(&screen.keyframe(
                80,
                24,
                b"\x1b[?1049h\x1b[?1002htitle\x1b[12;1H\x1b[7min the middle\x1b[m\x1b[24;1Hstatus\x1b[12;5H",
            ));
            terminal.process(&screen.output(b"\x1b[13;1Hwide \xe6\xbc\xa2\xe5\xad\x97 line that is longer than the narrow one\x1b[12;5H"));
            assert_eq!(terminal.0.screen().mouse_protocol_mode(), vt100::MouseProtocolMode::None, "{terminal_size:?}");
            let shown = terminal.0.screen().contents();
            assert!(shown.contains("in the middle"), "{terminal_size:?}: {shown}");
            assert_eq!(shown.contains("title") && shown.contains("status"), terminal_size.1 >= 24, "{terminal_size:?}: {shown}");
            let (row, col) = terminal.0.screen().cursor_position();
            assert_eq!((terminal.row(usize::from(row)).trim_end(), col), ("in the middle", 4), "{terminal_size:?}");
            // Show an overlay, and remove it.
            assert!(terminal.process(&screen.set_overlay(Some("cobox: hi".into()))).contains("cobox: hi"));
            terminal.process(&screen.set_overlay(None));
            assert_eq!(terminal.0.screen().contents(), shown, "{terminal_size:?}");
            // With control, the terminal is passed through to the program again.
            terminal.0.screen_mut().set_size(24, 80);
            terminal.process(&screen.resize_terminal((80, 24)));
            terminal.process(&screen.set_passive(false));
            assert!(terminal.0.screen().alternate_screen());
            assert_eq!(terminal.0.screen().mouse_protocol_mode(), vt100::MouseProtocolMode::ButtonMotion);
            terminal.process(&screen.finish(false));
            assert!(!terminal.0.screen().alternate_screen());
            assert_eq!(terminal.0.screen().mouse_protocol_mode(), vt100::MouseProtocolMode::None);
        }
    }

    #[test]
    fn earlier_screen_contents_are_scrolled_away_before_drawing() {
        let mut screen = VirtualScreen::new((20, 5), SequenceKinds::NONE);
        let mut terminal = Terminal(vt100::Parser::new(5, 20, 100));
        terminal.process(b"mine\r\n$ cobox\r\n");
        assert_eq!(terminal.process(&screen.output(b"sandbox$ ")), "mine\n$ cobox\nsandbox$ ");
        let shown = terminal.process(&screen.set_overlay(Some("cobox: hello".into())));
        assert_eq!(shown.trim_end(), "sandbox$ \n\n\n\ncobox: hello");
        assert_eq!(terminal.process(&screen.set_overlay(None)).trim_end(), "sandbox$");
        terminal.0.screen_mut().set_scrollback(5);
        assert!(terminal.0.screen().contents().contains("mine\n$ cobox"));
    }

    #[test]
    fn a_terminal_shrunk_and_enlarged_at_once_shows_everything() {
        let mut screen = VirtualScreen::new((20, 5), SequenceKinds::NONE);
        let mut terminal = Terminal::new((20, 5));
        let shown = terminal.process(&screen.output(b"\x1b[?1049h\x1b[Htop left\x1b[5;12Hlow right\x1b[2;3H"));
        for (cols, rows) in [(9, 3), (20, 5)] {
            terminal.0.screen_mut().set_size(rows, cols);
            terminal.process(&screen.resize_terminal((cols, rows)));
        }
        assert_eq!(terminal.0.screen().contents(), shown);
        assert_eq!(terminal.0.screen().cursor_position(), (1, 2));
    }

    #[test]
    fn overlay_text_is_clipped_to_the_terminal() {
        assert_eq!(clip("cobox: ada · 80×24", 12), "cobox: ada ·");
        assert_eq!(clip("漢字漢字", 5), "漢字");
    }
}
