//! The store in PostgreSQL, which several brokers can share.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cobox_protocol::Secret;
use sqlx::any::{AnyConnectOptions, AnyPoolOptions};
use tokio::sync::broadcast;

use super::{
    Engine, Store, notify, schema,
    statement_connections::{IDLE_CHECK_AFTER, PING_WITHIN, StatementConnections},
    transaction::DatabaseTimeouts,
};
use crate::store::{StoreError, Stored};

/// Connections of one broker, for transactions and for single statements. The server allows a hundred by default, which
/// leaves enough for several brokers and operators.
const CONNECTIONS: u32 = 8;
const QUICK_CONNECTIONS: usize = 8;
/// How long a request waits for a connection before it fails.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);

/// A broker that hangs must not hold locks that others wait for, and every wait for a lock must be bounded. `warning`:
/// the notice that a table exists already isn't worth a log line.
const SETTINGS: &str = "SET client_min_messages = warning; SET idle_in_transaction_session_timeout = '10s'; SET lock_timeout = '10s'; SET statement_timeout = '30s'";

/// Connects, and brings the schema up to date.
pub async fn open(url: &Secret) -> Stored<Store> {
    open_with(url, DatabaseTimeouts::default()).await
}

/// As [`open`], for callers with shorter time limits for an unreachable database.
pub async fn open_with(url: &Secret, timeouts: DatabaseTimeouts) -> Stored<Store> {
    sqlx::any::install_default_drivers();
    // The URL has a password in it: errors must only contain the message of the server or the system.
    let failed = |e: &dyn std::fmt::Display| StoreError::Failed(format!("opening the PostgreSQL database: {e}"));
    let options: AnyConnectOptions = url.expose().parse().map_err(|e: sqlx::Error| failed(&e))?;
    let connections = Arc::<AtomicU64>::default();
    let count = connections.clone();
    let pool = AnyPoolOptions::new()
        .max_connections(CONNECTIONS)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .test_before_acquire(false)
        .before_acquire(|connection, meta| {
            Box::pin(async move {
                if meta.idle_for > IDLE_CHECK_AFTER {
                    let answered = tokio::time::timeout(PING_WITHIN, sqlx::Connection::ping(connection)).await;
                    answered.unwrap_or(Err(sqlx::Error::PoolTimedOut))?;
                }
                Ok(true)
            })
        })
        .after_connect(move |connection, _| {
            count.fetch_add(1, Ordering::SeqCst);
            Box::pin(async move { sqlx::raw_sql(SETTINGS).execute(connection).await.map(drop) })
        })
        .connect_with(options.clone())
        .await
        .map_err(|e| failed(&e))?;
    schema::bring_up_to_date(&pool, schema::POSTGRES).await.map_err(|e| failed(&e))?;
    let notices = broadcast::channel(notify::BACKLOG).0;
    Ok(Store::new(Engine {
        writers: pool,
        statements: StatementConnections::new(options, SETTINGS, QUICK_CONNECTIONS, connections.clone()),
        begin: "BEGIN",
        begin_unsynced: "BEGIN; SET LOCAL synchronous_commit = off",
        sync: None,
        is_only_writer: false,
        connections,
        timeouts,
        _listener: Some(notify::listen(url.clone(), notices.clone())),
        notices,
    }))
}
