//! When something long has to end early: its client has gone, its time is up, or it has found enough.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::{Duration, Instant},
};

use cobox_protocol::{ApiError, fs::StoppedBy};

const RUNNING: u8 = 0;
const CANCELLED: u8 = 1;
const TIMEOUT: u8 = 2;
const MAX_MATCHES: u8 = 3;
const MAX_BYTES: u8 = 4;

/// A search without a limit of its own.
const DEFAULT_TIME: Duration = Duration::from_secs(30);
/// Longest a client may ask for.
const MAX_TIME: Duration = Duration::from_secs(300);

/// Shared by the threads of one request.
#[derive(Clone)]
pub struct Stop {
    state: Arc<AtomicU8>,
    deadline: Option<Instant>,
}

impl Stop {
    pub fn new(deadline: Option<Instant>) -> Self {
        Self { state: Arc::new(AtomicU8::new(RUNNING)), deadline }
    }

    /// With the time limit a client asked for.
    pub fn after(seconds: Option<f64>) -> Result<Self, ApiError> {
        let time = match seconds {
            None => DEFAULT_TIME,
            Some(s) => Duration::try_from_secs_f64(s)
                .ok()
                .filter(|d| !d.is_zero() && *d <= MAX_TIME)
                .ok_or_else(|| ApiError::invalid(format!("timeout_seconds: must be more than 0 and at most {}", MAX_TIME.as_secs())))?,
        };
        Ok(Self::new(Some(Instant::now() + time)))
    }

    /// Stops it unless it has stopped already.
    pub fn stop(&self, why: StoppedBy) {
        let why = match why {
            StoppedBy::MaxMatches => MAX_MATCHES,
            StoppedBy::MaxBytes => MAX_BYTES,
            StoppedBy::Timeout | StoppedBy::Depth => TIMEOUT,
        };
        // Who came first has given the reason.
        let _ = self.state.compare_exchange(RUNNING, why, Ordering::Relaxed, Ordering::Relaxed);
    }

    pub fn is_stopped(&self) -> bool {
        if self.deadline.is_some_and(|at| Instant::now() >= at) {
            self.stop(StoppedBy::Timeout);
        }
        self.state.load(Ordering::Relaxed) != RUNNING
    }

    pub fn reason(&self) -> Option<StoppedBy> {
        match self.state.load(Ordering::Relaxed) {
            TIMEOUT => Some(StoppedBy::Timeout),
            MAX_MATCHES => Some(StoppedBy::MaxMatches),
            MAX_BYTES => Some(StoppedBy::MaxBytes),
            _ => None,
        }
    }

    /// Stops the work when what waits for it is dropped.
    pub fn when_dropped(&self) -> StopGuard {
        StopGuard(self.state.clone())
    }
}

pub struct StopGuard(Arc<AtomicU8>);

impl Drop for StopGuard {
    fn drop(&mut self) {
        // Where the work is done already there is nothing to stop.
        let _ = self.0.compare_exchange(RUNNING, CANCELLED, Ordering::Relaxed, Ordering::Relaxed);
    }
}
