//! The brokers of one deployment: each is the node of its own sandboxes, and knows from the store where the others are and
//! whether they live.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use cobox_protocol::Timestamp;

use crate::store::{Node, Store, Stored};

/// Beats within the silence after which a broker counts as dead.
const BEATS: u32 = 4;

pub struct Nodes {
    own: String,
    url: String,
    /// Silent for this long, a broker counts as dead.
    timeout: Duration,
    known: Mutex<HashMap<String, Node>>,
}

impl Nodes {
    pub fn new(own: String, url: String, timeout: Duration) -> Self {
        Self { own, url, timeout, known: Mutex::default() }
    }

    /// How often a broker says that it lives.
    pub fn beat_every(&self) -> Duration {
        self.timeout / BEATS
    }

    /// Says that this one lives, and learns who else does.
    pub async fn beat(&self, store: &dyn Store, now: Timestamp) -> Stored<()> {
        if !store.is_shared() {
            return Ok(());
        }
        store.node_seen(&Node { id: self.own.clone(), url: self.url.clone(), seen_at: now }).await?;
        self.learn(store).await
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

    /// How clients reach the sandboxes of a node, without a slash at the end; of one that nobody knows, as our own.
    pub fn url_of(&self, node: &str) -> String {
        if node == self.own { self.url.clone() } else { self.get(node).map_or_else(|| self.url.clone(), |n| n.url) }
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
