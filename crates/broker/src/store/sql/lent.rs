//! Connections lent from the pool, and transactions on them: whatever the network does to one, it is given back or cut within a bound.
//!
//! A connection whose packets vanish never fails by itself, or after a quarter of an hour. The pool's own way back asks it whether
//! it works and waits for an answer, which would take its place in the pool for as long.

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

/// How long a connection has to answer when it is given back: what it was asked for may still have to end.
const RETURN_WITHIN: Duration = Duration::from_secs(5);

/// How long the database may take before it counts as gone.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For somebody else's commit: as long as the server leaves a transaction that does nothing.
    pub turn: Duration,
    /// For one commit: more than the server takes for any statement, so that it has decided by then.
    pub commit: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { turn: Duration::from_secs(10), commit: Duration::from_secs(35) }
    }
}

/// For one statement: several may see several moments.
pub struct Lent(Option<PoolConnection<Any>>);

impl Lent {
    pub async fn from(pool: &AnyPool, waits: &Histogram) -> Stored<Self> {
        let began = Instant::now();
        let acquired = pool.acquire().await;
        waits.add(began.elapsed());
        Ok(Self(Some(acquired?)))
    }

    /// Closed as it is, in the middle of whatever it does.
    pub fn cut(mut self) {
        drop(self.0.take().map(PoolConnection::detach));
    }
}

const HELD: &str = "it is held until it is dropped";

impl Deref for Lent {
    type Target = AnyConnection;
    fn deref(&self) -> &AnyConnection {
        self.0.as_deref().expect(HELD)
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut AnyConnection {
        self.0.as_deref_mut().expect(HELD)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(mut connection) = self.0.take() {
            // Given up, the connection is closed with it.
            tokio::spawn(timeout(RETURN_WITHIN, connection.return_to_pool()));
        }
    }
}

/// What is written together. Dropped before it is committed, it is undone.
pub struct Tx {
    lent: Option<Lent>,
}

impl Tx {
    pub async fn begin(pool: &AnyPool, statement: &'static str, patience: Patience, waits: &Histogram) -> Stored<Self> {
        // Before it is begun: given up half-way it is undone all the same.
        let mut tx = Self { lent: Some(Lent::from(pool, waits).await?) };
        let begun = timeout(patience.commit, sqlx::raw_sql(statement.into_sql_str()).execute(&mut *tx)).await;
        begun.map_err(|_| gave_up("beginning a change", patience.commit))??;
        Ok(tx)
    }

    pub async fn commit(mut self) -> Stored<()> {
        sqlx::raw_sql("COMMIT").execute(&mut *self).await?;
        drop(self.lent.take());
        Ok(())
    }
}

impl Deref for Tx {
    type Target = AnyConnection;
    fn deref(&self) -> &AnyConnection {
        self.lent.as_ref().expect(HELD)
    }
}

impl DerefMut for Tx {
    fn deref_mut(&mut self) -> &mut AnyConnection {
        self.lent.as_mut().expect(HELD)
    }
}

impl Drop for Tx {
    fn drop(&mut self) {
        let Some(mut lent) = self.lent.take() else { return };
        tokio::spawn(async move {
            match timeout(RETURN_WITHIN, sqlx::raw_sql("ROLLBACK").execute(&mut *lent)).await {
                Ok(Ok(_)) => drop(lent),
                // Nobody knows what is open on it.
                _ => lent.cut(),
            }
        });
    }
}

/// The error of a wait that was given up, which whoever asked may try again.
pub fn gave_up(on: &str, after: Duration) -> StoreError {
    StoreError::Unreachable(format!("{on} took longer than {} s", after.as_secs()))
}
