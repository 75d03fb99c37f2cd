//! The audit trail: one record per request, with principal, token and result, kept until the broker has fetched it.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
};

use axum::extract::Query;
use cobox_protocol::{
    RequestId, Timestamp,
    audit::{ClaimBatch, MAX_CLAIM_BATCH, SandboxClaim},
};
use serde::Deserialize;

/// Some minutes of a busy sandbox whose broker is unreachable, at most 2 MiB. Beyond it the oldest records are dropped
/// and counted.
const MAX_WAITING: usize = 2048;

pub struct AuditTrail {
    life: String,
    lines: Mutex<Lines>,
}

#[derive(Default)]
struct Lines {
    waiting: VecDeque<SandboxClaim>,
    last: u64,
    lost: u64,
}

impl Default for AuditTrail {
    fn default() -> Self {
        Self { life: RequestId::new().as_str().trim_start_matches("req_").to_owned(), lines: Mutex::default() }
    }
}

#[derive(Deserialize)]
pub struct After {
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
        let mut lines = self.lines();
        lines.last += 1;
        let claim = SandboxClaim { seq: lines.last, at: Timestamp::now(), ..claim };
        lines.waiting.push_back(claim);
        if lines.waiting.len() > MAX_WAITING {
            lines.waiting.pop_front();
            lines.lost += 1;
        }
    }

    /// The oldest records after those acknowledged, which are dropped.
    pub fn fetch(&self, Query(taken): Query<After>) -> ClaimBatch {
        let mut lines = self.lines();
        if taken.life == self.life {
            while lines.waiting.front().is_some_and(|c| c.seq <= taken.after) {
                lines.waiting.pop_front();
            }
        }
        let items: Vec<SandboxClaim> = lines.waiting.iter().take(MAX_CLAIM_BATCH).cloned().collect();
        ClaimBatch { life: self.life.clone(), more: items.len() < lines.waiting.len(), items, lost: lines.lost }
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        // No change can panic halfway, so the state is consistent.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(request_id: &str) -> SandboxClaim {
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
    fn lines_are_kept_until_they_are_taken_and_what_nobody_takes_is_counted() {
        let trail = AuditTrail::default();
        let fetch = |after, life: &str| trail.fetch(Query(After { after, life: life.into() }));
        (0..3).for_each(|i| trail.add(line(&i.to_string())));
        let first = fetch(0, "");
        assert_eq!(first.items.iter().map(|c| c.seq).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(fetch(2, "of another life").items.len(), 3, "a stranger's count takes nothing");
        assert_eq!(fetch(2, &first.life).items.iter().map(|c| c.seq).collect::<Vec<_>>(), [3]);
        (0..MAX_WAITING + 4).for_each(|i| trail.add(line(&i.to_string())));
        let later = fetch(3, &first.life);
        assert_eq!((later.items.len(), later.more, later.lost), (MAX_CLAIM_BATCH, true, 5));
    }
}
