//! Health checks: the store answers, the provider can create sandboxes, and the other brokers know that this one is
//! alive.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use tokio::{sync::Mutex, time::Instant};

use super::{deployment::Deployment, pools::MAX_POOLS, templates::MAX_TEMPLATES};
use crate::store::{Counts, WorkspaceTotals};

/// Time limit for one check; the caller is a load balancer that asks again soon.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a result is reused: any client may ask, and each check costs a read.
const FRESH: Duration = Duration::from_millis(500);

/// Time limit for the database's counts in the metrics. After it a scrape is answered without them, so that metrics are
/// available in an outage.
pub const COUNT_WITHIN: Duration = Duration::from_secs(1);

/// Results of the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checks {
    pub store: bool,
    pub provider: bool,
    pub node: bool,
    /// Whether the clocks of all brokers agree. The other brokers would have the same problem, so it doesn't make this
    /// one unready.
    pub clock: bool,
}

impl Checks {
    pub fn is_ready(self) -> bool {
        self.store && self.provider && self.node
    }

    /// The checks that decide readiness.
    pub fn named(self) -> [(&'static str, bool); 3] {
        [("store", self.store), ("provider", self.provider), ("node", self.node)]
    }
}

pub struct Health {
    deployment: Arc<Deployment>,
    last: Mutex<Option<(Instant, Checks)>>,
    counting: std::sync::Mutex<Option<Counting>>,
}

/// A running count query, shared by all scrapes until it completes.
struct Counting {
    since: Instant,
    counts: Shared<BoxFuture<'static, Option<Counts>>>,
}

impl Health {
    pub fn new(deployment: Arc<Deployment>) -> Self {
        Self { deployment, last: Mutex::default(), counting: std::sync::Mutex::default() }
    }

    /// The database's counts, or `None` if it doesn't answer within [`COUNT_WITHIN`]. During an outage only the first
    /// scrape waits: the next ones find its query still running, past the deadline.
    pub async fn counts(&self) -> Option<Counts> {
        let (deadline, counts) = {
            let mut counting = self.counting.lock().unwrap_or_else(PoisonError::into_inner);
            let is_under_way = |c: &Counting| c.counts.peek().is_none();
            let current = match counting.take().filter(is_under_way) {
                Some(current) => current,
                None => Counting { since: Instant::now(), counts: self.count() },
            };
            let current = counting.insert(current);
            (current.since + COUNT_WITHIN, current.counts.clone())
        };
        tokio::time::timeout_at(deadline, counts).await.unwrap_or_default()
    }

    /// The configured limits of every workspace, and the fixed ones.
    pub fn workspace_limits(&self) -> WorkspaceTotals {
        let config = &self.deployment.config;
        WorkspaceTotals {
            sandboxes: config.max_sandboxes_per_workspace.into(),
            snapshots: config.max_snapshots_per_workspace.into(),
            volumes: config.max_volumes_per_workspace.into(),
            stored_bytes: config.max_stored_bytes_per_workspace,
            templates: MAX_TEMPLATES.into(),
            pools: MAX_POOLS.into(),
        }
    }

    /// Runs in its own task, which completes even if all scrapes gave up.
    fn count(&self) -> Shared<BoxFuture<'static, Option<Counts>>> {
        let d = self.deployment.clone();
        let counting = self.deployment.background.spawn(async move {
            let counts = d.store.counts(d.now()).await;
            counts.inspect_err(|error| tracing::warn!(%error, "the database could not be counted for the metrics")).ok()
        });
        // An error means that the broker is ending.
        async move { counting.await.ok().flatten() }.boxed().shared()
    }

    /// Concurrent callers share a result. The log has the reason of a failure.
    pub async fn checks(&self) -> Checks {
        let mut last = self.last.lock().await;
        if let Some((at, checks)) = *last
            && at.elapsed() < FRESH
        {
            return checks;
        }
        let d = &self.deployment;
        // A database whose disk is full still answers reads.
        let store = async { d.store.probe_write(d.now()).await.map_err(|e| e.to_string()) };
        let provider = async { d.provider.ready().await.map_err(|e| e.to_string()) };
        let (store, provider) = tokio::join!(well("store", store), well("provider", provider));
        let node = d.nodes.is_known(&*d.store, d.now());
        if !node {
            tracing::warn!("not ready: the other brokers have not been told for too long that this one lives");
        }
        let checks = Checks { store, provider, node, clock: !d.nodes.skew.is_large() };
        *last = Some((Instant::now(), checks));
        checks
    }
}

async fn well(part: &'static str, asking: impl Future<Output = Result<(), String>>) -> bool {
    let problem = match tokio::time::timeout(PATIENCE, asking).await {
        Ok(Ok(())) => return true,
        Ok(Err(problem)) => problem,
        Err(_) => format!("it did not answer within {} s", PATIENCE.as_secs()),
    };
    tracing::warn!(part, problem, "not ready");
    false
}
