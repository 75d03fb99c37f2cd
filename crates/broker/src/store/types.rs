//! Parameter and result types of [`super::Store`].

use std::{sync::OnceLock, time::Duration};

use cobox_protocol::{
    KeyId, SandboxId, Timestamp,
    control::{IssuedTo, Revocation},
    key::PrincipalKind,
    session::{Access, State},
    tags::{TagFilter, Tags},
};
use cobox_token::{Claims, RevocationView};

use crate::{
    domain::model::{ApiKey, AuditRecord, COUNT_RUNNING_EVERY, Event, MAX_COUNTED_GAP, Principal, Sandbox, SessionWithSandbox, Share},
    policy::Quota,
    store::{AuditSeal, PoolAssignment},
};

/// One page, newest first: at most `limit` items with ids below `before`.
#[derive(Clone, Debug, Default)]
pub struct PageParams {
    pub before: Option<String>,
    pub limit: u32,
}

/// The reader of a list. The list has the workspace's items, without those that only another owner may see.
#[derive(Clone, Debug)]
pub struct Viewer {
    pub workspace: String,
    pub principal: String,
    pub sees_all: bool,
}

impl From<&Principal> for Viewer {
    fn from(p: &Principal) -> Self {
        Self { workspace: p.workspace.clone(), principal: p.name.clone(), sees_all: p.is_operator() }
    }
}

#[derive(Clone, Debug, Default)]
pub struct SessionFilter {
    pub scope_type: Option<String>,
    pub scope_id: Option<String>,
    /// All of them must match.
    pub tags: Vec<TagFilter>,
    /// Without it, all sessions that haven't ended.
    pub state: Option<State>,
}

/// Parameters to find or create a session.
#[derive(Clone, Debug)]
pub struct EnsureParams {
    /// Both rows are only used if the scope has no session.
    pub fresh: SessionWithSandbox,
    /// The sandbox exists already: only the session is new, and its hard end counts from now on.
    pub is_attaching: bool,
    /// An existing session is a conflict, and the request isn't stored for replays.
    pub must_create: bool,
    /// For the session, and for its sandbox if that is new.
    pub tags: Tags,
    /// Limits on live sandboxes.
    pub quota: Quota,
    /// Pool from which a standby sandbox is taken if possible.
    pub taking: Option<PoolAssignment>,
    pub idempotency: Option<Idempotency>,
    pub audit: AuditRecord,
}

