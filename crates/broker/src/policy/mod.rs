//! The operator's policy: a ceiling for each kind of actor, and rules that only restrict it further.
//!
//! Every rule that matches a caller applies. The allowed capabilities are the intersection of all matching rules, and
//! numeric limits are the minimum. Adding a rule therefore never grants more.

mod explain;
mod read;
mod source;

use std::time::Duration;

use cobox_protocol::{
    ApiError, CapabilitySet, ErrorCode,
    key::PrincipalKind,
    session::Access,
    text::{MAX_SHOWN_CHARS, printable},
};

pub use explain::{Explanation, Finding, Outcome};
pub use read::{PolicyError, Problem};
pub use source::{PolicyFileError, PolicySource, Reloaded};

use crate::config::Config;

/// The principal for which the policy is evaluated.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    pub workspace: &'a str,
    pub principal: &'a str,
    /// Kind of the principal itself.
    pub kind: PrincipalKind,
    /// Kind it acts as: the same or a less privileged one. The rules of both kinds apply.
    pub acting: PrincipalKind,
}

/// A value with the line of the policy file that sets it.
#[derive(Clone, Debug)]
struct SourcedValue<T> {
    line: usize,
    value: T,
}

/// Settings of a ceiling or a rule. An omitted setting imposes no limit.
#[derive(Clone, Debug, Default)]
struct PolicySettings {
    capabilities: Option<SourcedValue<CapabilitySet>>,
    default_capabilities: Option<SourcedValue<CapabilitySet>>,
    token_ttl_seconds: Option<SourcedValue<u64>>,
    idle_timeout_seconds: Option<SourcedValue<u64>>,
    lease_seconds: Option<SourcedValue<u64>>,
    hard_ttl_seconds: Option<SourcedValue<u64>>,
    keep_deleted_seconds: Option<SourcedValue<u64>>,
    max_sandboxes: Option<SourcedValue<u64>>,
    max_sandboxes_per_workspace: Option<SourcedValue<u64>>,
    providers: Option<SourcedValue<Vec<String>>>,
    templates: Option<SourcedValue<Vec<String>>>,
    default_access: Option<SourcedValue<Access>>,
    hard_end: Option<SourcedValue<HardEnd>>,
}

/// Selects the callers of a rule. Every list that is present must match; an empty list matches all.
#[derive(Clone, Debug, Default)]
struct Selector {
    workspace: Vec<String>,
    kind: Vec<PrincipalKind>,
    principal: Vec<String>,
}

impl Selector {
    /// Matches a rule against both the principal's own kind and the kind it acts as.
    fn matches(&self, subject: &Subject) -> bool {
        self.names(subject) && (self.kind.is_empty() || self.kind.contains(&subject.kind) || self.kind.contains(&subject.acting))
    }

    /// An exemption must match both kinds: acting as an exempt kind must not grant anyone more.
    fn exempts(&self, subject: &Subject) -> bool {
        self.names(subject) && (self.kind.is_empty() || self.kind.contains(&subject.kind) && self.kind.contains(&subject.acting))
    }

    fn names(&self, subject: &Subject) -> bool {
        let has = |list: &[String], name: &str| list.is_empty() || list.iter().any(|n| n == name);
        has(&self.workspace, subject.workspace) && has(&self.principal, subject.principal)
    }
}

#[derive(Clone, Debug)]
struct Rule {
    line: usize,
    /// Name given by the operator.
    name: Option<String>,
    about: Selector,
    unless: Option<Selector>,
    terms: PolicySettings,
}

impl Rule {
    fn matches(&self, subject: &Subject) -> bool {
        self.about.matches(subject) && !self.unless.as_ref().is_some_and(|u| u.exempts(subject))
    }
}

/// The parsed policy. Without a policy file, the broker's settings and the protocol's default capabilities apply.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    human: PolicySettings,
    agent: PolicySettings,
    operator: PolicySettings,
    rules: Vec<Rule>,
}

