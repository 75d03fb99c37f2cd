//! The audit chain, for operators who verify that the audit is complete: the end of each chain of records, and every link
//! of it.

use cobox_protocol::{
    ApiError, RequestId,
    audit::{AuditHead, AuditLink},
};

use super::{access, audit::AuditRecord, deployment::internal, model::Caller, sandboxes::Sandboxes};
use crate::{
    chain::{Content, hex},
    store::{ChainLink, Note},
};

impl Sandboxes {
    /// The heads, and everything before them, are durable when returned: an operator stores them to compare with later.
    pub async fn audit_heads(&self, caller: &Caller, request_id: &RequestId) -> Result<Vec<AuditHead>, ApiError> {
        access::must_be_operator(&caller.principal, "read the audit")?;
        let d = &self.deployment;
        let asked = AuditRecord::new(d.now(), &caller.principal.workspace, "audit.heads").by(caller, request_id);
        d.store.note(&Note { audit: vec![asked], ..Note::default() }).await.map_err(internal)?;
        let heads = d.store.audit_heads().await.map_err(internal)?;
        let head = |h: crate::store::ChainHead| AuditHead {
            writer: h.writer,
            number: h.number,
            hash: hex(&h.hash),
            kept_after: h.kept_after,
            kept_after_hash: hex(&h.kept_after_hash),
            kept_after_sealed: h.is_beginning_sealed,
        };
        Ok(heads.into_iter().map(head).collect())
    }

    /// For records of other workspaces, only the hashes.
    pub async fn audit_links(&self, caller: &Caller, writer: &str, after: u64, limit: u32) -> Result<Vec<AuditLink>, ApiError> {
        access::must_be_operator(&caller.principal, "read the audit")?;
        let links = self.deployment.store.audit_links(writer, after, limit).await.map_err(internal)?;
        let shown = |link: ChainLink| {
            let ChainLink { number, hash, sequence, record } = link;
            let workspace = record.workspace.clone();
            let entry = record.entry(sequence);
            let digest = hex(&Content::of_entry(&workspace, &entry).digest());
            let is_own = workspace == caller.principal.workspace;
            AuditLink {
                writer: writer.to_owned(),
                number,
                hash: hex(&hash),
                digest,
                workspace: is_own.then_some(workspace),
                record: is_own.then_some(entry),
            }
        };
        Ok(links.into_iter().map(shown).collect())
    }
}
