//! API keys and the principals they belong to.

use cobox_protocol::{KeyId, SessionId, Timestamp, key::PrincipalKind};
use sqlx::{AnyConnection, Row};

use super::{
    asked, audit_records, lock, principals,
    revocations::{self, Revoked},
    rows, sessions,
};
use crate::{
    domain::{
        access::keys::{MAX_KEYS_PER_PRINCIPAL, MAX_PRINCIPALS_PER_WORKSPACE},
        model::{ApiKey, AuditRecord, Principal, SessionWithSandbox},
        token_signer::MAX_REFRESH_AGE,
    },
    store::{AddedKey, Ending, ExpiringKey, PageParams, RevokedKey, Store, Stored},
};

/// A key with the kind of its principal, as `rows::key` reads it.
macro_rules! keys {
    ($rest:literal) => {
        concat!("SELECT k.*, p.kind FROM api_keys k JOIN principals p ON p.workspace_id = k.workspace_id AND p.name = k.principal ", $rest)
    };
}

/// The caller must only commit if the key was added.
pub async fn add(tx: &mut AnyConnection, key: &ApiKey, audit: &AuditRecord) -> Stored<AddedKey> {
    let who = &key.principal;
    lock::workspace(tx, &who.workspace).await?;
    sqlx::query("INSERT INTO workspaces (id, created_at) VALUES ($1, $2) ON CONFLICT DO NOTHING")
        .bind(&who.workspace)
        .bind(key.created_at.unix())
        .execute(&mut *tx)
        .await?;
    let made = sqlx::query("INSERT INTO principals (workspace_id, name, kind, created_at) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING")
        .bind(&who.workspace)
        .bind(&who.name)
        .bind(who.kind.as_str())
        .bind(key.created_at.unix())
        .execute(&mut *tx)
        .await?;
    if made.rows_affected() > 0 && principals::count(tx, &who.workspace).await? > MAX_PRINCIPALS_PER_WORKSPACE {
        return Ok(AddedKey::TooManyPrincipals);
    }
    let row = sqlx::query("SELECT kind, disabled_at FROM principals WHERE workspace_id = $1 AND name = $2")
        .bind(&who.workspace)
        .bind(&who.name)
        .fetch_one(&mut *tx)
        .await?;
    let word: String = row.try_get("kind")?;
    let kind = word.parse::<PrincipalKind>().ok().ok_or_else(|| rows::corrupt("kind", &word))?;
    if kind != who.kind {
        return Ok(AddedKey::KindDiffers(kind));
    }
    if row.try_get::<Option<i64>, _>("disabled_at")?.is_some() {
        return Ok(AddedKey::Disabled);
    }
    if key.identity.is_some() {
        // Another request of the same sign-in may have been faster.
        if let Some(known) = of_identity(tx, who, &key.hash).await? {
            return Ok(AddedKey::Known(Box::new(known)));
        }
    } else if valid(tx, who, key.created_at).await? >= MAX_KEYS_PER_PRINCIPAL {
        return Ok(AddedKey::TooManyKeys);
    }
    sqlx::query(
        "INSERT INTO api_keys (id, workspace_id, principal, hash, created_at, expires_at, issuer, subject)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
    )
    .bind(key.id.as_str())
    .bind(&who.workspace)
    .bind(&who.name)
    .bind(&key.hash[..])
    .bind(key.created_at.unix())
    .bind(key.expires_at.map(|t| t.unix()))
    .bind(key.identity.as_ref().map(|i| i.issuer.as_str()))
    .bind(key.identity.as_ref().map(|i| i.subject.as_str()))
    .execute(&mut *tx)
    .await?;
    audit_records::add(tx, audit).await?;
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
    let kind = word.parse::<PrincipalKind>().ok().ok_or_else(|| rows::corrupt("kind", &word))?;
    Ok(Some(Principal { workspace: workspace.to_owned(), name: name.to_owned(), kind }))
}

/// Counts no further than the limit.
async fn valid(tx: &mut AnyConnection, who: &Principal, now: Timestamp) -> Stored<u64> {
    let row = sqlx::query(
        "SELECT count(*) AS n FROM (SELECT id FROM api_keys WHERE workspace_id = $1 AND principal = $2 AND issuer IS NULL
         AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > $3) LIMIT $4) AS valid",
    )
    .bind(&who.workspace)
    .bind(&who.name)
    .bind(now.unix())
    .bind(i64::try_from(MAX_KEYS_PER_PRINCIPAL).unwrap_or(i64::MAX))
    .fetch_one(tx)
    .await?;
    rows::count(&row, "n")
}

pub async fn get(db: &mut AnyConnection, id: &KeyId) -> Stored<Option<ApiKey>> {
    sqlx::query(keys!("WHERE k.id = $1")).bind(id.as_str()).fetch_optional(db).await?.map(|row| rows::key(&row)).transpose()
}

