//! The broker's core records (principals, keys, sandboxes, sessions, events and audit records), named as in the protocol.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    CapabilitySet, KeyId, PoolId, RequestId, SandboxId, Secret, SessionId, ShareId, Timestamp,
    audit::AuditEntry,
    event::{EventKind, EventSource},
    key::PrincipalKind,
    session::{Access, Scope, ScopeType, State},
};
use cobox_provider::SandboxSpec;
use cobox_token::Actor;
use parking_lot::Mutex;

use crate::policy::Subject;

/// The identity of a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    pub workspace: String,
    /// Unique in its workspace.
    pub name: String,
    pub kind: PrincipalKind,
}

impl Principal {
    pub fn is_operator(&self) -> bool {
        self.kind == PrincipalKind::Operator
    }
}

#[derive(Clone, Debug)]
pub struct ApiKey {
    pub id: KeyId,
    pub principal: Principal,
    /// SHA-256 of the key as it was issued.
    pub hash: [u8; 32],
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
    pub last_used_at: Option<Timestamp>,
    pub revoked_at: Option<Timestamp>,
    /// Set when the key represents a user of an OIDC issuer; such a key has no secret.
    pub identity: Option<Identity>,
}

/// A user as identified by an OIDC issuer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub issuer: String,
    pub subject: String,
}

/// What is stored about a principal.
#[derive(Clone, Debug)]
pub struct PrincipalRecord {
    pub principal: Principal,
    pub created_at: Timestamp,
    pub valid_keys: u64,
    pub last_used_at: Option<Timestamp>,
    pub disabled_at: Option<Timestamp>,
    pub disabled_by: Option<String>,
}

/// A principal that has presented a valid key.
#[derive(Clone, Debug)]
pub struct Caller {
    pub principal: Principal,
    /// Tokens are issued under this key and end with it.
    pub key: KeyId,
    /// The actor: the principal itself, unless it requested a lower kind.
    pub actor: Actor,
    /// Expiry of the presented credential: no token issued under it lives longer.
    pub until: Option<Timestamp>,
    /// The caller's credential for the external thread authority, if it sent one.
    pub thread_credential: Option<Secret>,
    pub prefetched_session: PrefetchedSession,
}

impl Caller {
    pub fn new(principal: Principal, key: KeyId) -> Self {
        let actor = Actor { kind: principal.kind, id: principal.name.clone() };
        Self { principal, key, actor, until: None, thread_credential: None, prefetched_session: PrefetchedSession::default() }
    }

    /// The caller as the policy sees it.
    pub fn subject(&self) -> Subject<'_> {
        let Principal { workspace, name, kind } = &self.principal;
        Subject { workspace, principal: name, kind: *kind, acting: self.actor.kind }
    }
}

/// Prefetched session: the session that a request names, read together with the caller's key in one database query
/// instead of two. Valid for one use, so that later reads see the current state.
#[derive(Clone, Debug, Default)]
pub struct PrefetchedSession(Arc<Mutex<Option<SessionWithSandbox>>>);

impl PrefetchedSession {
    pub fn new(bound: Option<SessionWithSandbox>) -> Self {
        Self(Arc::new(Mutex::new(bound)))
    }

    pub fn take(&self, is_it: impl FnOnce(&Session) -> bool) -> Option<SessionWithSandbox> {
        self.0.lock().take_if(|bound| is_it(&bound.session))
    }
}

/// End reason of a session that reached its hard end. Stored with the session: its scope's next session gets the same
/// sandbox.
pub const HARD_END: &str = "its hard end was reached";
/// End reason of a session whose deleted sandbox was restored. Stored with the session: its scope's next session gets the
/// same sandbox.
pub const SANDBOX_RESTORED: &str = "its sandbox was deleted, and restored later";
/// How often running time is added to the rows of a node's sandboxes, and the node's own time to the retention of what it
/// keeps.
pub const COUNT_RUNNING_EVERY: Duration = Duration::from_secs(30);
/// Maximum running time counted between two such writes. A longer gap means that the machine slept, its clock was set, or
/// no broker ran, and none of these counts towards a hard end or a retention time. Twice the interval, so that a slow
/// round loses nothing.
pub const MAX_COUNTED_GAP: Duration = Duration::from_secs(60);

/// How long a replay of a request is recognized.
pub const IDEMPOTENCY_KEEP: Duration = Duration::from_secs(24 * 3600);

/// The operation that is about to be requested from the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    Create,
    Resume,
    Suspend,
    Destroy,
}

