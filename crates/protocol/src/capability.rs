//! Capabilities of a token, with canonical names and the legacy names of the first clients.

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

    pub const fn as_str(self) -> &'static str {
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
        f.write_str(self.as_str())
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "`{0}` is not a capability; known are fs_read, fs_write, exec, shell, shell_observe, snapshot, ports (and the legacy names fs:ro, fs:rw, shell:ro, process)"
)]
pub struct UnknownCapability(pub String);

/// A set of capabilities. `shell` implies `shell_observe`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct CapabilitySet(u8);

impl CapabilitySet {
    pub const EMPTY: Self = Self(0);
    pub const ALL: Self = Self::of(&Capability::ALL);
    /// Default of a human that requests no specific capabilities.
    pub const HUMAN_DEFAULT: Self = Self::of(&[Capability::FsRead, Capability::FsWrite, Capability::Exec, Capability::Shell]);
    /// Default of an agent that requests no specific capabilities.
    pub const AGENT_DEFAULT: Self = Self::of(&[Capability::FsRead, Capability::FsWrite, Capability::Exec, Capability::ShellObserve]);

    pub const fn of(list: &[Capability]) -> Self {
        let mut bits = 0;
        let mut i = 0;
        while i < list.len() {
            bits |= list[i].bit();
            i += 1;
        }
        Self(bits).with_implied()
    }

    const fn with_implied(self) -> Self {
        if self.0 & Capability::Shell.bit() != 0 { Self(self.0 | Capability::ShellObserve.bit()) } else { self }
    }

    /// Parses a list of canonical or legacy names.
    pub fn parse<S: AsRef<str>>(names: impl IntoIterator<Item = S>) -> Result<Self, UnknownCapability> {
        names.into_iter().try_fold(Self::EMPTY, |set, name| Ok(set.union(parse_name(name.as_ref())?)))
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
    /// Capabilities in both sets. The result includes the implied ones, because both operands do.
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub fn iter(self) -> impl Iterator<Item = Capability> {
        Capability::ALL.into_iter().filter(move |c| self.contains(*c))
    }

    /// Canonical names, without implied capabilities.
    pub fn names(self) -> Vec<String> {
        self.iter().filter(|c| *c != Capability::ShellObserve || !self.contains(Capability::Shell)).map(|c| c.as_str().to_owned()).collect()
    }

    /// Legacy names, as in `scopes` and in the JWT's `scope`. `fs_write` without `fs_read` has no legacy name and keeps its own.
    pub fn legacy_names(self) -> Vec<String> {
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
                out.push(c.as_str());
            }
        }
        out.into_iter().map(str::to_owned).collect()
    }
}

fn parse_name(name: &str) -> Result<CapabilitySet, UnknownCapability> {
    use Capability::*;
    Ok(CapabilitySet::of(match name {
        "fs:ro" => &[FsRead],
        "fs:rw" => &[FsRead, FsWrite],
        "shell:ro" => &[ShellObserve],
        "process" => &[Exec],
        other => match Capability::ALL.iter().find(|c| c.as_str() == other) {
            Some(c) => std::slice::from_ref(c),
            None => return Err(UnknownCapability(other.chars().take(64).collect())),
        },
    }))
}

/// Parses space-separated canonical or legacy names, as in the JWT's `scope`.
impl FromStr for CapabilitySet {
    type Err = UnknownCapability;
    fn from_str(s: &str) -> Result<Self, UnknownCapability> {
        Self::parse(s.split_ascii_whitespace())
    }
}

impl TryFrom<Vec<String>> for CapabilitySet {
    type Error = UnknownCapability;
    fn try_from(names: Vec<String>) -> Result<Self, UnknownCapability> {
        Self::parse(names)
    }
}

impl From<CapabilitySet> for Vec<String> {
    fn from(set: CapabilitySet) -> Vec<String> {
        set.names()
    }
}

impl fmt::Debug for CapabilitySet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names().join(" "))
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
        fn canonical_and_legacy_names_parse_to_the_same_set(set in any_set()) {
            prop_assert_eq!(CapabilitySet::parse(set.names()).unwrap(), set);
            prop_assert_eq!(CapabilitySet::parse(set.legacy_names()).unwrap(), set);
            prop_assert_eq!(set.legacy_names().join(" ").parse::<CapabilitySet>().unwrap(), set);
        }

        #[test]
        fn an_intersection_contains_only_common_capabilities(a in any_set(), b in any_set(), c in any_set()) {
            let both = a.intersection(b);
            prop_assert!(both.is_subset(a) && both.is_subset(b));
            prop_assert_eq!(both, b.intersection(a));
            prop_assert_eq!(both.intersection(c), a.intersection(b.intersection(c)));
            prop_assert_eq!(a.intersection(a), a);
            prop_assert_eq!(both, both.with_implied());
        }

        #[test]
        fn order_and_repetition_of_names_do_not_matter(set in any_set(), other in any_set()) {
            let mut names = set.names();
            names.extend(other.legacy_names());
            names.extend(set.legacy_names());
            prop_assert_eq!(CapabilitySet::parse(names).unwrap(), set.union(other));
        }
    }

    #[test]
    fn shell_implies_shell_observe_and_an_unknown_name_is_reported() {
        assert!(CapabilitySet::parse(["shell"]).unwrap().contains(Capability::ShellObserve));
        assert!(!CapabilitySet::parse(["shell:ro"]).unwrap().contains(Capability::Shell));
        assert!(CapabilitySet::parse(["exec", "root"]).unwrap_err().to_string().contains("`root`"));
    }
}
