//! Reads a negotiate request in the simple shape, the full shape or that of the thread routes. Unsupported options and
//! unknown fields are refused, never ignored: they may be restrictions that a newer client relies on.

#[cfg(test)]
use cobox_protocol::schema;
use cobox_protocol::{
    ApiError,
    id::is_external_id,
    key::PrincipalKind,
    session::{Access, Mode, Scope, ScopeType},
    tags::Tags,
};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::domain::{access::ActorParams, sessions::negotiation::Negotiation, token_signer::TokenFormat};

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct NegotiationBody {
    /// The caller's own id of the thread; short for `scope` with the type `thread`.
    #[serde(default)]
    #[cfg_attr(test, schemars(schema_with = "schema::optional_external_id"))]
    thread_id: Option<String>,
    #[serde(default, deserialize_with = "strict_scope")]
    #[cfg_attr(test, schemars(with = "Option<Scope>"))]
    scope: Option<Scope>,
    /// Whether to create the session, require one, or require that there is none.
    #[serde(default)]
    #[cfg_attr(test, schemars(schema_with = "super::openapi::field_schemas::mode"))]
    mode: Option<String>,
    /// The actor: the principal itself or a less privileged kind.
    #[serde(default)]
    #[cfg_attr(test, schemars(schema_with = "super::openapi::field_schemas::actor"))]
    actor: Option<Value>,
    /// Also read as `capabilities`.
    #[serde(default, alias = "capabilities")]
    #[cfg_attr(test, schemars(schema_with = "super::openapi::field_schemas::capabilities"))]
    requested_capabilities: Option<Vec<String>>,
    /// The older name of `requested_capabilities`.
    #[serde(default)]
    #[cfg_attr(test, schemars(schema_with = "super::openapi::field_schemas::capabilities"))]
    scopes: Option<Vec<String>>,
    /// As `sandbox_hint`; also read as `preferred_sandbox_id`.
    #[serde(default, alias = "preferred_sandbox_id")]
    #[cfg_attr(test, schemars(schema_with = "super::openapi::field_schemas::sandbox"))]
    sandbox_id: Option<String>,
    /// A sandbox that exists, by id or name: a new session uses it, an existing one must already.
    #[serde(default)]
    #[cfg_attr(test, schemars(schema_with = "super::openapi::field_schemas::sandbox"))]
    sandbox_hint: Option<String>,
    access: Option<Access>,
    /// Requested lifetime of the token, in seconds.
    #[cfg_attr(test, schemars(range(min = 1)))]
    ttl: Option<u32>,
    provider_preference: Option<String>,
    #[serde(default)]
    #[cfg_attr(test, schemars(schema_with = "super::openapi::field_schemas::token_format"))]
    token_format: Option<String>,
    template: Option<String>,
    /// A new session uses the sandbox of this name, made if need be.
    #[serde(default)]
    #[cfg_attr(test, schemars(schema_with = "super::openapi::field_schemas::sandbox"))]
    name: Option<String>,
    /// A new sandbox outlives its sessions.
    keep: Option<bool>,
    /// Kept with a new session, and with a new sandbox.
    #[serde(default)]
    #[cfg_attr(test, schemars(schema_with = "super::openapi::field_schemas::tags"))]
    tags: Option<Value>,
}

impl NegotiationBody {
    /// A request that names a scope gets errors with the codes of the full shape.
    pub fn is_full_shape(&self) -> bool {
        self.scope.is_some()
    }

    pub fn read(self) -> Result<Negotiation, ApiError> {
        let mode = self.mode.as_deref().ok_or_else(|| ApiError::invalid("mode: is missing"))?;
        let (mode, scope) = (read_mode(mode)?, read_scope(self.thread_id.as_deref(), self.scope.as_ref())?);
        self.about(scope, mode)
    }

    /// Reads a request for the thread named in the path. Its session is created if necessary, unless the body sets
    /// another mode.
    pub fn read_for_thread(self, thread: &str) -> Result<Negotiation, ApiError> {
        let mode = self.mode.as_deref().map_or(Ok(Mode::Ensure), read_mode)?;
        let scope = Scope { kind: ScopeType::Thread.as_str().to_owned(), id: thread.to_owned() };
        let is_other = self.thread_id.as_deref().is_some_and(|t| t != thread) || self.scope.as_ref().is_some_and(|s| *s != scope);
        if is_other {
            return Err(ApiError::invalid("thread_id: differs from the thread in the path; leave it out"));
        }
        self.about(scope, mode)
    }

