//! The audit trail: one record per request, with principal, token and result, kept until the broker has fetched it.

use std::collections::VecDeque;

use axum::extract::Query;
use cobox_protocol::{
    RequestId, Timestamp,
    audit::{ClaimBatch, MAX_CLAIM_BATCH, SandboxClaim},
};
use parking_lot::{Mutex, MutexGuard};
use serde::Deserialize;

/// Some minutes of a busy sandbox whose broker is unreachable, at most 2 MiB. Beyond it the oldest records are dropped
/// and counted.
const MAX_PENDING: usize = 2048;

pub struct AuditTrail {
    run_id: String,
    records: Mutex<PendingRecords>,
}

#[derive(Default)]
struct PendingRecords {
    pending: VecDeque<SandboxClaim>,
    last_seq: u64,
    dropped: u64,
}

impl Default for AuditTrail {
    fn default() -> Self {
        Self { run_id: RequestId::new().as_str().trim_start_matches("req_").to_owned(), records: Mutex::default() }
    }
}

#[derive(Deserialize)]
pub struct ClaimFetchParams {
    /// Records up to this number were stored and can be dropped.
    #[serde(default)]
    after: u64,
    /// The run of boxd that the number is from. A number from another run is ignored.
    #[serde(default)]
    life: String,
}

impl AuditTrail {
    /// Adds a record and fills in its number and time.
    pub fn add(&self, claim: SandboxClaim) {
        let mut records = self.records();
        records.last_seq += 1;
        let claim = SandboxClaim { seq: records.last_seq, at: Timestamp::now(), ..claim };
        records.pending.push_back(claim);
        if records.pending.len() > MAX_PENDING {
            records.pending.pop_front();
            records.dropped += 1;
        }
    }

    /// The oldest records after those acknowledged, which are dropped.
    pub fn fetch(&self, Query(params): Query<ClaimFetchParams>) -> ClaimBatch {
        let mut records = self.records();
        if params.life == self.run_id {
            while records.pending.front().is_some_and(|c| c.seq <= params.after) {
                records.pending.pop_front();
            }
        }
        let items: Vec<SandboxClaim> = records.pending.iter().take(MAX_CLAIM_BATCH).cloned().collect();
        ClaimBatch { life: self.run_id.clone(), more: items.len() < records.pending.len(), items, lost: records.dropped }
    }

    fn records(&self) -> MutexGuard<'_, PendingRecords> {
        self.records.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(request_id: &str) -> SandboxClaim {
        SandboxClaim {
            seq: 0,
            at: Timestamp::now(),
            request_id: request_id.into(),
            jti: None,
            principal: None,
            actor: None,
            session_id: None,
            capability: None,
            method: "GET".into(),
            route: "/".into(),
            target: None,
            status: 200,
            error: None,
            duration_ms: 0,
        }
    }

    #[test]
    fn records_are_kept_until_they_are_acknowledged_and_dropped_ones_are_counted() {
        let trail = AuditTrail::default();
        let fetch = |after, life: &str| trail.fetch(Query(ClaimFetchParams { after, life: life.into() }));
        (0..3).for_each(|i| trail.add(claim(&i.to_string())));
        let first = fetch(0, "");
        assert_eq!(first.items.iter().map(|c| c.seq).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(fetch(2, "of another life").items.len(), 3, "a stranger's count takes nothing");
        assert_eq!(fetch(2, &first.life).items.iter().map(|c| c.seq).collect::<Vec<_>>(), [3]);
        (0..MAX_PENDING + 4).for_each(|i| trail.add(claim(&i.to_string())));
        let later = fetch(3, &first.life);
        assert_eq!((later.items.len(), later.more, later.lost), (MAX_CLAIM_BATCH, true, 5));
    }
}
