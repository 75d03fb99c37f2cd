//! The broker's persistent store, as the domain uses it: each method is one transaction, durable when it returns.

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
    domain::model::{ApiKey, AuditRecord, Event, Principal, PrincipalRecord, Sandbox, Session, SessionWithSandbox, Share},
    metrics::Histogram,
    policy::Quota,
};

pub use kinds::*;
pub use words::*;

#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the database failed: {0}")]
    Failed(String),
    /// The connection is unusable.
    #[error("the database can't be reached: {0}")]
    Unreachable(String),
    /// The connection works, but the database can't do this now: its disk is full, its filesystem is read-only, or it is
    /// overloaded.
    #[error("the database is unavailable: {0}")]
    Unavailable(String),
    #[error("the database holds something unreadable: {0}")]
    Corrupt(String),
}

pub type Stored<T> = Result<T, StoreError>;

#[async_trait]
pub trait Store: KindStore + Send + Sync {
    /// Creates workspace and principal if they don't exist yet.
    async fn add_key(&self, key: &ApiKey, audit: &AuditRecord) -> Stored<AddedKey>;
    async fn key(&self, id: &KeyId) -> Stored<Option<ApiKey>>;
    /// A key, together with the session that the request will probably need next.
    async fn key_and_session(&self, id: &KeyId, session: &SessionId) -> Stored<Option<(ApiKey, Option<SessionWithSandbox>)>>;
    async fn keys(&self, page: &PageWish) -> Stored<Vec<ApiKey>>;
    /// Sets when a key expires, unless there is no such key or it has ended.
    async fn expire_key(&self, id: &KeyId, at: Timestamp, audit: &AuditRecord) -> Stored<ExpiringKey>;
    /// Ends the key and the tokens issued under it.
    async fn revoke_key(&self, id: &KeyId, ending: &Ending) -> Stored<RevokedKey>;
    /// The stored key of an identity, revoked or not; its hash is of issuer and subject.
    async fn identity(&self, principal: &Principal, hash: &[u8; 32]) -> Stored<Option<ApiKey>>;
    /// By name; the page's cursor is the last name seen.
    async fn principals(&self, workspace: &str, now: Timestamp, page: &PageWish) -> Stored<Vec<PrincipalRecord>>;
    /// Whether the principal can still authenticate with a valid key or identity.
    async fn has_valid_key(&self, workspace: &str, name: &str, now: Timestamp) -> Stored<bool>;
    /// Ends its keys, its identities and all its tokens.
    async fn disable_principal(&self, workspace: &str, name: &str, ending: &Ending) -> Stored<DisabledPrincipal>;
    /// Ended credentials stay ended; new keys can be created and identities can sign in again. False when there is no
    /// such principal.
    async fn enable_principal(&self, workspace: &str, name: &str, audit: &AuditRecord) -> Stored<bool>;

    async fn ensure(&self, wish: &EnsureWish) -> Stored<Ensured>;
    /// The live session of a scope.
    async fn session_of(&self, workspace: &str, scope_type: &str, scope_id: &str) -> Stored<Option<SessionWithSandbox>>;
    /// The latest ended session of a scope.
    async fn last_session_of(&self, workspace: &str, scope: &Scope) -> Stored<Option<SessionWithSandbox>>;
    /// A session, ended or not.
    async fn session(&self, id: &SessionId) -> Stored<Option<SessionWithSandbox>>;
    async fn sessions(&self, viewer: &Viewer, filter: &SessionFilter, page: &PageWish) -> Stored<Vec<SessionWithSandbox>>;
    /// The live sessions of a sandbox, newest first.
    async fn sessions_on(&self, sandbox: &SandboxId) -> Stored<Vec<Session>>;
    /// The threads whose sessions on a sandbox have ended, each once, the latest first.
    async fn past_threads(&self, sandbox: &SandboxId, limit: u32) -> Stored<Vec<String>>;
    /// `None` when it has ended already.
    async fn end_session(&self, id: &SessionId, ending: &Ending) -> Stored<Option<Leftover>>;

    /// Tags by session id; sessions without tags are left out.
    async fn session_tags(&self, ids: &[&SessionId]) -> Stored<HashMap<String, Tags>>;

