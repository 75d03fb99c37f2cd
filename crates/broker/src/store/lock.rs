//! Locks against concurrent changes. On SQLite a writing transaction excludes every other from its start, so there is
//! nothing to do; on PostgreSQL these are locks until the transaction's end.
//!
//! Must be taken in this order to avoid deadlocks: operators, workspace, then sandbox.

use std::collections::BTreeSet;

use cobox_protocol::SandboxId;
use sqlx::{AnyConnection, AssertSqlSafe};

use super::{
    multi_row::{ROWS_AT_ONCE, placeholders},
    rows,
};
use crate::store::Stored;

/// For callers that look up or create something unique in a workspace, count against its quota, or add to its
/// revocations: the sequence of revocations must grow in the order in which readers see them.
pub async fn workspace(tx: &mut AnyConnection, workspace: &str) -> Stored<()> {
    if has_many_writers(tx) {
        // Not a row lock: every session refers to that row, which would lock it too.
        sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('workspace ' || $1, 0))").bind(workspace).execute(tx).await?;
    }
    Ok(())
}

/// For callers that end an operator's credentials: one must remain. Taken before any workspace's lock.
pub async fn operators(tx: &mut AnyConnection) -> Stored<()> {
    if has_many_writers(tx) {
        sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('operators', 0))").execute(tx).await?;
    }
    Ok(())
}

/// For callers that read a sandbox with its sessions and act on the result.
pub async fn sandbox(tx: &mut AnyConnection, id: &SandboxId) -> Stored<()> {
    if has_many_writers(tx) {
        sqlx::query("SELECT id FROM sandboxes WHERE id = $1 FOR NO KEY UPDATE").bind(id.as_str()).execute(tx).await?;
    }
    Ok(())
}

/// For callers that change several sandboxes: a fixed order avoids deadlocks between them.
pub async fn sandboxes(tx: &mut AnyConnection, ids: BTreeSet<&str>) -> Stored<()> {
    if has_many_writers(tx) && ids.len() > 1 {
        for ids in ids.into_iter().collect::<Vec<_>>().chunks(ROWS_AT_ONCE) {
            let sql = format!("SELECT id FROM sandboxes WHERE id IN ({}) ORDER BY id FOR NO KEY UPDATE", placeholders(1, ids.len()));
            ids.iter().fold(sqlx::query(AssertSqlSafe(sql)), |query, id| query.bind(*id)).execute(&mut *tx).await?;
        }
    }
    Ok(())
}

/// For callers that change all live sandboxes of a workspace, in the same order.
pub async fn sandboxes_of(tx: &mut AnyConnection, workspace: &str) -> Stored<()> {
    if has_many_writers(tx) {
        let sql = "SELECT id FROM sandboxes WHERE workspace_id = $1 AND ended_at IS NULL ORDER BY id FOR NO KEY UPDATE";
        sqlx::query(sql).bind(workspace).execute(tx).await?;
    }
    Ok(())
}

/// For work that one broker does for all: false when another is doing it.
pub async fn is_alone(tx: &mut AnyConnection, doing: &str) -> Stored<bool> {
    if !has_many_writers(tx) {
        return Ok(true);
    }
    let row = sqlx::query("SELECT CASE WHEN pg_try_advisory_xact_lock(hashtextextended($1, 0)) THEN 1 ELSE 0 END AS is_alone")
        .bind(doing)
        .fetch_one(tx)
        .await?;
    Ok(rows::count(&row, "is_alone")? == 1)
}

fn has_many_writers(tx: &AnyConnection) -> bool {
    tx.backend_name() != "SQLite"
}
