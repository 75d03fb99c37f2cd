//! What must not happen at the same time. On SQLite a transaction that writes excludes every other from its start, so there
//! is nothing to do; on PostgreSQL these are locks until the transaction's end.
//!
//! Taken in this order, or two transactions could wait for each other: workspace, then sandbox.

use cobox_protocol::SandboxId;
use sqlx::AnyConnection;

use crate::store::Stored;

/// For whoever finds or makes something unique in a workspace, counts against its quota, or adds to its revocations: their
/// sequence must grow in the order in which readers come to see them.
pub async fn workspace(tx: &mut AnyConnection, workspace: &str) -> Stored<()> {
    if has_many_writers(tx) {
        // Not the row's lock: every session refers to that row, which would lock it too.
        sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('workspace ' || $1, 0))").bind(workspace).execute(tx).await?;
    }
    Ok(())
}

/// For whoever reads a sandbox with its sessions and decides by what it read.
pub async fn sandbox(tx: &mut AnyConnection, id: &SandboxId) -> Stored<()> {
    if has_many_writers(tx) {
        sqlx::query("SELECT id FROM sandboxes WHERE id = $1 FOR NO KEY UPDATE").bind(id.as_str()).execute(tx).await?;
    }
    Ok(())
}

fn has_many_writers(tx: &AnyConnection) -> bool {
    tx.backend_name() != "SQLite"
}
