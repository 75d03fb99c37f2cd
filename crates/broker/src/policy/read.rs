//! Parses a policy file. Each problem is reported with its line, its key and a spelling suggestion.

use std::fmt;

use cobox_protocol::{CapabilitySet, id::is_external_id, key::PrincipalKind, session::Access, text::printable};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{HardEnd, Policy, PolicySettings, Rule, Selector, SourcedValue, built_in};
use crate::config::{MAX_TOKEN_TTL_SECONDS, MIN_TOKEN_TTL_SECONDS};

/// Maximum size of a policy file, in bytes: enough for thousands of rules.
pub const MAX_POLICY_BYTES: u64 = 1024 * 1024;
/// Maximum number of rules, because every request scans all of them.
const MAX_RULES: usize = 1000;
/// Maximum number of names in one list.
const MAX_NAMES: usize = 1000;
/// Maximum number of problems reported at once: the first ones usually cause the others.
const MAX_PROBLEMS: usize = 20;
/// Maximum length of a quoted word in a message, in characters.
const MAX_SHOWN: usize = 64;
/// Minimum similarity for a spelling suggestion; 1 means identical.
const MIN_SIMILARITY: f64 = 0.6;

const TERMS: [&str; 13] = [
    "capabilities",
    "default_capabilities",
    "token_ttl_seconds",
    "idle_timeout_seconds",
    "lease_seconds",
    "hard_ttl_seconds",
    "keep_deleted_seconds",
    "max_sandboxes",
    "max_sandboxes_per_workspace",
    "providers",
    "templates",
    "default_access",
    "hard_end",
];
const SELECTORS: [&str; 3] = ["workspace", "kind", "principal"];
const KINDS: [&str; 3] = ["human", "agent", "operator"];

/// A problem in a policy file and its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub line: usize,
    pub message: String,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct PolicyError {
    pub problems: Vec<Problem>,
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.problems.iter().map(|p| format!("line {}: {}", p.line, p.message)).collect();
        f.write_str(&lines.join("\n"))
    }
}

pub fn read(text: &str) -> Result<Policy, PolicyError> {
    let mut reader = Reader { text, problems: Vec::new() };
    let policy = match DeTable::parse(text) {
        Ok(table) => reader.policy(table.get_ref()),
        Err(e) => {
            let at = e.span().map_or(0, |s| s.start);
            reader.problem(at, e.message().to_owned());
            Policy::default()
        }
    };
    let mut problems = reader.problems;
    if problems.is_empty() {
        return Ok(policy);
    }
    problems.sort_by_key(|p| p.line);
    problems.truncate(MAX_PROBLEMS);
    Err(PolicyError { problems })
}

type Key<'a, 'i> = &'a Spanned<std::borrow::Cow<'i, str>>;
type Value<'a, 'i> = &'a Spanned<DeValue<'i>>;

struct Reader<'t> {
    text: &'t str,
    problems: Vec<Problem>,
}

