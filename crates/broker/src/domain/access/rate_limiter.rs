//! Rate limits: a token bucket for every principal, and one for every address that sends requests without a valid
//! credential.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::atomic::{AtomicI64, Ordering::Relaxed},
};

use cobox_protocol::{ApiError, ErrorCode, Timestamp};
use parking_lot::Mutex;

use crate::{config::RateLimits, domain::model::Principal};

/// Maximum number of buckets of each kind; each takes some hundred bytes. Full ones are dropped first.
const MAX_BUCKETS: usize = 16_384;
/// Cost of a request: buckets count in thousandths, so that rates below one per second can be expressed.
const REQUEST_COST: u64 = 1000;

/// Kind of request. Keeping and ending sandboxes has its own bucket, so that a client that exceeds the other limit
/// neither loses its sandboxes nor is forced to keep them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestClass {
    /// Refresh, heartbeat, and everything that ends something.
    Upkeep,
    Request,
}

#[derive(Clone, Copy)]
struct Limit {
    /// Thousandths of a request per second.
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
    buckets: Mutex<HashMap<Key, Bucket>>,
    /// The second in which full buckets were last removed.
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

    /// Whole seconds until one request is allowed.
    fn wait(&self, bucket: &Bucket) -> u32 {
        u32::try_from(REQUEST_COST.saturating_sub(bucket.left).div_ceil(self.rate.max(1))).unwrap_or(u32::MAX).max(1)
    }
}

impl<Key: Eq + Hash + Clone> Buckets<Key> {
    fn new(limit: Option<Limit>) -> Self {
        Self { limit, buckets: Mutex::default(), swept_at: AtomicI64::new(i64::MIN) }
    }

    /// Charges one request, or returns the seconds to wait.
    fn take(&self, key: &Key, now: i64) -> Result<(), u32> {
        let Some(limit) = self.limit else { return Ok(()) };
        let mut buckets = self.buckets.lock();
        let mut bucket = buckets.get(key).map_or_else(|| limit.full(now), |bucket| limit.filled(bucket, now));
        if bucket.left < REQUEST_COST {
            // The bucket fills from its new time on, also when the clock was set back.
            buckets.entry(key.clone()).and_modify(|known| *known = bucket);
            return Err(limit.wait(&bucket));
        }
        bucket.left -= REQUEST_COST;
        if buckets.len() >= MAX_BUCKETS && !buckets.contains_key(key) {
            // No bucket fills up within one second: a flood from constantly new addresses must not cause a scan of all
            // buckets each time.
            if self.swept_at.swap(now, Relaxed) != now {
                buckets.retain(|_, other| limit.filled(other, now).left < limit.burst);
            }
            // All buckets are in use: one is dropped, and its owner gets a full one. Bounded memory is more important.
            if buckets.len() >= MAX_BUCKETS
                && let Some(some) = buckets.keys().next().cloned()
            {
                buckets.remove(&some);
            }
        }
        buckets.insert(key.clone(), bucket);
        Ok(())
    }
}

/// Charges a request to a principal's limit, for credentials that are only identified during processing.
pub type ChargeRequest<'a> = &'a (dyn Fn(&Principal) -> Result<(), ApiError> + Sync);

/// `Address` is how the HTTP side identifies the network of a client.
pub struct RateLimiter<Address> {
    requests: Buckets<(String, String)>,
    upkeep: Buckets<(String, String)>,
    failures: Buckets<Address>,
}

impl<Address: Eq + Hash + Clone> RateLimiter<Address> {
    /// Failures have a separate parameter: their default depends on whether the broker is behind a proxy, where all
    /// clients share one address.
    pub fn new(limits: &RateLimits, failures_per_minute: u32) -> Self {
        let per_second = |rate: u32, burst: u32| {
            (rate > 0).then_some(Limit { rate: u64::from(rate) * REQUEST_COST, burst: u64::from(burst.max(rate)) * REQUEST_COST })
        };
        let failures = (failures_per_minute > 0).then_some(Limit {
            rate: (u64::from(failures_per_minute) * REQUEST_COST / 60).max(1),
            burst: u64::from(limits.failure_burst.max(1)) * REQUEST_COST,
        });
        Self {
            requests: Buckets::new(per_second(limits.requests_per_second, limits.request_burst)),
            upkeep: Buckets::new(per_second(limits.upkeep_per_second, limits.upkeep_burst)),
            failures: Buckets::new(failures),
        }
    }

    /// Charges a request of an authenticated principal.
    pub fn charge(&self, principal: &Principal, class: RequestClass, now: Timestamp) -> Result<(), ApiError> {
        let buckets = match class {
            RequestClass::Upkeep => &self.upkeep,
            RequestClass::Request => &self.requests,
        };
        if buckets.limit.is_none() {
            return Ok(());
        }
        let key = (principal.workspace.clone(), principal.name.clone());
        buckets.take(&key, now.unix()).map_err(|wait| limited(format!("too many requests from {}", principal.name), wait))
    }

    /// Counts a request without a valid credential, and refuses it when too many came from this address. Only such
    /// requests are limited by address: a valid credential is accepted no matter how many invalid ones come from the same
    /// address.
    pub fn charge_failure(&self, from: Address, now: Timestamp) -> Result<(), ApiError> {
        let refused = |wait| limited("too many requests without a valid credential from this address".to_owned(), wait);
        self.failures.take(&from, now.unix()).map_err(refused)
    }

    /// Drops addresses whose bucket is full again; called in intervals.
    pub fn sweep(&self, now: Timestamp) {
        let Some(limit) = self.failures.limit else { return };
        let mut buckets = self.failures.buckets.lock();
        buckets.retain(|_, bucket| limit.filled(bucket, now.unix()).left < limit.burst);
    }
}

fn limited(what: String, wait: u32) -> ApiError {
    let mut error = ApiError::new(ErrorCode::RateLimited, format!("{what}; try again in {wait} s"));
    error.retry_after = Some(wait);
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_stay_bounded_for_any_number_of_addresses() {
        let rate_limiter = RateLimiter::new(&RateLimits { failure_burst: 2, ..RateLimits::default() }, 60);
        let now = Timestamp::from_unix(1_000);
        for n in 0..2 * MAX_BUCKETS as u128 {
            rate_limiter.charge_failure(n, now).unwrap();
        }
        assert!(rate_limiter.failures.buckets.lock().len() <= MAX_BUCKETS);
        rate_limiter.sweep(Timestamp::from_unix(2_000));
        assert!(rate_limiter.failures.buckets.lock().is_empty());
    }

    #[test]
    fn a_clock_set_back_refills_no_bucket() {
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
