//! Standalone connections for the single statements that every request needs.
//!
//! The driver's pool pings a connection each time it is returned, which takes as long as the query did. Here a connection
//! is only returned after it has answered; one that was given up half-way is closed. A connection is preferably reused on
//! the thread that opened it, so that its answer wakes no other thread.

use std::{
    ops::{Deref, DerefMut},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use sqlx::{AnyConnection, Connection, any::AnyConnectOptions};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};

use crate::{
    metrics::Histogram,
    store::{StoreError, Stored},
};

/// How long a request waits for its turn, and for a connection to be opened.
const TAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection unused for this long is pinged before it is used.
pub const IDLE_CHECK_AFTER: Duration = Duration::from_secs(5);
/// Time limit of a ping; it must leave time to try another connection.
pub const PING_WITHIN: Duration = Duration::from_secs(2);

pub struct StatementConnections {
    options: AnyConnectOptions,
    /// SQL that each new connection runs first.
    settings: &'static str,
    most: usize,
    turns: Semaphore,
    idle: Mutex<Vec<IdleConnection>>,
    /// Counts opened connections.
    made: Arc<AtomicU64>,
    /// Waiting times for a connection, of these and of the pool's.
    pub waits: Histogram,
}

struct IdleConnection {
    connection: AnyConnection,
    made_on: ThreadId,
    since: Instant,
}

/// A borrowed connection. If it is dropped before it is given back, it is closed.
pub struct BorrowedConnection<'a> {
    pool: &'a StatementConnections,
    connection: AnyConnection,
    made_on: ThreadId,
    _turn: SemaphorePermit<'a>,
}

impl StatementConnections {
    pub fn new(options: AnyConnectOptions, settings: &'static str, most: usize, made: Arc<AtomicU64>) -> Self {
        Self { options, settings, most, turns: Semaphore::new(most), idle: Mutex::default(), made, waits: Histogram::default() }
    }

    pub async fn take(&self) -> Stored<BorrowedConnection<'_>> {
        let late = |_| StoreError::Unreachable("no connection to the database was free in time".to_owned());
        let began = Instant::now();
        let taken = timeout(TAKE_TIMEOUT, self.find()).await;
        self.waits.add(began.elapsed());
        taken.map_err(late)?
    }

    async fn find(&self) -> Stored<BorrowedConnection<'_>> {
        let turn = self.turns.acquire().await.map_err(|_| StoreError::Unreachable("the broker is stopping".to_owned()))?;
        while let Some(mut idle) = self.pick() {
            if idle.since.elapsed() < IDLE_CHECK_AFTER || matches!(timeout(PING_WITHIN, idle.connection.ping()).await, Ok(Ok(()))) {
                return Ok(BorrowedConnection { pool: self, connection: idle.connection, made_on: idle.made_on, _turn: turn });
            }
            self.forget();
        }
        let mut connection = AnyConnection::connect_with(&self.options).await?;
        self.made.fetch_add(1, Ordering::SeqCst);
        sqlx::raw_sql(self.settings).execute(&mut connection).await?;
        Ok(BorrowedConnection { pool: self, connection, made_on: thread::current().id(), _turn: turn })
    }

    /// Whether all borrowed connections are back.
    pub fn has_no_borrowed_connection(&self) -> bool {
        self.turns.available_permits() == self.most
    }

    /// Drops all idle connections: if one leads to a server that is gone, so do the others.
    fn forget(&self) {
        self.idle.lock().clear();
    }

    /// A connection of this thread, or of any thread if no more may be opened.
    fn pick(&self) -> Option<IdleConnection> {
        let mut idle = self.idle.lock();
        let here = thread::current().id();
        if let Some(ours) = idle.iter().rposition(|i| i.made_on == here) {
            return Some(idle.swap_remove(ours));
        }
        // The caller already holds a permit without a connection.
        let on_loan = self.most.saturating_sub(self.turns.available_permits() + 1);
        if idle.len() + on_loan < self.most { None } else { idle.pop() }
    }
}

impl BorrowedConnection<'_> {
    pub fn give_back<T>(self, answer: &Stored<T>) {
        if matches!(answer, Err(StoreError::Unreachable(_))) {
            return self.pool.forget();
        }
        let idle = IdleConnection { connection: self.connection, made_on: self.made_on, since: Instant::now() };
        self.pool.idle.lock().push(idle);
    }
}

impl Deref for BorrowedConnection<'_> {
    type Target = AnyConnection;
    fn deref(&self) -> &AnyConnection {
        &self.connection
    }
}

impl DerefMut for BorrowedConnection<'_> {
    fn deref_mut(&mut self) -> &mut AnyConnection {
        &mut self.connection
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use sqlx::Row;

    use super::*;

    fn connections(most: usize) -> StatementConnections {
        sqlx::any::install_default_drivers();
        StatementConnections::new("sqlite::memory:".parse().unwrap(), "PRAGMA foreign_keys = ON", most, Arc::default())
    }

    async fn ask(taken: &mut BorrowedConnection<'_>) -> Stored<i64> {
        Ok(sqlx::query("SELECT 7").fetch_one(&mut **taken).await?.try_get(0)?)
    }

    #[tokio::test]
    async fn a_returned_connection_is_reused_and_an_abandoned_one_is_not() {
        let connections = connections(2);
        for _ in 0..3 {
            let mut taken = connections.take().await.unwrap();
            let answer = ask(&mut taken).await;
            assert_eq!(*answer.as_ref().unwrap(), 7);
            taken.give_back(&answer);
        }
        assert_eq!(connections.made.load(Ordering::SeqCst), 1);
        drop(connections.take().await.unwrap());
        connections.take().await.unwrap().give_back(&Ok(()));
        assert_eq!(connections.made.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn the_number_of_connections_is_limited() {
        let connections = connections(2);
        let (one, _two) = (connections.take().await.unwrap(), connections.take().await.unwrap());
        let mut third = Box::pin(connections.take());
        assert!(third.as_mut().now_or_never().is_none());
        one.give_back(&Ok(()));
        third.await.unwrap();
        assert_eq!(connections.made.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn a_lost_server_discards_all_connections() {
        let connections = connections(3);
        let (one, two) = (connections.take().await.unwrap(), connections.take().await.unwrap());
        two.give_back(&Ok(()));
        one.give_back::<()>(&Err(StoreError::Unreachable("gone".to_owned())));
        connections.take().await.unwrap();
        assert_eq!(connections.made.load(Ordering::SeqCst), 3);
    }
}