impl Reader<'_> {
    fn line(&self, at: usize) -> usize {
        self.text.as_bytes()[..at.min(self.text.len())].iter().filter(|b| **b == b'\n').count() + 1
    }

    fn problem(&mut self, at: usize, message: String) {
        self.problems.push(Problem { line: self.line(at), message });
    }

    fn unknown(&mut self, key: Key, known: &[&str]) {
        let word: String = shown(key.get_ref());
        let hint = nearest(&word, known).map_or_else(|| format!("known are {}", known.join(", ")), |w| format!("did you mean `{w}`?"));
        self.problem(key.span().start, format!("`{word}` is not known; {hint}"));
    }

    fn policy(&mut self, table: &DeTable) -> Policy {
        let mut policy = Policy::default();
        for (key, value) in table.iter() {
            match key.get_ref().as_ref() {
                "human" => policy.human = self.ceiling(PrincipalKind::Human, value),
                "agent" => policy.agent = self.ceiling(PrincipalKind::Agent, value),
                "operator" => policy.operator = self.ceiling(PrincipalKind::Operator, value),
                "rule" => policy.rules = self.rules(value),
                _ => self.unknown(key, &["human", "agent", "operator", "rule"]),
            }
        }
        policy
    }

    fn ceiling(&mut self, kind: PrincipalKind, value: Value) -> PolicySettings {
        let word = kind.as_str();
        let DeValue::Table(table) = value.get_ref() else {
            self.problem(value.span().start, format!("{word}: must be a table, written as [{word}]"));
            return PolicySettings::default();
        };
        let mut terms = PolicySettings::default();
        for (key, value) in table.iter() {
            if !self.term(&mut terms, key, value) {
                self.unknown(key, &TERMS);
            }
        }
        self.check_default(&terms, Some(built_in(kind)));
        terms
    }

    fn rules(&mut self, value: Value) -> Vec<Rule> {
        let tables = match value.get_ref() {
            DeValue::Array(array) if array.iter().all(|v| matches!(v.get_ref(), DeValue::Table(_))) => array,
            _ => {
                self.problem(value.span().start, "rule: must be tables, each written as [[rule]]".to_owned());
                return Vec::new();
            }
        };
        if tables.len() > MAX_RULES {
            self.problem(value.span().start, format!("rule: there are {}; the maximum is {MAX_RULES}", tables.len()));
            return Vec::new();
        }
        tables.iter().map(|v| self.rule(v)).collect()
    }

    fn rule(&mut self, value: Value) -> Rule {
        let at = value.span().start;
        let mut rule = Rule { line: self.line(at), name: None, about: Selector::default(), unless: None, terms: PolicySettings::default() };
        let DeValue::Table(table) = value.get_ref() else { return rule };
        let mut is_empty = true;
        for (key, value) in table.iter() {
            match key.get_ref().as_ref() {
                "name" => rule.name = self.string(key, value),
                "unless" => rule.unless = self.unless(value),
                _ if self.selector(&mut rule.about, key, value) => {}
                _ if self.term(&mut rule.terms, key, value) => is_empty = false,
                _ => {
                    is_empty = false;
                    self.unknown(key, &[&["name", "unless"], &SELECTORS[..], &TERMS[..]].concat());
                }
            }
        }
        if is_empty {
            self.problem(at, "rule: sets no limit; add one, such as capabilities".to_owned());
        }
        if let Some(unless) = &rule.unless
            && !unless.principal.is_empty()
            && unless.workspace.is_empty()
            && rule.about.workspace.is_empty()
        {
            self.problem(at, "unless.principal: add the workspace; another workspace may have a principal of this name".to_owned());
        }
        if let Some(sourced) = &rule.terms.max_sandboxes_per_workspace
            && !(rule.about.kind.is_empty() && rule.about.principal.is_empty())
        {
            let message = "max_sandboxes_per_workspace: counts the sandboxes of all principals; use it in a rule without kind and \
                           principal, or use max_sandboxes";
            self.problems.push(Problem { line: sourced.line, message: message.to_owned() });
        }
        self.check_default(&rule.terms, None);
        rule
    }

    fn unless(&mut self, value: Value) -> Option<Selector> {
        let DeValue::Table(table) = value.get_ref() else {
            self.problem(value.span().start, "unless: must be a table such as { principal = \"ci\" }".to_owned());
            return None;
        };
        let mut spared = Selector::default();
        for (key, value) in table.iter() {
            if !self.selector(&mut spared, key, value) {
                self.unknown(key, &SELECTORS);
            }
        }
        if table.is_empty() {
            self.problem(value.span().start, "unless: is empty; leave it out".to_owned());
        }
        Some(spared)
    }

    fn selector(&mut self, selector: &mut Selector, key: Key, value: Value) -> bool {
        match key.get_ref().as_ref() {
            "workspace" => selector.workspace = self.names(key, value),
            "principal" => selector.principal = self.names(key, value),
            "kind" => {
                for (at, word) in self.words(key, value, false) {
                    match word.parse::<PrincipalKind>().ok() {
                        Some(kind) => selector.kind.push(kind),
                        None => self.no_such(at, "kind", &word, &KINDS),
                    }
                }
            }
            _ => return false,
        }
        true
    }

    fn term(&mut self, terms: &mut PolicySettings, key: Key, value: Value) -> bool {
        let name = key.get_ref().as_ref();
        let line = self.line(key.span().start);
        let most = u64::from(u32::MAX);
        match name {
            "capabilities" => terms.capabilities = self.capabilities(key, value),
            "default_capabilities" => terms.default_capabilities = self.capabilities(key, value),
            "token_ttl_seconds" => terms.token_ttl_seconds = self.number(key, value, MIN_TOKEN_TTL_SECONDS, MAX_TOKEN_TTL_SECONDS),
            "idle_timeout_seconds" => terms.idle_timeout_seconds = self.number(key, value, 1, most),
            "lease_seconds" => terms.lease_seconds = self.number(key, value, 1, most),
            "hard_ttl_seconds" => terms.hard_ttl_seconds = self.number(key, value, 1, most),
            "keep_deleted_seconds" => terms.keep_deleted_seconds = self.number(key, value, 0, most),
            "max_sandboxes" => terms.max_sandboxes = self.number(key, value, 0, most),
            "max_sandboxes_per_workspace" => terms.max_sandboxes_per_workspace = self.number(key, value, 0, most),
            "providers" => terms.providers = Some(SourcedValue { line, value: self.list(key, value) }),
            "templates" => terms.templates = Some(SourcedValue { line, value: self.list(key, value) }),
            "default_access" => {
                let word = self.string(key, value).unwrap_or_else(|| "owner".to_owned());
                match word.as_str() {
                    "owner" => terms.default_access = Some(SourcedValue { line, value: Access::Owner }),
                    "workspace" => terms.default_access = Some(SourcedValue { line, value: Access::Workspace }),
                    other => self.no_such(value.span().start, name, other, &["owner", "workspace"]),
                }
            }
            "hard_end" => {
                let known = [HardEnd::Suspend, HardEnd::Delete];
                let Some(word) = self.string(key, value) else { return true };
                match known.into_iter().find(|end| end.as_str() == word) {
                    Some(value) => terms.hard_end = Some(SourcedValue { line, value }),
                    None => self.no_such(value.span().start, name, &word, &known.map(HardEnd::as_str)),
                }
            }
            _ => return false,
        }
        true
    }

    fn capabilities(&mut self, key: Key, value: Value) -> Option<SourcedValue<CapabilitySet>> {
        let line = self.line(key.span().start);
        let mut all = CapabilitySet::EMPTY;
        for (at, word) in self.words(key, value, true) {
            match CapabilitySet::parse([&word]) {
                Ok(set) => all = all.union(set),
                Err(_) => {
                    let known: Vec<String> = CapabilitySet::ALL.iter().map(|c| c.as_str().to_owned()).collect();
                    self.no_such(at, key.get_ref(), &word, &known.iter().map(String::as_str).collect::<Vec<_>>());
                }
            }
        }
        Some(SourcedValue { line, value: all })
    }

    fn number(&mut self, key: Key, value: Value, least: u64, most: u64) -> Option<SourcedValue<u64>> {
        let number = match value.get_ref() {
            DeValue::Integer(n) => u64::from_str_radix(n.as_str(), n.radix()).ok().filter(|n| (least..=most).contains(n)),
            _ => None,
        };
        if number.is_none() {
            self.problem(value.span().start, format!("{}: must be a whole number from {least} to {most}", key.get_ref()));
        }
        Some(SourcedValue { line: self.line(key.span().start), value: number? })
    }

    /// Names of workspaces or principals; at least one is required.
    fn names(&mut self, key: Key, value: Value) -> Vec<String> {
        let words = self.words(key, value, false);
        for (at, word) in &words {
            if !is_external_id(word) {
                self.problem(*at, format!("{}: must have 1 to 256 characters and no control characters", key.get_ref()));
            }
        }
        words.into_iter().map(|(_, word)| word).collect()
    }

    fn list(&mut self, key: Key, value: Value) -> Vec<String> {
        self.words(key, value, true).into_iter().map(|(_, word)| word).collect()
    }

    fn string(&mut self, key: Key, value: Value) -> Option<String> {
        match value.get_ref() {
            DeValue::String(word) => Some(printable(word, MAX_SHOWN)),
            _ => {
                self.problem(value.span().start, format!("{}: must be a string", key.get_ref()));
                None
            }
        }
    }

    /// Reads a list of strings with their lines. A single string is accepted unless a list is required.
    fn words(&mut self, key: Key, value: Value, is_list: bool) -> Vec<(usize, String)> {
        let name = key.get_ref();
        let expected = if is_list { "a list of strings" } else { "a string or a list of strings" };
        let mut words = Vec::new();
        match value.get_ref() {
            DeValue::String(word) if !is_list => words.push((value.span().start, word.to_string())),
            DeValue::Array(array) if array.len() <= MAX_NAMES => {
                for item in array.iter() {
                    match item.get_ref() {
                        DeValue::String(word) => words.push((item.span().start, word.to_string())),
                        _ => self.problem(item.span().start, format!("{name}: must be {expected}")),
                    }
                }
                if array.is_empty() && !is_list {
                    self.problem(value.span().start, format!("{name}: is empty; leave it out to match all"));
                }
            }
            DeValue::Array(array) => {
                self.problem(value.span().start, format!("{name}: has {} entries; the maximum is {MAX_NAMES}", array.len()));
            }
            _ => self.problem(value.span().start, format!("{name}: must be {expected}")),
        }
        words
    }

    fn no_such(&mut self, at: usize, field: &str, word: &str, known: &[&str]) {
        let hint =
            nearest(word, known).map_or_else(|| format!("it must be one of {}", known.join(", ")), |w| format!("did you mean `{w}`?"));
        self.problem(at, format!("{field}: `{}` is not known; {hint}", shown(word)));
    }

    /// A default that could never be granted is a mistake.
    fn check_default(&mut self, terms: &PolicySettings, otherwise: Option<CapabilitySet>) {
        let allowed = terms.capabilities.as_ref().map(|s| s.value).or(otherwise);
        let (Some(default), Some(allowed)) = (&terms.default_capabilities, allowed) else { return };
        if let Some(extra) = default.value.iter().find(|c| !allowed.contains(*c)) {
            let message = format!("default_capabilities: `{extra}` is not allowed here; add it to capabilities or leave it out");
            self.problems.push(Problem { line: default.line, message });
        }
    }
}

fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    // Skip words that are much longer than any known word: they match none, and the cost of a comparison is the product
    // of both lengths.
    if word.len() > MAX_SHOWN {
        return None;
    }
    // The most likely mistake is a name without its unit.
    if let Some(whole) = known.iter().find(|k| word.len() >= 3 && k.starts_with(word)) {
        return Some(whole);
    }
    let likeness = |k: &&str| strsim::normalized_damerau_levenshtein(word, k);
    known.iter().map(|k| (likeness(k), *k)).filter(|(l, _)| *l >= MIN_SIMILARITY).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, k)| k)
}

fn shown(word: &str) -> String {
    printable(word, MAX_SHOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn refused(text: &str, line: usize, part: &str) {
        let error = read(text).unwrap_err();
        let found = error.problems.iter().any(|p| p.line == line && p.message.contains(part));
        assert!(found, "wanted line {line} with `{part}`:\n{error}");
    }

    #[test]
    fn a_problem_names_its_line_its_key_and_the_closest_match() {
        refused("[[rules]]\n", 1, "`rules` is not known; did you mean `rule`?");
        refused("# a\n[[rule]]\ncapabilites = [\"exec\"]\n", 3, "`capabilites` is not known; did you mean `capabilities`?");
        refused("[agent]\nlease = 3\n", 2, "did you mean `lease_seconds`?");
        refused(
            "[agent]\ncapabilities = [\n  \"fs_read\",\n  \"fs_raed\",\n]\n",
            4,
            "capabilities: `fs_raed` is not known; did you mean `fs_read`?",
        );
        refused("[[rule]]\nkind = \"humans\"\ntemplates = []\n", 2, "kind: `humans` is not known; did you mean `human`?");
        refused("[human]\ntoken_ttl_seconds = 7200\n", 2, "token_ttl_seconds: must be a whole number from 60 to 3600");
        refused("[human]\ntoken_ttl_seconds = \"1h\"\n", 2, "token_ttl_seconds");
        refused("[human]\nmax_sandboxes = -1\n", 2, "max_sandboxes");
        refused("[human]\ndefault_access = \"everyone\"\n", 2, "default_access");
        refused("[human]\nhard_end = \"remove\"\n", 2, "hard_end: `remove` is not known; it must be one of suspend, delete");
        refused("[human]\ndefault_capabilities = [\"ports\"]\n", 2, "`ports` is not allowed here");
        refused("[[rule]]\nworkspace = \"a\"\n", 1, "sets no limit");
        refused("[[rule]]\nworkspace = []\ntemplates = []\n", 2, "workspace: is empty");
        refused("[[rule]]\ntemplates = []\nunless = { principal = \"ci\" }\n", 1, "add the workspace");
        refused("[[rule]]\nkind = \"agent\"\nmax_sandboxes_per_workspace = 3\n", 3, "max_sandboxes_per_workspace");
        refused("rule = 3\n", 1, "[[rule]]");
        refused("human = true\n", 1, "[human]");
        refused("[human\n", 1, "");
        refused("[[rule]]\ntemplates = []\n\n[human]\nx = 1\n[human]\ny = 2\n", 6, "");
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_a_policy_or_has_problems_within_its_lines(words in proptest::collection::vec(0..WORDS.len(), 0..40), rest in ".{0,40}") {
            let text: String = words.iter().map(|i| WORDS[*i]).collect::<String>() + &rest;
            if let Err(error) = read(&text) {
                let lines = text.matches('\n').count() + 1;
                proptest::prop_assert!(error.problems.iter().all(|p| (1..=lines).contains(&p.line)), "{error}");
            }
        }
    }

    const WORDS: [&str; 24] = [
        "[[rule]]\n",
        "[human]\n",
        "[agent]\n",
        "capabilities",
        "default_capabilities",
        " = ",
        "[\"exec\"]\n",
        "[\"é\", 3]\n",
        "kind",
        "workspace",
        "unless",
        "\"agent\"\n",
        "\"acme\"\n",
        "{ principal = \"p\" }\n",
        "{}\n",
        "max_sandboxes",
        "token_ttl_seconds",
        "99999999999999999999\n",
        "-1\n",
        "0x3f\n",
        "\n",
        "#\n",
        "\"\"\"",
        ".",
    ];

    #[test]
    fn all_problems_are_reported_at_once_up_to_a_limit() {
        let error = read("[human]\nlease = 1\n[agent]\nlease = 1\n").unwrap_err();
        assert_eq!(error.problems.iter().map(|p| p.line).collect::<Vec<_>>(), [2, 4]);
        let many: String = (0..100).map(|i| format!("x{i} = 1\n")).collect();
        assert_eq!(read(&many).unwrap_err().problems.len(), MAX_PROBLEMS);
    }
}
