//! Principals: lists them, disables one with all its credentials, and enables it again.

use std::sync::Arc;

use cobox_protocol::{
    ApiError, ErrorCode, RequestId,
    key::PrincipalInfo,
    text::{MAX_SHOWN_CHARS, printable},
};

use super::keys::{RevocationPush, last_operator};
use crate::{
    domain::{
        access,
        context::{BrokerContext, store_error},
        model::{AuditRecord, Caller, PrincipalRecord},
    },
    store::{DisabledPrincipal, PageParams},
};

const MANAGE: &str = "manage principals";

pub struct Principals {
    pub context: Arc<BrokerContext>,
    pub revocation_push: Arc<dyn RevocationPush>,
}

impl Principals {
    /// The principals of one workspace, by name.
    pub async fn list(&self, caller: &Caller, workspace: Option<&str>, page: &PageParams) -> Result<Vec<PrincipalInfo>, ApiError> {
        access::must_be_operator(&caller.principal, MANAGE)?;
        let context = &self.context;
        let workspace = workspace.unwrap_or(&caller.principal.workspace);
        let found = context.store.principals(workspace, context.now(), page).await.map_err(store_error)?;
        Ok(found.into_iter().map(info).collect())
    }

    /// Ends every key, identity and token of a principal. Durable when it returns. Every running sandbox of the workspace
    /// was notified, or the push is retried. Sandboxes that the principal created stay available to others until their
    /// lease ends.
    pub async fn disable(&self, caller: &Caller, workspace: Option<&str>, name: &str, request_id: &RequestId) -> Result<(), ApiError> {
        access::must_be_operator(&caller.principal, MANAGE)?;
        let context = &self.context;
        let workspace = workspace.unwrap_or(&caller.principal.workspace);
        if (workspace, name) == (caller.principal.workspace.as_str(), caller.principal.name.as_str()) {
            // An operator could not undo this alone.
            return Err(ApiError::new(ErrorCode::Forbidden, "you can't disable yourself; ask another operator"));
        }
        let audit = AuditRecord::new(context.now(), workspace, "principal.disabled").by(caller, request_id).detail(name);
        match context.store.disable_principal(workspace, name, &context.ending("disabled", audit)).await.map_err(store_error)? {
            DisabledPrincipal::Disabled => {
                self.revocation_push.push_to_workspace(workspace).await;
                Ok(())
            }
            DisabledPrincipal::NotThere => Err(not_found(workspace, name)),
            DisabledPrincipal::LastOperator => Err(last_operator(name, " for another operator")),
        }
    }

    pub async fn enable(&self, caller: &Caller, workspace: Option<&str>, name: &str, request_id: &RequestId) -> Result<(), ApiError> {
        access::must_be_operator(&caller.principal, MANAGE)?;
        let context = &self.context;
        let workspace = workspace.unwrap_or(&caller.principal.workspace);
        let audit = AuditRecord::new(context.now(), workspace, "principal.enabled").by(caller, request_id).detail(name);
        if !context.store.enable_principal(workspace, name, &audit).await.map_err(store_error)? {
            return Err(not_found(workspace, name));
        }
        // Credentials issued from now on must not match an old revocation.
        self.revocation_push.push_to_workspace(workspace).await;
        Ok(())
    }
}

fn info(record: PrincipalRecord) -> PrincipalInfo {
    PrincipalInfo {
        name: record.principal.name,
        kind: record.principal.kind,
        workspace: record.principal.workspace,
        created_at: record.created_at,
        valid_keys: record.valid_keys,
        last_used_at: record.last_used_at,
        disabled_at: record.disabled_at,
        disabled_by: record.disabled_by,
    }
}

fn not_found(workspace: &str, name: &str) -> ApiError {
    ApiError::new(
        ErrorCode::PrincipalNotFound,
        format!("workspace {} has no principal {}", printable(workspace, MAX_SHOWN_CHARS), printable(name, MAX_SHOWN_CHARS)),
    )
}
