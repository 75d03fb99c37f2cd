//! Deleted sandboxes whose files are still kept: they can be restored, count against the quotas, and make room for new ones.

use cobox_protocol::{SandboxId, Timestamp, event::EventKind, session::State};
use sqlx::{AnyConnection, Row};

use super::{
    events, hint, kinds, lock, notes, rows,
    sandboxes::{locked, named},
};
use crate::{
    domain::{
        audit::AuditRecord,
        events::Event,
        model::{SANDBOX_RESTORED, Sandbox},
    },
    store::{Hint, PageWish, RestoredSandbox, Stored, Viewer},
};

pub async fn list(db: &mut AnyConnection, viewer: &Viewer, now: Timestamp, page: &PageWish) -> Stored<Vec<Sandbox>> {
    sqlx::query(
        "SELECT * FROM sandboxes
         WHERE workspace_id = $1 AND restore_until IS NOT NULL AND restore_until > $6
           AND ($2 OR access = 'workspace' OR owner = $3) AND ($4 IS NULL OR id < $4)
         ORDER BY id DESC LIMIT $5",
    )
    .bind(&viewer.workspace)
    .bind(viewer.sees_all)
    .bind(&viewer.principal)
    .bind(page.before.as_deref())
    .bind(i64::from(page.limit))
    .bind(now.unix())
    .fetch_all(db)
    .await?
    .iter()
    .map(rows::sandbox)
    .collect()
}

pub async fn restore(
    tx: &mut AnyConnection,
    id: &SandboxId,
    name: Option<&str>,
    now: Timestamp,
    audit: &AuditRecord,
) -> Stored<RestoredSandbox> {
    let deleted = locked(tx, id).await?.filter(|s| s.restore_until.is_some_and(|until| until > now));
    let Some(deleted) = deleted else { return Ok(RestoredSandbox::Gone) };
    if deleted.intent.is_some() {
        return Ok(RestoredSandbox::Stopping);
    }
    if let Some(name) = name
        && let Some(taken) = named(tx, &deleted.workspace, name).await?
    {
        return Ok(RestoredSandbox::NameTaken(taken.id));
    }
    if let Some(missing) = kinds::missing(tx, &deleted.making).await? {
        return Ok(RestoredSandbox::MadeOfGone(missing));
    }
    sqlx::query("UPDATE sessions SET end_reason = $2 WHERE sandbox_id = $1 AND ended_at = $3")
        .bind(id.as_str())
        .bind(SANDBOX_RESTORED)
        .bind(deleted.ended_at.map(|t| t.unix()))
        .execute(&mut *tx)
        .await?;
    let restored = Sandbox {
        name: name.map(str::to_owned),
        state: State::Suspended,
        reason: Some("it was restored".to_owned()),
        generation: deleted.generation + 1,
        old_keys: None,
        active: std::time::Duration::ZERO,
        last_active_at: now,
        suspended_at: Some(now),
        downtime: std::time::Duration::ZERO,
        ended_at: None,
        restore_until: None,
        ..deleted
    };
    sqlx::query(
        "UPDATE sandboxes SET name = $2, state = $3, reason = $4, generation = $5, old_keys_from = NULL, old_keys_until = NULL,
                              active_seconds = 0, last_active_at = $6, suspended_at = $6, downtime_seconds = 0, ended_at = NULL, restore_until = NULL
         WHERE id = $1",
    )
    .bind(id.as_str())
    .bind(restored.name.as_deref())
    .bind(restored.state.as_str())
    .bind(restored.reason.as_deref())
    .bind(i64::from(restored.generation))
    .bind(now.unix())
    .execute(&mut *tx)
    .await?;
    events::append(tx, &[Event::of_sandbox(now, &restored, EventKind::Restored).by(audit)]).await?;
    notes::audit(tx, audit).await?;
    hint::send(tx, &Hint::Sandbox(id.clone())).await?;
    Ok(RestoredSandbox::Restored(Box::new(restored)))
}

/// Gives up as many deleted sandboxes, of a workspace or of one owner in it, as another sandbox within the limit needs; false where all
/// of them would not do. The caller holds the workspace's lock.
pub async fn make_room(tx: &mut AnyConnection, workspace: &str, owner: Option<&str>, limit: u32) -> Stored<bool> {
    // No more are counted than matter.
    let living = sqlx::query(
        "SELECT count(*) AS n FROM
         (SELECT id FROM sandboxes WHERE workspace_id = $1 AND ended_at IS NULL AND ($2 IS NULL OR owner = $2) LIMIT $3) AS living",
    );
    let living = living.bind(workspace).bind(owner).bind(i64::from(limit)).fetch_one(&mut *tx).await?;
    let free = u64::from(limit).saturating_sub(rows::count(&living, "n")?);
    if free == 0 {
        return Ok(false);
    }
    let excess = sqlx::query(
        "SELECT id FROM sandboxes WHERE workspace_id = $1 AND restore_until IS NOT NULL AND ($2 IS NULL OR owner = $2)
         ORDER BY ended_at DESC, id DESC LIMIT $4 OFFSET $3",
    );
    let free = i64::try_from(free).unwrap_or(i64::MAX);
    let excess = excess.bind(workspace).bind(owner).bind(free - 1).bind(i64::from(u32::MAX)).fetch_all(&mut *tx).await?;
    let ids = excess.iter().map(|row| row.try_get::<&str, _>("id")).collect::<Result<std::collections::BTreeSet<_>, _>>()?;
    lock::sandboxes(tx, ids.clone()).await?;
    for id in ids {
        sqlx::query(
            "UPDATE sandboxes SET intent = 'destroy', restore_until = NULL, reason = 'it was deleted, and made room for another sandbox'
             WHERE id = $1 AND restore_until IS NOT NULL",
        )
        .bind(id)
        .execute(&mut *tx)
        .await?;
        hint::send(tx, &Hint::Sandbox(id.parse().map_err(|_| super::rows::corrupt("id", id))?)).await?;
    }
    Ok(true)
}
