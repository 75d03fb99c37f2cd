//! Negotiating access: what a caller asks the broker for a thread, and what it gets.

use serde::{Deserialize, Serialize};

use crate::{CapabilitySet, SandboxId, Secret, SessionId, Timestamp, tags::Tags};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// An existing session or `404`.
    Get,
    /// An existing session or a new one.
    Ensure,
    /// A new session, or `409` when there is one.
    CreateOnly,
}

/// What a session can belong to; `thread` is what a bare `thread_id` means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ScopeType {
    Thread,
    Workspace,
    Assistant,
    Deployment,
}

impl ScopeType {
    pub const ALL: [ScopeType; 4] = [ScopeType::Thread, ScopeType::Workspace, ScopeType::Assistant, ScopeType::Deployment];

    pub const fn word(self) -> &'static str {
        match self {
            ScopeType::Thread => "thread",
            ScopeType::Workspace => "workspace",
            ScopeType::Assistant => "assistant",
            ScopeType::Deployment => "deployment",
        }
    }
    pub fn from_word(w: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.word() == w)
    }
}

/// Who may attach to a session or a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Every principal of the workspace.
    #[default]
    Workspace,
    /// Its maker and operators.
    Owner,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NegotiateRequest {
    pub thread_id: String,
    pub mode: Mode,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_capabilities: Option<Vec<String>>,
    /// The older name of `requested_capabilities`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scopes: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
    /// Wished life of the token in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<u32>,
    /// A sandbox that exists, by id or name: a new session uses it, an existing one must already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_hint: Option<String>,
    /// A new session uses the sandbox of this name, made if need be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// A new sandbox outlives its sessions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<bool>,
    /// Kept with a new session, and with a new sandbox.
    #[serde(default, skip_serializing_if = "Tags::is_empty")]
    pub tags: Tags,
    /// What a new sandbox is made by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// The provider of a new sandbox; `auto` is any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider_preference: Option<String>,
}

impl NegotiateRequest {
    /// The plain request: a thread, and what to do when it has no session.
    pub fn new(thread_id: impl Into<String>, mode: Mode) -> Self {
        Self {
            thread_id: thread_id.into(),
            mode,
            requested_capabilities: None,
            scopes: None,
            access: None,
            ttl: None,
            sandbox_hint: None,
            name: None,
            keep: None,
            tags: Tags::new(),
            template: None,
            provider_preference: None,
        }
    }
}

/// The simple fields and the full ones together, so that either kind of client reads what it knows.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NegotiateResponse {
    pub session_id: SessionId,
    /// The scope's id, whatever its type.
    pub thread_id: String,
    pub sandbox: SandboxAddress,
    pub token: Secret,
    pub expires_at: Timestamp,
    pub refresh_before: Timestamp,
    pub scopes: Vec<String>,
    pub binding: Binding,
    pub dataplane: Dataplane,
    pub credentials: Credentials,
    pub policy: LeasePolicy,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SandboxAddress {
    pub id: SandboxId,
    pub provider: String,
    pub http_base_url: String,
    pub ws_base_url: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Scope {
    #[serde(rename = "type")]
    #[cfg_attr(feature = "schema", schemars(with = "ScopeType"))]
    pub kind: String,
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::foreign_id"))]
    pub id: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Binding {
    pub id: SessionId,
    pub scope: Scope,
    pub sandbox_id: SandboxId,
    pub provider: String,
    pub state: State,
    pub lease_expires_at: Timestamp,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Dataplane {
    pub http_base_url: String,
    pub ws_base_url: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Credentials {
    pub token_type: String,
    pub access_token: Secret,
    pub expires_at: Timestamp,
    pub granted_capabilities: CapabilitySet,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LeasePolicy {
    pub idle_timeout_seconds: u64,
    pub hard_ttl_seconds: u64,
}

/// Where a session or a sandbox is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum State {
    Provisioning,
    Active,
    /// Nobody has used it for a while; it still runs.
    Idle,
    /// Processes ended, files kept; the next use starts it again.
    Suspended,
    Terminated,
    /// It can't be brought back; the reason is recorded beside it.
    Failed,
}

impl State {
    pub const fn word(self) -> &'static str {
        match self {
            State::Provisioning => "provisioning",
            State::Active => "active",
            State::Idle => "idle",
            State::Suspended => "suspended",
            State::Terminated => "terminated",
            State::Failed => "failed",
        }
    }
    pub fn from_word(w: &str) -> Option<Self> {
        use State::*;
        [Provisioning, Active, Idle, Suspended, Terminated, Failed].into_iter().find(|s| s.word() == w)
    }
    /// Over for good: nothing brings it back.
    pub const fn is_ended(self) -> bool {
        matches!(self, State::Terminated | State::Failed)
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RefreshRequest {
    /// Proof of possession: when sent, it must be this session's and this principal's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_token: Option<Secret>,
    /// By id or name. When sent, the session must use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// Whether `current_token` ends soon after, instead of living out its time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotate: Option<bool>,
    /// `jwt` or `opaque`; that of `current_token` unless told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_format: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RefreshResponse {
    pub token: Secret,
    pub expires_at: Timestamp,
    pub refresh_before: Timestamp,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HeartbeatResponse {
    pub lease_expires_at: Timestamp,
    pub state: State,
}

/// A session as a list shows it: no token, no URLs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SessionInfo {
    pub session_id: SessionId,
    /// The scope's id, whatever its type.
    pub thread_id: String,
    pub scope: Scope,
    pub sandbox_id: SandboxId,
    pub provider: String,
    pub state: State,
    pub owner: String,
    pub access: Access,
    pub created_at: Timestamp,
    pub last_active_at: Timestamp,
    pub lease_expires_at: Timestamp,
    #[serde(default)]
    pub tags: Tags,
}

/// One page of anything.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Page<T> {
    pub items: Vec<T>,
    pub next_cursor: Option<String>,
}
