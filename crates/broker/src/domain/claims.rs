//! What sandboxes say of the requests they got, fetched now and then and kept beside the broker's own records, as their claim.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use cobox_protocol::{
    SandboxId, Timestamp,
    audit::{ClaimBatch, MAX_CLAIM_BATCH, SandboxClaim, claim_text},
    secret::redact,
};
use cobox_provider::control;
use tokio::time::{Instant, timeout_at};

use super::{allowance::Allowances, audit::AuditRecord, deployment::Deployment, model::Sandbox};
use crate::store::Note;

/// What a record of such a claim is called.
pub const ACTION: &str = "sandbox.claim";
/// Batches in one go; the rest comes with the next.
const MAX_BATCHES: usize = 8;
/// How long one sandbox may take to hand over its claims; what it didn't comes with the next.
const COLLECT_WITHIN: Duration = Duration::from_secs(2);
/// Before a sandbox ends its last claims are asked for, and not waited for any longer.
const LAST_WORDS_WITHIN: Duration = Duration::from_millis(500);

pub struct ClaimKeeper {
    deployment: Arc<Deployment>,
    taken: Mutex<HashMap<SandboxId, Taken>>,
    allowances: Allowances,
}

/// Up to where one sandbox's claims are stored.
#[derive(Clone, Default)]
struct Taken {
    life: String,
    seq: u64,
    lost: u64,
}

impl ClaimKeeper {
    pub fn new(deployment: Arc<Deployment>) -> Self {
        Self { deployment, taken: Mutex::default(), allowances: Allowances::default() }
    }

    /// Fetches and stores what is there. Each claim is stored before its sandbox may forget it, so a crash in between stores
    /// some twice and loses none. One that claims more than it may is asked again when it may.
    pub async fn collect(&self, sandbox: &Sandbox) {
        let d = &self.deployment;
        let deadline = Instant::now() + COLLECT_WITHIN;
        for _ in 0..MAX_BATCHES {
            if !self.allowances.wait(&sandbox.id, d.now()).is_zero() {
                return;
            }
            let known = self.taken().get(&sandbox.id).cloned().unwrap_or_default();
            let asked = control::fetch_claims(&*d.provider, &sandbox.id, &known.life, known.seq);
            let claims = match timeout_at(deadline, asked).await {
                Ok(Ok(claims)) => claims,
                Ok(Err(error)) => return tracing::debug!(sandbox = %sandbox.id, %error, "boxd did not hand over its audit"),
                Err(_) => return tracing::debug!(sandbox = %sandbox.id, "boxd took too long to hand over its audit"),
            };
            let (audit, next) = self.records(sandbox, &known, &claims);
            let count = audit.len();
            if let Err(error) = d.store.note(&Note { audit, ..Note::default() }).await {
                return tracing::error!(sandbox = %sandbox.id, %error, "a sandbox's claims could not be written; they are fetched again");
            }
            self.taken().insert(sandbox.id.clone(), next);
            self.allowances.spend(&sandbox.id, count, d.now());
            // A first fetch of an unknown life has only looked; the next one lets boxd forget.
            if count == 0 || !claims.more {
                return;
            }
        }
    }

    /// The same for a sandbox about to end.
    pub async fn collect_last(&self, sandbox: &Sandbox) {
        if tokio::time::timeout(LAST_WORDS_WITHIN, self.collect(sandbox)).await.is_err() {
            tracing::warn!(sandbox = %sandbox.id, "a sandbox ended before all of its audit was fetched");
        }
        self.taken().remove(&sandbox.id);
    }

    fn records(&self, sandbox: &Sandbox, known: &Taken, claims: &ClaimBatch) -> (Vec<AuditRecord>, Taken) {
        let (now, is_same_life) = (self.deployment.now(), claims.life == known.life);
        let (after, lost_before) = if is_same_life { (known.seq, known.lost) } else { (0, 0) };
        // More or older than asked for is a sandbox that doesn't keep to the protocol: ignored.
        let fresh = claims.items.iter().take(MAX_CLAIM_BATCH).filter(|c| c.seq > after);
        let mut last = after;
        let mut records: Vec<AuditRecord> = Vec::new();
        for claim in fresh {
            last = last.max(claim.seq);
            records.push(record(sandbox, claim, now));
        }
        if claims.lost > lost_before {
            let detail = format!("{} requests left no claim: the sandbox had no room to keep them", claims.lost - lost_before);
            records.push(AuditRecord::of_sandbox(now, sandbox, ACTION, &detail));
        }
        (records, Taken { life: claim_text(&claims.life), seq: last, lost: claims.lost })
    }

    fn taken(&self) -> std::sync::MutexGuard<'_, HashMap<SandboxId, Taken>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A stranger's words: bounded, without anything a terminal obeys, and the time no later than now.
fn record(sandbox: &Sandbox, claim: &SandboxClaim, now: Timestamp) -> AuditRecord {
    let target = claim.target.as_deref().map(redact);
    let words =
        [Some(claim.method.as_str()), Some(claim.route.as_str()), target.as_deref(), claim.capability.as_deref(), claim.error.as_deref()];
    let mut detail: Vec<String> = words.into_iter().flatten().map(claim_text).collect();
    detail.insert(2, claim.status.to_string());
    AuditRecord {
        request_id: claim.request_id.parse().ok(),
        principal: claim.principal.as_deref().map(claim_text),
        actor: claim.actor.map(|a| a.as_str().to_owned()),
        session: claim.session_id.as_ref().and_then(|s| s.parse().ok()),
        sandbox: Some(sandbox.id.clone()),
        jti: claim.jti.as_deref().map(claim_text),
        detail: Some(detail.join(" ")),
        ..AuditRecord::new(claim.at.min(now), &sandbox.workspace, ACTION)
    }
}
