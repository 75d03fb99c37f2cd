//! Health checks: the store answers, the provider can create sandboxes, and the other brokers know that this one is
//! alive.

use std::{fmt::Display, sync::Arc, time::Duration};

use cobox_provider::ProviderError;
use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use tokio::{sync::Mutex, time::Instant};

use crate::{
    domain::{
        context::BrokerContext,
        resources::{pools::MAX_POOLS, templates::MAX_TEMPLATES},
    },
    store::{Counts, StoreError, WorkspaceTotals},
};

/// Time limit for one check; the caller is a load balancer that asks again soon.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a result is reused: any client may ask, and each check costs a read.
const RESULT_REUSE: Duration = Duration::from_millis(500);

/// Time limit for everything that the metrics need of the database. After it a scrape is answered without the rest, so
/// that metrics are available in an outage.
pub const METRICS_TIMEOUT: Duration = Duration::from_secs(1);

/// Category of a failed check's cause. The cause itself is for the log only: it may contain hosts, paths and SQL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCause {
    Unreachable,
    /// Reachable, but without room, read-only or overloaded.
    Unavailable,
    Failed,
    TimedOut,
    /// The last heartbeat is too old.
    NoHeartbeat,
}

impl FailureCause {
    pub const fn as_str(self) -> &'static str {
        match self {
            FailureCause::Unreachable => "unreachable",
            FailureCause::Unavailable => "unavailable",
            FailureCause::Failed => "failed",
            FailureCause::TimedOut => "timed_out",
            FailureCause::NoHeartbeat => "no_heartbeat",
        }
    }
}

impl From<&StoreError> for FailureCause {
    fn from(error: &StoreError) -> Self {
        match error {
            StoreError::Unreachable(_) => FailureCause::Unreachable,
            StoreError::Unavailable(_) => FailureCause::Unavailable,
            StoreError::Failed(_) | StoreError::Corrupt(_) => FailureCause::Failed,
        }
    }
}

impl From<&ProviderError> for FailureCause {
    fn from(error: &ProviderError) -> Self {
        match error {
            ProviderError::Unavailable(_) => FailureCause::Unavailable,
            ProviderError::Refused(_) | ProviderError::NotRunning(_) => FailureCause::Failed,
        }
    }
}

/// Results of the checks; `None` for a part that works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthChecks {
    pub store: Option<FailureCause>,
    pub provider: Option<FailureCause>,
    pub node: Option<FailureCause>,
    /// Whether the clocks of all brokers agree. The other brokers would have the same problem, so it doesn't make this
    /// one unready.
    pub clock: bool,
}

impl HealthChecks {
    pub fn is_ready(self) -> bool {
        self.named().iter().all(|(_, cause)| cause.is_none())
    }

    /// The checks that decide readiness.
    pub fn named(self) -> [(&'static str, Option<FailureCause>); 3] {
        [("store", self.store), ("provider", self.provider), ("node", self.node)]
    }
}

/// A check whose result is reused for [`RESULT_REUSE`].
#[derive(Default)]
struct CachedCheck {
    last: Mutex<Option<(Instant, Option<FailureCause>)>>,
}

impl CachedCheck {
    /// Concurrent callers share a result. The log has each failure once, with its whole cause.
    async fn result(&self, part: &str, check: impl Future<Output = CheckResult>) -> Option<FailureCause> {
        let mut last = self.last.lock().await;
        if let Some((at, cause)) = *last
            && at.elapsed() < RESULT_REUSE
        {
            return cause;
        }
        let before = last.and_then(|(_, cause)| cause);
        let cause = match check.await {
            Some((cause, problem)) => {
                if before != Some(cause) {
                    tracing::warn!(part, cause = cause.as_str(), problem, "not ready");
                }
                Some(cause)
            }
            None => {
                if before.is_some() {
                    tracing::info!(part, "ready again");
                }
                None
            }
        };
        *last = Some((Instant::now(), cause));
        cause
    }
}

/// The cause of a failed check, and its description for the log.
type CheckResult = Option<(FailureCause, String)>;

pub struct Health {
    context: Arc<BrokerContext>,
    store: CachedCheck,
    provider: CachedCheck,
    node: CachedCheck,
    counting: parking_lot::Mutex<Option<RunningCount>>,
}

/// A running count query, shared by all scrapes until it completes.
struct RunningCount {
    since: Instant,
    counts: Shared<BoxFuture<'static, Option<Counts>>>,
}

impl Health {
    pub fn new(context: Arc<BrokerContext>) -> Self {
        Self {
            context,
            store: CachedCheck::default(),
            provider: CachedCheck::default(),
            node: CachedCheck::default(),
            counting: parking_lot::Mutex::default(),
        }
    }

    /// The database's counts, or `None` if it doesn't answer within [`METRICS_TIMEOUT`]. During an outage only the first
    /// scrape waits: the next ones find its query still running, past the deadline.
    pub async fn counts(&self) -> Option<Counts> {
        let (deadline, counts) = {
            let mut counting = self.counting.lock();
            let is_under_way = |c: &RunningCount| c.counts.peek().is_none();
            let current = match counting.take().filter(is_under_way) {
                Some(current) => current,
                None => RunningCount { since: Instant::now(), counts: self.count() },
            };
            let current = counting.insert(current);
            (current.since + METRICS_TIMEOUT, current.counts.clone())
        };
        tokio::time::timeout_at(deadline, counts).await.unwrap_or_default()
    }

    /// The configured limits of every workspace, and the fixed ones.
    pub fn workspace_limits(&self) -> WorkspaceTotals {
        let config = &self.context.config;
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
        let context = self.context.clone();
        let counting = self.context.background.spawn(async move {
            let counts = context.store.counts(context.now()).await;
            counts.inspect_err(|error| tracing::warn!(%error, "counting database rows for the metrics failed")).ok()
        });
        // An error means that the broker is ending.
        async move { counting.await.ok().flatten() }.boxed().shared()
    }

    pub async fn checks(&self) -> HealthChecks {
        let context = &self.context;
        let provider = self.provider.result("provider", run_check(context.provider.ready()));
        let node = self.node.result("node", async {
            let is_known = context.nodes.is_known(&context.store, context.now());
            let problem = "no heartbeat of this broker was written for too long";
            (!is_known).then(|| (FailureCause::NoHeartbeat, problem.to_owned()))
        });
        let (store, provider, node) = tokio::join!(self.store(), provider, node);
        HealthChecks { store, provider, node, clock: !context.nodes.skew.is_large() }
    }

    /// Why the store takes no writes, if so. A database whose disk is full still answers reads.
    pub async fn store(&self) -> Option<FailureCause> {
        let context = &self.context;
        self.store.result("store", run_check(context.store.probe_write(context.now()))).await
    }
}

async fn run_check<E>(check: impl Future<Output = Result<(), E>>) -> CheckResult
where
    E: Display,
    for<'a> FailureCause: From<&'a E>,
{
    match tokio::time::timeout(CHECK_TIMEOUT, check).await {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some((FailureCause::from(&error), error.to_string())),
        Err(_) => Some((FailureCause::TimedOut, format!("it did not answer within {} s", CHECK_TIMEOUT.as_secs()))),
    }
}
