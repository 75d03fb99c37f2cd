//! The claims of an access token.

use cobox_protocol::{CapabilitySet, SandboxId, key::PrincipalKind};
use serde::{Deserialize, Serialize};

/// The acting party: an agent on behalf of a human, or the human.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Actor {
    #[serde(rename = "type")]
    pub kind: PrincipalKind,
    pub id: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    pub iss: String,
    /// The principal that the token was issued to.
    pub sub: String,
    /// The only sandbox that accepts the token.
    pub aud: SandboxId,
    /// The session; absent if the sandbox is used without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sid: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread_id: Option<String>,
    /// Capabilities in the older spelling, separated by spaces.
    #[serde(with = "scope_words")]
    pub scope: CapabilitySet,
    pub iat: i64,
    pub nbf: i64,
    pub exp: i64,
    pub jti: String,
    pub act: Actor,
    /// The generation of the sandbox's signing key.
    #[serde(rename = "gen")]
    pub generation: u32,
    /// The grant under which the token was issued; revoking it revokes all of its tokens.
    pub grant: String,
    /// The token from which this one was delegated; revoking that revokes this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Further ids whose revocation revokes this token: its parent's parents, and the share through which it was
    /// issued.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub via: Vec<String>,
    /// Set in a file link, which is valid only for this file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<LinkedFile>,
}

/// The only file that a link gives access to, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkedFile {
    /// `GET` or `PUT`.
    pub method: String,
    /// The path as written in the link, after `/v1/files`.
    pub path: String,
}

mod scope_words {
    use cobox_protocol::CapabilitySet;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(set: &CapabilitySet, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&set.legacy_names().join(" "))
    }
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<CapabilitySet, D::Error> {
        String::deserialize(d)?.parse().map_err(D::Error::custom)
    }
}
