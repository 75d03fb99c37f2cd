//! Sandbox claims: what sandboxes report about the requests they received, stored beside the broker's own records and
//! marked as reported by the sandbox (untrusted).

use cobox_protocol::{
    Timestamp,
    audit::{SandboxClaim, claim_text},
    report::{ReportBatch, ReportCursor},
    secret::redact,
};

use crate::domain::model::{AuditRecord, Sandbox};

/// Audit action of a record with such a claim.
pub const ACTION: &str = "sandbox.claim";

/// How far the claims of one sandbox are stored.
#[derive(Default)]
pub struct StoredClaims {
    pub cursor: ReportCursor,
    /// Claims that were reported as lost.
    lost: u64,
}

/// The new claims of a batch as audit records, and what is stored with these.
pub fn to_store(
    sandbox: &Sandbox,
    stored: &StoredClaims,
    batch: ReportBatch<SandboxClaim>,
    now: Timestamp,
) -> (Vec<AuditRecord>, StoredClaims) {
    let lost = batch.lost;
    let (claims, cursor) = batch.after(&stored.cursor);
    let lost_before = if cursor.run_id == stored.cursor.run_id { stored.lost } else { 0 };
    let mut records: Vec<AuditRecord> = claims.iter().map(|claim| record(sandbox, claim, now)).collect();
    if lost > lost_before {
        let detail = format!("{} requests left no claim: the sandbox had no room to keep them", lost - lost_before);
        records.push(AuditRecord::of_sandbox(now, sandbox, ACTION, &detail));
    }
    (records, StoredClaims { cursor, lost: lost.max(lost_before) })
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
