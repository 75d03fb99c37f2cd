//! A conversation as it is displayed: messages, tool calls and their results, assembled from chunks; no I/O.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::{
    Message, Role,
    message::{MAX_ARGUMENT_BYTES, MAX_TEXT_BYTES, ToolCall, ToolCallPiece},
};

/// Maximum number of entries. Older ones are dropped here, but the thread still has them.
const MAX_ENTRIES: usize = 2000;
/// Maximum size of all texts: more than a person can read in a day, and little compared to a browser.
const MAX_TRANSCRIPT_BYTES: usize = 32 * 1024 * 1024;
/// Maximum number of call ids: one per entry, and some for calls whose id changes while they are written.
const MAX_CALL_NAMES: usize = 4 * MAX_ENTRIES;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    Message {
        role: Role,
        text: String,
        is_nested: bool,
    },
    Tool(ToolUse),
    /// Not a part of the conversation: a note from cobox.
    Note(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolUse {
    pub name: String,
    /// JSON text, which may be incomplete.
    pub args: String,
    pub outcome: Option<ToolOutcome>,
    pub is_nested: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolOutcome {
    pub text: String,
    pub is_error: bool,
}

/// The effect of a message, with the number of the entry. Numbers don't change when older entries are dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// This was appended to a text, or began a new one.
    TextAdded(usize, String),
    /// The text was replaced.
    TextReplaced(usize),
    /// A tool is being called; its arguments are incomplete.
    ToolCallPending(usize),
    /// A tool was called; its arguments are complete.
    ToolCalled(usize),
    ToolReturned(usize),
}

#[derive(Clone, Debug, Default)]
pub struct Transcript {
    entries: VecDeque<Entry>,
    /// Number of entries that were dropped.
    dropped: usize,
    texts: HashMap<String, usize>,
    calls: HashMap<String, usize>,
    /// Calls that are still being written, by message id and index.
    pieces: HashMap<(String, u64), usize>,
    /// Entries whose calls have complete arguments.
    called: HashSet<usize>,
}

impl Transcript {
    /// The entries with their numbers, oldest first.
    pub fn entries(&self) -> impl DoubleEndedIterator<Item = (usize, &Entry)> {
        self.entries.iter().enumerate().map(|(at, entry)| (at + self.dropped, entry))
    }

    pub fn get(&self, number: usize) -> Option<&Entry> {
        self.entries.get(number.checked_sub(self.dropped)?)
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn add_note(&mut self, text: impl Into<String>) -> usize {
        self.add(Entry::Note(text.into()))
    }

    /// Adds the user's own message, which the deployment will repeat under this id.
    pub fn add_user_message(&mut self, id: &str, text: &str) -> usize {
        let number = self.add(Entry::Message { role: Role::Human, text: text.to_owned(), is_nested: false });
        self.texts.insert(id.to_owned(), number);
        number
    }

    pub fn apply(&mut self, message: &Message, is_nested: bool) -> Vec<Change> {
        let mut changes = Vec::new();
        match message.role {
            // System messages are meant for the model, and long.
            Role::System => {}
            Role::Tool => changes.extend(self.tool_answer(message, is_nested)),
            Role::Human | Role::Ai => {
                changes.extend(self.text(message, is_nested));
                for piece in &message.pieces {
                    changes.extend(self.call_piece(&message.id, piece, is_nested));
                }
                for (at, call) in message.calls.iter().enumerate() {
                    changes.extend(self.call(&message.id, at as u64, call, is_nested));
                }
            }
        }
        changes
    }

    fn text(&mut self, message: &Message, is_nested: bool) -> Option<Change> {
        let known = if message.id.is_empty() { None } else { self.texts.get(&message.id).copied() };
        let Some(number) = known else {
            if message.text.is_empty() {
                return None;
            }
            let number = self.add(Entry::Message { role: message.role, text: message.text.clone(), is_nested });
            if !message.id.is_empty() {
                self.texts.insert(message.id.clone(), number);
            }
            return Some(Change::TextAdded(number, message.text.clone()));
        };
        let Some(Entry::Message { text, .. }) = self.get_mut(number) else { return None };
        if message.is_piece {
            if message.text.is_empty() || text.len() + message.text.len() > MAX_TEXT_BYTES {
                return None;
            }
            text.push_str(&message.text);
            return Some(Change::TextAdded(number, message.text.clone()));
        }
        let more = message.text.strip_prefix(text.as_str()).map(str::to_owned);
        text.clone_from(&message.text);
        match more {
            Some(more) if more.is_empty() => None,
            Some(more) => Some(Change::TextAdded(number, more)),
            None => Some(Change::TextReplaced(number)),
        }
    }

    fn call_piece(&mut self, message: &str, piece: &ToolCallPiece, is_nested: bool) -> Option<Change> {
        let place = (message.to_owned(), piece.index);
        let number = match self.pieces.get(&place) {
            Some(number) => *number,
            None => {
                let name = piece.name.clone().unwrap_or_default();
                let number = self.add(Entry::Tool(ToolUse { name, args: String::new(), outcome: None, is_nested }));
                self.pieces.insert(place, number);
                number
            }
        };
        if let Some(id) = &piece.id {
            self.name_call(id, number);
        }
        let Some(Entry::Tool(tool)) = self.get_mut(number) else { return None };
        if let (true, Some(name)) = (tool.name.is_empty(), &piece.name) {
            tool.name.clone_from(name);
        }
        if tool.args.len() + piece.args.len() <= MAX_ARGUMENT_BYTES {
            tool.args.push_str(&piece.args);
        }
        Some(Change::ToolCallPending(number))
    }

    fn call(&mut self, message: &str, at: u64, call: &ToolCall, is_nested: bool) -> Option<Change> {
        let known = self.calls.get(&call.id).filter(|_| !call.id.is_empty()).or_else(|| self.pieces.get(&(message.to_owned(), at)));
        let number = match known {
            Some(number) => *number,
            None => {
                let number = self.add(Entry::Tool(ToolUse { name: call.name.clone(), args: String::new(), outcome: None, is_nested }));
                self.pieces.insert((message.to_owned(), at), number);
                number
            }
        };
        self.name_call(&call.id, number);
        let is_first = self.called.insert(number);
        let Some(Entry::Tool(tool)) = self.get_mut(number) else { return None };
        let is_other = tool.args != call.args || tool.name != call.name;
        tool.args.clone_from(&call.args);
        tool.name.clone_from(&call.name);
        (is_first || is_other).then_some(Change::ToolCalled(number))
    }

    fn tool_answer(&mut self, message: &Message, is_nested: bool) -> Vec<Change> {
        let id = message.answers.clone().unwrap_or_default();
        let outcome = ToolOutcome { text: message.text.clone(), is_error: message.is_error };
        let Some(number) = self.calls.get(&id).copied() else {
            // A result whose call was dropped or never received.
            let tool = ToolUse { name: "tool".to_owned(), args: String::new(), outcome: Some(outcome), is_nested };
            let number = self.add(Entry::Tool(tool));
            self.name_call(&id, number);
            return vec![Change::ToolReturned(number)];
        };
        let is_first = self.called.insert(number);
        let Some(Entry::Tool(tool)) = self.get_mut(number) else { return Vec::new() };
        let mut changes = if is_first { vec![Change::ToolCalled(number)] } else { Vec::new() };
        if message.is_piece
            && let Some(so_far) = &mut tool.outcome
        {
            if so_far.text.len() + outcome.text.len() <= MAX_TEXT_BYTES {
                so_far.text.push_str(&outcome.text);
            }
            changes.push(Change::ToolReturned(number));
        } else if tool.outcome.as_ref() != Some(&outcome) {
            tool.outcome = Some(outcome);
            changes.push(Change::ToolReturned(number));
        }
        changes
    }

    fn get_mut(&mut self, number: usize) -> Option<&mut Entry> {
        self.entries.get_mut(number.checked_sub(self.dropped)?)
    }

    /// Bounded, because a stream may rename one call again and again.
    fn name_call(&mut self, id: &str, number: usize) {
        if !id.is_empty() && (self.calls.len() < MAX_CALL_NAMES || self.calls.contains_key(id)) {
            self.calls.insert(id.to_owned(), number);
        }
    }

    fn add(&mut self, entry: Entry) -> usize {
        let mut kept: usize = self.entries.iter().map(Entry::bytes).sum();
        let before = self.dropped;
        while self.entries.len() >= MAX_ENTRIES || kept > MAX_TRANSCRIPT_BYTES {
            kept -= self.entries.pop_front().map_or(kept, |oldest| oldest.bytes());
            self.dropped += 1;
        }
        if self.dropped > before {
            // Otherwise these maps would keep the dropped entries' numbers forever.
            let dropped = self.dropped;
            self.texts.retain(|_, number| *number >= dropped);
            self.calls.retain(|_, number| *number >= dropped);
            self.pieces.retain(|_, number| *number >= dropped);
            self.called.retain(|number| *number >= dropped);
        }
        self.entries.push_back(entry);
        self.dropped + self.entries.len() - 1
    }
}

impl Entry {
    fn bytes(&self) -> usize {
        match self {
            Entry::Message { text, .. } | Entry::Note(text) => text.len(),
            Entry::Tool(tool) => tool.args.len() + tool.outcome.as_ref().map_or(0, |outcome| outcome.text.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn feed(transcript: &mut Transcript, value: Value) -> Vec<Change> {
        transcript.apply(&Message::read(&value).unwrap(), false)
    }

    fn piece(text: &str) -> Value {
        json!({"type": "AIMessageChunk", "id": "m", "content": text})
    }

    #[test]
    fn chunks_become_one_text_and_the_complete_message_adds_nothing() {
        let mut transcript = Transcript::default();
        transcript.add_user_message("h", "hello");
        assert_eq!(feed(&mut transcript, json!({"type": "human", "id": "h", "content": "hello"})), []);
        assert_eq!(feed(&mut transcript, piece("Good ")), [Change::TextAdded(1, "Good ".into())]);
        assert_eq!(feed(&mut transcript, piece("day")), [Change::TextAdded(1, "day".into())]);
        assert_eq!(feed(&mut transcript, json!({"type": "ai", "id": "m", "content": "Good day"})), []);
        assert_eq!(feed(&mut transcript, json!({"type": "ai", "id": "m", "content": "Good day!"})), [Change::TextAdded(1, "!".into())]);
        assert_eq!(feed(&mut transcript, json!({"type": "ai", "id": "m", "content": "Other"})), [Change::TextReplaced(1)]);
        assert_eq!(transcript.entries().count(), 2);
    }

    #[test]
    fn a_tool_call_in_chunks_is_one_entry_with_its_result() {
        let mut transcript = Transcript::default();
        let call = |chunk: Value| json!({"type": "AIMessageChunk", "id": "m", "content": "", "tool_call_chunks": [chunk]});
        feed(&mut transcript, call(json!({"index": 0, "id": "c", "name": "execute", "args": ""})));
        feed(&mut transcript, call(json!({"index": 0, "args": "{\"command\":"})));
        assert_eq!(feed(&mut transcript, call(json!({"index": 0, "args": "\"ls\"}"}))), [Change::ToolCallPending(0)]);
        let whole =
            json!({"type": "ai", "id": "m", "content": "", "tool_calls": [{"id": "c", "name": "execute", "args": {"command": "ls"}}]});
        assert_eq!(feed(&mut transcript, whole.clone()), [Change::ToolCalled(0)]);
        assert_eq!(feed(&mut transcript, whole), []);
        let answer = json!({"type": "tool", "id": "t", "tool_call_id": "c", "content": "a.txt"});
        assert_eq!(feed(&mut transcript, answer.clone()), [Change::ToolReturned(0)]);
        assert_eq!(feed(&mut transcript, answer), []);
        let Some(Entry::Tool(tool)) = transcript.get(0) else { panic!() };
        assert_eq!((tool.args.as_str(), tool.outcome.as_ref().unwrap().text.as_str()), (r#"{"command":"ls"}"#, "a.txt"));
    }

    #[test]
    fn a_result_before_the_complete_call_reports_the_call_first() {
        let mut transcript = Transcript::default();
        feed(
            &mut transcript,
            json!({"type": "AIMessageChunk", "id": "m", "content": "", "tool_call_chunks": [{"index": 0, "id": "c", "name": "ls", "args": "{}"}]}),
        );
        let changes = feed(&mut transcript, json!({"type": "tool", "tool_call_id": "c", "content": "x"}));
        assert_eq!(changes, [Change::ToolCalled(0), Change::ToolReturned(0)]);
    }

    #[test]
    fn an_endless_stream_grows_the_transcript_only_to_its_limits() {
        let mut transcript = Transcript::default();
        let long = "x".repeat(MAX_TEXT_BYTES);
        for n in 0..MAX_TRANSCRIPT_BYTES / MAX_TEXT_BYTES + 50 {
            feed(&mut transcript, json!({"type": "ai", "id": format!("m{n}"), "content": long}));
        }
        let kept: usize = transcript.entries().map(|(_, entry)| entry.bytes()).sum();
        assert!(kept <= MAX_TRANSCRIPT_BYTES + 2 * MAX_TEXT_BYTES, "{kept}");
        for n in 0..MAX_CALL_NAMES + 50 {
            let piece = json!({"index": 0, "id": format!("c{n}"), "name": "ls", "args": ""});
            feed(&mut transcript, json!({"type": "AIMessageChunk", "id": "m", "content": "", "tool_call_chunks": [piece]}));
        }
        assert_eq!(transcript.calls.len(), MAX_CALL_NAMES);
    }

    #[test]
    fn the_oldest_entries_are_dropped_and_numbers_do_not_change() {
        let mut transcript = Transcript::default();
        for n in 0..MAX_ENTRIES + 5 {
            transcript.add_user_message(&format!("h{n}"), "x");
        }
        assert_eq!((transcript.entries().count(), transcript.texts.len()), (MAX_ENTRIES, MAX_ENTRIES));
        assert_eq!(transcript.entries().next().unwrap().0, 5);
        assert!(transcript.get(4).is_none() && transcript.get(5).is_some());
        assert_eq!(transcript.add_note("n"), MAX_ENTRIES + 5);
    }
}
