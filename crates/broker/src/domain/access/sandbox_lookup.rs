//! Finds the sandboxes of a caller's workspace.

use cobox_protocol::{ApiError, ErrorCode};

use super::rules as access;
use crate::domain::{
    context::{BrokerContext, store_error},
    model::{Caller, Sandbox},
};

/// A live sandbox of the caller's workspace, by its id or its name.
pub async fn find(context: &BrokerContext, caller: &Caller, id_or_name: &str) -> Result<Sandbox, ApiError> {
    let found = match id_or_name.parse() {
        Ok(id) => context.store.sandbox(&id).await,
        Err(_) => context.store.sandbox_named(&caller.principal.workspace, id_or_name).await,
    };
    // A standby sandbox in a pool doesn't belong to any user yet.
    let is_there = |s: &Sandbox| s.ended_at.is_none() && s.pool.is_none() && access::is_visible(&caller.principal, s);
    found.map_err(store_error)?.filter(is_there).ok_or_else(not_found)
}

pub fn not_found() -> ApiError {
    ApiError::new(ErrorCode::SandboxNotFound, "there is no such sandbox")
}
