//! Revocations: what ends tokens before they expire.

use std::sync::Arc;

use cobox_protocol::{
    SandboxId, Timestamp,
    control::{IssuedBefore, Revocation},
};
use sqlx::{AnyConnection, Row};

use super::{asked, audit_records, lock, notify, rows, tokens};
use crate::{
    domain::{
        model::{AuditRecord, Sandbox},
        token_signer::MAX_REVOCATIONS,
    },
    store::{ChangeNotice, Ending, RetiredToken, RevocationList, Store, Stored},
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
    let about = (workspace, sandbox);
    insert_revocation(tx, about, Revoked { kind, value, issued_by: None }, ending.now, ending.now, ending.revoke_until).await.map(drop)
}

/// The subject of a revocation.
pub struct Revoked<'a> {
    pub kind: &'static str,
    pub value: &'a str,
    pub issued_by: Option<i64>,
}

/// A token that an earlier attempt retired keeps its first end. False at the revocation limit: a client that replaces
/// tokens endlessly must not end those of others.
pub async fn retire(tx: &mut AnyConnection, token: &RetiredToken) -> Stored<bool> {
    lock::workspace(tx, &token.workspace).await?;
    let known = sqlx::query("SELECT sequence FROM revocations WHERE workspace_id = $1 AND sandbox_id = $2 AND kind = 'jti' AND value = $3")
        .bind(&token.workspace)
        .bind(token.sandbox.as_str())
        .bind(&token.jti)
        .fetch_optional(&mut *tx)
        .await?;
    if known.is_some() {
        return Ok(true);
    }
    if is_full(tx, &token.workspace, Some(&token.sandbox), token.audit.at).await? {
        return Ok(false);
    }
    let about = (token.workspace.as_str(), Some(&token.sandbox));
    let revoked = Revoked { kind: "jti", value: &token.jti, issued_by: None };
    insert_revocation(tx, about, revoked, token.audit.at, token.from, token.until).await?;
    audit_records::add(tx, &token.audit).await?;
    Ok(true)
}

/// Whether a sandbox, or a workspace as a whole, has reached its limit of revocations.
async fn is_full(tx: &mut AnyConnection, workspace: &str, sandbox: Option<&SandboxId>, now: Timestamp) -> Stored<bool> {
    // Counts no further than the limit.
    let row = sqlx::query(match sandbox {
        Some(_) => {
            "SELECT count(*) AS n FROM
             (SELECT sequence FROM revocations WHERE workspace_id = $1 AND until > $2 AND sandbox_id = $4 LIMIT $3) AS counted"
        }
        None => {
            "SELECT count(*) AS n FROM
             (SELECT sequence FROM revocations WHERE workspace_id = $1 AND until > $2 AND sandbox_id IS NULL AND $4 IS NULL LIMIT $3) AS counted"
        }
    })
    .bind(workspace)
    .bind(now.unix())
    .bind(i64::from(MAX_REVOCATIONS))
    .bind(sandbox.map(SandboxId::as_str))
    .fetch_one(tx)
    .await?;
    Ok(rows::count(&row, "n")? >= u64::from(MAX_REVOCATIONS))
}

/// Moves the sandbox, or each in the workspace, to its next key, which ends every token of it, so that the revocations
/// can be dropped.
async fn start_over(tx: &mut AnyConnection, workspace: &str, sandbox: Option<&SandboxId>, now: Timestamp) -> Stored<()> {
    if sandbox.is_none() {
        lock::sandboxes_of(tx, workspace).await?;
    }
    let all_or_one = [
        "UPDATE sandboxes SET generation = generation + 1, old_keys_from = NULL, old_keys_until = NULL
         WHERE workspace_id = $1 AND ended_at IS NULL AND ($2 IS NULL OR id = $2)",
        "DELETE FROM revocations WHERE workspace_id = $1 AND ($2 IS NULL OR sandbox_id = $2)",
    ];
    for sql in all_or_one {
        sqlx::query(sql).bind(workspace).bind(sandbox.map(SandboxId::as_str)).execute(&mut *tx).await?;
    }
    let (action, detail) = match sandbox {
        Some(_) => ("sandbox.key_rotated", "immediate: too many of its tokens were revoked one by one"),
        None => ("workspace.keys_rotated", "immediate: too much was revoked in the workspace; all of its tokens ended"),
    };
    audit_records::add(tx, &AuditRecord { sandbox: sandbox.cloned(), ..AuditRecord::new(now, workspace, action).detail(detail) }).await
}

