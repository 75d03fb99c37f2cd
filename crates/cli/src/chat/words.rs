//! Formats events, tool calls and questions as one line each, for a feed, a pipe or a screen reader.

use cobox_langgraph::{Action, ToolOutcome, ToolUse, clean};
use cobox_protocol::event::{EventKind, ExecEnd, FileChange, SandboxEvent};
use serde_json::Value;

use crate::printer::visible;

/// Longest line, in bytes: two lines of a wide terminal.
const MAX_LINE_BYTES: usize = 240;
/// Arguments that best describe a tool call, the most descriptive first.
const TELLING: [&str; 8] = ["command", "file_path", "path", "pattern", "query", "url", "description", "question"];

/// Formats an event: `agent wrote /workspace/leap.py (80 bytes)`.
pub fn event(event: &SandboxEvent) -> String {
    sentence(event.actor.as_deref(), event.principal.as_deref(), &event.kind)
}

/// Formats a sandbox event from the run's own stream: `{"type": "sandbox", "event": {…}}`.
pub fn custom(told: &Value) -> Option<String> {
    let event = told.get("event").filter(|_| told.get("type").and_then(Value::as_str) == Some("sandbox"))?;
    let mut event = event.as_object()?.clone();
    let text = |name: &str| event.get(name).and_then(Value::as_str).map(str::to_owned);
    let (actor, principal) = (text("actor"), text("principal"));
    // An event from an agent has fewer fields than one from the broker.
    event.entry("duration_ms").or_insert(0.into());
    event.entry("exit_code").or_insert(Value::Null);
    let what: EventKind = serde_json::from_value(Value::Object(event)).ok()?;
    Some(sentence(actor.as_deref(), principal.as_deref(), &what))
}

fn sentence(actor: Option<&str>, principal: Option<&str>, what: &EventKind) -> String {
    let who = match (actor, principal) {
        (Some("agent"), Some(principal)) if principal != "agent" => format!("agent {principal}"),
        (_, Some(principal)) => principal.to_owned(),
        (Some(actor), None) => actor.to_owned(),
        (None, None) => "the sandbox".to_owned(),
    };
    let why = |reason: &str| if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let line = match what {
        EventKind::Created { .. } => format!("{who} made the session"),
        EventKind::Active => "the sandbox runs".to_owned(),
        EventKind::Idle => "the sandbox is idle".to_owned(),
        EventKind::Suspended { reason } => format!("the sandbox was suspended{}", why(reason)),
        EventKind::Resumed => "the sandbox runs again".to_owned(),
        EventKind::Restored => format!("{who} restored the deleted sandbox"),
        EventKind::Terminated { reason } => format!("the session ended{}", why(reason)),
        EventKind::Failed { reason } => format!("the session failed{}", why(reason)),
        EventKind::Changed { change } => format!("{who} changed the sandbox{}", why(change)),
        EventKind::Shared { with, .. } => format!("{who} let {with} in"),
        EventKind::Unshared { with } => format!("{who} no longer lets {with} in"),
        EventKind::Connected => format!("{who} connected"),
        EventKind::FileWritten(file) => format!("{who} wrote {}", of_file(file)),
        EventKind::FileRemoved(file) => format!("{who} removed {}", of_file(file)),
        EventKind::Exec(end) => format!("{who} ran {} → {}", end.command, of_end(end)),
        EventKind::Gap { .. } => "(events are missing here)".to_owned(),
        EventKind::Unknown => "(something new happened)".to_owned(),
    };
    one_line(&line)
}

/// Whether the event reports a failure.
pub fn is_bad(event: &SandboxEvent) -> bool {
    match &event.kind {
        EventKind::Exec(end) => end.exit_code != Some(0),
        EventKind::Failed { .. } | EventKind::Gap { .. } => true,
        _ => false,
    }
}

/// Formats a tool call: `execute cd /workspace && python3 test_leap.py`.
pub fn call(name: &str, args: &str) -> String {
    let about = match serde_json::from_str::<Value>(args) {
        Ok(Value::Object(fields)) if fields.is_empty() => String::new(),
        Ok(Value::Object(fields)) => {
            let telling = TELLING.iter().find_map(|name| fields.get(*name)).and_then(Value::as_str);
            telling.map_or_else(|| args.to_owned(), str::to_owned)
        }
        _ => args.to_owned(),
    };
    one_line(format!("{name} {about}").trim_end())
}

