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
    app_state::{AppState, SandboxState},
    layout::Pane,
    shell_pane::ShellStatus,
};

pub fn draw(frame: &mut Frame, state: &AppState, area: Rect) {
    let shell = &state.shell;
    let name = shell.name.as_deref().map(|name| format!(" {}", cobox_langgraph::clean(name, 32))).unwrap_or_default();
    let controller_text = match (&shell.status, &shell.controller) {
        (ShellStatus::Live, _) if shell.is_observer => "read-only".to_owned(),
        (ShellStatus::Live, None) => "type to take control".to_owned(),
        (ShellStatus::Live, Some(_)) => match shell.other_controller(state.principal()) {
            None => "you have control".to_owned(),
            Some(other_controller) => format!("{other_controller} has control · Alt-t takes it"),
        },
        (ShellStatus::Joining, _) => "joining…".to_owned(),
        (ShellStatus::Off | ShellStatus::Ended(_), _) => "no shell".to_owned(),
    };
    let scrolled_lines = shell.emulator.screen().map_or(0, |s| s.scrollback());
    let scrolled = if scrolled_lines > 0 { format!(" · {scrolled_lines} lines back") } else { String::new() };
    let mut block = block(state, Pane::Terminal, format!(" terminal{name} · {controller_text}{scrolled} "));
    if let Some(message) = &shell.message {
        block = block.title_bottom(Line::styled(format!(" {} ", cobox_langgraph::clean(message, 200)), WARN));
    }
    let inner = block.inner(area);
    frame.render_widget(block, area);
    match &shell.status {
        ShellStatus::Live => draw_screen(frame, state, inner),
        ShellStatus::Joining => {}
        ShellStatus::Ended(reason) => draw_text(frame, inner, &format!("{reason}\n\nAttach again with /terminal.")),
        ShellStatus::Off => {
            let text = match &state.sandbox {
                SandboxState::Opening => "The sandbox is starting…".to_owned(),
                SandboxState::Failed(reason) => format!("No sandbox: {reason}"),
                _ if !state.has_broker => "No broker is configured. Start one with `cobox up`.".to_owned(),
                _ => "This thread has no sandbox yet.\n\nCreate one with /sandbox new, or use an existing one with /sandbox use <name>."
                    .to_owned(),
            };
            draw_text(frame, inner, &text);
        }
    }
}

fn draw_screen(frame: &mut Frame, state: &AppState, inner: Rect) {
    let Some(window) = state.shell.emulator.window(inner.height) else {
        draw_text(frame, inner, "This shell is too large for this pane.");
        return;
    };
    frame.render_widget(PseudoTerminal::new(&window).cursor(Cursor::default().visibility(false)), inner);
    let (row, col) = window.cursor_position();
    let is_focused = state.focus == Pane::Terminal && state.overlay.is_none();
    if is_focused && !window.hide_cursor() && row < inner.height && col < inner.width {
        frame.set_cursor_position(Position::new(inner.x + col, inner.y + row));
    }
}

fn draw_text(frame: &mut Frame, inner: Rect, text: &str) {
    let lines: Vec<Line> =
        wrap(&cobox_langgraph::clean(text, 1000), usize::from(inner.width)).into_iter().map(|l| Line::styled(l, FAINT)).collect();
    frame.render_widget(Paragraph::new(lines), inner);
}
