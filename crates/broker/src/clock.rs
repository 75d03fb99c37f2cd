//! The current time, behind a trait so that tests can set it.

use cobox_protocol::Timestamp;

pub trait Clock: Send + Sync {
    fn now(&self) -> Timestamp;

    /// Unix milliseconds, as precise as the clock allows.
    fn unix_millis(&self) -> i64 {
        self.now().unix().saturating_mul(1000)
    }
}

pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }

    fn unix_millis(&self) -> i64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
    }
}
