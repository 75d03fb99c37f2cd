//! Stored data about tokens: opaque tokens by their hashes, and revocations by operators.

use cobox_protocol::{Timestamp, control::IssuedTo};
use cobox_token::Claims;
use sqlx::{AnyConnection, Row};

use super::{
    asked, audit_chain, audit_records, lock,
    revocations::{self, Revoked},
    rows,
};
use crate::store::{MasterRotated, MasterRotation, OpaqueToken, RevokeParams, RevokedTokens, Store, StoreError, Stored};

pub async fn insert(tx: &mut AnyConnection, token: &OpaqueToken) -> Stored<()> {
    let claims = serde_json::to_string(&token.claims).map_err(|e| StoreError::Failed(format!("claims can't be written: {e}")))?;
    sqlx::query("INSERT INTO opaque_tokens (hash, claims, keep_until) VALUES ($1, $2, $3)")
        .bind(&token.hash[..])
        .bind(claims)
        .bind(token.keep_until.unix())
        .execute(tx)
        .await?;
    Ok(())
}

pub async fn opaque(db: &mut AnyConnection, hash: &[u8; 32]) -> Stored<Option<Claims>> {
    let row = sqlx::query("SELECT claims FROM opaque_tokens WHERE hash = $1").bind(&hash[..]).fetch_optional(db).await?;
    let Some(row) = row else { return Ok(None) };
    let claims: &str = row.try_get("claims")?;
    serde_json::from_str(claims).map(Some).map_err(|e| rows::corrupt("claims", &e.to_string()))
}

/// Only from records of the broker itself: a sandbox may report any id.
pub async fn workspace_of(db: &mut AnyConnection, jti: &str) -> Stored<Option<String>> {
    let row = sqlx::query(
        "SELECT workspace_id FROM audit WHERE jti = $1 AND action = 'token.issued'
         UNION ALL SELECT workspace_id FROM shares WHERE id = $1 LIMIT 1",
    )
    .bind(jti)
    .fetch_optional(db)
    .await?;
    Ok(row.map(|row| row.try_get("workspace_id")).transpose()?)
}

pub async fn revoke(tx: &mut AnyConnection, params: &RevokeParams) -> Stored<u64> {
    lock::workspace(tx, &params.workspace).await?;
    let revoked = match &params.tokens {
        RevokedTokens::Jti(jti) => Revoked { kind: "jti", value: jti, issued_by: None },
        RevokedTokens::Earlier { of, value, issued_by } => Revoked { kind: word(*of), value, issued_by: Some(*issued_by) },
    };
    let now = params.audit.at;
    let about = (params.workspace.as_str(), params.sandbox.as_ref());
    let sequence = revocations::insert_revocation(tx, about, revoked, now, now, params.until).await?;
    audit_records::add(tx, &params.audit).await?;
    Ok(sequence)
}

pub async fn rotate_master(tx: &mut AnyConnection, rotation: &MasterRotation) -> Stored<MasterRotated> {
    if rotation.old_until.is_some() {
        let row = sqlx::query("SELECT max(old_keys_until) AS until FROM sandboxes WHERE ended_at IS NULL AND old_keys_until > $1")
            .bind(rotation.now.unix())
            .fetch_one(&mut *tx)
            .await?;
        if let Some(until) = row.try_get::<Option<i64>, _>("until")? {
            return Ok(MasterRotated::TooSoon(Timestamp::from_unix(until)));
        }
    }
    let done = sqlx::query(
        "UPDATE sandboxes SET
            old_keys_from = CASE WHEN $1 IS NULL THEN NULL ELSE generation END,
            old_keys_until = $1, master_from = generation + 1, generation = generation + 1
         WHERE ended_at IS NULL",
    )
    .bind(rotation.old_until.map(|t| t.unix()))
    .execute(&mut *tx)
    .await?;
    for (name, value) in &rotation.agreed {
        sqlx::query("INSERT INTO agreed (name, value) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = excluded.value")
            .bind(*name)
            .bind(value)
            .execute(&mut *tx)
            .await?;
    }
    for seal in &rotation.seals {
        audit_chain::write_seal(tx, seal).await?;
    }
    audit_records::add(tx, &rotation.audit).await?;
    Ok(MasterRotated::Rotated(done.rows_affected()))
}

const fn word(of: IssuedTo) -> &'static str {
    match of {
        IssuedTo::Grant => "grant",
        IssuedTo::Session => "session",
        IssuedTo::Principal => "principal",
    }
}

pub fn issued_to(kind: &str) -> Option<IssuedTo> {
    [IssuedTo::Grant, IssuedTo::Session, IssuedTo::Principal].into_iter().find(|of| word(*of) == kind)
}

impl Store {
    /// The workspace in which a token was issued or a share was created, while it is on record.
    pub async fn workspace_of_token(&self, jti: &str) -> Stored<Option<String>> {
        asked!(self, db => workspace_of(db, jti))
    }

    /// Returns the sequence number of the revocation.
    pub async fn revoke(&self, params: &RevokeParams) -> Stored<u64> {
        let mut tx = self.base.begin().await?;
        let sequence = revoke(&mut tx, params).await?;
        self.base.commit(tx).await?;
        Ok(sequence)
    }

    pub async fn opaque_token(&self, hash: &[u8; 32]) -> Stored<Option<Claims>> {
        asked!(self, db => opaque(db, hash))
    }

    /// No broker may run.
    pub async fn rotate_master(&self, rotation: &MasterRotation) -> Stored<MasterRotated> {
        let mut tx = self.base.begin().await?;
        let rotated = rotate_master(&mut tx, rotation).await?;
        self.base.commit(tx).await?;
        Ok(rotated)
    }
}