#[derive(Clone, Debug)]
pub struct Idempotency {
    pub principal: String,
    pub key: String,
    pub request_hash: [u8; 32],
    /// Requests stored before this are ignored.
    pub since: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ensured {
    Created(SessionWithSandbox),
    Existing(SessionWithSandbox),
    /// A replay of the same request; the session may have ended since.
    Replayed(SessionWithSandbox),
    /// The idempotency key was used with another request.
    KeyReused,
    QuotaReached(QuotaReached),
    /// The new sandbox's name was taken in the meantime.
    NameTaken(SandboxId),
    /// The sandbox to attach to has ended.
    SandboxGone,
    /// The snapshot or volume of the new sandbox's spec that no longer exists.
    SpecPartMissing(String),
}

/// How the time is counted in which a node's broker runs.
#[derive(Clone, Copy, Debug)]
pub struct TimeAccounting {
    /// A sandbox or a node is due when it was last counted this long ago.
    pub every: Duration,
    /// Maximum time counted at once.
    pub max_gap: Duration,
}

impl TimeAccounting {
    /// Counts in the reaper's usual interval.
    pub const REGULAR: Self = Self { every: COUNT_RUNNING_EVERY, max_gap: MAX_COUNTED_GAP };
    /// Starts to count now: no broker ran until now.
    pub const START: Self = Self { every: Duration::ZERO, max_gap: Duration::ZERO };
}

/// Changes to a sandbox's settings; absent fields stay as they are.
#[derive(Clone, Debug, Default)]
pub struct SandboxChange {
    pub name: Option<Option<String>>,
    pub is_kept: Option<bool>,
    /// Inner `None`: the default.
    pub own_lease: Option<Option<Duration>>,
    pub own_keep: Option<Option<Duration>>,
    pub access: Option<Access>,
    pub set_tags: Tags,
    pub remove_tags: Vec<String>,
    /// Maximum number of tags after the change.
    pub max_tags: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangedSandbox {
    Changed(Box<Sandbox>),
    NameTaken(SandboxId),
    TooManyTags(usize),
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddedSandbox {
    Added,
    NameTaken(SandboxId),
    QuotaReached(QuotaReached),
    /// The snapshot or volume of its spec that no longer exists.
    SpecPartMissing(String),
}

/// Result of restoring a deleted sandbox.
pub enum RestoredSandbox {
    Restored(Box<Sandbox>),
    NameTaken(SandboxId),
    /// A snapshot or volume of its spec was deleted too.
    SpecPartMissing(String),
    /// Its node has not stopped it yet.
    Stopping,
    /// Its files are no longer kept.
    Gone,
}

/// Which sandboxes of a node [`crate::store::Store::sandboxes_due`] returns beside the running and unfinished ones.
#[derive(Clone, Copy, Debug)]
pub struct DueTimes {
    pub now: Timestamp,
    /// Suspended before this time.
    pub suspended: Timestamp,
    /// Deleted, with files kept until this time at most.
    pub restorable: Timestamp,
}

impl DueTimes {
    /// Selects only running and unfinished sandboxes.
    pub const NONE: Self = {
        let never = Timestamp::from_unix(0);
        Self { now: never, suspended: never, restorable: never }
    };
}

/// A limit on sandboxes that a new one would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaReached {
    pub by: QuotaSubject,
    /// Number of deleted sandboxes whose files are kept and count; 0 if live sandboxes alone reach the limit.
    pub deleted: u64,
}

/// Whose sandboxes a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaSubject {
    Workspace,
    Owner,
}

#[derive(Clone, Debug)]
pub enum AddedKey {
    Added,
    /// The principal exists with another kind.
    KindDiffers(PrincipalKind),
    /// The principal is disabled.
    Disabled,
    TooManyKeys,
    TooManyPrincipals,
    /// The identity has a key already.
    Known(Box<ApiKey>),
}

#[derive(Clone, Debug)]
pub enum RevokedKey {
    Revoked(Box<ApiKey>),
    /// There is no such key, or it is revoked already.
    NotThere,
    /// No operator could manage the deployment any more.
    LastOperator,
}

#[derive(Clone, Debug)]
pub enum ExpiringKey {
    Changed(Box<ApiKey>),
    /// There is no such key, or it has ended already.
    NotThere,
    /// No operator could manage the deployment after that.
    LastOperator,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DisabledPrincipal {
    /// Now or before.
    Disabled,
    NotThere,
    /// No operator could manage the deployment any more.
    LastOperator,
}

/// How something ends. The tokens of its sessions are revoked in the same transaction.
#[derive(Clone, Debug)]
pub struct Ending {
    pub now: Timestamp,
    pub reason: String,
    /// Time after which no affected token even proves possession.
    pub revoke_until: Timestamp,
    /// The sandbox of an ended session is suspended, even where it would end with its last session.
    pub keeps_sandbox: bool,
    /// How long the files of a sandbox that ends with it are kept, so that it can be restored. Zero: they are removed at
    /// once.
    pub keep_files: Duration,
    pub audit: AuditRecord,
}

/// What remains to be done with the sandbox of an ended session; the intent is already stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SandboxAfterSession {
    /// Another session uses it: it keeps running, and must receive the revocation.
    InUse,
    Suspend,
    Destroy,
}

/// Last uses, audit records and opaque tokens that are written together.
#[derive(Clone, Debug, Default)]
pub struct Note {
    /// Also moves `idle` sandboxes back to `active`.
    pub sandboxes: Vec<(SandboxId, Timestamp)>,
    pub keys: Vec<(KeyId, Timestamp)>,
    pub tokens: Vec<OpaqueToken>,
    pub audit: Vec<AuditRecord>,
}

/// The stored claims of an opaque token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpaqueToken {
    /// SHA-256 of the token as it was issued.
    pub hash: [u8; 32],
    pub claims: Claims,
    /// After this it doesn't even prove possession.
    pub keep_until: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shared {
    Added(Share),
    /// Replaced an existing share of the same principal.
    Changed(Share),
    TooMany,
    SessionGone,
}

/// Which tokens to revoke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RevokedTokens {
    Jti(String),
    /// Tokens issued up to now.
    Earlier {
        of: IssuedTo,
        value: String,
        issued_by: i64,
    },
}

#[derive(Clone, Debug)]
pub struct RevokeParams {
    pub workspace: String,
    /// Limits it to one sandbox; without it, every sandbox of the workspace.
    pub sandbox: Option<SandboxId>,
    pub tokens: RevokedTokens,
    pub until: Timestamp,
    pub audit: AuditRecord,
}

