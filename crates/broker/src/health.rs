//! Health checks: the store answers, the provider can create sandboxes, and the other brokers know that this one is
//! alive.

use std::{
    fmt::Display,
    sync::{Arc, PoisonError},
    time::Duration,
};

use cobox_provider::ProviderError;
use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use tokio::{sync::Mutex, time::Instant};

use crate::{
    domain::{
        context::Deployment,
        resources::{pools::MAX_POOLS, templates::MAX_TEMPLATES},
    },
    store::{Counts, StoreError, WorkspaceTotals},
};

/// Time limit for one check; the caller is a load balancer that asks again soon.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a result is reused: any client may ask, and each check costs a read.
const FRESH: Duration = Duration::from_millis(500);

/// Time limit for the database's counts in the metrics. After it a scrape is answered without them, so that metrics are
/// available in an outage.
pub const COUNT_WITHIN: Duration = Duration::from_secs(1);

/// Category of a failed check's cause. The cause itself is for the log only: it may contain hosts, paths and SQL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Unreachable,
    /// Reachable, but without room, read-only or overloaded.
    Unavailable,
    Failed,
    TimedOut,
    /// The last heartbeat is too old.
    NoHeartbeat,
}

impl Cause {
    pub const fn as_str(self) -> &'static str {
        match self {
            Cause::Unreachable => "unreachable",
            Cause::Unavailable => "unavailable",
            Cause::Failed => "failed",
            Cause::TimedOut => "timed_out",
            Cause::NoHeartbeat => "no_heartbeat",
        }
    }
}

impl From<&StoreError> for Cause {
    fn from(error: &StoreError) -> Self {
        match error {
            StoreError::Unreachable(_) => Cause::Unreachable,
            StoreError::Unavailable(_) => Cause::Unavailable,
            StoreError::Failed(_) | StoreError::Corrupt(_) => Cause::Failed,
        }
    }
}

impl From<&ProviderError> for Cause {
    fn from(error: &ProviderError) -> Self {
        match error {
            ProviderError::Unavailable(_) => Cause::Unavailable,
            ProviderError::Refused(_) | ProviderError::NotRunning(_) => Cause::Failed,
        }
    }
}

/// Results of the checks; `None` for a part that works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checks {
    pub store: Option<Cause>,
    pub provider: Option<Cause>,
    pub node: Option<Cause>,
    /// Whether the clocks of all brokers agree. The other brokers would have the same problem, so it doesn't make this
    /// one unready.
    pub clock: bool,
}

impl Checks {
    pub fn is_ready(self) -> bool {
        self.named().iter().all(|(_, cause)| cause.is_none())
    }

    /// The checks that decide readiness.
    pub fn named(self) -> [(&'static str, Option<Cause>); 3] {
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

    /// Concurrent callers share a result. The log has each failure once, with its whole cause.
    pub async fn checks(&self) -> Checks {
        let mut last = self.last.lock().await;
        if let Some((at, checks)) = *last
            && at.elapsed() < FRESH
        {
            return checks;
        }
        let d = &self.deployment;
        let before = last.map_or([None; 3], |(_, checks)| checks.named().map(|(_, cause)| cause));
        // A database whose disk is full still answers reads.
        let store = failure_of(d.store.probe_write(d.now()));
        let provider = failure_of(d.provider.ready());
        let (store, provider) = tokio::join!(store, provider);
        let silent = || (Cause::NoHeartbeat, "the other brokers got no heartbeat of this one for too long".to_owned());
        let node = (!d.nodes.is_known(&*d.store, d.now())).then(silent);
        let failures = [("store", store), ("provider", provider), ("node", node)];
        for ((part, failure), before) in failures.iter().zip(before) {
            match failure {
                Some((cause, problem)) if before != Some(*cause) => tracing::warn!(part, cause = cause.as_str(), problem, "not ready"),
                None if before.is_some() => tracing::info!(part, "ready again"),
                _ => {}
            }
        }
        let [store, provider, node] = failures.map(|(_, failure)| failure.map(|(cause, _)| cause));
        let checks = Checks { store, provider, node, clock: !d.nodes.skew.is_large() };
        *last = Some((Instant::now(), checks));
        checks
    }
}

/// The cause of a failed check, and its description for the log.
async fn failure_of<E>(asking: impl Future<Output = Result<(), E>>) -> Option<(Cause, String)>
where
    E: Display,
    for<'a> Cause: From<&'a E>,
{
    match tokio::time::timeout(PATIENCE, asking).await {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some((Cause::from(&error), error.to_string())),
        Err(_) => Some((Cause::TimedOut, format!("it did not answer within {} s", PATIENCE.as_secs()))),
    }
}
