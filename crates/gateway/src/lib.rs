//! The one door to every dataplane: it authenticates, swaps API keys for tokens, strips credentials, and streams.
//!
//! It knows neither the store nor the providers: a [`Directory`] answers who may pass and opens the connections.

#![forbid(unsafe_code)]

mod adapted;
mod credential;
mod domain;
mod door;
mod forward;
mod frame;
mod headers;
mod slots;
mod socket;
mod too_slow;
mod unauthenticated;
mod upstream;

use std::sync::Arc;

use async_trait::async_trait;
use cobox_protocol::{ApiError, CapabilitySet, RequestId, SandboxId, Secret, SessionId};
use cobox_provider::{Adapter, BoxedStream};

pub use credential::{Credential, FileLink};
pub use domain::{Domain, InvalidDomain, Place};
pub use door::{Gateway, PATHS};
pub use slots::Limits;
pub use too_slow::TooSlow;
pub use unauthenticated::{Entered, Source, Unauthenticated};
pub use upstream::Kept;

/// What a request names in its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// `/dp/{sandbox_id}/…`
    Sandbox(SandboxId),
    /// `/v1/sandbox/relay/{session_id}/…`
    Session(SessionId),
}

/// Who was let in, for the audit record.
#[derive(Clone, Debug)]
pub struct Caller {
    pub workspace: String,
    pub principal: String,
    /// `human`, `agent` or `operator`.
    pub actor: String,
    pub session: Option<SessionId>,
    pub thread: Option<String>,
    /// The forwarded token's id: boxd's own records carry it too.
    pub jti: String,
    /// What the token allows: boxd checks that itself, an adapter has it checked here.
    pub capabilities: CapabilitySet,
}

/// Of a request that was let in, among its answer's extensions: for the log and the metrics.
#[derive(Clone, Debug)]
pub struct PassedFor {
    pub admission: Arc<Admission>,
    /// The template of the dataplane's route, where it is one.
    pub route: Option<&'static str>,
}

impl PassedFor {
    /// Whether it was let in as a principal's, rather than without a credential.
    pub fn is_known(&self) -> bool {
        self.admission.caller.is_some()
    }
}

/// The error that the gateway itself answered with, among the answer's extensions: for the log and the metrics.
#[derive(Clone, Debug)]
pub struct Refused(pub ApiError);

/// A request that may pass.
#[derive(Clone, Debug)]
pub struct Admission {
    pub sandbox: SandboxId,
    /// Whether it runs and nothing is about to change that, so that a connection from before is good.
    pub is_running: bool,
    /// Whether the same credential would be let in with the same token for as long as [`Directory::stamp`] stays as it is, and nothing
    /// has to be recorded or counted but its use.
    pub is_lasting: bool,
    /// The token boxd will see. `None` for the few requests that need none, or bring it in their first frame.
    pub token: Option<Secret>,
    /// `None` when nobody has been authenticated: such a request wakes nothing and counts as no activity.
    pub caller: Option<Caller>,
}

/// One request that passed, after its answer's head is known.
#[derive(Clone, Debug)]
pub struct Usage {
    pub admission: Arc<Admission>,
    pub request_id: RequestId,
    /// `AUTH` for a fresh token on a connection that was already there.
    pub method: String,
    /// The template of the dataplane's route, where it is one.
    pub route: Option<&'static str>,
    /// Without the query, cut to a bounded length: it is for people to read.
    pub path: String,
    /// 499 where the caller went away before there was an answer.
    pub status: u16,
}

/// How a sandbox is reached.
pub enum Reach {
    /// Its boxd, which checks for itself.
    Boxd(BoxedStream),
    /// Its provider's own API; the gateway checks in boxd's place.
    Adapter(Arc<dyn Adapter>),
}

/// A state of everything that decides who is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    pub change: u64,
    /// Tokens and revocations begin and end by themselves.
    pub second: i64,
}

/// The broker's side of the gateway.
#[async_trait]
pub trait Directory: Send + Sync + 'static {
    /// Decides whether a request may pass, and with which token. Without a credential it only says where the sandbox is.
    async fn admit(&self, target: Target, credential: Option<Credential>, request_id: &RequestId) -> Result<Admission, ApiError>;

    /// The state now, where it is known without asking anybody.
    fn stamp(&self) -> Option<Stamp>;

    /// Counts as activity of the sandbox.
    fn touch(&self, admission: &Admission);

    /// Opens a connection to the sandbox's boxd, or says who stands in for it; for an authenticated caller it starts a suspended sandbox first.
    async fn reach(&self, admission: &Admission) -> Result<Reach, ApiError>;

    /// The name of the provider that has the sandbox.
    fn provider(&self, admission: &Admission) -> &str;

    /// Asked when boxd went away under a request: an error when that is because the session or the sandbox is over.
    async fn vanished(&self, admission: &Admission) -> Result<(), ApiError>;

    /// Records a use; of nobody, nothing. May wait when records come faster than they can be written; loses none of them.
    async fn used(&self, usage: Usage);
}
