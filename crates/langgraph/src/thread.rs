//! Assistants, threads and thread states as a deployment describes them; no I/O.

use serde_json::Value;

use crate::{
    interrupt::Interrupt,
    message::{Message, name},
};

/// Maximum number of messages shown when a thread is opened: the last ones.
const MAX_MESSAGES: usize = 500;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assistant {
    pub id: String,
    pub graph: String,
    pub name: String,
}

impl Assistant {
    pub fn read(value: &Value) -> Option<Self> {
        let graph = name(value, "graph_id").unwrap_or_default();
        Some(Self { id: name(value, "assistant_id")?, name: name(value, "name").unwrap_or_else(|| graph.clone()), graph })
    }

    /// Whether a user who types this word means this assistant: its id, graph or name.
    pub fn is_named(&self, word: &str) -> bool {
        [&self.id, &self.graph, &self.name].into_iter().any(|known| known == word)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thread {
    pub id: String,
    /// `idle`, `busy`, `interrupted` or `error`.
    pub status: String,
    pub updated_at: String,
    pub title: Option<String>,
}

impl Thread {
    pub fn read(value: &Value) -> Option<Self> {
        Some(Self {
            id: name(value, "thread_id")?,
            status: name(value, "status").unwrap_or_default(),
            updated_at: name(value, "updated_at").unwrap_or_default(),
            title: value.get("metadata").and_then(|m| name(m, "title")),
        })
    }
}

/// A thread's state, current or at a checkpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ThreadState {
    pub messages: Vec<Message>,
    pub interrupts: Vec<Interrupt>,
    pub created_at: Option<String>,
}

impl ThreadState {
    pub fn read(value: &Value) -> Self {
        let messages = value.get("values").and_then(|v| v.get("messages")).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let last = &messages[messages.len().saturating_sub(MAX_MESSAGES)..];
        let tasks = value.get("tasks").and_then(Value::as_array).into_iter().flatten();
        let mut interrupts: Vec<Interrupt> = tasks.filter_map(|task| task.get("interrupts")).flat_map(Interrupt::read_all).collect();
        if interrupts.is_empty() {
            interrupts = value.get("interrupts").map(Interrupt::read_all).unwrap_or_default();
        }
        Self { messages: last.iter().filter_map(Message::read).collect(), interrupts, created_at: name(value, "created_at") }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_state_has_messages_and_interrupts() {
        let state = ThreadState::read(&json!({
            "values": {"messages": [{"type": "human", "content": "hi", "id": "1"}, 3, {"type": "ai", "content": "ho", "id": "2"}]},
            "tasks": [{"interrupts": []}, {"interrupts": [{"id": "i", "value": "sure?"}]}], "created_at": "2026-01-01T00:00:00Z"}));
        assert_eq!((state.messages.len(), state.interrupts.len()), (2, 1));
        assert_eq!(ThreadState::read(&json!({"values": null})), ThreadState::default());
        let assistant = Assistant::read(&json!({"assistant_id": "a-1", "graph_id": "agent", "name": "agent"})).unwrap();
        assert!(assistant.is_named("agent") && assistant.is_named("a-1") && !assistant.is_named("b"));
        assert_eq!(
            Thread::read(&json!({"thread_id": "t", "status": "idle", "metadata": {"title": "x\u{1b}[2Jy"}})).unwrap().title.as_deref(),
            Some("xy")
        );
    }
}