/// Lifetime limits of a principal's sandboxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetimes {
    pub idle_timeout: Duration,
    pub lease: Duration,
    pub hard_ttl: Duration,
}

/// What happens at the hard TTL to a sandbox that would otherwise end with its last session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HardEnd {
    /// Suspends the sandbox and keeps it as long as one whose lease has expired.
    Suspend,
    Delete,
}

impl HardEnd {
    pub const fn as_str(self) -> &'static str {
        match self {
            HardEnd::Suspend => "suspend",
            HardEnd::Delete => "delete",
        }
    }
}

/// Limits on the number of sandboxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    pub of_workspace: u32,
    /// Limit on the sandboxes created by one principal.
    pub of_owner: Option<u32>,
}

/// Origin of a setting: the ceiling of a kind, or a rule.
#[derive(Clone, Copy)]
enum Source<'a> {
    Ceiling(PrincipalKind),
    Rule(&'a Rule),
}

impl Policy {
    pub fn from_toml(text: &str) -> Result<Self, PolicyError> {
        read::read(text)
    }

    fn ceiling(&self, kind: PrincipalKind) -> &PolicySettings {
        match kind {
            PrincipalKind::Human => &self.human,
            PrincipalKind::Agent => &self.agent,
            PrincipalKind::Operator => &self.operator,
        }
    }

