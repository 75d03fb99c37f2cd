//! What the broker remembers, as the domain asks for it: each method is one transaction, durable when it returns.

mod kinds;
pub mod sql;
mod words;

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use cobox_protocol::{
    KeyId, SandboxId, SessionId, Timestamp,
    session::{Scope, State},
    tags::{TagFilter, Tags},
};
use cobox_token::Claims;
use tokio::sync::broadcast;

use crate::{
    domain::{
        audit::AuditRecord,
        events::Event,
        model::{ApiKey, Bound, Principal, PrincipalRecord, Sandbox, Session, Share},
    },
    metrics::Histogram,
    policy::Quota,
};

pub use kinds::*;
pub use words::*;

#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the database failed: {0}")]
    Failed(String),
    /// The connection is of no use any more.
    #[error("the database can't be reached: {0}")]
    Unreachable(String),
    /// The connection works, and the database can't do this now: its disk is full, its filesystem is read-only, or it is overloaded.
    #[error("the database is unavailable: {0}")]
    Unavailable(String),
    #[error("the database holds something unreadable: {0}")]
    Corrupt(String),
}

pub type Stored<T> = Result<T, StoreError>;

#[async_trait]
pub trait Store: KindStore + Send + Sync {
    /// Makes workspace and principal where they don't exist yet.
    async fn add_key(&self, key: &ApiKey, audit: &AuditRecord) -> Stored<AddedKey>;
    async fn key(&self, id: &KeyId) -> Stored<Option<ApiKey>>;
    /// A key, and a session that is likely to be asked for next: of its workspace, where a scope names it.
    async fn key_and_session(&self, id: &KeyId, session: &SessionId) -> Stored<Option<(ApiKey, Option<Bound>)>>;
    async fn keys(&self, page: &PageWish) -> Stored<Vec<ApiKey>>;
    /// `None` when there is no such key or it has ended.
    async fn expire_key(&self, id: &KeyId, at: Timestamp, audit: &AuditRecord) -> Stored<ExpiringKey>;
    /// Ends the key and the tokens issued under it.
    async fn revoke_key(&self, id: &KeyId, ending: &Ending) -> Stored<RevokedKey>;
    /// What an identity comes in by, revoked or not; its hash is of issuer and subject.
    async fn identity(&self, principal: &Principal, hash: &[u8; 32]) -> Stored<Option<ApiKey>>;
    /// By name; the page's cursor is the last name seen.
    async fn principals(&self, workspace: &str, now: Timestamp, page: &PageWish) -> Stored<Vec<PrincipalRecord>>;
    /// Whether it can still come in: by a key or an identity that counts.
    async fn has_valid_key(&self, workspace: &str, name: &str, now: Timestamp) -> Stored<bool>;
    /// Ends its keys, its identities and all its tokens.
    async fn disable_principal(&self, workspace: &str, name: &str, ending: &Ending) -> Stored<DisabledPrincipal>;
    /// What ended stays ended; new keys can be made and identities sign in again. False when there is no such principal.
    async fn enable_principal(&self, workspace: &str, name: &str, audit: &AuditRecord) -> Stored<bool>;

