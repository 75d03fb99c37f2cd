//! A conversation as it is shown: what was said, which tools were used and what came of them, put together from pieces; no I/O.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::{
    Message, Role,
    message::{MAX_ARGUMENT_BYTES, MAX_TEXT_BYTES, ToolCall, ToolCallPiece},
};

/// Entries that are kept; older ones go, and the thread still has them.
const MAX_ENTRIES: usize = 2000;
/// Text that is kept of them all, in bytes: what a person could have read in a day, and little beside a browser.
const MAX_KEPT_BYTES: usize = 32 * 1024 * 1024;
/// Names of calls that are kept: one each, and some that change theirs while they are written.
const MAX_CALL_NAMES: usize = 4 * MAX_ENTRIES;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    Said {
        role: Role,
        text: String,
        is_nested: bool,
    },
    Tool(Tool),
    /// Not of the conversation: told by us.
    Note(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tool {
    pub name: String,
    /// JSON, which may not be whole yet.
    pub args: String,
    pub outcome: Option<Outcome>,
    pub is_nested: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub text: String,
    pub is_error: bool,
}

/// What a message changed, by the entry's number, which stays when older ones go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// This was added to a text, which may be new.
    Said(usize, String),
    /// A text is another now.
    Resaid(usize),
    /// A tool is being asked for; its arguments are not whole yet.
    Asking(usize),
    /// A tool was asked for, with these arguments.
    Called(usize),
    Returned(usize),
}

#[derive(Clone, Debug, Default)]
pub struct Transcript {
    entries: VecDeque<Entry>,
    /// Entries that went.
    gone: usize,
    texts: HashMap<String, usize>,
    calls: HashMap<String, usize>,
    /// Calls that are still being written, by message and place.
    pieces: HashMap<(String, u64), usize>,
    /// Those whose arguments are whole.
    called: HashSet<usize>,
}

impl Transcript {
    /// With their numbers, oldest first.
    pub fn entries(&self) -> impl DoubleEndedIterator<Item = (usize, &Entry)> {
        self.entries.iter().enumerate().map(|(at, entry)| (at + self.gone, entry))
    }

