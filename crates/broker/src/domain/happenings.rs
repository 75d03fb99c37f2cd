//! What is done in the sandboxes of this node, taken from each boxd as it happens and kept as events: the sandbox's own word.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use cobox_protocol::{
    SandboxId,
    audit::claim_text,
    event::{Happening, Happenings, MAX_HAPPENINGS_AT_ONCE, Source, What},
};
use cobox_provider::control;

use super::{deployment::Deployment, events::Event, model::Sandbox};
use crate::store::{EventMarks, StoreError, TakenHappenings};

/// How long boxd is asked to wait for something to happen.
const WAIT: Duration = Duration::from_secs(25);
/// Between two attempts at a boxd that doesn't answer, at first and at most.
const RETRY: Duration = Duration::from_secs(1);
const RETRY_AT_MOST: Duration = Duration::from_secs(30);
/// A boxd that answers at once with nothing isn't asked more often than this.
const PACE: Duration = Duration::from_secs(1);
/// What a sandbox may tell in one go, and how much a second from then on. Past it it isn't listened to, and what it can't keep is
/// counted as lost.
const BURST: f64 = 1000.0;
const PER_SECOND: f64 = 50.0;
/// A workspace's events are cut to what it may keep after as many of one sandbox's.
const TRIM_EVERY: usize = 1000;
/// Before a sandbox ends its last words are asked for, and not waited for any longer.
const LAST_WORDS_WITHIN: Duration = Duration::from_millis(500);

pub struct HappeningKeeper {
    pub deployment: Arc<Deployment>,
}

impl HappeningKeeper {
    /// For as long as the sandbox runs: never returns.
    pub async fn follow(&self, id: &SandboxId) {
        let (mut retry, mut allowance, mut written) = (RETRY, Allowance::default(), 0);
        loop {
            let asked = Instant::now();
            match self.take(id, WAIT).await {
                Ok(count) => {
                    retry = RETRY;
                    written += count;
                    if written >= TRIM_EVERY {
                        written = 0;
                        self.trim(id).await;
                    }
                    let mut pause = allowance.spend(count);
                    if count == 0 {
                        pause = PACE.saturating_sub(asked.elapsed());
                    }
                    tokio::time::sleep(pause).await;
                }
                Err(error) => {
                    // Whether it died is the watcher's to find out.
                    tracing::debug!(sandbox = %id, error, "boxd did not tell what happens");
                    tokio::time::sleep(retry).await;
                    retry = (retry * 2).min(RETRY_AT_MOST);
                }
            }
        }
    }

    /// What is left to tell of a sandbox about to end.
    pub async fn collect_last(&self, sandbox: &Sandbox) {
        let last = tokio::time::timeout(LAST_WORDS_WITHIN, self.take(&sandbox.id, Duration::ZERO)).await;
        if !matches!(last, Ok(Ok(_))) {
            tracing::debug!(sandbox = %sandbox.id, "a sandbox ended before all of its events were taken");
        }
    }

    /// How many there were. Each is stored before boxd may forget it, and once: the store knows up to where it has them.
    async fn take(&self, id: &SandboxId, wait: Duration) -> Result<usize, String> {
        let d = &self.deployment;
        let failed = |e: StoreError| e.to_string();
        let known = d.store.event_marks(id).await.map_err(failed)?;
        let told = control::happenings(&*d.provider, id, (&known.life, known.taken), wait).await.map_err(|e| e.to_string())?;
        if told.items.is_empty() {
            return Ok(0);
        }
        let sandbox = d.store.sandbox(id).await.map_err(failed)?.ok_or("there is no such sandbox")?;
        let taken = self.taken(&sandbox, &known, told);
        let count = taken.events.len();
        if count > 0 {
            d.store.take_happenings(&taken).await.map_err(failed)?;
        }
        Ok(count)
    }

    fn taken(&self, sandbox: &Sandbox, known: &EventMarks, told: Happenings) -> TakenHappenings {
        let life = claim_text(&told.life);
        let mut last = if life == known.life { known.taken } else { 0 };
        let mut events = Vec::new();
        // More or older than asked for, or out of order, is a sandbox that doesn't keep to the protocol: ignored.
        for happening in told.items.into_iter().take(MAX_HAPPENINGS_AT_ONCE) {
            let seq = happening.seq;
            if seq <= last || i64::try_from(seq).is_err() {
                continue;
            }
            if seq > last + 1 {
                let lost = What::Gap { lost: Some(seq - last - 1) };
                events.push((seq, Event { source: Source::Sandbox, ..Event::of_sandbox(self.deployment.now(), sandbox, lost) }));
            }
            last = seq;
            events.push((seq, self.event(sandbox, happening)));
        }
        TakenHappenings { workspace: sandbox.workspace.clone(), sandbox: sandbox.id.clone(), life, events }
    }

    /// A stranger's words: bounded, and the time between the sandbox's beginning and now. Whatever session it names, the event is
    /// this sandbox's, and shown in none that isn't on it.
    fn event(&self, sandbox: &Sandbox, happening: Happening) -> Event {
        Event {
            at: happening.at.max(sandbox.created_at).min(self.deployment.now()),
            workspace: sandbox.workspace.clone(),
            sandbox: sandbox.id.clone(),
            session: happening.session_id.and_then(|s| s.parse().ok()),
            principal: happening.principal.as_deref().map(claim_text),
            actor: happening.actor.map(|a| a.word().to_owned()),
            source: Source::Sandbox,
            what: happening.what.bounded().into(),
        }
    }

    async fn trim(&self, id: &SandboxId) {
        let d = &self.deployment;
        let trimmed = async {
            match d.store.sandbox(id).await? {
                Some(sandbox) => d.store.trim_events(&sandbox.workspace, d.config.events_keep_per_workspace).await,
                None => Ok(()),
            }
        };
        if let Err(error) = trimmed.await {
            tracing::warn!(%error, "a workspace's oldest events could not be removed");
        }
    }
}

/// How much a sandbox may still tell.
struct Allowance {
    left: f64,
    since: Instant,
}

impl Default for Allowance {
    fn default() -> Self {
        Self { left: BURST, since: Instant::now() }
    }
}

impl Allowance {
    /// How long it isn't listened to after as many.
    fn spend(&mut self, count: usize) -> Duration {
        let earned = self.since.elapsed().as_secs_f64() * PER_SECOND;
        self.since = Instant::now();
        // A batch is a few hundred: nothing is lost by the conversion.
        self.left = (self.left + earned).min(BURST) - count as f64;
        Duration::try_from_secs_f64(-self.left / PER_SECOND).unwrap_or(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_that_tells_without_end_is_listened_to_less() {
        let mut allowance = Allowance::default();
        assert_eq!(allowance.spend(500), Duration::ZERO);
        assert!(allowance.spend(1000) > Duration::from_secs(9));
    }
}
