//! How much of the door one sandbox and one session may take, so that a busy one leaves room for the others.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use axum::body::Bytes;
use cobox_protocol::{ApiError, ErrorCode, SandboxId, SessionId};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{Entered, Source, Unauthenticated};

/// WebSockets of one sandbox whose client has not authenticated yet. Past it the oldest is closed: a client needs a round trip to
/// authenticate, and so many others would have to connect meanwhile to close its connection.
const STRANGERS_PER_SANDBOX: usize = 128;
/// The same of all sandboxes together: each holds two descriptors for up to 5 s.
const STRANGERS: usize = 1024;
/// Health checks without a credential that are under way in one sandbox. Others wait for their turn: each takes a moment.
const HEALTH_CHECKS_PER_SANDBOX: usize = 16;
/// After so many requests, what has no requests any more is forgotten.
const SWEEP_EVERY: u32 = 256;

/// What may be under way through the gateway at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Upgraded ones included: fewer than the connections boxd takes, and 500 sandboxes at a twelfth of it still fit into the
    /// process's descriptors.
    pub requests_per_sandbox: u32,
    /// They last, so that they leave a third of the places to requests.
    pub websockets_per_sandbox: u32,
    /// Half of its sandbox's, so that another session gets in beside it.
    pub requests_per_session: u32,
    /// An audience of two hundred at one shell has room.
    pub websockets_per_session: u32,
    /// Bytes of bodies that were read from one side and not yet taken by the other. A download that its client doesn't read holds
    /// less than a megabyte of them; who has this many gets no further request in.
    pub bytes_in_flight_per_session: u64,
    /// Of all sandboxes: each holds two descriptors and a few buffers of 8 KiB.
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

/// What is under way of one sandbox or one session.
struct Taken {
    requests: AtomicU32,
    websockets: AtomicU32,
    bytes: AtomicU64,
    strangers: Arc<Unauthenticated>,
    health_checks: Arc<Semaphore>,
}

impl Default for Taken {
    fn default() -> Self {
        Self {
            requests: AtomicU32::default(),
            websockets: AtomicU32::default(),
            bytes: AtomicU64::default(),
            strangers: Unauthenticated::new(STRANGERS_PER_SANDBOX, None),
            health_checks: Arc::new(Semaphore::new(HEALTH_CHECKS_PER_SANDBOX)),
        }
    }
}

#[derive(Default)]
struct Tables {
    sandboxes: HashMap<SandboxId, Arc<Taken>>,
    sessions: HashMap<SessionId, Arc<Taken>>,
    until_sweep: u32,
}

struct Door {
    limits: Limits,
    tables: Mutex<Tables>,
    /// Of those that have authenticated.
    websockets: AtomicU32,
    strangers: Arc<Unauthenticated>,
}

#[derive(Clone)]
pub(crate) struct Slots(Arc<Door>);

impl Slots {
    pub fn new(limits: Limits) -> Self {
        let strangers = Unauthenticated::new(STRANGERS, None);
        Self(Arc::new(Door { limits, tables: Mutex::default(), websockets: AtomicU32::new(0), strangers }))
    }

    /// A place for a WebSocket whose client has not authenticated yet. It is never refused; older ones may have to close for it.
    pub fn take_stranger(&self, sandbox: &SandboxId, source: Source) -> Slot {
        let of_sandbox = self.of_sandbox(sandbox);
        let held = Held::Stranger { of_sandbox: of_sandbox.strangers.enter(source), of_all: self.0.strangers.enter(source) };
        Slot { door: self.0.clone(), sandbox: of_sandbox, session: None, held }
    }

    /// A place for a health check without a credential, as soon as there is one.
    pub async fn take_health_check(&self, sandbox: &SandboxId) -> Slot {
        let of_sandbox = self.of_sandbox(sandbox);
        let turn = of_sandbox.health_checks.clone().acquire_owned().await.ok();
        Slot { door: self.0.clone(), sandbox: of_sandbox, session: None, held: Held::HealthCheck { _turn: turn } }
    }

