//! Line output of a chat: the agent's text on stdout and everything else on stderr, or with `--json` one JSON object
//! per line.

use std::io;

use cobox_langgraph::{Action, Change, Entry, Role, ToolOutcome, Transcript};
use cobox_protocol::event::SandboxEvent;
use serde_json::{Value, json};

use super::words;
use crate::{failure::Failure, printer::Printer};

pub struct Lines {
    printer: Printer,
    /// The agent's text so far does not end with a newline.
    is_mid_line: bool,
    /// The reader of stdout has closed it.
    pub is_unread: bool,
}

impl Lines {
    pub fn new(printer: Printer) -> Self {
        Self { printer, is_mid_line: false, is_unread: false }
    }

    /// Writes a notice that is not part of the conversation.
    pub fn aside(&mut self, words: &str, object: Value) -> io::Result<()> {
        if self.printer.is_json() {
            return self.write(&format!("{object}\n"));
        }
        self.end_line()?;
        self.printer.note(words);
        Ok(())
    }

    /// Writes an object in JSON mode only.
    pub fn aside_json(&mut self, object: Value) -> io::Result<()> {
        if self.printer.is_json() { self.write(&format!("{object}\n")) } else { Ok(()) }
    }

    pub fn changed(&mut self, transcript: &Transcript, change: &Change) -> io::Result<()> {
        match change {
            Change::TextAdded(number, text) if is_agents(transcript, *number) => self.text(text),
            Change::TextReplaced(number) if is_agents(transcript, *number) => {
                let Some(Entry::Message { text, .. }) = transcript.get(*number) else { return Ok(()) };
                self.end_line()?;
                self.text(text)
            }
            Change::ToolCalled(number) => match transcript.get(*number) {
                Some(Entry::Tool(tool)) => self.aside(
                    &format!("tool: {}", words::call(&tool.name, &tool.args)),
                    json!({"type": "tool_call", "name": tool.name, "args": arguments(&tool.args)}),
                ),
                _ => Ok(()),
            },
            Change::ToolReturned(number) => match transcript.get(*number) {
                Some(Entry::Tool(tool)) => {
                    let Some(outcome @ ToolOutcome { text, is_error }) = &tool.outcome else { return Ok(()) };
                    let mark = if words::has_failed(outcome) { "failed" } else { "done" };
                    self.aside(
                        &format!("{mark}: {}", words::outcome(tool)),
                        json!({"type": "tool_result", "name": tool.name, "text": text, "is_error": is_error}),
                    )
                }
                _ => Ok(()),
            },
            Change::TextAdded(..) | Change::TextReplaced(_) | Change::ToolCallPending(_) => Ok(()),
        }
    }

    pub fn event(&mut self, event: &SandboxEvent) -> io::Result<()> {
        self.aside(&format!("event: {}", words::event(event)), json!({"type": "event", "event": event}))
    }

    pub fn custom(&mut self, told: &Value) -> io::Result<()> {
        match words::custom(told) {
            Some(sentence) => self.aside(&format!("event: {sentence}"), json!({"type": "custom", "data": told})),
            None => self.aside_json(json!({"type": "custom", "data": told})),
        }
    }

    pub fn asks(&mut self, action: &Action, (number, of): (usize, usize)) -> io::Result<()> {
        let place = if of > 1 { format!("({number} of {of}) ") } else { String::new() };
        let mut text = format!("question: {place}{}", words::question(action));
        if !action.description.is_empty() && !action.description.starts_with("Tool execution requires approval") {
            text = format!("{text}\n  {}", words::one_line(&action.description));
        }
        self.aside(
            &format!("{text}\n  answer: {}", words::choices(action)),
            json!({"type": "interrupt", "name": action.name, "args": action.args, "description": action.description, "place": number, "of": of}),
        )
    }

    pub fn asks_words(&mut self, question: &str) -> io::Result<()> {
        self.aside(&format!("question: {question}"), json!({"type": "question", "text": question}))
    }

    pub fn failed(&mut self, failure: &Failure) -> io::Result<()> {
        if self.printer.is_json() {
            let mut object = failure.json();
            object["type"] = json!("error");
            return self.write(&format!("{object}\n"));
        }
        self.end_line()?;
        self.printer.failure(failure);
        Ok(())
    }

    /// Starts the user's turn.
    pub fn prompt(&mut self, is_terminal: bool) -> io::Result<()> {
        self.end_line()?;
        if is_terminal && !self.printer.is_json() {
            self.printer.err(b"> ");
        }
        Ok(())
    }

    fn text(&mut self, text: &str) -> io::Result<()> {
        if self.printer.is_json() {
            return self.write(&format!("{}\n", json!({"type": "text", "text": text})));
        }
        self.is_mid_line = !text.ends_with('\n');
        self.write(text)
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        let written = self.printer.stream(text.as_bytes());
        self.is_unread |= written.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::BrokenPipe);
        written
    }

    pub fn end_line(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.is_mid_line) { self.write("\n") } else { Ok(()) }
    }
}

/// Text of a subagent is excluded: its result appears as the outcome of a tool call.
fn is_agents(transcript: &Transcript, number: usize) -> bool {
    matches!(transcript.get(number), Some(Entry::Message { role: Role::Ai, is_nested: false, .. }))
}

/// Parses tool arguments as JSON; other text becomes a JSON string.
fn arguments(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| json!(text))
}
