//! The brokers of one deployment: each is the node of its own sandboxes, and knows from the store where the others are and
//! whether they live.
//!
//! A node counts as dead when its beat did not change for the timeout, as this broker saw it and by this broker's clock: the clocks of two
//! machines are never compared for it. Time in which the database was not read doesn't count, so that after an outage, or after this
//! machine slept, every node has time to beat again.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use cobox_protocol::{RequestId, SandboxId, Timestamp};
use tokio::time::Instant;

use super::clock_skew::ClockSkew;
use crate::{
    clock::Clock,
    origin::Origin,
    store::{Node, Store, StoreError, Stored},
};

/// Beats within the silence after which a broker counts as dead.
const BEATS: u32 = 4;
/// How long an answer of a node counts, so that many requests for its sandboxes ask it once.
const ANSWER_COUNTS: Duration = Duration::from_secs(1);
/// How long a node that is asked to beat has beyond its next regular beat.
const ANSWER_GRACE: Duration = Duration::from_secs(1);
/// How often its answer is looked for.
const LOOK_FOR_ANSWER_EVERY: Duration = Duration::from_millis(50);

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
    known: Mutex<Known>,
    /// What came of asking a node to beat, and when; held while it is asked.
    asked: Mutex<HashMap<String, Arc<tokio::sync::Mutex<Option<Answered>>>>>,
    pub skew: ClockSkew,
    /// When this one last said that it lives.
    said_at: Mutex<Option<Timestamp>>,
    /// Held while it says so: what it says later is from later.
    saying: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Known {
    peers: HashMap<String, Peer>,
    /// When the database was last read.
    looked_at: Option<Timestamp>,
}

struct Peer {
    node: Node,
    /// When its present beat was first seen here, or when looking began again after a pause.
    beat_seen_at: Timestamp,
    is_reported_dead: bool,
}

#[derive(Clone, Copy)]
struct Answered {
    at: Instant,
    is_there: bool,
}

/// How many other brokers there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerCounts {
    pub alive: u64,
    pub dead: u64,
}

impl Nodes {
    pub fn new(own: String, origin: Origin, timeout: Duration) -> Self {
        Self {
            own,
            instance: RequestId::new().as_str().replacen("req_", "run_", 1),
            origin,
            timeout,
            known: Mutex::default(),
            asked: Mutex::default(),
            skew: ClockSkew::default(),
            said_at: Mutex::default(),
            saying: tokio::sync::Mutex::default(),
        }
    }

    /// How often a broker says that it lives.
    pub fn beat_every(&self) -> Duration {
        self.timeout / BEATS
    }

    fn as_node(&self, seen_at: Timestamp, clock_offset_ms: Option<i64>) -> Node {
        let (id, url, instance) = (self.own.clone(), self.origin.as_str().to_owned(), self.instance.clone());
        Node { id, url, seen_at, instance, beats: 0, clock_offset_ms }
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
        Ok(store.take_node(&self.as_node(clock.now(), None)).await?)
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
        let offset = self.skew.measure(store, clock).await?;
        let now = clock.now();
        if !store.node_seen(&self.as_node(now, Some(offset))).await? {
            return Ok(false);
        }
        *self.said_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        self.learn(store, now).await?;
        Ok(true)
    }

    /// Whether the others, where there can be any, take this one for alive.
    pub fn is_known(&self, store: &dyn Store, now: Timestamp) -> bool {
        let said_at = *self.said_at.lock().unwrap_or_else(PoisonError::into_inner);
        !store.is_shared() || said_at.is_some_and(|at| now.saturating_since(at) < self.timeout)
    }

    pub async fn is_alive(&self, store: &dyn Store, node: &str, now: Timestamp) -> Stored<bool> {
        if node == self.own || self.is_beating(node, now) {
            return Ok(true);
        }
        // What is known may be old.
        self.learn(store, now).await?;
        Ok(self.is_beating(node, now))
    }

    fn is_beating(&self, node: &str, now: Timestamp) -> bool {
        self.known().peers.get(node).is_some_and(|peer| !self.is_dead(peer, now))
    }

    fn is_dead(&self, peer: &Peer, now: Timestamp) -> bool {
        now.saturating_since(peer.beat_seen_at) >= self.timeout
    }

