//! The store in one SQLite file: what the embedded broker uses.
//!
//! One connection writes, so that writers queue here instead of failing on a lock; a few read beside it (WAL).

mod keys;
mod notes;
mod recent;
mod rows;
mod sandboxes;
mod sessions;

use std::{borrow::Cow, path::Path, time::Duration};

use async_trait::async_trait;
use cobox_protocol::{KeyId, SandboxId, SessionId, Timestamp, session::State};
use sqlx::{
    SqlSafeStr, SqlitePool, Transaction,
    migrate::{Migration, MigrationType, Migrator},
    sqlite::{Sqlite, SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use self::recent::{Changes, Recent};
use super::{
    AddedKey, AddedSandbox, Ending, EnsureWish, Ensured, Horizon, Leftover, Note, PageWish, RevocationList, SessionFilter, Store,
    StoreError, Stored, Viewer,
};
use crate::domain::{
    audit::AuditRecord,
    model::{ApiKey, Bound, Sandbox, Session},
};

/// How long another process (a backup, an operator's shell) may hold the file before we give up.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);
/// Readers beside the one writer; each is a thread.
const READERS: u32 = 4;
/// How long a request waits for its turn before it fails.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(30);

const MIGRATIONS: [(i64, &str, &str); 1] = [(1, "first schema", include_str!("../../../migrations/sqlite/0001_first_schema.sql"))];

pub struct SqliteStore {
    writer: SqlitePool,
    readers: SqlitePool,
    changes: Changes,
    known_sandboxes: Recent<SandboxId, Option<Sandbox>>,
    /// Also by the second, because revocations end by themselves.
    known_revocations: Recent<(SandboxId, i64), RevocationList>,
}

impl SqliteStore {
    /// Opens the file, makes it where there is none, and brings its schema up to date.
    pub async fn open(path: &Path) -> Stored<Self> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            // What was answered must survive a power cut, not only a crash.
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(BUSY_TIMEOUT);
        let pool = |size| SqlitePoolOptions::new().max_connections(size).acquire_timeout(ACQUIRE_TIMEOUT).test_before_acquire(false);
        let failed = |e: &dyn std::fmt::Display| StoreError::Failed(format!("opening {}: {e}", path.display()));
        let writer = pool(1)
            .after_release(|connection, _| {
                Box::pin(async move { sqlx::raw_sql("PRAGMA synchronous = FULL").execute(connection).await.map(|_| true) })
            })
            .connect_with(options.clone())
            .await
            .map_err(|e| failed(&e))?;
        let migrations = MIGRATIONS
            .iter()
            .map(|(version, name, sql)| Migration::new(*version, Cow::Borrowed(*name), MigrationType::Simple, sql.into_sql_str(), false));
        Migrator::with_migrations(migrations.collect()).run(&writer).await.map_err(|e| failed(&e))?;
        let readers = pool(READERS).connect_with(options).await.map_err(|e| failed(&e))?;
        let (changes, known_sandboxes, known_revocations) = (Changes::default(), Recent::default(), Recent::default());
        Ok(Self { writer, readers, changes, known_sandboxes, known_revocations })
    }

    /// Takes the write lock at the start, so that what is read inside can't change before it is written.
    async fn begin(&self) -> Stored<Transaction<'static, Sqlite>> {
        Ok(self.writer.begin_with("BEGIN IMMEDIATE").await?)
    }

    /// As [`SqliteStore::begin`], but its commit reaches the disk only with the next that is synced. For what a restart finds
    /// out by itself: what was about to be done, and what state it led to. What is answered for always comes after it, synced.
    async fn begin_unsynced(&self) -> Stored<Transaction<'static, Sqlite>> {
        // Set back by the pool when the connection is returned, whatever happened to whoever borrowed it.
        Ok(self.writer.begin_with("PRAGMA synchronous = NORMAL; BEGIN IMMEDIATE").await?)
    }

    /// Every change ends here.
    async fn commit(&self, tx: Transaction<'static, Sqlite>) -> Stored<()> {
        // Also when it fails: it may have reached the file all the same.
        let _making = self.changes.making();
        Ok(tx.commit().await?)
    }

    /// Several reads of one moment.
    async fn look(&self) -> Stored<Transaction<'static, Sqlite>> {
        Ok(self.readers.begin().await?)
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(e: sqlx::Error) -> Self {
        match e {
            sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) => StoreError::Corrupt(e.to_string()),
            other => StoreError::Failed(other.to_string()),
        }
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn add_key(&self, key: &ApiKey, audit: &AuditRecord) -> Stored<AddedKey> {
        let mut tx = self.begin().await?;
        let added = keys::add(&mut tx, key, audit).await?;
        self.commit(tx).await?;
        Ok(added)
    }
    async fn key(&self, id: &KeyId) -> Stored<Option<ApiKey>> {
        keys::get(&mut *self.readers.acquire().await?, id).await
    }
    async fn keys(&self, page: &PageWish) -> Stored<Vec<ApiKey>> {
        keys::list(&mut *self.readers.acquire().await?, page).await
    }
    async fn revoke_key(&self, id: &KeyId, ending: &Ending) -> Stored<Option<ApiKey>> {
        let mut tx = self.begin().await?;
        let revoked = keys::revoke(&mut tx, id, ending).await?;
        self.commit(tx).await?;
        Ok(revoked)
    }

    async fn ensure(&self, wish: &EnsureWish) -> Stored<Ensured> {
        let mut tx = self.begin_unsynced().await?;
        let ensured = sessions::ensure(&mut tx, wish).await?;
        self.commit(tx).await?;
        Ok(ensured)
    }
    async fn session_of(&self, workspace: &str, scope_type: &str, scope_id: &str) -> Stored<Option<Bound>> {
        sessions::of_scope(&mut *self.look().await?, workspace, scope_type, scope_id).await
    }
    async fn session(&self, id: &SessionId) -> Stored<Option<Bound>> {
        sessions::get(&mut *self.look().await?, id).await
    }
    async fn sessions(&self, viewer: &Viewer, filter: &SessionFilter, page: &PageWish) -> Stored<Vec<Bound>> {
        sessions::list(&mut *self.look().await?, viewer, filter, page).await
    }
    async fn sessions_on(&self, sandbox: &SandboxId) -> Stored<Vec<Session>> {
        sessions::on_sandbox(&mut *self.readers.acquire().await?, sandbox).await
    }
    async fn end_session(&self, id: &SessionId, ending: &Ending) -> Stored<Option<Leftover>> {
        let mut tx = self.begin().await?;
        let leftover = sessions::end(&mut tx, id, ending).await?;
        self.commit(tx).await?;
        Ok(leftover)
    }

    async fn add_sandbox(&self, sandbox: &Sandbox, quota: u32, audit: &AuditRecord) -> Stored<AddedSandbox> {
        let mut tx = self.begin().await?;
        let added = sandboxes::add(&mut tx, sandbox, quota, audit).await?;
        self.commit(tx).await?;
        Ok(added)
    }
    async fn sandbox(&self, id: &SandboxId) -> Stored<Option<Sandbox>> {
        let ask = async { sandboxes::get(&mut *self.readers.acquire().await?, id).await };
        self.known_sandboxes.get(&self.changes, id.clone(), ask).await
    }
    async fn sandbox_named(&self, workspace: &str, name: &str) -> Stored<Option<Sandbox>> {
        sandboxes::named(&mut *self.readers.acquire().await?, workspace, name).await
    }
    async fn sandboxes(&self, viewer: &Viewer, page: &PageWish) -> Stored<Vec<Sandbox>> {
        sandboxes::list(&mut *self.readers.acquire().await?, viewer, page).await
    }
    async fn sandboxes_of_node(&self, node: &str) -> Stored<Vec<Sandbox>> {
        sandboxes::of_node(&mut *self.readers.acquire().await?, node).await
    }
    async fn running_in(&self, workspace: &str) -> Stored<Vec<SandboxId>> {
        sandboxes::running_in(&mut *self.readers.acquire().await?, workspace).await
    }
    async fn has_sandboxes(&self) -> Stored<bool> {
        sandboxes::any(&mut *self.readers.acquire().await?).await
    }
    async fn replace_sandbox(&self, old: &Sandbox, new: &Sandbox, audit: Option<&AuditRecord>) -> Stored<bool> {
        let mut tx = self.begin_unsynced().await?;
        let is_replaced = sandboxes::replace(&mut tx, old, new).await?;
        if let (true, Some(audit)) = (is_replaced, audit) {
            notes::audit(&mut tx, audit).await?;
        }
        self.commit(tx).await?;
        Ok(is_replaced)
    }
    async fn end_sandbox(&self, id: &SandboxId, state: State, ending: &Ending) -> Stored<Option<Sandbox>> {
        let mut tx = self.begin().await?;
        let ended = sandboxes::end(&mut tx, id, state, ending).await?;
        self.commit(tx).await?;
        Ok(ended)
    }

    async fn revocations(&self, sandbox: &Sandbox, now: Timestamp) -> Stored<RevocationList> {
        let ask = async { notes::revocations(&mut *self.readers.acquire().await?, sandbox, now).await };
        self.known_revocations.get(&self.changes, (sandbox.id.clone(), now.unix()), ask).await
    }
    async fn note(&self, note: &Note) -> Stored<()> {
        if note.sandboxes.is_empty() && note.keys.is_empty() && note.audit.is_empty() {
            return Ok(());
        }
        let mut tx = self.begin().await?;
        notes::note(&mut tx, note).await?;
        if note.sandboxes.is_empty() && note.keys.is_empty() {
            // Nobody remembers audit records, which come with every request.
            return Ok(tx.commit().await?);
        }
        self.commit(tx).await
    }
    async fn prune(&self, horizon: &Horizon) -> Stored<()> {
        let mut tx = self.begin().await?;
        notes::prune(&mut tx, horizon).await?;
        self.commit(tx).await
    }
    async fn audit(&self, workspace: &str, sandbox: Option<&SandboxId>, page: &PageWish) -> Stored<Vec<(u64, AuditRecord)>> {
        notes::newest(&mut *self.readers.acquire().await?, workspace, sandbox, page).await
    }
}

#[cfg(test)]
mod tests {
    use sqlx::Row;

    use super::*;

    async fn level(tx: &mut Transaction<'static, Sqlite>) -> i64 {
        sqlx::raw_sql("PRAGMA synchronous").fetch_one(&mut **tx).await.unwrap().get(0)
    }

    #[tokio::test]
    async fn an_unsynced_change_leaves_the_next_ones_synced_even_when_it_is_given_up() {
        const FULL: i64 = 2;
        const NORMAL: i64 = 1;
        let dir = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(&dir.path().join("db")).await.unwrap();
        for _ in 0..3 {
            let mut unsynced = store.begin_unsynced().await.unwrap();
            assert_eq!(level(&mut unsynced).await, NORMAL);
            drop(unsynced);
            assert_eq!(level(&mut store.begin().await.unwrap()).await, FULL);
        }
    }
}
