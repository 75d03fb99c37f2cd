//! The audit's hash chains: how each record is linked to its predecessor, and how a verifier that doesn't trust the
//! database detects missing or altered records.

use cobox_protocol::{
    Timestamp,
    audit::{AuditEntry, AuditHead, AuditLink},
};
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

pub type Hash = [u8; 32];

/// Predecessor hash of the first record of a chain.
pub const NOTHING: Hash = [0; 32];
/// Domain separation: prefixes that distinguish these hashes from any others.
const RECORD: &[u8] = b"cobox audit record 1\n";
const LINK: &[u8] = b"cobox audit link 1\n";
const SEAL: &[u8] = b"cobox audit seal 1\n";

/// The hashed content of a record: every field in this order, each with its length. An absent field hashes differently
/// from an empty one.
pub struct Content<'a> {
    pub at: Timestamp,
    pub workspace: &'a str,
    pub action: &'a str,
    pub request_id: Option<&'a str>,
    pub principal: Option<&'a str>,
    pub actor: Option<&'a str>,
    pub thread: Option<&'a str>,
    pub session: Option<&'a str>,
    pub sandbox: Option<&'a str>,
    pub jti: Option<&'a str>,
    pub detail: Option<&'a str>,
}

impl<'a> Content<'a> {
    pub fn of_entry(workspace: &'a str, entry: &'a AuditEntry) -> Self {
        Self {
            at: entry.at,
            workspace,
            action: &entry.action,
            request_id: entry.request_id.as_ref().map(|i| i.as_str()),
            principal: entry.principal.as_deref(),
            actor: entry.actor.as_deref(),
            thread: entry.thread_id.as_deref(),
            session: entry.session_id.as_ref().map(|i| i.as_str()),
            sandbox: entry.sandbox_id.as_ref().map(|i| i.as_str()),
            jti: entry.jti.as_deref(),
            detail: entry.detail.as_deref(),
        }
    }

    pub fn digest(&self) -> Hash {
        let mut hasher = Sha256::new_with_prefix(RECORD);
        hasher.update(self.at.unix().to_be_bytes());
        let optional = [self.request_id, self.principal, self.actor, self.thread, self.session, self.sandbox, self.jti, self.detail];
        for field in [Some(self.workspace), Some(self.action)].into_iter().chain(optional) {
            hasher.update([u8::from(field.is_some())]);
            let text = field.unwrap_or_default();
            hasher.update((text.len() as u64).to_be_bytes());
            hasher.update(text);
        }
        hasher.finalize().into()
    }
}

/// Computes the hash of a link.
pub fn link(writer: &str, number: u64, before: &Hash, digest: &Hash) -> Hash {
    let mut hasher = Sha256::new_with_prefix(LINK);
    hasher.update((writer.len() as u64).to_be_bytes());
    hasher.update(writer);
    hasher.update(number.to_be_bytes());
    hasher.update(before);
    hasher.update(digest);
    hasher.finalize().into()
}

/// Computes the seal that proves that the broker itself removed a chain's records up to a number. It can't be created
/// without the master key.
pub fn seal(key: &[u8; 32], writer: &str, number: u64, hash: &Hash) -> Hash {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC accepts keys of any length");
    mac.update(SEAL);
    mac.update(&link(writer, number, &NOTHING, hash));
    mac.finalize().into_bytes().into()
}

pub fn from_hex(text: &str) -> Option<Hash> {
    let mut hash = Hash::default();
    hex::decode_to_slice(text, &mut hash).ok().map(|()| hash)
}

/// A fault in a chain and its location.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("record {number} of {writer} doesn't match its link: it was altered, moved, or linked by another writer")]
    Altered { writer: String, number: u64 },
    #[error("records {from} to {to} of {writer} are missing")]
    Missing { writer: String, from: u64, to: u64 },
    #[error("record {number} of {writer} is in the place of record {expected}")]
    OutOfOrder { writer: String, number: u64, expected: u64 },
    #[error("record {number} of {writer} doesn't have the hash of the saved head: the chain was rewritten")]
    Rewritten { writer: String, number: u64 },
    #[error("the saved head is record {number} of {writer}, but the chain ends at {end}: later records were removed")]
    CutOff { writer: String, number: u64, end: u64 },
    #[error("records up to {number} of {writer} were removed, but not by a broker because of their age")]
    Beheaded { writer: String, number: u64 },
    #[error("there is a saved head of {writer}, but no chain")]
    NoChain { writer: String },
}

/// A head that an operator saved earlier: `writer:number:hash`, as `cobox audit head` prints it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptHead {
    pub writer: String,
    pub number: u64,
    pub hash: Hash,
}

impl std::str::FromStr for KeptHead {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "must be WRITER:NUMBER:HASH, as `cobox audit head` prints it".to_owned();
        let mut parts = text.trim().rsplitn(3, ':');
        let (hash, number, writer) = (parts.next().ok_or_else(wrong)?, parts.next().ok_or_else(wrong)?, parts.next().ok_or_else(wrong)?);
        Ok(Self { writer: writer.to_owned(), number: number.parse().map_err(|_| wrong())?, hash: from_hex(hash).ok_or_else(wrong)? })
    }
}