/// The last key of an identity, revoked or not.
pub async fn of_identity(db: &mut AnyConnection, who: &Principal, hash: &[u8; 32]) -> Stored<Option<ApiKey>> {
    sqlx::query(keys!("WHERE k.workspace_id = $1 AND k.principal = $2 AND k.hash = $3 AND k.issuer IS NOT NULL AND k.is_past = 0"))
        .bind(&who.workspace)
        .bind(&who.name)
        .bind(&hash[..])
        .fetch_optional(db)
        .await?
        .map(|row| rows::key(&row))
        .transpose()
}

pub async fn list(db: &mut AnyConnection, page: &PageParams) -> Stored<Vec<ApiKey>> {
    sqlx::query(keys!("WHERE ($1 IS NULL OR k.id < $1) ORDER BY k.id DESC LIMIT $2"))
        .bind(page.before.as_deref())
        .bind(i64::from(page.limit))
        .fetch_all(db)
        .await?
        .iter()
        .map(rows::key)
        .collect()
}

/// Only for a valid key. Tokens that were issued under it with a later expiry end with it.
pub async fn expire(tx: &mut AnyConnection, id: &KeyId, at: Timestamp, audit: &AuditRecord) -> Stored<ExpiringKey> {
    let Some(key) = get(&mut *tx, id).await? else { return Ok(ExpiringKey::NotThere) };
    let (workspace, now) = (&key.principal.workspace, audit.at);
    if key.principal.is_operator() {
        lock::operators(&mut *tx).await?;
    }
    lock::workspace(&mut *tx, workspace).await?;
    if key.principal.is_operator() && is_lasting(&key) && !has_other_operator(&mut *tx, KeyValidity::Lasting, Some(id), None).await? {
        return Ok(ExpiringKey::LastOperator);
    }
    let changed = sqlx::query(
        "UPDATE api_keys SET expires_at = $2 WHERE id = $1 AND issuer IS NULL AND revoked_at IS NULL
         AND (expires_at IS NULL OR expires_at > $3)",
    )
    .bind(id.as_str())
    .bind(at.unix())
    .bind(now.unix())
    .execute(&mut *tx)
    .await?;
    if changed.rows_affected() == 0 {
        return Ok(ExpiringKey::NotThere);
    }
    // Removes the revocation of the previous expiry, which has not started and was not pushed to any sandbox.
    sqlx::query(
        "DELETE FROM revocations
         WHERE workspace_id = $1 AND sandbox_id IS NULL AND kind = 'grant' AND value = $2 AND issued_by IS NULL AND starts_at > $3",
    )
    .bind(workspace)
    .bind(id.as_str())
    .bind(now.unix())
    .execute(&mut *tx)
    .await?;
    // Later than that, no token that exists now is valid, and new tokens already respect the key's expiry.
    if at < now.plus(MAX_REFRESH_AGE) {
        let grant = Revoked { kind: "grant", value: id.as_str(), issued_by: None };
        revocations::insert_revocation(&mut *tx, (workspace.as_str(), None), grant, now, at, at.plus(MAX_REFRESH_AGE)).await?;
    }
    audit_records::add(&mut *tx, audit).await?;
    Ok(get(tx, id).await?.map_or(ExpiringKey::NotThere, |key| ExpiringKey::Changed(Box::new(key))))
}

/// Whether a key is valid until it is revoked.
fn is_lasting(key: &ApiKey) -> bool {
    key.identity.is_none() && key.revoked_at.is_none() && key.expires_at.is_none()
}

pub async fn revoke(tx: &mut AnyConnection, id: &KeyId, ending: &Ending) -> Stored<RevokedKey> {
    let Some(key) = get(&mut *tx, id).await? else { return Ok(RevokedKey::NotThere) };
    let who = &key.principal;
    if who.is_operator() {
        lock::operators(&mut *tx).await?;
    }
    lock::workspace(&mut *tx, &who.workspace).await?;
    if who.is_operator() && key.revoked_at.is_none() {
        let left = if is_lasting(&key) { KeyValidity::Lasting } else { KeyValidity::Valid(ending.now) };
        if !has_other_operator(&mut *tx, left, Some(id), None).await? {
            return Ok(RevokedKey::LastOperator);
        }
    }
    let changed = sqlx::query("UPDATE api_keys SET revoked_at = $2 WHERE id = $1 AND revoked_at IS NULL")
        .bind(id.as_str())
        .bind(ending.now.unix())
        .execute(&mut *tx)
        .await?;
    if changed.rows_affected() == 0 {
        return Ok(RevokedKey::NotThere);
    }
    revocations::revoke(&mut *tx, &who.workspace, None, "grant", id.as_str(), ending).await?;
    audit_records::add(tx, &ending.audit).await?;
    Ok(RevokedKey::Revoked(Box::new(ApiKey { revoked_at: Some(ending.now), ..key })))
}

