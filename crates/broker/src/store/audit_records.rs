//! Audit records, as they are stored and listed; `audit_chain` links them.

use cobox_protocol::SandboxId;
use sqlx::{AnyConnection, AssertSqlSafe};

use super::{asked, audit_chain, multi_row::values, rows};
use crate::{
    audit_hash::Hash,
    domain::model::AuditRecord,
    store::{PageParams, Store, Stored},
};

/// The record becomes a link of the chain when the transaction is committed.
pub async fn add(tx: &mut AnyConnection, record: &AuditRecord) -> Stored<()> {
    insert(tx, std::slice::from_ref(record), audit_chain::pending_writer(), &[]).await
}

/// `linked` has the number and hash of each record, or is empty.
pub async fn insert(tx: &mut AnyConnection, records: &[AuditRecord], writer: &str, linked: &[(u64, Hash)]) -> Stored<()> {
    const COLUMNS: usize = 14;
    let sql = format!(
        "INSERT INTO audit (at, workspace_id, action, request_id, principal, actor, thread, session_id, sandbox_id, jti, detail,
                            writer, number, hash) VALUES {}",
        values(tx, records.len(), COLUMNS)
    );
    let mut query = sqlx::query(AssertSqlSafe(sql));
    for (n, r) in records.iter().enumerate() {
        let link = linked.get(n);
        query = query
            .bind(r.at.unix())
            .bind(&r.workspace)
            .bind(r.action.as_ref())
            .bind(r.request_id.as_ref().map(|i| i.as_str()))
            .bind(r.principal.as_deref())
            .bind(r.actor.as_deref())
            .bind(r.thread.as_deref())
            .bind(r.session.as_ref().map(|i| i.as_str()))
            .bind(r.sandbox.as_ref().map(|i| i.as_str()))
            .bind(r.jti.as_deref())
            .bind(r.detail.as_deref())
            .bind(writer)
            .bind(link.map(|(number, _)| i64::try_from(*number).unwrap_or(i64::MAX)))
            .bind(link.map(|(_, hash)| &hash[..]));
    }
    query.execute(tx).await?;
    Ok(())
}

pub async fn newest(
    db: &mut AnyConnection,
    workspace: &str,
    sandbox: Option<&SandboxId>,
    jti: Option<&str>,
    page: &PageParams,
) -> Stored<Vec<(u64, AuditRecord)>> {
    let before = page.before.as_ref().and_then(|b| b.parse::<i64>().ok()).unwrap_or(i64::MAX);
    // A separate text for tokens, otherwise their index would not be used.
    sqlx::query(match jti {
        None => {
            "SELECT * FROM audit WHERE workspace_id = $1 AND sequence < $2 AND ($3 IS NULL OR sandbox_id = $3)
             ORDER BY sequence DESC LIMIT $4"
        }
        Some(_) => "SELECT * FROM audit WHERE workspace_id = $1 AND sequence < $2 AND jti = $3 ORDER BY sequence DESC LIMIT $4",
    })
    .bind(workspace)
    .bind(before)
    .bind(jti.or(sandbox.map(|s| s.as_str())))
    .bind(i64::from(page.limit))
    .fetch_all(db)
    .await?
    .iter()
    .map(|row| Ok((rows::count(row, "sequence")?, rows::audit(row)?)))
    .collect()
}

impl Store {
    /// Audit records of a workspace with their sequence numbers, newest first; the page's cursor is such a number.
    pub async fn audit(&self, workspace: &str, sandbox: Option<&SandboxId>, page: &PageParams) -> Stored<Vec<(u64, AuditRecord)>> {
        asked!(self, db => newest(db, workspace, sandbox, None, page))
    }

    /// As [`Store::audit`], for one token.
    pub async fn audit_of_token(&self, workspace: &str, jti: &str, page: &PageParams) -> Stored<Vec<(u64, AuditRecord)>> {
        asked!(self, db => newest(db, workspace, None, Some(jti), page))
    }
}
