//! HTTP and WebSocket gateway to every sandbox's dataplane: authenticates requests, exchanges API keys for tokens, strips
//! credentials and streams bodies.
//!
//! It has no access to the store and starts no sandbox. A [`Directory`], which the broker implements, decides whether a request is
//! admitted and opens the connection. From `cobox-provider` it uses the connection type ([`BoxedStream`]) and the interface of a
//! provider that runs no boxd ([`Adapter`]), never a provider itself.

#![forbid(unsafe_code)]

mod adapter_dataplane;
mod connection_cache;
mod credential;
mod forward;
mod headers;
mod host_routing;
mod request_limiter;
mod service;
mod slow_body;
mod unauthenticated;
mod upstream;
mod websocket_frame;
mod websocket_relay;

use std::sync::Arc;

use async_trait::async_trait;
use cobox_protocol::{ApiError, CapabilitySet, RequestId, SandboxId, Secret, SessionId};
use cobox_provider::{Adapter, BoxedStream};

pub use connection_cache::ConnectionCache;
pub use credential::{Credential, FileLink};
pub use host_routing::{Domain, HostTarget, InvalidDomain};
pub use request_limiter::Limits;
pub use service::{Gateway, PATHS};
pub use slow_body::TooSlow;
pub use unauthenticated::{ClientAddress, UnauthenticatedConnection, UnauthenticatedConnections};

/// What a request's path or host name refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// `/dp/{sandbox_id}/…`
    Sandbox(SandboxId),
    /// `/v1/sandbox/relay/{session_id}/…`
    Session(SessionId),
}

/// The authenticated principal of an admitted request, for the audit record.
#[derive(Clone, Debug)]
pub struct Caller {
    pub workspace: String,
    pub principal: String,
    /// `human`, `agent` or `operator`.
    pub actor: String,
    pub session: Option<SessionId>,
    pub thread: Option<String>,
    /// The ID of the forwarded token. boxd's own records carry it too.
    pub jti: String,
    /// The token's capabilities. boxd checks them itself; for an adapter the gateway checks them.
    pub capabilities: CapabilitySet,
}

/// The admission behind a response, stored in the response's extensions for the log and the metrics.
#[derive(Clone, Debug)]
pub struct AdmittedRequest {
    pub admission: Arc<Admission>,
    /// The template of the dataplane route, or `None` for an unknown path.
    pub route: Option<&'static str>,
}

impl AdmittedRequest {
    /// Whether the request was admitted for a principal rather than without a credential.
    pub fn is_authenticated(&self) -> bool {
        self.admission.caller.is_some()
    }
}

/// The error that the gateway itself responded with, stored in the response's extensions for the log and the metrics.
#[derive(Clone, Debug)]
pub struct Rejection(pub ApiError);

/// The decision to forward a request.
#[derive(Clone, Debug)]
pub struct Admission {
    pub sandbox: SandboxId,
    /// Whether the sandbox runs and no state change is pending, so that an existing connection can be reused.
    pub is_running: bool,
    /// Whether the same credential would be admitted with the same token while [`Directory::version`] is unchanged, and nothing but
    /// the usage has to be recorded or counted.
    pub is_cacheable: bool,
    /// The token forwarded to boxd. `None` for the few requests that need none, or send it in their first frame.
    pub token: Option<Secret>,
    /// `None` for an unauthenticated request: it starts no suspended sandbox and doesn't count as activity.
    pub caller: Option<Caller>,
}

/// One forwarded request, recorded when the head of its response is known.
#[derive(Clone, Debug)]
pub struct Usage {
    pub admission: Arc<Admission>,
    pub request_id: RequestId,
    /// `AUTH` for a fresh token on an open connection.
    pub method: String,
    /// The template of the dataplane route, or `None` for an unknown path.
    pub route: Option<&'static str>,
    /// Without the query and truncated to a bounded length: it is for display only.
    pub path: String,
    /// 499 when the caller disconnected before the response.
    pub status: u16,
}

/// The connection that serves a sandbox's requests.
pub enum SandboxConnection {
    /// A stream to its boxd, which checks tokens itself.
    Boxd(BoxedStream),
    /// The provider's own API; the gateway checks tokens instead of boxd.
    Adapter(Arc<dyn Adapter>),
}

/// A version of all state that admission decisions depend on. Equal versions give equal decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryVersion {
    /// Counts changes of the store.
    pub change: u64,
    /// Unix time in seconds: tokens and revocations start and expire without a change of the store.
    pub second: i64,
}

/// The broker's side of the gateway.
#[async_trait]
pub trait Directory: Send + Sync + 'static {
    /// Decides whether a request is admitted, and with which token. Without a credential it only locates the sandbox.
    async fn admit(&self, target: Target, credential: Option<Credential>, request_id: &RequestId) -> Result<Admission, ApiError>;

    /// The current version, or `None` where it isn't known without a query.
    fn version(&self) -> Option<DirectoryVersion>;

    /// Records activity of the sandbox, which renews its lease.
    fn touch(&self, admission: &Admission);

    /// Opens a connection to the sandbox's boxd, or returns the adapter that replaces it. For an authenticated caller it first starts
    /// a suspended sandbox.
    async fn connect(&self, admission: &Admission) -> Result<SandboxConnection, ApiError>;

    /// The name of the sandbox's provider.
    fn provider_name(&self, admission: &Admission) -> &str;

    /// Called when boxd closed the connection during a request: returns an error if the session or the sandbox has ended.
    async fn check_not_ended(&self, admission: &Admission) -> Result<(), ApiError>;

    /// Records the use of a sandbox by an authenticated caller; ignores unauthenticated ones. Waits when records arrive faster than
    /// they can be written; drops none.
    async fn record_usage(&self, usage: Usage);
}
