//! Principals: lists them, and disables one in a single transaction.

use cobox_protocol::{Timestamp, key::PrincipalKind};
use sqlx::{AnyConnection, Row};

use super::{
    asked, audit_records,
    keys::{self, KeyValidity},
    lock, notify, revocations, rows,
};
use crate::{
    domain::{
        access::keys::MAX_PRINCIPALS_PER_WORKSPACE,
        model::{AuditRecord, PrincipalRecord},
    },
    store::{ChangeNotice, DisabledPrincipal, Ending, PageParams, Store, Stored},
};

/// Counts no further than the limit.
pub async fn count(tx: &mut AnyConnection, workspace: &str) -> Stored<u64> {
    let row = sqlx::query("SELECT count(*) AS n FROM (SELECT name FROM principals WHERE workspace_id = $1 LIMIT $2) AS counted")
        .bind(workspace)
        .bind(i64::try_from(MAX_PRINCIPALS_PER_WORKSPACE + 1).unwrap_or(i64::MAX))
        .fetch_one(tx)
        .await?;
    rows::count(&row, "n")
}

/// By name; the page's cursor is the last name seen.
pub async fn list(db: &mut AnyConnection, workspace: &str, now: i64, page: &PageParams) -> Stored<Vec<PrincipalRecord>> {
    sqlx::query(
        "SELECT p.*, (SELECT count(*) FROM api_keys k WHERE k.workspace_id = p.workspace_id AND k.principal = p.name
                      AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > $3)) AS valid_keys,
                (SELECT max(k.last_used_at) FROM api_keys k WHERE k.workspace_id = p.workspace_id AND k.principal = p.name) AS last_used_at
         FROM principals p WHERE p.workspace_id = $1 AND ($2 IS NULL OR p.name > $2) ORDER BY p.name LIMIT $4",
    )
    .bind(workspace)
    .bind(page.before.as_deref())
    .bind(now)
    .bind(i64::from(page.limit))
    .fetch_all(db)
    .await?
    .iter()
    .map(rows::principal)
    .collect()
}

pub async fn has_valid_key(db: &mut AnyConnection, workspace: &str, name: &str, now: i64) -> Stored<bool> {
    let found = sqlx::query(
        "SELECT 1 AS one FROM api_keys k JOIN principals p ON p.workspace_id = k.workspace_id AND p.name = k.principal
         WHERE k.workspace_id = $1 AND k.principal = $2 AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > $3)
           AND p.disabled_at IS NULL LIMIT 1",
    );
    Ok(found.bind(workspace).bind(name).bind(now).fetch_optional(db).await?.is_some())
}

/// Ends its keys, its identities and all its tokens, in one transaction.
pub async fn disable(tx: &mut AnyConnection, workspace: &str, name: &str, ending: &Ending) -> Stored<DisabledPrincipal> {
    lock::operators(&mut *tx).await?;
    lock::workspace(&mut *tx, workspace).await?;
    let found = sqlx::query("SELECT kind, disabled_at FROM principals WHERE workspace_id = $1 AND name = $2")
        .bind(workspace)
        .bind(name)
        .fetch_optional(&mut *tx)
        .await?;
    let Some(row) = found else { return Ok(DisabledPrincipal::NotThere) };
    if row.try_get::<&str, _>("kind")? == PrincipalKind::Operator.as_str() {
        let left = if keys::has_lasting(&mut *tx, workspace, name).await? { KeyValidity::Lasting } else { KeyValidity::Valid(ending.now) };
        if !keys::has_other_operator(&mut *tx, left, None, Some((workspace, name))).await? {
            return Ok(DisabledPrincipal::LastOperator);
        }
    }
    if row.try_get::<Option<i64>, _>("disabled_at")?.is_some() {
        return Ok(DisabledPrincipal::Disabled);
    }
    sqlx::query("UPDATE principals SET disabled_at = $3, disabled_by = $4 WHERE workspace_id = $1 AND name = $2")
        .bind(workspace)
        .bind(name)
        .bind(ending.now.unix())
        .bind(ending.audit.principal.as_deref())
        .execute(&mut *tx)
        .await?;
    let open = sqlx::query("SELECT id FROM api_keys WHERE workspace_id = $1 AND principal = $2 AND revoked_at IS NULL ORDER BY id")
        .bind(workspace)
        .bind(name)
        .fetch_all(&mut *tx)
        .await?;
    for row in open {
        // Each separately: these revocations stay when the principal is enabled again.
        revocations::revoke(&mut *tx, workspace, None, "grant", row.try_get("id")?, ending).await?;
    }
    sqlx::query("UPDATE api_keys SET revoked_at = $3 WHERE workspace_id = $1 AND principal = $2 AND revoked_at IS NULL")
        .bind(workspace)
        .bind(name)
        .bind(ending.now.unix())
        .execute(&mut *tx)
        .await?;
    revocations::revoke(&mut *tx, workspace, None, "principal", name, ending).await?;
    audit_records::add(tx, &ending.audit).await?;
    Ok(DisabledPrincipal::Disabled)
}

