//! Clock differences between brokers. Each broker measures its own clock against the database's and publishes the
//! difference with its heartbeat, so that all can be compared without requests between brokers.

use std::{
    sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    clock::Clock,
    store::{Node, Store, Stored},
};

/// Above this the skew is reported. Tokens are accepted with clocks that are 5 s apart (`LEEWAY_SECONDS`), which leaves
/// time to act.
pub const REPORTED_SKEW: Duration = Duration::from_secs(2);

#[derive(Default)]
pub struct ClockSkew {
    /// This broker's clock minus the database's, in milliseconds.
    own_ms: AtomicI64,
    /// Largest difference to another broker's clock, in either direction.
    largest_ms: AtomicU64,
    /// Node whose skew was reported last.
    reported: Mutex<Option<String>>,
}

impl ClockSkew {
    /// Measures this clock against the database's and returns the difference.
    pub async fn measure(&self, store: &Store, clock: &dyn Clock) -> Stored<i64> {
        let before = clock.unix_millis();
        let database = store.clock_millis().await?;
        // The database read its clock at some time between the two readings.
        let own = before + (clock.unix_millis() - before) / 2 - database;
        self.own_ms.store(own, Relaxed);
        Ok(own)
    }

    /// Compares with the other live brokers.
    pub fn compare<'a>(&self, others: impl Iterator<Item = &'a Node>) {
        let own = self.own_ms.load(Relaxed);
        let differences = others.filter_map(|node| Some((node.clock_offset_ms?.saturating_sub(own), &node.id)));
        let largest = differences.max_by_key(|(ms, _)| ms.unsigned_abs());
        self.largest_ms.store(largest.map_or(0, |(ms, _)| ms.unsigned_abs()), Relaxed);
        let skewed = largest.filter(|_| self.is_large()).map(|(ms, node)| (ms, node.clone()));
        let mut reported = self.reported.lock();
        match (&*reported, skewed) {
            (Some(before), Some((_, node))) if *before == node => {}
            (_, Some((skew_ms, node))) => {
                tracing::warn!(
                    node,
                    skew_ms,
                    "the clock of another broker differs; synchronize both with NTP, because tokens are refused above 5 s"
                );
                *reported = Some(node);
            }
            (Some(_), None) => {
                tracing::info!("the clocks of all brokers agree again");
                *reported = None;
            }
            (None, None) => {}
        }
    }

    /// Largest difference to another broker's clock.
    pub fn largest(&self) -> Duration {
        Duration::from_millis(self.largest_ms.load(Relaxed))
    }

    /// Whether the skew is above the reporting threshold.
    pub fn is_large(&self) -> bool {
        self.largest() > REPORTED_SKEW
    }
}