/// The caller holds the workspace's lock. Returns the sequence number.
pub async fn insert_revocation(
    tx: &mut AnyConnection,
    (workspace, sandbox): (&str, Option<&SandboxId>),
    revoked: Revoked<'_>,
    created_at: Timestamp,
    starts_at: Timestamp,
    until: Timestamp,
) -> Stored<u64> {
    if sandbox.is_none() {
        // A repeated revocation that lasts longer replaces the existing one.
        sqlx::query(
            "DELETE FROM revocations WHERE workspace_id = $1 AND sandbox_id IS NULL AND kind = $2 AND value = $3
             AND issued_by IS NOT DISTINCT FROM $4 AND starts_at <= $5 AND until <= $6",
        )
        .bind(workspace)
        .bind(revoked.kind)
        .bind(revoked.value)
        .bind(revoked.issued_by)
        .bind(starts_at.unix())
        .bind(until.unix())
        .execute(&mut *tx)
        .await?;
    }
    if is_full(tx, workspace, sandbox, created_at).await? {
        start_over(tx, workspace, sandbox, created_at).await?;
    }
    let row = sqlx::query(
        "INSERT INTO revocations (workspace_id, sandbox_id, kind, value, created_at, starts_at, until, issued_by)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8) RETURNING sequence",
    )
    .bind(workspace)
    .bind(sandbox.map(SandboxId::as_str))
    .bind(revoked.kind)
    .bind(revoked.value)
    .bind(created_at.unix())
    .bind(starts_at.unix())
    .bind(until.unix())
    .bind(revoked.issued_by)
    .fetch_one(&mut *tx)
    .await?;
    notify::send(tx, &sandbox.map_or_else(|| ChangeNotice::Workspace(workspace.to_owned()), |id| ChangeNotice::Sandbox(id.clone())))
        .await?;
    rows::count(&row, "sequence")
}

pub async fn revocations(db: &mut AnyConnection, sandbox: &Sandbox, now: Timestamp) -> Stored<RevocationList> {
    let found = sqlx::query(
        // Two selects: one with OR would read all of the workspace's revocations.
        "SELECT sequence, kind, value, starts_at, issued_by FROM revocations
         WHERE workspace_id = $1 AND sandbox_id IS NULL AND starts_at <= $3 AND until > $3
         UNION ALL
         SELECT sequence, kind, value, starts_at, issued_by FROM revocations
         WHERE workspace_id = $1 AND sandbox_id = $2 AND starts_at <= $3 AND until > $3
         ORDER BY sequence",
    )
    .bind(&sandbox.workspace)
    .bind(sandbox.id.as_str())
    .bind(now.unix())
    .fetch_all(db)
    .await?;
    let mut view = RevocationList::default();
    for row in &found {
        view.sequence = view.sequence.max(rows::count(row, "sequence")?);
        view.last_start = view.last_start.max(row.try_get("starts_at")?);
        let value: String = row.try_get("value")?;
        let issued_by: Option<i64> = row.try_get("issued_by")?;
        let kind: &str = row.try_get("kind")?;
        if let Some(issued_by) = issued_by {
            let of = tokens::issued_to(kind).ok_or_else(|| rows::corrupt("kind", kind))?;
            view.list.push(Revocation::IssuedBefore(IssuedBefore { of, value, issued_by }));
            continue;
        }
        view.list.push(match kind {
            "jti" => Revocation::Jti(value),
            "grant" => Revocation::Grant(value),
            "session" => Revocation::Session(value),
            "principal" => Revocation::Principal(value),
            other => return Err(rows::corrupt("kind", other)),
        });
    }
    Ok(view)
}

impl Store {
    /// A sandbox that would exceed the revocation limit gets its next key instead, which ends all its tokens.
    pub async fn revocations(&self, sandbox: &Sandbox, now: Timestamp) -> Stored<Arc<RevocationList>> {
        let ask = async { asked!(self, db => revocations(db, sandbox, now)).map(Arc::new) };
        // Keyed by the second, because revocations start and end by themselves.
        self.known(&self.known_revocations, sandbox.id.clone(), now.unix(), ask).await
    }

    /// False when the sandbox has too many revocations for that.
    pub async fn retire_token(&self, token: &RetiredToken) -> Stored<bool> {
        let mut tx = self.base.begin().await?;
        let is_retired = retire(&mut tx, token).await?;
        self.base.commit(tx).await?;
        Ok(is_retired)
    }
}