/// How an operator could authenticate.
#[derive(Clone, Copy)]
pub enum KeyValidity {
    /// With a key that is valid now.
    Valid(Timestamp),
    /// With a key that doesn't expire. Removing the last of these would lock out all operators once the other keys
    /// expire.
    Lasting,
}

/// Whether an operator could still authenticate without this key and without any key of this principal.
pub async fn has_other_operator(
    tx: &mut AnyConnection,
    by: KeyValidity,
    but_key: Option<&KeyId>,
    but: Option<(&str, &str)>,
) -> Stored<bool> {
    let row = sqlx::query(
        "SELECT count(*) AS n FROM (
             SELECT k.id FROM api_keys k JOIN principals p ON p.workspace_id = k.workspace_id AND p.name = k.principal
             WHERE p.kind = 'operator' AND k.issuer IS NULL AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > $1)
               AND ($2 IS NULL OR k.id <> $2) AND ($3 IS NULL OR k.workspace_id <> $3 OR k.principal <> $4) LIMIT 1) AS others",
    )
    .bind(match by {
        KeyValidity::Valid(now) => now.unix(),
        // No expiry is later.
        KeyValidity::Lasting => i64::MAX,
    })
    .bind(but_key.map(KeyId::as_str))
    .bind(but.map(|(workspace, _)| workspace))
    .bind(but.map(|(_, name)| name))
    .fetch_one(tx)
    .await?;
    Ok(rows::count(&row, "n")? > 0)
}

/// Whether a principal has a key that doesn't expire.
pub async fn has_lasting(tx: &mut AnyConnection, workspace: &str, name: &str) -> Stored<bool> {
    let row = sqlx::query(
        "SELECT count(*) AS n FROM (SELECT id FROM api_keys WHERE workspace_id = $1 AND principal = $2 AND issuer IS NULL
         AND revoked_at IS NULL AND expires_at IS NULL LIMIT 1) AS lasting",
    )
    .bind(workspace)
    .bind(name)
    .fetch_one(tx)
    .await?;
    Ok(rows::count(&row, "n")? > 0)
}

impl Store {
    /// Creates workspace and principal if they don't exist yet.
    pub async fn add_key(&self, key: &ApiKey, audit: &AuditRecord) -> Stored<AddedKey> {
        let mut tx = self.base.begin().await?;
        let added = add(&mut tx, key, audit).await?;
        if matches!(added, AddedKey::Added) {
            self.base.commit(tx).await?;
        }
        Ok(added)
    }

    pub async fn key(&self, id: &KeyId) -> Stored<Option<ApiKey>> {
        let ask = async { asked!(self, db => get(db, id)) };
        self.known(&self.known_keys, id.clone(), 0, ask).await
    }

    /// A key, together with the session that the request will probably need next.
    pub async fn key_and_session(&self, id: &KeyId, session: &SessionId) -> Stored<Option<(ApiKey, Option<SessionWithSandbox>)>> {
        if !self.base.engine.is_only_writer {
            return asked!(self, db => sessions::with_key(db, id, session));
        }
        // Each is cached, and is more often found than a combined entry would be.
        let Some(key) = self.key(id).await? else { return Ok(None) };
        Ok(Some((key, self.session(session).await?)))
    }

    pub async fn keys(&self, page: &PageParams) -> Stored<Vec<ApiKey>> {
        asked!(self, db => list(db, page))
    }

    /// Sets when a key expires, unless there is no such key or it has ended.
    pub async fn expire_key(&self, id: &KeyId, at: Timestamp, audit: &AuditRecord) -> Stored<ExpiringKey> {
        let mut tx = self.base.begin().await?;
        let changed = expire(&mut tx, id, at, audit).await?;
        self.base.commit(tx).await?;
        Ok(changed)
    }

    /// Ends the key and the tokens issued under it.
    pub async fn revoke_key(&self, id: &KeyId, ending: &Ending) -> Stored<RevokedKey> {
        let mut tx = self.base.begin().await?;
        let revoked = revoke(&mut tx, id, ending).await?;
        self.base.commit(tx).await?;
        Ok(revoked)
    }

    /// The stored key of an identity, revoked or not; its hash is of issuer and subject.
    pub async fn identity(&self, principal: &Principal, hash: &[u8; 32]) -> Stored<Option<ApiKey>> {
        asked!(self, db => of_identity(db, principal, hash))
    }

    pub async fn principal(&self, workspace: &str, name: &str) -> Stored<Option<Principal>> {
        asked!(self, db => principal(db, workspace, name))
    }
}
