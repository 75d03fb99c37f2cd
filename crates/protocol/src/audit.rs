//! What a sandbox's daemon says of the requests it got. A claim: the broker's own records stand beside it, joined by `jti`.

use serde::{Deserialize, Serialize};

use crate::{RequestId, SandboxId, SessionId, Timestamp, key::PrincipalKind};

/// Longest text in a claim, in bytes; what is longer is cut.
pub const MAX_CLAIM_TEXT_BYTES: usize = 256;
/// Claims in one answer, so that it stays well below a megabyte.
pub const MAX_CLAIMS_AT_ONCE: usize = 256;

/// One request, when it was answered; one stream, when it began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// Counts up from 1 in one life of the daemon.
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
    /// The file, command, shell or process it was about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    pub status: u16,
    /// The code of a refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub duration_ms: u64,
}

/// The claims not taken yet, oldest first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Claims {
    /// Of this life of the daemon; another one counts anew.
    pub life: String,
    pub items: Vec<Claim>,
    /// How many were dropped so far because nobody came for them.
    pub lost: u64,
    /// Whether there are more.
    pub more: bool,
}

/// One record of the broker's audit, its own or (`sandbox.claim`) a sandbox's word.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AuditEntry {
    /// Counts up; the order in which they were written.
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

/// One link of a writer's chain: `hash` is SHA-256 over the writer, the number, the hash before it and `digest`, which is SHA-256 over
/// the record. So a chain can be checked by who may read only some of its records.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AuditLink {
    /// The broker that wrote it.
    pub writer: String,
    /// Counts up from 1 in one writer's chain, without a hole.
    pub number: u64,
    /// In hexadecimal, as all hashes are.
    pub hash: String,
    pub digest: String,
    /// Left out, with the record, where it is another workspace's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<AuditEntry>,
}

/// Where a chain ends, to be kept somewhere else: with it nobody can cut it short or write it anew unseen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AuditHead {
    pub writer: String,
    pub number: u64,
    pub hash: String,
    /// Records up to this one are no longer kept; what follows is linked to its hash.
    pub kept_after: u64,
    pub kept_after_hash: String,
    /// Whether a broker removed those for being old, and signed for it. Anybody else's cut is not that.
    pub kept_after_sealed: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AuditHeads {
    pub items: Vec<AuditHead>,
}

/// A text cut to what a claim carries, control characters replaced: it may be a stranger's.
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
    fn a_claims_text_is_short_and_moves_no_cursor() {
        assert_eq!(claim_text("a\x1b[2J"), "a\u{fffd}[2J");
        assert_eq!(claim_text(&"€".repeat(200)).len(), MAX_CLAIM_TEXT_BYTES / 3 * 3);
    }
}
