//! The terminal while the TUI has it: raw, on a screen of its own, and always given back as it was.

use std::io::{self, Stdout};

use crossterm::{
    cursor::Show,
    event::{DisableBracketedPaste, DisableMouseCapture, EnableBracketedPaste, EnableMouseCapture},
    execute,
    terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode},
};
use ratatui::{Frame, Terminal, backend::CrosstermBackend};

/// Dropped on return, on error, on unwinding, and before a handled signal ends the program.
pub struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    _lent: Lent,
}

impl Screen {
    pub fn enter() -> io::Result<Self> {
        enable_raw_mode()?;
        // From here on it is given back, however far the rest gets.
        let lent = Lent;
        execute!(io::stdout(), EnterAlternateScreen, EnableMouseCapture, EnableBracketedPaste)?;
        let mut terminal = Terminal::new(CrosstermBackend::new(io::stdout()))?;
        // One that was killed may have left this screen as it was, and only what differs from an empty one is drawn.
        terminal.clear()?;
        Ok(Self { terminal, _lent: lent })
    }

    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame)) -> io::Result<()> {
        self.terminal.draw(draw).map(drop)
    }
}

struct Lent;

impl Drop for Lent {
    fn drop(&mut self) {
        // A terminal that is gone can't be restored, and nobody looks at it.
        let _ = execute!(io::stdout(), DisableBracketedPaste, DisableMouseCapture, LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
    }
}
