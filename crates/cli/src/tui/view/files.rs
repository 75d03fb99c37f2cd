//! Draws the sandbox's files with their changes marked, and the difference of one of them.

use ratatui::{
    Frame,
    layout::Rect,
    style::{Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Paragraph},
};

use super::{ACCENT, BAD, FAINT, GOOD, WARN, block, wrap::cut};
use crate::tui::{
    app_state::{AppState, SandboxState},
    file_tree::{ChangeMark, Diff, FileNode, FileTree},
    layout::Pane,
};

pub fn draw(frame: &mut Frame, state: &AppState, area: Rect) {
    let files = &state.files;
    let changed = files.changed().count();
    let title = match (&files.diff, changed) {
        (Some(diff), _) => format!(" {} · Esc back ", cobox_langgraph::clean(&crate::printer::visible(&diff.path), 200)),
        (None, 0) => " files ".to_owned(),
        (None, n) => format!(" files · {n} changed "),
    };
    let block = block(state, Pane::Files, title);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    if let Some(diff) = &files.diff {
        frame.render_widget(Paragraph::new(diff_lines(diff, inner)), inner);
        return;
    }
    let nodes = files.nodes();
    if nodes.is_empty() {
        let text = match (&state.sandbox, files.is_listed) {
            (SandboxState::Open(_), true) => "nothing in /workspace yet",
            (SandboxState::Open(_), false) => "looking…",
            _ => "no sandbox",
        };
        frame.render_widget(Paragraph::new(Line::styled(text, FAINT)), inner);
        return;
    }
    let first = first_shown(files, nodes.len(), inner.height);
    let is_focused = state.focus == Pane::Files;
    let line = |(at, node): (usize, &FileNode)| draw_node(node, is_focused && at == files.selected, usize::from(inner.width));
    let mut lines: Vec<Line> = nodes.iter().enumerate().skip(first).take(usize::from(inner.height)).map(line).collect();
    if files.is_truncated && lines.len() < usize::from(inner.height) {
        lines.push(Line::styled("(list truncated)", FAINT));
    }
    frame.render_widget(Paragraph::new(lines), inner);
}

/// The node drawn in this row of the screen.
pub fn node_at(files: &FileTree, area: Rect, row: u16) -> Option<usize> {
    let inner = Block::bordered().inner(area);
    let count = files.nodes().len();
    let at = first_shown(files, count, inner.height) + usize::from(row.checked_sub(inner.y)?);
    (row < inner.bottom() && at < count).then_some(at)
}

/// The first visible node, so that the selected one is always visible.
fn first_shown(files: &FileTree, count: usize, height: u16) -> usize {
    let height = usize::from(height);
    (files.selected + 1).saturating_sub(height).min(count.saturating_sub(height))
}

fn draw_node(node: &FileNode, is_selected: bool, width: usize) -> Line<'static> {
    let fold_mark = match (node.is_directory, node.is_folded) {
        (true, true) => "▸ ",
        (true, false) => "▾ ",
        (false, _) => "  ",
    };
    let (mark, style) = match node.mark {
        None => ("  ".to_owned(), Style::new()),
        Some((ChangeMark::New, _)) => ("+ ".to_owned(), GOOD),
        Some((ChangeMark::Changed, _)) => ("~ ".to_owned(), WARN),
        Some((ChangeMark::Removed, _)) => ("- ".to_owned(), BAD),
    };
    let author = if node.mark.is_some_and(|(_, is_by_agent)| is_by_agent) { " (agent)" } else { "" };
    let name = cut(&format!("{}{fold_mark}{}", "  ".repeat(node.depth.min(12)), node.name), width.saturating_sub(2 + author.len()));
    let style = if node.is_directory { ACCENT } else { style };
    let style = if is_selected { style.add_modifier(Modifier::REVERSED) } else { style };
    Line::from(vec![Span::styled(mark, style), Span::styled(name, style), Span::styled(author, FAINT)])
}

fn diff_lines(diff: &Diff, inner: Rect) -> Vec<Line<'static>> {
    let line = |line: &crate::tui::file_tree::DiffLine| {
        let style = match line.tag {
            '+' => GOOD,
            '-' => BAD,
            '@' => FAINT,
            _ => Style::new(),
        };
        let prefix = if line.tag == '@' { ' ' } else { line.tag };
        Line::styled(cut(&format!("{prefix} {}", line.text), usize::from(inner.width)), style)
    };
    diff.lines.iter().skip(diff.scroll).take(usize::from(inner.height)).map(line).collect()
}
