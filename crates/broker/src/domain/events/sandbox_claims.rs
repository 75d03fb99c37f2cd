//! Sandbox claims: what sandboxes report about the requests they received. Fetched in intervals and stored beside the
//! broker's own records, marked as reported by the sandbox (untrusted).

use std::{collections::HashMap, sync::Arc, time::Duration};

use cobox_protocol::{
    SandboxId, Timestamp,
    audit::{ClaimBatch, MAX_CLAIM_BATCH, SandboxClaim, claim_text},
    secret::redact,
};
use cobox_provider::control;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

use super::ingest_limit::IngestLimits;
use crate::{
    domain::{
        context::BrokerContext,
        model::{AuditRecord, Sandbox},
    },
    store::Note,
};

/// Audit action of a record with such a claim.
pub const ACTION: &str = "sandbox.claim";
/// Batches per collection; the rest follows in the next one.
const MAX_BATCHES: usize = 8;
/// Time limit for fetching the claims of one sandbox; the rest follows in the next collection.
const COLLECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for the last fetch before a sandbox ends.
const LAST_FETCH_TIMEOUT: Duration = Duration::from_millis(500);

pub struct ClaimCollector {
    context: Arc<BrokerContext>,
    cursors: Mutex<HashMap<SandboxId, ClaimCursor>>,
    ingest_limits: IngestLimits,
}

/// How far the claims of one sandbox are stored.
#[derive(Clone, Default)]
struct ClaimCursor {
    life: String,
    seq: u64,
    lost: u64,
}

impl ClaimCollector {
    pub fn new(context: Arc<BrokerContext>) -> Self {
        Self { context, cursors: Mutex::default(), ingest_limits: IngestLimits::default() }
    }

    /// Fetches and stores new claims. Each claim is stored before its sandbox may drop it, so a crash in between stores
    /// some twice and loses none. A sandbox above its ingest limit is skipped until the limit allows more.
    pub async fn collect(&self, sandbox: &Sandbox) {
        let context = &self.context;
        let deadline = Instant::now() + COLLECT_TIMEOUT;
        for _ in 0..MAX_BATCHES {
            if !self.ingest_limits.remaining_wait(&sandbox.id, context.now()).is_zero() {
                return;
            }
            let known = self.cursors().get(&sandbox.id).cloned().unwrap_or_default();
            let fetch = control::fetch_claims(&*context.provider, &sandbox.id, &known.life, known.seq);
            let claims = match timeout_at(deadline, fetch).await {
                Ok(Ok(claims)) => claims,
                Ok(Err(error)) => return tracing::debug!(sandbox = %sandbox.id, %error, "boxd did not hand over its audit"),
                Err(_) => return tracing::debug!(sandbox = %sandbox.id, "boxd took too long to hand over its audit"),
            };
            let (audit, next) = self.records(sandbox, &known, &claims);
            let count = audit.len();
            if let Err(error) = context.store.note(&Note { audit, ..Note::default() }).await {
                return tracing::error!(sandbox = %sandbox.id, %error, "a sandbox's claims could not be written; they are fetched again");
            }
            self.cursors().insert(sandbox.id.clone(), next);
            self.ingest_limits.charge(&sandbox.id, count, context.now());
            // The first fetch of an unknown life only reads; the next one acknowledges, so that boxd can drop the
            // claims.
            if count == 0 || !claims.more {
                return;
            }
        }
    }

    /// As [`ClaimCollector::collect`], for a sandbox about to end.
    pub async fn collect_last(&self, sandbox: &Sandbox) {
        if tokio::time::timeout(LAST_FETCH_TIMEOUT, self.collect(sandbox)).await.is_err() {
            tracing::warn!(sandbox = %sandbox.id, "a sandbox ended before all of its audit was fetched");
        }
        self.cursors().remove(&sandbox.id);
    }

    fn records(&self, sandbox: &Sandbox, known: &ClaimCursor, claims: &ClaimBatch) -> (Vec<AuditRecord>, ClaimCursor) {
        let (now, is_same_life) = (self.context.now(), claims.life == known.life);
        let (after, lost_before) = if is_same_life { (known.seq, known.lost) } else { (0, 0) };
        // More claims than requested, or older ones, violate the protocol: ignored.
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
        (records, ClaimCursor { life: claim_text(&claims.life), seq: last, lost: claims.lost })
    }

    fn cursors(&self) -> parking_lot::MutexGuard<'_, HashMap<SandboxId, ClaimCursor>> {
        self.cursors.lock()
    }
}

/// Untrusted text from the sandbox: bounded, without terminal control characters, and dated no later than now.
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
