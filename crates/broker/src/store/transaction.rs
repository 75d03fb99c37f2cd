//! Connections borrowed from the pool, and transactions on them: even if the network fails, a connection is returned or
//! closed within a bounded time.
//!
//! A connection whose packets are lost never fails by itself, or only after a quarter of an hour. The pool's own return
//! path pings the connection and waits for an answer, which would occupy a place in the pool for as long.

use std::{
    ops::{Deref, DerefMut},
    time::{Duration, Instant},
};

use sqlx::{Any, AnyConnection, AnyPool, SqlSafeStr, pool::PoolConnection};
use tokio::time::timeout;

use crate::{
    metrics::Histogram,
    store::{StoreError, Stored},
};

/// Time limit for a returned connection to answer: its last query may still have to end.
const RETURN_WITHIN: Duration = Duration::from_secs(5);

/// How long the database may take before it counts as unreachable.
#[derive(Clone, Copy, Debug)]
pub struct DatabaseTimeouts {
    /// To wait for another commit: as long as the server keeps an idle transaction.
    pub turn: Duration,
    /// For one commit: more than the server allows for any statement, so that its result is decided by then.
    pub commit: Duration,
}

impl Default for DatabaseTimeouts {
    fn default() -> Self {
        Self { turn: Duration::from_secs(10), commit: Duration::from_secs(35) }
    }
}

/// A connection for one statement: several statements may see different states.
pub struct BoundedConnection(Option<PoolConnection<Any>>);

impl BoundedConnection {
    pub async fn from(pool: &AnyPool, waits: &Histogram) -> Stored<Self> {
        let began = Instant::now();
        let acquired = pool.acquire().await;
        waits.add(began.elapsed());
        Ok(Self(Some(acquired?)))
    }

    /// Closes the connection at once, in the middle of any operation.
    pub fn cut(mut self) {
        drop(self.0.take().map(PoolConnection::detach));
    }
}

const HELD: &str = "it is held until it is dropped";

impl Deref for BoundedConnection {
    type Target = AnyConnection;
    fn deref(&self) -> &AnyConnection {
        self.0.as_deref().expect(HELD)
    }
}

impl DerefMut for BoundedConnection {
    fn deref_mut(&mut self) -> &mut AnyConnection {
        self.0.as_deref_mut().expect(HELD)
    }
}

impl Drop for BoundedConnection {
    fn drop(&mut self) {
        if let Some(mut connection) = self.0.take() {
            // If this times out, the connection is closed.
            tokio::spawn(timeout(RETURN_WITHIN, connection.return_to_pool()));
        }
    }
}

/// A transaction. If it is dropped before the commit, it is rolled back.
pub struct Transaction {
    connection: Option<BoundedConnection>,
}

impl Transaction {
    pub async fn begin(pool: &AnyPool, statement: &'static str, timeouts: DatabaseTimeouts, waits: &Histogram) -> Stored<Self> {
        // Owned before the transaction begins: if that is given up half-way, it is rolled back all the same.
        let mut tx = Self { connection: Some(BoundedConnection::from(pool, waits).await?) };
        let begun = timeout(timeouts.commit, sqlx::raw_sql(statement.into_sql_str()).execute(&mut *tx)).await;
        begun.map_err(|_| timed_out("beginning a transaction", timeouts.commit))??;
        Ok(tx)
    }

    pub async fn commit(mut self) -> Stored<()> {
        sqlx::raw_sql("COMMIT").execute(&mut *self).await?;
        drop(self.connection.take());
        Ok(())
    }
}

impl Deref for Transaction {
    type Target = AnyConnection;
    fn deref(&self) -> &AnyConnection {
        self.connection.as_ref().expect(HELD)
    }
}

impl DerefMut for Transaction {
    fn deref_mut(&mut self) -> &mut AnyConnection {
        self.connection.as_mut().expect(HELD)
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take() else { return };
        tokio::spawn(async move {
            match timeout(RETURN_WITHIN, sqlx::raw_sql("ROLLBACK").execute(&mut *connection)).await {
                Ok(Ok(_)) => drop(connection),
                // The state of the connection is unknown.
                _ => connection.cut(),
            }
        });
    }
}

/// The error of a wait that was given up; the caller may retry.
pub fn timed_out(on: &str, after: Duration) -> StoreError {
    StoreError::Unreachable(format!("{on} took longer than {} s", after.as_secs()))
}
