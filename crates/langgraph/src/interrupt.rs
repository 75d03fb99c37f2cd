//! A run that waits for a person: what it asks, read from the shapes that LangChain's middleware and plain graphs use.

use serde_json::Value;

use crate::{
    message::{MAX_ARGUMENT_BYTES, MAX_NAME_BYTES, MAX_TEXT_BYTES, name},
    text::{clean, clean_line},
};

/// Interrupts and actions of one that are read.
const MAX_ASKED: usize = 32;

#[derive(Clone, Debug, PartialEq)]
pub struct Interrupt {
    /// By which it is answered where there are several.
    pub id: Option<String>,
    pub asks: Asks,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Asks {
    /// May these be done? (`{"action_requests": […], "review_configs": […]}`)
    Review(Vec<Action>),
    /// The same in its older shape, a list with `action_request` and `config`.
    OldReview(Vec<Action>),
    /// Anything else: a question to be answered in words.
    Words(String),
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
    /// Of a list of them, as updates and states carry it.
    pub fn read_all(value: &Value) -> Vec<Self> {
        value.as_array().into_iter().flatten().take(MAX_ASKED).map(Self::read).collect()
    }

    fn read(value: &Value) -> Self {
        let asked = value.get("value").unwrap_or(value);
        let id = name(value, "id").or_else(|| name(value, "interrupt_id"));
        Self { id, asks: Asks::read(asked) }
    }
}

impl Asks {
    fn read(value: &Value) -> Self {
        if let Some(requests) = value.get("action_requests").and_then(Value::as_array).filter(|r| !r.is_empty()) {
            let configs = value.get("review_configs").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            let actions: Option<Vec<Action>> =
                requests.iter().take(MAX_ASKED).enumerate().map(|(at, request)| read_action(request, at, configs)).collect();
            // One that was left out could not be answered for.
            if let Some(actions) = actions.filter(|_| requests.len() <= MAX_ASKED) {
                return Asks::Review(actions);
            }
        }
        let older: Option<Vec<Action>> = match value {
            Value::Array(items) if !items.is_empty() && items.len() <= MAX_ASKED => items.iter().map(read_old_action).collect(),
            Value::Object(_) => read_old_action(value).map(|action| vec![action]),
            _ => None,
        };
        older.map_or_else(|| Asks::Words(in_words(value)), Asks::OldReview)
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

fn read_old_action(value: &Value) -> Option<Action> {
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

/// Arguments too long to be shown can't be judged; what stands for them says so.
fn args_of(request: &Value) -> Value {
    let args = request.get("args").cloned().unwrap_or(Value::Null);
    let length = args.to_string().len();
    if length <= MAX_ARGUMENT_BYTES { args } else { Value::String(format!("({length} bytes of arguments, too long to show)")) }
}

fn text(value: &Value, field: &str) -> String {
    clean(value.get(field).and_then(Value::as_str).unwrap_or_default(), MAX_TEXT_BYTES)
}

/// What a graph asks in its own shape: the text in it, or all of it.
fn in_words(value: &Value) -> String {
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
    fn every_shape_that_asks_is_read() {
        let read = Interrupt::read_all(&json!([
            {"id": "i1", "value": {
                "action_requests": [{"name": "execute", "args": {"command": "rm x"}, "description": "Tool execution"}],
                "review_configs": [{"action_name": "execute", "allowed_decisions": ["approve", "reject"]}]}},
            {"value": [{"action_request": {"action": "send", "args": {}}, "config": {"allow_edit": true}, "description": ""}]},
            {"value": "how old are you?"},
            {"value": {"question": "which one?"}},
            {"value": 3},
        ]));
        let Asks::Review(actions) = &read[0].asks else { panic!("{read:?}") };
        assert_eq!((actions[0].name.as_str(), actions[0].may_edit, actions[0].may_reject), ("execute", false, true));
        assert_eq!(read[0].id.as_deref(), Some("i1"));
        assert!(matches!(&read[1].asks, Asks::OldReview(a) if a[0].may_edit && !a[0].may_reject));
        let words: Vec<_> = read[2..].iter().map(|i| &i.asks).collect();
        assert_eq!(words, [&Asks::Words("how old are you?".into()), &Asks::Words("which one?".into()), &Asks::Words("3".into())]);
    }

    #[test]
    fn an_action_that_can_not_be_read_makes_the_whole_a_question_in_words() {
        let read = Interrupt::read_all(&json!([{"value": {"action_requests": [{"name": "a", "args": {}}, {"args": {}}]}}]));
        assert!(matches!(&read[0].asks, Asks::Words(text) if text.contains("action_requests")), "{read:?}");
    }
}
