//! Sandboxes themselves, with or without a session.

use serde::{Deserialize, Serialize};

use crate::{
    SandboxId, SessionId, Timestamp,
    session::{Access, State},
};

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateSandbox {
    /// Unique in the workspace: 1 to 63 letters, digits, `-`, `_` or `.`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SandboxInfo {
    pub id: SandboxId,
    pub name: Option<String>,
    pub provider: String,
    pub state: State,
    /// Why it failed, when it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    pub owner: String,
    pub access: Access,
    pub created_at: Timestamp,
    pub last_active_at: Timestamp,
    pub lease_expires_at: Timestamp,
    pub http_base_url: String,
    pub ws_base_url: String,
    /// The sessions that use it.
    pub sessions: Vec<SessionId>,
    /// The threads of those sessions.
    pub threads: Vec<String>,
}

/// A name people may give a sandbox: what also works as a host name's label, a little wider.
pub fn is_sandbox_name(s: &str) -> bool {
    (1..=63).contains(&s.len())
        && s.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && !s.starts_with(['.', '-'])
        && !s.starts_with("sb_")
}
