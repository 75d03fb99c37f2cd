//! Converts rows to the domain's records. A value that can't be read is an error that names its column.

use std::{str::FromStr, time::Duration};

use cobox_protocol::{
    Timestamp,
    key::PrincipalKind,
    session::{Access, State},
};
use cobox_provider::SandboxSpec;
use sqlx::{Row, any::AnyRow};

use crate::{
    domain::model::{
        ApiKey, AuditRecord, Identity, Intent, OldKeys, Principal, PrincipalRecord, Sandbox, Session, SessionWithSandbox, Share,
    },
    store::{StoreError, Stored},
};

pub fn sandbox(row: &AnyRow) -> Stored<Sandbox> {
    Ok(Sandbox {
        id: parsed(row, "id")?,
        workspace: row.try_get("workspace_id")?,
        name: row.try_get("name")?,
        owner: row.try_get("owner")?,
        owner_kind: parsed_with(row, "owner_kind", |w| w.parse::<PrincipalKind>().ok())?,
        access: parsed_with(row, "access", access_from_str)?,
        provider: row.try_get("provider")?,
        node: row.try_get("node_id")?,
        generation: generation(row, "generation")?.ok_or_else(|| corrupt("generation", "nothing"))?,
        old_keys: match (generation(row, "old_keys_from")?, optional_time(row, "old_keys_until")?) {
            (Some(from), Some(until)) => Some(OldKeys { from, until }),
            _ => None,
        },
        master_from: generation(row, "master_from")?.unwrap_or(1),
        state: parsed_with(row, "state", |w| w.parse::<State>().ok())?,
        intent: row.try_get::<Option<&str>, _>("intent")?.map(|w| Intent::parse(w).ok_or_else(|| corrupt("intent", w))).transpose()?,
        reason: row.try_get("reason")?,
        is_kept: count(row, "kept")? != 0,
        own_lease: maybe_seconds(row, "lease_seconds")?,
        own_keep: maybe_seconds(row, "keep_suspended_seconds")?,
        created_at: time(row, "created_at")?,
        last_active_at: time(row, "last_active_at")?,
        counted_until: optional_time(row, "running_since")?,
        active: seconds(row, "active_seconds")?,
        suspended_at: optional_time(row, "suspended_at")?,
        downtime: seconds(row, "downtime_seconds")?,
        ended_at: optional_time(row, "ended_at")?,
        restore_until: optional_time(row, "restore_until")?,
        spec: sandbox_spec(row)?,
        template: row.try_get("template")?,
        pool: parsed_optional(row, "pool_id")?,
    })
}

/// A default spec is stored as NULL.
pub fn sandbox_spec(row: &AnyRow) -> Stored<SandboxSpec> {
    match row.try_get::<Option<&str>, _>("making")? {
        None => Ok(SandboxSpec::default()),
        // Without the text: it may contain secrets.
        Some(text) => serde_json::from_str(text).map_err(|e| corrupt("making", &format!("…: {e}"))),
    }
}

pub fn encoded_spec(spec: &SandboxSpec) -> Stored<Option<String>> {
    if *spec == SandboxSpec::default() {
        return Ok(None);
    }
    serde_json::to_string(spec).map(Some).map_err(|e| StoreError::Failed(e.to_string()))
}

/// For a query that names the columns as `session_columns!` does.
pub fn session(row: &AnyRow) -> Stored<Session> {
    Ok(Session {
        id: parsed(row, "session_id")?,
        workspace: row.try_get("session_workspace")?,
        scope_type: row.try_get("scope_type")?,
        scope_id: row.try_get("scope_id")?,
        sandbox: parsed(row, "sandbox_id")?,
        owner: row.try_get("session_owner")?,
        access: parsed_with(row, "session_access", access_from_str)?,
        created_at: time(row, "session_created_at")?,
        active_base: seconds(row, "active_base")?,
        ended_at: optional_time(row, "session_ended_at")?,
        end_reason: row.try_get("end_reason")?,
    })
}

pub fn session_with_sandbox(row: &AnyRow) -> Stored<SessionWithSandbox> {
    Ok(SessionWithSandbox { session: session(row)?, sandbox: sandbox(row)? })
}

pub fn key(row: &AnyRow) -> Stored<ApiKey> {
    key_named(row, |name| name)
}

/// For a query whose unprefixed columns belong to another record.
pub fn joined_key(row: &AnyRow) -> Stored<ApiKey> {
    key_named(row, |name| match name {
        "id" => "key_id",
        "workspace_id" => "key_workspace_id",
        "principal" => "key_principal",
        "kind" => "key_kind",
        "hash" => "key_hash",
        "created_at" => "key_created_at",
        "expires_at" => "key_expires_at",
        "last_used_at" => "key_last_used_at",
        "revoked_at" => "key_revoked_at",
        "issuer" => "key_issuer",
        "subject" => "key_subject",
        other => other,
    })
}

