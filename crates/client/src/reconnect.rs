//! When to dial again after a connection ended, and when not to.

use std::time::Duration;

use cobox_protocol::{ErrorCode, frame::close};

use crate::{
    ClientError,
    error::{BROKEN_OFF, closing_words},
};

/// How hard a stream tries to come back.
#[derive(Clone, Copy, Debug)]
pub struct Reconnect {
    /// About the first wait; each failed try doubles it.
    pub first_wait: Duration,
    pub longest_wait: Duration,
    /// Without a success for this long the stream ends with [`ClientError::GaveUp`].
    pub give_up_after: Duration,
    /// Nothing at all heard for this long means that the connection is dead though nobody said so.
    pub silence: Duration,
    /// Keys pressed longer ago than this are not sent any more: the screen they were meant for is another one.
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

/// Waits between tries: doubled up to the longest, each anywhere between half and all of it, so that
/// many clients who lost one broker don't come back in step.
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
        full.mul_f64(0.5 + 0.5 * chance())
    }
}

/// From 0 to 1.
fn chance() -> f64 {
    use std::hash::{BuildHasher, RandomState};
    // The standard library's hash keys are random; a wait needs no better dice.
    f64::from(RandomState::new().hash_one(()) as u32) / f64::from(u32::MAX)
}

/// Why a connection is no more.
#[derive(Debug)]
pub(crate) enum Loss {
    /// Dial again.
    Passing(String),
    /// Dial again with a fresh token, but only once: a token refused twice stays refused.
    Token(ClientError),
    Final(ClientError),
}

impl Loss {
    pub fn broken(cause: String) -> Self {
        Loss::Passing(cause)
    }

    /// `told` is what the server said of it before it closed.
    pub fn closed(code: u16, reason: &str, told: Option<ClientError>) -> Self {
        let error = told.unwrap_or_else(|| ClientError::Closed { code, reason: closing_words(code, reason) });
        match code {
            // Going away, no code, internal error, restart, try again later.
            close::GOING_AWAY | 1005 | BROKEN_OFF | 1011..=1014 | close::AUTH_TIMEOUT => Loss::Passing(error.to_string()),
            close::UNAUTHENTICATED => Loss::Token(error),
            _ => Loss::Final(error),
        }
    }

    /// Why dialling failed.
    pub fn refused(error: ClientError) -> Self {
        match &error {
            ClientError::Transport { .. } => Loss::Passing(error.to_string()),
            // What proxies say while the broker behind them restarts.
            ClientError::NotCobox { status: 502..=504, .. } => Loss::Passing(error.to_string()),
            ClientError::Api(_) if error.is(ErrorCode::TokenExpired) => Loss::Token(error),
            ClientError::Api(failure) if failure.retryable => Loss::Passing(error.to_string()),
            _ => Loss::Final(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_longest_and_are_never_in_step() {
        let mut backoff = Backoff::new(Reconnect::default());
        let waits: Vec<_> = (0..40).map(|_| backoff.wait()).collect();
        assert!(waits[0] >= Duration::from_millis(50) && waits[0] <= Duration::from_millis(100));
        assert!(waits.iter().all(|w| *w <= Duration::from_secs(5)));
        assert!(waits[10..].iter().all(|w| *w >= Duration::from_millis(2500)));
        assert!(waits[10..].windows(2).any(|w| w[0] != w[1]));
    }

    #[test]
    fn what_can_pass_is_tried_again_and_what_can_not_is_said_in_words() {
        for code in [1001, 1005, 1006, 1011, 1012, 1013, 4408] {
            assert!(matches!(Loss::closed(code, "", None), Loss::Passing(_)), "{code}");
        }
        assert!(matches!(Loss::closed(4401, "", None), Loss::Token(_)));
        for (code, words) in [(4403, "doesn't allow"), (4409, "another connection"), (4410, "ended"), (1007, "frame")] {
            let Loss::Final(error) = Loss::closed(code, "", None) else { panic!("{code}") };
            assert!(error.to_string().contains(words), "{error}");
        }
        let gone = ClientError::NotCobox { url: "u".into(), status: 502, excerpt: "x".into() };
        assert!(matches!(Loss::refused(gone), Loss::Passing(_)));
        assert!(matches!(Loss::refused(ClientError::InvalidKey), Loss::Final(_)));
    }
}
