//! Line output of a chat: the agent's text on stdout and everything else on stderr, or with `--json` one JSON object
//! per line.

use std::io;

use cobox_langgraph::{Action, Change, Entry, Role, ToolOutcome, Transcript};
use cobox_protocol::event::SandboxEvent;
use serde_json::{Value, json};

use super::formatting;
use crate::{failure::Failure, printer::Printer};

pub struct LineOutput {
    printer: Printer,
    /// The agent's text so far does not end with a newline.
    is_mid_line: bool,
    /// The reader of stdout has closed it.
    pub is_output_closed: bool,
}

impl LineOutput {
    pub fn new(printer: Printer) -> Self {
        Self { printer, is_mid_line: false, is_output_closed: false }
    }

    /// Writes a notice that is not part of the conversation.
    pub fn notice(&mut self, text: &str, object: Value) -> io::Result<()> {
        if self.printer.is_json() {
            return self.write(&format!("{object}\n"));
        }
        self.end_line()?;
        self.printer.note(text);
        Ok(())
    }

    /// Writes an object in JSON mode only.
    pub fn json_notice(&mut self, object: Value) -> io::Result<()> {
        if self.printer.is_json() { self.write(&format!("{object}\n")) } else { Ok(()) }
    }

    pub fn print_change(&mut self, transcript: &Transcript, change: &Change) -> io::Result<()> {
        match change {
            Change::TextAdded(number, text) if is_agent_text(transcript, *number) => self.text(text),
            Change::TextReplaced(number) if is_agent_text(transcript, *number) => {
                let Some(Entry::Message { text, .. }) = transcript.get(*number) else { return Ok(()) };
                self.end_line()?;
                self.text(text)
            }
            Change::ToolCalled(number) => match transcript.get(*number) {
                Some(Entry::Tool(tool)) => self.notice(
                    &format!("tool: {}", formatting::format_tool_call(&tool.name, &tool.args)),
                    json!({"type": "tool_call", "name": tool.name, "args": arguments(&tool.args)}),
                ),
                _ => Ok(()),
            },
            Change::ToolReturned(number) => match transcript.get(*number) {
                Some(Entry::Tool(tool)) => {
                    let Some(outcome @ ToolOutcome { text, is_error }) = &tool.outcome else { return Ok(()) };
                    let mark = if formatting::has_failed(outcome) { "failed" } else { "done" };
                    self.notice(
                        &format!("{mark}: {}", formatting::format_tool_outcome(tool)),
                        json!({"type": "tool_result", "name": tool.name, "text": text, "is_error": is_error}),
                    )
                }
                _ => Ok(()),
            },
            Change::TextAdded(..) | Change::TextReplaced(_) | Change::ToolCallPending(_) => Ok(()),
        }
    }

    pub fn print_event(&mut self, event: &SandboxEvent) -> io::Result<()> {
        self.notice(&format!("event: {}", formatting::format_event(event)), json!({"type": "event", "event": event}))
    }

    pub fn print_custom_event(&mut self, data: &Value) -> io::Result<()> {
        match formatting::format_custom_event(data) {
            Some(sentence) => self.notice(&format!("event: {sentence}"), json!({"type": "custom", "data": data})),
            None => self.json_notice(json!({"type": "custom", "data": data})),
        }
    }

    pub fn ask_action(&mut self, action: &Action, (number, of): (usize, usize)) -> io::Result<()> {
        let position = if of > 1 { format!("({number} of {of}) ") } else { String::new() };
        let mut message = format!("question: {position}{}", formatting::format_question(action));
        if !action.description.is_empty() && !action.description.starts_with("Tool execution requires approval") {
            message = format!("{message}\n  {}", formatting::one_line(&action.description));
        }
        self.notice(
            &format!("{message}\n  answer: {}", formatting::format_choices(action)),
            json!({"type": "interrupt", "name": action.name, "args": action.args, "description": action.description, "place": number, "of": of}),
        )
    }

    pub fn ask_text(&mut self, question: &str) -> io::Result<()> {
        self.notice(&format!("question: {question}"), json!({"type": "question", "text": question}))
    }

    pub fn print_failure(&mut self, failure: &Failure) -> io::Result<()> {
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
        self.is_output_closed |= written.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::BrokenPipe);
        written
    }

    pub fn end_line(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.is_mid_line) { self.write("\n") } else { Ok(()) }
    }
}

/// Text of a subagent is excluded: its result appears as the outcome of a tool call.
fn is_agent_text(transcript: &Transcript, number: usize) -> bool {
    matches!(transcript.get(number), Some(Entry::Message { role: Role::Ai, is_nested: false, .. }))
}

/// Parses tool arguments as JSON; other text becomes a JSON string.
fn arguments(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| json!(text))
}
