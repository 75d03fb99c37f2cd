//! The store in one SQLite file, for the embedded broker.
//!
//! One connection writes, so that writers queue here instead of failing on a lock; a few read concurrently (WAL).

use std::{fmt::Write, path::Path, sync::Arc, time::Duration};

use sqlx::any::{AnyConnectOptions, AnyPoolOptions};
use tokio::sync::broadcast;

use super::{Engine, Store, notify, schema, statement_connections::StatementConnections, transaction::DatabaseTimeouts};
use crate::store::{StoreError, Stored};

/// Readers beside the one writer; each is a thread.
const READERS: usize = 4;
/// How long a request waits for a connection before it fails.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(30);

/// FULL: a change that was confirmed to a client must survive a power cut, not only a crash. Timeout: another process (a
/// backup, an operator's shell) may hold the file for ten seconds.
const SETTINGS: &str = "PRAGMA busy_timeout = 10000; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON";

/// Opens the file, creates it if needed, and brings its schema up to date.
pub async fn open(path: &Path) -> Stored<Store> {
    sqlx::any::install_default_drivers();
    let failed = |e: &dyn std::fmt::Display| StoreError::Failed(format!("opening {}: {e}", path.display()));
    let options: AnyConnectOptions = url(path)?.parse().map_err(|e: sqlx::Error| failed(&e))?;
    let writers = AnyPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .test_before_acquire(false)
        .after_connect(|connection, _| Box::pin(async move { sqlx::raw_sql(SETTINGS).execute(connection).await.map(drop) }))
        .connect_with(options.clone())
        .await
        .map_err(|e| failed(&e))?;
    schema::bring_up_to_date(&writers, schema::SQLITE).await.map_err(|e| failed(&e))?;
    Ok(Store::new(Engine {
        writers,
        statements: StatementConnections::new(options, SETTINGS, READERS, Arc::default()),
        // Takes the write lock at the start, so that what is read inside can't change before it is written. Each sets
        // its sync mode: the previous transaction on this connection may have set another, and may have been given up
        // half-way.
        begin: "PRAGMA synchronous = FULL; BEGIN IMMEDIATE",
        begin_unsynced: "PRAGMA synchronous = NORMAL; BEGIN IMMEDIATE",
        sync: Some("PRAGMA synchronous = FULL"),
        is_only_writer: true,
        notices: broadcast::channel(notify::BACKLOG).0,
        // A power cut also ends the broker, so commits can't be lost under a running one.
        connections: Arc::default(),
        timeouts: DatabaseTimeouts::default(),
        _listener: None,
    }))
}

/// The driver only takes a URL: characters with a special meaning are escaped.
fn url(path: &Path) -> Stored<String> {
    let path = path.to_str().ok_or_else(|| StoreError::Failed(format!("{}: the name of the database must be UTF-8", path.display())))?;
    let mut url = String::from("sqlite://");
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"/._-".contains(&byte) {
            url.push(char::from(byte));
        } else {
            // Writing to a String can't fail.
            let _ = write!(url, "%{byte:02X}");
        }
    }
    Ok(url + "?mode=rwc")
}

#[cfg(test)]
mod tests {
    use cobox_protocol::Timestamp;
    use sqlx::Row;

    use super::{super::transaction::Transaction, *};
    use crate::{domain::model::AuditRecord, store::Note};

    async fn level(tx: &mut Transaction) -> i64 {
        sqlx::raw_sql("PRAGMA synchronous").fetch_one(&mut **tx).await.unwrap().get(0)
    }

    #[tokio::test]
    async fn changes_after_an_abandoned_unsynced_one_are_synced() {
        const FULL: i64 = 2;
        const NORMAL: i64 = 1;
        let dir = tempfile::tempdir().unwrap();
        let store = open(&dir.path().join("db")).await.unwrap();
        for _ in 0..3 {
            let mut unsynced = store.base.begin_unsynced().await.unwrap();
            assert_eq!(level(&mut unsynced).await, NORMAL);
            drop(unsynced);
            assert_eq!(level(&mut store.base.begin().await.unwrap()).await, FULL);
        }
    }

    #[tokio::test]
    async fn an_audit_record_is_synced_after_an_unsynced_change() {
        const FULL: i64 = 2;
        let dir = tempfile::tempdir().unwrap();
        let store = open(&dir.path().join("db")).await.unwrap();
        for _ in 0..3 {
            drop(store.base.begin_unsynced().await.unwrap());
            let record = AuditRecord::new(Timestamp::now(), "default", "token.issued");
            store.note(&Note { audit: vec![record], ..Note::default() }).await.unwrap();
            let mut writer = store.base.engine.writers.acquire().await.unwrap();
            let level: i64 = sqlx::raw_sql("PRAGMA synchronous").fetch_one(&mut *writer).await.unwrap().get(0);
            assert_eq!(level, FULL);
        }
    }

    #[tokio::test]
    async fn every_connection_has_the_settings_and_a_path_may_have_any_characters() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("what? 100% #ä");
        let store = open(&path).await.unwrap();
        assert!(path.exists());
        let (mut writer, mut reader) =
            (store.base.engine.writers.acquire().await.unwrap(), store.base.engine.statements.take().await.unwrap());
        for db in [&mut *writer, &mut *reader] {
            for (name, value) in [("synchronous", 2), ("foreign_keys", 1), ("busy_timeout", 10_000)] {
                let sql = sqlx::AssertSqlSafe(format!("PRAGMA {name}"));
                let found: i64 = sqlx::raw_sql(sql).fetch_one(&mut *db).await.unwrap().get(0);
                assert_eq!(found, value, "{name}");
            }
            let mode: String = sqlx::raw_sql("PRAGMA journal_mode").fetch_one(&mut *db).await.unwrap().get(0);
            assert_eq!(mode, "wal");
        }
    }
}
