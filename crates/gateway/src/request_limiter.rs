//! Limits the requests, WebSockets and bytes in flight of each sandbox and session, so that a busy one can't starve the others.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use axum::body::Bytes;
use cobox_protocol::{ApiError, ErrorCode, SandboxId, SessionId};
use parking_lot::{Mutex, MutexGuard};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{ClientAddress, UnauthenticatedConnection, UnauthenticatedConnections};

/// WebSockets of one sandbox whose client has not authenticated yet. Past it the oldest is closed: a client needs one round trip to
/// authenticate, in which so many others would have to connect to close its connection.
const UNAUTHENTICATED_PER_SANDBOX: usize = 128;
/// The same for all sandboxes together: each holds two descriptors for up to 5 s.
const UNAUTHENTICATED_IN_TOTAL: usize = 1024;
/// Concurrent health checks without a credential in one sandbox. Others wait: each takes a moment.
const HEALTH_CHECKS_PER_SANDBOX: usize = 16;
/// Number of requests between two sweeps, which remove the counters of sandboxes and sessions without requests.
const SWEEP_EVERY: u32 = 256;

/// Limits on what may be in progress at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Includes WebSockets. Less than the connections that boxd accepts; 500 sandboxes at a twelfth of it fit into the process's
    /// file descriptors.
    pub requests_per_sandbox: u32,
    /// WebSockets are long-lived, so a third of the permits is left for requests.
    pub websockets_per_sandbox: u32,
    /// Half of the sandbox's limit, so that another session can use the rest.
    pub requests_per_session: u32,
    /// Enough for 200 observers of one shell.
    pub websockets_per_session: u32,
    /// Body bytes that were read from one side and not yet written to the other. A download whose client doesn't read holds less than
    /// 1 MB. A session at this limit gets no further requests.
    pub bytes_in_flight_per_session: u64,
    /// Over all sandboxes: each WebSocket holds two descriptors and a few buffers of 8 KiB.
    pub websockets: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            requests_per_sandbox: 768,
            websockets_per_sandbox: 512,
            requests_per_session: 384,
            websockets_per_session: 256,
            bytes_in_flight_per_session: 64 * 1024 * 1024,
            websockets: 4096,
        }
    }
}

/// What one sandbox or session has in progress.
struct Counters {
    requests: AtomicU32,
    websockets: AtomicU32,
    bytes: AtomicU64,
    unauthenticated: Arc<UnauthenticatedConnections>,
    health_checks: Arc<Semaphore>,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            requests: AtomicU32::default(),
            websockets: AtomicU32::default(),
            bytes: AtomicU64::default(),
            unauthenticated: UnauthenticatedConnections::new(UNAUTHENTICATED_PER_SANDBOX, None),
            health_checks: Arc::new(Semaphore::new(HEALTH_CHECKS_PER_SANDBOX)),
        }
    }
}

#[derive(Default)]
struct CounterTables {
    sandboxes: HashMap<SandboxId, Arc<Counters>>,
    sessions: HashMap<SessionId, Arc<Counters>>,
    until_sweep: u32,
}

struct LimiterState {
    limits: Limits,
    tables: Mutex<CounterTables>,
    /// WebSockets of authenticated clients.
    websockets: AtomicU32,
    unauthenticated: Arc<UnauthenticatedConnections>,
}

#[derive(Clone)]
pub(crate) struct RequestLimiter(Arc<LimiterState>);

impl RequestLimiter {
    pub fn new(limits: Limits) -> Self {
        let unauthenticated = UnauthenticatedConnections::new(UNAUTHENTICATED_IN_TOTAL, None);
        Self(Arc::new(LimiterState { limits, tables: Mutex::default(), websockets: AtomicU32::new(0), unauthenticated }))
    }

    /// A permit for a WebSocket whose client has not authenticated yet. It is never refused; an older one may have to close instead.
    pub fn acquire_unauthenticated(&self, sandbox: &SandboxId, address: ClientAddress) -> RequestPermit {
        let counters = self.counters_of(sandbox);
        let kind = PermitKind::Unauthenticated {
            in_sandbox: counters.unauthenticated.register(address),
            in_total: self.0.unauthenticated.register(address),
        };
        RequestPermit { state: self.0.clone(), sandbox: counters, session: None, kind }
    }

