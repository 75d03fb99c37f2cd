//! Revocations, audit records, last uses, and the removal of old rows.

use std::collections::{BTreeMap, BTreeSet};

use cobox_protocol::{
    SandboxId, Timestamp,
    control::{IssuedBefore, Revocation},
    session::State,
};
use sqlx::{AnyConnection, AssertSqlSafe, Row};

use super::{chain, hint, kinds, lock, nodes, rows, sandboxes, tokens};
use crate::{
    chain::Hash,
    domain::{
        model::{AuditRecord, Sandbox},
        token_signer::MAX_REVOCATIONS,
    },
    store::{Ending, Hint, Horizon, Note, PageWish, RetiredToken, RevocationList, Stored},
};

/// Rows per statement: a statement costs more than a row, and each length is a separate prepared statement of the
/// connection.
pub const ROWS_AT_ONCE: usize = 32;

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
    audit(tx, &token.audit).await?;
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
    audit(tx, &AuditRecord { sandbox: sandbox.cloned(), ..AuditRecord::new(now, workspace, action).detail(detail) }).await
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
    hint::send(tx, &sandbox.map_or_else(|| Hint::Workspace(workspace.to_owned()), |id| Hint::Sandbox(id.clone()))).await?;
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

/// Everything but the audit records.
pub async fn note(tx: &mut AnyConnection, note: &Note) -> Stored<()> {
    // Uses within the same second share a statement.
    let mut by_time: BTreeMap<Timestamp, BTreeSet<&str>> = BTreeMap::new();
    for (id, at) in &note.sandboxes {
        by_time.entry(*at).or_default().insert(id.as_str());
    }
    let mut idle = idle_among(tx, &note.sandboxes).await?;
    let workspaces: BTreeSet<String> = idle.values().map(|s| s.workspace.clone()).collect();
    for workspace in &workspaces {
        lock::workspace(tx, workspace).await?;
    }
    lock::sandboxes(tx, note.sandboxes.iter().map(|(id, _)| id.as_str()).collect()).await?;
    if !idle.is_empty() {
        // Read again under the locks.
        idle = idle_among(tx, &note.sandboxes).await?;
        idle.retain(|_, s| workspaces.contains(&s.workspace));
    }
    for (at, ids) in by_time {
        for ids in ids.into_iter().collect::<Vec<_>>().chunks(ROWS_AT_ONCE) {
            let sql = format!(
                "UPDATE sandboxes SET last_active_at = $1 WHERE id IN ({}) AND ended_at IS NULL AND last_active_at < $1",
                placeholders(2, ids.len())
            );
            ids.iter().fold(sqlx::query(AssertSqlSafe(sql)).bind(at.unix()), |query, id| query.bind(*id)).execute(&mut *tx).await?;
        }
    }
    for (id, at) in &note.sandboxes {
        let Some(sandbox) = idle.get(id.as_str()) else { continue };
        let used = Sandbox { state: State::Active, last_active_at: sandbox.last_active_at.max(*at), ..sandbox.clone() };
        // Has no effect if it was changed concurrently.
        sandboxes::replace(tx, sandbox, &used).await?;
    }
    // In a fixed order, to avoid deadlocks between two of these.
    for (id, at) in note.keys.iter().collect::<BTreeSet<_>>() {
        sqlx::query("UPDATE api_keys SET last_used_at = $2 WHERE id = $1").bind(id.as_str()).bind(at.unix()).execute(&mut *tx).await?;
    }
    for token in &note.tokens {
        tokens::insert(tx, token).await?;
    }
    Ok(())
}