    pub fn get(&self, number: usize) -> Option<&Entry> {
        self.entries.get(number.checked_sub(self.gone)?)
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn note(&mut self, text: impl Into<String>) -> usize {
        self.add(Entry::Note(text.into()))
    }

    /// A person's own message, before the deployment repeats it under this id.
    pub fn say(&mut self, id: &str, text: &str) -> usize {
        let number = self.add(Entry::Said { role: Role::Human, text: text.to_owned(), is_nested: false });
        self.texts.insert(id.to_owned(), number);
        number
    }

    pub fn take(&mut self, message: &Message, is_nested: bool) -> Vec<Change> {
        let mut changes = Vec::new();
        match message.role {
            // For the model, and long.
            Role::System => {}
            Role::Tool => changes.extend(self.returned(message, is_nested)),
            Role::Human | Role::Ai => {
                changes.extend(self.said(message, is_nested));
                for piece in &message.pieces {
                    changes.extend(self.asking(&message.id, piece, is_nested));
                }
                for (at, call) in message.calls.iter().enumerate() {
                    changes.extend(self.called(&message.id, at as u64, call, is_nested));
                }
            }
        }
        changes
    }

    fn said(&mut self, message: &Message, is_nested: bool) -> Option<Change> {
        let known = if message.id.is_empty() { None } else { self.texts.get(&message.id).copied() };
        let Some(number) = known else {
            if message.text.is_empty() {
                return None;
            }
            let number = self.add(Entry::Said { role: message.role, text: message.text.clone(), is_nested });
            if !message.id.is_empty() {
                self.texts.insert(message.id.clone(), number);
            }
            return Some(Change::Said(number, message.text.clone()));
        };
        let Some(Entry::Said { text, .. }) = self.get_mut(number) else { return None };
        if message.is_piece {
            if message.text.is_empty() || text.len() + message.text.len() > MAX_TEXT_BYTES {
                return None;
            }
            text.push_str(&message.text);
            return Some(Change::Said(number, message.text.clone()));
        }
        let more = message.text.strip_prefix(text.as_str()).map(str::to_owned);
        text.clone_from(&message.text);
        match more {
            Some(more) if more.is_empty() => None,
            Some(more) => Some(Change::Said(number, more)),
            None => Some(Change::Resaid(number)),
        }
    }

    fn asking(&mut self, message: &str, piece: &ToolCallPiece, is_nested: bool) -> Option<Change> {
        let place = (message.to_owned(), piece.index);
        let number = match self.pieces.get(&place) {
            Some(number) => *number,
            None => {
                let name = piece.name.clone().unwrap_or_default();
                let number = self.add(Entry::Tool(Tool { name, args: String::new(), outcome: None, is_nested }));
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
        Some(Change::Asking(number))
    }

    fn called(&mut self, message: &str, at: u64, call: &ToolCall, is_nested: bool) -> Option<Change> {
        let known = self.calls.get(&call.id).filter(|_| !call.id.is_empty()).or_else(|| self.pieces.get(&(message.to_owned(), at)));
        let number = match known {
            Some(number) => *number,
            None => {
                let number = self.add(Entry::Tool(Tool { name: call.name.clone(), args: String::new(), outcome: None, is_nested }));
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
        (is_first || is_other).then_some(Change::Called(number))
    }

    fn returned(&mut self, message: &Message, is_nested: bool) -> Vec<Change> {
        let id = message.answers.clone().unwrap_or_default();
        let outcome = Outcome { text: message.text.clone(), is_error: message.is_error };
        let Some(number) = self.calls.get(&id).copied() else {
            // An answer to a call that went, or was never told.
            let tool = Tool { name: "tool".to_owned(), args: String::new(), outcome: Some(outcome), is_nested };
            let number = self.add(Entry::Tool(tool));
            self.name_call(&id, number);
            return vec![Change::Returned(number)];
        };
        let is_first = self.called.insert(number);
        let Some(Entry::Tool(tool)) = self.get_mut(number) else { return Vec::new() };
        let mut changes = if is_first { vec![Change::Called(number)] } else { Vec::new() };
        if message.is_piece
            && let Some(so_far) = &mut tool.outcome
        {
            if so_far.text.len() + outcome.text.len() <= MAX_TEXT_BYTES {
                so_far.text.push_str(&outcome.text);
            }
            changes.push(Change::Returned(number));
        } else if tool.outcome.as_ref() != Some(&outcome) {
            tool.outcome = Some(outcome);
            changes.push(Change::Returned(number));
        }
        changes
    }

    fn get_mut(&mut self, number: usize) -> Option<&mut Entry> {
        self.entries.get_mut(number.checked_sub(self.gone)?)
    }

    /// A stream that calls one thing by ever new names must not make this grow.
    fn name_call(&mut self, id: &str, number: usize) {
        if !id.is_empty() && (self.calls.len() < MAX_CALL_NAMES || self.calls.contains_key(id)) {
            self.calls.insert(id.to_owned(), number);
        }
    }

    fn add(&mut self, entry: Entry) -> usize {
        let mut kept: usize = self.entries.iter().map(Entry::bytes).sum();
        let before = self.gone;
        while self.entries.len() >= MAX_ENTRIES || kept > MAX_KEPT_BYTES {
            kept -= self.entries.pop_front().map_or(kept, |oldest| oldest.bytes());
            self.gone += 1;
        }
        if self.gone > before {
            // What spoke of them would otherwise be kept for ever.
            let gone = self.gone;
            self.texts.retain(|_, number| *number >= gone);
            self.calls.retain(|_, number| *number >= gone);
            self.pieces.retain(|_, number| *number >= gone);
            self.called.retain(|number| *number >= gone);
        }
        self.entries.push_back(entry);
        self.gone + self.entries.len() - 1
    }
}

impl Entry {
    fn bytes(&self) -> usize {
        match self {
            Entry::Said { text, .. } | Entry::Note(text) => text.len(),
            Entry::Tool(tool) => tool.args.len() + tool.outcome.as_ref().map_or(0, |outcome| outcome.text.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn feed(transcript: &mut Transcript, value: Value) -> Vec<Change> {
        transcript.take(&Message::read(&value).unwrap(), false)
    }

    fn piece(text: &str) -> Value {
        json!({"type": "AIMessageChunk", "id": "m", "content": text})
    }

    #[test]
    fn pieces_become_one_text_and_the_whole_message_adds_nothing() {
        let mut transcript = Transcript::default();
        transcript.say("h", "hello");
        assert_eq!(feed(&mut transcript, json!({"type": "human", "id": "h", "content": "hello"})), []);
        assert_eq!(feed(&mut transcript, piece("Good ")), [Change::Said(1, "Good ".into())]);
        assert_eq!(feed(&mut transcript, piece("day")), [Change::Said(1, "day".into())]);
        assert_eq!(feed(&mut transcript, json!({"type": "ai", "id": "m", "content": "Good day"})), []);
        assert_eq!(feed(&mut transcript, json!({"type": "ai", "id": "m", "content": "Good day!"})), [Change::Said(1, "!".into())]);
        assert_eq!(feed(&mut transcript, json!({"type": "ai", "id": "m", "content": "Other"})), [Change::Resaid(1)]);
        assert_eq!(transcript.entries().count(), 2);
    }

    #[test]
    fn a_tool_call_written_in_pieces_is_the_one_that_is_called_and_answered() {
        let mut transcript = Transcript::default();
        let call = |chunk: Value| json!({"type": "AIMessageChunk", "id": "m", "content": "", "tool_call_chunks": [chunk]});
        feed(&mut transcript, call(json!({"index": 0, "id": "c", "name": "execute", "args": ""})));
        feed(&mut transcript, call(json!({"index": 0, "args": "{\"command\":"})));
        assert_eq!(feed(&mut transcript, call(json!({"index": 0, "args": "\"ls\"}"}))), [Change::Asking(0)]);
        let whole =
            json!({"type": "ai", "id": "m", "content": "", "tool_calls": [{"id": "c", "name": "execute", "args": {"command": "ls"}}]});
        assert_eq!(feed(&mut transcript, whole.clone()), [Change::Called(0)]);
        assert_eq!(feed(&mut transcript, whole), []);
        let answer = json!({"type": "tool", "id": "t", "tool_call_id": "c", "content": "a.txt"});
        assert_eq!(feed(&mut transcript, answer.clone()), [Change::Returned(0)]);
        assert_eq!(feed(&mut transcript, answer), []);
        let Some(Entry::Tool(tool)) = transcript.get(0) else { panic!() };
        assert_eq!((tool.args.as_str(), tool.outcome.as_ref().unwrap().text.as_str()), (r#"{"command":"ls"}"#, "a.txt"));
    }

    #[test]
    fn an_answer_before_the_whole_call_still_tells_the_call_first() {
        let mut transcript = Transcript::default();
        feed(
            &mut transcript,
            json!({"type": "AIMessageChunk", "id": "m", "content": "", "tool_call_chunks": [{"index": 0, "id": "c", "name": "ls", "args": "{}"}]}),
        );
        let told = feed(&mut transcript, json!({"type": "tool", "tool_call_id": "c", "content": "x"}));
        assert_eq!(told, [Change::Called(0), Change::Returned(0)]);
    }

    #[test]
    fn an_endless_stream_makes_it_grow_only_so_far() {
        let mut transcript = Transcript::default();
        let long = "x".repeat(MAX_TEXT_BYTES);
        for n in 0..MAX_KEPT_BYTES / MAX_TEXT_BYTES + 50 {
            feed(&mut transcript, json!({"type": "ai", "id": format!("m{n}"), "content": long}));
        }
        let kept: usize = transcript.entries().map(|(_, entry)| entry.bytes()).sum();
        assert!(kept <= MAX_KEPT_BYTES + 2 * MAX_TEXT_BYTES, "{kept}");
        for n in 0..MAX_CALL_NAMES + 50 {
            let piece = json!({"index": 0, "id": format!("c{n}"), "name": "ls", "args": ""});
            feed(&mut transcript, json!({"type": "AIMessageChunk", "id": "m", "content": "", "tool_call_chunks": [piece]}));
        }
        assert_eq!(transcript.calls.len(), MAX_CALL_NAMES);
    }

    #[test]
    fn it_forgets_the_oldest_and_the_numbers_of_the_others_stay() {
        let mut transcript = Transcript::default();
        for n in 0..MAX_ENTRIES + 5 {
            transcript.say(&format!("h{n}"), "x");
        }
        assert_eq!((transcript.entries().count(), transcript.texts.len()), (MAX_ENTRIES, MAX_ENTRIES));
        assert_eq!(transcript.entries().next().unwrap().0, 5);
        assert!(transcript.get(4).is_none() && transcript.get(5).is_some());
        assert_eq!(transcript.note("n"), MAX_ENTRIES + 5);
    }
}