    /// Whether a node answers right now: it is asked, through the database, to beat. A node that died a moment ago still counts as alive, and
    /// clients must not be sent to it. Brokers may not reach each other by network, so no request is made to it.
    pub async fn answers(&self, store: &dyn Store, node: &str, now: Timestamp) -> Stored<bool> {
        if node == self.own {
            return Ok(true);
        }
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner).entry(node.to_owned()).or_default().clone();
        let mut last = asked.lock().await;
        if let Some(answered) = last.filter(|a| a.at.elapsed() < ANSWER_COUNTS) {
            return Ok(answered.is_there);
        }
        self.learn(store, now).await?;
        let before = self.beat_of(node);
        store.ask_for_beat(node).await?;
        let deadline = Instant::now() + self.beat_every() + ANSWER_GRACE;
        let is_there = loop {
            self.learn(store, now).await?;
            if self.beat_of(node) != before {
                break true;
            }
            if Instant::now() >= deadline {
                break false;
            }
            tokio::time::sleep(LOOK_FOR_ANSWER_EVERY).await;
        };
        *last = Some(Answered { at: Instant::now(), is_there });
        Ok(is_there)
    }

    fn beat_of(&self, node: &str) -> Option<(Timestamp, u64)> {
        self.known().peers.get(node).map(|peer| (peer.node.seen_at, peer.node.beats))
    }

    /// Those that were silent for too long. None while the database isn't read: they may be beating.
    pub fn dead(&self, now: Timestamp) -> Vec<String> {
        let known = self.known();
        if self.is_blind(&known, now) {
            return Vec::new();
        }
        known.peers.values().filter(|peer| self.is_dead(peer, now)).map(|peer| peer.node.id.clone()).collect()
    }

    pub fn counts(&self, now: Timestamp) -> PeerCounts {
        let known = self.known();
        let dead = known.peers.values().filter(|peer| self.is_dead(peer, now)).count() as u64;
        PeerCounts { alive: known.peers.len() as u64 - dead, dead }
    }

    /// How clients reach a sandbox of a node, without a slash at the end; of a node that nobody knows, as one of our own.
    pub fn url_of(&self, node: &str, sandbox: &SandboxId) -> String {
        match self.known().peers.get(node) {
            Some(peer) => Origin::read(peer.node.url.clone()).url(sandbox),
            None => self.origin.url(sandbox),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether beats could have been missed since the database was last read.
    fn is_blind(&self, known: &Known, now: Timestamp) -> bool {
        known.looked_at.is_none_or(|at| now.saturating_since(at) > self.timeout / 2)
    }

    async fn learn(&self, store: &dyn Store, now: Timestamp) -> Stored<()> {
        let nodes = store.nodes().await?;
        let mut known = self.known();
        let is_blind = self.is_blind(&known, now);
        let mut peers = HashMap::new();
        for node in nodes.into_iter().filter(|n| n.id != self.own) {
            let before = known.peers.remove(&node.id);
            let is_reported_dead = before.as_ref().is_some_and(|peer| peer.is_reported_dead);
            let unchanged = before.filter(|peer| !is_blind && (peer.node.seen_at, peer.node.beats) == (node.seen_at, node.beats));
            let beat_seen_at = unchanged.map_or(now, |peer| peer.beat_seen_at);
            let mut peer = Peer { node, beat_seen_at, is_reported_dead };
            self.report(&mut peer, now);
            peers.insert(peer.node.id.clone(), peer);
        }
        self.skew.compare(peers.values().filter(|peer| !self.is_dead(peer, now)).map(|peer| &peer.node));
        *known = Known { peers, looked_at: Some(now) };
        Ok(())
    }

    /// Logs that a broker died or came back, once each.
    fn report(&self, peer: &mut Peer, now: Timestamp) {
        let is_dead = self.is_dead(peer, now);
        if is_dead == peer.is_reported_dead {
            return;
        }
        peer.is_reported_dead = is_dead;
        let Node { id: node, url, .. } = &peer.node;
        let silent_seconds = self.timeout.as_secs();
        match is_dead {
            true => {
                tracing::warn!(node, url, silent_seconds, "another broker stopped beating; its sandboxes can't be reached until it is back")
            }
            false => tracing::info!(node, url, "another broker beats again"),
        }
    }
}