    /// All terms that apply to the subject, ceilings first.
    fn about<'a>(&'a self, subject: &'a Subject) -> impl Iterator<Item = (Source<'a>, &'a PolicySettings)> {
        let own = (subject.kind != subject.acting).then_some(subject.kind);
        let ceilings = std::iter::once(subject.acting).chain(own).map(|k| (Source::Ceiling(k), self.ceiling(k)));
        ceilings.chain(self.rules.iter().filter(|r| r.matches(subject)).map(|r| (Source::Rule(r), &r.terms)))
    }

    /// The largest set of capabilities that the subject may be granted.
    pub fn allowed(&self, subject: &Subject) -> CapabilitySet {
        self.about(subject).filter_map(|(source, terms)| allows(source, terms)).fold(CapabilitySet::ALL, CapabilitySet::intersection)
    }

    /// The capabilities granted when the request names none.
    pub fn default_grant(&self, subject: &Subject) -> CapabilitySet {
        let defaults = self.about(subject).filter_map(|(source, terms)| match source {
            // For a subject that acts as a less privileged kind, only that kind's ceiling provides the default.
            Source::Ceiling(kind) if kind == subject.acting => {
                Some(terms.default_capabilities.as_ref().map_or(built_in(kind), |s| s.value))
            }
            Source::Ceiling(_) => None,
            Source::Rule(_) => terms.default_capabilities.as_ref().map(|s| s.value),
        });
        defaults.fold(self.allowed(subject), CapabilitySet::intersection)
    }

    /// Maximum lifetime of a token.
    pub fn token_ttl(&self, subject: &Subject, config: Duration) -> Duration {
        self.shortest(subject, config, |t| &t.token_ttl_seconds)
    }

    pub fn lifetimes(&self, subject: &Subject, config: &Config) -> Lifetimes {
        let lease = self.shortest(subject, config.lease(), |t| &t.lease_seconds);
        let idle_timeout = self.shortest(subject, config.idle_timeout(), |t| &t.idle_timeout_seconds).min(lease);
        Lifetimes { idle_timeout, lease, hard_ttl: self.shortest(subject, config.hard_ttl(), |t| &t.hard_ttl_seconds) }
    }

    pub fn hard_end(&self, subject: &Subject) -> HardEnd {
        let is_deleted = self.about(subject).any(|(_, t)| t.hard_end.as_ref().is_some_and(|s| s.value == HardEnd::Delete));
        if is_deleted { HardEnd::Delete } else { HardEnd::Suspend }
    }

    /// How long a deleted sandbox can be restored. Zero means that it can't be.
    pub fn keep_deleted(&self, subject: &Subject, config: &Config) -> Duration {
        self.shortest(subject, config.keep_deleted(), |t| &t.keep_deleted_seconds)
    }

    pub fn quota(&self, subject: &Subject, config: &Config) -> Quota {
        let clamp = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let of_workspace = self.smallest(subject, Some(config.max_sandboxes_per_workspace.into()), |t| &t.max_sandboxes_per_workspace);
        Quota {
            of_workspace: of_workspace.map_or(config.max_sandboxes_per_workspace, clamp),
            of_owner: self.smallest(subject, None, |t| &t.max_sandboxes).map(clamp),
        }
    }

    /// Access mode of a sandbox when its creator doesn't set one.
    pub fn default_access(&self, subject: &Subject) -> Access {
        let is_owners = self.about(subject).any(|(_, t)| t.default_access.as_ref().is_some_and(|s| s.value == Access::Owner));
        if is_owners { Access::Owner } else { Access::Workspace }
    }

    pub fn check_provider(&self, subject: &Subject, provider: &str) -> Result<(), ApiError> {
        self.check_listed(subject, "provider_preference", "provider", provider, |t| &t.providers)
    }

    pub fn check_template(&self, subject: &Subject, template: &str) -> Result<(), ApiError> {
        self.check_listed(subject, "template", "template", template, |t| &t.templates)
    }

    /// True if the subject is restricted to the settings of listed templates.
    pub fn has_listed_templates(&self, subject: &Subject) -> bool {
        self.about(subject).any(|(_, t)| t.templates.is_some())
    }

    fn check_listed(
        &self,
        subject: &Subject,
        field: &str,
        what: &str,
        requested: &str,
        of: impl Fn(&PolicySettings) -> &Option<SourcedValue<Vec<String>>>,
    ) -> Result<(), ApiError> {
        let is_refused = self.about(subject).filter_map(|(_, t)| of(t).as_ref()).any(|s| !s.value.iter().any(|w| w == requested));
        if !is_refused {
            return Ok(());
        }
        let requested = printable(requested, MAX_SHOWN_CHARS);
        let message = format!("{field}: the policy doesn't let {} {} use {what} `{requested}`", subject.acting.as_str(), subject.principal);
        Err(ApiError::new(ErrorCode::Forbidden, message))
    }

    fn shortest(&self, subject: &Subject, config: Duration, of: impl Fn(&PolicySettings) -> &Option<SourcedValue<u64>>) -> Duration {
        self.smallest(subject, Some(config.as_secs()), of).map_or(config, Duration::from_secs)
    }

    /// Smallest value that applies. A ceiling that sets a value replaces the broker's setting; otherwise that setting
    /// applies.
    fn smallest(&self, subject: &Subject, setting: Option<u64>, of: impl Fn(&PolicySettings) -> &Option<SourcedValue<u64>>) -> Option<u64> {
        let sourced = self.about(subject).filter_map(|(source, terms)| match (source, of(terms)) {
            (_, Some(sourced)) => Some(sourced.value),
            (Source::Ceiling(_), None) => setting,
            (Source::Rule(_), None) => None,
        });
        sourced.min()
    }
}

/// The capabilities that a ceiling or a rule allows. A rule that doesn't set capabilities adds no restriction.
fn allows(source: Source, terms: &PolicySettings) -> Option<CapabilitySet> {
    match (source, &terms.capabilities) {
        (_, Some(sourced)) => Some(sourced.value),
        (Source::Ceiling(kind), None) => Some(built_in(kind)),
        (Source::Rule(_), None) => None,
    }
}

/// Capabilities that an actor is allowed, and gets by default, when the policy doesn't set any.
const fn built_in(kind: PrincipalKind) -> CapabilitySet {
    match kind {
        PrincipalKind::Agent => CapabilitySet::AGENT_DEFAULT,
        PrincipalKind::Human | PrincipalKind::Operator => CapabilitySet::HUMAN_DEFAULT,
    }
}