    /// A permit for a health check without a credential, as soon as one is available.
    pub async fn acquire_health_check(&self, sandbox: &SandboxId) -> RequestPermit {
        let counters = self.counters_of(sandbox);
        // Fails only if the semaphore is closed, which never happens.
        let turn = counters.health_checks.clone().acquire_owned().await.ok();
        RequestPermit { state: self.0.clone(), sandbox: counters, session: None, kind: PermitKind::HealthCheck { _turn: turn } }
    }

    /// A permit for a request of an authenticated caller.
    pub fn acquire(&self, sandbox: &SandboxId, session: Option<&SessionId>, is_websocket: bool) -> Result<RequestPermit, ApiError> {
        let limits = &self.0.limits;
        // Checked and counted under this lock. Permits are released without it, which can only make more available.
        let mut tables = self.tables();
        tables.sweep();
        let sandbox_counters = counters_for(&mut tables.sandboxes, sandbox);
        let session = session.map(|session| (session, counters_for(&mut tables.sessions, session)));
        let (requests, websockets) = (u64::from(limits.requests_per_sandbox), u64::from(limits.websockets_per_sandbox));
        check_below(&sandbox_counters.requests, requests, || limit_message(sandbox, requests, "requests"), Some("requests_per_sandbox"))?;
        if is_websocket {
            check_below(
                &sandbox_counters.websockets,
                websockets,
                || limit_message(sandbox, websockets, "open WebSockets"),
                Some("websockets_per_sandbox"),
            )?;
        }
        if let Some((id, counters)) = &session {
            let (requests, websockets) = (u64::from(limits.requests_per_session), u64::from(limits.websockets_per_session));
            check_below(&counters.requests, requests, || limit_message(id, requests, "requests"), Some("requests_per_session"))?;
            if is_websocket {
                check_below(
                    &counters.websockets,
                    websockets,
                    || limit_message(id, websockets, "open WebSockets"),
                    Some("websockets_per_session"),
                )?;
            }
            let (bytes, max) = (counters.bytes.load(Ordering::Relaxed), limits.bytes_in_flight_per_session);
            if bytes >= max {
                let message = format!("{id} has {bytes} bytes of unread responses; read the pending responses, or close them");
                return Err(limit_error(message, Some("bytes_in_flight_per_session"), max));
            }
        }
        if is_websocket {
            let max = u64::from(limits.websockets);
            check_below(
                &self.0.websockets,
                max,
                || format!("the gateway has {max} open WebSockets, the maximum; try again later"),
                Some("websockets"),
            )?;
            self.0.websockets.fetch_add(1, Ordering::Relaxed);
        }
        let permit = RequestPermit {
            state: self.0.clone(),
            sandbox: sandbox_counters,
            session: session.map(|(_, counters)| counters),
            kind: PermitKind::Authenticated { is_websocket },
        };
        permit.count(|counter| {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        Ok(permit)
    }

    fn counters_of(&self, sandbox: &SandboxId) -> Arc<Counters> {
        let mut tables = self.tables();
        tables.sweep();
        counters_for(&mut tables.sandboxes, sandbox)
    }

    fn tables(&self) -> MutexGuard<'_, CounterTables> {
        self.0.tables.lock()
    }
}

impl CounterTables {
    fn sweep(&mut self) {
        self.until_sweep = match self.until_sweep.checked_sub(1) {
            Some(left) => left,
            None => {
                self.sandboxes.retain(|_, counters| Arc::strong_count(counters) > 1);
                self.sessions.retain(|_, counters| Arc::strong_count(counters) > 1);
                SWEEP_EVERY
            }
        };
    }
}

fn counters_for<K: Clone + Eq + Hash>(table: &mut HashMap<K, Arc<Counters>>, key: &K) -> Arc<Counters> {
    match table.get(key) {
        Some(counters) => counters.clone(),
        None => table.entry(key.clone()).or_default().clone(),
    }
}

fn check_below(current: &AtomicU32, max: u64, message: impl FnOnce() -> String, limit: Option<&'static str>) -> Result<(), ApiError> {
    if u64::from(current.load(Ordering::Relaxed)) < max { Ok(()) } else { Err(limit_error(message(), limit, max)) }
}

fn limit_message(of: &dyn std::fmt::Display, max: u64, what: &str) -> String {
    format!("{of} has {max} {what} in progress, the maximum; close some or wait")
}

fn limit_error(message: String, limit: Option<&'static str>, max: u64) -> ApiError {
    let error = ApiError::new(ErrorCode::RateLimited, message);
    match limit {
        Some(limit) => error.with_details(json!({ "limit": limit, "max": max })),
        None => error,
    }
}

/// Permission to handle one request; released when dropped.
pub(crate) struct RequestPermit {
    state: Arc<LimiterState>,
    sandbox: Arc<Counters>,
    session: Option<Arc<Counters>>,
    kind: PermitKind,
}

/// The limits that a permit counts against.
enum PermitKind {
    Authenticated { is_websocket: bool },
    Unauthenticated { in_sandbox: UnauthenticatedConnection, in_total: UnauthenticatedConnection },
    HealthCheck { _turn: Option<OwnedSemaphorePermit> },
}

impl RequestPermit {
    fn count(&self, change: impl Fn(&AtomicU32)) {
        let PermitKind::Authenticated { is_websocket } = self.kind else { return };
        for counters in std::iter::once(&self.sandbox).chain(&self.session) {
            change(&counters.requests);
            if is_websocket {
                change(&counters.websockets);
            }
        }
    }

