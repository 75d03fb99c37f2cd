//! How often somebody may ask: a bucket that fills with time and pays for each request, for every principal, and one for every address
//! that requests without a good credential come from.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
};

use cobox_gateway::ClientAddress;
use cobox_protocol::{ApiError, ErrorCode, Timestamp};

use super::model::Principal;
use crate::config::RateLimits;

/// Buckets kept of each kind; each takes some hundred bytes. Those that are full again are forgotten first.
const MAX_BUCKETS: usize = 16_384;
/// A request's price: buckets count in thousandths, so that less than one a second can be said.
const PRICE: u64 = 1000;

/// What is asked for. Keeping and ending what one has is paid for apart, so that who asks too much elsewhere neither loses its
/// sandboxes nor has to keep them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Refresh, heartbeat, and everything that ends something.
    Upkeep,
    Request,
}

#[derive(Clone, Copy)]
struct Limit {
    /// Thousandths of a request a second.
    rate: u64,
    burst: u64,
}

#[derive(Clone, Copy)]
struct Bucket {
    left: u64,
    at: i64,
}

struct Buckets<Key> {
    limit: Option<Limit>,
    of: Mutex<HashMap<Key, Bucket>>,
    /// In which second full ones were last looked for.
    swept_at: AtomicI64,
}

impl Limit {
    fn full(&self, at: i64) -> Bucket {
        Bucket { left: self.burst, at }
    }

    /// A clock that was set back adds nothing, and the bucket fills from the new time on.
    fn filled(&self, bucket: &Bucket, now: i64) -> Bucket {
        let seconds = u64::try_from(now.saturating_sub(bucket.at)).unwrap_or(0);
        Bucket { left: bucket.left.saturating_add(self.rate.saturating_mul(seconds)).min(self.burst), at: now }
    }

    /// Whole seconds until there is enough for one request.
    fn wait(&self, bucket: &Bucket) -> u32 {
        u32::try_from(PRICE.saturating_sub(bucket.left).div_ceil(self.rate.max(1))).unwrap_or(u32::MAX).max(1)
    }
}

impl<Key: Eq + Hash + Clone> Buckets<Key> {
    fn new(limit: Option<Limit>) -> Self {
        Self { limit, of: Mutex::default(), swept_at: AtomicI64::new(i64::MIN) }
    }

    /// Pays for one request, or says how many seconds to wait.
    fn take(&self, key: &Key, now: i64) -> Result<(), u32> {
        let Some(limit) = self.limit else { return Ok(()) };
        let mut of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bucket = of.get(key).map_or_else(|| limit.full(now), |bucket| limit.filled(bucket, now));
        if bucket.left < PRICE {
            // It fills from the time it has here, also when the clock was set back.
            of.entry(key.clone()).and_modify(|known| *known = bucket);
            return Err(limit.wait(&bucket));
        }
        bucket.left -= PRICE;
        if of.len() >= MAX_BUCKETS && !of.contains_key(key) {
            // Within one second none fills up: a flood from ever new addresses must not cost a look at all of them each time.
            if self.swept_at.swap(now, Relaxed) != now {
                of.retain(|_, other| limit.filled(other, now).left < limit.burst);
            }
            // All of them in use: one is let go, whose owner then has a full one again. Memory is worth more.
            if of.len() >= MAX_BUCKETS
                && let Some(some) = of.keys().next().cloned()
            {
                of.remove(&some);
            }
        }
        of.insert(key.clone(), bucket);
        Ok(())
    }
}

/// Counts a request of somebody against what they may ask, for credentials that are known only on the way.
pub type Pay<'a> = &'a (dyn Fn(&Principal) -> Result<(), ApiError> + Sync);

pub struct Rates {
    requests: Buckets<(String, String)>,
    upkeep: Buckets<(String, String)>,
    failures: Buckets<ClientAddress>,
}

impl Rates {
    /// Failures are told apart from the rest: how many are allowed depends on where the broker stands.
    pub fn new(limits: &RateLimits, failures_per_minute: u32) -> Self {
        let per_second = |rate: u32, burst: u32| {
            (rate > 0).then_some(Limit { rate: u64::from(rate) * PRICE, burst: u64::from(burst.max(rate)) * PRICE })
        };
        let failures = (failures_per_minute > 0).then_some(Limit {
            rate: (u64::from(failures_per_minute) * PRICE / 60).max(1),
            burst: u64::from(limits.failure_burst.max(1)) * PRICE,
        });
        Self {
            requests: Buckets::new(per_second(limits.requests_per_second, limits.request_burst)),
            upkeep: Buckets::new(per_second(limits.upkeep_per_second, limits.upkeep_burst)),
            failures: Buckets::new(failures),
        }
    }

    /// A request of somebody we know.
    pub fn ask(&self, principal: &Principal, class: Class, now: Timestamp) -> Result<(), ApiError> {
        let buckets = match class {
            Class::Upkeep => &self.upkeep,
            Class::Request => &self.requests,
        };
        if buckets.limit.is_none() {
            return Ok(());
        }
        let whose = (principal.workspace.clone(), principal.name.clone());
        buckets.take(&whose, now.unix()).map_err(|wait| limited(format!("{} asks too often", principal.name), wait))
    }

    /// Counts a request without a good credential; refuses when too many came from this address. Only such requests are ever limited by
    /// their address: a good credential is accepted however many bad ones come from beside it.
    pub fn failed(&self, from: ClientAddress, now: Timestamp) -> Result<(), ApiError> {
        let refused = |wait| limited("too many requests from this address had no good credential".to_owned(), wait);
        self.failures.take(&from, now.unix()).map_err(refused)
    }

    /// Forgets addresses that have behaved for long enough; called now and then.
    pub fn tidy(&self, now: Timestamp) {
        let Some(limit) = self.failures.limit else { return };
        let mut of = self.failures.of.lock().unwrap_or_else(PoisonError::into_inner);
        of.retain(|_, bucket| limit.filled(bucket, now.unix()).left < limit.burst);
    }
}

fn limited(what: String, wait: u32) -> ApiError {
    let mut error = ApiError::new(ErrorCode::RateLimited, format!("{what}; try again in {wait} s"));
    error.retry_after = Some(wait);
    error
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv6Addr};

    use super::*;

    #[test]
    fn the_tables_stay_bounded_whoever_comes() {
        let rates = Rates::new(&RateLimits { failure_burst: 2, ..RateLimits::default() }, 60);
        let now = Timestamp::from_unix(1_000);
        for n in 0..2 * MAX_BUCKETS as u128 {
            rates.failed(ClientAddress::from(IpAddr::V6(Ipv6Addr::from_bits(n << 64))), now).unwrap();
        }
        assert!(rates.failures.of.lock().unwrap().len() <= MAX_BUCKETS);
        rates.tidy(Timestamp::from_unix(2_000));
        assert!(rates.failures.of.lock().unwrap().is_empty());
    }

    #[test]
    fn a_clock_that_goes_back_gives_nothing_away() {
        let limit = Limit { rate: 1000, burst: 5000 };
        let bucket = Bucket { left: 0, at: 100 };
        let set_back = limit.filled(&bucket, 50);
        assert_eq!(set_back.left, 0);
        assert_eq!(limit.filled(&set_back, 53).left, 3000, "a principal is not locked out until the clock has caught up");
        assert_eq!(limit.filled(&bucket, 103).left, 3000);
        assert_eq!(limit.wait(&Bucket { left: 0, at: 0 }), 1);
        assert_eq!(Limit { rate: 100, burst: 1000 }.wait(&bucket), 10);
    }
}
