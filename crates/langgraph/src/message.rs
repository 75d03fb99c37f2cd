//! One LangChain message of a conversation, complete or in chunks. Only the parts that are shown are read.

use serde_json::Value;

use crate::text::{clean, clean_line};

/// Maximum size of one message's text: some four thousand lines, more than a user would scroll through.
pub(crate) const MAX_TEXT_BYTES: usize = 256 * 1024;
/// Maximum size of one tool call's arguments.
pub(crate) const MAX_ARGUMENT_BYTES: usize = 64 * 1024;
/// Maximum size of an id or a name.
pub(crate) const MAX_NAME_BYTES: usize = 256;
/// Maximum number of tool calls read from one message; models request a handful.
const MAX_CALLS: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Human,
    Ai,
    Tool,
    System,
}

/// A model's request to use a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    /// JSON text.
    pub args: String,
}

/// A chunk of a [`ToolCall`] that the model is still writing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCallPiece {
    /// Index of the message's tool call that it belongs to.
    pub index: u64,
    pub id: Option<String>,
    pub name: Option<String>,
    pub args: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub id: String,
    pub role: Role,
    pub text: String,
    pub calls: Vec<ToolCall>,
    pub pieces: Vec<ToolCallPiece>,
    /// For a tool's result: the id of its call.
    pub answers: Option<String>,
    pub is_error: bool,
    /// Whether this is a chunk, to be appended to the message so far.
    pub is_piece: bool,
}

impl Message {
    /// `None` if the value is not a message, or one of a kind that is not shown.
    pub fn read(value: &Value) -> Option<Self> {
        let kind = value.get("type").or_else(|| value.get("role"))?.as_str()?;
        let is_piece = kind.ends_with("Chunk");
        let role = match kind {
            "human" | "user" | "HumanMessageChunk" | "HumanMessage" => Role::Human,
            "ai" | "assistant" | "AIMessageChunk" | "AIMessage" => Role::Ai,
            "tool" | "ToolMessageChunk" | "ToolMessage" => Role::Tool,
            "system" | "developer" | "SystemMessageChunk" | "SystemMessage" => Role::System,
            _ => return None,
        };
        let calls = if is_piece { Vec::new() } else { list(value, "tool_calls").filter_map(read_call).take(MAX_CALLS).collect() };
        let pieces = if is_piece { list(value, "tool_call_chunks").map(read_piece).take(MAX_CALLS).collect() } else { Vec::new() };
        Some(Self {
            id: name(value, "id").unwrap_or_default(),
            role,
            text: text_of(value.get("content").unwrap_or(&Value::Null)),
            calls,
            pieces,
            answers: name(value, "tool_call_id"),
            is_error: value.get("status").and_then(Value::as_str) == Some("error"),
            is_piece,
        })
    }
}

/// The content is a text, or a list of parts of which some are text.
fn text_of(content: &Value) -> String {
    match content {
        Value::String(text) => clean(text, MAX_TEXT_BYTES),
        Value::Array(parts) => {
            let mut text = String::new();
            for part in parts {
                let text_part = part.as_str().or_else(|| part.get("text").and_then(Value::as_str));
                match (text_part, part.get("type").and_then(Value::as_str)) {
                    (Some(text_part), _) => text.push_str(text_part),
                    // Contained in other fields of the message, or meant only for the model.
                    (None, Some("tool_use" | "tool_call" | "tool_call_chunk" | "input_json_delta" | "thinking" | "reasoning") | None) => {}
                    (None, Some(kind)) => text.push_str(&format!("[{kind}]")),
                }
                if text.len() > MAX_TEXT_BYTES {
                    break;
                }
            }
            clean(&text, MAX_TEXT_BYTES)
        }
        _ => String::new(),
    }
}

fn read_call(value: &Value) -> Option<ToolCall> {
    let args = match value.get("args")? {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    Some(ToolCall { id: name(value, "id").unwrap_or_default(), name: name(value, "name")?, args: clean(&args, MAX_ARGUMENT_BYTES) })
}

fn read_piece(value: &Value) -> ToolCallPiece {
    ToolCallPiece {
        index: value.get("index").and_then(Value::as_u64).unwrap_or(0),
        id: name(value, "id"),
        name: name(value, "name"),
        args: clean(value.get("args").and_then(Value::as_str).unwrap_or_default(), MAX_ARGUMENT_BYTES),
    }
}

fn list<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    value.get(field).and_then(Value::as_array).into_iter().flatten()
}

/// A short text on one line; `None` if it is empty.
pub(crate) fn name(value: &Value, field: &str) -> Option<String> {
    value.get(field).and_then(Value::as_str).map(|text| clean_line(text, MAX_NAME_BYTES)).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_chunks_and_lists_of_parts_are_read() {
        let whole = Message::read(&json!({
            "type": "ai", "id": "m1", "content": "",
            "tool_calls": [{"name": "execute", "args": {"command": "ls"}, "id": "c1", "type": "tool_call"}],
        }));
        let whole = whole.unwrap();
        assert_eq!(whole.calls, [ToolCall { id: "c1".into(), name: "execute".into(), args: r#"{"command":"ls"}"#.into() }]);
        let piece = Message::read(&json!({
            "type": "AIMessageChunk", "id": "m1", "content": [{"type": "text", "text": "he", "index": 0}],
            "tool_call_chunks": [{"name": null, "args": "{\"com", "id": null, "index": 1}],
        }));
        let piece = piece.unwrap();
        assert_eq!((piece.text.as_str(), piece.is_piece, piece.pieces[0].index), ("he", true, 1));
        assert_eq!(piece.pieces[0].args, "{\"com");
        let answer = Message::read(&json!({"type": "tool", "tool_call_id": "c1", "content": "\u{1b}[31mno\u{1b}[0m", "status": "error"}));
        let answer = answer.unwrap();
        assert_eq!((answer.answers.as_deref(), answer.text.as_str(), answer.is_error), (Some("c1"), "no", true));
    }

    #[test]
    fn values_that_are_not_messages_are_ignored() {
        for value in [json!(null), json!([]), json!({"type": "remove", "id": "m"}), json!({"type": 3}), json!("x")] {
            assert_eq!(Message::read(&value), None);
        }
    }
}
