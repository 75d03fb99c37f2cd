//! API keys and the principals they authenticate: the callers of the broker.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{KeyId, Secret, Timestamp, id::UnknownName};

/// Prefix of every API key. No token has it, so the two cannot be confused.
pub const API_KEY_PREFIX: &str = "cbx_";
/// Prefix of every opaque token.
pub const OPAQUE_TOKEN_PREFIX: &str = "cbo_";

/// Kind of a principal. It is set when the key is created and never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum PrincipalKind {
    Human,
    Agent,
    Operator,
}

impl PrincipalKind {
    pub const fn as_str(self) -> &'static str {
        match self {
            PrincipalKind::Human => "human",
            PrincipalKind::Agent => "agent",
            PrincipalKind::Operator => "operator",
        }
    }
}

impl FromStr for PrincipalKind {
    type Err = UnknownName;
    fn from_str(s: &str) -> Result<Self, UnknownName> {
        [PrincipalKind::Human, PrincipalKind::Agent, PrincipalKind::Operator]
            .into_iter()
            .find(|v| v.as_str() == s)
            .ok_or_else(|| UnknownName::new(s, "principal kind"))
    }
}

/// `POST /v1/keys`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateKey {
    /// Name of the principal in its workspace.
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::external_id"))]
    pub name: String,
    pub kind: PrincipalKind,
    /// The caller's own workspace by default.
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::optional_external_id"))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
}

/// `PATCH /v1/keys/{id}`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ExpireKey {
    pub expires_at: Timestamp,
}

/// A principal of a workspace.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PrincipalInfo {
    pub name: String,
    pub kind: PrincipalKind,
    pub workspace: String,
    pub created_at: Timestamp,
    /// Number of API keys and OIDC identities with which it can authenticate.
    pub valid_keys: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disabled_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disabled_by: Option<String>,
}

/// Description of an API key or identity, without the secret.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct KeyInfo {
    pub id: KeyId,
    /// First characters of the key, by which users recognize it. Absent for an OIDC identity, which has no API key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// OIDC issuer of an identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub issuer: Option<String>,
    /// Subject of an identity at its issuer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    pub name: String,
    pub kind: PrincipalKind,
    pub workspace: String,
    pub created_at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_at: Option<Timestamp>,
}

/// Response to the creation of a key: the only one that contains the secret.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CreatedKey {
    #[serde(flatten)]
    pub info: KeyInfo,
    pub api_key: Secret,
}
