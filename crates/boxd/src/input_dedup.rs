//! Deduplicates numbered input: after a reconnect, a client resends input that was not acknowledged.

use std::collections::VecDeque;

/// Maximum number of clients remembered per command or shell: those of the last hours.
const MAX_SOURCES: usize = 64;

/// A client that numbers its input. The same client id under another principal is a different client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputSource {
    principal: String,
    client: ClientKey,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ClientKey {
    /// Has a client id, so that its next connection continues the numbering.
    Named(String),
    /// Without a client id, each connection has its own numbering.
    Connection(u64),
}

impl InputSource {
    /// `connection` distinguishes clients without an id.
    pub fn new(principal: &str, client: Option<&str>, connection: u64) -> Self {
        let client = client.map_or(ClientKey::Connection(connection), |name| ClientKey::Named(name.to_owned()));
        Self { principal: principal.to_owned(), client }
    }
}

/// The last number accepted from each client, the most recently active at the end.
#[derive(Default)]
pub struct InputDeduplicator(VecDeque<(InputSource, u64)>);

impl InputDeduplicator {
    /// Whether input with this number is new. Numbering may start anywhere.
    pub fn is_new(&self, source: &InputSource, seq: u64) -> bool {
        self.0.iter().find(|(known, _)| known == source).is_none_or(|(_, last)| seq > *last)
    }

    /// Records the number of accepted input.
    pub fn record(&mut self, source: &InputSource, seq: u64) {
        let known = self.0.iter().position(|(known, _)| known == source);
        let last = known.and_then(|at| self.0.remove(at)).map_or(seq, |(_, last)| last.max(seq));
        if self.0.len() == MAX_SOURCES {
            self.0.pop_front();
        }
        self.0.push_back((source.clone(), last));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbering_starts_anywhere_and_is_separate_for_each_client_and_principal() {
        let mut dedup = InputDeduplicator::default();
        let ada = InputSource::new("ada", Some("tab"), 1);
        assert!(dedup.is_new(&ada, 0), "0 is a valid number");
        dedup.record(&ada, 0);
        assert!(!dedup.is_new(&ada, 0) && dedup.is_new(&ada, 1));
        dedup.record(&ada, u64::MAX);
        for other in [InputSource::new("bob", Some("tab"), 1), InputSource::new("ada", Some("tab 2"), 1), InputSource::new("ada", None, 1)]
        {
            assert!(dedup.is_new(&other, 0), "{other:?}");
        }
        assert_eq!(ada, InputSource::new("ada", Some("tab"), 2), "on any connection");
        assert_ne!(InputSource::new("ada", None, 1), InputSource::new("ada", None, 2));
    }

    #[test]
    fn the_least_recently_active_source_is_forgotten_first() {
        let mut dedup = InputDeduplicator::default();
        let numbered = |connection: usize| InputSource::new("ada", None, connection as u64);
        for i in 0..MAX_SOURCES {
            dedup.record(&numbered(i), 5);
        }
        dedup.record(&numbered(0), 3);
        dedup.record(&numbered(MAX_SOURCES), 5);
        assert_eq!(dedup.0.len(), MAX_SOURCES);
        assert!(!dedup.is_new(&numbered(0), 5) && dedup.is_new(&numbered(1), 5));
    }
}
