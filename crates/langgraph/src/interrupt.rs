//! Interrupts, with which a run waits for a person, read in the formats of LangChain's middleware and of plain graphs.

use serde_json::Value;

use crate::{
    message::{MAX_ARGUMENT_BYTES, MAX_NAME_BYTES, MAX_TEXT_BYTES, name},
    text::{clean, clean_line},
};

/// Maximum number of interrupts, and of actions in one, that are read.
const MAX_REQUESTS: usize = 32;

#[derive(Clone, Debug, PartialEq)]
pub struct Interrupt {
    /// Names the interrupt in the answer if there are several.
    pub id: Option<String>,
    pub kind: InterruptKind,
}

#[derive(Clone, Debug, PartialEq)]
pub enum InterruptKind {
    /// Asks for approval of actions: `{"action_requests": […], "review_configs": […]}`.
    Review(Vec<Action>),
    /// The same in an older format, a list with `action_request` and `config`.
    LegacyReview(Vec<Action>),
    /// Anything else: a question that is answered with text.
    Question(String),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Action {
    pub name: String,
    pub args: Value,
    pub description: String,
    pub may_edit: bool,
    pub may_reject: bool,
    pub may_respond: bool,
}

impl Interrupt {
    /// Reads a list of interrupts from an update or a state.
    pub fn read_all(value: &Value) -> Vec<Self> {
        value.as_array().into_iter().flatten().take(MAX_REQUESTS).map(Self::read).collect()
    }

    fn read(value: &Value) -> Self {
        let asked = value.get("value").unwrap_or(value);
        let id = name(value, "id").or_else(|| name(value, "interrupt_id"));
        Self { id, kind: InterruptKind::read(asked) }
    }
}

impl InterruptKind {
    fn read(value: &Value) -> Self {
        if let Some(requests) = value.get("action_requests").and_then(Value::as_array).filter(|r| !r.is_empty()) {
            let configs = value.get("review_configs").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            let actions: Option<Vec<Action>> =
                requests.iter().take(MAX_REQUESTS).enumerate().map(|(at, request)| read_action(request, at, configs)).collect();
            // If any were left out, the answer would be incomplete.
            if let Some(actions) = actions.filter(|_| requests.len() <= MAX_REQUESTS) {
                return InterruptKind::Review(actions);
            }
        }
        let older: Option<Vec<Action>> = match value {
            Value::Array(items) if !items.is_empty() && items.len() <= MAX_REQUESTS => items.iter().map(read_legacy_action).collect(),
            Value::Object(_) => read_legacy_action(value).map(|action| vec![action]),
            _ => None,
        };
        older.map_or_else(|| InterruptKind::Question(question_text(value)), InterruptKind::LegacyReview)
    }
}

fn read_action(request: &Value, at: usize, configs: &[Value]) -> Option<Action> {
    let action = name(request, "name").or_else(|| name(request, "action"))?;
    let named = configs.iter().find(|c| name(c, "action_name").as_ref() == Some(&action));
    let allowed = named.or_else(|| configs.get(at)).and_then(|c| c.get("allowed_decisions")).and_then(Value::as_array);
    let may = |decision: &str| allowed.is_none_or(|all| all.iter().any(|d| d.as_str() == Some(decision)));
    Some(Action {
        may_edit: may("edit"),
        may_reject: may("reject"),
        may_respond: allowed.is_some() && may("respond"),
        args: args_of(request),
        description: text(request, "description"),
        name: action,
    })
}

fn read_legacy_action(value: &Value) -> Option<Action> {
    let request = value.get("action_request")?;
    let may = |what: &str| value.get("config").and_then(|c| c.get(what)).and_then(Value::as_bool).unwrap_or(false);
    Some(Action {
        name: name(request, "action")?,
        args: args_of(request),
        description: text(value, "description"),
        may_edit: may("allow_edit"),
        may_reject: may("allow_ignore"),
        may_respond: may("allow_respond"),
    })
}

/// Arguments that are too long to be shown can't be reviewed; a note replaces them.
fn args_of(request: &Value) -> Value {
    let args = request.get("args").cloned().unwrap_or(Value::Null);
    let length = args.to_string().len();
    if length <= MAX_ARGUMENT_BYTES { args } else { Value::String(format!("({length} bytes of arguments, too long to show)")) }
}

fn text(value: &Value, field: &str) -> String {
    clean(value.get(field).and_then(Value::as_str).unwrap_or_default(), MAX_TEXT_BYTES)
}

/// The question in a format of the graph's own: the text in it, or else the whole value.
fn question_text(value: &Value) -> String {
    let said = ["question", "message", "query", "prompt", "description"].iter().find_map(|f| value.get(f).and_then(Value::as_str));
    match (value.as_str().or(said), value) {
        (Some(text), _) => clean(text, MAX_TEXT_BYTES),
        (None, Value::Null) => "the run waits for an answer".to_owned(),
        (None, value) => clean_line(&value.to_string(), MAX_NAME_BYTES * 16),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_interrupt_format_is_read() {
        let read = Interrupt::read_all(&json!([
            {"id": "i1", "value": {
                "action_requests": [{"name": "execute", "args": {"command": "rm x"}, "description": "Tool execution"}],
                "review_configs": [{"action_name": "execute", "allowed_decisions": ["approve", "reject"]}]}},
            {"value": [{"action_request": {"action": "send", "args": {}}, "config": {"allow_edit": true}, "description": ""}]},
            {"value": "how old are you?"},
            {"value": {"question": "which one?"}},
            {"value": 3},
        ]));
        let InterruptKind::Review(actions) = &read[0].kind else { panic!("{read:?}") };
        assert_eq!((actions[0].name.as_str(), actions[0].may_edit, actions[0].may_reject), ("execute", false, true));
        assert_eq!(read[0].id.as_deref(), Some("i1"));
        assert!(matches!(&read[1].kind, InterruptKind::LegacyReview(a) if a[0].may_edit && !a[0].may_reject));
        let words: Vec<_> = read[2..].iter().map(|i| &i.kind).collect();
        assert_eq!(
            words,
            [
                &InterruptKind::Question("how old are you?".into()),
                &InterruptKind::Question("which one?".into()),
                &InterruptKind::Question("3".into())
            ]
        );
    }

    #[test]
    fn an_unreadable_action_turns_the_interrupt_into_a_question() {
        let read = Interrupt::read_all(&json!([{"value": {"action_requests": [{"name": "a", "args": {}}, {"args": {}}]}}]));
        assert!(matches!(&read[0].kind, InterruptKind::Question(text) if text.contains("action_requests")), "{read:?}");
    }
}
