//! Draws what covers the panes: help, and lists to choose from.

use ratatui::{
    Frame,
    layout::{Constraint, Flex, Layout, Rect},
    style::Modifier,
    text::{Line, Span},
    widgets::{Block, BorderType, Clear, Paragraph},
};

use super::{ACCENT, FAINT, STRONG, wrap::cut};
use crate::{
    chat::input_parser::COMMANDS,
    tui::{
        app_state::{AppState, Overlay},
        picker::Picker,
    },
};

const KEYS: [(&str, &str); 16] = [
    ("Alt-1 … Alt-5", "chat, terminal, events, files, sync"),
    ("Tab, Shift-Tab", "next or previous pane; complete a /command"),
    ("Enter", "send; in files: show a file's changes"),
    ("Alt-Enter, Ctrl-J", "insert a line break"),
    ("↑ ↓", "previous or next input"),
    ("PgUp PgDn, wheel", "scroll back"),
    ("Ctrl-O, click", "expand tool calls with arguments and results"),
    ("y, n <reason>, e Tab", "answer the agent: approve, reject, edit"),
    ("Esc Esc, Ctrl-C", "cancel the run"),
    ("Ctrl-]", "focus the chat from the terminal"),
    ("Alt-t, Alt-r", "in the terminal: take or release control"),
    ("Shift-PgUp PgDn", "in the terminal: scroll back"),
    ("F1, Alt-h", "this help"),
    ("Ctrl-Q", "quit; the thread and sandbox keep running"),
    ("Ctrl-C Ctrl-C", "same as Ctrl-Q"),
    ("mouse", "focus, scroll, choose; with Shift: select text"),
];

/// Lines of the help text; the limit for scrolling.
pub const HELP_LINES: u16 = (KEYS.len() + COMMANDS.len() + 3) as u16;

pub fn draw(frame: &mut Frame, state: &AppState) {
    match &state.overlay {
        None => {}
        Some(Overlay::Help { scroll }) => draw_help(frame, *scroll),
        Some(Overlay::Pick(picker)) => draw_picker(frame, picker),
    }
}

fn draw_help(frame: &mut Frame, scroll: u16) {
    let row = |name: String, description: &str| {
        Line::from(vec![Span::styled(format!("  {name:<24}"), ACCENT), Span::raw(description.to_owned())])
    };
    let mut lines = vec![Line::styled("Keys", STRONG)];
    lines.extend(KEYS.iter().map(|(key, description)| row((*key).to_owned(), description)));
    lines.push(Line::default());
    lines.push(Line::styled("Commands", STRONG));
    lines.extend(COMMANDS.iter().map(|(name, arguments, description)| row(format!("{name} {arguments}"), description)));
    let area = centered(frame.area(), 78, lines.len() as u16 + 2);
    let block = overlay_block(" help · ↑↓ scroll, any other key closes ");
    let max_scroll = (lines.len() as u16).saturating_sub(area.height.saturating_sub(2));
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(lines).block(block).scroll((scroll.min(max_scroll), 0)), area);
}

fn draw_picker(frame: &mut Frame, picker: &Picker) {
    let area = pick_area(picker, frame.area());
    let block = overlay_block(match picker.title() {
        "threads" => " threads · Enter resumes one, Esc closes ",
        "assistants" => " assistants · Enter chooses, Esc closes ",
        _ => " sandboxes · Enter binds this thread to one, Esc closes ",
    });
    let inner = block.inner(area);
    frame.render_widget(Clear, area);
    frame.render_widget(block, area);
    let height = usize::from(inner.height);
    let first = first_shown(picker, inner.height);
    let line = |(at, item): (usize, &crate::tui::picker::PickerItem)| {
        let mark = if item.is_current { "* " } else { "  " };
        let style = if at == picker.selected { ACCENT.add_modifier(Modifier::REVERSED) } else { FAINT.remove_modifier(Modifier::all()) };
        Line::styled(cut(&format!("{mark}{}", item.label), usize::from(inner.width)), style)
    };
    let lines: Vec<Line> = picker.items.iter().enumerate().skip(first).take(height).map(line).collect();
    frame.render_widget(Paragraph::new(lines), inner);
}

fn pick_area(picker: &Picker, screen: Rect) -> Rect {
    centered(screen, 76, picker.items.len() as u16 + 2)
}

/// The first visible item, so that the selected one is always visible.
fn first_shown(picker: &Picker, height: u16) -> usize {
    (picker.selected + 1).saturating_sub(usize::from(height))
}

/// The item drawn at this point of a screen of this size.
pub fn item_at(picker: &Picker, (cols, rows): (u16, u16), column: u16, row: u16) -> Option<usize> {
    let inner = Block::bordered().inner(pick_area(picker, Rect::new(0, 0, cols, rows)));
    let at = first_shown(picker, inner.height) + usize::from(row.checked_sub(inner.y)?);
    (inner.contains((column, row).into()) && at < picker.items.len()).then_some(at)
}

fn overlay_block(title: &str) -> Block<'_> {
    Block::bordered().border_type(BorderType::Double).border_style(ACCENT).title(title)
}

fn centered(area: Rect, width: u16, height: u16) -> Rect {
    let [area] = Layout::horizontal([Constraint::Length(width.min(area.width))]).flex(Flex::Center).areas(area);
    let height = height.min(area.height.saturating_sub(2));
    let [area] = Layout::vertical([Constraint::Length(height)]).flex(Flex::Center).areas(area);
    area
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_help_fits_into_the_smallest_screen() {
        let available = 76 - 2 - 24;
        let lines = KEYS.iter().map(|(_, description)| *description).chain(COMMANDS.iter().map(|(.., description)| *description));
        let too_long: Vec<&str> = lines.filter(|description| description.chars().count() > available).collect();
        assert!(too_long.is_empty(), "{too_long:?}");
    }
}
