//! The store in a database: one set of SQL, written so that SQLite and PostgreSQL read it alike.
//!
//! To add a query: a function in the file of its table that takes the connection, and a method of [`Store`] below that
//! runs it in a transaction or on a reader. The rules that keep one text valid for both databases:
//! - placeholders are `$1`, `$2`, …; whole numbers are bound as `i64` and booleans stored as 0 and 1;
//! - `IS NOT DISTINCT FROM` compares nullable values and `CASE` replaces `max(a, b)`;
//! - `sum(…)` needs `CAST(… AS BIGINT)`;
//! - a boolean parameter is bound as `bool`, and a boolean result is read as `CASE WHEN … THEN 1 ELSE 0 END`;
//! - a function that reads and then writes based on the result takes a lock first (`lock.rs`).

mod chain;
mod counts;
mod deleted;
mod downtime;
mod errors;
mod events;
mod group;
mod hint;
mod keys;
mod kinds;
pub mod lent;
mod lock;
mod nodes;
mod notes;
mod pools;
pub mod postgres;
mod principals;
mod quick;
mod recent;
mod rows;
mod sandboxes;
mod schema;
mod sessions;
mod shares;
mod snapshots;
pub mod sqlite;
mod tags;
mod templates;
mod tokens;
mod volumes;

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use cobox_protocol::{
    KeyId, SandboxId, SessionId, Timestamp,
    session::{Scope, State},
    tags::{TagFilter, Tags},
};
use cobox_token::Claims;
use sqlx::{AnyConnection, AnyPool};
use tokio::{sync::broadcast, time::timeout};
use tokio_util::task::AbortOnDropHandle;

use self::{
    chain::Chain,
    group::Group,
    lent::{Patience, Tx, gave_up},
    quick::Quick,
    recent::{Changes, Recent},
};
use super::{
    AddedKey, AddedSandbox, AuditGap, ChainHead, ChainLink, ChangedSandbox, Counting, Counts, DisabledPrincipal, DueBy, Ending, EnsureWish,
    Ensured, EventBounds, EventMarks, EventPage, ExpiringKey, Hint, Horizon, Leftover, MasterRotated, MasterRotation, Node, Note, PageWish,
    RestoredSandbox, RetiredToken, RevocationList, RevokeWish, RevokedKey, Rotated, Rotation, SandboxChange, SessionFilter, Shared, Store,
    StoreError, Stored, TakenHappenings, Viewer,
};
use crate::{
    domain::model::{ApiKey, AuditRecord, Event, Principal, PrincipalRecord, Sandbox, Session, SessionWithSandbox, Share},
    metrics::Histogram,
    policy::Quota,
};

/// The differences between the databases.
struct Engine {
    writers: AnyPool,
    /// For single statements, and for reads.
    quick: Quick,
    begin: &'static str,
    begin_unsynced: &'static str,
    /// Switches later statements back to synced commits, if the database needs that.
    sync: Option<&'static str>,
    /// No other process changes the database, so cached reads stay valid until this process writes.
    is_only_writer: bool,
    /// Receives the hints about changes of other brokers.
    hints: broadcast::Sender<Hint>,
    /// Number of connections opened so far.
    connections: Arc<AtomicU64>,
    patience: Patience,
    /// The task that receives hints.
    _listener: Option<AbortOnDropHandle<()>>,
}

/// The path of every change.
struct Base {
    engine: Engine,
    /// The writing connection is set to not wait for the disk. Only the holder of that connection changes this.
    is_unsynced: AtomicBool,
    changes: Changes,
    chain: Chain,
    commit_times: Histogram,
}

impl Base {
    async fn begin(&self) -> Stored<Tx> {
        Tx::begin(&self.engine.writers, self.engine.begin, self.engine.patience, &self.engine.quick.waits).await
    }

    /// As [`Base::begin`], but its commit only reaches the disk with the next synced one. For changes that a restart
    /// finds out by itself: intents and the states they led to. The response to a client always follows a later, synced
    /// commit.
    async fn begin_unsynced(self: &Arc<Self>) -> Stored<Tx> {
        let base = self.clone();
        // In a task: if the caller were cancelled half-way, the sync mode of the next change would be unknown.
        let beginning = tokio::spawn(async move {
            let begun = Tx::begin(&base.engine.writers, base.engine.begin_unsynced, base.engine.patience, &base.engine.quick.waits).await;
            base.is_unsynced.store(true, Ordering::SeqCst);
            begun
        });
        beginning.await.map_err(|_| StoreError::Unreachable("the broker is ending".to_owned()))?
    }

