//! The terminal while the TUI uses it: raw mode on the alternate screen, and a guaranteed restore of its previous
//! state.

use std::io::{self, Stdout};

use crossterm::{
    cursor::Show,
    event::{DisableBracketedPaste, DisableMouseCapture, EnableBracketedPaste, EnableMouseCapture},
    execute,
    terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode},
};
use ratatui::{Frame, Terminal, backend::CrosstermBackend};

/// Dropped on return, on error, on unwinding, and before a handled signal ends the process.
pub struct TerminalScreen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    _restore: RestoreOnDrop,
}

impl TerminalScreen {
    pub fn enter() -> io::Result<Self> {
        enable_raw_mode()?;
        // From here on the terminal is restored, even if a later step fails.
        let restore = RestoreOnDrop;
        execute!(io::stdout(), EnterAlternateScreen, EnableMouseCapture, EnableBracketedPaste)?;
        let mut terminal = Terminal::new(CrosstermBackend::new(io::stdout()))?;
        // A killed process may have left content on this screen, and ratatui draws only the difference to an empty
        // one.
        terminal.clear()?;
        Ok(Self { terminal, _restore: restore })
    }

    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame)) -> io::Result<()> {
        self.terminal.draw(draw).map(drop)
    }
}

struct RestoreOnDrop;

impl Drop for RestoreOnDrop {
    fn drop(&mut self) {
        // Fails only if the terminal is gone.
        let _ = execute!(io::stdout(), DisableBracketedPaste, DisableMouseCapture, LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
    }
}
