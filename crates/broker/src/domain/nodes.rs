//! The brokers of one deployment: each is the node of its own sandboxes, and knows from the store where the others are and
//! whether they live.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use cobox_protocol::{RequestId, SandboxId, Timestamp};
use tokio::time::Instant;

use crate::{
    clock::Clock,
    origin::Origin,
    store::{Node, Store, StoreError, Stored},
};

/// Beats within the silence after which a broker counts as dead.
const BEATS: u32 = 4;

/// How often a start looks whether another process speaks for its node: four times within the shortest beat.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Why a process can't speak for its node.
#[derive(Debug, thiserror::Error)]
pub enum TakeNodeError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the broker at {url} runs with the node id {node} of this data directory, which is a copy of its own")]
    InUse { node: String, url: String },
}

pub struct Nodes {
    own: String,
    /// This process, among all that may speak for the node.
    instance: String,
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
        let instance = RequestId::new().as_str().replacen("req_", "run_", 1);
        Self { own, instance, origin, timeout, known: Mutex::default(), said_at: Mutex::default(), saying: tokio::sync::Mutex::default() }
    }

    /// How often a broker says that it lives.
    pub fn beat_every(&self) -> Duration {
        self.timeout / BEATS
    }

    fn as_node(&self, seen_at: Timestamp) -> Node {
        Node { id: self.own.clone(), url: self.origin.as_str().to_owned(), seen_at, instance: self.instance.clone() }
    }

    /// Makes this process the one that speaks for the node. The lock on the data directory keeps a second one out, unless there are two
    /// such directories: where it may be a copy (`is_same_place` is false), another process that still speaks for the node is an error.
    pub async fn take(&self, store: &dyn Store, clock: &dyn Clock, is_same_place: bool) -> Result<(), TakeNodeError> {
        if !store.is_shared() {
            return Ok(());
        }
        if !is_same_place {
            self.wait_for_silence(store, clock).await?;
        }
        Ok(store.take_node(&self.as_node(clock.now())).await?)
    }

    /// Returns when the node's last process counts as dead for every broker.
    async fn wait_for_silence(&self, store: &dyn Store, clock: &dyn Clock) -> Result<(), TakeNodeError> {
        let last = async || -> Stored<Option<Node>> { Ok(store.nodes().await?.into_iter().find(|n| n.id == self.own)) };
        let Some(first) = last().await? else { return Ok(()) };
        let left = self.timeout.saturating_sub(clock.now().saturating_since(first.seen_at));
        if left.is_zero() {
            return Ok(());
        }
        tracing::warn!(
            url = first.url,
            seconds = left.as_secs(),
            "this data directory was last used elsewhere, and a broker was heard of by its node id: waiting until that one counts as dead"
        );
        let deadline = Instant::now() + left;
        while Instant::now() < deadline {
            tokio::time::sleep(LOOK_EVERY).await;
            if let Some(now) = last().await?
                && (now.seen_at, &now.instance) != (first.seen_at, &first.instance)
            {
                return Err(TakeNodeError::InUse { node: now.id, url: now.url });
            }
        }
        Ok(())
    }

    /// Says that this one lives, and learns who else does. False when another process speaks for the node by now.
    pub async fn beat(&self, store: &dyn Store, clock: &dyn Clock) -> Stored<bool> {
        if !store.is_shared() {
            return Ok(true);
        }
        let _saying = self.saying.lock().await;
        let now = clock.now();
        if !store.node_seen(&self.as_node(now)).await? {
            return Ok(false);
        }
        *self.said_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        self.learn(store).await?;
        Ok(true)
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