/// Rotation to a sandbox's next key.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    pub now: Timestamp,
    /// Until when tokens of the previous key stay valid; without it they end now.
    pub old_until: Option<Timestamp>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MasterRotated {
    /// Number of affected sandboxes.
    Rotated(u64),
    /// An older key of a sandbox is valid until then, and a new rotation would prolong it.
    TooSoon(Timestamp),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rotated {
    Rotated(Box<Sandbox>),
    /// An older key is valid until then, and a new rotation would prolong it.
    TooSoon(Timestamp),
    /// The sandbox has ended.
    Gone,
}

#[derive(Default)]
pub struct RevocationList {
    /// Number of the newest revocation in the list; changes whenever one is added.
    pub sequence: u64,
    /// Latest start of a revocation, in Unix seconds. Together with the sequence it identifies a list.
    pub last_start: i64,
    pub list: Vec<Revocation>,
    /// Built on first use, once for all readers of the same list.
    view: OnceLock<RevocationView>,
}

impl RevocationList {
    pub fn covers(&self, claims: &Claims) -> bool {
        self.view.get_or_init(|| RevocationView::new(&self.list)).covers(claims)
    }
}

/// A token that was replaced: it stays valid for a short time, so that requests in progress can switch to the new one.
#[derive(Clone, Debug)]
pub struct RetiredToken {
    pub workspace: String,
    pub sandbox: SandboxId,
    pub jti: String,
    pub from: Timestamp,
    /// When it would have expired.
    pub until: Timestamp,
    pub audit: AuditRecord,
}

/// Ages from which rows are removed.
#[derive(Clone, Copy, Debug)]
pub struct RetentionLimits {
    pub now: Timestamp,
    pub idempotency_before: Timestamp,
    pub ended_before: Timestamp,
    pub audit_before: Timestamp,
}

/// Counts over all workspaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Live sandboxes, by state.
    pub sandboxes: Vec<(State, u64)>,
    /// Live sessions.
    pub sessions: u64,
    /// Revocations in effect.
    pub revocations: u64,
    /// Each number is that of the workspace that has the most.
    pub fullest: WorkspaceTotals,
    /// Size of the database on disk.
    pub database_bytes: u64,
}

/// Numbers of one workspace, or their limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkspaceTotals {
    /// Live sandboxes.
    pub sandboxes: u64,
    pub snapshots: u64,
    pub volumes: u64,
    /// Size of snapshots and volumes together.
    pub stored_bytes: u64,
    pub templates: u64,
    pub pools: u64,
}

/// The master key was replaced: every live sandbox's next token key is derived from the new one.
#[derive(Clone, Debug)]
pub struct MasterRotation {
    pub now: Timestamp,
    /// Until when tokens of the previous key stay valid; without it they end now.
    pub old_until: Option<Timestamp>,
    /// New agreed values of all brokers, by name.
    pub agreed: [(&'static str, String); 2],
    /// Seals for audit records that were removed by age, signed with the new key.
    pub seals: Vec<AuditSeal>,
    pub audit: AuditRecord,
}

/// A broker on this database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub id: String,
    /// Base URL of its sandboxes for clients, without a trailing slash.
    pub url: String,
    /// Time of its last heartbeat.
    pub seen_at: Timestamp,
    /// The process of the node that sent it.
    pub instance: String,
    /// Number of heartbeats; counted by the store.
    pub heartbeats: u64,
    /// Its clock minus the database's, in milliseconds; `None` for an older broker that doesn't measure it.
    pub clock_offset_ms: Option<i64>,
}

/// A change that another broker may have made: a reason to read again, never the data itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeNotice {
    /// A sandbox's state, intent or revocations.
    Sandbox(SandboxId),
    /// Revocations for every sandbox of a workspace.
    Workspace(String),
    /// A sandbox's events. Also sent on SQLite, where this is the only notice.
    Events(SandboxId),
    /// Another broker asks whether this node's broker is alive.
    HeartbeatRequest(String),
    /// Notices may have been missed.
    Any,
}

/// New activity feed entries of a sandbox, to be stored once.
#[derive(Clone, Debug)]
pub struct CollectedActivity {
    pub workspace: String,
    pub sandbox: SandboxId,
    /// Run of its daemon; each run numbers its entries from the start.
    pub life: String,
    /// By the daemon's own numbers.
    pub events: Vec<(u64, Event)>,
}

/// How far a sandbox's activity feed was collected, and up to which number its events were removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventMarks {
    pub life: String,
    pub taken: u64,
    pub pruned: u64,
}

/// Numbers of stored events; zero if there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventBounds {
    /// Number of the session's first own event.
    pub own_first: u64,
    /// Number of the event that ended the session.
    pub own_end: u64,
    /// Number of the sandbox's newest event, removed ones included.
    pub newest: u64,
    /// The sandbox's events up to this one were removed.
    pub pruned: u64,
}

#[derive(Clone, Debug, Default)]
pub struct EventPage {
    /// With their numbers, oldest first.
    pub events: Vec<(u64, Event)>,
    /// The sandbox's events up to this one were removed; zero if the page is empty.
    pub pruned: u64,
}
