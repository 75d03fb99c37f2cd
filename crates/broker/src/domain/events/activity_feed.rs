//! Activity feed: the operations in the sandboxes of this node, fetched from each boxd and stored as events that are
//! marked as reported by the sandbox (untrusted).

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cobox_protocol::{
    SandboxId,
    audit::claim_text,
    event::{Activity, ActivityBatch, EventKind, EventSource, MAX_ACTIVITY_BATCH},
};
use cobox_provider::control;

use super::ingest_limit::IngestLimits;
use crate::{
    domain::{
        context::BrokerContext,
        model::{Event, Sandbox},
    },
    store::{CollectedActivity, EventMarks, StoreError},
};

/// Long-poll time of a request to boxd.
const POLL_TIMEOUT: Duration = Duration::from_secs(25);
/// Pause between attempts when boxd doesn't answer, at first and at most.
const RETRY: Duration = Duration::from_secs(1);
const RETRY_AT_MOST: Duration = Duration::from_secs(30);
/// Minimum interval between empty responses of boxd.
const MIN_EMPTY_INTERVAL: Duration = Duration::from_secs(1);
/// Pause between responses with entries: each is a transaction, so those of a busy moment share one.
const BATCH_INTERVAL: Duration = Duration::from_millis(50);
/// After this many events of one sandbox, the events of its workspace are trimmed to their limit.
const TRIM_EVERY: usize = 1000;
/// Time limit for the last fetch before a sandbox ends.
const LAST_FETCH_TIMEOUT: Duration = Duration::from_millis(500);

pub struct ActivityCollector {
    context: Arc<BrokerContext>,
    ingest_limits: IngestLimits,
}

impl ActivityCollector {
    pub fn new(context: Arc<BrokerContext>) -> Self {
        Self { context, ingest_limits: IngestLimits::default() }
    }

    /// Follows the feed while the sandbox runs; never returns.
    pub async fn follow(&self, id: &SandboxId) {
        let (mut retry, mut written) = (RETRY, 0);
        // Entries from before a restart count against the ingest limit, too.
        tokio::time::sleep(self.ingest_limits.remaining_wait(id, self.context.now())).await;
        loop {
            let polled_at = Instant::now();
            match self.fetch(id, POLL_TIMEOUT).await {
                Ok(count) => {
                    retry = RETRY;
                    written += count;
                    if written >= TRIM_EVERY {
                        written = 0;
                        self.trim(id).await;
                    }
                    let mut pause = self.ingest_limits.charge(id, count, self.context.now());
                    if count == 0 {
                        pause = MIN_EMPTY_INTERVAL.saturating_sub(polled_at.elapsed());
                    } else if count < MAX_ACTIVITY_BATCH {
                        pause = pause.max(BATCH_INTERVAL);
                    }
                    tokio::time::sleep(pause).await;
                }
                Err(error) => {
                    // The watcher detects whether boxd died.
                    tracing::debug!(sandbox = %id, error, "boxd did not tell what happens");
                    tokio::time::sleep(retry).await;
                    retry = (retry * 2).min(RETRY_AT_MOST);
                }
            }
        }
    }

    /// Fetches the last entries of a sandbox about to end.
    pub async fn collect_last(&self, sandbox: &Sandbox) {
        match tokio::time::timeout(LAST_FETCH_TIMEOUT, self.fetch(&sandbox.id, Duration::ZERO)).await {
            Ok(Ok(count)) => drop(self.ingest_limits.charge(&sandbox.id, count, self.context.now())),
            _ => tracing::debug!(sandbox = %sandbox.id, "a sandbox ended before all of its events were taken"),
        }
    }

    /// Returns the number of entries. Each is stored before boxd may drop it, and only once: the store records how far it
    /// has them.
    async fn fetch(&self, id: &SandboxId, wait: Duration) -> Result<usize, String> {
        let context = &self.context;
        let failed = |e: StoreError| e.to_string();
        let known = context.store.event_marks(id).await.map_err(failed)?;
        let batch = control::fetch_activity(&*context.provider, id, (&known.life, known.taken), wait).await.map_err(|e| e.to_string())?;
        if batch.items.is_empty() {
            return Ok(0);
        }
        let sandbox = context.store.sandbox(id).await.map_err(failed)?.ok_or("there is no such sandbox")?;
        let batch_to_store = self.to_store(&sandbox, &known, batch);
        let count = batch_to_store.events.len();
        if count > 0 {
            context.store.append_activity(&batch_to_store).await.map_err(failed)?;
        }
        Ok(count)
    }

    fn to_store(&self, sandbox: &Sandbox, known: &EventMarks, batch: ActivityBatch) -> CollectedActivity {
        let life = claim_text(&batch.life);
        let mut last = if life == known.life { known.taken } else { 0 };
        let mut events = Vec::new();
        // More entries than requested, older ones, or entries out of order violate the protocol: ignored.
        for entry in batch.items.into_iter().take(MAX_ACTIVITY_BATCH) {
            let seq = entry.seq;
            if seq <= last || i64::try_from(seq).is_err() {
                continue;
            }
            if seq > last + 1 {
                let lost = EventKind::Gap { lost: Some(seq - last - 1) };
                events.push((seq, Event { source: EventSource::Sandbox, ..Event::of_sandbox(self.context.now(), sandbox, lost) }));
            }
            last = seq;
            events.push((seq, self.event(sandbox, entry)));
        }
        CollectedActivity { workspace: sandbox.workspace.clone(), sandbox: sandbox.id.clone(), life, events }
    }

    /// Untrusted input from the sandbox: text is bounded, and the time is clamped between the sandbox's creation and now.
    /// The event always belongs to this sandbox, and isn't shown in a session of another one even if it names that
    /// session.
    fn event(&self, sandbox: &Sandbox, entry: Activity) -> Event {
        Event {
            at: entry.at.max(sandbox.created_at).min(self.context.now()),
            workspace: sandbox.workspace.clone(),
            sandbox: sandbox.id.clone(),
            session: entry.session_id.and_then(|s| s.parse().ok()),
            principal: entry.principal.as_deref().map(claim_text),
            actor: entry.actor.map(|a| a.as_str().to_owned()),
            source: EventSource::Sandbox,
            what: entry.action.bounded().into(),
        }
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
