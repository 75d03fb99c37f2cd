//! The audit log, for operators: its records, and the end and every link of each audit chain, to verify that the log is
//! complete.

use std::sync::Arc;

use cobox_protocol::{
    ApiError, RequestId, SandboxId,
    audit::{AuditEntry, AuditHead, AuditLink},
};

use crate::{
    audit_hash::Content,
    domain::{
        access::{self, sandbox_lookup::find},
        context::{BrokerContext, store_error},
        model::{AuditRecord, Caller},
    },
    store::{ChainLink, Note, PageParams},
};

/// The audit, for operators.
pub struct AuditLog {
    pub context: Arc<BrokerContext>,
}

impl AuditLog {
    /// The workspace's audit, newest first; for operators.
    pub async fn records(
        &self,
        caller: &Caller,
        sandbox: Option<&str>,
        token: Option<&str>,
        page: &PageParams,
    ) -> Result<Vec<AuditEntry>, ApiError> {
        access::must_be_operator(&caller.principal, "read the audit")?;
        if let Some(jti) = token {
            let found = self.context.store.audit_of_token(&caller.principal.workspace, jti, page).await.map_err(store_error)?;
            return Ok(found.into_iter().map(|(sequence, record)| record.entry(sequence)).collect());
        }
        let sandbox = match sandbox {
            None => None,
            // An ended sandbox has records too, but can only be found by its id; names resolve to live ones.
            Some(id_or_name) => Some(match id_or_name.parse::<SandboxId>() {
                Ok(id) => id,
                Err(_) => find(&self.context, caller, id_or_name).await?.id,
            }),
        };
        let found = self.context.store.audit(&caller.principal.workspace, sandbox.as_ref(), page).await.map_err(store_error)?;
        Ok(found.into_iter().map(|(sequence, record)| record.entry(sequence)).collect())
    }

    /// The heads, and everything before them, are durable when returned: an operator stores them to compare with later.
    pub async fn heads(&self, caller: &Caller, request_id: &RequestId) -> Result<Vec<AuditHead>, ApiError> {
        access::must_be_operator(&caller.principal, "read the audit")?;
        let context = &self.context;
        let audit = AuditRecord::new(context.now(), &caller.principal.workspace, "audit.heads").by(caller, request_id);
        context.store.note(&Note { audit: vec![audit], ..Note::default() }).await.map_err(store_error)?;
        let heads = context.store.audit_heads().await.map_err(store_error)?;
        let head = |h: crate::store::ChainHead| AuditHead {
            writer: h.writer,
            number: h.number,
            hash: hex::encode(h.hash),
            kept_after: h.kept_after,
            kept_after_hash: hex::encode(h.kept_after_hash),
            kept_after_sealed: h.is_beginning_sealed,
        };
        Ok(heads.into_iter().map(head).collect())
    }

    /// For records of other workspaces, only the hashes.
    pub async fn links(&self, caller: &Caller, writer: &str, after: u64, limit: u32) -> Result<Vec<AuditLink>, ApiError> {
        access::must_be_operator(&caller.principal, "read the audit")?;
        let links = self.context.store.audit_links(writer, after, limit).await.map_err(store_error)?;
        let to_entry = |link: ChainLink| {
            let ChainLink { number, hash, sequence, record } = link;
            let workspace = record.workspace.clone();
            let entry = record.entry(sequence);
            let digest = hex::encode(Content::of_entry(&workspace, &entry).digest());
            let is_own = workspace == caller.principal.workspace;
            AuditLink {
                writer: writer.to_owned(),
                number,
                hash: hex::encode(hash),
                digest,
                workspace: is_own.then_some(workspace),
                record: is_own.then_some(entry),
            }
        };
        Ok(links.into_iter().map(to_entry).collect())
    }
}
