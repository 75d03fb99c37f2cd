//! Ingest limit per sandbox: a hostile sandbox that reports endlessly must not fill the database.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use cobox_protocol::{SandboxId, Timestamp};

/// Token bucket for the records of one sandbox: size of a burst, and refill per second. Above the limit the broker stops
/// fetching from the sandbox; what the sandbox can't keep until then is counted as lost.
pub const BURST: f64 = 1000.0;
pub const PER_SECOND: f64 = 50.0;
/// Number of tracked sandboxes above which those with a full bucket are dropped.
const TIDY_AT: usize = 256;

/// Keyed by sandbox, not by run: stopping and starting a sandbox doesn't refill its limit.
#[derive(Default)]
pub struct Allowances(Mutex<HashMap<SandboxId, Allowance>>);

#[derive(Clone, Copy)]
struct Allowance {
    left: f64,
    at: Timestamp,
}

impl Allowances {
    /// How long the broker must not fetch from this sandbox.
    pub fn wait(&self, id: &SandboxId, now: Timestamp) -> Duration {
        self.of().get(id).map_or(Duration::ZERO, |allowance| allowance.filled(now).wait())
    }

    /// Charges `count` records, then returns the wait as [`Allowances::wait`] does.
    pub fn spend(&self, id: &SandboxId, count: usize, now: Timestamp) -> Duration {
        let mut of = self.of();
        if of.len() >= TIDY_AT && !of.contains_key(id) {
            of.retain(|_, allowance| allowance.filled(now).left < BURST);
        }
        let filled = of.get(id).map_or(Allowance { left: BURST, at: now }, |allowance| allowance.filled(now));
        // A batch has a few hundred records, so the conversion is exact.
        let spent = Allowance { left: filled.left - count as f64, ..filled };
        of.insert(id.clone(), spent);
        spent.wait()
    }

    fn of(&self) -> std::sync::MutexGuard<'_, HashMap<SandboxId, Allowance>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Allowance {
    fn filled(self, now: Timestamp) -> Self {
        let earned = now.saturating_since(self.at).as_secs_f64() * PER_SECOND;
        Self { left: (self.left + earned).min(BURST), at: now }
    }

    fn wait(self) -> Duration {
        Duration::try_from_secs_f64(-self.left / PER_SECOND).unwrap_or(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_that_tells_without_end_is_listened_to_less() {
        let (allowances, id, other) = (Allowances::default(), SandboxId::new(), SandboxId::new());
        let at = Timestamp::from_unix;
        assert_eq!(allowances.spend(&id, 500, at(0)), Duration::ZERO);
        assert_eq!(allowances.spend(&id, 1000, at(0)), Duration::from_secs(10));
        assert_eq!(allowances.wait(&id, at(4)), Duration::from_secs(6));
        assert_eq!(allowances.spend(&id, 50, at(4)), Duration::from_secs(7));
        // A clock that was set back adds nothing; time counts on from there. Other sandboxes are not affected.
        assert_eq!(allowances.spend(&id, 0, at(3)), Duration::from_secs(7));
        assert_eq!(allowances.wait(&id, at(4)), Duration::from_secs(6));
        assert_eq!(allowances.wait(&other, at(0)), Duration::ZERO);
        assert_eq!(allowances.spend(&id, 1000, at(1000)), Duration::ZERO);
    }

    #[test]
    fn those_that_are_quiet_again_are_forgotten() {
        let allowances = Allowances::default();
        for n in 0..10 * TIDY_AT {
            allowances.spend(&SandboxId::new(), 100, Timestamp::from_unix(i64::try_from(n).unwrap()));
        }
        assert!(allowances.of().len() <= TIDY_AT);
    }
}
