//! The broker's persistent store in a database: each method is one transaction, durable when it returns. One set of SQL,
//! written so that SQLite and PostgreSQL read it alike.
//!
//! To add a query: a function in the file of its table that takes the connection, and beside it a method of [`Store`]
//! that runs it in a transaction or on a reader. The rules that keep one text valid for both databases:
//! - placeholders are `$1`, `$2`, …; whole numbers are bound as `i64` and booleans stored as 0 and 1;
//! - `IS NOT DISTINCT FROM` compares nullable values and `CASE` replaces `max(a, b)`;
//! - `sum(…)` needs `CAST(… AS BIGINT)`;
//! - a boolean parameter is bound as `bool`, and a boolean result is read as `CASE WHEN … THEN 1 ELSE 0 END`;
//! - a function that reads and then writes based on the result takes a lock first (`lock.rs`).

mod audit_chain;
mod audit_records;
mod audit_types;
mod batched_writes;
mod counts;
mod deleted;
mod errors;
mod events;
mod keys;
mod lock;
mod multi_row;
mod nodes;
mod notify;
mod pools;
pub mod postgres;
mod principals;
mod read_cache;
mod resource_types;
mod resources;
mod revocations;
mod rows;
mod running_time;
mod sandboxes;
mod schema;
mod sessions;
mod shares;
mod snapshots;
pub mod sqlite;
mod statement_connections;
mod tags;
mod templates;
mod tokens;
pub mod transaction;
mod types;
mod usage;
mod volumes;

use std::{
    hash::Hash,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use cobox_protocol::{KeyId, SandboxId, SessionId};
use sqlx::{AnyConnection, AnyPool};
use tokio::{sync::broadcast, time::timeout};
use tokio_util::task::AbortOnDropHandle;

use self::{
    audit_chain::Chain,
    batched_writes::BatchWriter,
    read_cache::{ChangeCounter, ReadCache},
    statement_connections::StatementConnections,
    transaction::{DatabaseTimeouts, Transaction, timed_out},
};
use crate::{
    domain::model::{ApiKey, Sandbox, SessionWithSandbox},
    metrics::Histogram,
};

pub use audit_types::*;
pub use resource_types::*;
pub use types::*;

#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the database failed: {0}")]
    Failed(String),
    /// The connection is unusable.
    #[error("the database can't be reached: {0}")]
    Unreachable(String),
    /// The connection works, but the database can't do this now: its disk is full, its filesystem is read-only, it is
    /// overloaded, or it is being restored.
    #[error("the database is unavailable: {0}")]
    Unavailable(String),
    #[error("the database contains an unreadable value: {0}")]
    Corrupt(String),
}

pub type Stored<T> = Result<T, StoreError>;

/// The differences between the databases.
struct Engine {
    writers: AnyPool,
    /// For single statements, and for reads.
    statements: StatementConnections,
    begin: &'static str,
    begin_unsynced: &'static str,
    /// Switches later statements back to synced commits, if the database needs that.
    sync: Option<&'static str>,
    /// No other process changes the database, so cached reads stay valid until this process writes.
    is_only_writer: bool,
    /// Receives the notices about changes of other brokers.
    notices: broadcast::Sender<ChangeNotice>,
    /// Number of connections opened so far.
    connections: Arc<AtomicU64>,
    timeouts: DatabaseTimeouts,
    /// The task that receives notices.
    _listener: Option<AbortOnDropHandle<()>>,
}

/// Commits every change.
struct StoreInner {
    engine: Engine,
    /// The writing connection is set to not wait for the disk. Only the holder of that connection changes this.
    is_unsynced: AtomicBool,
    changes: ChangeCounter,
    chain: Chain,
    commit_times: Histogram,
}

impl StoreInner {
    async fn begin(&self) -> Stored<Transaction> {
        Transaction::begin(&self.engine.writers, self.engine.begin, self.engine.timeouts, &self.engine.statements.waits).await
    }

