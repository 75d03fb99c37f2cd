//! Draws the shared shell: its screen, and the participant in control.

use ratatui::{
    Frame,
    layout::{Position, Rect},
    text::Line,
    widgets::Paragraph,
};
use tui_term::widget::{Cursor, PseudoTerminal, Screen};

use super::{FAINT, WARN, block, wrap::wrap};
use crate::tui::{
    app::{Room, State},
    layout::Pane,
    shell_pane::Status,
};

pub fn draw(frame: &mut Frame, state: &State, area: Rect) {
    let shell = &state.shell;
    let name = shell.name.as_deref().map(|name| format!(" {}", cobox_langgraph::clean(name, 32))).unwrap_or_default();
    let who = match (&shell.status, &shell.controller) {
        (Status::Live, _) if shell.is_observer => "you look".to_owned(),
        (Status::Live, None) => "typing takes control".to_owned(),
        (Status::Live, Some(_)) => match shell.other(state.me()) {
            None => "you type".to_owned(),
            Some(other) => format!("{other} types · Alt-t takes control"),
        },
        (Status::Joining, _) => "joining…".to_owned(),
        (Status::Off | Status::Ended(_), _) => "no shell".to_owned(),
    };
    let back = shell.emulator.screen().map_or(0, |s| s.scrollback());
    let scrolled = if back > 0 { format!(" · {back} lines back") } else { String::new() };
    let mut block = block(state, Pane::Terminal, format!(" terminal{name} · {who}{scrolled} "));
    if let Some(said) = &shell.said {
        block = block.title_bottom(Line::styled(format!(" {} ", cobox_langgraph::clean(said, 200)), WARN));
    }
    let inner = block.inner(area);
    frame.render_widget(block, area);
    match &shell.status {
        Status::Live => draw_screen(frame, state, inner),
        Status::Joining => {}
        Status::Ended(why) => words(frame, inner, &format!("{why}\n\n/terminal joins it again.")),
        Status::Off => {
            let text = match &state.room {
                Room::Opening => "The sandbox is being made ready…".to_owned(),
                Room::Failed(why) => format!("No sandbox: {why}"),
                _ if !state.has_broker => "No broker is configured: `cobox up` starts one here.".to_owned(),
                _ => "This thread has no sandbox yet.\n\n/sandbox new makes one, /sandbox use <name> takes one that exists.".to_owned(),
            };
            words(frame, inner, &text);
        }
    }
}

fn draw_screen(frame: &mut Frame, state: &State, inner: Rect) {
    let Some(window) = state.shell.emulator.window(inner.height) else {
        words(frame, inner, "This shell is too large to be drawn here.");
        return;
    };
    frame.render_widget(PseudoTerminal::new(&window).cursor(Cursor::default().visibility(false)), inner);
    let (row, col) = window.cursor_position();
    let is_focused = state.focus == Pane::Terminal && state.overlay.is_none();
    if is_focused && !window.hide_cursor() && row < inner.height && col < inner.width {
        frame.set_cursor_position(Position::new(inner.x + col, inner.y + row));
    }
}

fn words(frame: &mut Frame, inner: Rect, text: &str) {
    let lines: Vec<Line> =
        wrap(&cobox_langgraph::clean(text, 1000), usize::from(inner.width)).into_iter().map(|l| Line::styled(l, FAINT)).collect();
    frame.render_widget(Paragraph::new(lines), inner);
}
