//! The thread routes (`/threads/{thread_id}/sandbox`): the same operations in their older shapes, and what a front end asks for.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    SandboxId, Secret, SessionId, Timestamp,
    session::{NegotiateResponse, State},
};

/// What `POST` and `GET /threads/{thread_id}/sandbox` answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ThreadSandbox {
    pub sandbox_id: SandboxId,
    pub endpoints: Endpoints,
    pub token: Secret,
    pub expires_at: Timestamp,
    /// In the older spelling.
    pub scopes: Vec<String>,
    pub refresh_before: Timestamp,
    pub session_id: SessionId,
    pub thread_id: String,
    pub state: State,
    pub lease_expires_at: Timestamp,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Endpoints {
    pub http: String,
    /// A terminal, at once.
    pub ws: String,
}

impl From<NegotiateResponse> for ThreadSandbox {
    fn from(n: NegotiateResponse) -> Self {
        Self {
            sandbox_id: n.sandbox.id,
            endpoints: Endpoints { http: n.sandbox.http_base_url, ws: format!("{}/ws", n.sandbox.ws_base_url) },
            token: n.token,
            expires_at: n.expires_at,
            scopes: n.scopes,
            refresh_before: n.refresh_before,
            session_id: n.session_id,
            thread_id: n.thread_id,
            state: n.binding.state,
            lease_expires_at: n.binding.lease_expires_at,
        }
    }
}

/// `GET /capabilities?thread_id=`: what a front end can reach for a thread, and with what.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Capabilities {
    pub services: BTreeMap<String, Service>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Service {
    /// Without `/v1` and without a slash at the end.
    pub url: String,
    pub token: Secret,
    pub protocol: String,
    pub expires_at: Timestamp,
    pub refresh_before: Timestamp,
    pub session_id: SessionId,
}

/// What the signed notice to `POST /webhooks/threads` says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ThreadNotice {
    pub event: ThreadEvent,
    pub thread_id: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum ThreadEvent {
    #[serde(rename = "thread.deleted")]
    Deleted,
    #[serde(rename = "thread.archived")]
    Archived,
}

/// Whether there was a session to end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NoticeTaken {
    pub ended: bool,
}
