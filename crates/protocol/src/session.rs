//! Requests and responses of session negotiation: a caller requests access to a thread's sandbox from the broker.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{CapabilitySet, SandboxId, Secret, SessionId, Timestamp, id::UnknownName, tags::Tags};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Returns an existing session, or `404`.
    Get,
    /// Returns an existing session, or creates one.
    Ensure,
    /// Creates a session, or returns `409` if one exists.
    CreateOnly,
}

/// Type of a session's scope. A bare `thread_id` means `thread`.
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

    pub const fn as_str(self) -> &'static str {
        match self {
            ScopeType::Thread => "thread",
            ScopeType::Workspace => "workspace",
            ScopeType::Assistant => "assistant",
            ScopeType::Deployment => "deployment",
        }
    }
}

impl FromStr for ScopeType {
    type Err = UnknownName;
    fn from_str(s: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|v| v.as_str() == s).ok_or_else(|| UnknownName::new(s, "scope type"))
    }
}

/// Principals that may attach to a session or a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Every principal of the workspace.
    #[default]
    Workspace,
    /// Its creator and operators.
    Owner,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NegotiateRequest {
    pub thread_id: String,
    pub mode: Mode,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_capabilities: Option<Vec<String>>,
    /// Legacy name of `requested_capabilities`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scopes: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
    /// Requested lifetime of the token in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<u32>,
    /// Id or name of an existing sandbox. A new session uses it; an existing session must already use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_hint: Option<String>,
    /// Name of the sandbox for a new session; the sandbox is created if it does not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whether a new sandbox outlives its sessions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<bool>,
    /// Tags for a new session and for a new sandbox.
    #[serde(default, skip_serializing_if = "Tags::is_empty")]
    pub tags: Tags,
    /// Template for a new sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Provider for a new sandbox; `auto` accepts any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider_preference: Option<String>,
}

impl NegotiateRequest {
    /// A request with only a thread and a mode.
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

/// Contains the simple fields and those of the binding API, so that clients of both kinds find theirs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NegotiateResponse {
    pub session_id: SessionId,
    /// Id of the scope, of any type.
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
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::external_id"))]
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

/// Lifecycle state of a session or a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum State {
    Provisioning,
    Active,
    /// Running, but unused for a while.
    Idle,
    /// Processes ended, files kept. The next use starts it again.
    Suspended,
    Terminated,
    /// It cannot be recovered; the reason is recorded with it.
    Failed,
}

impl State {
    pub const fn as_str(self) -> &'static str {
        match self {
            State::Provisioning => "provisioning",
            State::Active => "active",
            State::Idle => "idle",
            State::Suspended => "suspended",
            State::Terminated => "terminated",
            State::Failed => "failed",
        }
    }
    /// Whether the state is final.
    pub const fn is_ended(self) -> bool {
        matches!(self, State::Terminated | State::Failed)
    }
}

impl FromStr for State {
    type Err = UnknownName;
    fn from_str(s: &str) -> Result<Self, UnknownName> {
        [Self::Provisioning, Self::Active, Self::Idle, Self::Suspended, Self::Terminated, Self::Failed]
            .into_iter()
            .find(|v| v.as_str() == s)
            .ok_or_else(|| UnknownName::new(s, "state"))
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RefreshRequest {
    /// Proof of possession: if sent, it must belong to this session and this principal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_token: Option<Secret>,
    /// Id or name. If sent, the session must use this sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// Whether `current_token` is revoked shortly afterwards, instead of remaining valid until it expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotate: Option<bool>,
    /// `jwt` or `opaque`; the format of `current_token` by default.
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

/// A session in a list, without token and URLs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SessionInfo {
    pub session_id: SessionId,
    /// Id of the scope, of any type.
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

/// One page of a list.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Page<T> {
    pub items: Vec<T>,
    pub next_cursor: Option<String>,
}
