//! Formats events, tool calls and questions as one line each, for a feed, a pipe or a screen reader.

use cobox_langgraph::{Action, ToolOutcome, ToolUse, clean};
use cobox_protocol::event::{EventKind, ExecEnd, FileChange, SandboxEvent};
use serde_json::Value;

use crate::printer::visible;

/// Longest line, in bytes: two lines of a wide terminal.
const MAX_LINE_BYTES: usize = 240;
/// Arguments that best describe a tool call, the most descriptive first.
const DESCRIPTIVE_ARGUMENTS: [&str; 8] = ["command", "file_path", "path", "pattern", "query", "url", "description", "question"];

/// Formats an event: `agent wrote /workspace/leap.py (80 bytes)`.
pub fn format_event(event: &SandboxEvent) -> String {
    format_sentence(event.actor.as_deref(), event.principal.as_deref(), &event.kind)
}

/// Formats a sandbox event from the run's own stream: `{"type": "sandbox", "event": {…}}`.
pub fn format_custom_event(data: &Value) -> Option<String> {
    let event = data.get("event").filter(|_| data.get("type").and_then(Value::as_str) == Some("sandbox"))?;
    let mut event = event.as_object()?.clone();
    let text = |name: &str| event.get(name).and_then(Value::as_str).map(str::to_owned);
    let (actor, principal) = (text("actor"), text("principal"));
    // An event from an agent has fewer fields than one from the broker.
    event.entry("duration_ms").or_insert(0.into());
    event.entry("exit_code").or_insert(Value::Null);
    let kind: EventKind = serde_json::from_value(Value::Object(event)).ok()?;
    Some(format_sentence(actor.as_deref(), principal.as_deref(), &kind))
}

fn format_sentence(actor: Option<&str>, principal: Option<&str>, kind: &EventKind) -> String {
    let actor_name = match (actor, principal) {
        (Some("agent"), Some(principal)) if principal != "agent" => format!("agent {principal}"),
        (_, Some(principal)) => principal.to_owned(),
        (Some(actor), None) => actor.to_owned(),
        (None, None) => "the sandbox".to_owned(),
    };
    let reason_suffix = |reason: &str| if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let line = match kind {
        EventKind::Created { .. } => format!("{actor_name} created the session"),
        EventKind::Active => "the sandbox is running".to_owned(),
        EventKind::Idle => "the sandbox is idle".to_owned(),
        EventKind::Suspended { reason } => format!("the sandbox was suspended{}", reason_suffix(reason)),
        EventKind::Resumed => "the sandbox was resumed".to_owned(),
        EventKind::Restored => format!("{actor_name} restored the deleted sandbox"),
        EventKind::Terminated { reason } => format!("the session ended{}", reason_suffix(reason)),
        EventKind::Failed { reason } => format!("the session failed{}", reason_suffix(reason)),
        EventKind::Changed { change } => format!("{actor_name} changed the sandbox{}", reason_suffix(change)),
        EventKind::Shared { with, .. } => format!("{actor_name} shared the session with {with}"),
        EventKind::Unshared { with } => format!("{actor_name} revoked the share of {with}"),
        EventKind::Connected => format!("{actor_name} connected"),
        EventKind::FileWritten(file) => format!("{actor_name} wrote {}", describe_file(file)),
        EventKind::FileRemoved(file) => format!("{actor_name} removed {}", describe_file(file)),
        EventKind::Exec(end) => format!("{actor_name} ran {} → {}", end.command, describe_exit(end)),
        EventKind::Gap { .. } => "(some events are missing)".to_owned(),
        EventKind::Unknown => "(unknown event)".to_owned(),
    };
    one_line(&line)
}

/// Whether the event reports a failure.
pub fn is_failure(event: &SandboxEvent) -> bool {
    match &event.kind {
        EventKind::Exec(end) => end.exit_code != Some(0),
        EventKind::Failed { .. } | EventKind::Gap { .. } => true,
        _ => false,
    }
}

/// Formats a tool call: `execute cd /workspace && python3 test_leap.py`.
pub fn format_tool_call(name: &str, args: &str) -> String {
    let description = match serde_json::from_str::<Value>(args) {
        Ok(Value::Object(fields)) if fields.is_empty() => String::new(),
        Ok(Value::Object(fields)) => {
            let descriptive = DESCRIPTIVE_ARGUMENTS.iter().find_map(|name| fields.get(*name)).and_then(Value::as_str);
            descriptive.map_or_else(|| args.to_owned(), str::to_owned)
        }
        _ => args.to_owned(),
    };
    one_line(format!("{name} {description}").trim_end())
}

/// Whether a tool failed: by its error flag, or by the exit code that deepagents writes below a command's output.
pub fn has_failed(outcome: &ToolOutcome) -> bool {
    outcome.is_error || outcome.text.trim_end().lines().next_back().is_some_and(|last| last.starts_with("[Command failed with exit code"))
}

