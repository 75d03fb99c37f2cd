//! Point in time in whole seconds, on the wire as RFC 3339 in UTC with `Z`.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Timestamp(i64);

impl Timestamp {
    pub fn now() -> Self {
        Self(OffsetDateTime::now_utc().unix_timestamp())
    }
    pub const fn from_unix(seconds: i64) -> Self {
        Self(seconds)
    }
    pub const fn unix(self) -> i64 {
        self.0
    }
    pub fn plus(self, d: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(d.as_secs()).unwrap_or(i64::MAX)))
    }
    /// Time since `earlier`, zero if `earlier` is later.
    pub fn saturating_since(self, earlier: Timestamp) -> Duration {
        Duration::from_secs(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
    /// Whether work that was last done at this time is due again. If the clock was set back, it is due immediately: otherwise periodic work
    /// would stop until the clock has caught up.
    pub fn is_due(self, every: Duration, now: Timestamp) -> bool {
        now < self || now.saturating_since(self) >= every
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = OffsetDateTime::from_unix_timestamp(self.0).unwrap_or(OffsetDateTime::UNIX_EPOCH);
        f.write_str(&at.format(&Rfc3339).map_err(|_| fmt::Error)?)
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Timestamp> for String {
    fn from(t: Timestamp) -> String {
        t.to_string()
    }
}

impl TryFrom<String> for Timestamp {
    type Error = time::error::Parse;
    fn try_from(s: String) -> Result<Self, Self::Error> {
        Ok(Self(OffsetDateTime::parse(&s, &Rfc3339)?.unix_timestamp()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_written_in_utc_and_read_with_any_offset() {
        let t: Timestamp = serde_json::from_str("\"2026-02-27T21:20:00+01:00\"").unwrap();
        assert_eq!(serde_json::to_string(&t).unwrap(), "\"2026-02-27T20:20:00Z\"");
    }

    #[test]
    fn periodic_work_is_due_after_its_interval_and_when_the_clock_was_set_back() {
        let (last, every) = (Timestamp::from_unix(1000), Duration::from_secs(60));
        let is_due = |now| last.is_due(every, Timestamp::from_unix(now));
        assert_eq!([1000, 1059, 1060, 999, -86_400].map(is_due), [false, false, true, true, true]);
    }
}