#[cfg(test)]
mod tests {
    use cobox_protocol::Capability;
    use proptest::prelude::*;

    use super::*;

    fn ann(kind: PrincipalKind) -> Subject<'static> {
        Subject { workspace: "acme", principal: "ann", kind, acting: kind }
    }

    fn words(set: CapabilitySet) -> String {
        set.names().join(" ")
    }

    #[test]
    fn without_a_file_the_defaults_of_the_protocol_apply() {
        let policy = Policy::default();
        for kind in [PrincipalKind::Human, PrincipalKind::Agent, PrincipalKind::Operator] {
            assert_eq!(policy.allowed(&ann(kind)), built_in(kind));
            assert_eq!(policy.default_grant(&ann(kind)), built_in(kind));
        }
        let config = Config::default();
        let lifetimes = policy.lifetimes(&ann(PrincipalKind::Human), &config);
        assert_eq!((lifetimes.idle_timeout, lifetimes.lease), (config.idle_timeout(), config.lease()));
        assert_eq!(policy.quota(&ann(PrincipalKind::Agent), &config), Quota { of_workspace: 1000, of_owner: None });
        assert_eq!(policy.default_access(&ann(PrincipalKind::Human)), Access::Workspace);
    }

    #[test]
    fn a_ceiling_grants_and_rules_restrict() {
        let policy = Policy::from_toml(
            r#"
            [human]
            capabilities = ["fs:rw", "exec", "shell", "ports"]
            token_ttl_seconds = 3600
            [[rule]]
            workspace = "acme"
            token_ttl_seconds = 1200
            max_sandboxes = 3
            [[rule]]
            kind = "agent"
            unless = { workspace = "acme", principal = "ci" }
            capabilities = ["fs_read"]
            default_access = "owner"
            "#,
        )
        .unwrap();
        let human = ann(PrincipalKind::Human);
        assert_eq!(words(policy.allowed(&human)), "fs_read fs_write exec shell ports");
        assert_eq!(words(policy.default_grant(&human)), "fs_read fs_write exec shell", "further capabilities must be requested");
        assert_eq!(policy.token_ttl(&human, Duration::from_secs(900)).as_secs(), 1200);
        assert_eq!(policy.token_ttl(&ann(PrincipalKind::Operator), Duration::from_secs(900)).as_secs(), 900);
        assert_eq!(policy.quota(&human, &Config::default()).of_owner, Some(3));
        let agent = ann(PrincipalKind::Agent);
        assert_eq!(words(policy.allowed(&agent)), "fs_read");
        assert_eq!(policy.default_access(&agent), Access::Owner);
        assert_eq!(words(policy.allowed(&Subject { principal: "ci", ..agent })), "fs_read fs_write exec shell_observe");
        let acting = Subject { acting: PrincipalKind::Agent, ..human };
        assert_eq!(words(policy.allowed(&acting)), "fs_read", "both policies limit a human who acts as an agent");
    }

    #[test]
    fn providers_and_templates_are_those_that_every_rule_lists() {
        let policy = Policy::from_toml(
            "[[rule]]\nproviders = [\"local\", \"docker\"]\ntemplates = []\n[[rule]]\nkind = \"agent\"\nproviders = [\"docker\"]\n",
        )
        .unwrap();
        let (human, agent) = (ann(PrincipalKind::Human), ann(PrincipalKind::Agent));
        assert!(policy.check_provider(&human, "local").is_ok() && policy.check_provider(&agent, "docker").is_ok());
        assert_eq!(policy.check_provider(&agent, "local").unwrap_err().code, ErrorCode::Forbidden);
        assert_eq!(policy.check_template(&human, "python").unwrap_err().code, ErrorCode::Forbidden);
    }

    fn any_set() -> impl Strategy<Value = CapabilitySet> {
        proptest::collection::vec(0..Capability::ALL.len(), 1..5)
            .prop_map(|picks| CapabilitySet::of(&picks.into_iter().map(|i| Capability::ALL[i]).collect::<Vec<_>>()))
    }

    fn listed(key: &str, set: CapabilitySet) -> String {
        format!("{key} = [{}]\n", set.names().iter().map(|w| format!("{w:?}")).collect::<Vec<_>>().join(", "))
    }

    const KINDS: [PrincipalKind; 3] = [PrincipalKind::Agent, PrincipalKind::Human, PrincipalKind::Operator];

    prop_compose! {
        fn any_rule()(
            workspace in proptest::option::of(0..2usize), kind in proptest::option::of(0..3usize), principal in proptest::option::of(0..2usize),
            spared in proptest::option::of(0..2usize), caps in proptest::option::of(any_set()), default in proptest::option::of(any_set()),
            ttl in 60..3600u64, lease in 1..99_999u64,
        ) -> String {
            let mut text = "[[rule]]\n".to_owned();
            let mut put = |key: &str, word: Option<&str>| if let Some(word) = word { text += &format!("{key} = {word:?}\n") };
            put("workspace", workspace.map(|i| ["acme", "other"][i]));
            put("kind", kind.map(|i| KINDS[i].as_str()));
            put("principal", principal.map(|i| ["ann", "bob"][i]));
            if let Some(i) = spared {
                text += &format!("unless = {{ kind = {:?} }}\n", KINDS[i].as_str());
            }
            if let Some(set) = caps {
                text += &listed("capabilities", set);
            }
            if let Some(set) = default {
                text += &listed("default_capabilities", caps.map_or(set, |c| set.intersection(c)));
            }
            text + &format!("token_ttl_seconds = {ttl}\nlease_seconds = {lease}\n")
        }
    }

    prop_compose! {
        fn any_policy()(human in proptest::option::of(any_set()), agent in proptest::option::of(any_set()),
                        rules in proptest::collection::vec(any_rule(), 0..4)) -> String {
            let ceiling = |kind: &str, set: Option<CapabilitySet>| set.map_or(String::new(), |s| format!("[{kind}]\n{}", listed("capabilities", s)));
            ceiling("human", human) + &ceiling("agent", agent) + &rules.concat()
        }
    }

    proptest! {
        #[test]
        fn an_added_rule_never_grants_more(policy in any_policy(), rule in any_rule(), kind in 0..3usize, acting in 0..3usize) {
            let subject = Subject { workspace: "acme", principal: "ann", kind: KINDS[kind.max(acting)], acting: KINDS[acting.min(kind)] };
            let (before, after) = (Policy::from_toml(&policy).unwrap(), Policy::from_toml(&format!("{policy}{rule}")).unwrap());
            prop_assert!(after.allowed(&subject).is_subset(before.allowed(&subject)));
            prop_assert!(after.default_grant(&subject).is_subset(before.default_grant(&subject)));
            prop_assert!(after.default_grant(&subject).is_subset(after.allowed(&subject)));
            let (config, ttl) = (Config::default(), Duration::from_secs(900));
            prop_assert!(after.token_ttl(&subject, ttl) <= before.token_ttl(&subject, ttl));
            prop_assert!(after.lifetimes(&subject, &config).lease <= before.lifetimes(&subject, &config).lease);
            prop_assert!(after.lifetimes(&subject, &config).idle_timeout <= before.lifetimes(&subject, &config).idle_timeout);
        }

        #[test]
        fn acting_as_a_lower_kind_grants_at_most_what_both_kinds_may_have(policy in any_policy(), kind in 0..3usize, acting in 0..3usize) {
            let policy = Policy::from_toml(&policy).unwrap();
            let (own, less) = (KINDS[kind.max(acting)], KINDS[acting.min(kind)]);
            let subject = Subject { workspace: "acme", principal: "ann", kind: own, acting: less };
            let as_itself = policy.allowed(&Subject { acting: own, ..subject });
            prop_assert!(policy.allowed(&subject).is_subset(as_itself), "{:?} {:?}", policy.allowed(&subject), as_itself);
        }
    }
}
