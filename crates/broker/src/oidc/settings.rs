//! The `[oidc]` section of the broker's configuration: the trusted issuer and how its tokens map to principals.

use std::collections::BTreeMap;

use cobox_protocol::{id::is_external_id, key::PrincipalKind};
use serde::Deserialize;

use super::Algorithm;
use crate::{config::ConfigError, outbound::read_url};

/// Clocks that differ by more than this are misconfigured.
const MAX_LEEWAY_SECONDS: u32 = 300;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OidcConfig {
    /// Must equal the tokens' `iss` exactly.
    pub issuer: String,
    /// Accepted audiences. A token must have at least one of them.
    pub audience: Audience,
    /// URL of the issuer's keys. If unset, it is taken from the discovery document.
    pub jwks_url: Option<String>,
    #[serde(default = "all_algorithms")]
    pub algorithms: Vec<Algorithm>,
    #[serde(default = "default_leeway")]
    pub leeway_seconds: u32,
    /// Workspace of all principals, unless `workspace_claim` is set.
    #[serde(default = "default_workspace")]
    pub workspace: String,
    pub workspace_claim: Option<String>,
    /// Workspaces that a claim may name. Empty allows any.
    #[serde(default)]
    pub workspaces: Vec<String>,
    /// Claim with the principal's name. It must identify one person permanently; `sub` always does.
    #[serde(default = "default_principal_claim")]
    pub principal_claim: String,
    /// Prefix of every such name, so that it can't collide with a principal that uses API keys.
    #[serde(default)]
    pub principal_prefix: String,
    /// Kind of all principals, unless a claim sets it.
    #[serde(default = "default_kind")]
    pub kind: PrincipalKind,
    /// Claim that contains a string or a list of strings, such as `roles` or `groups`.
    pub kind_claim: Option<String>,
    /// Maps values of that claim to kinds.
    #[serde(default)]
    pub kinds: BTreeMap<String, PrincipalKind>,
}

/// One string or a list of strings.
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
        // Without an audience, a token issued for any other application of the same issuer would be accepted here.
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
            return invalid("oidc.kind", "can't be operator for all principals; select operators with kind_claim and kinds");
        }
        if self.kind_claim.is_some() == self.kinds.is_empty() {
            return invalid("oidc.kind_claim", "requires [oidc.kinds], which maps the values of the claim to kinds, and vice versa");
        }
        Ok(())
    }
}
