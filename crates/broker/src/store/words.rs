//! What the store is asked for, and what it answers: the words of [`super::Store`].

use std::{sync::OnceLock, time::Duration};

use cobox_protocol::{
    KeyId, SandboxId, Timestamp,
    control::{IssuedTo, Revocation},
    key::PrincipalKind,
    session::{Access, State},
    tags::{TagFilter, Tags},
};
use cobox_token::{Claims, RevocationView};
use serde::{Deserialize, Serialize};

use crate::{
    chain::Hash,
    domain::{
        audit::AuditRecord,
        events::Event,
        model::{ApiKey, Bound, COUNT_RUNNING_EVERY, MAX_COUNTED_GAP, Principal, Sandbox, Share},
    },
    policy::Quota,
    store::PoolTaking,
};

/// One page, newest first: at most `limit` items with ids below `before`.
#[derive(Clone, Debug, Default)]
pub struct PageWish {
    pub before: Option<String>,
    pub limit: u32,
}

/// Whose eyes a list is made for: the workspace's things, without those that are another owner's alone.
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
    /// All of them must be there.
    pub tags: Vec<TagFilter>,
    /// Without it, all that haven't ended.
    pub state: Option<State>,
}

/// A session to be found or made.
#[derive(Clone, Debug)]
pub struct EnsureWish {
    /// Both are used only when the scope has none.
    pub fresh: Bound,
    /// The sandbox is there already: only the session is new, and its hard end counts from now on.
    pub is_attaching: bool,
    /// A session that is there is a conflict: the request isn't remembered by it.
    pub must_create: bool,
    /// Of the session, and of its sandbox where that is new.
    pub tags: Tags,
    /// Living sandboxes there may be.
    pub quota: Quota,
    /// Where a sandbox that waits is looked for first.
    pub taking: Option<PoolTaking>,
    pub idempotency: Option<Idempotency>,
    pub audit: AuditRecord,
}

#[derive(Clone, Debug)]
pub struct Idempotency {
    pub principal: String,
    pub key: String,
    pub request_hash: [u8; 32],
    /// What was remembered before this is forgotten.
    pub since: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ensured {
    Created(Bound),
    Existing(Bound),
    /// The same request again; the session may have ended since.
    Replayed(Bound),
    /// The idempotency key came with another request before.
    KeyReused,
    QuotaReached(QuotaReached),
    /// The new sandbox's name is another's by now.
    NameTaken(SandboxId),
    /// The sandbox to attach to has ended.
    SandboxGone,
    /// A snapshot or a volume that the new sandbox is to be made of.
    MadeOfGone(String),
}

/// How time is counted in which a node's broker runs.
#[derive(Clone, Copy, Debug)]
pub struct Counting {
    /// A sandbox or a node is due when it was last counted this long ago.
    pub every: Duration,
    /// The most that counts at once.
    pub max_gap: Duration,
}

impl Counting {
    /// As often as the reaper does it.
    pub const REGULAR: Self = Self { every: COUNT_RUNNING_EVERY, max_gap: MAX_COUNTED_GAP };
    /// Starts to count from now on: until now no broker ran.
    pub const START: Self = Self { every: Duration::ZERO, max_gap: Duration::ZERO };
}

/// What changes about a sandbox without changing its life; what is left out stays.
#[derive(Clone, Debug, Default)]
pub struct SandboxChange {
    pub name: Option<Option<String>>,
    pub is_kept: Option<bool>,
    /// `None` within: as long as others.
    pub own_lease: Option<Option<Duration>>,
    pub own_keep: Option<Option<Duration>>,
    pub access: Option<Access>,
    pub set_tags: Tags,
    pub remove_tags: Vec<String>,
    /// Tags it may have in the end.
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
    /// A snapshot or a volume that it is to be made of.
    MadeOfGone(String),
}

/// What came of restoring a deleted sandbox.
pub enum RestoredSandbox {
    Restored(Box<Sandbox>),
    NameTaken(SandboxId),
    /// A snapshot or a volume that it is made of was deleted too.
    MadeOfGone(String),
    /// Its node has not stopped it yet.
    Stopping,
    /// Its files are no longer kept.
    Gone,
}

/// Which sandboxes of a node [`crate::store::Store::sandboxes_due`] returns beside the running and unfinished ones.
#[derive(Clone, Copy, Debug)]
pub struct DueBy {
    pub now: Timestamp,
    /// Suspended by then.
    pub suspended: Timestamp,
    /// Deleted, with files that are kept until then at most.
    pub restorable: Timestamp,
}

impl DueBy {
    /// None beside the running and unfinished ones.
    pub const NOTHING: Self = {
        let never = Timestamp::from_unix(0);
        Self { now: never, suspended: never, restorable: never }
    };
}

/// A limit on sandboxes that a new one would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaReached {
    pub by: Counted,
    /// Number of deleted sandboxes whose files are kept and hold the room; 0 if living sandboxes alone reach the limit.
    pub deleted: u64,
}

