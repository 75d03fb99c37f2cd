//! The brokers of one deployment: each is the node of its own sandboxes, and knows from the store where the others are and
//! whether they live.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use cobox_protocol::{SandboxId, Timestamp};

use crate::{
    clock::Clock,
    origin::Origin,
    store::{Node, Store, Stored},
};

/// Beats within the silence after which a broker counts as dead.
const BEATS: u32 = 4;

pub struct Nodes {
    own: String,
    origin: Origin,
    /// Silent for this long, a broker counts as dead.
    timeout: Duration,
    known: Mutex<HashMap<String, Node>>,
    /// When this one last said that it lives.
    said_at: Mutex<Option<Timestamp>>,
    /// Held while it says so: what it says later is from later.
    saying: tokio::sync::Mutex<()>,
}

impl Nodes {
    pub fn new(own: String, origin: Origin, timeout: Duration) -> Self {
        Self { own, origin, timeout, known: Mutex::default(), said_at: Mutex::default(), saying: tokio::sync::Mutex::default() }
    }

    /// How often a broker says that it lives.
    pub fn beat_every(&self) -> Duration {
        self.timeout / BEATS
    }

    /// Says that this one lives, and learns who else does.
    pub async fn beat(&self, store: &dyn Store, clock: &dyn Clock) -> Stored<()> {
        if !store.is_shared() {
            return Ok(());
        }
        let _saying = self.saying.lock().await;
        let now = clock.now();
        store.node_seen(&Node { id: self.own.clone(), url: self.origin.as_str().to_owned(), seen_at: now }).await?;
        *self.said_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        self.learn(store).await
    }

    /// Whether the others, where there can be any, take this one for alive.
    pub fn is_known(&self, store: &dyn Store, now: Timestamp) -> bool {
        let said_at = *self.said_at.lock().unwrap_or_else(PoisonError::into_inner);
        !store.is_shared() || said_at.is_some_and(|at| now.saturating_since(at) < self.timeout)
    }

    pub async fn is_alive(&self, store: &dyn Store, node: &str, now: Timestamp) -> Stored<bool> {
        let is_alive = |node: Option<Node>| node.is_some_and(|n| now.saturating_since(n.seen_at) < self.timeout);
        if node == self.own || is_alive(self.get(node)) {
            return Ok(true);
        }
        // What is known may be old.
        self.learn(store).await?;
        Ok(is_alive(self.get(node)))
    }

    /// Those that were silent for too long.
    pub fn dead(&self, now: Timestamp) -> Vec<String> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let is_dead = |n: &&Node| n.id != self.own && now.saturating_since(n.seen_at) >= self.timeout;
        known.values().filter(is_dead).map(|n| n.id.clone()).collect()
    }

    /// How clients reach a sandbox of a node, without a slash at the end; of a node that nobody knows, as one of our own.
    pub fn url_of(&self, node: &str, sandbox: &SandboxId) -> String {
        match self.get(node).filter(|_| node != self.own) {
            Some(other) => Origin::read(other.url).url(sandbox),
            None => self.origin.url(sandbox),
        }
    }

    fn get(&self, node: &str) -> Option<Node> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(node).cloned()
    }

    async fn learn(&self, store: &dyn Store) -> Stored<()> {
        let known = store.nodes().await?.into_iter().map(|n| (n.id.clone(), n)).collect();
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = known;
        Ok(())
    }
}
