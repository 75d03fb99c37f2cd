//! Operators' keys that were accepted recently, so that operators can read the metrics while the database can't check
//! their keys.

use std::time::{Duration, Instant};

use cobox_protocol::{Secret, Timestamp};
use parking_lot::Mutex;
use subtle::ConstantTimeEq;

use super::keys::hash;

/// An outage in which a key is revoked elsewhere is usually shorter. The scraper's token works however long one lasts.
const REMEMBERED_FOR: Duration = Duration::from_secs(600);
/// More than the scrapers of a deployment. Above it the least recent is forgotten.
const MAX_REMEMBERED: usize = 32;

/// Only has hashes of the keys.
#[derive(Default)]
pub struct RecentOperators(Mutex<Vec<Accepted>>);

struct Accepted {
    hash: [u8; 32],
    remembered_until: Instant,
    expires_at: Option<Timestamp>,
}

impl RecentOperators {
    /// Call when a key was accepted by the database.
    pub fn remember(&self, key: &Secret, expires_at: Option<Timestamp>) {
        self.forget(key);
        let mut accepted = self.0.lock();
        accepted.push(Accepted { hash: hash(key), remembered_until: Instant::now() + REMEMBERED_FOR, expires_at });
        let excess = accepted.len().saturating_sub(MAX_REMEMBERED);
        accepted.drain(..excess);
    }

    /// Call when a key was refused by the database.
    pub fn forget(&self, key: &Secret) {
        let hash = hash(key);
        self.0.lock().retain(|a| !bool::from(a.hash.ct_eq(&hash)));
    }

    pub fn knows(&self, key: &Secret, now: Timestamp) -> bool {
        let hash = hash(key);
        let accepted = self.0.lock();
        let is_valid = |a: &&Accepted| Instant::now() < a.remembered_until && a.expires_at.is_none_or(|end| now < end);
        accepted.iter().filter(is_valid).any(|a| a.hash.ct_eq(&hash).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_unix(1_800_000_000);

    #[test]
    fn an_accepted_key_is_known_until_it_is_refused_expires_or_is_unused_for_long() {
        let known = RecentOperators::default();
        let [used, revoked, ending, other] = ["used", "revoked", "ending", "other"].map(Secret::new);
        known.remember(&used, None);
        known.remember(&revoked, None);
        known.remember(&ending, Some(Timestamp::from_unix(NOW.unix() + 60)));
        assert!(known.knows(&used, NOW) && known.knows(&revoked, NOW) && known.knows(&ending, NOW) && !known.knows(&other, NOW));
        known.forget(&revoked);
        assert!(!known.knows(&revoked, NOW));
        assert!(!known.knows(&ending, Timestamp::from_unix(NOW.unix() + 60)));
        known.0.lock().iter_mut().for_each(|a| a.remembered_until = Instant::now());
        assert!(!known.knows(&used, NOW));
    }

    #[test]
    fn no_more_than_a_few_keys_are_remembered() {
        let known = RecentOperators::default();
        let keys: Vec<Secret> = (0..=MAX_REMEMBERED).map(|n| Secret::new(format!("key {n}"))).collect();
        keys.iter().for_each(|key| known.remember(key, None));
        assert!(!known.knows(&keys[0], NOW) && keys[1..].iter().all(|key| known.knows(key, NOW)));
    }
}
