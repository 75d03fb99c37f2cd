//! Explains a policy decision: for each capability and each limit, which line of the policy file decided it.

use cobox_protocol::{Capability, CapabilitySet};
use serde::Serialize;

use super::{HardEnd, Policy, PolicySettings, Source, SourcedValue, Subject, allows, built_in};

/// Result for one capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Granted,
    /// Requested, but not allowed.
    Dropped,
    /// Allowed, but not requested.
    NotAsked,
    /// Neither requested nor allowed.
    NotAllowed,
}

impl Outcome {
    pub const fn as_str(self) -> &'static str {
        match self {
            Outcome::Granted => "granted",
            Outcome::Dropped => "dropped",
            Outcome::NotAsked => "not requested",
            Outcome::NotAllowed => "not allowed",
        }
    }
}

#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    pub capability: &'static str,
    pub outcome: Outcome,
    /// Human-readable reason, including the line of the policy file.
    pub because: String,
}

#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    pub capabilities: Vec<Finding>,
    /// Name of each limit, its value and the setting that determines it.
    pub limits: Vec<(&'static str, String, String)>,
}

impl Policy {
    /// Makes the same decision as a grant, and adds the reason for each capability and limit.
    pub fn explain(&self, subject: &Subject, requested: Option<CapabilitySet>) -> Explanation {
        let capabilities = CapabilitySet::ALL.iter().map(|c| self.finding(subject, requested, c)).collect();
        Explanation { capabilities, limits: self.limits(subject) }
    }

    fn finding(&self, subject: &Subject, requested: Option<CapabilitySet>, c: Capability) -> Finding {
        let is_wanted = requested.is_none_or(|r| r.contains(c));
        let denied = self.about(subject).find(|(source, terms)| allows(*source, terms).is_some_and(|set| !set.contains(c)));
        let undefaulted = || {
            self.about(subject).find_map(|(source, terms)| match (source, &terms.default_capabilities) {
                (Source::Ceiling(kind), _) if kind != subject.acting => None,
                (_, Some(sourced)) => (!sourced.value.contains(c)).then(|| at(source, Some(sourced.line))),
                (Source::Ceiling(kind), None) => (!built_in(kind).contains(c)).then(|| at(source, None)),
                (Source::Rule(_), None) => None,
            })
        };
        let (outcome, because) = match (denied, requested) {
            (Some((source, terms)), _) => {
                let outcome = if is_wanted && requested.is_some() { Outcome::Dropped } else { Outcome::NotAllowed };
                (outcome, format!("not allowed by {}", at(source, terms.capabilities.as_ref().map(|s| s.line))))
            }
            (None, Some(_)) if is_wanted => (Outcome::Granted, format!("allowed by {}", self.allower(subject))),
            (None, Some(_)) => (Outcome::NotAsked, "allowed, but not requested".to_owned()),
            (None, None) => match undefaulted() {
                None => (Outcome::Granted, format!("allowed by {}, and given by default", self.allower(subject))),
                Some(source) => (Outcome::NotAsked, format!("allowed if requested; not a default of {source}")),
            },
        };
        Finding { capability: c.as_str(), outcome, because }
    }

    /// Source of the narrowest permission: the last matching rule that sets capabilities, otherwise the ceiling.
    fn allower(&self, subject: &Subject) -> String {
        let deciding = self.about(subject).filter(|(source, terms)| allows(*source, terms).is_some()).last();
        deciding.map_or_else(String::new, |(source, terms)| at(source, terms.capabilities.as_ref().map(|s| s.line)))
    }

