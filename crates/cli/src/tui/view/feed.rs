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
    app::{Room, State},
    feed::FeedLine,
    layout::Pane,
};

pub fn draw(frame: &mut Frame, state: &State, area: Rect) {
    let back = if state.feed.scroll > 0 { format!(" · {} back", state.feed.scroll) } else { String::new() };
    let block = block(state, Pane::Events, format!(" events{back} "));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let count = state.feed.lines().len();
    if count == 0 {
        let words = if matches!(state.room, Room::Open(_)) { "nothing has happened yet" } else { "no sandbox to watch" };
        frame.render_widget(Paragraph::new(Line::styled(words, FAINT)), inner);
        return;
    }
    let end = count - state.feed.scroll.min(count - 1);
    let first = end.saturating_sub(usize::from(inner.height));
    let lines: Vec<Line> = state.feed.lines().skip(first).take(end - first).map(|line| drawn(line, usize::from(inner.width))).collect();
    frame.render_widget(Paragraph::new(lines), inner);
}

fn drawn(line: &FeedLine, width: usize) -> Line<'static> {
    // Without the date, which the user knows.
    let at = line.at.map(|at| at.to_string()).and_then(|at| at.get(11..19).map(str::to_owned)).unwrap_or_else(|| "        ".to_owned());
    let style = match line {
        FeedLine { is_bad: true, .. } => BAD,
        FeedLine { is_agents: true, .. } => ACCENT,
        _ => Style::new(),
    };
    Line::from(vec![Span::styled(format!("{at} "), FAINT), Span::styled(shortened(&line.text, width.saturating_sub(9)), style)])
}

/// Cuts a long command in the middle of the line, so that its outcome stays visible.
fn shortened(text: &str, width: usize) -> String {
    match text.rsplit_once(" → ") {
        Some((command, outcome)) if text.width() > width => {
            let outcome = format!(" → {outcome}");
            format!("{}{outcome}", cut(command, width.saturating_sub(outcome.width())))
        }
        _ => cut(text, width),
    }
}
