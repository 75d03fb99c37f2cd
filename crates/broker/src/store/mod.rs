//! What the broker remembers, as the domain asks for it: each method is one transaction, durable when it returns.

pub mod sql;

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
};

use async_trait::async_trait;
use cobox_protocol::{
    KeyId, SandboxId, SessionId, Timestamp,
    control::{IssuedTo, Revocation},
    key::PrincipalKind,
    session::{Access, State},
    tags::{TagFilter, Tags},
};

use cobox_token::{Claims, RevocationView};
use tokio::sync::broadcast;

use crate::{
    chain::Hash,
    domain::{
        audit::AuditRecord,
        events::Event,
        model::{ApiKey, Bound, Principal, PrincipalRecord, Sandbox, Session, Share},
    },
    metrics::Histogram,
    policy::Quota,
};

#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the database failed: {0}")]
    Failed(String),
    #[error("the database can't be reached: {0}")]
    Unreachable(String),
    #[error("the database holds something unreadable: {0}")]
    Corrupt(String),
}

pub type Stored<T> = Result<T, StoreError>;

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
    QuotaReached(Counted),
    /// The new sandbox's name is another's by now.
    NameTaken(SandboxId),
    /// The sandbox to attach to has ended.
    SandboxGone,
}

/// What changes about a sandbox without changing its life; what is left out stays.
#[derive(Clone, Debug, Default)]
pub struct SandboxChange {
    pub name: Option<Option<String>>,
    pub is_kept: Option<bool>,
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
    QuotaReached(Counted),
}

/// Whose sandboxes are as many as may be.
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
}