/// Verifies one chain, oldest record first.
pub struct Verifier {
    writer: String,
    last: u64,
    /// The two accepted predecessor hashes of the next link: the last link's hash as stored, and as computed.
    before: [Hash; 2],
    kept: Vec<KeptHead>,
    pub checked: u64,
    pub faults: Vec<Fault>,
    /// Saved heads older than the retained records, which can't be verified.
    pub too_old: Vec<u64>,
}

impl Verifier {
    /// `kept` may also contain heads of other chains.
    pub fn new(head: &AuditHead, kept: &[KeptHead]) -> Self {
        let start = from_hex(&head.kept_after_hash).unwrap_or(NOTHING);
        let kept: Vec<KeptHead> = kept.iter().filter(|k| k.writer == head.writer).cloned().collect();
        let mut verifier = Self {
            writer: head.writer.clone(),
            last: head.kept_after,
            before: [start; 2],
            too_old: kept.iter().filter(|k| k.number < head.kept_after).map(|k| k.number).collect(),
            kept,
            checked: 0,
            faults: Vec::new(),
        };
        if head.kept_after > 0 && !head.kept_after_sealed {
            verifier.faults.push(Fault::Beheaded { writer: head.writer.clone(), number: head.kept_after });
        }
        verifier.compare(head.kept_after, &start);
        verifier
    }

    /// The number of the last link taken. Verification continues with the links after it.
    pub fn last(&self) -> u64 {
        self.last
    }

    pub fn take(&mut self, audit_link: &AuditLink) {
        let (writer, number, expected) = (self.writer.clone(), audit_link.number, self.last + 1);
        if number < expected {
            self.faults.push(Fault::OutOfOrder { writer, number, expected });
            return;
        }
        let is_after_hole = number > expected;
        if is_after_hole {
            self.faults.push(Fault::Missing { writer: writer.clone(), from: expected, to: number - 1 });
        }
        let stored = from_hex(&audit_link.hash);
        let claimed = from_hex(&audit_link.digest);
        let digest = match (&audit_link.workspace, &audit_link.record) {
            (Some(workspace), Some(record)) => Some(Content::of_entry(workspace, record).digest()),
            // A record of another workspace has only its digest.
            _ => claimed,
        };
        let should = self.before.map(|before| digest.map(|digest| link(&self.writer, number, &before, &digest)));
        // The predecessor of the first link after a gap is unknown. The next link shows whether this one is unaltered.
        let is_right = audit_link.writer == self.writer && digest == claimed && (is_after_hole || should.contains(&stored));
        if !is_right || stored.is_none() {
            self.faults.push(Fault::Altered { writer, number });
        }
        let stored = stored.unwrap_or(NOTHING);
        self.before = [stored, should[0].unwrap_or(stored)];
        self.last = number;
        self.checked += 1;
        self.compare(number, &stored);
    }

    /// Call after the last link; `head` is the reported end of the chain.
    pub fn finish(&mut self, head: &AuditHead) {
        let writer = &self.writer;
        if head.number > self.last {
            self.faults.push(Fault::Missing { writer: writer.clone(), from: self.last + 1, to: head.number });
        }
        let cut = self.kept.iter().filter(|k| k.number > self.last);
        self.faults.extend(cut.map(|k| Fault::CutOff { writer: writer.clone(), number: k.number, end: self.last }));
    }

    fn compare(&mut self, number: u64, hash: &Hash) {
        if self.kept.iter().any(|k| k.number == number && k.hash != *hash) {
            self.faults.push(Fault::Rewritten { writer: self.writer.clone(), number });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_boundaries_are_part_of_the_hash() {
        let content = |principal, actor| Content {
            at: Timestamp::from_unix(1),
            workspace: "w",
            action: "a",
            request_id: None,
            principal,
            actor,
            thread: None,
            session: None,
            sandbox: None,
            jti: None,
            detail: None,
        };
        let digests = [(Some("ab"), Some("c")), (Some("a"), Some("bc")), (Some("abc"), None), (None, Some("abc")), (Some("abc"), Some(""))];
        let digests: std::collections::HashSet<Hash> = digests.into_iter().map(|(p, a)| content(p, a).digest()).collect();
        assert_eq!(digests.len(), 5);
    }

    #[test]
    fn a_saved_head_is_parsed_as_it_is_printed() {
        let hash = [7; 32];
        let kept: KeptHead = format!("node:a:12:{}", hex::encode(hash)).parse().unwrap();
        assert_eq!(kept, KeptHead { writer: "node:a".into(), number: 12, hash });
        for bad in ["", "a:1", "a:x:00", &format!("a:-1:{}", hex::encode(hash)), &format!("a:1:{}", "g".repeat(64))] {
            assert!(bad.parse::<KeptHead>().is_err(), "{bad}");
        }
    }
}
