//! Notices that this machine or this program was asleep: the wall clock went on, and nobody here did.
//!
//! Timers don't count the time a machine sleeps, so after it a connection that is long dead still looks young.

use std::time::{Duration, SystemTime};

use tokio::time::sleep;

/// How often it is looked.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Longer than a busy machine keeps a program waiting. A clock that is set forward looks the same, and costs one ping.
const NAP: Duration = Duration::from_secs(4);

#[derive(Debug)]
pub(crate) struct Naps {
    looked_at: SystemTime,
}

impl Naps {
    pub fn new() -> Self {
        Self { looked_at: SystemTime::now() }
    }

    /// Resolves after a nap and says how long it was. May be dropped while it waits, and asked again: what happened meanwhile counts.
    pub async fn over(&mut self) -> Duration {
        loop {
            if let Some(nap) = self.since_last_look(SystemTime::now()) {
                return nap;
            }
            sleep(LOOK_EVERY).await;
        }
    }

    fn since_last_look(&mut self, now: SystemTime) -> Option<Duration> {
        // One that is set back is no nap.
        let passed = now.duration_since(std::mem::replace(&mut self.looked_at, now)).unwrap_or_default();
        (passed >= LOOK_EVERY + NAP).then_some(passed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_went_on_by_itself_is_a_nap_and_one_set_back_is_not() {
        let mut naps = Naps::new();
        let start = naps.looked_at;
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(naps.since_last_look(at(3)), None);
        assert_eq!(naps.since_last_look(at(3600)), Some(Duration::from_secs(3597)));
        assert_eq!(naps.since_last_look(at(3601)), None);
        assert_eq!(naps.since_last_look(at(10)), None);
        assert_eq!(naps.since_last_look(at(11)), None);
    }
}
