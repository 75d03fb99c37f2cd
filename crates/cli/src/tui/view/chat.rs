//! Draws the conversation: messages, tool calls folded to two lines, the open question, and the input line.

use cobox_langgraph::{Entry, Question, Role, ToolUse};
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Position, Rect},
    style::{Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Borders, Paragraph},
};
use unicode_width::UnicodeWidthStr;

use super::{ACCENT, BAD, FAINT, GOOD, STRONG, WARN, block, wrap::wrap};
use crate::{
    chat::formatting,
    tui::{
        app_state::{AppState, SandboxState},
        chat_pane::RunState,
        layout::Pane,
        submit::NO_DEPLOYMENT,
    },
};

/// Maximum rows of the input.
const MAX_INPUT_ROWS: u16 = 6;
/// Maximum rows of a question: the rest of the pane shows its context.
const MAX_ASK_ROWS: u16 = 8;
/// Lines of an outcome shown for an unfolded tool call; the agent has the rest.
const MAX_OUTCOME_LINES: usize = 60;

pub fn draw(frame: &mut Frame, state: &AppState, area: Rect) {
    let title = match (&state.assistant, &state.chat.run) {
        (Some(assistant), RunState::Idle) => format!(" chat · {} ", assistant.name),
        (Some(assistant), RunState::Running { is_cancelling: false, .. }) => format!(" chat · {} is working… ", assistant.name),
        (Some(assistant), RunState::Running { .. }) => format!(" chat · cancelling {}… ", assistant.name),
        (None, _) => " chat ".to_owned(),
    };
    let block = block(state, Pane::Chat, title);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [conversation, question_area, input] = layout_parts(state, inner);

    let lines = lines(state, conversation.width, usize::from(conversation.height) + state.chat.scroll);
    let shown = visible(&lines, conversation.height, state.chat.scroll);
    frame.render_widget(Paragraph::new(shown.iter().map(|(_, line)| line.clone()).collect::<Vec<_>>()), conversation);
    if question_area.height > 0 {
        frame.render_widget(Paragraph::new(question_lines(state, question_area.width)), question_area);
    }
    draw_input(frame, state, input);
}

/// The entry drawn in this row of the screen.
pub fn entry_at(state: &AppState, area: Rect, row: u16) -> Option<usize> {
    let inner = Block::bordered().inner(area);
    let [conversation, ..] = layout_parts(state, inner);
    let lines = lines(state, conversation.width, usize::from(conversation.height) + state.chat.scroll);
    let shown = visible(&lines, conversation.height, state.chat.scroll);
    let number = shown.get(usize::from(row.checked_sub(conversation.y)?))?.0?;
    matches!(state.chat.transcript.get(number), Some(Entry::Tool(_))).then_some(number)
}

/// Maximum scroll offset.
pub fn max_scroll(state: &AppState, area: Rect) -> usize {
    let inner = Block::bordered().inner(area);
    let [conversation, ..] = layout_parts(state, inner);
    lines(state, conversation.width, usize::MAX).len().saturating_sub(usize::from(conversation.height))
}

fn layout_parts(state: &AppState, inner: Rect) -> [Rect; 3] {
    let question_rows =
        if state.chat.review.is_some() { question_lines(state, inner.width).len().min(usize::from(MAX_ASK_ROWS)) as u16 } else { 0 };
    let input_rows = input_lines(state, inner.width).0.len().min(usize::from(MAX_INPUT_ROWS)) as u16;
    Layout::vertical([Constraint::Min(3), Constraint::Length(question_rows), Constraint::Length(input_rows + 1)]).areas(inner)
}

type Numbered<'a> = (Option<usize>, Line<'a>);

/// The last lines of the conversation: at least `min_lines`, if there are that many.
fn lines(state: &AppState, width: u16, min_lines: usize) -> Vec<Numbered<'static>> {
    let mut blocks: Vec<Vec<Numbered>> = Vec::new();
    let mut count = 0;
    for (number, entry) in state.chat.transcript.entries().rev() {
        let rows: Vec<Numbered> =
            entry_lines(state, number, entry, usize::from(width)).into_iter().map(|line| (Some(number), line)).collect();
        count += rows.len();
        blocks.push(rows);
        if count >= min_lines {
            break;
        }
    }
    if blocks.is_empty() {
        return welcome(state, usize::from(width)).into_iter().map(|line| (None, line)).collect();
    }
    blocks.into_iter().rev().flatten().collect()
}

