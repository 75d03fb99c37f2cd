//! Notices that this machine or this program was asleep: the wall clock went on, and nobody here did.
//!
//! Timers don't count the time a machine sleeps, so after it a connection that is long dead still looks young.

use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep};

/// How often it is looked.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Longer than a busy machine keeps a program waiting. A clock that is set forward looks the same, and costs one ping.
const NAP: Duration = Duration::from_secs(4);

/// When something happened, on the clock that timers go by and on the wall's, which goes on while the machine sleeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub timer: Instant,
    wall: SystemTime,
}

impl Moment {
    pub fn now() -> Self {
        Self { timer: Instant::now(), wall: SystemTime::now() }
    }

    /// By whichever clock says longer. A wall clock that is set forward counts as a sleep.
    pub fn age(&self, now: Moment) -> Duration {
        // One that was set back says nothing.
        let by_wall = now.wall.duration_since(self.wall).unwrap_or_default();
        now.timer.saturating_duration_since(self.timer).max(by_wall)
    }

    #[cfg(test)]
    pub fn earlier(self, timer: Duration, wall: Duration) -> Self {
        Self { timer: self.timer - timer, wall: self.wall - wall }
    }
}

#[derive(Debug)]
pub(crate) struct Naps {
    looked_at: SystemTime,
}

impl Naps {
    pub fn new() -> Self {
        Self { looked_at: SystemTime::now() }
    }

    /// Resolves after a nap. May be dropped while it waits, and asked again: what happened meanwhile counts.
    pub async fn over(&mut self) {
        while !self.has_slept(SystemTime::now()) {
            sleep(LOOK_EVERY).await;
        }
    }

    /// Since it was looked last.
    fn has_slept(&mut self, now: SystemTime) -> bool {
        // One that is set back is no nap.
        let passed = now.duration_since(std::mem::replace(&mut self.looked_at, now)).unwrap_or_default();
        passed >= LOOK_EVERY + NAP
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
        assert!(!naps.has_slept(at(3)));
        assert!(naps.has_slept(at(3600)));
        assert!(!naps.has_slept(at(3601)));
        assert!(!naps.has_slept(at(10)));
        assert!(!naps.has_slept(at(11)));
    }
}
