//! Draws the feed: the sandbox's events, newest last.

use ratatui::{
    Frame,
    layout::Rect,
    style::Style,
    text::{Line, Span},
    widgets::Paragraph,
};
use unicode_width::UnicodeWidthStr;

use super::{ACCENT, BAD, FAINT, block, wrap::cut};
use crate::tui::{
    app_state::{AppState, SandboxState},
    event_feed::FeedLine,
    layout::Pane,
};

pub fn draw(frame: &mut Frame, state: &AppState, area: Rect) {
    let scrolled = if state.feed.scroll > 0 { format!(" · {} back", state.feed.scroll) } else { String::new() };
    let block = block(state, Pane::Events, format!(" events{scrolled} "));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let count = state.feed.lines().len();
    if count == 0 {
        let text = if matches!(state.sandbox, SandboxState::Open(_)) { "no events yet" } else { "no sandbox to watch" };
        frame.render_widget(Paragraph::new(Line::styled(text, FAINT)), inner);
        return;
    }
    let end = count - state.feed.scroll.min(count - 1);
    let first = end.saturating_sub(usize::from(inner.height));
    let lines: Vec<Line> = state.feed.lines().skip(first).take(end - first).map(|line| draw_line(line, usize::from(inner.width))).collect();
    frame.render_widget(Paragraph::new(lines), inner);
}

fn draw_line(line: &FeedLine, width: usize) -> Line<'static> {
    // Without the date, which the user knows.
    let at = line.at.map(|at| at.to_string()).and_then(|at| at.get(11..19).map(str::to_owned)).unwrap_or_else(|| "        ".to_owned());
    let style = match line {
        FeedLine { is_error: true, .. } => BAD,
        FeedLine { is_by_agent: true, .. } => ACCENT,
        _ => Style::new(),
    };
    Line::from(vec![Span::styled(format!("{at} "), FAINT), Span::styled(shorten(&line.text, width.saturating_sub(9)), style)])
}

/// Cuts a long command in the middle of the line, so that its outcome stays visible.
fn shorten(text: &str, width: usize) -> String {
    match text.rsplit_once(" → ") {
        Some((command, outcome)) if text.width() > width => {
            let outcome = format!(" → {outcome}");
            format!("{}{outcome}", cut(command, width.saturating_sub(outcome.width())))
        }
        _ => cut(text, width),
    }
}