/// The used sandboxes that were idle. One that becomes idle at this moment is found by the reaper.
async fn idle_among(db: &mut AnyConnection, used: &[(SandboxId, Timestamp)]) -> Stored<BTreeMap<String, Sandbox>> {
    let mut idle = BTreeMap::new();
    for used in used.chunks(ROWS_AT_ONCE) {
        let ids = placeholders(1, used.len());
        let sql = format!("SELECT * FROM sandboxes WHERE id IN ({ids}) AND state = 'idle' AND intent IS NULL AND ended_at IS NULL");
        let query = used.iter().fold(sqlx::query(AssertSqlSafe(sql)), |query, (id, _)| query.bind(id.as_str()));
        for row in &query.fetch_all(&mut *db).await? {
            let sandbox = rows::sandbox(row)?;
            idle.insert(sandbox.id.to_string(), sandbox);
        }
    }
    Ok(idle)
}

/// `$first, …` for a list of `count` values.
pub fn placeholders(first: usize, count: usize) -> String {
    (first..first + count).map(|n| format!("${n}")).collect::<Vec<_>>().join(", ")
}

/// `(…), (…)` for inserting `count` rows. SQLite looks up each numbered placeholder among all on every execution, so
/// there they are positional.
pub fn values(db: &AnyConnection, count: usize, columns: usize) -> String {
    let row = |n: usize| match db.backend_name() {
        "SQLite" => vec!["?"; columns].join(", "),
        _ => placeholders(n * columns + 1, columns),
    };
    (0..count).map(|n| format!("({})", row(n))).collect::<Vec<_>>().join(", ")
}

/// The record becomes a link of the chain when the transaction is committed.
pub async fn audit(tx: &mut AnyConnection, record: &AuditRecord) -> Stored<()> {
    insert_audit(tx, std::slice::from_ref(record), chain::pending_writer(), &[]).await
}

/// `linked` has the number and hash of each record, or is empty.
pub async fn insert_audit(tx: &mut AnyConnection, records: &[AuditRecord], writer: &str, linked: &[(u64, Hash)]) -> Stored<()> {
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
    page: &PageWish,
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

pub async fn prune(tx: &mut AnyConnection, horizon: &Horizon, sealing: Option<&[u8; 32]>) -> Stored<()> {
    if !lock::is_alone(tx, "prune").await? {
        return Ok(());
    }
    for (sql, before) in [
        ("DELETE FROM idempotency WHERE created_at < $1", horizon.idempotency_before),
        ("DELETE FROM revocations WHERE until < $1", horizon.now),
        ("DELETE FROM opaque_tokens WHERE keep_until < $1", horizon.now),
        ("DELETE FROM shares WHERE expires_at < $1", horizon.now),
        // A revoked identity stays: it is what keeps the user from signing in again.
        ("DELETE FROM api_keys WHERE (revoked_at < $1 OR expires_at < $1) AND (issuer IS NULL OR is_past = 1)", horizon.ended_before),
        ("DELETE FROM idempotency WHERE session_id IN (SELECT id FROM sessions WHERE ended_at < $1)", horizon.ended_before),
        (
            // The last session of each thread on a live sandbox is kept: it decides which principals may use the files
            // that the thread left in it.
            "DELETE FROM sessions WHERE ended_at < $1 AND (
                 scope_type <> 'thread'
                 OR EXISTS (SELECT 1 FROM sandboxes WHERE sandboxes.id = sessions.sandbox_id AND sandboxes.ended_at IS NOT NULL
                            AND sandboxes.restore_until IS NULL)
                 OR EXISTS (SELECT 1 FROM sessions AS later WHERE later.sandbox_id = sessions.sandbox_id
                            AND later.scope_type = 'thread' AND later.scope_id = sessions.scope_id AND later.id > sessions.id))",
            horizon.ended_before,
        ),
        (
            "DELETE FROM sandboxes WHERE ended_at < $1 AND intent IS NULL AND restore_until IS NULL
              AND NOT EXISTS (SELECT 1 FROM sessions WHERE sandbox_id = sandboxes.id)",
            horizon.ended_before,
        ),
    ] {
        sqlx::query(sql).bind(before.unix()).execute(&mut *tx).await?;
    }
    chain::prune(tx, horizon.audit_before, sealing).await?;
    nodes::forget(tx, horizon.ended_before).await?;
    kinds::forget_lost(tx).await
}
