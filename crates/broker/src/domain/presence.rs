//! Who uses which sandbox at the moment, so that the others are told when somebody comes.

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

/// Who hasn't used a sandbox for this long is new when they come again.
const AWAY_AFTER: Duration = Duration::from_secs(300);
/// People and agents remembered; past it all are forgotten, and told of again.
const MAX_PRESENT: usize = 16 * 1024;

#[derive(Default)]
pub struct Presence {
    hasher: RandomState,
    /// By the hash of who and where: this is asked with every request.
    last_seen: Mutex<HashMap<u64, Timestamp>>,
}

impl Presence {
    /// Appends an event behind the request, where somebody is new.
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
