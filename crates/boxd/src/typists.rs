//! Deduplicates numbered input: after a reconnect, a client resends input that was not acknowledged.

use std::collections::VecDeque;

/// Maximum number of clients remembered per command or shell: those of the last hours.
const MAX_TYPISTS: usize = 64;

/// A client that numbers its input. The same client id under another principal is a different client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Typist {
    principal: String,
    client: Client,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Client {
    /// Has a client id, so that its next connection continues the numbering.
    Named(String),
    /// Without a client id, each connection has its own numbering.
    Connection(u64),
}

impl Typist {
    /// `connection` distinguishes clients without an id.
    pub fn new(principal: &str, client: Option<&str>, connection: u64) -> Self {
        let client = client.map_or(Client::Connection(connection), |name| Client::Named(name.to_owned()));
        Self { principal: principal.to_owned(), client }
    }
}

/// The last number accepted from each client, the most recently active at the end.
#[derive(Default)]
pub struct Typists(VecDeque<(Typist, u64)>);

impl Typists {
    /// Whether input with this number is new. Numbering may start anywhere.
    pub fn is_new(&self, typist: &Typist, seq: u64) -> bool {
        self.0.iter().find(|(known, _)| known == typist).is_none_or(|(_, last)| seq > *last)
    }

    /// Records the number of accepted input.
    pub fn took(&mut self, typist: &Typist, seq: u64) {
        let known = self.0.iter().position(|(known, _)| known == typist);
        let last = known.and_then(|at| self.0.remove(at)).map_or(seq, |(_, last)| last.max(seq));
        if self.0.len() == MAX_TYPISTS {
            self.0.pop_front();
        }
        self.0.push_back((typist.clone(), last));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_begin_anywhere_and_count_for_one_client_of_one_principal() {
        let mut typists = Typists::default();
        let ada = Typist::new("ada", Some("tab"), 1);
        assert!(typists.is_new(&ada, 0), "0 is a number too");
        typists.took(&ada, 0);
        assert!(!typists.is_new(&ada, 0) && typists.is_new(&ada, 1));
        typists.took(&ada, u64::MAX);
        for other in [Typist::new("bob", Some("tab"), 1), Typist::new("ada", Some("tab 2"), 1), Typist::new("ada", None, 1)] {
            assert!(typists.is_new(&other, 0), "{other:?}");
        }
        assert_eq!(ada, Typist::new("ada", Some("tab"), 2), "whichever connection it has");
        assert_ne!(Typist::new("ada", None, 1), Typist::new("ada", None, 2));
    }

    #[test]
    fn the_one_heard_longest_ago_is_forgotten_first() {
        let mut typists = Typists::default();
        let numbered = |connection: usize| Typist::new("ada", None, connection as u64);
        for i in 0..MAX_TYPISTS {
            typists.took(&numbered(i), 5);
        }
        typists.took(&numbered(0), 3);
        typists.took(&numbered(MAX_TYPISTS), 5);
        assert_eq!(typists.0.len(), MAX_TYPISTS);
        assert!(!typists.is_new(&numbered(0), 5) && typists.is_new(&numbered(1), 5));
    }
}
