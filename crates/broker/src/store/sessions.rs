//! Sessions: found or created in one transaction, and ended together with what depends on them.

use cobox_protocol::{
    KeyId, SandboxId, SessionId,
    session::{Scope, State},
};
use sqlx::{AnyConnection, AssertSqlSafe, Row};

use super::{
    asked, audit_records, deleted, events, lock, pools, resources, revocations, rows, sandboxes,
    tags::{self, TagOwner},
};
use crate::{
    domain::model::{ApiKey, AuditRecord, Intent, Session, SessionWithSandbox},
    store::{Ending, EnsureParams, Ensured, Idempotency, PageParams, SandboxAfterSession, SessionFilter, Store, Stored, Viewer},
};

/// A session's columns, as `rows::session` reads them.
macro_rules! session_columns {
    () => {
        "s.id AS session_id, s.workspace_id AS session_workspace, s.scope_type, s.scope_id, s.sandbox_id, s.owner AS session_owner,
         s.access AS session_access, s.created_at AS session_created_at, s.active_base, s.ended_at AS session_ended_at, s.end_reason"
    };
}

/// Sessions with their sandboxes in one statement, so that both are from the same moment: `rows::session_with_sandbox` reads them.
macro_rules! bound {
    ($rest:literal) => {
        concat!("SELECT b.*, ", session_columns!(), " FROM sessions s JOIN sandboxes b ON b.id = s.sandbox_id ", $rest)
    };
}

pub async fn ensure(tx: &mut AnyConnection, params: &EnsureParams) -> Stored<Ensured> {
    let fresh = &params.fresh;
    let workspace = &fresh.session.workspace;
    lock::workspace(tx, workspace).await?;
    if let Some(idempotency) = &params.idempotency
        && let Some((hash, id)) = remembered(tx, workspace, idempotency).await?
    {
        if hash != idempotency.request_hash {
            return Ok(Ensured::KeyReused);
        }
        if let Some(bound) = get(tx, &id).await? {
            return Ok(Ensured::Replayed(bound));
        }
    }
    if let Some(bound) = of_scope(tx, workspace, &fresh.session.scope_type, &fresh.session.scope_id).await? {
        if !params.must_create {
            remember(tx, params, &bound.session.id).await?;
        }
        return Ok(Ensured::Existing(bound));
    }
    let made = if params.is_attaching {
        let living = sandboxes::locked(tx, &fresh.sandbox.id).await?.filter(|s| s.ended_at.is_none() && s.workspace == *workspace);
        let Some(sandbox) = living else { return Ok(Ensured::SandboxGone) };
        let active_base = sandbox.active_until(fresh.session.created_at);
        SessionWithSandbox { session: Session { active_base, ..fresh.session.clone() }, sandbox }
    } else {
        if let Some(name) = &fresh.sandbox.name
            && let Some(taken) = sandboxes::named(tx, workspace, name).await?
        {
            return Ok(Ensured::NameTaken(taken.id));
        }
        if let Some(missing) = resources::missing(tx, &fresh.sandbox.spec).await? {
            return Ok(Ensured::SpecPartMissing(missing));
        }
        let taken = match &params.taking {
            Some(taking) => pools::take(tx, taking, &fresh.sandbox, &params.quota, &params.audit).await?,
            None => None,
        };
        let made = match taken {
            Some(sandbox) => {
                let active_base = sandbox.active_until(fresh.session.created_at);
                SessionWithSandbox { session: Session { active_base, sandbox: sandbox.id.clone(), ..fresh.session.clone() }, sandbox }
            }
            None => {
                if let Some(reached) = deleted::make_room(tx, &fresh.sandbox, &params.quota, &params.audit).await? {
                    return Ok(Ensured::QuotaReached(reached));
                }
                sandboxes::insert(tx, &fresh.sandbox).await?;
                fresh.clone()
            }
        };
        tags::set(tx, TagOwner::Sandbox, workspace, made.sandbox.id.as_str(), &params.tags).await?;
        made
    };
    insert(tx, &made.session).await?;
    tags::set(tx, TagOwner::Session, workspace, made.session.id.as_str(), &params.tags).await?;
    remember(tx, params, &made.session.id).await?;
    let audit = AuditRecord { sandbox: Some(made.sandbox.id.clone()), ..params.audit.clone() };
    events::created(tx, &made.session, made.sandbox.state, &audit).await?;
    audit_records::add(tx, &audit).await?;
    Ok(Ensured::Created(made))
}