impl Intent {
    pub const fn as_str(self) -> &'static str {
        match self {
            Intent::Create => "create",
            Intent::Resume => "resume",
            Intent::Suspend => "suspend",
            Intent::Destroy => "destroy",
        }
    }
    pub fn parse(w: &str) -> Option<Self> {
        [Intent::Create, Intent::Resume, Intent::Suspend, Intent::Destroy].into_iter().find(|i| i.as_str() == w)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sandbox {
    pub id: SandboxId,
    pub workspace: String,
    pub name: Option<String>,
    pub owner: String,
    /// The kind of the owner, which decides the sandbox's lifetimes.
    pub owner_kind: PrincipalKind,
    pub access: Access,
    pub provider: String,
    pub node: String,
    /// Generation of its token key.
    pub generation: u32,
    /// Older generations whose tokens are still valid, after a graceful rotation.
    pub old_keys: Option<OldKeys>,
    /// Generations below this one were derived from the previous master key.
    pub master_from: u32,
    pub state: State,
    pub intent: Option<Intent>,
    /// Why it is suspended or failed.
    pub reason: Option<String>,
    pub is_kept: bool,
    /// Its own lease and its own retention while suspended, where they are shorter than the default.
    pub own_lease: Option<Duration>,
    pub own_keep: Option<Duration>,
    pub created_at: Timestamp,
    pub last_active_at: Timestamp,
    /// Set while it runs: `active` includes its running time up to then.
    pub counted_until: Option<Timestamp>,
    /// Running time so far.
    pub active: Duration,
    pub suspended_at: Option<Timestamp>,
    /// Time since it was suspended in which no broker ran on its node. Doesn't count towards its retention.
    pub downtime: Duration,
    pub ended_at: Option<Timestamp>,
    /// Set while it is deleted and its files are kept: it can be restored until then.
    pub restore_until: Option<Timestamp>,
    /// Resolved when it was created; each start uses the same spec.
    pub spec: SandboxSpec,
    /// The template it was created from, under the name of that time.
    pub template: Option<String>,
    /// Set while it waits in a pool: it has no user and no lease yet.
    pub pool: Option<PoolId>,
}

/// Older key generations that are being phased out: valid from this generation on, until this time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OldKeys {
    pub from: u32,
    pub until: Timestamp,
}

impl Sandbox {
    /// The oldest generation whose tokens are valid.
    pub fn keys_from(&self, now: Timestamp) -> u32 {
        self.old_keys.filter(|old| now < old.until).map_or(self.generation, |old| old.from.min(self.generation))
    }

    pub fn is_running(&self) -> bool {
        matches!(self.state, State::Active | State::Idle)
    }

    /// Whether it stays when its last session ends.
    pub fn outlives_sessions(&self) -> bool {
        self.name.is_some() || self.is_kept
    }

    /// Total running time, which the hard end limits.
    pub fn active_until(&self, now: Timestamp) -> Duration {
        self.active + self.counted_until.map_or(Duration::ZERO, |counted| now.saturating_since(counted).min(MAX_COUNTED_GAP))
    }

    /// How long it has been suspended, without time in which no broker ran on its node.
    pub fn kept_for(&self, now: Timestamp) -> Duration {
        now.saturating_since(self.suspended_at.unwrap_or(self.last_active_at)).saturating_sub(self.downtime)
    }

    pub fn with_intent(&self, intent: Intent) -> Self {
        Self { intent: Some(intent), ..self.clone() }
    }

    pub fn started(&self, now: Timestamp) -> Self {
        Self { state: State::Active, intent: None, reason: None, counted_until: Some(now), suspended_at: None, ..self.clone() }
    }

    pub fn suspended(&self, now: Timestamp, reason: &str) -> Self {
        Self {
            state: State::Suspended,
            intent: None,
            reason: Some(reason.to_owned()),
            active: self.active_until(now),
            counted_until: None,
            suspended_at: Some(now),
            ..self.clone()
        }
    }
}

/// "This scope uses this sandbox." A session that has not ended always refers to a sandbox that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    pub id: SessionId,
    pub workspace: String,
    pub scope_type: String,
    pub scope_id: String,
    pub sandbox: SandboxId,
    pub owner: String,
    pub access: Access,
    pub created_at: Timestamp,
    /// The sandbox's running time when the session began.
    pub active_base: Duration,
    pub ended_at: Option<Timestamp>,
    pub end_reason: Option<String>,
}

impl Session {
    pub fn scope(&self) -> Scope {
        Scope { kind: self.scope_type.clone(), id: self.scope_id.clone() }
    }

    /// The thread it belongs to, if its scope is a thread.
    pub fn thread(&self) -> Option<&str> {
        (self.scope_type == ScopeType::Thread.as_str()).then_some(self.scope_id.as_str())
    }
}

/// Grants another principal access to a session, limited to the given capabilities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Tokens issued through the share end with it.
    pub id: ShareId,
    pub workspace: String,
    pub session: SessionId,
    pub principal: String,
    pub capabilities: CapabilitySet,
    pub shared_by: String,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
}

