//! Collects in memory when sandboxes and keys were last used, and writes it to the store in intervals: a lease is an
//! hour, but a write is a disk sync.

use std::{collections::HashMap, time::Duration};

use cobox_protocol::{KeyId, SandboxId, Timestamp};
use parking_lot::Mutex;

use crate::{domain::model::Sandbox, store::Note};

/// Maximum delay of the store. A crash shortens a lease by no more than this.
pub const WRITE_EVERY: Duration = Duration::from_secs(10);
/// `last_used_at` of a key is only shown to people, to whom minutes don't matter.
const WRITE_KEYS_EVERY: Duration = Duration::from_secs(300);

#[derive(Clone, Copy)]
struct LastUse {
    last: Timestamp,
    written: Option<Timestamp>,
    /// Requests forwarded since boxd's own count was last fetched.
    forwarded: u64,
}

#[derive(Default)]
pub struct LastUsed {
    sandboxes: Mutex<HashMap<SandboxId, LastUse>>,
    keys: Mutex<HashMap<KeyId, LastUse>>,
}

impl LastUsed {
    /// Records a request that was forwarded to the sandbox's boxd.
    pub fn record_sandbox_use(&self, id: &SandboxId, now: Timestamp) {
        self.record(id, now, 1);
    }

    /// Records a request about the sandbox that the broker answered itself.
    pub fn record_sandbox_request(&self, id: &SandboxId, now: Timestamp) {
        self.record(id, now, 0);
    }

    fn record(&self, id: &SandboxId, now: Timestamp, forwarded: u64) {
        let mut map = self.sandboxes.lock();
        let record = map.entry(id.clone()).or_insert(LastUse { last: now, written: None, forwarded: 0 });
        record.last = record.last.max(now);
        record.forwarded += forwarded;
    }

    pub fn record_key_use(&self, id: &KeyId, now: Timestamp) {
        let mut map = self.keys.lock();
        map.entry(id.clone()).or_insert(LastUse { last: now, written: None, forwarded: 0 }).last = now;
    }

    fn last_use(&self, id: &SandboxId) -> Option<Timestamp> {
        self.sandboxes.lock().get(id).map(|u| u.last)
    }

    /// The last use known here or in the store.
    pub fn last_use_of(&self, sandbox: &Sandbox) -> Timestamp {
        self.last_use(&sandbox.id).map_or(sandbox.last_active_at, |t| t.max(sandbox.last_active_at))
    }

    /// Number of requests forwarded since the last call.
    pub fn take_forwarded(&self, id: &SandboxId) -> u64 {
        let mut map = self.sandboxes.lock();
        map.get_mut(id).map_or(0, |u| std::mem::take(&mut u.forwarded))
    }

    /// Entries that are due to be written.
    pub fn due(&self, now: Timestamp) -> Note {
        Note { sandboxes: due(&self.sandboxes, now, WRITE_EVERY), keys: due(&self.keys, now, WRITE_KEYS_EVERY), ..Note::default() }
    }

    /// Drops sandboxes that no longer run and keys without recent use, once written: the store has their values.
    pub fn retain(&self, now: Timestamp, is_running: impl Fn(&SandboxId) -> bool) {
        self.sandboxes.lock().retain(|id, u| is_running(id) || u.written.is_none_or(|w| w < u.last));
        let fresh = |u: &LastUse| now.saturating_since(u.last) < 2 * WRITE_KEYS_EVERY || u.written.is_none_or(|w| w < u.last);
        self.keys.lock().retain(|_, u| fresh(u));
    }
}

fn due<K: Clone + Eq + std::hash::Hash>(map: &Mutex<HashMap<K, LastUse>>, now: Timestamp, every: Duration) -> Vec<(K, Timestamp)> {
    let mut map = map.lock();
    let is_due = |u: &LastUse| u.written.is_none_or(|w| u.last > w && now.saturating_since(w) >= every);
    map.iter_mut()
        .filter(|(_, u)| is_due(u))
        .map(|(id, u)| {
            u.written = Some(u.last);
            (id.clone(), u.last)
        })
        .collect()
}
