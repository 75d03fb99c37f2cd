//! Revocations, audit records, last uses, and forgetting what is old.

use std::collections::BTreeSet;

use cobox_protocol::{SandboxId, Timestamp, control::Revocation};
use sqlx::{AnyConnection, Row};

use super::rows;
use crate::{
    domain::{audit::AuditRecord, model::Sandbox},
    store::{Ending, Horizon, Note, PageWish, RevocationList, Stored},
};

/// The caller holds the workspace's lock.
pub async fn revoke(
    tx: &mut AnyConnection,
    workspace: &str,
    sandbox: Option<&SandboxId>,
    kind: &'static str,
    value: &str,
    ending: &Ending,
) -> Stored<()> {
    sqlx::query("INSERT INTO revocations (workspace_id, sandbox_id, kind, value, created_at, until) VALUES ($1, $2, $3, $4, $5, $6)")
        .bind(workspace)
        .bind(sandbox.map(SandboxId::as_str))
        .bind(kind)
        .bind(value)
        .bind(ending.now.unix())
        .bind(ending.revoke_until.unix())
        .execute(tx)
        .await?;
    Ok(())
}

pub async fn revocations(db: &mut AnyConnection, sandbox: &Sandbox, now: Timestamp) -> Stored<RevocationList> {
    let found = sqlx::query(
        "SELECT sequence, kind, value FROM revocations
         WHERE workspace_id = $1 AND (sandbox_id IS NULL OR sandbox_id = $2) AND until > $3 ORDER BY sequence",
    )
    .bind(&sandbox.workspace)
    .bind(sandbox.id.as_str())
    .bind(now.unix())
    .fetch_all(db)
    .await?;
    let mut view = RevocationList::default();
    for row in &found {
        view.sequence = view.sequence.max(rows::count(row, "sequence")?);
        let value: String = row.try_get("value")?;
        view.list.push(match row.try_get::<&str, _>("kind")? {
            "jti" => Revocation::Jti(value),
            "grant" => Revocation::Grant(value),
            "session" => Revocation::Session(value),
            "principal" => Revocation::Principal(value),
            other => return Err(rows::corrupt("kind", other)),
        });
    }
    Ok(view)
}

pub async fn note(tx: &mut AnyConnection, note: &Note) -> Stored<()> {
    // In one order, or two of these could wait for each other.
    for (id, at) in note.sandboxes.iter().collect::<BTreeSet<_>>() {
        sqlx::query(
            "UPDATE sandboxes SET last_active_at = CASE WHEN last_active_at < $2 THEN $2 ELSE last_active_at END,
                    state = CASE WHEN state = 'idle' AND intent IS NULL THEN 'active' ELSE state END
             WHERE id = $1 AND ended_at IS NULL",
        )
        .bind(id.as_str())
        .bind(at.unix())
        .execute(&mut *tx)
        .await?;
    }
    for (id, at) in note.keys.iter().collect::<BTreeSet<_>>() {
        sqlx::query("UPDATE api_keys SET last_used_at = $2 WHERE id = $1").bind(id.as_str()).bind(at.unix()).execute(&mut *tx).await?;
    }
    for record in &note.audit {
        audit(tx, record).await?;
    }
    Ok(())
}

pub async fn audit(tx: &mut AnyConnection, r: &AuditRecord) -> Stored<()> {
    sqlx::query(
        "INSERT INTO audit (at, workspace_id, action, request_id, principal, actor, thread, session_id, sandbox_id, jti, detail)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
    )
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
    .execute(tx)
    .await?;
    Ok(())
}

pub async fn newest(
    db: &mut AnyConnection,
    workspace: &str,
    sandbox: Option<&SandboxId>,
    page: &PageWish,
) -> Stored<Vec<(u64, AuditRecord)>> {
    let before = page.before.as_ref().and_then(|b| b.parse::<i64>().ok()).unwrap_or(i64::MAX);
    sqlx::query(
        "SELECT * FROM audit WHERE workspace_id = $1 AND sequence < $2 AND ($3 IS NULL OR sandbox_id = $3)
         ORDER BY sequence DESC LIMIT $4",
    )
    .bind(workspace)
    .bind(before)
    .bind(sandbox.map(|s| s.as_str()))
    .bind(i64::from(page.limit))
    .fetch_all(db)
    .await?
    .iter()
    .map(|row| Ok((rows::count(row, "sequence")?, rows::audit(row)?)))
    .collect()
}

pub async fn prune(tx: &mut AnyConnection, horizon: &Horizon) -> Stored<()> {
    for (sql, before) in [
        ("DELETE FROM idempotency WHERE created_at < $1", horizon.idempotency_before),
        ("DELETE FROM revocations WHERE until < $1", horizon.now),
        ("DELETE FROM audit WHERE at < $1", horizon.audit_before),
        ("DELETE FROM idempotency WHERE session_id IN (SELECT id FROM sessions WHERE ended_at < $1)", horizon.ended_before),
        ("DELETE FROM sessions WHERE ended_at < $1", horizon.ended_before),
        (
            "DELETE FROM sandboxes WHERE ended_at < $1 AND intent IS NULL
              AND NOT EXISTS (SELECT 1 FROM sessions WHERE sandbox_id = sandboxes.id)",
            horizon.ended_before,
        ),
    ] {
        sqlx::query(sql).bind(before.unix()).execute(&mut *tx).await?;
    }
    Ok(())
}