/// The master key was replaced: every living sandbox's next token key comes from the new one.
#[derive(Clone, Debug)]
pub struct MasterRotation {
    pub now: Timestamp,
    /// Until when tokens of the key before it count; without it they no longer do.
    pub old_until: Option<Timestamp>,
    /// What brokers agree on from now on, by its names.
    pub agreed: [(&'static str, String); 2],
    pub audit: AuditRecord,
}

/// The end of a chain of audit records, and what the first that is kept is linked to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainHead {
    pub writer: String,
    pub number: u64,
    pub hash: Hash,
    pub kept_after: u64,
    pub kept_after_hash: Hash,
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

/// A broker on this database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub id: String,
    /// How clients reach its sandboxes, without a slash at the end.
    pub url: String,
    /// When it last said that it lives.
    pub seen_at: Timestamp,
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

#[async_trait]
pub trait Store: Send + Sync {
    /// Makes workspace and principal where they don't exist yet.
    async fn add_key(&self, key: &ApiKey, audit: &AuditRecord) -> Stored<AddedKey>;
    async fn key(&self, id: &KeyId) -> Stored<Option<ApiKey>>;
    async fn keys(&self, page: &PageWish) -> Stored<Vec<ApiKey>>;
    /// `None` when there is no such key or it has ended.
    async fn expire_key(&self, id: &KeyId, at: Timestamp, audit: &AuditRecord) -> Stored<Option<ApiKey>>;
    /// Ends the key and the tokens issued under it.
    async fn revoke_key(&self, id: &KeyId, ending: &Ending) -> Stored<RevokedKey>;
    /// What an identity comes in by, revoked or not; its hash is of issuer and subject.
    async fn identity(&self, principal: &Principal, hash: &[u8; 32]) -> Stored<Option<ApiKey>>;
    /// By name; the page's cursor is the last name seen.
    async fn principals(&self, workspace: &str, now: Timestamp, page: &PageWish) -> Stored<Vec<PrincipalRecord>>;
    /// Ends its keys, its identities and all its tokens.
    async fn disable_principal(&self, workspace: &str, name: &str, ending: &Ending) -> Stored<DisabledPrincipal>;
    /// What ended stays ended; new keys can be made and identities sign in again. False when there is no such principal.
    async fn enable_principal(&self, workspace: &str, name: &str, audit: &AuditRecord) -> Stored<bool>;

    async fn ensure(&self, wish: &EnsureWish) -> Stored<Ensured>;
    /// The living session of a scope.
    async fn session_of(&self, workspace: &str, scope_type: &str, scope_id: &str) -> Stored<Option<Bound>>;
    /// A session, ended or not.
    async fn session(&self, id: &SessionId) -> Stored<Option<Bound>>;
    async fn sessions(&self, viewer: &Viewer, filter: &SessionFilter, page: &PageWish) -> Stored<Vec<Bound>>;
    /// The living sessions of a sandbox, newest first.
    async fn sessions_on(&self, sandbox: &SandboxId) -> Stored<Vec<Session>>;
    /// `None` when it has ended already.
    async fn end_session(&self, id: &SessionId, ending: &Ending) -> Stored<Option<Leftover>>;

    /// Tags by session id; those without any aren't in it.
    async fn session_tags(&self, ids: &[&SessionId]) -> Stored<HashMap<String, Tags>>;

    async fn add_sandbox(&self, sandbox: &Sandbox, tags: &Tags, quota: &Quota, audit: &AuditRecord) -> Stored<AddedSandbox>;
    /// One that becomes its owner's alone gets its next key: every token of it ends.
    async fn change_sandbox(&self, id: &SandboxId, change: &SandboxChange, audit: &AuditRecord) -> Stored<ChangedSandbox>;
    /// A sandbox, ended or not.
    async fn sandbox(&self, id: &SandboxId) -> Stored<Option<Sandbox>>;
    /// A living sandbox.
    async fn sandbox_named(&self, workspace: &str, name: &str) -> Stored<Option<Sandbox>>;
    /// The living ones that have all these tags, or are used by a session that has.
    async fn sandboxes(&self, viewer: &Viewer, tags: &[TagFilter], page: &PageWish) -> Stored<Vec<Sandbox>>;
    async fn sandbox_tags(&self, ids: &[&SandboxId]) -> Stored<HashMap<String, Tags>>;
    /// All of a node that live or that something is still to be done about.
    async fn sandboxes_of_node(&self, node: &str) -> Stored<Vec<Sandbox>>;
    /// Those of a node that must be looked at now and then: they run, something is to be done about them, or they were suspended
    /// by then.
    async fn sandboxes_due(&self, node: &str, suspended_by: Timestamp) -> Stored<Vec<Sandbox>>;
    /// Running ones of a workspace on a node, which must learn of its revocations.
    async fn running_in(&self, workspace: &str, node: &str) -> Stored<Vec<SandboxId>>;
    /// Whether there is any record of a sandbox (of a node), ended ones included: whether this store has been in use.
    async fn has_sandboxes(&self, node: Option<&str>) -> Stored<bool>;
    /// Replaces `old` by `new` if state and intent are still `old`'s; says whether they were. The last use only moves forward.
    async fn replace_sandbox(&self, old: &Sandbox, new: &Sandbox, audit: Option<&AuditRecord>) -> Stored<bool>;
    /// Counts a suspended sandbox's running time anew, unless a session counts on it.
    async fn renew_sandbox(&self, id: &SandboxId) -> Stored<()>;
    /// Ends a sandbox (`terminated` or `failed`) with its sessions, leaving the intent to destroy it. `None` when it has ended already.
    async fn end_sandbox(&self, id: &SandboxId, state: State, ending: &Ending) -> Stored<Option<Sandbox>>;

    /// A sandbox for which too many would be kept gets its next key instead, which ends all its tokens.
    async fn revocations(&self, sandbox: &Sandbox, now: Timestamp) -> Stored<Arc<RevocationList>>;
    /// False when the sandbox has too many revocations for that.
    async fn retire_token(&self, token: &RetiredToken) -> Stored<bool>;
    /// Where a token was issued or a share was made, as long as that is known.
    async fn workspace_of_token(&self, jti: &str) -> Stored<Option<String>>;
    /// Answers with its number among all revocations.
    async fn revoke(&self, wish: &RevokeWish) -> Stored<u64>;
    async fn rotate_key(&self, id: &SandboxId, rotation: &Rotation, audit: &AuditRecord) -> Stored<Rotated>;
    async fn opaque_token(&self, hash: &[u8; 32]) -> Stored<Option<Claims>>;

    async fn principal(&self, workspace: &str, name: &str) -> Stored<Option<Principal>>;
    /// One that takes more away than it gives ends the tokens that came by the one before.
    async fn share(&self, share: &Share, max: u32, ending: &Ending) -> Stored<Shared>;
    async fn share_of(&self, session: &SessionId, principal: &str) -> Stored<Option<Share>>;
    /// By principal.
    async fn shares(&self, session: &SessionId) -> Stored<Vec<Share>>;
    /// Ends a share and the tokens that came by it. `None` when there is none.
    async fn unshare(&self, session: &SessionId, principal: &str, ending: &Ending) -> Stored<Option<Share>>;

    /// Those that come at the same time share a commit.
    async fn note(&self, note: &Note) -> Stored<()>;
    /// Does nothing while another broker is at it.
    async fn prune(&self, horizon: &Horizon) -> Stored<()>;
    /// Records of a workspace with their numbers, newest first; the page's cursor is such a number.
    async fn audit(&self, workspace: &str, sandbox: Option<&SandboxId>, page: &PageWish) -> Stored<Vec<(u64, AuditRecord)>>;
    /// As [`Store::audit`], of what was done with one token.
    async fn audit_of_token(&self, workspace: &str, jti: &str, page: &PageWish) -> Stored<Vec<(u64, AuditRecord)>>;
    /// In whose chain this store's audit records are linked; said before anything is written.
    fn write_as(&self, writer: &str);
    /// Every chain of audit records, and where it ends. Of this store's own, where it knows it to end.
    async fn audit_heads(&self) -> Stored<Vec<ChainHead>>;
    /// A chain's links after a number, oldest first.
    async fn audit_links(&self, writer: &str, after: u64, limit: u32) -> Stored<Vec<ChainLink>>;

    /// All of one sandbox; with the changes of a session or sandbox events are appended by themselves.
    async fn append_events(&self, events: &[Event]) -> Stored<()>;
    /// Appends what is new of what a sandbox said.
    async fn take_happenings(&self, taken: &TakenHappenings) -> Stored<()>;
    /// Of a session and its sandbox, from after a number on, oldest first.
    async fn events(&self, sandbox: &SandboxId, session: &SessionId, after: u64, limit: u32) -> Stored<EventPage>;
    async fn event_bounds(&self, sandbox: &SandboxId, session: &SessionId) -> Stored<EventBounds>;
    async fn event_marks(&self, sandbox: &SandboxId) -> Stored<EventMarks>;
    /// Removes what is older, and of each workspace all but as many of the newest. Does nothing while another broker is at it.
    async fn prune_events(&self, before: Timestamp, keep: u32) -> Stored<()>;
    /// Keeps as many of a workspace's newest.
    async fn trim_events(&self, workspace: &str, keep: u32) -> Stored<()>;

    async fn counts(&self, now: Timestamp) -> Stored<Counts>;
    /// How long commits took so far.
    fn commit_times(&self) -> Option<&Histogram>;

    /// Whether other brokers may use this database, now or later.
    fn is_shared(&self) -> bool;
    async fn node_seen(&self, node: &Node) -> Stored<()>;
    async fn nodes(&self) -> Stored<Vec<Node>>;
    /// Sets a value where there is none yet; answers with the one that counts for every broker.
    async fn agree(&self, name: &str, value: &str) -> Stored<String>;
    /// Answers with how many sandboxes it concerns. No broker may run.
    async fn rotate_master(&self, rotation: &MasterRotation) -> Stored<u64>;
    /// What is changed from now on, by any broker on a shared database, this one included.
    fn hints(&self) -> broadcast::Receiver<Hint>;
}
