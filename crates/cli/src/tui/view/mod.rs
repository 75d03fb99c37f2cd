//! Draws the state, one pane per file; nothing here modifies it.

pub mod chat;
mod feed;
pub mod files;
mod frame;
mod overlay;
mod sync;
mod terminal;
mod wrap;

use ratatui::{
    Frame,
    layout::Alignment,
    style::{Color, Modifier, Style},
    text::Line,
    widgets::{Block, BorderType, Paragraph},
};

use super::{
    app_state::AppState,
    layout::{MIN_SIZE, Pane},
};

pub use overlay::{HELP_LINES, item_at};
pub use wrap::cut;

const FAINT: Style = Style::new().fg(Color::DarkGray);
const GOOD: Style = Style::new().fg(Color::Green);
const BAD: Style = Style::new().fg(Color::Red);
const WARN: Style = Style::new().fg(Color::Yellow);
const ACCENT: Style = Style::new().fg(Color::Cyan);
const STRONG: Style = Style::new().add_modifier(Modifier::BOLD);

pub fn draw(frame: &mut Frame, state: &AppState) {
    // The window was just resized: the next draw has the right size.
    if (frame.area().width, frame.area().height) != state.size {
        return;
    }
    let Some(layout) = state.layout() else {
        too_small(frame, state.size);
        return;
    };
    frame::header(frame, state, layout.header);
    if let Some(tabs) = layout.tabs {
        frame::tabs(frame, state, tabs);
    }
    for (pane, area) in &layout.panes {
        match pane {
            Pane::Chat => chat::draw(frame, state, *area),
            Pane::Terminal => terminal::draw(frame, state, *area),
            Pane::Events => feed::draw(frame, state, *area),
            Pane::Files => files::draw(frame, state, *area),
            Pane::Sync => sync::draw(frame, state, *area),
        }
    }
    frame::footer(frame, state, layout.footer);
    overlay::draw(frame, state);
}

/// Removes all colours for users who disabled them; bold and reversed text stays.
pub fn without_colour(frame: &mut Frame) {
    for cell in &mut frame.buffer_mut().content {
        (cell.fg, cell.bg) = (Color::Reset, Color::Reset);
    }
}

fn too_small(frame: &mut Frame, (cols, rows): (u16, u16)) {
    let text = [
        format!("Cobox needs {} columns and {} rows.", MIN_SIZE.0, MIN_SIZE.1),
        format!("This window has {cols} columns and {rows} rows."),
        "Enlarge it, or quit with Ctrl-Q.".to_owned(),
        "`cobox chat --no-tui` works at any size.".to_owned(),
    ];
    let lines: Vec<Line> = text.into_iter().map(Line::from).collect();
    frame.render_widget(Paragraph::new(lines).alignment(Alignment::Left).wrap(ratatui::widgets::Wrap { trim: true }), frame.area());
}

/// A border with the pane's title, highlighted if the pane has the focus.
fn block<'a>(state: &AppState, pane: Pane, title: impl Into<Line<'a>>) -> Block<'a> {
    let is_focused = state.focus == pane && state.overlay.is_none();
    let style = if is_focused { ACCENT.add_modifier(Modifier::BOLD) } else { FAINT };
    let kind = if is_focused { BorderType::Thick } else { BorderType::Plain };
    Block::bordered().border_type(kind).border_style(style).title(title)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
