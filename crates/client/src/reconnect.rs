//! Reconnect policy: whether and when to connect again after a connection ended.

use std::time::Duration;

use cobox_protocol::{ErrorCode, frame::close};

use crate::{
    ClientError,
    error::{ABNORMAL_CLOSURE, close_reason},
};

/// Reconnect settings of a stream.
#[derive(Clone, Copy, Debug)]
pub struct Reconnect {
    /// Approximate first wait; each failed attempt doubles it.
    pub first_wait: Duration,
    pub longest_wait: Duration,
    /// After this time without success the stream ends with [`ClientError::GaveUp`].
    pub give_up_after: Duration,
    /// A connection on which nothing is received for this long is considered dead.
    pub silence: Duration,
    /// Older keystrokes are dropped, because the screen has changed since they were typed.
    pub key_age: Duration,
}

impl Default for Reconnect {
    fn default() -> Self {
        Self {
            first_wait: Duration::from_millis(100),
            longest_wait: Duration::from_secs(5),
            give_up_after: Duration::from_secs(120),
            silence: Duration::from_secs(45),
            key_age: Duration::from_secs(5),
        }
    }
}

/// Exponential backoff with jitter: each wait is random between half and all of the current maximum, so that many clients that lost
/// the same broker do not reconnect simultaneously.
#[derive(Debug)]
pub(crate) struct Backoff {
    policy: Reconnect,
    tries: u32,
}

impl Backoff {
    pub fn new(policy: Reconnect) -> Self {
        Self { policy, tries: 0 }
    }

    pub fn wait(&mut self) -> Duration {
        let full = self.policy.first_wait.saturating_mul(1 << self.tries.min(16)).min(self.policy.longest_wait);
        self.tries += 1;
        full.mul_f64(0.5 + 0.5 * random_fraction())
    }
}

/// Random number from 0 to 1.
fn random_fraction() -> f64 {
    use std::hash::{BuildHasher, RandomState};
    // The standard library's hash keys are random enough for jitter.
    f64::from(RandomState::new().hash_one(()) as u32) / f64::from(u32::MAX)
}

/// Why a connection ended, and whether to reconnect.
#[derive(Debug)]
pub(crate) enum ConnectionLoss {
    /// Connect again.
    Transient(String),
    /// Connect again with a new token, but only once: after two refusals the next token would be refused too.
    Token(ClientError),
    Final(ClientError),
}

impl ConnectionLoss {
    pub fn broken(cause: String) -> Self {
        ConnectionLoss::Transient(cause)
    }

    /// `server_error` is the last error frame before the close.
    pub fn closed(code: u16, reason: &str, server_error: Option<ClientError>) -> Self {
        let error = server_error.unwrap_or_else(|| ClientError::Closed { code, reason: close_reason(code, reason) });
        match code {
            // Going away, no code, internal error, restart, try again later.
            close::GOING_AWAY | 1005 | ABNORMAL_CLOSURE | 1011..=1014 | close::AUTH_TIMEOUT => ConnectionLoss::Transient(error.to_string()),
            close::UNAUTHENTICATED => ConnectionLoss::Token(error),
            _ => ConnectionLoss::Final(error),
        }
    }

    /// Classifies a failed connection attempt.
    pub fn refused(error: ClientError) -> Self {
        match &error {
            ClientError::Transport { .. } => ConnectionLoss::Transient(error.to_string()),
            // Sent by proxies while the broker behind them restarts.
            ClientError::NotCobox { status: 502..=504, .. } => ConnectionLoss::Transient(error.to_string()),
            ClientError::Api(_) if error.is(ErrorCode::TokenExpired) => ConnectionLoss::Token(error),
            ClientError::Api(failure) if failure.retryable => ConnectionLoss::Transient(error.to_string()),
            _ => ConnectionLoss::Final(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_maximum_with_jitter() {
        let mut backoff = Backoff::new(Reconnect::default());
        let waits: Vec<_> = (0..40).map(|_| backoff.wait()).collect();
        assert!(waits[0] >= Duration::from_millis(50) && waits[0] <= Duration::from_millis(100));
        assert!(waits.iter().all(|w| *w <= Duration::from_secs(5)));
        assert!(waits[10..].iter().all(|w| *w >= Duration::from_millis(2500)));
        assert!(waits[10..].windows(2).any(|w| w[0] != w[1]));
    }

    #[test]
    fn transient_losses_are_retried_and_final_ones_are_described() {
        for code in [1001, 1005, 1006, 1011, 1012, 1013, 4408] {
            assert!(matches!(ConnectionLoss::closed(code, "", None), ConnectionLoss::Transient(_)), "{code}");
        }
        assert!(matches!(ConnectionLoss::closed(4401, "", None), ConnectionLoss::Token(_)));
        for (code, words) in [(4403, "doesn't allow"), (4409, "another connection"), (4410, "ended"), (1007, "frame")] {
            let ConnectionLoss::Final(error) = ConnectionLoss::closed(code, "", None) else { panic!("{code}") };
            assert!(error.to_string().contains(words), "{error}");
        }
        let gone = ClientError::NotCobox { url: "u".into(), status: 502, excerpt: "x".into() };
        assert!(matches!(ConnectionLoss::refused(gone), ConnectionLoss::Transient(_)));
        assert!(matches!(ConnectionLoss::refused(ClientError::InvalidKey), ConnectionLoss::Final(_)));
    }
}