    fn about(self, scope: Scope, mode: Mode) -> Result<Negotiation, ApiError> {
        let sandbox = match (given(self.sandbox_id), given(self.sandbox_hint)) {
            (Some(id), Some(hint)) if id != hint => {
                return Err(ApiError::invalid("sandbox_hint: means the same as sandbox_id; send one of them"));
            }
            (id, hint) => id.or(hint),
        };
        Ok(Negotiation {
            requested_capabilities: self.requested_capabilities,
            scopes: self.scopes,
            actor: self.actor.as_ref().map(actor).transpose()?,
            sandbox,
            name: given(self.name),
            keep: self.keep.unwrap_or_default(),
            access: self.access,
            ttl: self.ttl,
            tags: self.tags.map_or(Ok(Tags::new()), read_tags)?,
            provider_preference: given(self.provider_preference),
            template: given(self.template),
            token_format: self.token_format.as_deref().map_or(Ok(TokenFormat::Jwt), str::parse)?,
            ..Negotiation::new(scope, mode)
        })
    }
}

/// Refuses unknown fields. [`Scope`] itself is also part of responses, where a client must accept unknown fields.
fn strict_scope<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Scope>, D::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields, rename = "Scope")]
    struct StrictScope {
        #[serde(rename = "type")]
        kind: String,
        id: String,
    }
    let scope = Option::<StrictScope>::deserialize(from)?;
    Ok(scope.map(|StrictScope { kind, id }| Scope { kind, id }))
}

/// Some clients leave out a field by sending an empty string.
fn given(field: Option<String>) -> Option<String> {
    field.filter(|s| !s.is_empty())
}

fn read_scope(thread_id: Option<&str>, scope: Option<&Scope>) -> Result<Scope, ApiError> {
    let thread = |id: &str| Scope { kind: ScopeType::Thread.as_str().to_owned(), id: id.to_owned() };
    match (thread_id, scope) {
        (_, Some(scope)) if scope.kind.parse::<ScopeType>().ok().is_none() => Err(ApiError::invalid(format!(
            "scope.type: `{}` is not known; it must be one of {}",
            cut(&scope.kind),
            ScopeType::ALL.map(|t| format!("`{}`", t.as_str())).join(", ")
        ))),
        (Some(id), Some(scope)) if *scope != thread(id) => Err(ApiError::invalid("scope: differs from thread_id; send one of them")),
        (_, Some(scope)) => Ok(scope.clone()),
        (Some(id), None) => Ok(thread(id)),
        (None, None) => Err(ApiError::invalid("thread_id: is missing; send it, or scope as {\"type\": \"thread\", \"id\": …}")),
    }
}

fn read_mode(word: &str) -> Result<Mode, ApiError> {
    match word {
        "get" | "attach_only" => Ok(Mode::Get),
        "ensure" => Ok(Mode::Ensure),
        "create_only" => Ok(Mode::CreateOnly),
        other => Err(ApiError::invalid(format!(
            "mode: `{}` is not known; it must be `get`, `attach_only`, `ensure` or `create_only`",
            cut(other)
        ))),
    }
}

/// Reads an object of strings. Some languages write an empty object as an empty list.
fn read_tags(value: Value) -> Result<Tags, ApiError> {
    match value {
        Value::Array(list) if list.is_empty() => Ok(Tags::new()),
        Value::Object(map) => map
            .into_iter()
            .map(|(key, value)| match value {
                Value::String(value) => Ok((key, value)),
                _ => Err(ApiError::invalid(format!("tags.{}: must be a string", cut(&key)))),
            })
            .collect(),
        _ => Err(ApiError::invalid("tags: must be an object of strings")),
    }
}

/// Reads a string, or `{type, id}`.
pub fn actor(value: &Value) -> Result<ActorParams, ApiError> {
    let (word, id) = match value {
        Value::String(word) => (Some(word.as_str()), None),
        Value::Object(map) => {
            if let Some(name) = map.keys().find(|name| !["type", "id"].contains(&name.as_str())) {
                return Err(ApiError::invalid(format!("actor.{}: is not a field of this request; known are `type`, `id`", cut(name))));
            }
            (map.get("type").and_then(Value::as_str), map.get("id").filter(|id| !id.is_null()))
        }
        _ => (None, None),
    };
    let word = word.ok_or_else(|| ApiError::invalid("actor: must be `human`, `agent` or `operator`, or an object with such a `type`"))?;
    let kind = word
        .parse::<PrincipalKind>()
        .ok()
        .ok_or_else(|| ApiError::invalid(format!("actor: `{}` is not known; it must be `human`, `agent` or `operator`", cut(word))))?;
    let id = match id.map(|id| id.as_str().filter(|id| is_external_id(id))) {
        Some(None) => return Err(ApiError::invalid("actor.id: must be a string of 1 to 256 characters")),
        Some(Some(id)) => Some(id.to_owned()),
        None => None,
    };
    Ok(ActorParams { kind, id })
}

/// Truncates a caller's value for an error message.
fn cut(word: &str) -> String {
    word.chars().take(64).collect()
}