    fn limits(&self, subject: &Subject) -> Vec<(&'static str, String, String)> {
        type Of = fn(&PolicySettings) -> &Option<SourcedValue<u64>>;
        type ListOf = fn(&PolicySettings) -> &Option<SourcedValue<Vec<String>>>;
        let numbers: [(&'static str, Of); 7] = [
            ("token_ttl_seconds", |t| &t.token_ttl_seconds),
            ("idle_timeout_seconds", |t| &t.idle_timeout_seconds),
            ("lease_seconds", |t| &t.lease_seconds),
            ("hard_ttl_seconds", |t| &t.hard_ttl_seconds),
            ("keep_deleted_seconds", |t| &t.keep_deleted_seconds),
            ("max_sandboxes", |t| &t.max_sandboxes),
            ("max_sandboxes_per_workspace", |t| &t.max_sandboxes_per_workspace),
        ];
        let mut limits = Vec::new();
        for (name, of) in numbers {
            let sourced = self.about(subject).filter_map(|(source, terms)| of(terms).as_ref().map(|s| (s.value, at(source, Some(s.line)))));
            limits.push(match sourced.min_by_key(|(value, _)| *value) {
                Some((value, source)) => (name, value.to_string(), source),
                None => (name, "-".to_owned(), "the broker's configuration".to_owned()),
            });
        }
        let lists: [(&'static str, ListOf); 2] = [("providers", |t| &t.providers), ("templates", |t| &t.templates)];
        for (name, of) in lists {
            let sourced: Vec<_> = self.about(subject).filter_map(|(source, terms)| of(terms).as_ref().map(|s| (source, s))).collect();
            let Some((_, first)) = sourced.first() else {
                limits.push((name, "any".to_owned(), "not limited".to_owned()));
                continue;
            };
            let left: Vec<&str> =
                first.value.iter().filter(|w| sourced.iter().all(|(_, s)| s.value.contains(w))).map(String::as_str).collect();
            let sources: Vec<String> = sourced.iter().map(|(source, s)| at(*source, Some(s.line))).collect();
            limits.push((name, if left.is_empty() { "none".to_owned() } else { left.join(" ") }, sources.join("; ")));
        }
        let access = self.about(subject).find_map(|(source, terms)| {
            let sourced = terms.default_access.as_ref().filter(|s| s.value == cobox_protocol::session::Access::Owner)?;
            Some(("default_access", "owner".to_owned(), at(source, Some(sourced.line))))
        });
        limits.push(access.unwrap_or_else(|| ("default_access", "workspace".to_owned(), "the default".to_owned())));
        let deleted = self.about(subject).find_map(|(source, terms)| {
            let sourced = terms.hard_end.as_ref().filter(|s| s.value == HardEnd::Delete)?;
            Some(("hard_end", HardEnd::Delete.as_str().to_owned(), at(source, Some(sourced.line))))
        });
        limits.push(deleted.unwrap_or_else(|| ("hard_end", HardEnd::Suspend.as_str().to_owned(), "the default".to_owned())));
        limits
    }
}

fn at(source: Source, line: Option<usize>) -> String {
    match (source, line) {
        (Source::Ceiling(kind), Some(line)) => format!("[{}], line {line}", kind.as_str()),
        (Source::Ceiling(kind), None) => format!("the built-in policy for {}s", kind.as_str()),
        (Source::Rule(rule), line) => {
            let name = rule.name.as_ref().map_or_else(String::new, |n| format!(" “{n}”"));
            format!("the rule{name} of line {}", line.unwrap_or(rule.line))
        }
    }
}

#[cfg(test)]
mod tests {
    use cobox_protocol::key::PrincipalKind;

    use super::*;

    #[test]
    fn each_capability_has_the_line_that_decided_it() {
        let policy = Policy::from_toml(
            "[human]\ncapabilities = [\"fs:rw\", \"exec\", \"shell\", \"ports\"]\n\n[[rule]]\nname = \"no exec\"\nworkspace = \"acme\"\ncapabilities = [\"fs:rw\", \"shell\", \"ports\"]\nmax_sandboxes = 2\n",
        )
        .unwrap();
        let subject = Subject { workspace: "acme", principal: "ann", kind: PrincipalKind::Human, acting: PrincipalKind::Human };
        let requested_set = CapabilitySet::parse(["exec", "fs:ro", "snapshot"]).unwrap();
        let sourced = policy.explain(&subject, Some(requested_set));
        let of = |sourced: &Explanation, word: &str| {
            let f = sourced.capabilities.iter().find(|f| f.capability == word).unwrap();
            (f.outcome, f.because.clone())
        };
        assert_eq!(of(&sourced, "exec"), (Outcome::Dropped, "not allowed by the rule “no exec” of line 7".to_owned()));
        assert_eq!(of(&sourced, "snapshot"), (Outcome::Dropped, "not allowed by [human], line 2".to_owned()));
        assert_eq!(of(&sourced, "fs_read").0, Outcome::Granted);
        assert_eq!(of(&sourced, "ports"), (Outcome::NotAsked, "allowed, but not requested".to_owned()));
        let sourced = policy.explain(&subject, None);
        assert_eq!(
            of(&sourced, "ports"),
            (Outcome::NotAsked, "allowed if requested; not a default of the built-in policy for humans".to_owned())
        );
        assert_eq!(of(&sourced, "shell").0, Outcome::Granted);
        assert!(sourced.limits.contains(&("max_sandboxes", "2".to_owned(), "the rule “no exec” of line 8".to_owned())));
        let granted = sourced.capabilities.iter().filter(|f| f.outcome == Outcome::Granted).map(|f| f.capability);
        assert_eq!(CapabilitySet::parse(granted).unwrap(), policy.default_grant(&subject), "the explanation differs from the grant");
    }
}
