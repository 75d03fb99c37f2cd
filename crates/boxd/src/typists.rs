//! Whose numbered input was taken already: a client that lost its connection sends again what it has no answer for, and it counts once.

use std::collections::VecDeque;

/// Those of the last hours, at one command or shell.
const MAX_TYPISTS: usize = 64;

/// Who counts input. Another principal's client of the same name is another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Typist {
    principal: String,
    client: Client,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Client {
    /// Says who it is, so that its next connection goes on with its count.
    Named(String),
    /// Counts for itself on each connection.
    Connection(u64),
}

impl Typist {
    /// `connection` tells those apart that don't say who they are.
    pub fn new(principal: &str, client: Option<&str>, connection: u64) -> Self {
        let client = client.map_or(Client::Connection(connection), |name| Client::Named(name.to_owned()));
        Self { principal: principal.to_owned(), client }
    }
}

/// The last number taken from each, the one heard last at the end.
#[derive(Default)]
pub struct Typists(VecDeque<(Typist, u64)>);

impl Typists {
    /// Whether this was not taken from it yet. Numbers may begin anywhere.
    pub fn is_new(&self, typist: &Typist, seq: u64) -> bool {
        self.0.iter().find(|(known, _)| known == typist).is_none_or(|(_, last)| seq > *last)
    }

    /// It was heard with this number, which is taken.
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