/// Whether a tool failed: by its error flag, or by the exit code that deepagents writes below a command's output.
pub fn has_failed(outcome: &ToolOutcome) -> bool {
    outcome.is_error || outcome.text.trim_end().lines().next_back().is_some_and(|last| last.starts_with("[Command failed with exit code"))
}

/// Summarizes a tool's outcome: its first line and the number of further lines.
pub fn outcome(tool: &ToolUse) -> String {
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
pub fn question(action: &Action) -> String {
    // Control characters are escaped, not dropped: the user must see exactly what they approve.
    let about = clean(&visible(&action.args.to_string()), MAX_LINE_BYTES * 8);
    format!("may the agent use {}? {about}", action.name)
}

/// The answers that the action allows.
pub fn choices(action: &Action) -> String {
    let mut words = vec!["yes"];
    words.extend(action.may_reject.then_some("no [why]"));
    words.extend(action.may_edit.then_some("edit {arguments as JSON}"));
    words.extend(action.may_respond.then_some("say [instead]"));
    words.join(", ")
}

pub fn one_line(text: &str) -> String {
    clean(text, MAX_LINE_BYTES).replace(['\n', '\t'], " ")
}

fn of_file(file: &FileChange) -> String {
    match (file.size, file.entries) {
        (Some(1), _) => format!("{} (1 byte)", file.path),
        (Some(size), _) => format!("{} ({size} bytes)", file.path),
        (None, Some(entries)) => format!("{} ({entries} entries)", file.path),
        (None, None) => file.path.clone(),
    }
}

fn of_end(end: &ExecEnd) -> String {
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
    fn an_event_is_a_sentence_and_can_not_repaint_the_screen() {
        let told = |what: EventKind| {
            event(&SandboxEvent {
                id: cobox_protocol::EventId::numbered(Timestamp::from_unix(0), 7),
                at: Timestamp::from_unix(0),
                session_id: cobox_protocol::SessionId::new(),
                sandbox_id: cobox_protocol::SandboxId::new(),
                principal: Some("bot".into()),
                actor: Some("agent".into()),
                source: cobox_protocol::event::EventSource::Sandbox,
                kind: what,
            })
        };
        let file = FileChange { path: "/workspace/a\u{1b}[2J.py".into(), size: Some(12), ..FileChange::default() };
        assert_eq!(told(EventKind::FileWritten(file)), "agent bot wrote /workspace/a.py (12 bytes)");
        let end = ExecEnd { command: "make\ntest".into(), exit_code: Some(2), ..ExecEnd::default() };
        assert_eq!(told(EventKind::Exec(end)), "agent bot ran make test → exit 2");
        assert_eq!(told(EventKind::Connected), "agent bot connected");
        let told = serde_json::json!({"type": "sandbox", "event": {"type": "exec", "command": "ls", "exit_code": 0, "actor": "agent"}});
        assert_eq!(custom(&told).as_deref(), Some("agent ran ls → exit 0"));
        assert_eq!(custom(&serde_json::json!({"type": "progress"})), None);
    }

    #[test]
    fn a_call_is_told_by_its_most_telling_argument() {
        assert_eq!(call("execute", r#"{"timeout": 3, "command": "ls -la"}"#), "execute ls -la");
        assert_eq!(call("write_file", r#"{"content": "x", "file_path": "/a"}"#), "write_file /a");
        assert_eq!(call("add", r#"{"a":1}"#), r#"add {"a":1}"#);
        assert_eq!((call("ls", "{}"), call("ls", "{\"pa")), ("ls".to_owned(), "ls {\"pa".to_owned()));
    }

    #[test]
    fn an_outcome_is_its_first_line_and_how_many_follow() {
        let of = |text: &str| {
            outcome(&ToolUse {
                name: String::new(),
                args: String::new(),
                outcome: Some(ToolOutcome { text: text.into(), is_error: false }),
                is_nested: false,
            })
        };
        assert_eq!((of("one"), of("\none\ntwo\nthree\n"), of("")), ("one".into(), "one (+2 lines)".into(), "(nothing)".into()));
        let failed = |text: &str| has_failed(&ToolOutcome { text: text.into(), is_error: false });
        assert!(failed("boom\n\n[Command failed with exit code 1]") && !failed("fine\n[Command succeeded with exit code 0]"));
    }
}