async fn remembered(tx: &mut AnyConnection, workspace: &str, i: &Idempotency) -> Stored<Option<(Vec<u8>, SessionId)>> {
    sqlx::query("DELETE FROM idempotency WHERE workspace_id = $1 AND principal = $2 AND key = $3 AND created_at < $4")
        .bind(workspace)
        .bind(&i.principal)
        .bind(&i.key)
        .bind(i.since.unix())
        .execute(&mut *tx)
        .await?;
    sqlx::query("SELECT request_hash, session_id FROM idempotency WHERE workspace_id = $1 AND principal = $2 AND key = $3")
        .bind(workspace)
        .bind(&i.principal)
        .bind(&i.key)
        .fetch_optional(tx)
        .await?
        .map(|row| Ok((row.try_get("request_hash")?, rows::parsed(&row, "session_id")?)))
        .transpose()
}

async fn remember(tx: &mut AnyConnection, params: &EnsureParams, session: &SessionId) -> Stored<()> {
    let Some(i) = &params.idempotency else { return Ok(()) };
    sqlx::query(
        "INSERT INTO idempotency (workspace_id, principal, key, request_hash, session_id, created_at) VALUES ($1, $2, $3, $4, $5, $6)",
    )
    .bind(&params.fresh.session.workspace)
    .bind(&i.principal)
    .bind(&i.key)
    .bind(&i.request_hash[..])
    .bind(session.as_str())
    .bind(params.fresh.session.created_at.unix())
    .execute(tx)
    .await?;
    Ok(())
}

async fn insert(tx: &mut AnyConnection, s: &Session) -> Stored<()> {
    sqlx::query(
        "INSERT INTO sessions (id, workspace_id, scope_type, scope_id, sandbox_id, owner, access, created_at, active_base)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
    )
    .bind(s.id.as_str())
    .bind(&s.workspace)
    .bind(&s.scope_type)
    .bind(&s.scope_id)
    .bind(s.sandbox.as_str())
    .bind(&s.owner)
    .bind(rows::access_as_str(s.access))
    .bind(s.created_at.unix())
    .bind(rows::stored_seconds(s.active_base))
    .execute(tx)
    .await?;
    Ok(())
}

pub async fn get(db: &mut AnyConnection, id: &SessionId) -> Stored<Option<SessionWithSandbox>> {
    let row = sqlx::query(bound!("WHERE s.id = $1")).bind(id.as_str()).fetch_optional(db).await?;
    row.as_ref().map(rows::session_with_sandbox).transpose()
}

pub async fn of_scope(db: &mut AnyConnection, workspace: &str, scope_type: &str, scope_id: &str) -> Stored<Option<SessionWithSandbox>> {
    let row = sqlx::query(bound!("WHERE s.workspace_id = $1 AND s.scope_type = $2 AND s.scope_id = $3 AND s.ended_at IS NULL"))
        .bind(workspace)
        .bind(scope_type)
        .bind(scope_id)
        .fetch_optional(db)
        .await?;
    row.as_ref().map(rows::session_with_sandbox).transpose()
}

/// A key with its principal's kind, and a session with its sandbox if it exists.
const WITH_KEY: &str = concat!(
    "SELECT b.*, ",
    session_columns!(),
    ", k.id AS key_id, k.workspace_id AS key_workspace_id, k.principal AS key_principal, p.kind AS key_kind, k.hash AS key_hash,
     k.created_at AS key_created_at, k.expires_at AS key_expires_at, k.last_used_at AS key_last_used_at,
     k.revoked_at AS key_revoked_at, k.issuer AS key_issuer, k.subject AS key_subject
     FROM api_keys k JOIN principals p ON p.workspace_id = k.workspace_id AND p.name = k.principal LEFT JOIN sessions s ON s.id = $2
     LEFT JOIN sandboxes b ON b.id = s.sandbox_id WHERE k.id = $1"
);