/// Its old keys stay ended; new ones can be created, and its identities may sign in again. False when there is no such
/// principal.
pub async fn enable(tx: &mut AnyConnection, workspace: &str, name: &str, audit: &AuditRecord) -> Stored<bool> {
    lock::workspace(&mut *tx, workspace).await?;
    let found = sqlx::query("SELECT disabled_at FROM principals WHERE workspace_id = $1 AND name = $2")
        .bind(workspace)
        .bind(name)
        .fetch_optional(&mut *tx)
        .await?;
    let Some(row) = found else { return Ok(false) };
    if row.try_get::<Option<i64>, _>("disabled_at")?.is_some() {
        sqlx::query("UPDATE principals SET disabled_at = NULL, disabled_by = NULL WHERE workspace_id = $1 AND name = $2")
            .bind(workspace)
            .bind(name)
            .execute(&mut *tx)
            .await?;
        // All earlier tokens ended with the keys they were issued under.
        sqlx::query("DELETE FROM revocations WHERE workspace_id = $1 AND sandbox_id IS NULL AND kind = 'principal' AND value = $2")
            .bind(workspace)
            .bind(name)
            .execute(&mut *tx)
            .await?;
        notify::send(&mut *tx, &ChangeNotice::Workspace(workspace.to_owned())).await?;
    }
    sqlx::query(
        "UPDATE api_keys SET is_past = 1 WHERE workspace_id = $1 AND principal = $2 AND issuer IS NOT NULL AND revoked_at IS NOT NULL",
    )
    .bind(workspace)
    .bind(name)
    .execute(&mut *tx)
    .await?;
    audit_records::add(tx, audit).await?;
    Ok(true)
}

impl Store {
    /// By name; the page's cursor is the last name seen.
    pub async fn principals(&self, workspace: &str, now: Timestamp, page: &PageParams) -> Stored<Vec<PrincipalRecord>> {
        asked!(self, db => list(db, workspace, now.unix(), page))
    }

    /// Whether the principal can still authenticate with a valid key or identity.
    pub async fn has_valid_key(&self, workspace: &str, name: &str, now: Timestamp) -> Stored<bool> {
        asked!(self, db => has_valid_key(db, workspace, name, now.unix()))
    }

    /// Ends its keys, its identities and all its tokens.
    pub async fn disable_principal(&self, workspace: &str, name: &str, ending: &Ending) -> Stored<DisabledPrincipal> {
        let mut tx = self.base.begin().await?;
        let disabled = disable(&mut tx, workspace, name, ending).await?;
        self.base.commit(tx).await?;
        Ok(disabled)
    }

    /// Ended credentials stay ended; new keys can be created and identities can sign in again. False when there is no
    /// such principal.
    pub async fn enable_principal(&self, workspace: &str, name: &str, audit: &AuditRecord) -> Stored<bool> {
        let mut tx = self.base.begin().await?;
        let is_there = enable(&mut tx, workspace, name, audit).await?;
        self.base.commit(tx).await?;
        Ok(is_there)
    }
}
