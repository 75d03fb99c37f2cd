//! Audit records: the broker's own, and the claims that boxd reports about the requests it received. Claims are untrusted; the broker's
//! own records can be joined with them by `jti`.

use serde::{Deserialize, Serialize};

use crate::{RequestId, SandboxId, SessionId, Timestamp, key::PrincipalKind};

/// Maximum length of a text in a claim, in bytes; longer texts are truncated.
pub const MAX_CLAIM_TEXT_BYTES: usize = 256;

/// Report of boxd about one request, made when it was answered, or about one stream, made when it began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxClaim {
    /// Sequence number, from 1 within one run of boxd.
    pub seq: u64,
    pub at: Timestamp,
    pub request_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jti: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub principal: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actor: Option<PrincipalKind>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capability: Option<String>,
    pub method: String,
    pub route: String,
    /// File, command, shell or process that the request concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    pub status: u16,
    /// Error code of a refused request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub duration_ms: u64,
}

/// One record of the broker's audit: its own, or reported by a sandbox (`sandbox.claim`, untrusted).
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AuditEntry {
    /// Increases in the order in which records were written.
    pub sequence: u64,
    pub at: Timestamp,
    /// `session.created`, `token.issued`, `dataplane.used`, `sandbox.claim`, …
    pub action: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<RequestId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub principal: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actor: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<SandboxId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jti: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// One link of a writer's hash chain. `hash` is SHA-256 over the writer, the number, the previous hash and `digest`; `digest` is SHA-256
/// over the record. Therefore a reader who can see only some of the records can verify the whole chain.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AuditLink {
    /// Broker that wrote the record.
    pub writer: String,
    /// Number in the writer's chain, from 1 without gaps.
    pub number: u64,
    /// In hexadecimal, as all hashes.
    pub hash: String,
    pub digest: String,
    /// Absent, like the record, if it belongs to another workspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<AuditEntry>,
}

/// End of a hash chain. A copy kept outside the broker reveals whether the chain was truncated or rewritten.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AuditHead {
    pub writer: String,
    pub number: u64,
    pub hash: String,
    /// Records up to this number are no longer kept; the next record is linked to the hash of this one.
    pub kept_after: u64,
    pub kept_after_hash: String,
    /// Whether a broker removed those records because of their age and signed the removal. False for any other truncation.
    pub kept_after_sealed: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AuditHeads {
    pub items: Vec<AuditHead>,
}

/// Truncates a text to the limit for claims and replaces control characters, because clients choose these texts.
pub fn claim_text(text: &str) -> String {
    let mut cut = String::new();
    for c in text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }) {
        if cut.len() + c.len_utf8() > MAX_CLAIM_TEXT_BYTES {
            break;
        }
        cut.push(c);
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claim_texts_are_truncated_and_have_no_control_characters() {
        assert_eq!(claim_text("a\x1b[2J"), "a\u{fffd}[2J");
        assert_eq!(claim_text(&"€".repeat(200)).len(), MAX_CLAIM_TEXT_BYTES / 3 * 3);
    }
}
