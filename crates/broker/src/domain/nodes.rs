//! The brokers of one deployment: each is the node of its own sandboxes, and knows from the store where the others are and
//! whether they live.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use cobox_protocol::Timestamp;

use crate::store::{Node, Store, Stored};

/// How often a broker says that it lives.
pub const BEAT_EVERY: Duration = Duration::from_secs(5);
/// Silent for this long, a broker counts as dead: three beats in vain, and a clock that is a little off.
pub const DEAD_AFTER: Duration = Duration::from_secs(20);

pub struct Nodes {
    own: String,
    url: String,
    known: Mutex<HashMap<String, Node>>,
}

impl Nodes {
    pub fn new(own: String, url: String) -> Self {
        Self { own, url, known: Mutex::default() }
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
        let is_alive = |node: Option<Node>| node.is_some_and(|n| now.saturating_since(n.seen_at) < DEAD_AFTER);
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
        let is_dead = |n: &&Node| n.id != self.own && now.saturating_since(n.seen_at) >= DEAD_AFTER;
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