/// Whose sandboxes a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    Workspace,
    Owner,
}

#[derive(Clone, Debug)]
pub enum AddedKey {
    Added,
    /// The principal exists and is something else.
    KindDiffers(PrincipalKind),
    /// The principal was shut out.
    Disabled,
    TooManyKeys,
    TooManyPrincipals,
    /// The identity has one already.
    Known(Box<ApiKey>),
}

#[derive(Clone, Debug)]
pub enum RevokedKey {
    Revoked(Box<ApiKey>),
    /// There is no such key, or it is revoked already.
    NotThere,
    /// Nobody could manage the deployment any more.
    LastOperator,
}

#[derive(Clone, Debug)]
pub enum ExpiringKey {
    Changed(Box<ApiKey>),
    /// There is no such key, or it has ended already.
    NotThere,
    /// Nobody could manage the deployment after that.
    LastOperator,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DisabledPrincipal {
    /// Now or before.
    Disabled,
    NotThere,
    /// Nobody could manage the deployment any more.
    LastOperator,
}

/// How something ends: its sessions' tokens stop counting in the same transaction.
#[derive(Clone, Debug)]
pub struct Ending {
    pub now: Timestamp,
    pub reason: String,
    /// When the last token that could be concerned doesn't even prove possession.
    pub revoke_until: Timestamp,
    /// The sandbox of an ended session is suspended, even where it would end with its last session.
    pub keeps_sandbox: bool,
    /// How long the files of a sandbox that ends with it are kept, so that it can be restored. Zero: they are removed at once.
    pub keep_files: Duration,
    pub audit: AuditRecord,
}

/// What an ended session leaves for its sandbox; the intent is already written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leftover {
    /// Another session uses it: it goes on, and must learn of the revocation.
    InUse,
    Suspend,
    Destroy,
}

/// Small things noted together: last uses and audit records.
#[derive(Clone, Debug, Default)]
pub struct Note {
    /// Brings `idle` back to `active` too.
    pub sandboxes: Vec<(SandboxId, Timestamp)>,
    pub keys: Vec<(KeyId, Timestamp)>,
    pub tokens: Vec<OpaqueToken>,
    pub audit: Vec<AuditRecord>,
}

/// What an opaque token stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpaqueToken {
    /// SHA-256 of the token as it was given out.
    pub hash: [u8; 32],
    pub claims: Claims,
    /// From then on it proves nothing any more.
    pub keep_until: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shared {
    Added(Share),
    /// There was one for the principal, which this one takes the place of.
    Changed(Share),
    TooMany,
    SessionGone,
}

/// Whose tokens are to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RevokedTokens {
    Jti(String),
    /// Those issued up to now.
    Earlier {
        of: IssuedTo,
        value: String,
        issued_by: i64,
    },
}

#[derive(Clone, Debug)]
pub struct RevokeWish {
    pub workspace: String,
    /// Where they count; in every sandbox of the workspace without it.
    pub sandbox: Option<SandboxId>,
    pub tokens: RevokedTokens,
    pub until: Timestamp,
    pub audit: AuditRecord,
}

/// A sandbox's next key.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    pub now: Timestamp,
    /// Until when tokens of the key before it count; without it they no longer do.
    pub old_until: Option<Timestamp>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MasterRotated {
    /// How many sandboxes it concerns.
    Rotated(u64),
    /// Until then an older key of some sandbox still counts, and would for longer.
    TooSoon(Timestamp),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rotated {
    Rotated(Box<Sandbox>),
    /// Until then an older key still counts, and would for longer.
    TooSoon(Timestamp),
    /// The sandbox has ended.
    Gone,
}

#[derive(Default)]
pub struct RevocationList {
    /// Of the newest one in the list; changes whenever one is added.
    pub sequence: u64,
    /// When the last one began to count, in Unix seconds. With the sequence it tells one list from another.
    pub last_start: i64,
    pub list: Vec<Revocation>,
    /// Made when it is first asked, and once for all who ask the same list.
    view: OnceLock<RevocationView>,
}

impl RevocationList {
    pub fn covers(&self, claims: &Claims) -> bool {
        self.view.get_or_init(|| RevocationView::new(&self.list)).covers(claims)
    }
}

/// A token that was replaced: it counts for a moment longer, so that what is under way with it can go over to the new one.
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

/// What is old enough to be forgotten.
#[derive(Clone, Copy, Debug)]
pub struct Horizon {
    pub now: Timestamp,
    pub idempotency_before: Timestamp,
    pub ended_before: Timestamp,
    pub audit_before: Timestamp,
}

/// How much there is, of all workspaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Those that have not ended, by state.
    pub sandboxes: Vec<(State, u64)>,
    /// Those that have not ended.
    pub sessions: u64,
    /// Those that still count.
    pub revocations: u64,
    /// Sandboxes of the workspace that has the most.
    pub largest_workspace: u64,
    /// What the database takes on its disk.
    pub database_bytes: u64,
}

