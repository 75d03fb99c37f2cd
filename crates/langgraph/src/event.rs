//! The events of a run's stream, read from its server-sent events; no I/O.

use serde_json::Value;

use crate::{
    interrupt::Interrupt,
    message::{Message, name},
    sse::SseEvent,
    text::clean,
};

/// Maximum size of an error text.
const MAX_ERROR_BYTES: usize = 4096;
/// Maximum size of a custom event that is passed on: many may wait to be shown.
const MAX_CUSTOM_BYTES: usize = 64 * 1024;
/// Maximum number of messages read from one update: a node adds a few, and a summary may send all there are.
const MAX_MESSAGES: usize = 1000;

#[derive(Clone, Debug, PartialEq)]
pub enum RunEvent {
    Started {
        run_id: String,
    },
    Message {
        message: Message,
        /// From a subagent, within one of the agent's own tool calls.
        is_nested: bool,
    },
    /// The run waits for a person; its stream ends after this.
    Interrupted(Vec<Interrupt>),
    /// An event that the graph defines, such as `{"type": "sandbox", "event": …}` about the sandbox it works in.
    Custom(Value),
    /// The connection was lost and restored; no event is missing.
    Reconnected,
    Failed {
        message: String,
    },
}

/// Reads the run events from one server-sent event, in order. Unknown names yield none.
pub fn read(event: &SseEvent) -> Vec<RunEvent> {
    let Ok(data) = serde_json::from_str::<Value>(&event.data) else { return Vec::new() };
    let (kind, source) = event.name.split_once('|').map_or((event.name.as_str(), ""), |(kind, source)| (kind, source));
    let is_nested = !source.is_empty();
    match kind {
        "metadata" => name(&data, "run_id").map(|run_id| RunEvent::Started { run_id }).into_iter().collect(),
        // A pair of a message and its metadata.
        "messages" => {
            Message::read(data.get(0).unwrap_or(&data)).map(|message| RunEvent::Message { message, is_nested }).into_iter().collect()
        }
        "updates" => updates(&data, is_nested),
        "custom" if event.data.len() <= MAX_CUSTOM_BYTES => vec![RunEvent::Custom(data)],
        "error" => vec![RunEvent::Failed { message: failure(&data) }],
        _ => Vec::new(),
    }
}

/// `{node: {"messages": […]}}`, or `{"__interrupt__": […]}`.
fn updates(data: &Value, is_nested: bool) -> Vec<RunEvent> {
    let mut events = Vec::new();
    for (node, update) in data.as_object().into_iter().flatten() {
        if node == "__interrupt__" {
            // A subagent's interrupts are repeated by its parents.
            let asked = if is_nested { Vec::new() } else { Interrupt::read_all(update) };
            if !asked.is_empty() {
                events.push(RunEvent::Interrupted(asked));
            }
            continue;
        }
        // A node may have several updates.
        let parts = update.as_array().map_or(std::slice::from_ref(update), Vec::as_slice);
        let messages =
            parts.iter().filter_map(|part| part.get("messages")).flat_map(|m| m.as_array().map_or(std::slice::from_ref(m), Vec::as_slice));
        for message in messages.take(MAX_MESSAGES).filter_map(Message::read) {
            events.push(RunEvent::Message { message, is_nested });
        }
    }
    events
}

fn failure(data: &Value) -> String {
    let field = |name: &str| data.get(name).and_then(Value::as_str);
    let text = match (field("error"), field("message")) {
        (Some(kind), Some(message)) if !message.is_empty() => format!("{kind}: {message}"),
        (Some(text), _) | (None, Some(text)) => text.to_owned(),
        (None, None) => data.as_str().map_or_else(|| data.to_string(), str::to_owned),
    };
    clean(&text, MAX_ERROR_BYTES)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read_named(name: &str, data: Value) -> Vec<RunEvent> {
        read(&SseEvent { name: name.into(), data: data.to_string(), id: None })
    }

    #[test]
    fn every_event_of_the_stream_is_read() {
        assert_eq!(read_named("metadata", json!({"run_id": "r1", "attempt": 1})), [RunEvent::Started { run_id: "r1".into() }]);
        let chunk = json!([{"type": "AIMessageChunk", "content": "hi", "id": "m"}, {"langgraph_node": "model"}]);
        assert!(
            matches!(&read_named("messages", chunk.clone())[..], [RunEvent::Message { message, is_nested: false }] if message.text == "hi")
        );
        assert!(matches!(&read_named("messages|tools:1", chunk)[..], [RunEvent::Message { is_nested: true, .. }]));
        let update = json!({"model": {"messages": [{"type": "ai", "content": "a", "id": "1"}]}, "tools": null, "x": [{"messages": {"type": "human", "content": "b"}}]});
        assert_eq!(read_named("updates", update).len(), 2);
        let asks = json!({"__interrupt__": [{"id": "i", "value": "sure?"}]});
        assert!(matches!(&read_named("updates", asks.clone())[..], [RunEvent::Interrupted(asked)] if asked.len() == 1));
        assert_eq!(read_named("updates|tools:1", asks), []);
        assert_eq!(
            read_named("error", json!({"error": "ValueError", "message": "no"})),
            [RunEvent::Failed { message: "ValueError: no".into() }]
        );
        assert_eq!(read_named("end", json!(null)), []);
        assert_eq!(read_named("custom", json!({"x": "y".repeat(10)})).len(), 1);
        assert_eq!(read_named("custom", json!({"x": "y".repeat(MAX_CUSTOM_BYTES)})), []);
        assert_eq!(read(&SseEvent { name: "messages".into(), data: "{".into(), id: None }), []);
    }
}
