//! Tracks who currently uses which sandbox, so that participants are notified when another one joins.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::Duration,
};

use cobox_protocol::{
    SandboxId, SessionId, Timestamp,
    event::{EventKind, EventSource},
};
use parking_lot::Mutex;

use crate::domain::{context::BrokerContext, model::Event};

/// A participant that hasn't used a sandbox for this long counts as new.
const AWAY_AFTER: Duration = Duration::from_secs(300);
/// Maximum number of tracked participants. Above it all are dropped, and announced again on their next use.
const MAX_PRESENT: usize = 16 * 1024;

/// A client that uses a sandbox.
pub struct Participant<'a> {
    pub workspace: &'a str,
    pub principal: &'a str,
    pub actor: &'a str,
    pub session: Option<&'a SessionId>,
}

#[derive(Default)]
pub struct Presence {
    hasher: RandomState,
    /// Keyed by the hash of participant and sandbox, because it is looked up with every request.
    last_seen: Mutex<HashMap<u64, Timestamp>>,
}

impl Presence {
    /// Appends an event in the background if the participant is new.
    pub fn record(&self, context: &Arc<BrokerContext>, sandbox: &SandboxId, participant: &Participant<'_>) {
        let now = context.now();
        let key = self.hasher.hash_one((sandbox, participant.session, participant.principal, participant.actor));
        {
            let mut last_seen = self.last_seen.lock();
            if last_seen.len() >= MAX_PRESENT {
                last_seen.clear();
            }
            if last_seen.insert(key, now).is_some_and(|last| now.saturating_since(last) < AWAY_AFTER) {
                return;
            }
        }
        let event = Event {
            at: now,
            workspace: participant.workspace.to_owned(),
            sandbox: sandbox.clone(),
            session: participant.session.cloned(),
            principal: Some(participant.principal.to_owned()),
            actor: Some(participant.actor.to_owned()),
            source: EventSource::Broker,
            what: EventKind::Connected,
        };
        let context = context.clone();
        context.background.clone().spawn(async move {
            if let Err(error) = context.store.append_events(&[event]).await {
                tracing::warn!(%error, "writing a connection event failed");
            }
        });
    }
}