    async fn add_sandbox(&self, sandbox: &Sandbox, tags: &Tags, quota: &Quota, audit: &AuditRecord) -> Stored<AddedSandbox>;
    /// If access changes to owner-only, the sandbox gets its next key, which ends all its tokens.
    async fn change_sandbox(&self, id: &SandboxId, change: &SandboxChange, audit: &AuditRecord) -> Stored<ChangedSandbox>;
    /// A sandbox, ended or not.
    async fn sandbox(&self, id: &SandboxId) -> Stored<Option<Sandbox>>;
    /// A live sandbox.
    async fn sandbox_named(&self, workspace: &str, name: &str) -> Stored<Option<Sandbox>>;
    /// Of the ended sandboxes that had the name, the one that ended last.
    async fn sandbox_once_named(&self, workspace: &str, name: &str) -> Stored<Option<Sandbox>>;
    /// The live sandboxes that have all these tags, or are used by a session that has them.
    async fn sandboxes(&self, viewer: &Viewer, tags: &[TagFilter], page: &PageWish) -> Stored<Vec<Sandbox>>;
    /// Deleted sandboxes whose files are still kept, newest first.
    async fn deleted_sandboxes(&self, viewer: &Viewer, now: Timestamp, page: &PageWish) -> Stored<Vec<Sandbox>>;
    /// Makes a deleted sandbox a suspended one again, under `name`, with a new key: tokens from before the deletion stay
    /// invalid.
    async fn restore_sandbox(&self, id: &SandboxId, name: Option<&str>, now: Timestamp, audit: &AuditRecord) -> Stored<RestoredSandbox>;
    /// An owner's live sandboxes, the least recently used first.
    async fn least_used(&self, workspace: &str, owner: &str, limit: u32) -> Stored<Vec<Sandbox>>;
    async fn sandbox_tags(&self, ids: &[&SandboxId]) -> Stored<HashMap<String, Tags>>;
    /// All sandboxes of a node that are live, can be restored, or have unfinished work.
    async fn sandboxes_of_node(&self, node: &str) -> Stored<Vec<Sandbox>>;
    /// Sandboxes of a node that the reaper must check: they run, have unfinished work, or were suspended or deleted for
    /// longer than they are kept.
    async fn sandboxes_due(&self, node: &str, by: DueBy) -> Stored<Vec<Sandbox>>;
    /// Running sandboxes of a workspace on a node, which must receive its revocations.
    async fn running_in(&self, workspace: &str, node: &str) -> Stored<Vec<SandboxId>>;
    /// Whether there is any record of a sandbox (of a node), ended ones included: whether this store has been in use.
    async fn has_sandboxes(&self, node: Option<&str>) -> Stored<bool>;
    /// Replaces `old` by `new` if state and intent are still those of `old`; returns whether they were. The last use only
    /// moves forward.
    async fn replace_sandbox(&self, old: &Sandbox, new: &Sandbox, audit: Option<&AuditRecord>) -> Stored<bool>;
    /// Adds the time since the last count to the running time of each running sandbox of a node that is due for it.
    async fn count_running(&self, node: &str, now: Timestamp, counting: Counting) -> Stored<()>;
    /// Excludes time in which the node's broker did not run from the retention of its suspended and deleted sandboxes.
    /// Returns that time since the last call. Call before [`Store::sandboxes_due`].
    async fn count_downtime(&self, node: &str, now: Timestamp, counting: Counting) -> Stored<Duration>;
    /// Resets a suspended sandbox's running time, unless a session is bound to it.
    async fn renew_sandbox(&self, id: &SandboxId) -> Stored<()>;
    /// Ends a sandbox (`terminated` or `failed`) with its sessions, and stores the intent to destroy it. `None` when it
    /// has ended already.
    async fn end_sandbox(&self, id: &SandboxId, state: State, ending: &Ending) -> Stored<Option<Sandbox>>;

    /// As [`Store::end_sandbox`], unless a session is bound to it.
    async fn end_unbound_sandbox(&self, id: &SandboxId, ending: &Ending) -> Stored<Option<Sandbox>>;

    /// Number of changes, if this process is the only writer: while it stays the same, answers differ only by the passing
    /// of time.
    fn changes(&self) -> Option<u64>;

    /// A sandbox that would exceed the revocation limit gets its next key instead, which ends all its tokens.
    async fn revocations(&self, sandbox: &Sandbox, now: Timestamp) -> Stored<Arc<RevocationList>>;
    /// False when the sandbox has too many revocations for that.
    async fn retire_token(&self, token: &RetiredToken) -> Stored<bool>;
    /// The workspace in which a token was issued or a share was created, while it is on record.
    async fn workspace_of_token(&self, jti: &str) -> Stored<Option<String>>;
    /// Returns the sequence number of the revocation.
    async fn revoke(&self, wish: &RevokeWish) -> Stored<u64>;
    async fn rotate_key(&self, id: &SandboxId, rotation: &Rotation, audit: &AuditRecord) -> Stored<Rotated>;
    async fn opaque_token(&self, hash: &[u8; 32]) -> Stored<Option<Claims>>;

