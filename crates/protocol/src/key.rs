//! API keys and the principals they stand for: who calls the broker.

use serde::{Deserialize, Serialize};

use crate::{KeyId, Secret, Timestamp};

/// How every API key starts. Tokens never do, so the two can't be mistaken for each other.
pub const API_KEY_PREFIX: &str = "cbx_";
/// How every opaque token starts.
pub const OPAQUE_TOKEN_PREFIX: &str = "cbo_";

/// What a principal is, fixed at its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum PrincipalKind {
    Human,
    Agent,
    Operator,
}

impl PrincipalKind {
    pub const fn word(self) -> &'static str {
        match self {
            PrincipalKind::Human => "human",
            PrincipalKind::Agent => "agent",
            PrincipalKind::Operator => "operator",
        }
    }
    pub fn from_word(w: &str) -> Option<Self> {
        [PrincipalKind::Human, PrincipalKind::Agent, PrincipalKind::Operator].into_iter().find(|k| k.word() == w)
    }
}

/// `POST /v1/keys`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateKey {
    /// The principal's name in its workspace.
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::foreign_id"))]
    pub name: String,
    pub kind: PrincipalKind,
    /// The caller's own workspace unless told.
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::maybe_foreign_id"))]
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
    /// Keys, and identities of an OIDC issuer, that it can come in with.
    pub valid_keys: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disabled_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disabled_by: Option<String>,
}

/// What is told of a key: everything but the key.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct KeyInfo {
    pub id: KeyId,
    /// How the key starts, to know it again by; left out for an identity, which has no key of ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// Who vouches for an identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub issuer: Option<String>,
    /// What the issuer calls it.
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

/// The one answer that carries the key itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CreatedKey {
    #[serde(flatten)]
    pub info: KeyInfo,
    pub api_key: Secret,
}