/// Summarizes a tool's outcome: its first line and the number of further lines.
pub fn format_tool_outcome(tool: &ToolUse) -> String {
    let Some(outcome) = &tool.outcome else { return "…".to_owned() };
    let mut lines = outcome.text.lines().filter(|line| !line.trim().is_empty());
    let first = lines.next().unwrap_or("(nothing)");
    match lines.count() {
        0 => one_line(first),
        1 => format!("{} (+1 line)", one_line(first)),
        more => format!("{} (+{more} lines)", one_line(first)),
    }
}

/// Formats a question: `May the agent use execute? {"command": "rm x"}`.
pub fn format_question(action: &Action) -> String {
    // Control characters are escaped, not dropped: the user must see exactly what they approve.
    let description = clean(&visible(&action.args.to_string()), MAX_LINE_BYTES * 8);
    format!("allow the agent to use {}? {description}", action.name)
}

/// The answers that the action allows.
pub fn format_choices(action: &Action) -> String {
    let mut answers = vec!["yes"];
    answers.extend(action.may_reject.then_some("no [reason]"));
    answers.extend(action.may_edit.then_some("edit {arguments as JSON}"));
    answers.extend(action.may_respond.then_some("say [text]"));
    answers.join(", ")
}

pub fn one_line(text: &str) -> String {
    clean(text, MAX_LINE_BYTES).replace(['\n', '\t'], " ")
}

fn describe_file(file: &FileChange) -> String {
    match (file.size, file.entries) {
        (Some(1), _) => format!("{} (1 byte)", file.path),
        (Some(size), _) => format!("{} ({size} bytes)", file.path),
        (None, Some(entries)) => format!("{} ({entries} entries)", file.path),
        (None, None) => file.path.clone(),
    }
}

fn describe_exit(end: &ExecEnd) -> String {
    match (end.exit_code, end.timed_out) {
        (_, true) => "timed out".to_owned(),
        (Some(code), false) => format!("exit {code}"),
        (None, false) => "no exit code".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use cobox_protocol::Timestamp;

    use super::*;

    #[test]
    fn an_event_is_a_sentence_and_cannot_repaint_the_screen() {
        let format_kind = |kind: EventKind| {
            format_event(&SandboxEvent {
                id: cobox_protocol::EventId::numbered(Timestamp::from_unix(0), 7),
                at: Timestamp::from_unix(0),
                session_id: cobox_protocol::SessionId::new(),
                sandbox_id: cobox_protocol::SandboxId::new(),
                principal: Some("bot".into()),
                actor: Some("agent".into()),
                source: cobox_protocol::event::EventSource::Sandbox,
                kind,
            })
        };
        let file = FileChange { path: "/workspace/a\u{1b}[2J.py".into(), size: Some(12), ..FileChange::default() };
        assert_eq!(format_kind(EventKind::FileWritten(file)), "agent bot wrote /workspace/a.py (12 bytes)");
        let end = ExecEnd { command: "make\ntest".into(), exit_code: Some(2), ..ExecEnd::default() };
        assert_eq!(format_kind(EventKind::Exec(end)), "agent bot ran make test → exit 2");
        assert_eq!(format_kind(EventKind::Connected), "agent bot connected");
        let data = serde_json::json!({"type": "sandbox", "event": {"type": "exec", "command": "ls", "exit_code": 0, "actor": "agent"}});
        assert_eq!(format_custom_event(&data).as_deref(), Some("agent ran ls → exit 0"));
        assert_eq!(format_custom_event(&serde_json::json!({"type": "progress"})), None);
    }

    #[test]
    fn a_tool_call_shows_its_most_descriptive_argument() {
        assert_eq!(format_tool_call("execute", r#"{"timeout": 3, "command": "ls -la"}"#), "execute ls -la");
        assert_eq!(format_tool_call("write_file", r#"{"content": "x", "file_path": "/a"}"#), "write_file /a");
        assert_eq!(format_tool_call("add", r#"{"a":1}"#), r#"add {"a":1}"#);
        assert_eq!((format_tool_call("ls", "{}"), format_tool_call("ls", "{\"pa")), ("ls".to_owned(), "ls {\"pa".to_owned()));
    }

    #[test]
    fn an_outcome_shows_its_first_line_and_the_number_of_others() {
        let format_text = |text: &str| {
            format_tool_outcome(&ToolUse {
                name: String::new(),
                args: String::new(),
                outcome: Some(ToolOutcome { text: text.into(), is_error: false }),
                is_nested: false,
            })
        };
        assert_eq!(
            (format_text("one"), format_text("\none\ntwo\nthree\n"), format_text("")),
            ("one".into(), "one (+2 lines)".into(), "(nothing)".into())
        );
        let failed = |text: &str| has_failed(&ToolOutcome { text: text.into(), is_error: false });
        assert!(failed("boom\n\n[Command failed with exit code 1]") && !failed("fine\n[Command succeeded with exit code 0]"));
    }
}
