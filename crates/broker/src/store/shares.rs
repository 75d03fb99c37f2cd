//! Shares: which principals a session was shared with. Tokens issued through a share end in the transaction that ends it.

use cobox_protocol::{SandboxId, SessionId, event::EventKind};
use sqlx::AnyConnection;

use super::{asked, audit_records, events, revocations, rows, sandboxes, sessions};
use crate::{
    domain::model::{Event, SessionWithSandbox, Share},
    store::{Ending, Shared, Store, Stored},
};

pub async fn add(tx: &mut AnyConnection, share: &Share, max: u32, ending: &Ending) -> Stored<Shared> {
    let Some(bound) = locked(tx, &share.session).await? else { return Ok(Shared::SessionGone) };
    let before = of(tx, &share.session, &share.principal).await?;
    if before.is_none() && list(tx, &share.session).await?.len() >= max as usize {
        return Ok(Shared::TooMany);
    }
    let mut share = share.clone();
    if let Some(before) = &before {
        if share.includes(before) && !before.is_over(ending.now) {
            // The principal keeps all its access, so its tokens stay valid.
            share.id = before.id.clone();
        } else {
            end_tokens(tx, &bound, before, ending).await?;
        }
    }
    sqlx::query("DELETE FROM shares WHERE session_id = $1 AND principal = $2")
        .bind(share.session.as_str())
        .bind(&share.principal)
        .execute(&mut *tx)
        .await?;
    sqlx::query(
        "INSERT INTO shares (id, workspace_id, session_id, principal, capabilities, shared_by, created_at, expires_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
    )
    .bind(share.id.as_str())
    .bind(&share.workspace)
    .bind(share.session.as_str())
    .bind(&share.principal)
    .bind(share.capabilities.names().join(" "))
    .bind(&share.shared_by)
    .bind(share.created_at.unix())
    .bind(share.expires_at.map(|t| t.unix()))
    .execute(&mut *tx)
    .await?;
    let what = EventKind::Shared { with: share.principal.clone(), capabilities: share.capabilities };
    events::append(tx, &[Event::of_session(ending.now, &bound.session, what).by(&ending.audit)]).await?;
    audit_records::add(tx, &ending.audit).await?;
    Ok(if before.is_some() { Shared::Changed(share) } else { Shared::Added(share) })
}

pub async fn of(db: &mut AnyConnection, session: &SessionId, principal: &str) -> Stored<Option<Share>> {
    let row = sqlx::query("SELECT * FROM shares WHERE session_id = $1 AND principal = $2")
        .bind(session.as_str())
        .bind(principal)
        .fetch_optional(db)
        .await?;
    row.as_ref().map(rows::share).transpose()
}

pub async fn list(db: &mut AnyConnection, session: &SessionId) -> Stored<Vec<Share>> {
    let found = sqlx::query("SELECT * FROM shares WHERE session_id = $1 ORDER BY principal").bind(session.as_str()).fetch_all(db).await?;
    found.iter().map(rows::share).collect()
}

pub async fn on_sandbox(db: &mut AnyConnection, sandbox: &SandboxId) -> Stored<Vec<Share>> {
    let found = sqlx::query(
        "SELECT shares.* FROM shares JOIN sessions ON sessions.id = shares.session_id
         WHERE sessions.sandbox_id = $1 AND sessions.ended_at IS NULL ORDER BY shares.session_id, shares.principal",
    );
    found.bind(sandbox.as_str()).fetch_all(db).await?.iter().map(rows::share).collect()
}

pub async fn remove(tx: &mut AnyConnection, session: &SessionId, principal: &str, ending: &Ending) -> Stored<Option<Share>> {
    let Some(bound) = locked(tx, session).await? else { return Ok(None) };
    let Some(share) = of(tx, session, principal).await? else { return Ok(None) };
    sqlx::query("DELETE FROM shares WHERE id = $1").bind(share.id.as_str()).execute(&mut *tx).await?;
    end_tokens(tx, &bound, &share, ending).await?;
    let what = EventKind::Unshared { with: share.principal.clone() };
    events::append(tx, &[Event::of_session(ending.now, &bound.session, what).by(&ending.audit)]).await?;
    audit_records::add(tx, &ending.audit).await?;
    Ok(Some(share))
}

/// A live session whose shares are locked until the transaction ends.
async fn locked(tx: &mut AnyConnection, id: &SessionId) -> Stored<Option<SessionWithSandbox>> {
    let Some(found) = sessions::get(tx, id).await? else { return Ok(None) };
    sandboxes::locked(tx, &found.sandbox.id).await?;
    Ok(sessions::get(tx, id).await?.filter(|b| b.session.ended_at.is_none()))
}

/// A token lists the share it was issued through among the ids it ends with.
async fn end_tokens(tx: &mut AnyConnection, bound: &SessionWithSandbox, share: &Share, ending: &Ending) -> Stored<()> {
    revocations::revoke(tx, &share.workspace, Some(&bound.sandbox.id), "jti", share.id.as_str(), ending).await
}

impl Store {
    /// A share that reduces access ends the tokens issued through the previous one.
    pub async fn share(&self, share: &Share, max: u32, ending: &Ending) -> Stored<Shared> {
        let mut tx = self.base.begin().await?;
        let shared = add(&mut tx, share, max, ending).await?;
        self.base.commit(tx).await?;
        Ok(shared)
    }

    pub async fn share_of(&self, session: &SessionId, principal: &str) -> Stored<Option<Share>> {
        asked!(self, db => of(db, session, principal))
    }

    /// Ordered by principal.
    pub async fn shares(&self, session: &SessionId) -> Stored<Vec<Share>> {
        asked!(self, db => list(db, session))
    }

    /// Shares of all live sessions that use a sandbox.
    pub async fn shares_on(&self, sandbox: &SandboxId) -> Stored<Vec<Share>> {
        asked!(self, db => on_sandbox(db, sandbox))
    }

    /// Ends a share and the tokens issued through it. `None` when there is none.
    pub async fn unshare(&self, session: &SessionId, principal: &str, ending: &Ending) -> Stored<Option<Share>> {
        let mut tx = self.base.begin().await?;
        let ended = remove(&mut tx, session, principal, ending).await?;
        self.base.commit(tx).await?;
        Ok(ended)
    }
}
