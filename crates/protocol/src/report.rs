//! What boxd reports to the broker about the requests that it served: claims for the audit, activities for the event streams. boxd keeps
//! each record until the broker acknowledges that it is stored.
//!
//! The broker long-polls `GET /control/reports` with a [`ReportQuery`]. Brokers before that route fetch one kind at a time, with
//! `/control/claims` and `/control/happenings`.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{
    audit::{SandboxClaim, claim_text},
    event::Activity,
};

/// Maximum number of records in a batch.
pub const MAX_BATCH: usize = 256;
/// Maximum size of a batch as JSON: two batches in one response stay below a megabyte. A command of control characters is six times as
/// long in JSON.
pub const MAX_BATCH_BYTES: usize = 480 * 1024;

/// Record that boxd numbers.
pub trait Report {
    /// Sequence number, from 1 within one run of boxd.
    fn seq(&self) -> u64;
}

impl Report for SandboxClaim {
    fn seq(&self) -> u64 {
        self.seq
    }
}

impl Report for Activity {
    fn seq(&self) -> u64 {
        self.seq
    }
}

/// How far the broker has stored the records of one kind; `run_id:seq` as text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct ReportCursor {
    /// Run of boxd. A cursor of another run acknowledges nothing.
    pub run_id: String,
    /// Records up to this number are stored.
    pub seq: u64,
}

#[derive(Debug, thiserror::Error)]
#[error("a cursor is `run_id:seq`")]
pub struct MalformedCursor;

impl FromStr for ReportCursor {
    type Err = MalformedCursor;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (run_id, seq) = text.rsplit_once(':').ok_or(MalformedCursor)?;
        Ok(Self { run_id: run_id.to_owned(), seq: seq.parse().map_err(|_| MalformedCursor)? })
    }
}

impl TryFrom<String> for ReportCursor {
    type Error = MalformedCursor;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl fmt::Display for ReportCursor {
    /// Only the letters and digits of the run id: it comes from the sandbox and goes into a URL.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let run_id: String = self.run_id.chars().filter(char::is_ascii_alphanumeric).collect();
        write!(f, "{run_id}:{}", self.seq)
    }
}

/// Query parameters of `GET /control/reports`. boxd neither waits for nor returns a kind without a cursor.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct ReportQuery {
    pub claims: Option<ReportCursor>,
    pub activities: Option<ReportCursor>,
    /// How long to wait if there are no records.
    #[serde(default)]
    pub wait_ms: u64,
}

/// Records of one kind that the broker has not acknowledged yet, oldest first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReportBatch<T> {
    /// Identifies one run of boxd; sequence numbers start again in the next run.
    #[serde(rename = "life")]
    pub run_id: String,
    pub items: Vec<T>,
    /// Number of records dropped so far because no broker fetched them in time. An older boxd counts only claims.
    #[serde(default)]
    pub lost: u64,
    /// Whether more records are waiting. An older boxd reports this only for claims.
    #[serde(default)]
    pub more: bool,
}

impl<T: Report> ReportBatch<T> {
    /// The records after the cursor, and the cursor after these. More records than a batch has, older ones, and records out of order
    /// violate the protocol and are left out.
    pub fn after(self, cursor: &ReportCursor) -> (Vec<T>, ReportCursor) {
        let run_id = claim_text(&self.run_id);
        let mut seq = if run_id == cursor.run_id { cursor.seq } else { 0 };
        let mut items = self.items;
        items.truncate(MAX_BATCH);
        items.retain(|item| {
            let is_new = item.seq() > seq;
            seq = seq.max(item.seq());
            is_new
        });
        (items, ReportCursor { run_id, seq })
    }
}

/// Response to a [`ReportQuery`]: a batch of each kind that it has a cursor for.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Reports {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claims: Option<ReportBatch<SandboxClaim>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activities: Option<ReportBatch<Activity>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Numbered(u64);

    impl Report for Numbered {
        fn seq(&self) -> u64 {
            self.0
        }
    }

    fn batch(run_id: &str, items: impl IntoIterator<Item = u64>) -> ReportBatch<Numbered> {
        ReportBatch { run_id: run_id.into(), items: items.into_iter().map(Numbered).collect(), lost: 0, more: false }
    }

    #[test]
    fn only_new_records_in_order_are_taken_from_a_batch() {
        let cursor = ReportCursor { run_id: "a".into(), seq: 4 };
        let after = |batch: ReportBatch<Numbered>| {
            let (items, next) = batch.after(&cursor);
            (items.into_iter().map(|item| item.0).collect::<Vec<_>>(), next)
        };
        assert_eq!(after(batch("a", [3, 4, 5, 7, 6, 7, 9])), (vec![5, 7, 9], ReportCursor { run_id: "a".into(), seq: 9 }));
        assert_eq!(after(batch("a", [])), (vec![], cursor.clone()));
        assert_eq!(after(batch("b", [1, 2])), (vec![1, 2], ReportCursor { run_id: "b".into(), seq: 2 }), "another run counts from 1");
        assert_eq!(after(batch("a", 1..10_000)).0.last(), Some(&(MAX_BATCH as u64)));
    }

    #[test]
    fn a_cursor_as_text_has_nothing_that_changes_a_url() {
        let cursor = ReportCursor { run_id: "01x".into(), seq: u64::MAX };
        assert_eq!(cursor.to_string().parse::<ReportCursor>().unwrap(), cursor);
        assert_eq!(":0".parse::<ReportCursor>().unwrap(), ReportCursor::default());
        assert_eq!(ReportCursor { run_id: "a&b=c#\r\n/é".into(), seq: 1 }.to_string(), "abc:1");
        for text in ["", "a", "a:", "a:-1", "a:x"] {
            assert!(text.parse::<ReportCursor>().is_err(), "{text:?}");
        }
    }
}
