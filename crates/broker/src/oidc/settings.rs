//! `[oidc]` in the broker's settings: which issuer is believed, about what, and who its people are here.

use std::collections::BTreeMap;

use cobox_protocol::{id::is_external_id, key::PrincipalKind};
use serde::Deserialize;

use super::Algorithm;
use crate::{config::ConfigError, outbound::read_url};

/// Clocks that are further apart than this are wrong.
const MAX_LEEWAY_SECONDS: u32 = 300;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OidcConfig {
    /// As the tokens' `iss` says it, to the letter.
    pub issuer: String,
    /// Whom tokens must be meant for; any of them.
    pub audience: Audience,
    /// Where its keys are. Without it, where its discovery document says.
    pub jwks_url: Option<String>,
    #[serde(default = "all_algorithms")]
    pub algorithms: Vec<Algorithm>,
    #[serde(default = "default_leeway")]
    pub leeway_seconds: u32,
    /// The workspace of everybody, unless a claim says it.
    #[serde(default = "default_workspace")]
    pub workspace: String,
    pub workspace_claim: Option<String>,
    /// Those that may be said; left empty: any.
    #[serde(default)]
    pub workspaces: Vec<String>,
    /// What a principal is called. It must name one person for good: `sub` always does.
    #[serde(default = "default_principal_claim")]
    pub principal_claim: String,
    /// Before every such name, so that it can't be that of a principal with keys.
    #[serde(default)]
    pub principal_prefix: String,
    /// What everybody is, unless a claim says it.
    #[serde(default = "default_kind")]
    pub kind: PrincipalKind,
    /// Holds a word or a list of words, such as `roles` or `groups`.
    pub kind_claim: Option<String>,
    /// What those words stand for.
    #[serde(default)]
    pub kinds: BTreeMap<String, PrincipalKind>,
}

/// A word, or several.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Audience {
    One(String),
    Many(Vec<String>),
}

impl Audience {
    pub fn contains(&self, word: &str) -> bool {
        match self {
            Audience::One(one) => one == word,
            Audience::Many(many) => many.iter().any(|a| a == word),
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Audience::One(one) => one.is_empty(),
            Audience::Many(many) => many.is_empty() || many.iter().any(String::is_empty),
        }
    }
}

fn all_algorithms() -> Vec<Algorithm> {
    Algorithm::ALL.to_vec()
}
fn default_leeway() -> u32 {
    30
}
fn default_workspace() -> String {
    "default".to_owned()
}
fn default_principal_claim() -> String {
    "sub".to_owned()
}
fn default_kind() -> PrincipalKind {
    PrincipalKind::Human
}

impl OidcConfig {
    pub fn validate(&self) -> Result<(), ConfigError> {
        let invalid = |field, problem: &str| Err(ConfigError::Invalid { field, problem: problem.to_owned() });
        if let Err(problem) = read_url(&self.issuer) {
            return invalid("oidc.issuer", problem);
        }
        if let Some(Err(problem)) = self.jwks_url.as_deref().map(read_url) {
            return invalid("oidc.jwks_url", problem);
        }
        // Without it a token that was meant for any other program of the same issuer would open this one.
        if self.audience.is_empty() {
            return invalid("oidc.audience", "must not be empty");
        }
        if self.algorithms.is_empty() {
            return invalid("oidc.algorithms", "must name at least one of RS256, ES256 and EdDSA");
        }
        if self.leeway_seconds > MAX_LEEWAY_SECONDS {
            return invalid("oidc.leeway_seconds", "must be at most 300");
        }
        if !is_external_id(&self.workspace) || self.workspaces.iter().any(|w| !is_external_id(w)) {
            return invalid("oidc.workspace", "must have 1 to 256 characters and no control characters");
        }
        if self.kind == PrincipalKind::Operator {
            return invalid("oidc.kind", "can't be operator for everybody; name those who are with kind_claim and kinds");
        }
        if self.kind_claim.is_some() == self.kinds.is_empty() {
            return invalid("oidc.kind_claim", "goes together with [oidc.kinds], which says what its words stand for");
        }
        Ok(())
    }
}
