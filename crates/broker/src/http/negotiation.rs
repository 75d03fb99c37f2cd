//! Reading a negotiate request in the simple shape or the full one. What this version can't do is refused, never ignored;
//! what no version knows is ignored, so that newer clients can ask older brokers.

use cobox_protocol::{
    ApiError,
    id::is_foreign_id,
    key::PrincipalKind,
    session::{Access, Mode, NegotiateRequest, Scope},
};
use serde::Deserialize;
use serde_json::Value;

use crate::domain::{access::ActorWish, model::THREAD_SCOPE, sessions::Negotiation};

#[derive(Deserialize)]
pub struct NegotiationBody {
    thread_id: Option<String>,
    scope: Option<Scope>,
    mode: String,
    actor: Option<Value>,
    requested_capabilities: Option<Vec<String>>,
    scopes: Option<Vec<String>>,
    sandbox_id: Option<String>,
    sandbox_hint: Option<String>,
    access: Option<Access>,
    ttl: Option<u32>,
    provider_preference: Option<Value>,
    token_format: Option<Value>,
    template: Option<Value>,
    name: Option<Value>,
    keep: Option<Value>,
    tags: Option<Value>,
}

impl NegotiationBody {
    /// Whoever names a scope is answered in the words of the full shape.
    pub fn is_full_shape(&self) -> bool {
        self.scope.is_some()
    }

    pub fn read(self) -> Result<Negotiation, ApiError> {
        let choices =
            [("provider_preference", &self.provider_preference, &["auto", "local"][..]), ("token_format", &self.token_format, &["jwt"])];
        for (field, value, known) in choices {
            if value.as_ref().is_some_and(|v| !v.as_str().is_some_and(|w| known.contains(&w))) {
                return Err(unsupported(field, &format!("; use `{}` or leave it out", known[0])));
            }
        }
        for (field, value) in [("template", &self.template), ("name", &self.name), ("keep", &self.keep), ("tags", &self.tags)] {
            if value.as_ref().is_some_and(|v| !asks_for_nothing(v)) {
                return Err(unsupported(field, "; leave it out"));
            }
        }
        let sandbox = match (self.sandbox_id, self.sandbox_hint) {
            (Some(id), Some(hint)) if id != hint => {
                return Err(ApiError::invalid("sandbox_hint: is another name of sandbox_id; send one of them"));
            }
            (id, hint) => id.or(hint),
        };
        let request = NegotiateRequest {
            thread_id: thread(self.thread_id, self.scope)?,
            mode: mode(&self.mode)?,
            requested_capabilities: self.requested_capabilities,
            scopes: self.scopes,
            access: self.access,
            ttl: self.ttl,
        };
        Ok(Negotiation { request, actor: self.actor.as_ref().map(actor).transpose()?, sandbox })
    }
}

fn unsupported(field: &str, advice: &str) -> ApiError {
    ApiError::invalid(format!("{field}: is not supported by this version{advice}"))
}

/// `false`, an empty list and the like are how some clients leave a field out.
fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(s) => s.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

fn thread(thread_id: Option<String>, scope: Option<Scope>) -> Result<String, ApiError> {
    match (thread_id, scope) {
        (_, Some(scope)) if scope.kind != THREAD_SCOPE => Err(unsupported("scope.type", &format!(" unless it is `{THREAD_SCOPE}`"))),
        (Some(thread), Some(scope)) if thread != scope.id => {
            Err(ApiError::invalid("scope: names another thread than thread_id; send one of them"))
        }
        (Some(thread), _) => Ok(thread),
        (None, Some(scope)) => Ok(scope.id),
        (None, None) => Err(ApiError::invalid("thread_id: is missing; send it, or scope as {\"type\": \"thread\", \"id\": …}")),
    }
}

fn mode(word: &str) -> Result<Mode, ApiError> {
    match word {
        "get" | "attach_only" => Ok(Mode::Get),
        "ensure" => Ok(Mode::Ensure),
        "create_only" => Err(unsupported("mode", ": create_only; use `ensure`")),
        other => Err(ApiError::invalid(format!("mode: `{}` is not known; it must be `get`, `attach_only` or `ensure`", cut(other)))),
    }
}

/// A word, or `{type, id}`.
fn actor(value: &Value) -> Result<ActorWish, ApiError> {
    let (word, id) = match value {
        Value::String(word) => (Some(word.as_str()), None),
        Value::Object(map) => (map.get("type").and_then(Value::as_str), map.get("id").filter(|id| !id.is_null())),
        _ => (None, None),
    };
    let word = word.ok_or_else(|| ApiError::invalid("actor: must be `human`, `agent` or `operator`, or an object with such a `type`"))?;
    let kind = PrincipalKind::from_word(word)
        .ok_or_else(|| ApiError::invalid(format!("actor: `{}` is not known; it must be `human`, `agent` or `operator`", cut(word))))?;
    let id = match id.map(|id| id.as_str().filter(|id| is_foreign_id(id))) {
        Some(None) => return Err(ApiError::invalid("actor.id: must be a string of 1 to 256 characters")),
        Some(Some(id)) => Some(id.to_owned()),
        None => None,
    };
    Ok(ActorWish { kind, id })
}

/// As much of a caller's word as a message repeats.
fn cut(word: &str) -> String {
    word.chars().take(64).collect()
}
