//! Tracks who currently uses which sandbox, so that participants are notified when another one joins.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use cobox_gateway::Caller as Passer;
use cobox_protocol::{
    SandboxId, Timestamp,
    event::{EventKind, EventSource},
};

use super::{deployment::Deployment, events::Event};

/// A participant that hasn't used a sandbox for this long counts as new.
const AWAY_AFTER: Duration = Duration::from_secs(300);
/// Maximum number of tracked participants. Above it all are dropped, and announced again on their next use.
const MAX_PRESENT: usize = 16 * 1024;

#[derive(Default)]
pub struct Presence {
    hasher: RandomState,
    /// Keyed by the hash of participant and sandbox, because it is looked up with every request.
    last_seen: Mutex<HashMap<u64, Timestamp>>,
}

impl Presence {
    /// Appends an event in the background if the participant is new.
    pub fn seen(&self, d: &Arc<Deployment>, sandbox: &SandboxId, who: &Passer) {
        let now = d.now();
        let key = self.hasher.hash_one((sandbox, &who.session, &who.principal, &who.actor));
        {
            let mut last_seen = self.last_seen.lock().unwrap_or_else(PoisonError::into_inner);
            if last_seen.len() >= MAX_PRESENT {
                last_seen.clear();
            }
            if last_seen.insert(key, now).is_some_and(|last| now.saturating_since(last) < AWAY_AFTER) {
                return;
            }
        }
        let event = Event {
            at: now,
            workspace: who.workspace.clone(),
            sandbox: sandbox.clone(),
            session: who.session.clone(),
            principal: Some(who.principal.clone()),
            actor: Some(who.actor.clone()),
            source: EventSource::Broker,
            what: EventKind::Connected,
        };
        let d = d.clone();
        d.background.clone().spawn(async move {
            if let Err(error) = d.store.append_events(&[event]).await {
                tracing::warn!(%error, "that somebody connected could not be written");
            }
        });
    }
}