    async fn ensure(&self, wish: &EnsureWish) -> Stored<Ensured>;
    /// The living session of a scope.
    async fn session_of(&self, workspace: &str, scope_type: &str, scope_id: &str) -> Stored<Option<Bound>>;
    /// The last session of a scope that ended.
    async fn last_session_of(&self, workspace: &str, scope: &Scope) -> Stored<Option<Bound>>;
    /// A session, ended or not.
    async fn session(&self, id: &SessionId) -> Stored<Option<Bound>>;
    async fn sessions(&self, viewer: &Viewer, filter: &SessionFilter, page: &PageWish) -> Stored<Vec<Bound>>;
    /// The living sessions of a sandbox, newest first.
    async fn sessions_on(&self, sandbox: &SandboxId) -> Stored<Vec<Session>>;
    /// The threads whose sessions on a sandbox have ended, each once, the last first.
    async fn past_threads(&self, sandbox: &SandboxId, limit: u32) -> Stored<Vec<String>>;
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
    /// The one that ended last of those that had the name.
    async fn sandbox_once_named(&self, workspace: &str, name: &str) -> Stored<Option<Sandbox>>;
    /// The living ones that have all these tags, or are used by a session that has.
    async fn sandboxes(&self, viewer: &Viewer, tags: &[TagFilter], page: &PageWish) -> Stored<Vec<Sandbox>>;
    /// Deleted ones whose files are still kept, the newest first.
    async fn deleted_sandboxes(&self, viewer: &Viewer, now: Timestamp, page: &PageWish) -> Stored<Vec<Sandbox>>;
    /// Makes a deleted sandbox a suspended one again, under `name`, with a new key: tokens from before the deletion stay invalid.
    async fn restore_sandbox(&self, id: &SandboxId, name: Option<&str>, now: Timestamp, audit: &AuditRecord) -> Stored<RestoredSandbox>;
    /// An owner's living ones, the one that was unused for longest first.
    async fn least_used(&self, workspace: &str, owner: &str, limit: u32) -> Stored<Vec<Sandbox>>;
    async fn sandbox_tags(&self, ids: &[&SandboxId]) -> Stored<HashMap<String, Tags>>;
    /// All of a node that live, that can be restored, or that something is still to be done about.
    async fn sandboxes_of_node(&self, node: &str) -> Stored<Vec<Sandbox>>;
    /// Those of a node that must be looked at now and then: they run, something is to be done about them, or they were suspended
    /// or deleted for longer than they are to be kept.
    async fn sandboxes_due(&self, node: &str, by: DueBy) -> Stored<Vec<Sandbox>>;
    /// Running ones of a workspace on a node, which must learn of its revocations.
    async fn running_in(&self, workspace: &str, node: &str) -> Stored<Vec<SandboxId>>;
    /// Whether there is any record of a sandbox (of a node), ended ones included: whether this store has been in use.
    async fn has_sandboxes(&self, node: Option<&str>) -> Stored<bool>;
    /// Replaces `old` by `new` if state and intent are still `old`'s; says whether they were. The last use only moves forward.
    async fn replace_sandbox(&self, old: &Sandbox, new: &Sandbox, audit: Option<&AuditRecord>) -> Stored<bool>;
    /// Adds the time since it was last counted to the running time of each running sandbox of a node that is due for it.
    async fn count_running(&self, node: &str, now: Timestamp, counting: Counting) -> Stored<()>;
    /// Excludes time in which the node's broker did not run from how long its suspended and deleted sandboxes are kept. Returns how much that
    /// was since the last call. Before [`Store::sandboxes_due`].
    async fn count_downtime(&self, node: &str, now: Timestamp, counting: Counting) -> Stored<Duration>;
    /// Counts a suspended sandbox's running time anew, unless a session counts on it.
    async fn renew_sandbox(&self, id: &SandboxId) -> Stored<()>;
    /// Ends a sandbox (`terminated` or `failed`) with its sessions, leaving the intent to destroy it. `None` when it has ended already.
    async fn end_sandbox(&self, id: &SandboxId, state: State, ending: &Ending) -> Stored<Option<Sandbox>>;

    /// As [`Store::end_sandbox`], unless a session is bound to it.
    async fn end_unbound_sandbox(&self, id: &SandboxId, ending: &Ending) -> Stored<Option<Sandbox>>;

    /// Counts the changes, where nobody else writes: as long as it stays, every answer would be the same but for the passing of time.
    fn changes(&self) -> Option<u64>;

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
    /// Of all living sessions that use a sandbox.
    async fn shares_on(&self, sandbox: &SandboxId) -> Stored<Vec<Share>>;
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
    /// With what it signs for the records it removes; before anything is removed.
    fn seal_with(&self, key: [u8; 32]);
    /// Leaves a gap of so many numbers before the next record of this store's own chain: of records that could not be written.
    fn skip_audit(&self, count: u64);
    /// How far this store's own chain has come, and what was committed since this was last asked of what a data directory keeps a mark of.
    async fn audit_progress(&self) -> AuditProgress;
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

    /// Writes and commits a few bytes: whether the database takes changes.
    async fn probe_write(&self, now: Timestamp) -> Stored<()>;
    async fn counts(&self, now: Timestamp) -> Stored<Counts>;
    /// How long commits took so far.
    fn commit_times(&self) -> Option<&Histogram>;
    /// How long was waited for a connection to the database so far.
    fn wait_times(&self) -> Option<&Histogram>;

    /// Whether other brokers may use this database, now or later.
    fn is_shared(&self) -> bool;
    /// False when another process of the same node has taken over since; then nothing is changed.
    async fn node_seen(&self, node: &Node) -> Stored<bool>;
    /// From now on this process speaks for the node.
    async fn take_node(&self, node: &Node) -> Stored<()>;
    async fn nodes(&self) -> Stored<Vec<Node>>;
    /// Asks another broker to say at once that it lives.
    async fn ask_for_beat(&self, node: &str) -> Stored<()>;
    /// The database's own clock, in milliseconds since 1970.
    async fn clock_millis(&self) -> Stored<i64>;
    /// Sets a value where there is none yet; answers with the one that counts for every broker.
    async fn agree(&self, name: &str, value: &str) -> Stored<String>;
    /// No broker may run.
    async fn rotate_master(&self, rotation: &MasterRotation) -> Stored<MasterRotated>;
    /// What is changed from now on, by any broker on a shared database, this one included.
    fn hints(&self) -> broadcast::Receiver<Hint>;
}