    async fn principal(&self, workspace: &str, name: &str) -> Stored<Option<Principal>>;
    /// A share that reduces access ends the tokens issued through the previous one.
    async fn share(&self, share: &Share, max: u32, ending: &Ending) -> Stored<Shared>;
    async fn share_of(&self, session: &SessionId, principal: &str) -> Stored<Option<Share>>;
    /// By principal.
    async fn shares(&self, session: &SessionId) -> Stored<Vec<Share>>;
    /// Shares of all live sessions that use a sandbox.
    async fn shares_on(&self, sandbox: &SandboxId) -> Stored<Vec<Share>>;
    /// Ends a share and the tokens issued through it. `None` when there is none.
    async fn unshare(&self, session: &SessionId, principal: &str, ending: &Ending) -> Stored<Option<Share>>;

    /// Concurrent calls share a commit.
    async fn note(&self, note: &Note) -> Stored<()>;
    /// Does nothing while another broker prunes.
    async fn prune(&self, horizon: &Horizon) -> Stored<()>;
    /// Audit records of a workspace with their sequence numbers, newest first; the page's cursor is such a number.
    async fn audit(&self, workspace: &str, sandbox: Option<&SandboxId>, page: &PageWish) -> Stored<Vec<(u64, AuditRecord)>>;
    /// As [`Store::audit`], for one token.
    async fn audit_of_token(&self, workspace: &str, jti: &str, page: &PageWish) -> Stored<Vec<(u64, AuditRecord)>>;
    /// Sets the writer whose chain this store's audit records are linked into. Must be called before anything is written.
    fn write_as(&self, writer: &str);
    /// Sets the key that signs the removal of old records. Must be called before anything is removed.
    fn seal_with(&self, key: [u8; 32]);
    /// Leaves a gap of `count` numbers before the next record of this store's own chain, for records that could not be
    /// written.
    fn skip_audit(&self, count: u64);
    /// The gap that the next record will leave; its count is 0 if there is none.
    fn audit_gap(&self) -> AuditGap;
    /// Sets the gap of a process that ended before it wrote the next record. Must be called before anything is written.
    fn set_audit_gap(&self, gap: AuditGap);
    /// End of this store's own chain, and the records committed since the last call that a data directory keeps in its
    /// mark.
    async fn audit_progress(&self) -> AuditProgress;
    /// The end of every chain of audit records. For this store's own chain, as far as this process has written it.
    async fn audit_heads(&self) -> Stored<Vec<ChainHead>>;
    /// A chain's links after a number, oldest first.
    async fn audit_links(&self, writer: &str, after: u64, limit: u32) -> Stored<Vec<ChainLink>>;

    /// All of one sandbox. Events of session and sandbox changes are appended together with the change itself.
    async fn append_events(&self, events: &[Event]) -> Stored<()>;
    /// Appends the new entries of a sandbox's activity feed.
    async fn take_happenings(&self, taken: &TakenHappenings) -> Stored<()>;
    /// Events of a session and its sandbox after a number, oldest first.
    async fn events(&self, sandbox: &SandboxId, session: &SessionId, after: u64, limit: u32) -> Stored<EventPage>;
    async fn event_bounds(&self, sandbox: &SandboxId, session: &SessionId) -> Stored<EventBounds>;
    async fn event_marks(&self, sandbox: &SandboxId) -> Stored<EventMarks>;
    /// Removes older events, and all but the `keep` newest of each workspace. Does nothing while another broker prunes.
    async fn prune_events(&self, before: Timestamp, keep: u32) -> Stored<()>;
    /// Removes all but the `keep` newest events of a workspace.
    async fn trim_events(&self, workspace: &str, keep: u32) -> Stored<()>;

    /// Writes and commits a few bytes, to check that the database accepts changes.
    async fn probe_write(&self, now: Timestamp) -> Stored<()>;
    async fn counts(&self, now: Timestamp) -> Stored<Counts>;
    /// Histogram of commit durations.
    fn commit_times(&self) -> Option<&Histogram>;
    /// Histogram of waiting times for a database connection.
    fn wait_times(&self) -> Option<&Histogram>;

    /// Whether other brokers may use this database, now or later.
    fn is_shared(&self) -> bool;
    /// Writes a heartbeat. False when another process has claimed the node since; then nothing is changed.
    async fn node_seen(&self, node: &Node) -> Stored<bool>;
    /// Claims the node for this process.
    async fn take_node(&self, node: &Node) -> Stored<()>;
    async fn nodes(&self) -> Stored<Vec<Node>>;
    /// Asks another broker for an immediate heartbeat.
    async fn ask_for_beat(&self, node: &str) -> Stored<()>;
    /// The database's own clock, in milliseconds since 1970.
    async fn clock_millis(&self) -> Stored<i64>;
    /// Sets a value if there is none yet; returns the one that is valid for every broker.
    async fn agree(&self, name: &str, value: &str) -> Stored<String>;
    /// No broker may run.
    async fn rotate_master(&self, rotation: &MasterRotation) -> Stored<MasterRotated>;
    /// Receives the changes made from now on by any broker on a shared database, this one included.
    fn hints(&self) -> broadcast::Receiver<Hint>;
}
