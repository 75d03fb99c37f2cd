//! A list to choose one thing from: a thread, an assistant, a sandbox.

use cobox_langgraph::{Assistant, Thread};

use super::message::SandboxLine;
use crate::chat::words::one_line;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Thread,
    Assistant,
    Sandbox,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// What is chosen by it.
    pub key: String,
    pub label: String,
    pub is_current: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picker {
    pub choice: Choice,
    pub items: Vec<Item>,
    pub selected: usize,
}

impl Picker {
    pub fn threads(threads: &[Thread], current: Option<&str>) -> Self {
        let item = |thread: &Thread| {
            let title = thread.title.as_deref().unwrap_or("(no title)");
            let when: String = thread.updated_at.chars().take(16).collect();
            Item {
                label: one_line(&format!("{title}  {}  {}  {}", thread.status, when.replace('T', " "), thread.id)),
                is_current: current == Some(&thread.id),
                key: thread.id.clone(),
            }
        };
        Self::of(Choice::Thread, threads.iter().map(item).collect())
    }

    pub fn assistants(assistants: &[Assistant], current: Option<&str>) -> Self {
        let item = |a: &Assistant| Item {
            label: one_line(&format!("{}  ({})", a.name, a.graph)),
            is_current: current == Some(&a.id),
            key: a.id.clone(),
        };
        Self::of(Choice::Assistant, assistants.iter().map(item).collect())
    }

    pub fn sandboxes(sandboxes: &[SandboxLine], current: Option<&str>) -> Self {
        let item = |s: &SandboxLine| Item {
            label: one_line(&format!("{}  {}  {}", if s.name.is_empty() { "-" } else { &s.name }, s.state, s.id)),
            is_current: current == Some(&s.id),
            key: s.id.clone(),
        };
        Self::of(Choice::Sandbox, sandboxes.iter().map(item).collect())
    }

    fn of(choice: Choice, items: Vec<Item>) -> Self {
        let selected = items.iter().position(|item| item.is_current).unwrap_or(0);
        Self { choice, items, selected }
    }

    pub fn select(&mut self, by: isize) {
        self.selected = self.selected.saturating_add_signed(by).min(self.items.len().saturating_sub(1));
    }

    pub fn title(&self) -> &'static str {
        match self.choice {
            Choice::Thread => "threads",
            Choice::Assistant => "assistants",
            Choice::Sandbox => "sandboxes",
        }
    }
}