fn key_named(row: &AnyRow, called: impl Fn(&'static str) -> &'static str) -> Stored<ApiKey> {
    let hash: &[u8] = row.try_get(called("hash"))?;
    Ok(ApiKey {
        id: parsed(row, called("id"))?,
        principal: Principal {
            workspace: row.try_get(called("workspace_id"))?,
            name: row.try_get(called("principal"))?,
            kind: parsed_with(row, called("kind"), |w| w.parse::<PrincipalKind>().ok())?,
        },
        hash: hash.try_into().map_err(|_| corrupt("hash", "not 32 bytes"))?,
        created_at: time(row, called("created_at"))?,
        expires_at: optional_time(row, called("expires_at"))?,
        last_used_at: optional_time(row, called("last_used_at"))?,
        revoked_at: optional_time(row, called("revoked_at"))?,
        identity: row
            .try_get::<Option<String>, _>(called("issuer"))?
            .map(|issuer| Ok::<_, StoreError>(Identity { issuer, subject: row.try_get(called("subject"))? }))
            .transpose()?,
    })
}

pub fn principal(row: &AnyRow) -> Stored<PrincipalRecord> {
    Ok(PrincipalRecord {
        principal: Principal {
            workspace: row.try_get("workspace_id")?,
            name: row.try_get("name")?,
            kind: parsed_with(row, "kind", |w| w.parse::<PrincipalKind>().ok())?,
        },
        created_at: time(row, "created_at")?,
        valid_keys: count(row, "valid_keys")?,
        last_used_at: optional_time(row, "last_used_at")?,
        disabled_at: optional_time(row, "disabled_at")?,
        disabled_by: row.try_get("disabled_by")?,
    })
}

pub fn audit(row: &AnyRow) -> Stored<AuditRecord> {
    Ok(AuditRecord {
        at: time(row, "at")?,
        workspace: row.try_get("workspace_id")?,
        action: row.try_get::<String, _>("action")?.into(),
        request_id: parsed_optional(row, "request_id")?,
        principal: row.try_get("principal")?,
        actor: row.try_get("actor")?,
        thread: row.try_get("thread")?,
        session: parsed_optional(row, "session_id")?,
        sandbox: parsed_optional(row, "sandbox_id")?,
        jti: row.try_get("jti")?,
        detail: row.try_get("detail")?,
    })
}

pub fn share(row: &AnyRow) -> Stored<Share> {
    let capabilities: &str = row.try_get("capabilities")?;
    Ok(Share {
        id: parsed(row, "id")?,
        workspace: row.try_get("workspace_id")?,
        session: parsed(row, "session_id")?,
        principal: row.try_get("principal")?,
        capabilities: capabilities.parse().map_err(|_| corrupt("capabilities", capabilities))?,
        shared_by: row.try_get("shared_by")?,
        created_at: time(row, "created_at")?,
        expires_at: optional_time(row, "expires_at")?,
    })
}

pub const fn access_as_str(access: Access) -> &'static str {
    match access {
        Access::Workspace => "workspace",
        Access::Owner => "owner",
    }
}

pub fn access_from_str(w: &str) -> Option<Access> {
    [Access::Workspace, Access::Owner].into_iter().find(|a| access_as_str(*a) == w)
}

/// Durations and counts are far below the column's limit.
pub fn stored_seconds(d: Duration) -> i64 {
    i64::try_from(d.as_secs()).unwrap_or(i64::MAX)
}

pub fn parsed<T: FromStr>(row: &AnyRow, column: &'static str) -> Stored<T> {
    let text: &str = row.try_get(column)?;
    text.parse().map_err(|_| corrupt(column, text))
}

pub fn parsed_optional<T: FromStr>(row: &AnyRow, column: &'static str) -> Stored<Option<T>> {
    let text: Option<&str> = row.try_get(column)?;
    text.map(|t| t.parse().map_err(|_| corrupt(column, t))).transpose()
}

pub fn parsed_with<T>(row: &AnyRow, column: &'static str, read: impl Fn(&str) -> Option<T>) -> Stored<T> {
    let text: &str = row.try_get(column)?;
    read(text).ok_or_else(|| corrupt(column, text))
}

pub fn time(row: &AnyRow, column: &'static str) -> Stored<Timestamp> {
    Ok(Timestamp::from_unix(row.try_get(column)?))
}

pub fn optional_time(row: &AnyRow, column: &'static str) -> Stored<Option<Timestamp>> {
    Ok(row.try_get::<Option<i64>, _>(column)?.map(Timestamp::from_unix))
}

fn generation(row: &AnyRow, column: &'static str) -> Stored<Option<u32>> {
    let value: Option<i64> = row.try_get(column)?;
    value.map(|v| u32::try_from(v).map_err(|e| corrupt(column, &e.to_string()))).transpose()
}

fn seconds(row: &AnyRow, column: &'static str) -> Stored<Duration> {
    count(row, column).map(Duration::from_secs)
}

fn maybe_seconds(row: &AnyRow, column: &'static str) -> Stored<Option<Duration>> {
    let value: Option<i64> = row.try_get(column)?;
    value.map(|v| u64::try_from(v).map(Duration::from_secs).map_err(|_| corrupt(column, "a negative number"))).transpose()
}

/// A number that is never negative.
pub fn count(row: &AnyRow, column: &'static str) -> Stored<u64> {
    let value: i64 = row.try_get(column)?;
    u64::try_from(value).map_err(|_| corrupt(column, &value.to_string()))
}

pub fn corrupt(column: &str, value: &str) -> StoreError {
    StoreError::Corrupt(format!("column {column} has `{value}`"))
}
