//! Draws the lines around the panes: the current thread and sandbox, the tabs, and the keys.

use ratatui::{
    Frame,
    layout::Rect,
    style::Modifier,
    text::{Line, Span},
    widgets::Paragraph,
};
use unicode_width::UnicodeWidthStr;

use super::{ACCENT, BAD, FAINT, STRONG, WARN, wrap::cut};
use crate::tui::{
    app_state::{AppState, SandboxState},
    layout::{Pane, tab_spans},
};

pub fn header(frame: &mut Frame, state: &AppState, area: Rect) {
    // Enough characters to distinguish them; the lists show the full names.
    let thread = state.thread.as_deref().map_or_else(|| "no thread".to_owned(), |thread| format!("thread {}", cut(thread, 14)));
    let sandbox = match &state.sandbox {
        SandboxState::None => "no sandbox".to_owned(),
        SandboxState::Opening => "sandbox is starting…".to_owned(),
        SandboxState::Open(info) => format!("sandbox {}", cut(info.name.as_deref().unwrap_or(&info.sandbox), 14)),
        SandboxState::Failed(_) => "sandbox failed".to_owned(),
    };
    let mut spans = vec![Span::styled(" Cobox ", STRONG.add_modifier(Modifier::REVERSED))];
    if let Some(assistant) = &state.assistant {
        spans.push(Span::styled(format!(" {} ", cut(&assistant.name, 20)), ACCENT));
    }
    spans.push(Span::raw(format!(" {thread} · {sandbox} · {} ", state.sync.summary())));
    if state.chat.is_running() {
        spans.push(Span::styled("· working ", WARN));
    }
    frame.render_widget(Paragraph::new(Line::from(spans)), area);
}

pub fn tabs(frame: &mut Frame, state: &AppState, area: Rect) {
    let tab = |(at, (pane, ..)): (usize, (Pane, u16, u16))| {
        let style = if pane == state.focus { ACCENT.add_modifier(Modifier::REVERSED) } else { FAINT };
        Span::styled(format!(" {} {} ", at + 1, pane.title()), style)
    };
    frame.render_widget(Paragraph::new(Line::from(tab_spans().into_iter().enumerate().map(tab).collect::<Vec<_>>())), area);
}

/// The current notice, or else the keys.
pub fn footer(frame: &mut Frame, state: &AppState, area: Rect) {
    let width = usize::from(area.width);
    if let Some(notice) = &state.notice {
        let style = if notice.is_error { BAD } else { WARN };
        frame.render_widget(Paragraph::new(Line::styled(cut(&format!(" {}", notice.text.replace('\n', " ")), width), style)), area);
        return;
    }
    let keys: &[(&str, &str)] = match state.focus {
        Pane::Chat if state.chat.is_running() => {
            &[("Esc Esc", "cancel run"), ("Ctrl-O", "unfold"), ("Alt-1…5", "panes"), ("F1", "help"), ("Ctrl-Q", "leave")]
        }
        Pane::Chat => {
            &[("Enter", "send"), ("Alt-Enter", "new line"), ("Ctrl-O", "unfold"), ("Alt-1…5", "panes"), ("F1", "help"), ("Ctrl-Q", "leave")]
        }
        Pane::Terminal => {
            &[("Ctrl-]", "back to chat"), ("Alt-t", "take control"), ("Alt-r", "release"), ("Shift-PgUp", "scroll"), ("Alt-h", "help")]
        }
        Pane::Files => &[("↑↓", "select"), ("Enter", "difference"), ("Esc", "back"), ("Alt-1…5", "panes"), ("F1", "help")],
        Pane::Events | Pane::Sync => {
            &[("↑↓", "scroll"), ("Esc", "back to chat"), ("Alt-1…5", "panes"), ("F1", "help"), ("Ctrl-Q", "leave")]
        }
    };
    let mut spans = Vec::new();
    let mut used = 0;
    for (key, description) in keys {
        used += key.width() + description.width() + 4;
        if used > width {
            break;
        }
        spans.push(Span::styled(format!(" {key}"), STRONG));
        spans.push(Span::styled(format!(" {description}  "), FAINT));
    }
    frame.render_widget(Paragraph::new(Line::from(spans)), area);
}
