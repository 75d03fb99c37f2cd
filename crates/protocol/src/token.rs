//! Requests and responses for the delegation, sharing, revocation and introspection of tokens, for key rotation and for file links.

use serde::{Deserialize, Serialize};

use crate::{CapabilitySet, SandboxId, Secret, SessionId, ShareId, Timestamp, key::PrincipalKind};

/// `POST …/delegate`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct DelegateRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Vec<String>>,
    /// Legacy name of `capabilities`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scopes: Option<Vec<String>>,
    /// Requested lifetime in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<u32>,
    /// Token to delegate from; the new token ends with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_token: Option<Secret>,
    /// `jwt` or `opaque`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_format: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DelegateResponse {
    pub token: Secret,
    pub expires_at: Timestamp,
    /// Time to refresh the token, if it can be refreshed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refresh_before: Option<Timestamp>,
    pub granted_capabilities: CapabilitySet,
    pub scopes: Vec<String>,
    pub jti: String,
}

/// `POST …/share`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ShareRequest {
    pub principal: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Vec<String>>,
    /// Legacy name of `capabilities`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scopes: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ShareInfo {
    pub id: ShareId,
    pub session_id: SessionId,
    pub principal: String,
    pub capabilities: CapabilitySet,
    pub scopes: Vec<String>,
    pub shared_by: String,
    pub created_at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
    /// Whether the capabilities limit the principal. False if it can enter the sandbox without this share.
    pub is_limit: bool,
}

/// `GET …/share/{principal}`: how a principal can enter the session's sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PrincipalAccess {
    pub principal: String,
    /// The share of the session with the principal, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<ShareInfo>,
    /// Whether `access_paths` is not empty.
    pub can_enter_without_share: bool,
    /// Everything else that lets the principal into the session's sandbox.
    pub access_paths: Vec<AccessPath>,
}

/// What lets a principal into a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum AccessPath {
    /// The sandbox is open to the whole workspace.
    WorkspaceAccess,
    /// The principal owns the sandbox.
    SandboxOwner,
    /// The principal is an operator.
    Operator,
    /// A share of another session that uses the sandbox.
    Share { session_id: SessionId },
    /// Sent by a newer broker.
    #[serde(other)]
    Unknown,
}

/// `POST /internal/tokens/revoke`: exactly one of the first five fields must be set.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RevokeRequest {
    /// Id of a token, or of a share: revokes every token derived from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jti: Option<String>,
    /// Id of an API key: revokes every token issued under it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub principal: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// Workspace of `principal`, or of a `jti` that is no longer known; the caller's own by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RevokeResponse {
    /// Increases with every revocation of a workspace; absent if a sandbox's key was rotated instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    pub revoked_at: Timestamp,
}

/// `POST /internal/sandboxes/{id}/rotate-key`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RotateKeyRequest {
    #[serde(default)]
    pub mode: RotationMode,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RotationMode {
    /// Tokens of the old key remain valid until they expire.
    Graceful,
    /// Tokens of the old key are refused immediately, and open streams end.
    #[default]
    Immediate,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RotateKeyResponse {
    pub sandbox_id: SandboxId,
    pub generation: u32,
    /// Time until which tokens of older generations remain valid, if they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old_keys_until: Option<Timestamp>,
}

/// Introspection response of RFC 7662 with Cobox's own claims. For an inactive token it contains only `active`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Introspection {
    pub active: bool,
    #[serde(flatten)]
    pub token: Option<IntrospectedToken>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct IntrospectedToken {
    pub token_type: String,
    /// `jwt` or `opaque`.
    pub token_format: String,
    /// Legacy capability names, space-separated, as in the token.
    pub scope: String,
    pub granted_capabilities: CapabilitySet,
    pub iss: String,
    pub sub: String,
    /// The principal, under the RFC's field name.
    pub username: String,
    pub aud: SandboxId,
    pub iat: i64,
    pub nbf: i64,
    pub exp: i64,
    pub jti: String,
    pub actor_type: PrincipalKind,
    pub actor_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sid: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread_id: Option<String>,
    pub sandbox_id: SandboxId,
    pub workspace: String,
    /// Generation of the signing key.
    #[serde(rename = "gen")]
    pub generation: u32,
    pub grant: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
}

/// `POST …/file-links`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct FileLinkRequest {
    /// Absolute path in the sandbox.
    pub path: String,
    /// `GET` (default) or `PUT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Requested lifetime in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<u32>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileLinkResponse {
    /// Anyone with this URL can perform this one operation: treat it as a secret.
    pub url: Secret,
    pub expires_at: Timestamp,
    pub path: String,
    pub method: String,
    pub jti: String,
}