    /// For a single statement that is its own transaction: its commit must wait for the disk, independent of the previous
    /// change's mode.
    async fn sync_by(&self, writer: &mut AnyConnection) -> Stored<()> {
        if let Some(sync) = self.engine.sync.filter(|_| self.is_unsynced.load(Ordering::SeqCst)) {
            sqlx::raw_sql(sync).execute(writer).await?;
            self.is_unsynced.store(false, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Every change ends here. Its audit records become links of the chain.
    async fn commit(self: &Arc<Self>, mut tx: Tx) -> Stored<()> {
        let pending = chain::pending(&mut tx).await?;
        if pending.is_empty() {
            return self.finish(tx).await;
        }
        let base = self.clone();
        // In a task: if the caller were cancelled half-way, the end of the chain would be unknown.
        let linking = tokio::spawn(async move {
            let mut links = base.chain.lock(&mut tx).await?;
            let committing = async {
                chain::link_all(&mut tx, &pending, &mut links).await?;
                base.finish(tx).await
            };
            base.chain.in_time(committing).await?;
            links.are_committed();
            Ok(())
        });
        linking.await.map_err(|_| StoreError::Unreachable("the broker is ending".to_owned()))?
    }

    async fn finish(&self, tx: Tx) -> Stored<()> {
        // Also counts a failed commit: it may have reached the database.
        let _making = self.changes.making();
        self.commit_timed(tx).await
    }

    async fn commit_timed(&self, tx: Tx) -> Stored<()> {
        let began = Instant::now();
        let committed = tx.commit().await;
        self.commit_times.add(began.elapsed());
        committed
    }

    /// As [`Base::commit`], for a change with an event of a sandbox. On PostgreSQL the database sends the hint itself.
    async fn commit_news(self: &Arc<Self>, tx: Tx, sandbox: &SandboxId) -> Stored<()> {
        self.commit(tx).await?;
        self.tell_news(sandbox);
        Ok(())
    }

    fn tell_news(&self, sandbox: &SandboxId) {
        if self.engine.is_only_writer {
            // An error means that there is no receiver at the moment.
            let _ = self.engine.hints.send(Hint::News(sandbox.clone()));
        }
    }

    /// A connection whose packets are lost never fails by itself: limits a read to the time limit of a commit.
    async fn in_time<T>(&self, asked: impl Future<Output = Stored<T>>) -> Stored<T> {
        let within = self.engine.patience.commit;
        timeout(within, asked).await.unwrap_or_else(|_| Err(gave_up("an answer", within)))
    }
}

pub struct SqlStore {
    base: Arc<Base>,
    group: Group,
    known_keys: Recent<KeyId, Option<ApiKey>>,
    known_scopes: Recent<[String; 3], Option<SessionWithSandbox>>,
    known_sessions: Recent<SessionId, Option<SessionWithSandbox>>,
    known_sandboxes: Recent<SandboxId, Option<Sandbox>>,
    known_revocations: Recent<SandboxId, Arc<RevocationList>>,
}

impl SqlStore {
    fn new(engine: Engine) -> Self {
        let chain = Chain::new(engine.connections.clone(), engine.patience);
        let (changes, commit_times) = (Changes::default(), Histogram::default());
        let base = Arc::new(Base { engine, is_unsynced: AtomicBool::default(), changes, chain, commit_times });
        Self {
            group: Group::new(base.clone()),
            base,
            known_keys: Recent::default(),
            known_scopes: Recent::default(),
            known_sessions: Recent::default(),
            known_sandboxes: Recent::default(),
            known_revocations: Recent::default(),
        }
    }

    /// Whether every connection has been returned, for a test that is about to disturb them.
    #[doc(hidden)]
    pub fn is_at_rest(&self) -> bool {
        self.base.engine.writers.num_idle() == self.base.engine.writers.size() as usize && self.base.engine.quick.is_at_rest()
    }
}

impl SqlStore {
    /// Caches reads that every request needs, if no other process writes.
    async fn known<K, V>(&self, recent: &Recent<K, V>, key: K, moment: i64, ask: impl Future<Output = Stored<V>>) -> Stored<V>
    where
        K: Eq + Hash,
        V: Clone,
    {
        if !self.base.engine.is_only_writer {
            return ask.await;
        }
        recent.get(&self.base.changes, key, moment, ask).await
    }
}

/// Runs a read on a standalone connection. Several statements in it may see different states.
macro_rules! asked {
    ($store:ident, $db:ident => $ask:expr) => {{
        let mut taken = $store.base.engine.quick.take().await?;
        let $db = &mut *taken;
        let answer = $store.base.in_time($ask).await;
        taken.give_back(&answer);
        answer
    }};
}
use asked;

#[async_trait]
impl Store for SqlStore {
    async fn add_key(&self, key: &ApiKey, audit: &AuditRecord) -> Stored<AddedKey> {
        let mut tx = self.base.begin().await?;
        let added = keys::add(&mut tx, key, audit).await?;
        if matches!(added, AddedKey::Added) {
            self.base.commit(tx).await?;
        }
        Ok(added)
    }
    async fn key(&self, id: &KeyId) -> Stored<Option<ApiKey>> {
        let ask = async { asked!(self, db => keys::get(db, id)) };
        self.known(&self.known_keys, id.clone(), 0, ask).await
    }
    async fn key_and_session(&self, id: &KeyId, session: &SessionId) -> Stored<Option<(ApiKey, Option<SessionWithSandbox>)>> {
        if !self.base.engine.is_only_writer {
            return asked!(self, db => sessions::with_key(db, id, session));
        }
        // Each is cached, and is more often found than a combined entry would be.
        let Some(key) = self.key(id).await? else { return Ok(None) };
        Ok(Some((key, self.session(session).await?)))
    }
    async fn keys(&self, page: &PageWish) -> Stored<Vec<ApiKey>> {
        asked!(self, db => keys::list(db, page))
    }
    async fn expire_key(&self, id: &KeyId, at: Timestamp, audit: &AuditRecord) -> Stored<ExpiringKey> {
        let mut tx = self.base.begin().await?;
        let changed = keys::expire(&mut tx, id, at, audit).await?;
        self.base.commit(tx).await?;
        Ok(changed)
    }
    async fn revoke_key(&self, id: &KeyId, ending: &Ending) -> Stored<RevokedKey> {
        let mut tx = self.base.begin().await?;
        let revoked = keys::revoke(&mut tx, id, ending).await?;
        self.base.commit(tx).await?;
        Ok(revoked)
    }
    async fn identity(&self, principal: &Principal, hash: &[u8; 32]) -> Stored<Option<ApiKey>> {
        asked!(self, db => keys::of_identity(db, principal, hash))
    }
    async fn principals(&self, workspace: &str, now: Timestamp, page: &PageWish) -> Stored<Vec<PrincipalRecord>> {
        asked!(self, db => principals::list(db, workspace, now.unix(), page))
    }
    async fn has_valid_key(&self, workspace: &str, name: &str, now: Timestamp) -> Stored<bool> {
        asked!(self, db => principals::has_valid_key(db, workspace, name, now.unix()))
    }
    async fn disable_principal(&self, workspace: &str, name: &str, ending: &Ending) -> Stored<DisabledPrincipal> {
        let mut tx = self.base.begin().await?;
        let disabled = principals::disable(&mut tx, workspace, name, ending).await?;
        self.base.commit(tx).await?;
        Ok(disabled)
    }
    async fn enable_principal(&self, workspace: &str, name: &str, audit: &AuditRecord) -> Stored<bool> {
        let mut tx = self.base.begin().await?;
        let is_there = principals::enable(&mut tx, workspace, name, audit).await?;
        self.base.commit(tx).await?;
        Ok(is_there)
    }

    async fn ensure(&self, wish: &EnsureWish) -> Stored<Ensured> {
        let mut tx = self.base.begin_unsynced().await?;
        let ensured = sessions::ensure(&mut tx, wish).await?;
        self.base.commit_news(tx, &wish.fresh.sandbox.id).await?;
        Ok(ensured)
    }
    async fn session_of(&self, workspace: &str, scope_type: &str, scope_id: &str) -> Stored<Option<SessionWithSandbox>> {
        let ask = async { asked!(self, db => sessions::of_scope(db, workspace, scope_type, scope_id)) };
        self.known(&self.known_scopes, [workspace, scope_type, scope_id].map(str::to_owned), 0, ask).await
    }
    async fn last_session_of(&self, workspace: &str, scope: &Scope) -> Stored<Option<SessionWithSandbox>> {
        asked!(self, db => sessions::last_of_scope(db, workspace, scope))
    }
    async fn session(&self, id: &SessionId) -> Stored<Option<SessionWithSandbox>> {
        let ask = async { asked!(self, db => sessions::get(db, id)) };
        self.known(&self.known_sessions, id.clone(), 0, ask).await
    }
    async fn sessions(&self, viewer: &Viewer, filter: &SessionFilter, page: &PageWish) -> Stored<Vec<SessionWithSandbox>> {
        asked!(self, db => sessions::list(db, viewer, filter, page))
    }
    async fn sessions_on(&self, sandbox: &SandboxId) -> Stored<Vec<Session>> {
        asked!(self, db => sessions::on_sandbox(db, sandbox))
    }
    async fn past_threads(&self, sandbox: &SandboxId, limit: u32) -> Stored<Vec<String>> {
        asked!(self, db => sessions::past_threads(db, sandbox, limit))
    }
    async fn end_session(&self, id: &SessionId, ending: &Ending) -> Stored<Option<Leftover>> {
        let mut tx = self.base.begin().await?;
        let ended = sessions::end(&mut tx, id, ending).await?;
        self.base.commit(tx).await?;
        Ok(ended.map(|(leftover, sandbox)| {
            self.base.tell_news(&sandbox);
            leftover
        }))
    }

    async fn session_tags(&self, ids: &[&SessionId]) -> Stored<HashMap<String, Tags>> {
        let ids: Vec<&str> = ids.iter().map(|id| id.as_str()).collect();
        asked!(self, db => tags::of(db, tags::On::Session, &ids))
    }

    async fn add_sandbox(&self, sandbox: &Sandbox, tags: &Tags, quota: &Quota, audit: &AuditRecord) -> Stored<AddedSandbox> {
        let mut tx = self.base.begin().await?;
        let added = sandboxes::add(&mut tx, sandbox, tags, quota, audit).await?;
        self.base.commit(tx).await?;
        Ok(added)
    }
    async fn change_sandbox(&self, id: &SandboxId, change: &SandboxChange, audit: &AuditRecord) -> Stored<ChangedSandbox> {
        let mut tx = self.base.begin().await?;
        let changed = sandboxes::change(&mut tx, id, change, audit).await?;
        if matches!(changed, ChangedSandbox::Changed(_)) {
            self.base.commit_news(tx, id).await?;
        }
        Ok(changed)
    }
    async fn sandbox(&self, id: &SandboxId) -> Stored<Option<Sandbox>> {
        let ask = async { asked!(self, db => sandboxes::get(db, id)) };
        self.known(&self.known_sandboxes, id.clone(), 0, ask).await
    }
    async fn sandbox_named(&self, workspace: &str, name: &str) -> Stored<Option<Sandbox>> {
        asked!(self, db => sandboxes::named(db, workspace, name))
    }
    async fn sandbox_once_named(&self, workspace: &str, name: &str) -> Stored<Option<Sandbox>> {
        asked!(self, db => sandboxes::once_named(db, workspace, name))
    }
    async fn sandboxes(&self, viewer: &Viewer, tags: &[TagFilter], page: &PageWish) -> Stored<Vec<Sandbox>> {
        asked!(self, db => sandboxes::list(db, viewer, tags, page))
    }
    async fn deleted_sandboxes(&self, viewer: &Viewer, now: Timestamp, page: &PageWish) -> Stored<Vec<Sandbox>> {
        asked!(self, db => deleted::list(db, viewer, now, page))
    }
    async fn restore_sandbox(&self, id: &SandboxId, name: Option<&str>, now: Timestamp, audit: &AuditRecord) -> Stored<RestoredSandbox> {
        let mut tx = self.base.begin().await?;
        let restored = deleted::restore(&mut tx, id, name, now, audit).await?;
        if matches!(restored, RestoredSandbox::Restored(_)) {
            self.base.commit_news(tx, id).await?;
        }
        Ok(restored)
    }
    async fn least_used(&self, workspace: &str, owner: &str, limit: u32) -> Stored<Vec<Sandbox>> {
        asked!(self, db => sandboxes::least_used(db, workspace, owner, limit))
    }
    async fn sandbox_tags(&self, ids: &[&SandboxId]) -> Stored<HashMap<String, Tags>> {
        let ids: Vec<&str> = ids.iter().map(|id| id.as_str()).collect();
        asked!(self, db => tags::of(db, tags::On::Sandbox, &ids))
    }
    async fn sandboxes_of_node(&self, node: &str) -> Stored<Vec<Sandbox>> {
        asked!(self, db => sandboxes::of_node(db, node))
    }
    async fn sandboxes_due(&self, node: &str, by: DueBy) -> Stored<Vec<Sandbox>> {
        asked!(self, db => sandboxes::due(db, node, by))
    }
    async fn running_in(&self, workspace: &str, node: &str) -> Stored<Vec<SandboxId>> {
        asked!(self, db => sandboxes::running_in(db, workspace, node))
    }
    async fn has_sandboxes(&self, node: Option<&str>) -> Stored<bool> {
        asked!(self, db => sandboxes::any(db, node))
    }
    async fn replace_sandbox(&self, old: &Sandbox, new: &Sandbox, audit: Option<&AuditRecord>) -> Stored<bool> {
        let mut tx = self.base.begin_unsynced().await?;
        let is_replaced = sandboxes::replace(&mut tx, old, new).await?;
        if let (true, Some(audit)) = (is_replaced, audit) {
            notes::audit(&mut tx, audit).await?;
        }
        self.base.commit_news(tx, &new.id).await?;
        Ok(is_replaced)
    }
    async fn count_running(&self, node: &str, now: Timestamp, counting: Counting) -> Stored<()> {
        let mut tx = self.base.begin_unsynced().await?;
        sandboxes::count_running(&mut tx, node, now, counting).await?;
        self.base.commit(tx).await
    }
    async fn count_downtime(&self, node: &str, now: Timestamp, counting: Counting) -> Stored<Duration> {
        let mut tx = self.base.begin_unsynced().await?;
        let downtime = downtime::count(&mut tx, node, now, counting).await?;
        self.base.commit(tx).await?;
        Ok(downtime)
    }
    async fn renew_sandbox(&self, id: &SandboxId) -> Stored<()> {
        let mut tx = self.base.begin().await?;
        sandboxes::renew(&mut tx, id).await?;
        self.base.commit(tx).await
    }
    async fn end_sandbox(&self, id: &SandboxId, state: State, ending: &Ending) -> Stored<Option<Sandbox>> {
        let mut tx = self.base.begin().await?;
        let ended = sandboxes::end(&mut tx, id, state, ending).await?;
        self.base.commit_news(tx, id).await?;
        Ok(ended)
    }
    async fn end_unbound_sandbox(&self, id: &SandboxId, ending: &Ending) -> Stored<Option<Sandbox>> {
        let mut tx = self.base.begin().await?;
        let ended = sandboxes::end_unbound(&mut tx, id, ending).await?;
        self.base.commit_news(tx, id).await?;
        Ok(ended)
    }

    fn changes(&self) -> Option<u64> {
        self.base.engine.is_only_writer.then(|| self.base.changes.count())
    }
    async fn revocations(&self, sandbox: &Sandbox, now: Timestamp) -> Stored<Arc<RevocationList>> {
        let ask = async { asked!(self, db => notes::revocations(db, sandbox, now)).map(Arc::new) };
        // Keyed by the second, because revocations start and end by themselves.
        self.known(&self.known_revocations, sandbox.id.clone(), now.unix(), ask).await
    }
    async fn retire_token(&self, token: &RetiredToken) -> Stored<bool> {
        let mut tx = self.base.begin().await?;
        let is_retired = notes::retire(&mut tx, token).await?;
        self.base.commit(tx).await?;
        Ok(is_retired)
    }
    async fn workspace_of_token(&self, jti: &str) -> Stored<Option<String>> {
        asked!(self, db => tokens::workspace_of(db, jti))
    }
    async fn revoke(&self, wish: &RevokeWish) -> Stored<u64> {
        let mut tx = self.base.begin().await?;
        let sequence = tokens::revoke(&mut tx, wish).await?;
        self.base.commit(tx).await?;
        Ok(sequence)
    }
    async fn rotate_key(&self, id: &SandboxId, rotation: &Rotation, audit: &AuditRecord) -> Stored<Rotated> {
        let mut tx = self.base.begin().await?;
        let rotated = sandboxes::rotate(&mut tx, id, rotation, audit).await?;
        self.base.commit(tx).await?;
        Ok(rotated)
    }
    async fn opaque_token(&self, hash: &[u8; 32]) -> Stored<Option<Claims>> {
        asked!(self, db => tokens::opaque(db, hash))
    }

    async fn principal(&self, workspace: &str, name: &str) -> Stored<Option<Principal>> {
        asked!(self, db => keys::principal(db, workspace, name))
    }
    async fn share(&self, share: &Share, max: u32, ending: &Ending) -> Stored<Shared> {
        let mut tx = self.base.begin().await?;
        let shared = shares::add(&mut tx, share, max, ending).await?;
        self.base.commit(tx).await?;
        Ok(shared)
    }
    async fn share_of(&self, session: &SessionId, principal: &str) -> Stored<Option<Share>> {
        asked!(self, db => shares::of(db, session, principal))
    }
    async fn shares(&self, session: &SessionId) -> Stored<Vec<Share>> {
        asked!(self, db => shares::list(db, session))
    }
    async fn shares_on(&self, sandbox: &SandboxId) -> Stored<Vec<Share>> {
        asked!(self, db => shares::on_sandbox(db, sandbox))
    }
    async fn unshare(&self, session: &SessionId, principal: &str, ending: &Ending) -> Stored<Option<Share>> {
        let mut tx = self.base.begin().await?;
        let ended = shares::remove(&mut tx, session, principal, ending).await?;
        self.base.commit(tx).await?;
        Ok(ended)
    }

    async fn note(&self, note: &Note) -> Stored<()> {
        if note.sandboxes.is_empty() && note.keys.is_empty() && note.tokens.is_empty() && note.audit.is_empty() {
            return Ok(());
        }
        self.group.write(note.clone()).await
    }
    async fn prune(&self, horizon: &Horizon) -> Stored<()> {
        let mut tx = self.base.begin().await?;
        notes::prune(&mut tx, horizon, self.base.chain.sealing()).await?;
        self.base.commit(tx).await
    }
    async fn audit(&self, workspace: &str, sandbox: Option<&SandboxId>, page: &PageWish) -> Stored<Vec<(u64, AuditRecord)>> {
        asked!(self, db => notes::newest(db, workspace, sandbox, None, page))
    }
    async fn audit_of_token(&self, workspace: &str, jti: &str, page: &PageWish) -> Stored<Vec<(u64, AuditRecord)>> {
        asked!(self, db => notes::newest(db, workspace, None, Some(jti), page))
    }
    fn write_as(&self, writer: &str) {
        self.base.chain.write_as(writer);
    }
    fn seal_with(&self, key: [u8; 32]) {
        self.base.chain.seal_with(key);
    }
    fn skip_audit(&self, count: u64) {
        self.base.chain.skip(count);
    }
    fn audit_gap(&self) -> AuditGap {
        self.base.chain.gap()
    }
    fn set_audit_gap(&self, gap: AuditGap) {
        self.base.chain.set_gap(gap);
    }
    async fn audit_progress(&self) -> super::AuditProgress {
        // The records first: if the head is newer than them, the rest follows next time.
        let records = self.base.chain.take_marked();
        super::AuditProgress { head: self.base.chain.head().await, records }
    }
    async fn audit_heads(&self) -> Stored<Vec<ChainHead>> {
        let own = self.base.chain.head().await;
        let mut heads = asked!(self, db => chain::heads(db, self.base.chain.sealing()))?;
        if let (Some((number, hash)), Some(head)) = (own, heads.iter_mut().find(|h| h.writer == self.base.chain.writer()))
            && number > head.number
        {
            // The database has less than was written to it.
            (head.number, head.hash) = (number, hash);
        }
        Ok(heads)
    }
    async fn audit_links(&self, writer: &str, after: u64, limit: u32) -> Stored<Vec<ChainLink>> {
        asked!(self, db => chain::links(db, writer, after, limit))
    }

    async fn append_events(&self, events: &[Event]) -> Stored<()> {
        let Some(first) = events.first() else { return Ok(()) };
        let mut tx = self.base.begin_unsynced().await?;
        lock::workspace(&mut tx, &first.workspace).await?;
        events::append(&mut tx, events).await?;
        self.base.commit_news(tx, &first.sandbox).await
    }
    async fn take_happenings(&self, taken: &TakenHappenings) -> Stored<()> {
        let mut tx = self.base.begin_unsynced().await?;
        events::take(&mut tx, taken).await?;
        self.base.commit_news(tx, &taken.sandbox).await
    }
    async fn events(&self, sandbox: &SandboxId, session: &SessionId, after: u64, limit: u32) -> Stored<EventPage> {
        asked!(self, db => events::after(db, sandbox, session, after, limit))
    }
    async fn event_bounds(&self, sandbox: &SandboxId, session: &SessionId) -> Stored<EventBounds> {
        asked!(self, db => events::bounds(db, sandbox, session))
    }
    async fn event_marks(&self, sandbox: &SandboxId) -> Stored<EventMarks> {
        asked!(self, db => events::marks(db, sandbox))
    }
    async fn prune_events(&self, before: Timestamp, keep: u32) -> Stored<()> {
        let mut tx = self.base.begin_unsynced().await?;
        if lock::is_alone(&mut tx, "prune events").await? {
            events::prune(&mut tx, before, keep).await?;
        }
        self.base.commit(tx).await
    }
    async fn trim_events(&self, workspace: &str, keep: u32) -> Stored<()> {
        let mut tx = self.base.begin_unsynced().await?;
        if lock::is_alone(&mut tx, "prune events").await? {
            events::trim(&mut tx, workspace, keep).await?;
        }
        self.base.commit(tx).await
    }

    async fn probe_write(&self, now: Timestamp) -> Stored<()> {
        let mut tx = self.base.begin().await?;
        nodes::probe(&mut tx, now).await?;
        // No query reads it, so cached reads stay valid.
        self.base.commit_timed(tx).await
    }
    async fn counts(&self, now: Timestamp) -> Stored<Counts> {
        asked!(self, db => counts::all(db, now))
    }
    fn commit_times(&self) -> Option<&Histogram> {
        Some(&self.base.commit_times)
    }
    fn wait_times(&self) -> Option<&Histogram> {
        Some(&self.base.engine.quick.waits)
    }

    fn is_shared(&self) -> bool {
        !self.base.engine.is_only_writer
    }
    async fn node_seen(&self, node: &Node) -> Stored<bool> {
        let mut tx = self.base.begin_unsynced().await?;
        let is_same = nodes::seen(&mut tx, node).await?;
        self.base.commit(tx).await?;
        Ok(is_same)
    }
    async fn take_node(&self, node: &Node) -> Stored<()> {
        let mut tx = self.base.begin().await?;
        nodes::take(&mut tx, node).await?;
        self.base.commit(tx).await
    }
    async fn nodes(&self) -> Stored<Vec<Node>> {
        asked!(self, db => nodes::all(db))
    }
    async fn ask_for_beat(&self, node: &str) -> Stored<()> {
        let hint = Hint::Beat(node.to_owned());
        asked!(self, db => hint::send(db, &hint))
    }
    async fn clock_millis(&self) -> Stored<i64> {
        asked!(self, db => nodes::clock_millis(db))
    }
    async fn agree(&self, name: &str, value: &str) -> Stored<String> {
        let mut tx = self.base.begin().await?;
        let agreed = nodes::agree(&mut tx, name, value).await?;
        self.base.commit(tx).await?;
        Ok(agreed)
    }
    async fn rotate_master(&self, rotation: &MasterRotation) -> Stored<MasterRotated> {
        let mut tx = self.base.begin().await?;
        let rotated = tokens::rotate_master(&mut tx, rotation).await?;
        self.base.commit(tx).await?;
        Ok(rotated)
    }
    fn hints(&self) -> broadcast::Receiver<Hint> {
        self.base.engine.hints.subscribe()
    }
}