/// The master key was replaced: every living sandbox's next token key comes from the new one.
#[derive(Clone, Debug)]
pub struct MasterRotation {
    pub now: Timestamp,
    /// Until when tokens of the key before it count; without it they no longer do.
    pub old_until: Option<Timestamp>,
    /// What brokers agree on from now on, by its names.
    pub agreed: [(&'static str, String); 2],
    /// What says which records of the audit were removed for being old: from the new key on.
    pub seals: Vec<AuditSeal>,
    pub audit: AuditRecord,
}

/// That a chain's records up to a number were removed for being old.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditSeal {
    pub writer: String,
    pub number: u64,
    pub seal: Hash,
}

/// The end of a chain of audit records, and what the first that is kept is linked to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainHead {
    pub writer: String,
    pub number: u64,
    pub hash: Hash,
    pub kept_after: u64,
    pub kept_after_hash: Hash,
    /// Nothing was removed, or by a broker that signed for it.
    pub is_beginning_sealed: bool,
}

/// An audit record in its writer's chain.
#[derive(Clone, Debug)]
pub struct ChainLink {
    pub number: u64,
    /// As it stands there, whatever that is.
    pub hash: Vec<u8>,
    pub sequence: u64,
    pub record: AuditRecord,
}

/// How far a store's own chain has come.
#[derive(Clone, Debug, Default)]
pub struct AuditProgress {
    /// Number and hash of the last link, where it is known.
    pub head: Option<(u64, Hash)>,
    /// Newly committed records about keys and revocations.
    pub records: Vec<MarkedRecord>,
}

/// An audit record about a key or a revocation, as it is kept outside the database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MarkedRecord {
    pub number: u64,
    pub hash: String,
    pub at: Timestamp,
    pub action: String,
    pub workspace: String,
    pub principal: Option<String>,
    pub detail: Option<String>,
}

impl std::fmt::Display for MarkedRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in workspace {}", self.action, self.workspace)?;
        if let Some(detail) = &self.detail {
            write!(f, ": {detail}")?;
        }
        if let Some(principal) = &self.principal {
            write!(f, ", by {principal}")?;
        }
        write!(f, ", at {}", self.at)
    }
}

/// A broker on this database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub id: String,
    /// How clients reach its sandboxes, without a slash at the end.
    pub url: String,
    /// When it last said that it lives.
    pub seen_at: Timestamp,
    /// Which process of the node that was.
    pub instance: String,
    /// How often it has said so; counted by the store.
    pub beats: u64,
    /// Its clock minus the database's, in milliseconds; none of a broker that is too old to say.
    pub clock_offset_ms: Option<i64>,
}

/// Something another broker may have changed: a reason to look, never the news itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hint {
    /// A sandbox's state, its intent, or what is revoked in it.
    Sandbox(SandboxId),
    /// What is revoked in every sandbox of a workspace.
    Workspace(String),
    /// A sandbox's events. Heard on SQLite too, where this is the only one.
    News(SandboxId),
    /// Somebody wants to know whether the broker of this node lives.
    Beat(String),
    /// Whatever was said meanwhile was not heard.
    Anything,
}

/// What a sandbox said of itself, to be stored once.
#[derive(Clone, Debug)]
pub struct TakenHappenings {
    pub workspace: String,
    pub sandbox: SandboxId,
    /// Of its daemon; another life counts anew.
    pub life: String,
    /// By the daemon's own numbers.
    pub events: Vec<(u64, Event)>,
}

/// Up to where a sandbox's own words were taken, and its events removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventMarks {
    pub life: String,
    pub taken: u64,
    pub pruned: u64,
}

/// Numbers of events that are kept; zero where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventBounds {
    /// Of the session itself.
    pub own_first: u64,
    /// Of the session's end.
    pub own_end: u64,
    /// Of the sandbox, removed ones included.
    pub newest: u64,
    /// The sandbox's up to this one were removed.
    pub pruned: u64,
}

#[derive(Clone, Debug, Default)]
pub struct EventPage {
    /// With their numbers, oldest first.
    pub events: Vec<(u64, Event)>,
    /// The sandbox's events up to this one were removed; zero where there is no event to say it by.
    pub pruned: u64,
}