pub async fn with_key(db: &mut AnyConnection, key: &KeyId, session: &SessionId) -> Stored<Option<(ApiKey, Option<SessionWithSandbox>)>> {
    let row = sqlx::query(WITH_KEY).bind(key.as_str()).bind(session.as_str()).fetch_optional(db).await?;
    let Some(row) = row else { return Ok(None) };
    let is_there = row.try_get::<Option<&str>, _>("session_id")?.is_some();
    Ok(Some((rows::joined_key(&row)?, is_there.then(|| rows::session_with_sandbox(&row)).transpose()?)))
}

pub async fn list(db: &mut AnyConnection, viewer: &Viewer, filter: &SessionFilter, page: &PageParams) -> Stored<Vec<SessionWithSandbox>> {
    // A session has failed if its sandbox failed at the same time; one that ended earlier was terminated. `SessionWithSandbox::state`
    // has the same rule.
    let life = match filter.state {
        Some(State::Failed) => "s.ended_at IS NOT NULL AND b.state = 'failed' AND b.ended_at = s.ended_at AND $6 IS NOT NULL",
        Some(State::Terminated) => "s.ended_at IS NOT NULL AND NOT (b.state = 'failed' AND b.ended_at = s.ended_at) AND $6 IS NOT NULL",
        _ => "s.ended_at IS NULL AND ($6 IS NULL OR b.state = $6)",
    };
    let sql = format!(
        "{} AND ($2 OR s.access = 'workspace' OR s.owner = $3
                 OR EXISTS (SELECT 1 FROM shares h WHERE h.session_id = s.id AND h.principal = $3)) AND ($4 IS NULL OR s.scope_type = $4) AND ($5 IS NULL OR s.scope_id = $5)
            AND {life} AND ($7 IS NULL OR s.id < $7){}
         ORDER BY s.id DESC LIMIT $8",
        bound!("WHERE s.workspace_id = $1"),
        tags::conditions(TagOwner::Session, &filter.tags, 9)
    );
    let query = sqlx::query(AssertSqlSafe(sql))
        .bind(&viewer.workspace)
        .bind(viewer.sees_all)
        .bind(&viewer.principal)
        .bind(filter.scope_type.as_deref())
        .bind(filter.scope_id.as_deref())
        .bind(filter.state.map(State::as_str))
        .bind(page.before.as_deref())
        .bind(i64::from(page.limit));
    tags::bind(query, &filter.tags).fetch_all(db).await?.iter().map(rows::session_with_sandbox).collect()
}

pub async fn on_sandbox(db: &mut AnyConnection, sandbox: &SandboxId) -> Stored<Vec<Session>> {
    sqlx::query(concat!(
        "SELECT ",
        session_columns!(),
        " FROM sessions s WHERE s.sandbox_id = $1 AND s.ended_at IS NULL ORDER BY s.id DESC"
    ))
    .bind(sandbox.as_str())
    .fetch_all(db)
    .await?
    .iter()
    .map(rows::session)
    .collect()
}

pub async fn past_threads(db: &mut AnyConnection, sandbox: &SandboxId, limit: u32) -> Stored<Vec<String>> {
    let found = sqlx::query(
        "SELECT scope_id FROM sessions WHERE sandbox_id = $1 AND scope_type = 'thread' AND ended_at IS NOT NULL
         GROUP BY scope_id ORDER BY max(id) DESC LIMIT $2",
    )
    .bind(sandbox.as_str())
    .bind(i64::from(limit))
    .fetch_all(db)
    .await?;
    found.iter().map(|row| Ok(row.try_get("scope_id")?)).collect()
}

/// The latest ended session of a scope.
pub async fn last_of_scope(db: &mut AnyConnection, workspace: &str, scope: &Scope) -> Stored<Option<SessionWithSandbox>> {
    let row = sqlx::query(bound!(
        "WHERE s.workspace_id = $1 AND s.scope_type = $2 AND s.scope_id = $3 AND s.ended_at IS NOT NULL ORDER BY s.id DESC LIMIT 1"
    ))
    .bind(workspace)
    .bind(&*scope.kind)
    .bind(&scope.id)
    .fetch_optional(db)
    .await?;
    row.map(|row| rows::session_with_sandbox(&row)).transpose()
}

