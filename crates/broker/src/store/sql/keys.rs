//! API keys and the principals they stand for.

use cobox_protocol::{KeyId, key::PrincipalKind};
use sqlx::{AnyConnection, Row};

use super::{lock, notes, rows};
use crate::{
    domain::{
        audit::AuditRecord,
        model::{ApiKey, Principal},
    },
    store::{AddedKey, Ending, PageWish, Stored},
};

pub async fn add(tx: &mut AnyConnection, key: &ApiKey, audit: &AuditRecord) -> Stored<AddedKey> {
    let who = &key.principal;
    sqlx::query("INSERT INTO workspaces (id, created_at) VALUES ($1, $2) ON CONFLICT DO NOTHING")
        .bind(&who.workspace)
        .bind(key.created_at.unix())
        .execute(&mut *tx)
        .await?;
    sqlx::query("INSERT INTO principals (workspace_id, name, kind, created_at) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING")
        .bind(&who.workspace)
        .bind(&who.name)
        .bind(who.kind.word())
        .bind(key.created_at.unix())
        .execute(&mut *tx)
        .await?;
    let row = sqlx::query("SELECT kind FROM principals WHERE workspace_id = $1 AND name = $2")
        .bind(&who.workspace)
        .bind(&who.name)
        .fetch_one(&mut *tx)
        .await?;
    let word: String = row.try_get("kind")?;
    let kind = PrincipalKind::from_word(&word).ok_or_else(|| rows::corrupt("kind", &word))?;
    if kind != who.kind {
        return Ok(AddedKey::KindDiffers(kind));
    }
    sqlx::query("INSERT INTO api_keys (id, workspace_id, principal, hash, created_at, expires_at) VALUES ($1, $2, $3, $4, $5, $6)")
        .bind(key.id.as_str())
        .bind(&who.workspace)
        .bind(&who.name)
        .bind(&key.hash[..])
        .bind(key.created_at.unix())
        .bind(key.expires_at.map(|t| t.unix()))
        .execute(&mut *tx)
        .await?;
    notes::audit(tx, audit).await?;
    Ok(AddedKey::Added)
}

pub async fn principal(db: &mut AnyConnection, workspace: &str, name: &str) -> Stored<Option<Principal>> {
    let row = sqlx::query("SELECT kind FROM principals WHERE workspace_id = $1 AND name = $2")
        .bind(workspace)
        .bind(name)
        .fetch_optional(db)
        .await?;
    let Some(row) = row else { return Ok(None) };
    let word: String = row.try_get("kind")?;
    let kind = PrincipalKind::from_word(&word).ok_or_else(|| rows::corrupt("kind", &word))?;
    Ok(Some(Principal { workspace: workspace.to_owned(), name: name.to_owned(), kind }))
}

pub async fn get(db: &mut AnyConnection, id: &KeyId) -> Stored<Option<ApiKey>> {
    sqlx::query(
        "SELECT k.*, p.kind FROM api_keys k JOIN principals p ON p.workspace_id = k.workspace_id AND p.name = k.principal WHERE k.id = $1",
    )
    .bind(id.as_str())
    .fetch_optional(db)
    .await?
    .map(|row| rows::key(&row))
    .transpose()
}

pub async fn list(db: &mut AnyConnection, page: &PageWish) -> Stored<Vec<ApiKey>> {
    sqlx::query(
        "SELECT k.*, p.kind FROM api_keys k JOIN principals p ON p.workspace_id = k.workspace_id AND p.name = k.principal
         WHERE ($1 IS NULL OR k.id < $1) ORDER BY k.id DESC LIMIT $2",
    )
    .bind(page.before.as_deref())
    .bind(i64::from(page.limit))
    .fetch_all(db)
    .await?
    .iter()
    .map(rows::key)
    .collect()
}

pub async fn revoke(tx: &mut AnyConnection, id: &KeyId, ending: &Ending) -> Stored<Option<ApiKey>> {
    let Some(key) = get(&mut *tx, id).await? else { return Ok(None) };
    lock::workspace(&mut *tx, &key.principal.workspace).await?;
    let changed = sqlx::query("UPDATE api_keys SET revoked_at = $2 WHERE id = $1 AND revoked_at IS NULL")
        .bind(id.as_str())
        .bind(ending.now.unix())
        .execute(&mut *tx)
        .await?;
    if changed.rows_affected() == 0 {
        return Ok(None);
    }
    notes::revoke(&mut *tx, &key.principal.workspace, None, "grant", id.as_str(), ending).await?;
    notes::audit(tx, &ending.audit).await?;
    Ok(Some(ApiKey { revoked_at: Some(ending.now), ..key }))
}