fn visible<'a, 'b>(lines: &'b [Numbered<'a>], height: u16, scroll: usize) -> &'b [Numbered<'a>] {
    let end = lines.len().saturating_sub(scroll);
    &lines[end.saturating_sub(usize::from(height))..end]
}

fn entry_lines(state: &AppState, number: usize, entry: &Entry, width: usize) -> Vec<Line<'static>> {
    let mut lines = match entry {
        Entry::Message { role: Role::Human, text, .. } => prefixed("you  ", ACCENT.add_modifier(Modifier::BOLD), text, width, Style::new()),
        Entry::Message { text, is_nested: true, .. } => prefixed("  │  ", FAINT, text, width, FAINT),
        Entry::Message { text, .. } => prefixed("", Style::new(), text, width, Style::new()),
        Entry::Note(text) => prefixed("· ", FAINT, text, width, WARN),
        Entry::Tool(tool) => return tool_lines(tool, state.chat.is_expanded(number), width),
    };
    lines.push(Line::default());
    lines
}

fn tool_lines(tool: &ToolUse, is_expanded: bool, width: usize) -> Vec<Line<'static>> {
    let (mark, style) = match &tool.outcome {
        None => ("◌", WARN),
        Some(outcome) if formatting::has_failed(outcome) => ("✗", BAD),
        Some(_) => ("✓", GOOD),
    };
    let nested = if tool.is_nested { "  │ " } else { "" };
    let fold = if is_expanded { "▾" } else { "▸" };
    let heading = format!("{nested}{mark} {fold} {}", formatting::format_tool_call(&tool.name, &tool.args));
    let mut lines = vec![Line::styled(super::wrap::cut(&heading, width), style)];
    if !is_expanded {
        if tool.outcome.is_some() {
            lines.push(Line::styled(super::wrap::cut(&format!("{nested}    {}", formatting::format_tool_outcome(tool)), width), FAINT));
        }
        return lines;
    }
    let args = match serde_json::from_str::<serde_json::Value>(&tool.args) {
        Ok(serde_json::Value::Object(fields)) => {
            let field = |(name, value): (&String, &serde_json::Value)| {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                format!("{name}: {}", cobox_langgraph::clean(text.trim_end(), 16 * 1024))
            };
            fields.iter().map(field).collect::<Vec<_>>().join("\n")
        }
        _ => tool.args.clone(),
    };
    lines.extend(prefixed("    ", FAINT, &args, width, Style::new()));
    if let Some(outcome) = &tool.outcome {
        let all = prefixed("  → ", style, outcome.text.trim_end(), width, FAINT);
        let more = all.len().saturating_sub(MAX_OUTCOME_LINES);
        lines.extend(all.into_iter().take(MAX_OUTCOME_LINES));
        if more > 0 {
            lines.push(Line::styled(format!("    (+{more} lines)"), FAINT));
        }
    }
    lines
}

/// Wraps text with a prefix on its first line and the same indent on the others.
fn prefixed(prefix: &str, prefix_style: Style, text: &str, width: usize, style: Style) -> Vec<Line<'static>> {
    let indent = prefix.width();
    let wrapped = wrap(text, width.saturating_sub(indent));
    let line = |(at, text): (usize, String)| {
        let before = if at == 0 { prefix.to_owned() } else { " ".repeat(indent) };
        Line::from(vec![Span::styled(before, prefix_style), Span::styled(text, style)])
    };
    wrapped.into_iter().enumerate().map(line).collect()
}

fn welcome(state: &AppState, width: usize) -> Vec<Line<'static>> {
    let sandbox = match &state.sandbox {
        SandboxState::Open(info) => format!("The sandbox {} is ready for you and the agent.", info.sandbox),
        SandboxState::Opening => "The sandbox is starting. You can already type.".to_owned(),
        SandboxState::None if state.has_broker => {
            "No sandbox yet: the agent creates one when it needs it, or you create one with /sandbox new.".to_owned()
        }
        SandboxState::None => "No broker is configured, so there is no sandbox.".to_owned(),
        SandboxState::Failed(reason) => format!("No sandbox: {reason}"),
    };
    let greeting = match (&state.deployment, &state.thread) {
        (None, _) => NO_DEPLOYMENT.to_owned(),
        (Some(url), None) => format!("Connecting to {url}…"),
        (Some(url), Some(_)) => format!("Send a message to {}.", state.assistant.as_ref().map_or(url.as_str(), |a| a.name.as_str())),
    };
    let text = [greeting, sandbox, "Type /help for a list of commands.".to_owned()].join("\n\n");
    wrap(&text, width).into_iter().map(|line| Line::styled(line, FAINT)).collect()
}

