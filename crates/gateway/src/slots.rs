//! How much of the door one sandbox and one session may take, so that a busy one leaves room for the others.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use axum::body::Bytes;
use cobox_protocol::{ApiError, ErrorCode, SandboxId, SessionId};
use serde::Deserialize;
use serde_json::json;

/// Callers of one sandbox that nobody has been authenticated for yet: those who may knock leave the others' places alone.
const STRANGERS_PER_SANDBOX: u32 = 32;
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
#[derive(Default)]
struct Taken {
    requests: AtomicU32,
    websockets: AtomicU32,
    strangers: AtomicU32,
    bytes: AtomicU64,
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
    websockets: AtomicU32,
}

#[derive(Clone)]
pub(crate) struct Slots(Arc<Door>);

/// Whose place a request takes.
#[derive(Clone, Copy)]
pub(crate) enum Visitor<'a> {
    Known(Option<&'a SessionId>),
    Stranger,
}

impl Slots {
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Door { limits, tables: Mutex::default(), websockets: AtomicU32::new(0) }))
    }

    pub fn take(&self, sandbox: &SandboxId, visitor: Visitor<'_>, is_websocket: bool) -> Result<Slot, ApiError> {
        let limits = &self.0.limits;
        // Everything is looked at and counted under this lock; places are given back without it, which only leaves more room.
        let mut tables = self.0.tables.lock().unwrap_or_else(PoisonError::into_inner);
        tables.sweep();
        let of_sandbox = entry(&mut tables.sandboxes, sandbox);
        let session = match visitor {
            Visitor::Known(Some(session)) => Some((session, entry(&mut tables.sessions, session))),
            _ => None,
        };
        if matches!(visitor, Visitor::Stranger) {
            let most = u64::from(STRANGERS_PER_SANDBOX);
            below(&of_sandbox.strangers, most, || format!("{sandbox} has {most} connections that nobody has authenticated yet"), None)?;
        } else {
            let (requests, websockets) = (u64::from(limits.requests_per_sandbox), u64::from(limits.websockets_per_sandbox));
            below(&of_sandbox.requests, requests, || full(sandbox, requests, "requests"), Some("requests_per_sandbox"))?;
            if is_websocket {
                below(&of_sandbox.websockets, websockets, || full(sandbox, websockets, "open WebSockets"), Some("websockets_per_sandbox"))?;
            }
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
            is_stranger: matches!(visitor, Visitor::Stranger),
            is_websocket,
        };
        slot.count(|counter| {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        Ok(slot)
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
    is_stranger: bool,
    is_websocket: bool,
}

impl Slot {
    fn count(&self, change: impl Fn(&AtomicU32)) {
        if self.is_stranger {
            change(&self.sandbox.strangers);
        }
        for taken in (!self.is_stranger).then_some(&self.sandbox).into_iter().chain(&self.session) {
            change(&taken.requests);
            if self.is_websocket {
                change(&taken.websockets);
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
        if self.is_websocket {
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
        let nobody = Visitor::Known(None);
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
        let _one = slots.take(&sandbox, Visitor::Known(Some(&busy)), true).unwrap();
        assert_eq!(limit(slots.take(&sandbox, Visitor::Known(Some(&busy)), true).err()), "websockets_per_session");
        let two = slots.take(&sandbox, Visitor::Known(Some(&busy)), false).unwrap();
        assert_eq!(limit(slots.take(&sandbox, Visitor::Known(Some(&busy)), false).err()), "requests_per_session");
        assert!(slots.take(&sandbox, Visitor::Known(Some(&quiet)), true).is_ok());
        drop(two);
        assert!(slots.take(&sandbox, Visitor::Known(Some(&busy)), false).is_ok());
    }

    #[test]
    fn bytes_count_until_the_other_side_has_them() {
        let slots = Slots::new(Limits { bytes_in_flight_per_session: 10, ..Limits::default() });
        let (sandbox, session) = (SandboxId::new(), SessionId::new());
        let slot = slots.take(&sandbox, Visitor::Known(Some(&session)), false).unwrap();
        let flight = slot.flight();
        let (first, second) = (flight.carry(Bytes::from_static(b"12345")), flight.carry(Bytes::from_static(b"67890")));
        assert_eq!((&first[..], &second[..]), (&b"12345"[..], &b"67890"[..]));
        assert_eq!(limit(slots.take(&sandbox, Visitor::Known(Some(&session)), false).err()), "bytes_in_flight_per_session");
        let part = second.slice(1..2);
        drop(second);
        assert!(slots.take(&sandbox, Visitor::Known(Some(&session)), false).is_err(), "a part of it is still there");
        drop(part);
        assert!(slots.take(&sandbox, Visitor::Known(Some(&session)), false).is_ok());
    }

    #[test]
    fn strangers_take_places_of_their_own() {
        let slots = Slots::new(Limits::default());
        let sandbox = SandboxId::new();
        let held: Vec<_> = (0..STRANGERS_PER_SANDBOX).map(|_| slots.take(&sandbox, Visitor::Stranger, true).unwrap()).collect();
        assert!(limit(slots.take(&sandbox, Visitor::Stranger, false).err()).contains("nobody has authenticated"));
        assert!(slots.take(&sandbox, Visitor::Known(None), true).is_ok());
        drop(held);
        assert!(slots.take(&sandbox, Visitor::Stranger, true).is_ok());
    }
}
