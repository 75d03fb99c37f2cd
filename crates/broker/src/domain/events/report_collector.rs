//! Collects what the sandboxes of this node report, claims and activities, by following each while it runs.

use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use cobox_protocol::{
    SandboxId,
    audit::SandboxClaim,
    event::Activity,
    report::{ReportBatch, ReportCursor, ReportQuery, Reports},
};
use cobox_provider::{ProviderError, control};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use super::{
    activity_feed,
    ingest_limit::IngestLimits,
    sandbox_claims::{self, StoredClaims},
};
use crate::{
    domain::{context::BrokerContext, model::Sandbox},
    store::{Note, StoreError},
};

/// Long-poll time of a request to boxd.
const POLL_TIMEOUT: Duration = Duration::from_secs(25);
/// Pause between attempts when boxd doesn't answer, at first and at most.
const RETRY: Duration = Duration::from_secs(1);
const RETRY_AT_MOST: Duration = Duration::from_secs(30);
/// Minimum interval between responses of boxd that come early and have nothing new.
const MIN_EMPTY_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after a response with records: they are a transaction, so those of a busy moment share one.
const BATCH_INTERVAL: Duration = Duration::from_millis(50);
/// Interval between batches of claims. No request waits for them, and every request leaves one.
const CLAIM_INTERVAL: Duration = Duration::from_secs(2);
/// After this many events of one sandbox, the events of its workspace are trimmed to their limit.
const TRIM_EVERY: usize = 1000;
/// Batches of the last collection before a sandbox ends: what boxd keeps.
const MAX_LAST_BATCHES: usize = 8;
/// Time limit for the last collection.
const LAST_COLLECTION_TIMEOUT: Duration = Duration::from_millis(500);

pub struct ReportCollector {
    context: Arc<BrokerContext>,
    followed: Mutex<HashMap<SandboxId, Weak<Progress>>>,
    claim_limits: IngestLimits,
    activity_limits: IngestLimits,
}

/// The collection from one run of a boxd.
#[derive(Default)]
struct Progress {
    /// Locked while claims are stored: the last collection may fetch the same claims as a poll that is under way.
    claims: tokio::sync::Mutex<ClaimProgress>,
    /// Each kind is fetched by its own route, because boxd is older than the route for both, or newer than this broker.
    fetches_singly: AtomicBool,
}

#[derive(Default)]
struct ClaimProgress {
    stored: StoredClaims,
    /// When claims are fetched again; `None` for at once.
    due_at: Option<Instant>,
}

/// Result of one request to boxd.
#[derive(Default)]
struct Collected {
    /// Numbers of new records.
    claims: usize,
    activities: usize,
    has_more: bool,
    /// boxd answered before the time that it could wait.
    is_early: bool,
}

impl ReportCollector {
    pub fn new(context: Arc<BrokerContext>) -> Self {
        Self { context, followed: Mutex::default(), claim_limits: IngestLimits::default(), activity_limits: IngestLimits::default() }
    }

    /// Collects while the sandbox runs; never returns.
    pub async fn follow(&self, id: &SandboxId) {
        let progress = Arc::new(Progress::default());
        {
            let mut followed = self.followed.lock();
            followed.retain(|_, progress| progress.strong_count() > 0);
            followed.insert(id.clone(), Arc::downgrade(&progress));
        }
        let (mut retry, mut untrimmed) = (RETRY, 0);
        loop {
            let began_at = Instant::now();
            match self.collect(id, &progress, POLL_TIMEOUT).await {
                Ok(collected) => {
                    retry = RETRY;
                    untrimmed += collected.activities;
                    if untrimmed >= TRIM_EVERY {
                        untrimmed = 0;
                        self.trim(id).await;
                    }
                    if collected.claims + collected.activities > 0 {
                        sleep(BATCH_INTERVAL).await;
                    } else if collected.is_early {
                        sleep(MIN_EMPTY_INTERVAL.saturating_sub(began_at.elapsed())).await;
                    }
                }
                Err(error) => {
                    // The watcher detects whether boxd died.
                    tracing::debug!(sandbox = %id, error, "collecting the reports of a sandbox failed; retrying");
                    sleep(retry).await;
                    retry = (retry * 2).min(RETRY_AT_MOST);
                }
            }
        }
    }

