//! What time it is, as something tests can set.

use std::time::Duration;

use cobox_protocol::Timestamp;

/// A clock may be set while something sleeps until a time on it, so the sleeper looks at it again at least this often.
const RECHECK_INTERVAL: Duration = Duration::from_secs(30);

pub trait Clock: Send + Sync + 'static {
    fn now(&self) -> Timestamp;

    /// How long a sleeper may sleep before it looks again.
    fn recheck_interval(&self) -> Duration {
        RECHECK_INTERVAL
    }
}

pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }
}

/// Resolves at a time, also if the clock is set in the meantime.
pub async fn sleep_until(clock: &dyn Clock, time: Timestamp) {
    loop {
        let left = time.saturating_since(clock.now());
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(clock.recheck_interval())).await;
    }
}
