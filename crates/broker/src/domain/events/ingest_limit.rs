//! Ingest limit per sandbox: a hostile sandbox that reports endlessly must not fill the database.

use std::{collections::HashMap, time::Duration};

use cobox_protocol::{SandboxId, Timestamp};
use parking_lot::Mutex;

/// Token bucket for the records of one sandbox: size of a burst, and refill per second. Above the limit the broker stops
/// fetching from the sandbox; what the sandbox can't keep until then is counted as lost.
pub const BURST: f64 = 1000.0;
pub const PER_SECOND: f64 = 50.0;
/// Number of tracked sandboxes above which those with a full bucket are dropped.
const SWEEP_AT: usize = 256;

/// Keyed by sandbox, not by run: stopping and starting a sandbox doesn't refill its limit.
#[derive(Default)]
pub struct IngestLimits(Mutex<HashMap<SandboxId, Bucket>>);

#[derive(Clone, Copy)]
struct Bucket {
    left: f64,
    at: Timestamp,
}

impl IngestLimits {
    /// How long the broker must not fetch from this sandbox.
    pub fn remaining_wait(&self, id: &SandboxId, now: Timestamp) -> Duration {
        self.buckets().get(id).map_or(Duration::ZERO, |bucket| bucket.filled(now).remaining_wait())
    }

    /// Charges `count` records, then returns the wait as [`IngestLimits::remaining_wait`] does.
    pub fn charge(&self, id: &SandboxId, count: usize, now: Timestamp) -> Duration {
        let mut buckets = self.buckets();
        if buckets.len() >= SWEEP_AT && !buckets.contains_key(id) {
            buckets.retain(|_, bucket| bucket.filled(now).left < BURST);
        }
        let filled = buckets.get(id).map_or(Bucket { left: BURST, at: now }, |bucket| bucket.filled(now));
        // A batch has a few hundred records, so the conversion is exact.
        let charged = Bucket { left: filled.left - count as f64, ..filled };
        buckets.insert(id.clone(), charged);
        charged.remaining_wait()
    }

    fn buckets(&self) -> parking_lot::MutexGuard<'_, HashMap<SandboxId, Bucket>> {
        self.0.lock()
    }
}

impl Bucket {
    fn filled(self, now: Timestamp) -> Self {
        let earned = now.saturating_since(self.at).as_secs_f64() * PER_SECOND;
        Self { left: (self.left + earned).min(BURST), at: now }
    }

    fn remaining_wait(self) -> Duration {
        Duration::try_from_secs_f64(-self.left / PER_SECOND).unwrap_or(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_over_its_ingest_limit_has_to_wait() {
        let (ingest_limits, id, other) = (IngestLimits::default(), SandboxId::new(), SandboxId::new());
        let at = Timestamp::from_unix;
        assert_eq!(ingest_limits.charge(&id, 500, at(0)), Duration::ZERO);
        assert_eq!(ingest_limits.charge(&id, 1000, at(0)), Duration::from_secs(10));
        assert_eq!(ingest_limits.remaining_wait(&id, at(4)), Duration::from_secs(6));
        assert_eq!(ingest_limits.charge(&id, 50, at(4)), Duration::from_secs(7));
        // A clock that was set back adds nothing; time counts on from there. Other sandboxes are not affected.
        assert_eq!(ingest_limits.charge(&id, 0, at(3)), Duration::from_secs(7));
        assert_eq!(ingest_limits.remaining_wait(&id, at(4)), Duration::from_secs(6));
        assert_eq!(ingest_limits.remaining_wait(&other, at(0)), Duration::ZERO);
        assert_eq!(ingest_limits.charge(&id, 1000, at(1000)), Duration::ZERO);
    }

    #[test]
    fn sandboxes_with_a_full_bucket_are_dropped() {
        let ingest_limits = IngestLimits::default();
        for n in 0..10 * SWEEP_AT {
            ingest_limits.charge(&SandboxId::new(), 100, Timestamp::from_unix(i64::try_from(n).unwrap()));
        }
        assert!(ingest_limits.buckets().len() <= SWEEP_AT);
    }
}