impl Share {
    pub fn is_over(&self, now: Timestamp) -> bool {
        self.expires_at.is_some_and(|at| at <= now)
    }

    /// Whether this share grants everything that the other one does.
    pub fn includes(&self, other: &Share) -> bool {
        let lasts = match (self.expires_at, other.expires_at) {
            (None, _) => true,
            (Some(mine), Some(others)) => mine >= others,
            (Some(_), None) => false,
        };
        lasts && other.capabilities.is_subset(self.capabilities)
    }
}

/// A session with the sandbox it uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionWithSandbox {
    pub session: Session,
    pub sandbox: Sandbox,
}

impl SessionWithSandbox {
    /// The session has its sandbox's state until it ends. If it ended because the sandbox failed, its state is failed.
    pub fn state(&self) -> State {
        match self.session.ended_at {
            None => self.sandbox.state,
            Some(_) if self.sandbox.state == State::Failed && self.sandbox.ended_at == self.session.ended_at => State::Failed,
            Some(_) => State::Terminated,
        }
    }

    /// Time until the session's hard end.
    pub fn left(&self, hard_ttl: Duration, now: Timestamp) -> Duration {
        hard_ttl.saturating_sub(self.sandbox.active_until(now).saturating_sub(self.session.active_base))
    }
}

/// One recorded event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub at: Timestamp,
    pub workspace: String,
    pub sandbox: SandboxId,
    /// `None` if it is about the sandbox, and so about every session on it.
    pub session: Option<SessionId>,
    pub principal: Option<String>,
    pub actor: Option<String>,
    pub source: EventSource,
    pub what: EventKind,
}

impl Event {
    pub fn of_sandbox(at: Timestamp, sandbox: &Sandbox, what: EventKind) -> Self {
        let (workspace, sandbox) = (sandbox.workspace.clone(), sandbox.id.clone());
        Self { at, workspace, sandbox, session: None, principal: None, actor: None, source: EventSource::Broker, what }
    }

    pub fn of_session(at: Timestamp, session: &Session, what: EventKind) -> Self {
        let (workspace, sandbox) = (session.workspace.clone(), session.sandbox.clone());
        Self { at, workspace, sandbox, session: Some(session.id.clone()), principal: None, actor: None, source: EventSource::Broker, what }
    }

    /// Takes the originator from the audit record.
    pub fn by(mut self, audit: &AuditRecord) -> Self {
        self.principal = audit.principal.clone();
        self.actor = audit.actor.clone();
        self
    }
}

/// Append-only record with the protocol's fields and one line of detail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditRecord {
    pub at: Timestamp,
    pub workspace: String,
    /// `session.created`, `token.issued`, `dataplane.used`, …
    pub action: std::borrow::Cow<'static, str>,
    pub request_id: Option<RequestId>,
    pub principal: Option<String>,
    pub actor: Option<String>,
    pub thread: Option<String>,
    pub session: Option<SessionId>,
    pub sandbox: Option<SandboxId>,
    pub jti: Option<String>,
    pub detail: Option<String>,
}

impl AuditRecord {
    pub fn new(at: Timestamp, workspace: &str, action: &'static str) -> Self {
        Self {
            at,
            workspace: workspace.to_owned(),
            action: action.into(),
            request_id: None,
            principal: None,
            actor: None,
            thread: None,
            session: None,
            sandbox: None,
            jti: None,
            detail: None,
        }
    }
    /// Record about a sandbox, made by the broker itself.
    pub fn of_sandbox(at: Timestamp, sandbox: &Sandbox, action: &'static str, detail: &str) -> Self {
        Self { sandbox: Some(sandbox.id.clone()), detail: Some(detail.to_owned()), ..Self::new(at, &sandbox.workspace, action) }
    }
    pub fn by(mut self, caller: &Caller, request_id: &RequestId) -> Self {
        self.principal = Some(caller.principal.name.clone());
        self.actor = Some(caller.actor.kind.as_str().to_owned());
        self.request_id = Some(request_id.clone());
        self
    }
    pub fn about(mut self, bound: &SessionWithSandbox) -> Self {
        self.thread = bound.session.thread().map(str::to_owned);
        self.session = Some(bound.session.id.clone());
        self.sandbox = Some(bound.sandbox.id.clone());
        self
    }
    pub fn entry(self, sequence: u64) -> AuditEntry {
        AuditEntry {
            sequence,
            at: self.at,
            action: self.action.into_owned(),
            request_id: self.request_id,
            principal: self.principal,
            actor: self.actor,
            thread_id: self.thread,
            session_id: self.session,
            sandbox_id: self.sandbox,
            jti: self.jti,
            detail: self.detail,
        }
    }
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }
}
