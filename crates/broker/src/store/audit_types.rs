//! Types of the audit chain.

use cobox_protocol::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{audit_hash::Hash, domain::model::AuditRecord};

/// Signed statement that a chain's records up to a number were removed by age.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditSeal {
    pub writer: String,
    pub number: u64,
    pub seal: Hash,
}

/// The end of a chain of audit records, and the link that the oldest kept record refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainHead {
    pub writer: String,
    pub number: u64,
    pub hash: Hash,
    pub kept_after: u64,
    pub kept_after_hash: Hash,
    /// Nothing was removed, or the removal was signed by a broker.
    pub is_beginning_sealed: bool,
}

/// An audit record in its writer's chain.
#[derive(Clone, Debug)]
pub struct ChainLink {
    pub number: u64,
    /// As stored, unverified.
    pub hash: Vec<u8>,
    pub sequence: u64,
    pub record: AuditRecord,
}

/// How far a store's own chain has come.
#[derive(Clone, Debug, Default)]
pub struct AuditProgress {
    /// Number and hash of the last link, if known.
    pub head: Option<(u64, Hash)>,
    /// Newly committed records about keys and revocations.
    pub records: Vec<MarkedRecord>,
}

/// Numbers that a store's own chain leaves out, for records that could not be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditGap {
    /// Number of the last link.
    pub after: u64,
    pub count: u64,
}

/// An audit record about a key or a revocation, as it is kept outside the database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MarkedRecord {
    pub number: u64,
    pub hash: String,
    pub at: Timestamp,
    pub action: String,
    pub workspace: String,
    pub principal: Option<String>,
    pub detail: Option<String>,
}

impl std::fmt::Display for MarkedRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in workspace {}", self.action, self.workspace)?;
        if let Some(detail) = &self.detail {
            write!(f, ": {detail}")?;
        }
        if let Some(principal) = &self.principal {
            write!(f, ", by {principal}")?;
        }
        write!(f, ", at {}", self.at)
    }
}
