//! The brokers of one deployment. Each is the node of its own sandboxes, and reads from the store where the others are
//! and whether they are alive.
//!
//! A node counts as dead when its heartbeat did not change for the timeout, as observed by this broker and by this
//! broker's clock: the clocks of two machines are never compared for it. Time in which the database was not read doesn't
//! count, so that after an outage, or after this machine slept, every node has time to send another heartbeat.

use std::{collections::HashMap, sync::Arc, time::Duration};

use cobox_protocol::{RequestId, SandboxId, Timestamp};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::clock_skew::ClockSkew;
use crate::{
    clock::Clock,
    origin::Origin,
    store::{Node, Store, StoreError, Stored},
};

/// Heartbeats within the timeout after which a broker counts as dead.
const HEARTBEATS_PER_TIMEOUT: u32 = 4;
/// How long a probe's result is reused, so that many requests for a node's sandboxes probe it once.
const PROBE_REUSE: Duration = Duration::from_secs(1);
/// How long a probed node has beyond its next regular heartbeat.
const PROBE_GRACE: Duration = Duration::from_secs(1);
/// How often the store is polled for the probe's result.
const PROBE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How often a starting broker checks whether another process runs under its node id: four times within the shortest
/// heartbeat interval.
const SILENCE_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// How long a heartbeat may take beyond its interval to be written.
const HEARTBEAT_GRACE: Duration = Duration::from_millis(500);

/// Why a process can't claim its node id.
#[derive(Debug, thiserror::Error)]
pub enum ClaimNodeError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the broker at {url} uses the node id {node} of this data directory, which is a copy of that broker's")]
    InUse { node: String, url: String },
}