fn question_lines(state: &AppState, width: u16) -> Vec<Line<'static>> {
    let Some(review) = &state.chat.review else { return Vec::new() };
    let (number, total) = review.progress();
    let position = if total > 1 { format!(" {number} of {total}") } else { String::new() };
    let mut lines = vec![Line::styled(format!("── approval required{position} "), WARN.add_modifier(Modifier::BOLD))];
    let (text, keys) = match review.next() {
        Some(Question::Action(action)) => {
            let mut keys = vec!["type y (yes)"];
            keys.extend(action.may_reject.then_some("n or no <reason>"));
            keys.extend(action.may_edit.then_some("e Tab (edit it)"));
            (formatting::format_question(action), keys.join(" · "))
        }
        Some(Question::Text(text)) => (text.to_owned(), "type your answer".to_owned()),
        None => (String::new(), String::new()),
    };
    let wrapped = wrap(&text, usize::from(width));
    let available_rows = usize::from(MAX_ASK_ROWS) - 2;
    let is_truncated = wrapped.len() > available_rows;
    lines.extend(wrapped.into_iter().take(if is_truncated { available_rows - 1 } else { available_rows }).map(Line::from));
    if is_truncated {
        lines.push(Line::styled("(truncated: e Tab shows all of it)", FAINT));
    }
    lines.push(Line::styled(keys, STRONG));
    lines
}

/// The lines of the input, and the cursor's position in them.
fn input_lines(state: &AppState, width: u16) -> (Vec<String>, (usize, usize)) {
    let editor = &state.chat.editor;
    let width = usize::from(width).saturating_sub(3).max(1);
    let (mut lines, mut cursor) = (vec![String::new()], (0, 0));
    let mut used = 0;
    for (at, c) in editor.text().char_indices() {
        if at == editor.cursor() {
            cursor = (lines.len() - 1, used);
        }
        let char_width = unicode_width::UnicodeWidthChar::width(c).unwrap_or(0).max(usize::from(c == '\t') * 4);
        if c == '\n' || used + char_width > width {
            lines.push(String::new());
            used = 0;
        }
        if c != '\n'
            && let Some(line) = lines.last_mut()
        {
            if c == '\t' {
                line.push_str("    ")
            } else {
                line.push(c)
            }
            used += char_width;
        }
    }
    if editor.cursor() == editor.text().len() {
        cursor = (lines.len() - 1, used);
    }
    (lines, cursor)
}

fn draw_input(frame: &mut Frame, state: &AppState, area: Rect) {
    let is_focused = state.focus == Pane::Chat && state.overlay.is_none();
    let border = Block::new().borders(Borders::TOP).border_style(FAINT);
    let inner = border.inner(area);
    frame.render_widget(border, area);
    let (lines, (row, col)) = input_lines(state, inner.width);
    let first = (row + 1).saturating_sub(usize::from(inner.height));
    let hint = if state.chat.review.is_some() { "your decision" } else { "a message, or /help" };
    let shown: Vec<Line> = if state.chat.editor.is_empty() {
        vec![Line::from(vec![Span::styled("> ", ACCENT), Span::styled(hint, FAINT)])]
    } else {
        let mark = |at: usize| if at == 0 { "> " } else { "  " };
        lines
            .iter()
            .enumerate()
            .skip(first)
            .map(|(at, line)| Line::from(vec![Span::styled(mark(at), ACCENT), Span::raw(line.clone())]))
            .collect()
    };
    frame.render_widget(Paragraph::new(shown), inner);
    if is_focused && inner.height > 0 {
        let at = Position::new(inner.x + 2 + col as u16, inner.y + (row - first) as u16);
        frame.set_cursor_position(at);
    }
}