/// Returns the remaining work, and the sandbox it is about.
pub async fn end(tx: &mut AnyConnection, id: &SessionId, ending: &Ending) -> Stored<Option<(SandboxAfterSession, SandboxId)>> {
    let Some(found) = get(tx, id).await? else { return Ok(None) };
    sandboxes::locked(tx, &found.sandbox.id).await?;
    // Read again under the locks, so that it can't end concurrently.
    let Some(SessionWithSandbox { session, sandbox }) = get(tx, id).await?.filter(|b| b.session.ended_at.is_none()) else {
        return Ok(None);
    };
    close(tx, &session, State::Terminated, ending).await?;
    let leftover = if !on_sandbox(tx, &sandbox.id).await?.is_empty() {
        SandboxAfterSession::InUse
    } else if sandbox.outlives_sessions() || session.owner != sandbox.owner || ending.keeps_sandbox {
        // A session on another principal's sandbox must not end the sandbox with it.
        if sandbox.is_running() && sandbox.intent.is_none() {
            sandboxes::replace(tx, &sandbox, &sandbox.with_intent(Intent::Suspend)).await?;
        }
        SandboxAfterSession::Suspend
    } else {
        sandboxes::mark_ended(tx, &sandbox, State::Terminated, ending).await?;
        SandboxAfterSession::Destroy
    };
    audit_records::add(tx, &ending.audit).await?;
    Ok(Some((leftover, sandbox.id)))
}

/// Ends the session's row and its tokens; the caller holds the locks of its workspace and sandbox.
pub async fn close(tx: &mut AnyConnection, session: &Session, state: State, ending: &Ending) -> Stored<()> {
    sqlx::query("UPDATE sessions SET ended_at = $2, end_reason = $3 WHERE id = $1")
        .bind(session.id.as_str())
        .bind(ending.now.unix())
        .bind(&ending.reason)
        .execute(&mut *tx)
        .await?;
    events::ended(tx, session, state, &ending.reason, &ending.audit).await?;
    revocations::revoke(tx, &session.workspace, Some(&session.sandbox), "session", session.id.as_str(), ending).await
}

impl Store {
    pub async fn ensure(&self, params: &EnsureParams) -> Stored<Ensured> {
        let mut tx = self.base.begin_unsynced().await?;
        let ensured = ensure(&mut tx, params).await?;
        self.base.commit_with_event(tx, &params.fresh.sandbox.id).await?;
        Ok(ensured)
    }

    /// The live session of a scope.
    pub async fn session_of(&self, workspace: &str, scope_type: &str, scope_id: &str) -> Stored<Option<SessionWithSandbox>> {
        let ask = async { asked!(self, db => of_scope(db, workspace, scope_type, scope_id)) };
        self.known(&self.known_scopes, [workspace, scope_type, scope_id].map(str::to_owned), 0, ask).await
    }

    /// The latest ended session of a scope.
    pub async fn last_session_of(&self, workspace: &str, scope: &Scope) -> Stored<Option<SessionWithSandbox>> {
        asked!(self, db => last_of_scope(db, workspace, scope))
    }

    /// A session, ended or not.
    pub async fn session(&self, id: &SessionId) -> Stored<Option<SessionWithSandbox>> {
        let ask = async { asked!(self, db => get(db, id)) };
        self.known(&self.known_sessions, id.clone(), 0, ask).await
    }

    pub async fn sessions(&self, viewer: &Viewer, filter: &SessionFilter, page: &PageParams) -> Stored<Vec<SessionWithSandbox>> {
        asked!(self, db => list(db, viewer, filter, page))
    }

    /// The live sessions of a sandbox, newest first.
    pub async fn sessions_on(&self, sandbox: &SandboxId) -> Stored<Vec<Session>> {
        asked!(self, db => on_sandbox(db, sandbox))
    }

    /// The threads whose sessions on a sandbox have ended, each once, the latest first.
    pub async fn past_threads(&self, sandbox: &SandboxId, limit: u32) -> Stored<Vec<String>> {
        asked!(self, db => past_threads(db, sandbox, limit))
    }

    /// `None` when it has ended already.
    pub async fn end_session(&self, id: &SessionId, ending: &Ending) -> Stored<Option<SandboxAfterSession>> {
        let mut tx = self.base.begin().await?;
        let ended = end(&mut tx, id, ending).await?;
        self.base.commit(tx).await?;
        Ok(ended.map(|(leftover, sandbox)| {
            self.base.notify_of_event(&sandbox);
            leftover
        }))
    }
}