pub struct Nodes {
    own: String,
    /// Identifies this process among all that may claim the node id.
    instance: String,
    origin: Origin,
    /// A broker without a heartbeat for this long counts as dead.
    timeout: Duration,
    known: Mutex<KnownPeers>,
    /// Result and time of the last probe of each node; locked while the probe runs.
    probes: Mutex<HashMap<String, Arc<tokio::sync::Mutex<Option<ProbeResult>>>>>,
    pub skew: ClockSkew,
    /// Time of this broker's last heartbeat.
    last_beat_at: Mutex<Option<Timestamp>>,
    /// Held while a heartbeat is written, so that heartbeats are written in order.
    beat_lock: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct KnownPeers {
    peers: HashMap<String, Peer>,
    /// When the database was last read.
    read_at: Option<Timestamp>,
}

struct Peer {
    node: Node,
    /// When its current heartbeat was first seen here, or when observation began again after a pause.
    beat_seen_at: Timestamp,
    is_reported_dead: bool,
}

#[derive(Clone, Copy)]
struct ProbeResult {
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
            probes: Mutex::default(),
            skew: ClockSkew::default(),
            last_beat_at: Mutex::default(),
            beat_lock: tokio::sync::Mutex::default(),
        }
    }

    /// Interval of heartbeats.
    pub fn heartbeat_interval(&self) -> Duration {
        self.timeout / HEARTBEATS_PER_TIMEOUT
    }

    fn as_node(&self, seen_at: Timestamp, clock_offset_ms: Option<i64>) -> Node {
        let (id, url, instance) = (self.own.clone(), self.origin.as_str().to_owned(), self.instance.clone());
        Node { id, url, seen_at, instance, heartbeats: 0, clock_offset_ms }
    }

    /// Claims the node id for this process. The lock on the data directory prevents a second process, unless the
    /// directory was copied: if it may be a copy (`is_original_directory` is false), another live process under the same node id
    /// is an error.
    pub async fn claim(&self, store: &Store, clock: &dyn Clock, is_original_directory: bool) -> Result<(), ClaimNodeError> {
        if !store.is_shared() {
            return Ok(());
        }
        if !is_original_directory {
            self.wait_for_silence(store).await?;
        }
        Ok(store.take_node(&self.as_node(clock.now(), None)).await?)
    }

    /// Returns when the node's last process counts as dead for every broker. It is watched for a heartbeat interval in any
    /// case.
    async fn wait_for_silence(&self, store: &Store) -> Result<(), ClaimNodeError> {
        let last = async || -> Stored<Option<Node>> { Ok(store.nodes().await?.into_iter().find(|n| n.id == self.own)) };
        let Some(first) = last().await? else { return Ok(()) };
        let left =
            self.timeout.saturating_sub(silence(&first, store.clock_millis().await?)).max(self.heartbeat_interval() + HEARTBEAT_GRACE);
        tracing::warn!(
            url = first.url,
            seconds = left.as_secs(),
            "this data directory was last used elsewhere, and a broker with its node id sent a heartbeat; waiting until that broker \
             counts as dead"
        );
        let deadline = Instant::now() + left;
        while Instant::now() < deadline {
            tokio::time::sleep(SILENCE_POLL_INTERVAL).await;
            if let Some(now) = last().await?
                && (now.seen_at, now.heartbeats, &now.instance) != (first.seen_at, first.heartbeats, &first.instance)
            {
                return Err(ClaimNodeError::InUse { node: now.id, url: now.url });
            }
        }
        Ok(())
    }

    /// Writes a heartbeat and reads those of the others. Returns false when another process has claimed the node id.
    pub async fn send_heartbeat(&self, store: &Store, clock: &dyn Clock) -> Stored<bool> {
        if !store.is_shared() {
            return Ok(true);
        }
        let _beat_lock = self.beat_lock.lock().await;
        let offset = self.skew.measure(store, clock).await?;
        let now = clock.now();
        if !store.record_heartbeat(&self.as_node(now, Some(offset))).await? {
            return Ok(false);
        }
        *self.last_beat_at.lock() = Some(now);
        self.refresh(store, now).await?;
        Ok(true)
    }

    /// Whether the other brokers, if there can be any, consider this one alive.
    pub fn is_known(&self, store: &Store, now: Timestamp) -> bool {
        let last_beat_at = *self.last_beat_at.lock();
        !store.is_shared() || last_beat_at.is_some_and(|at| now.saturating_since(at) < self.timeout)
    }

    pub async fn is_alive(&self, store: &Store, node: &str, now: Timestamp) -> Stored<bool> {
        if node == self.own || self.is_beating(node, now) {
            return Ok(true);
        }
        // The cached state may be outdated.
        self.refresh(store, now).await?;
        Ok(self.is_beating(node, now))
    }

    fn is_beating(&self, node: &str, now: Timestamp) -> bool {
        self.known().peers.get(node).is_some_and(|peer| !self.is_dead(peer, now))
    }

    fn is_dead(&self, peer: &Peer, now: Timestamp) -> bool {
        now.saturating_since(peer.beat_seen_at) >= self.timeout
    }

    /// Whether a node answers right now: it is asked, through the database, to send a heartbeat. A node that has just
    /// died still counts as alive, and clients must not be sent to it. The database is used because brokers may be unable
    /// to reach each other by network.
    pub async fn answers(&self, store: &Store, node: &str, now: Timestamp) -> Stored<bool> {
        if node == self.own {
            return Ok(true);
        }
        let probes = self.probes.lock().entry(node.to_owned()).or_default().clone();
        let mut last = probes.lock().await;
        if let Some(result) = last.filter(|a| a.at.elapsed() < PROBE_REUSE) {
            return Ok(result.is_there);
        }
        self.refresh(store, now).await?;
        let before = self.beat_of(node);
        store.request_heartbeat(node).await?;
        let deadline = Instant::now() + self.heartbeat_interval() + PROBE_GRACE;
        let is_there = loop {
            self.refresh(store, now).await?;
            if self.beat_of(node) != before {
                break true;
            }
            if Instant::now() >= deadline {
                break false;
            }
            tokio::time::sleep(PROBE_POLL_INTERVAL).await;
        };
        *last = Some(ProbeResult { at: Instant::now(), is_there });
        Ok(is_there)
    }

    fn beat_of(&self, node: &str) -> Option<(Timestamp, u64)> {
        self.known().peers.get(node).map(|peer| (peer.node.seen_at, peer.node.heartbeats))
    }

    /// Nodes without a heartbeat for the timeout. Empty while the database isn't read: they may be alive.
    pub fn dead(&self, now: Timestamp) -> Vec<String> {
        let known = self.known();
        if self.is_stale(&known, now) {
            return Vec::new();
        }
        known.peers.values().filter(|peer| self.is_dead(peer, now)).map(|peer| peer.node.id.clone()).collect()
    }

    /// While the database isn't read, as of the last read: only nodes that were dead then.
    pub fn counts(&self, now: Timestamp) -> PeerCounts {
        let known = self.known();
        let is_stale = self.is_stale(&known, now);
        let is_dead = |peer: &&Peer| if is_stale { peer.is_reported_dead } else { self.is_dead(peer, now) };
        let dead = known.peers.values().filter(is_dead).count() as u64;
        PeerCounts { alive: known.peers.len() as u64 - dead, dead }
    }

    /// URL of a sandbox on a node, without a trailing slash. An unknown node is treated as this one.
    pub fn url_of(&self, node: &str, sandbox: &SandboxId) -> String {
        match self.known().peers.get(node) {
            Some(peer) => Origin::read(peer.node.url.clone()).url(sandbox),
            None => self.origin.url(sandbox),
        }
    }

    fn known(&self) -> MutexGuard<'_, KnownPeers> {
        self.known.lock()
    }

    /// Whether heartbeats could have been missed since the database was last read.
    fn is_stale(&self, known: &KnownPeers, now: Timestamp) -> bool {
        known.read_at.is_none_or(|at| now.saturating_since(at) > self.timeout / 2)
    }

    async fn refresh(&self, store: &Store, now: Timestamp) -> Stored<()> {
        let nodes = store.nodes().await?;
        let mut known = self.known();
        let is_stale = self.is_stale(&known, now);
        let mut peers = HashMap::new();
        for node in nodes.into_iter().filter(|n| n.id != self.own) {
            let before = known.peers.remove(&node.id);
            let is_reported_dead = before.as_ref().is_some_and(|peer| peer.is_reported_dead);
            let unchanged = before.filter(|peer| !is_stale && (peer.node.seen_at, peer.node.heartbeats) == (node.seen_at, node.heartbeats));
            let beat_seen_at = unchanged.map_or(now, |peer| peer.beat_seen_at);
            let mut peer = Peer { node, beat_seen_at, is_reported_dead };
            self.report(&mut peer, now);
            peers.insert(peer.node.id.clone(), peer);
        }
        self.skew.compare(peers.values().filter(|peer| !self.is_dead(peer, now)).map(|peer| &peer.node));
        *known = KnownPeers { peers, read_at: Some(now) };
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
                tracing::warn!(
                    node,
                    url,
                    silent_seconds,
                    "another broker stopped sending heartbeats; its sandboxes are unreachable until it is back"
                )
            }
            false => tracing::info!(node, url, "another broker sends heartbeats again"),
        }
    }
}

/// How long ago a node's last heartbeat was, by the database's clock: that of this machine may be ahead. Zero if the node
/// did not compare its clock with the database's.
fn silence(node: &Node, database_ms: i64) -> Duration {
    let Some(offset_ms) = node.clock_offset_ms else { return Duration::ZERO };
    // The heartbeat's time has no fraction of a second: it may have been up to a second later.
    let beat_ms = (node.seen_at.unix() + 1).saturating_mul(1000).saturating_sub(offset_ms);
    Duration::from_millis(database_ms.saturating_sub(beat_ms).try_into().unwrap_or_default())
}