    /// Resolves when a newer connection takes this permit.
    pub fn must_close(&self) -> impl Future<Output = ()> + Send + use<> {
        let closes = match &self.kind {
            PermitKind::Unauthenticated { in_sandbox, in_total } => Some((in_sandbox.must_close(), in_total.must_close())),
            PermitKind::Authenticated { .. } | PermitKind::HealthCheck { .. } => None,
        };
        async move {
            match closes {
                Some((in_sandbox, in_total)) => tokio::select! { () = in_sandbox => {}, () = in_total => {} },
                None => std::future::pending().await,
            }
        }
    }

    /// Counts the bytes of this request's bodies.
    pub fn byte_tracker(&self) -> ByteTracker {
        ByteTracker(self.session.clone())
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        self.count(|counter| {
            counter.fetch_sub(1, Ordering::Relaxed);
        });
        if matches!(self.kind, PermitKind::Authenticated { is_websocket: true }) {
            self.state.websockets.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Counts bytes from the time they were read from one side until they were written to the other.
#[derive(Clone)]
pub(crate) struct ByteTracker(Option<Arc<Counters>>);

impl ByteTracker {
    pub fn track(&self, bytes: Bytes) -> Bytes {
        let Some(counters) = self.0.clone().filter(|_| !bytes.is_empty()) else { return bytes };
        counters.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Bytes::from_owner(TrackedBytes { bytes, counters })
    }
}

struct TrackedBytes {
    bytes: Bytes,
    counters: Arc<Counters>,
}

impl AsRef<[u8]> for TrackedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for TrackedBytes {
    fn drop(&mut self) {
        self.counters.bytes.fetch_sub(self.bytes.len() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;

    fn exceeded_limit(error: Option<ApiError>) -> String {
        let error = error.expect("the request must be refused");
        assert_eq!((error.code, error.retry_after), (ErrorCode::RateLimited, Some(1)));
        error.details.map_or_else(|| error.message, |d| d["limit"].as_str().unwrap().to_owned())
    }

    #[test]
    fn a_busy_sandbox_leaves_capacity_for_another() {
        let limits = Limits { websockets_per_sandbox: 3, requests_per_sandbox: 4, websockets: 5, ..Limits::default() };
        let limiter = RequestLimiter::new(limits);
        let (busy, quiet) = (SandboxId::new(), SandboxId::new());
        let without_session = None;
        let held: Vec<_> = (0..3).map(|_| limiter.acquire(&busy, without_session, true).unwrap()).collect();
        assert_eq!(exceeded_limit(limiter.acquire(&busy, without_session, true).err()), "websockets_per_sandbox");
        let last = limiter.acquire(&busy, without_session, false).unwrap();
        assert_eq!(exceeded_limit(limiter.acquire(&busy, without_session, false).err()), "requests_per_sandbox");
        let others: Vec<_> = (0..2).map(|_| limiter.acquire(&quiet, without_session, true).unwrap()).collect();
        assert_eq!(exceeded_limit(limiter.acquire(&quiet, without_session, true).err()), "websockets");
        drop((held, last));
        assert!(limiter.acquire(&busy, without_session, true).is_ok());
        drop(others);
        for _ in 0..=SWEEP_EVERY {
            limiter.acquire(&SandboxId::new(), without_session, false).unwrap();
        }
        assert!(limiter.0.tables.lock().sandboxes.len() <= SWEEP_EVERY as usize + 1, "counters of idle sandboxes are removed");
    }

    #[test]
    fn a_busy_session_leaves_capacity_for_another_in_the_same_sandbox() {
        let limits = Limits { requests_per_session: 2, websockets_per_session: 1, ..Limits::default() };
        let limiter = RequestLimiter::new(limits);
        let (sandbox, busy, quiet) = (SandboxId::new(), SessionId::new(), SessionId::new());
        let _one = limiter.acquire(&sandbox, Some(&busy), true).unwrap();
        assert_eq!(exceeded_limit(limiter.acquire(&sandbox, Some(&busy), true).err()), "websockets_per_session");
        let two = limiter.acquire(&sandbox, Some(&busy), false).unwrap();
        assert_eq!(exceeded_limit(limiter.acquire(&sandbox, Some(&busy), false).err()), "requests_per_session");
        assert!(limiter.acquire(&sandbox, Some(&quiet), true).is_ok());
        drop(two);
        assert!(limiter.acquire(&sandbox, Some(&busy), false).is_ok());
    }

    #[test]
    fn bytes_are_counted_until_they_are_written_to_the_other_side() {
        let limiter = RequestLimiter::new(Limits { bytes_in_flight_per_session: 10, ..Limits::default() });
        let (sandbox, session) = (SandboxId::new(), SessionId::new());
        let permit = limiter.acquire(&sandbox, Some(&session), false).unwrap();
        let tracker = permit.byte_tracker();
        let (first, second) = (tracker.track(Bytes::from_static(b"12345")), tracker.track(Bytes::from_static(b"67890")));
        assert_eq!((&first[..], &second[..]), (&b"12345"[..], &b"67890"[..]));
        assert_eq!(exceeded_limit(limiter.acquire(&sandbox, Some(&session), false).err()), "bytes_in_flight_per_session");
        let part = second.slice(1..2);
        drop(second);
        assert!(limiter.acquire(&sandbox, Some(&session), false).is_err(), "a slice of it is still in memory");
        drop(part);
        assert!(limiter.acquire(&sandbox, Some(&session), false).is_ok());
    }

    fn must_close(permit: &RequestPermit) -> bool {
        let mut closing = std::pin::pin!(permit.must_close());
        closing.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn unauthenticated_clients_have_a_limit_of_their_own_and_the_oldest_makes_room_for_the_newest() {
        let limiter =
            RequestLimiter::new(Limits { requests_per_sandbox: 1, websockets_per_sandbox: 1, websockets: 1, ..Limits::default() });
        let (sandbox, address) = (SandboxId::new(), ClientAddress::default());
        let mut held: Vec<_> = (0..UNAUTHENTICATED_PER_SANDBOX).map(|_| limiter.acquire_unauthenticated(&sandbox, address)).collect();
        assert!(!held.iter().any(must_close));
        held.push(limiter.acquire_unauthenticated(&sandbox, address));
        assert_eq!(held.iter().position(must_close), Some(0));
        assert_eq!(held.iter().filter(|permit| must_close(permit)).count(), 1);
        assert!(limiter.acquire(&sandbox, None, true).is_ok(), "authenticated clients have permits of their own");
        drop(held);
        assert!(!must_close(&limiter.acquire_unauthenticated(&sandbox, address)));
    }

    #[test]
    fn unauthenticated_clients_of_all_sandboxes_have_a_common_limit() {
        let limiter = RequestLimiter::new(Limits::default());
        let held: Vec<_> =
            (0..=UNAUTHENTICATED_IN_TOTAL).map(|_| limiter.acquire_unauthenticated(&SandboxId::new(), ClientAddress::default())).collect();
        assert_eq!(held.iter().position(must_close), Some(0));
    }

    #[tokio::test]
    async fn a_health_check_waits_for_its_turn_and_uses_no_other_permit() {
        let limiter = RequestLimiter::new(Limits { requests_per_sandbox: 1, ..Limits::default() });
        let sandbox = SandboxId::new();
        let _others: Vec<_> =
            (0..UNAUTHENTICATED_PER_SANDBOX).map(|_| limiter.acquire_unauthenticated(&sandbox, ClientAddress::default())).collect();
        let mut held = Vec::new();
        for _ in 0..HEALTH_CHECKS_PER_SANDBOX {
            held.push(limiter.acquire_health_check(&sandbox).await);
        }
        let mut next = std::pin::pin!(limiter.acquire_health_check(&sandbox));
        assert!(next.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert!(limiter.acquire(&sandbox, None, false).is_ok());
        held.pop();
        next.await;
    }
}
