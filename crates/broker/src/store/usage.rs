//! Last uses of sandboxes, keys and tokens, and the removal of old rows.

use std::collections::{BTreeMap, BTreeSet};

use cobox_protocol::{SandboxId, Timestamp, session::State};
use sqlx::{AnyConnection, AssertSqlSafe};

use super::{
    audit_chain, lock,
    multi_row::{ROWS_AT_ONCE, placeholders},
    nodes, resources, rows, sandboxes, tokens,
};
use crate::{
    domain::model::Sandbox,
    store::{Note, RetentionLimits, Store, Stored},
};

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

pub async fn prune(tx: &mut AnyConnection, horizon: &RetentionLimits, sealing: Option<&[u8; 32]>) -> Stored<()> {
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
    audit_chain::prune(tx, horizon.audit_before, sealing).await?;
    nodes::forget(tx, horizon.ended_before).await?;
    resources::forget_lost(tx).await
}

impl Store {
    /// Concurrent calls share a commit.
    pub async fn note(&self, note: &Note) -> Stored<()> {
        if note.sandboxes.is_empty() && note.keys.is_empty() && note.tokens.is_empty() && note.audit.is_empty() {
            return Ok(());
        }
        self.batch_writer.write(note.clone()).await
    }

    /// Does nothing while another broker prunes.
    pub async fn prune(&self, horizon: &RetentionLimits) -> Stored<()> {
        let mut tx = self.base.begin().await?;
        prune(&mut tx, horizon, self.base.chain.sealing()).await?;
        self.base.commit(tx).await
    }
}
