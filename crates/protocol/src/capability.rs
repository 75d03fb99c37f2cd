//! What a token allows, in two spellings: the canonical words, and the older ones of the first clients.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Capability {
    FsRead,
    FsWrite,
    Exec,
    Shell,
    ShellObserve,
    Snapshot,
    Ports,
}

impl Capability {
    pub const ALL: [Capability; 7] = [
        Capability::FsRead,
        Capability::FsWrite,
        Capability::Exec,
        Capability::Shell,
        Capability::ShellObserve,
        Capability::Snapshot,
        Capability::Ports,
    ];

    pub const fn word(self) -> &'static str {
        match self {
            Capability::FsRead => "fs_read",
            Capability::FsWrite => "fs_write",
            Capability::Exec => "exec",
            Capability::Shell => "shell",
            Capability::ShellObserve => "shell_observe",
            Capability::Snapshot => "snapshot",
            Capability::Ports => "ports",
        }
    }

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "`{0}` is not a capability; known are fs_read, fs_write, exec, shell, shell_observe, snapshot, ports (and the older fs:ro, fs:rw, shell:ro, process)"
)]
pub struct UnknownCapability(pub String);

/// A set of capabilities. `shell` always brings `shell_observe` with it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct CapabilitySet(u8);

impl CapabilitySet {
    pub const EMPTY: Self = Self(0);
    pub const ALL: Self = Self::of(&Capability::ALL);
    /// What a human gets who asks for nothing in particular.
    pub const HUMAN_DEFAULT: Self = Self::of(&[Capability::FsRead, Capability::FsWrite, Capability::Exec, Capability::Shell]);
    /// What an agent gets that asks for nothing in particular.
    pub const AGENT_DEFAULT: Self = Self::of(&[Capability::FsRead, Capability::FsWrite, Capability::Exec, Capability::ShellObserve]);

    pub const fn of(list: &[Capability]) -> Self {
        let mut bits = 0;
        let mut i = 0;
        while i < list.len() {
            bits |= list[i].bit();
            i += 1;
        }
        Self(bits).closed()
    }

    const fn closed(self) -> Self {
        if self.0 & Capability::Shell.bit() != 0 { Self(self.0 | Capability::ShellObserve.bit()) } else { self }
    }

    /// Reads a list of words, each in either spelling.
    pub fn parse<S: AsRef<str>>(words: impl IntoIterator<Item = S>) -> Result<Self, UnknownCapability> {
        words.into_iter().try_fold(Self::EMPTY, |set, w| Ok(set.union(word(w.as_ref())?)))
    }

    pub const fn contains(self, c: Capability) -> bool {
        self.0 & c.bit() != 0
    }
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
    pub const fn is_subset(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
    /// What both allow. Closed under implication, because both sides are.
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub fn iter(self) -> impl Iterator<Item = Capability> {
        Capability::ALL.into_iter().filter(move |c| self.contains(*c))
    }

    /// The canonical words; what is implied is left out.
    pub fn words(self) -> Vec<String> {
        self.iter().filter(|c| *c != Capability::ShellObserve || !self.contains(Capability::Shell)).map(|c| c.word().to_owned()).collect()
    }

    /// The older words, as `scopes` and the JWT's `scope` carry them. `fs_write` alone has no older word and keeps its own.
    pub fn older_words(self) -> Vec<String> {
        let (read, write) = (self.contains(Capability::FsRead), self.contains(Capability::FsWrite));
        let mut out: Vec<&str> = Vec::new();
        match (read, write) {
            (true, true) => out.push("fs:rw"),
            (true, false) => out.push("fs:ro"),
            (false, true) => out.push("fs_write"),
            (false, false) => {}
        }
        if self.contains(Capability::Exec) {
            out.push("process");
        }
        if self.contains(Capability::Shell) {
            out.push("shell");
        } else if self.contains(Capability::ShellObserve) {
            out.push("shell:ro");
        }
        for c in [Capability::Snapshot, Capability::Ports] {
            if self.contains(c) {
                out.push(c.word());
            }
        }
        out.into_iter().map(str::to_owned).collect()
    }
}

fn word(w: &str) -> Result<CapabilitySet, UnknownCapability> {
    use Capability::*;
    Ok(CapabilitySet::of(match w {
        "fs:ro" => &[FsRead],
        "fs:rw" => &[FsRead, FsWrite],
        "shell:ro" => &[ShellObserve],
        "process" => &[Exec],
        other => match Capability::ALL.iter().find(|c| c.word() == other) {
            Some(c) => std::slice::from_ref(c),
            None => return Err(UnknownCapability(other.chars().take(64).collect())),
        },
    }))
}

/// Space-separated words in either spelling, as in the JWT's `scope`.
impl FromStr for CapabilitySet {
    type Err = UnknownCapability;
    fn from_str(s: &str) -> Result<Self, UnknownCapability> {
        Self::parse(s.split_ascii_whitespace())
    }
}

impl TryFrom<Vec<String>> for CapabilitySet {
    type Error = UnknownCapability;
    fn try_from(words: Vec<String>) -> Result<Self, UnknownCapability> {
        Self::parse(words)
    }
}

impl From<CapabilitySet> for Vec<String> {
    fn from(set: CapabilitySet) -> Vec<String> {
        set.words()
    }
}

impl fmt::Debug for CapabilitySet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words().join(" "))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_set() -> impl Strategy<Value = CapabilitySet> {
        proptest::collection::vec(0..Capability::ALL.len(), 0..8)
            .prop_map(|picks| CapabilitySet::of(&picks.into_iter().map(|i| Capability::ALL[i]).collect::<Vec<_>>()))
    }

    proptest! {
        #[test]
        fn both_spellings_say_the_same(set in any_set()) {
            prop_assert_eq!(CapabilitySet::parse(set.words()).unwrap(), set);
            prop_assert_eq!(CapabilitySet::parse(set.older_words()).unwrap(), set);
            prop_assert_eq!(set.older_words().join(" ").parse::<CapabilitySet>().unwrap(), set);
        }

        #[test]
        fn an_intersection_only_narrows(a in any_set(), b in any_set(), c in any_set()) {
            let both = a.intersection(b);
            prop_assert!(both.is_subset(a) && both.is_subset(b));
            prop_assert_eq!(both, b.intersection(a));
            prop_assert_eq!(both.intersection(c), a.intersection(b.intersection(c)));
            prop_assert_eq!(a.intersection(a), a);
            prop_assert_eq!(both, both.closed());
        }

        #[test]
        fn any_order_and_repetition_of_words_gives_one_set(set in any_set(), other in any_set()) {
            let mut words = set.words();
            words.extend(other.older_words());
            words.extend(set.older_words());
            prop_assert_eq!(CapabilitySet::parse(words).unwrap(), set.union(other));
        }
    }

    #[test]
    fn shell_implies_observing_and_an_unknown_word_is_named() {
        assert!(CapabilitySet::parse(["shell"]).unwrap().contains(Capability::ShellObserve));
        assert!(!CapabilitySet::parse(["shell:ro"]).unwrap().contains(Capability::Shell));
        assert!(CapabilitySet::parse(["exec", "root"]).unwrap_err().to_string().contains("`root`"));
    }
}
