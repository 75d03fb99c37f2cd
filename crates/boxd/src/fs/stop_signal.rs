//! Stops long operations early: the client has disconnected, the time limit is reached, or enough was found.

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

/// Time limit of a search whose request sets none.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time limit.
const MAX_TIMEOUT: Duration = Duration::from_secs(300);

/// Shared by the threads of one request.
#[derive(Clone)]
pub struct StopSignal {
    state: Arc<AtomicU8>,
    deadline: Option<Instant>,
}

impl StopSignal {
    pub fn new(deadline: Option<Instant>) -> Self {
        Self { state: Arc::new(AtomicU8::new(RUNNING)), deadline }
    }

    /// With the request's time limit.
    pub fn with_timeout(seconds: Option<f64>) -> Result<Self, ApiError> {
        let timeout = match seconds {
            None => DEFAULT_TIMEOUT,
            Some(s) => Duration::try_from_secs_f64(s)
                .ok()
                .filter(|d| !d.is_zero() && *d <= MAX_TIMEOUT)
                .ok_or_else(|| ApiError::invalid(format!("timeout_seconds: must be more than 0 and at most {}", MAX_TIMEOUT.as_secs())))?,
        };
        Ok(Self::new(Some(Instant::now() + timeout)))
    }

    /// Stops the operation unless it has already stopped.
    pub fn stop(&self, reason: StoppedBy) {
        let reason = match reason {
            StoppedBy::MaxMatches => MAX_MATCHES,
            StoppedBy::MaxBytes => MAX_BYTES,
            StoppedBy::Timeout | StoppedBy::Depth => TIMEOUT,
        };
        // The first reason is kept.
        let _ = self.state.compare_exchange(RUNNING, reason, Ordering::Relaxed, Ordering::Relaxed);
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

    /// Stops the operation when the returned guard is dropped.
    pub fn stop_on_drop(&self) -> StopGuard {
        StopGuard(self.state.clone())
    }
}

pub struct StopGuard(Arc<AtomicU8>);

impl Drop for StopGuard {
    fn drop(&mut self) {
        // Fails if the operation has already stopped.
        let _ = self.0.compare_exchange(RUNNING, CANCELLED, Ordering::Relaxed, Ordering::Relaxed);
    }
}
