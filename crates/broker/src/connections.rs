//! Divides a listener's connections among authenticated principals. One principal gets at most half, and all of them
//! together leave some free, so that unauthenticated clients still get an answer and other principals can connect.

use std::{collections::HashMap, sync::Arc};

use cobox_gateway::UnauthenticatedConnection;
use cobox_protocol::{ApiError, ErrorCode};
use parking_lot::{Mutex, MutexGuard};

/// One principal may hold one out of this many of all connections.
const SHARE_OF_PRINCIPAL: usize = 2;
/// One out of this many of all connections stays free of authenticated clients.
const SHARE_OF_OTHERS: usize = 8;

/// A workspace and one of its principals.
type PrincipalKey = (String, String);

/// The connections with an authenticated client.
pub struct AuthenticatedConnections {
    max_total: usize,
    max_per_principal: usize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    total: usize,
    by_principal: HashMap<PrincipalKey, usize>,
}

impl AuthenticatedConnections {
    /// `connections` is the listener's limit.
    pub fn new(connections: usize) -> Arc<Self> {
        let max_total = (connections - (connections / SHARE_OF_OTHERS).max(1).min(connections)).max(1);
        let max_per_principal = connections.div_ceil(SHARE_OF_PRINCIPAL).min(max_total);
        Arc::new(Self { max_total, max_per_principal, table: Mutex::default() })
    }

    fn register(self: &Arc<Self>, principal_key: PrincipalKey) -> Result<AuthenticatedSlot, ApiError> {
        let mut table = self.table();
        let own = table.by_principal.get(&principal_key).copied().unwrap_or_default();
        if own >= self.max_per_principal {
            let message =
                format!("{} has {own} open connections to this broker, the maximum for one principal; close some", principal_key.1);
            return Err(ApiError::new(ErrorCode::RateLimited, message));
        }
        if table.total >= self.max_total {
            let message = format!("the broker has {} connections of authenticated clients, the maximum; try again", table.total);
            return Err(ApiError::new(ErrorCode::RateLimited, message));
        }
        table.total += 1;
        table.by_principal.insert(principal_key.clone(), own + 1);
        drop(table);
        Ok(AuthenticatedSlot { all: self.clone(), principal_key })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // No code in between can panic and leave only one of the counts changed.
        self.table.lock()
    }
}

/// One counted connection; dropping it frees the slot.
struct AuthenticatedSlot {
    all: Arc<AuthenticatedConnections>,
    principal_key: PrincipalKey,
}

impl Drop for AuthenticatedSlot {
    fn drop(&mut self) {
        let mut table = self.all.table();
        table.total -= 1;
        if let Some(own) = table.by_principal.get_mut(&self.principal_key) {
            *own -= 1;
            if *own == 0 {
                table.by_principal.remove(&self.principal_key);
            }
        }
    }
}

/// One client connection.
pub struct ClientConnection {
    unauthenticated: UnauthenticatedConnection,
    all: Arc<AuthenticatedConnections>,
    state: Mutex<State>,
}

enum State {
    Unknown,
    /// Counted for the first principal. Behind a proxy, other principals may follow on the same connection.
    Known {
        _slot: AuthenticatedSlot,
    },
    /// Closed, or upgraded to a WebSocket, which has limits of its own.
    Ended,
}

impl ClientConnection {
    pub fn new(unauthenticated: UnauthenticatedConnection, all: Arc<AuthenticatedConnections>) -> Self {
        Self { unauthenticated, all, state: Mutex::new(State::Unknown) }
    }

    /// Called for every request with a valid credential. The first one may be refused; its connection then remains
    /// unauthenticated and can be closed in favor of newer ones.
    pub fn authenticated(&self, workspace: &str, principal: &str) -> Result<(), ApiError> {
        let mut state = self.state();
        if matches!(*state, State::Unknown) {
            let slot = self.all.register((workspace.to_owned(), principal.to_owned()))?;
            self.unauthenticated.leave();
            *state = State::Known { _slot: slot };
        }
        Ok(())
    }

    /// Removes the connection from all counts.
    pub fn ended(&self) {
        self.unauthenticated.leave();
        *self.state() = State::Ended;
    }

    /// Resolves when the connection must be closed in favor of a newer one.
    pub fn must_close(&self) -> impl Future<Output = ()> + Send + use<> {
        self.unauthenticated.must_close()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is a single assignment.
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use cobox_gateway::{ClientAddress, UnauthenticatedConnections};

    use super::*;

    #[test]
    fn one_principal_gets_half_of_the_connections_and_an_eighth_stays_free() {
        let (unauthenticated, all) = (UnauthenticatedConnections::new(100, None), AuthenticatedConnections::new(16));
        let connect = || ClientConnection::new(unauthenticated.register(ClientAddress::default()), all.clone());
        let known = |principal: &str| {
            let connection = connect();
            connection.authenticated("default", principal).map(|()| connection)
        };
        let mut held: Vec<_> = (0..8).map(|_| known("ann").unwrap()).collect();
        assert!(known("ann").is_err_and(|e| e.message.starts_with("ann has 8 open connections")));
        held[0].authenticated("default", "bob").unwrap();
        held.extend((0..6).map(|_| known("bob").unwrap()));
        assert!(known("carl").is_err_and(|e| e.message.starts_with("the broker has 14 connections")));
        held[0].ended();
        assert!(known("carl").is_ok());
        drop(held);
        assert!(all.table().by_principal.is_empty());
        assert_eq!([1, 2, 4096].map(|n| AuthenticatedConnections::new(n).max_total), [1, 1, 3584]);
    }
}
