//! Sandboxes themselves, with or without a session.

use std::sync::Arc;

use cobox_protocol::{
    ApiError, ErrorCode, RequestId, SandboxId,
    audit::AuditEntry,
    sandbox::{CreateSandbox, SandboxInfo, is_sandbox_name},
};

use super::{
    access,
    audit::AuditRecord,
    deployment::{Deployment, internal},
    lifecycle::Lifecycle,
    model::{Caller, Sandbox},
    sessions::{Asking, new_sandbox},
};
use crate::store::{AddedSandbox, PageWish, Viewer};

pub struct Sandboxes {
    pub deployment: Arc<Deployment>,
    pub lifecycle: Arc<Lifecycle>,
}

impl Sandboxes {
    /// Answers with a running sandbox, or with one that is still starting when that takes longer than the caller waits:
    /// asking again would make another.
    pub async fn create(&self, asking: &Asking<'_>, wish: CreateSandbox) -> Result<SandboxInfo, ApiError> {
        let d = &self.deployment;
        if wish.name.as_deref().is_some_and(|n| !is_sandbox_name(n)) {
            return Err(ApiError::invalid(
                "name: must be 1 to 63 letters, digits, `-`, `_` or `.`, and start with neither `.`, `-` nor `sb_`",
            ));
        }
        let sandbox = new_sandbox(d, asking.caller, wish.name, wish.access.unwrap_or_default());
        let audit = AuditRecord::of_sandbox(d.now(), &sandbox, "sandbox.created", sandbox.name.as_deref().unwrap_or("without a name"))
            .by(asking.caller, asking.request_id);
        let quota = d.config.max_sandboxes_per_workspace;
        match d.store.add_sandbox(&sandbox, quota, &audit).await.map_err(internal)? {
            AddedSandbox::Added => {}
            AddedSandbox::NameTaken(id) => {
                let message = format!("name: {} is taken by {id}", sandbox.name.unwrap_or_default());
                return Err(ApiError::new(ErrorCode::SandboxConflict, message).with_details(serde_json::json!({ "sandbox_id": id })));
            }
            AddedSandbox::QuotaReached => {
                let message = format!("the workspace has {quota} sandboxes, which is its limit; delete some first");
                return Err(ApiError::new(ErrorCode::RateLimited, message));
            }
        }
        match self.lifecycle.bring_up(&sandbox.id, asking.wait).await {
            Ok(sandbox) => self.info(sandbox).await,
            Err(e) if e.code == ErrorCode::SandboxStarting => self.info(sandbox).await,
            Err(e) => Err(e),
        }
    }

    pub async fn list(&self, caller: &Caller, page: &PageWish) -> Result<Vec<SandboxInfo>, ApiError> {
        let found = self.deployment.store.sandboxes(&Viewer::from(&caller.principal), page).await.map_err(internal)?;
        let mut list = Vec::with_capacity(found.len());
        for sandbox in found {
            list.push(self.info(sandbox).await?);
        }
        Ok(list)
    }

    pub async fn get(&self, caller: &Caller, id_or_name: &str) -> Result<SandboxInfo, ApiError> {
        let sandbox = find(&self.deployment, caller, id_or_name).await?;
        access::may_use(&caller.principal, &sandbox)?;
        self.info(sandbox).await
    }

    /// Ends it and every session that uses it.
    pub async fn delete(&self, caller: &Caller, id_or_name: &str, request_id: &RequestId) -> Result<(), ApiError> {
        let sandbox = find(&self.deployment, caller, id_or_name).await?;
        access::may_end(&caller.principal, &sandbox)?;
        let audit = AuditRecord::of_sandbox(self.deployment.now(), &sandbox, "sandbox.deleted", "asked for").by(caller, request_id);
        let lifecycle = self.lifecycle.clone();
        // In a task, so that a caller who hangs up doesn't leave it half done until the reaper comes by.
        let deleting = self.deployment.background.spawn(async move { lifecycle.terminate(&sandbox, "it was deleted", audit).await });
        deleting.await.map_err(|_| ApiError::new(ErrorCode::Internal, "deleting was interrupted; try again"))?
    }

    /// The workspace's audit, newest first; for operators.
    pub async fn audit(&self, caller: &Caller, sandbox: Option<&str>, page: &PageWish) -> Result<Vec<AuditEntry>, ApiError> {
        access::must_be_operator(&caller.principal, "read the audit")?;
        let sandbox = match sandbox {
            None => None,
            // An ended one has its records too; a name is only known of a living one.
            Some(id_or_name) => Some(match id_or_name.parse::<SandboxId>() {
                Ok(id) => id,
                Err(_) => find(&self.deployment, caller, id_or_name).await?.id,
            }),
        };
        let found = self.deployment.store.audit(&caller.principal.workspace, sandbox.as_ref(), page).await.map_err(internal)?;
        Ok(found.into_iter().map(|(sequence, record)| record.entry(sequence)).collect())
    }

    async fn info(&self, sandbox: Sandbox) -> Result<SandboxInfo, ApiError> {
        let d = &self.deployment;
        let sessions = d.store.sessions_on(&sandbox.id).await.map_err(internal)?;
        let dataplane = d.dataplane(&sandbox);
        Ok(SandboxInfo {
            last_active_at: self.lifecycle.last_use(&sandbox),
            lease_expires_at: self.lifecycle.lease_end(&sandbox),
            id: sandbox.id,
            name: sandbox.name,
            provider: sandbox.provider,
            state: sandbox.state,
            reason: sandbox.reason,
            owner: sandbox.owner,
            access: sandbox.access,
            created_at: sandbox.created_at,
            http_base_url: dataplane.http_base_url,
            ws_base_url: dataplane.ws_base_url,
            threads: sessions.iter().map(|s| s.scope_id.clone()).collect(),
            sessions: sessions.into_iter().map(|s| s.id).collect(),
        })
    }
}

/// A living sandbox of the caller's workspace, by its id or its name.
pub async fn find(d: &Deployment, caller: &Caller, id_or_name: &str) -> Result<Sandbox, ApiError> {
    let found = match id_or_name.parse() {
        Ok(id) => d.store.sandbox(&id).await,
        Err(_) => d.store.sandbox_named(&caller.principal.workspace, id_or_name).await,
    };
    found
        .map_err(internal)?
        .filter(|s| s.ended_at.is_none() && access::is_visible(&caller.principal, s))
        .ok_or_else(|| ApiError::new(ErrorCode::SandboxNotFound, "there is no such sandbox"))
}