    /// Collects the last records of a sandbox about to end.
    pub async fn collect_last(&self, sandbox: &Sandbox) {
        let followed = self.followed.lock().get(&sandbox.id).and_then(Weak::upgrade);
        let progress = followed.unwrap_or_default();
        let all = async {
            for _ in 0..MAX_LAST_BATCHES {
                if !self.collect(&sandbox.id, &progress, Duration::ZERO).await?.has_more {
                    break;
                }
            }
            Ok::<(), String>(())
        };
        match tokio::time::timeout(LAST_COLLECTION_TIMEOUT, all).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(sandbox = %sandbox.id, error, "collecting the last reports of a sandbox failed"),
            Err(_) => tracing::warn!(sandbox = %sandbox.id, "collecting the last reports of a sandbox took too long"),
        }
    }

    /// One request to boxd, which waits up to `max_wait` if there are no records. Each record is stored before boxd may
    /// drop it. An activity is stored once: the store records how far it has them. A claim is stored twice if the broker
    /// ends before boxd has dropped it.
    async fn collect(&self, id: &SandboxId, progress: &Progress, max_wait: Duration) -> Result<Collected, String> {
        let query = self.next_query(id, progress, max_wait).await?;
        let (asked_at, wait) = (Instant::now(), Duration::from_millis(query.wait_ms));
        if query.claims.is_none() && query.activities.is_none() {
            sleep(wait).await;
            return Ok(Collected::default());
        }
        let Some(reports) = self.fetch(id, progress, &query).await.map_err(|e| e.to_string())? else {
            // To be fetched again by other routes.
            return Ok(Collected { has_more: true, ..Collected::default() });
        };
        let is_early = asked_at.elapsed() < wait;
        let claims = reports.claims.filter(|batch| query.claims.is_some() && (!batch.items.is_empty() || batch.lost > 0));
        let activities = query.activities.as_ref().zip(reports.activities.filter(|batch| !batch.items.is_empty()));
        if claims.is_none() && activities.is_none() {
            return Ok(Collected { is_early, ..Collected::default() });
        }
        let failed = |error: StoreError| {
            tracing::error!(sandbox = %id, %error, "storing the reports of a sandbox failed; they are fetched again");
            error.to_string()
        };
        let sandbox = self.context.store.sandbox(id).await.map_err(failed)?.ok_or("there is no such sandbox")?;
        let has_more_claims = claims.as_ref().is_some_and(|batch| batch.more);
        let has_more_activities = activities.as_ref().is_some_and(|(_, batch)| batch.more);
        let (claims, activities) = tokio::join!(self.store_claims(&sandbox, progress, claims), self.store_activities(&sandbox, activities));
        let (claims, activities) = (claims.map_err(failed)?, activities.map_err(failed)?);
        let has_more = claims > 0 && has_more_claims || activities > 0 && has_more_activities;
        Ok(Collected { claims, activities, has_more, is_early })
    }

    /// The kinds of which more may be stored now. The wait ends when another kind may be, too.
    async fn next_query(&self, id: &SandboxId, progress: &Progress, max_wait: Duration) -> Result<ReportQuery, String> {
        let now = self.context.now();
        let (claims, claims_in) = {
            let claims = progress.claims.lock().await;
            let due_at = claims.due_at.filter(|_| !max_wait.is_zero());
            let due_in = due_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()));
            (claims.stored.cursor.clone(), self.claim_limits.remaining_wait(id, now).max(due_in))
        };
        let activities_in = self.activity_limits.remaining_wait(id, now);
        let mut wait = [claims_in, activities_in].into_iter().filter(|wait| !wait.is_zero()).fold(max_wait, Duration::min);
        if claims_in.is_zero() && progress.fetches_singly.load(Ordering::Relaxed) {
            // boxd does not wait for claims then, so they are polled.
            wait = Duration::ZERO;
            progress.claims.lock().await.due_at = Some(Instant::now() + CLAIM_INTERVAL);
        }
        let activities = if activities_in.is_zero() {
            let known = self.context.store.event_marks(id).await.map_err(|e| e.to_string())?;
            Some(ReportCursor { run_id: known.life, seq: known.taken })
        } else {
            None
        };
        Ok(ReportQuery {
            claims: claims_in.is_zero().then_some(claims),
            activities,
            // Rounded up, so that a kind may be fetched when the wait is over.
            wait_ms: u64::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u64::MAX),
        })
    }

    /// `None` when it turned out that each kind has to be fetched by its own route.
    async fn fetch(&self, id: &SandboxId, progress: &Progress, query: &ReportQuery) -> Result<Option<Reports>, ProviderError> {
        let provider = &*self.context.provider;
        if progress.fetches_singly.load(Ordering::Relaxed) {
            return control::fetch_reports_singly(provider, id, query).await.map(Some);
        }
        let reports = control::fetch_reports(provider, id, query).await?;
        progress.fetches_singly.store(reports.is_none(), Ordering::Relaxed);
        Ok(reports)
    }

    async fn store_claims(
        &self,
        sandbox: &Sandbox,
        progress: &Progress,
        batch: Option<ReportBatch<SandboxClaim>>,
    ) -> Result<usize, StoreError> {
        let Some(batch) = batch else { return Ok(0) };
        let (now, has_more) = (self.context.now(), batch.more);
        let mut claims = progress.claims.lock().await;
        let (audit, stored) = sandbox_claims::to_store(sandbox, &claims.stored, batch, now);
        let count = audit.len();
        self.context.store.note(&Note { audit, ..Note::default() }).await?;
        claims.stored = stored;
        if count > 0 {
            claims.due_at = (!has_more).then(|| Instant::now() + CLAIM_INTERVAL);
        }
        self.claim_limits.charge(&sandbox.id, count, now);
        Ok(count)
    }

    async fn store_activities(
        &self,
        sandbox: &Sandbox,
        batch: Option<(&ReportCursor, ReportBatch<Activity>)>,
    ) -> Result<usize, StoreError> {
        let Some((known, batch)) = batch else { return Ok(0) };
        let now = self.context.now();
        let collected = activity_feed::to_store(sandbox, known, batch, now);
        let count = collected.events.len();
        if count > 0 {
            self.context.store.append_activity(&collected).await?;
        }
        self.activity_limits.charge(&sandbox.id, count, now);
        Ok(count)
    }

    async fn trim(&self, id: &SandboxId) {
        let context = &self.context;
        let trimmed = async {
            match context.store.sandbox(id).await? {
                Some(sandbox) => context.store.trim_events(&sandbox.workspace, context.config.events_keep_per_workspace).await,
                None => Ok(()),
            }
        };
        if let Err(error) = trimmed.await {
            tracing::warn!(%error, "a workspace's oldest events could not be removed");
        }
    }
}