    /// As [`StoreInner::begin`], but its commit only reaches the disk with the next synced one. For changes that a restart
    /// finds out by itself: intents and the states they led to. The response to a client always follows a later, synced
    /// commit.
    async fn begin_unsynced(self: &Arc<Self>) -> Stored<Transaction> {
        let base = self.clone();
        // In a task: if the caller were cancelled half-way, the sync mode of the next change would be unknown.
        let beginning = tokio::spawn(async move {
            let begun =
                Transaction::begin(&base.engine.writers, base.engine.begin_unsynced, base.engine.timeouts, &base.engine.statements.waits)
                    .await;
            base.is_unsynced.store(true, Ordering::SeqCst);
            begun
        });
        beginning.await.map_err(|_| StoreError::Unreachable("the broker is stopping".to_owned()))?
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
    async fn commit(self: &Arc<Self>, mut tx: Transaction) -> Stored<()> {
        let pending = audit_chain::pending(&mut tx).await?;
        if pending.is_empty() {
            return self.finish(tx).await;
        }
        let base = self.clone();
        // In a task: if the caller were cancelled half-way, the end of the chain would be unknown.
        let linking = tokio::spawn(async move {
            let mut links = base.chain.lock(&mut tx).await?;
            let committing = async {
                audit_chain::link_all(&mut tx, &pending, &mut links).await?;
                base.finish(tx).await
            };
            base.chain.in_time(committing).await?;
            links.mark_committed();
            Ok(())
        });
        linking.await.map_err(|_| StoreError::Unreachable("the broker is stopping".to_owned()))?
    }

    async fn finish(&self, tx: Transaction) -> Stored<()> {
        // Also counts a failed commit: it may have reached the database.
        let _change = self.changes.begin_change();
        self.commit_timed(tx).await
    }

    async fn commit_timed(&self, tx: Transaction) -> Stored<()> {
        let began = Instant::now();
        let committed = tx.commit().await;
        self.commit_times.add(began.elapsed());
        committed
    }

    /// As [`StoreInner::commit`], for a change with an event of a sandbox. On PostgreSQL the database sends the notice itself.
    async fn commit_with_event(self: &Arc<Self>, tx: Transaction, sandbox: &SandboxId) -> Stored<()> {
        self.commit(tx).await?;
        self.notify_of_event(sandbox);
        Ok(())
    }

    fn notify_of_event(&self, sandbox: &SandboxId) {
        if self.engine.is_only_writer {
            // An error means that there is no receiver at the moment.
            let _ = self.engine.notices.send(ChangeNotice::Events(sandbox.clone()));
        }
    }

    /// A connection whose packets are lost never fails by itself: limits a read to the time limit of a commit.
    async fn in_time<T>(&self, asked: impl Future<Output = Stored<T>>) -> Stored<T> {
        let within = self.engine.timeouts.commit;
        timeout(within, asked).await.unwrap_or_else(|_| Err(timed_out("a response", within)))
    }
}

/// The database. Its methods are in the file of their table.
pub struct Store {
    base: Arc<StoreInner>,
    batch_writer: BatchWriter,
    known_keys: ReadCache<KeyId, Option<ApiKey>>,
    known_scopes: ReadCache<[String; 3], Option<SessionWithSandbox>>,
    known_sessions: ReadCache<SessionId, Option<SessionWithSandbox>>,
    known_sandboxes: ReadCache<SandboxId, Option<Sandbox>>,
    known_revocations: ReadCache<SandboxId, Arc<RevocationList>>,
}

impl Store {
    fn new(engine: Engine) -> Self {
        let chain = Chain::new(engine.connections.clone(), engine.timeouts);
        let (changes, commit_times) = (ChangeCounter::default(), Histogram::default());
        let base = Arc::new(StoreInner { engine, is_unsynced: AtomicBool::default(), changes, chain, commit_times });
        Self {
            batch_writer: BatchWriter::new(base.clone()),
            base,
            known_keys: ReadCache::default(),
            known_scopes: ReadCache::default(),
            known_sessions: ReadCache::default(),
            known_sandboxes: ReadCache::default(),
            known_revocations: ReadCache::default(),
        }
    }

    /// Whether every connection has been returned, for a test that is about to disturb them.
    #[doc(hidden)]
    pub fn has_no_borrowed_connection(&self) -> bool {
        self.base.engine.writers.num_idle() == self.base.engine.writers.size() as usize
            && self.base.engine.statements.has_no_borrowed_connection()
    }
}

impl Store {
    /// Caches reads that every request needs, if no other process writes.
    async fn known<K, V>(&self, cache: &ReadCache<K, V>, key: K, moment: i64, ask: impl Future<Output = Stored<V>>) -> Stored<V>
    where
        K: Eq + Hash,
        V: Clone,
    {
        if !self.base.engine.is_only_writer {
            return ask.await;
        }
        cache.get(&self.base.changes, key, moment, ask).await
    }
}

/// Runs a read on a standalone connection. Several statements in it may see different states.
macro_rules! asked {
    ($store:ident, $db:ident => $ask:expr) => {{
        let mut taken = $store.base.engine.statements.take().await?;
        let $db = &mut *taken;
        let answer = $store.base.in_time($ask).await;
        taken.give_back(&answer);
        answer
    }};
}
use asked;

impl Store {
    /// Number of changes, if this process is the only writer: while it stays the same, answers differ only by the passing
    /// of time.
    pub fn changes(&self) -> Option<u64> {
        self.base.engine.is_only_writer.then(|| self.base.changes.count())
    }

    /// Histogram of commit durations.
    pub fn commit_times(&self) -> Option<&Histogram> {
        Some(&self.base.commit_times)
    }

    /// Histogram of waiting times for a database connection.
    pub fn wait_times(&self) -> Option<&Histogram> {
        Some(&self.base.engine.statements.waits)
    }

    /// Whether other brokers may use this database, now or later.
    pub fn is_shared(&self) -> bool {
        !self.base.engine.is_only_writer
    }
}