    /// A place for a request of an authenticated caller.
    pub fn take(&self, sandbox: &SandboxId, session: Option<&SessionId>, is_websocket: bool) -> Result<Slot, ApiError> {
        let limits = &self.0.limits;
        // Everything is looked at and counted under this lock; places are given back without it, which only leaves more room.
        let mut tables = self.tables();
        tables.sweep();
        let of_sandbox = entry(&mut tables.sandboxes, sandbox);
        let session = session.map(|session| (session, entry(&mut tables.sessions, session)));
        let (requests, websockets) = (u64::from(limits.requests_per_sandbox), u64::from(limits.websockets_per_sandbox));
        below(&of_sandbox.requests, requests, || full(sandbox, requests, "requests"), Some("requests_per_sandbox"))?;
        if is_websocket {
            below(&of_sandbox.websockets, websockets, || full(sandbox, websockets, "open WebSockets"), Some("websockets_per_sandbox"))?;
        }
        if let Some((id, taken)) = &session {
            let (requests, websockets) = (u64::from(limits.requests_per_session), u64::from(limits.websockets_per_session));
            below(&taken.requests, requests, || full(id, requests, "requests"), Some("requests_per_session"))?;
            if is_websocket {
                below(&taken.websockets, websockets, || full(id, websockets, "open WebSockets"), Some("websockets_per_session"))?;
            }
            let (bytes, most) = (taken.bytes.load(Ordering::Relaxed), limits.bytes_in_flight_per_session);
            if bytes >= most {
                let message =
                    format!("{id} has {bytes} bytes under way that nobody takes; read the answers that are waiting, or close them");
                return Err(too_much(message, Some("bytes_in_flight_per_session"), most));
            }
        }
        if is_websocket {
            let most = u64::from(limits.websockets);
            below(&self.0.websockets, most, || format!("the gateway has {most} WebSockets open"), Some("websockets"))?;
            self.0.websockets.fetch_add(1, Ordering::Relaxed);
        }
        let slot = Slot {
            door: self.0.clone(),
            sandbox: of_sandbox,
            session: session.map(|(_, taken)| taken),
            held: Held::Known { is_websocket },
        };
        slot.count(|counter| {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        Ok(slot)
    }

    fn of_sandbox(&self, sandbox: &SandboxId) -> Arc<Taken> {
        let mut tables = self.tables();
        tables.sweep();
        entry(&mut tables.sandboxes, sandbox)
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.0.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tables {
    fn sweep(&mut self) {
        self.until_sweep = match self.until_sweep.checked_sub(1) {
            Some(left) => left,
            None => {
                self.sandboxes.retain(|_, taken| Arc::strong_count(taken) > 1);
                self.sessions.retain(|_, taken| Arc::strong_count(taken) > 1);
                SWEEP_EVERY
            }
        };
    }
}

fn entry<K: Clone + Eq + Hash>(table: &mut HashMap<K, Arc<Taken>>, key: &K) -> Arc<Taken> {
    match table.get(key) {
        Some(taken) => taken.clone(),
        None => table.entry(key.clone()).or_default().clone(),
    }
}

fn below(taken: &AtomicU32, most: u64, message: impl FnOnce() -> String, limit: Option<&'static str>) -> Result<(), ApiError> {
    if u64::from(taken.load(Ordering::Relaxed)) < most { Ok(()) } else { Err(too_much(message(), limit, most)) }
}

fn full(of: &dyn std::fmt::Display, most: u64, what: &str) -> String {
    format!("{of} has {most} {what} under way, which is the most it may have; close some or wait")
}

fn too_much(message: String, limit: Option<&'static str>, most: u64) -> ApiError {
    let error = ApiError::new(ErrorCode::RateLimited, message);
    match limit {
        Some(limit) => error.with_details(json!({ "limit": limit, "max": most })),
        None => error,
    }
}

/// A place, given back when dropped.
pub(crate) struct Slot {
    door: Arc<Door>,
    sandbox: Arc<Taken>,
    session: Option<Arc<Taken>>,
    held: Held,
}

/// What kind of place it is.
enum Held {
    Known { is_websocket: bool },
    Stranger { of_sandbox: Entered, of_all: Entered },
    HealthCheck { _turn: Option<OwnedSemaphorePermit> },
}

impl Slot {
    fn count(&self, change: impl Fn(&AtomicU32)) {
        let Held::Known { is_websocket } = self.held else { return };
        for taken in std::iter::once(&self.sandbox).chain(&self.session) {
            change(&taken.requests);
            if is_websocket {
                change(&taken.websockets);
            }
        }
    }

    /// Resolves when this place is wanted for a newer connection.
    pub fn must_close(&self) -> impl Future<Output = ()> + Send + use<> {
        let closes = match &self.held {
            Held::Stranger { of_sandbox, of_all } => Some((of_sandbox.must_close(), of_all.must_close())),
            Held::Known { .. } | Held::HealthCheck { .. } => None,
        };
        async move {
            match closes {
                Some((of_sandbox, of_all)) => tokio::select! { () = of_sandbox => {}, () = of_all => {} },
                None => std::future::pending().await,
            }
        }
    }

    /// What counts the bytes of this request's bodies.
    pub fn flight(&self) -> Flight {
        Flight(self.session.clone())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.count(|counter| {
            counter.fetch_sub(1, Ordering::Relaxed);
        });
        if matches!(self.held, Held::Known { is_websocket: true }) {
            self.door.websockets.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Counts bytes from when they were read on one side until the other has taken them.
#[derive(Clone)]
pub(crate) struct Flight(Option<Arc<Taken>>);

impl Flight {
    pub fn carry(&self, bytes: Bytes) -> Bytes {
        let Some(of) = self.0.clone().filter(|_| !bytes.is_empty()) else { return bytes };
        of.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Bytes::from_owner(InFlight { bytes, of })
    }
}

struct InFlight {
    bytes: Bytes,
    of: Arc<Taken>,
}

impl AsRef<[u8]> for InFlight {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.of.bytes.fetch_sub(self.bytes.len() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;

    fn limit(error: Option<ApiError>) -> String {
        let error = error.expect("it is refused");
        assert_eq!((error.code, error.retry_after), (ErrorCode::RateLimited, Some(1)));
        error.details.map_or_else(|| error.message, |d| d["limit"].as_str().unwrap().to_owned())
    }

    #[test]
    fn one_sandbox_is_bounded_and_leaves_room_for_another() {
        let limits = Limits { websockets_per_sandbox: 3, requests_per_sandbox: 4, websockets: 5, ..Limits::default() };
        let slots = Slots::new(limits);
        let (busy, quiet) = (SandboxId::new(), SandboxId::new());
        let nobody = None;
        let held: Vec<_> = (0..3).map(|_| slots.take(&busy, nobody, true).unwrap()).collect();
        assert_eq!(limit(slots.take(&busy, nobody, true).err()), "websockets_per_sandbox");
        let last = slots.take(&busy, nobody, false).unwrap();
        assert_eq!(limit(slots.take(&busy, nobody, false).err()), "requests_per_sandbox");
        let others: Vec<_> = (0..2).map(|_| slots.take(&quiet, nobody, true).unwrap()).collect();
        assert_eq!(limit(slots.take(&quiet, nobody, true).err()), "websockets");
        drop((held, last));
        assert!(slots.take(&busy, nobody, true).is_ok());
        drop(others);
        for _ in 0..=SWEEP_EVERY {
            slots.take(&SandboxId::new(), nobody, false).unwrap();
        }
        assert!(slots.0.tables.lock().unwrap().sandboxes.len() <= SWEEP_EVERY as usize + 1, "what is over is forgotten");
    }

    #[test]
    fn one_session_leaves_room_for_another_in_the_same_sandbox() {
        let limits = Limits { requests_per_session: 2, websockets_per_session: 1, ..Limits::default() };
        let slots = Slots::new(limits);
        let (sandbox, busy, quiet) = (SandboxId::new(), SessionId::new(), SessionId::new());
        let _one = slots.take(&sandbox, Some(&busy), true).unwrap();
        assert_eq!(limit(slots.take(&sandbox, Some(&busy), true).err()), "websockets_per_session");
        let two = slots.take(&sandbox, Some(&busy), false).unwrap();
        assert_eq!(limit(slots.take(&sandbox, Some(&busy), false).err()), "requests_per_session");
        assert!(slots.take(&sandbox, Some(&quiet), true).is_ok());
        drop(two);
        assert!(slots.take(&sandbox, Some(&busy), false).is_ok());
    }

    #[test]
    fn bytes_count_until_the_other_side_has_them() {
        let slots = Slots::new(Limits { bytes_in_flight_per_session: 10, ..Limits::default() });
        let (sandbox, session) = (SandboxId::new(), SessionId::new());
        let slot = slots.take(&sandbox, Some(&session), false).unwrap();
        let flight = slot.flight();
        let (first, second) = (flight.carry(Bytes::from_static(b"12345")), flight.carry(Bytes::from_static(b"67890")));
        assert_eq!((&first[..], &second[..]), (&b"12345"[..], &b"67890"[..]));
        assert_eq!(limit(slots.take(&sandbox, Some(&session), false).err()), "bytes_in_flight_per_session");
        let part = second.slice(1..2);
        drop(second);
        assert!(slots.take(&sandbox, Some(&session), false).is_err(), "a part of it is still there");
        drop(part);
        assert!(slots.take(&sandbox, Some(&session), false).is_ok());
    }

    fn must_close(slot: &Slot) -> bool {
        let mut closing = std::pin::pin!(slot.must_close());
        closing.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn strangers_take_places_of_their_own_and_the_oldest_makes_room_for_the_newest() {
        let slots = Slots::new(Limits { requests_per_sandbox: 1, websockets_per_sandbox: 1, websockets: 1, ..Limits::default() });
        let (sandbox, source) = (SandboxId::new(), Source::default());
        let mut held: Vec<_> = (0..STRANGERS_PER_SANDBOX).map(|_| slots.take_stranger(&sandbox, source)).collect();
        assert!(!held.iter().any(must_close));
        held.push(slots.take_stranger(&sandbox, source));
        assert_eq!(held.iter().position(must_close), Some(0));
        assert_eq!(held.iter().filter(|slot| must_close(slot)).count(), 1);
        assert!(slots.take(&sandbox, None, true).is_ok(), "a client with a good credential has a place of its own");
        drop(held);
        assert!(!must_close(&slots.take_stranger(&sandbox, source)));
    }

    #[test]
    fn strangers_of_many_sandboxes_are_bounded_together() {
        let slots = Slots::new(Limits::default());
        let held: Vec<_> = (0..=STRANGERS).map(|_| slots.take_stranger(&SandboxId::new(), Source::default())).collect();
        assert_eq!(held.iter().position(must_close), Some(0));
    }

    #[tokio::test]
    async fn a_health_check_waits_for_its_turn_and_takes_no_other_place() {
        let slots = Slots::new(Limits { requests_per_sandbox: 1, ..Limits::default() });
        let sandbox = SandboxId::new();
        let _strangers: Vec<_> = (0..STRANGERS_PER_SANDBOX).map(|_| slots.take_stranger(&sandbox, Source::default())).collect();
        let mut held = Vec::new();
        for _ in 0..HEALTH_CHECKS_PER_SANDBOX {
            held.push(slots.take_health_check(&sandbox).await);
        }
        let mut next = std::pin::pin!(slots.take_health_check(&sandbox));
        assert!(next.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert!(slots.take(&sandbox, None, false).is_ok());
        held.pop();
        next.await;
    }
}
