//! Detects that this machine or this process was suspended, by comparing the wall clock with the timers.
//!
//! Timers do not advance while a machine sleeps, so a connection that died during the sleep would look alive afterwards.

use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep};

/// Interval of the clock comparison.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum gap that counts as a sleep: longer than a busy machine delays a process. A clock set forward looks the same, and costs one
/// ping.
const MIN_SLEEP: Duration = Duration::from_secs(4);

/// A point in time on the timer clock and on the wall clock, which also advances while the machine sleeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SleepAwareInstant {
    pub timer: Instant,
    wall: SystemTime,
}

impl SleepAwareInstant {
    pub fn now() -> Self {
        Self { timer: Instant::now(), wall: SystemTime::now() }
    }

    /// Age by the clock that shows more. A wall clock that was set forward counts as a sleep.
    pub fn age(&self, now: SleepAwareInstant) -> Duration {
        // A wall clock that was set back is ignored.
        let by_wall = now.wall.duration_since(self.wall).unwrap_or_default();
        now.timer.saturating_duration_since(self.timer).max(by_wall)
    }

    #[cfg(test)]
    pub fn earlier(self, timer: Duration, wall: Duration) -> Self {
        Self { timer: self.timer - timer, wall: self.wall - wall }
    }
}

#[derive(Debug)]
pub(crate) struct SleepDetector {
    checked_at: SystemTime,
}

impl SleepDetector {
    pub fn new() -> Self {
        Self { checked_at: SystemTime::now() }
    }

    /// Resolves after the machine was asleep. Cancel safe: a sleep between two calls is also detected.
    pub async fn woke_up(&mut self) {
        while !self.has_slept(SystemTime::now()) {
            sleep(CHECK_INTERVAL).await;
        }
    }

    /// Whether the machine was asleep since the last check.
    fn has_slept(&mut self, now: SystemTime) -> bool {
        // A clock that was set back is not a sleep.
        let passed = now.duration_since(std::mem::replace(&mut self.checked_at, now)).unwrap_or_default();
        passed >= CHECK_INTERVAL + MIN_SLEEP
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_jump_forward_is_a_sleep_and_one_backward_is_not() {
        let mut detector = SleepDetector::new();
        let start = detector.checked_at;
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!detector.has_slept(at(3)));
        assert!(detector.has_slept(at(3600)));
        assert!(!detector.has_slept(at(3601)));
        assert!(!detector.has_slept(at(10)));
        assert!(!detector.has_slept(at(11)));
    }
}
