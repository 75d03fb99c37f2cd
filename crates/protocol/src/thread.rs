//! Requests and responses of the thread routes (`/threads/{thread_id}/sandbox`): the session operations in their legacy format, and
//! the service discovery for front ends.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    SandboxId, Secret, SessionId, Timestamp,
    session::{NegotiateResponse, State},
};

/// Response to `POST` and `GET /threads/{thread_id}/sandbox`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ThreadSandbox {
    pub sandbox_id: SandboxId,
    pub endpoints: Endpoints,
    pub token: Secret,
    pub expires_at: Timestamp,
    /// Legacy names of the granted capabilities.
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
    /// WebSocket URL of a terminal.
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

/// Response to `GET /capabilities?thread_id=`: the services that a front end can reach for a thread, with credentials.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Capabilities {
    pub services: BTreeMap<String, Service>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Service {
    /// Base URL without `/v1` and without a trailing slash.
    pub url: String,
    pub token: Secret,
    pub protocol: String,
    pub expires_at: Timestamp,
    pub refresh_before: Timestamp,
    pub session_id: SessionId,
}

/// Body of the signed webhook `POST /webhooks/threads`.
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

/// Response to a thread webhook: whether it ended a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "NoticeTaken"))]
pub struct ThreadNoticeResponse {
    pub ended: bool,
}
