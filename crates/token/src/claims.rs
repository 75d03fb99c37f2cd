//! What a token says.

use cobox_protocol::{CapabilitySet, SandboxId, key::PrincipalKind};
use serde::{Deserialize, Serialize};

/// Who acts: an agent for a human, or a human for themself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Actor {
    #[serde(rename = "type")]
    pub kind: PrincipalKind,
    pub id: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    pub iss: String,
    /// The principal.
    pub sub: String,
    /// The one sandbox it is good for.
    pub aud: SandboxId,
    /// The session; absent for a sandbox used without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sid: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread_id: Option<String>,
    /// Capabilities in the older spelling, space-separated.
    #[serde(with = "scope_words")]
    pub scope: CapabilitySet,
    pub iat: i64,
    pub nbf: i64,
    pub exp: i64,
    pub jti: String,
    pub act: Actor,
    /// The generation of the sandbox's key.
    #[serde(rename = "gen")]
    pub generation: u32,
    /// What it was issued under: revoking the grant ends every token of it.
    pub grant: String,
    /// The token it was delegated from: it ends with that one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// What else it ends with: its parent's own parents, and the share it came by.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub via: Vec<String>,
    /// Set in a file link, which is good for this alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<LinkedFile>,
}

/// The one file a link is for, and what may be done with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkedFile {
    /// `GET` or `PUT`.
    pub method: String,
    /// As it stands in the link, after `/v1/files`.
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
