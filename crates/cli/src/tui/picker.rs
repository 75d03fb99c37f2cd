//! A list to choose one item from: a thread, an assistant or a sandbox.

use cobox_langgraph::{Assistant, Thread};

use unicode_width::UnicodeWidthStr;

use super::{message::SandboxLine, view::cut};
use crate::chat::formatting::one_line;

/// Maximum columns of one cell, so that the other cells stay visible.
const MAX_CELL: usize = 36;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PickerKind {
    Thread,
    Assistant,
    Sandbox,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PickerItem {
    /// Identifies the choice.
    pub key: String,
    pub label: String,
    pub is_current: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picker {
    pub kind: PickerKind,
    pub items: Vec<PickerItem>,
    pub selected: usize,
}

impl Picker {
    pub fn threads(threads: &[Thread], current: Option<&str>) -> Self {
        let row = |thread: &Thread| {
            let when: String = thread.updated_at.chars().take(16).collect();
            let title = thread.title.as_deref().unwrap_or("(no title)");
            (thread.id.clone(), [title.to_owned(), thread.status.clone(), when.replace('T', " "), thread.id.clone()])
        };
        Self::new(PickerKind::Thread, aligned(threads.iter().map(row).collect(), current))
    }

    pub fn assistants(assistants: &[Assistant], current: Option<&str>) -> Self {
        let item = |a: &Assistant| PickerItem {
            label: one_line(&format!("{}  ({})", a.name, a.graph)),
            is_current: current == Some(&a.id),
            key: a.id.clone(),
        };
        Self::new(PickerKind::Assistant, assistants.iter().map(item).collect())
    }

    pub fn sandboxes(sandboxes: &[SandboxLine], current: Option<&str>) -> Self {
        let row = |s: &SandboxLine| {
            let name = if s.name.is_empty() { "-".to_owned() } else { s.name.clone() };
            (s.id.clone(), [name, s.state.clone(), s.id.clone()])
        };
        Self::new(PickerKind::Sandbox, aligned(sandboxes.iter().map(row).collect(), current))
    }

    fn new(kind: PickerKind, items: Vec<PickerItem>) -> Self {
        let selected = items.iter().position(|item| item.is_current).unwrap_or(0);
        Self { kind, items, selected }
    }

    pub fn select(&mut self, delta: isize) {
        self.selected = self.selected.saturating_add_signed(delta).min(self.items.len().saturating_sub(1));
    }

    pub fn title(&self) -> &'static str {
        match self.kind {
            PickerKind::Thread => "threads",
            PickerKind::Assistant => "assistants",
            PickerKind::Sandbox => "sandboxes",
        }
    }
}

/// Builds items with aligned cells. The first value of a row is its key.
fn aligned<const N: usize>(rows: Vec<(String, [String; N])>, current: Option<&str>) -> Vec<PickerItem> {
    let rows: Vec<(String, [String; N])> =
        rows.into_iter().map(|(key, cells)| (key, cells.map(|cell| cut(&one_line(&cell), MAX_CELL)))).collect();
    let width = |at: usize| rows.iter().map(|(_, cells)| cells[at].width()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let item = |(key, cells): &(String, [String; N])| {
        let padded = cells.iter().zip(widths).map(|(cell, width)| format!("{cell}{}", " ".repeat(width - cell.width())));
        PickerItem {
            label: padded.collect::<Vec<_>>().join("  ").trim_end().to_owned(),
            is_current: current == Some(key.as_str()),
            key: key.clone(),
        }
    };
    rows.iter().map(item).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_aligned_in_columns() {
        let line = |name: &str, state: &str| SandboxLine { name: name.into(), id: format!("sb_{name}"), state: state.into() };
        let picker = Picker::sandboxes(&[line("dev", "active"), line("", "suspended"), line("建設", "active")], Some("sb_dev"));
        let labels: Vec<&str> = picker.items.iter().map(|item| item.label.as_str()).collect();
        assert_eq!(labels, ["dev   active     sb_dev", "-     suspended  sb_", "建設  active     sb_建設"]);
        assert!(picker.items[0].is_current && !picker.items[1].is_current);
    }
}
