//! Deleted sandboxes whose files are still kept: they can be restored, count against the quotas, and are evicted for new
//! ones of their owner.

use cobox_protocol::{SandboxId, Timestamp, event::EventKind, session::State};
use sqlx::{AnyConnection, Row};

use super::{
    asked, audit_records, events, lock, notify, resources, rows,
    sandboxes::{locked, named},
};
use crate::{
    domain::model::{AuditRecord, Event, SANDBOX_RESTORED, Sandbox},
    policy::Quota,
    store::{ChangeNotice, PageParams, QuotaReached, QuotaSubject, RestoredSandbox, Store, Stored, Viewer},
};

pub async fn list(db: &mut AnyConnection, viewer: &Viewer, now: Timestamp, page: &PageParams) -> Stored<Vec<Sandbox>> {
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
    if let Some(missing) = resources::missing(tx, &deleted.spec).await? {
        return Ok(RestoredSandbox::SpecPartMissing(missing));
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
    audit_records::add(tx, audit).await?;
    notify::send(tx, &ChangeNotice::Sandbox(id.clone())).await?;
    Ok(RestoredSandbox::Restored(Box::new(restored)))
}

/// Makes room for a new sandbox, or returns the limit that it would exceed. Deleted sandboxes whose files are kept count against the
/// limits. Only those of the new sandbox's owner are evicted, oldest first: one user must not be able to erase what another may want to
/// restore. Nothing is evicted unless the new sandbox then fits. The caller holds the workspace's lock.
pub async fn make_room(tx: &mut AnyConnection, fresh: &Sandbox, quota: &Quota, audit: &AuditRecord) -> Stored<Option<QuotaReached>> {
    let now = fresh.created_at;
    let mut excess = 0;
    for (by, limit) in [(QuotaSubject::Workspace, Some(quota.of_workspace)), (QuotaSubject::Owner, quota.of_owner)] {
        let Some(limit) = limit else { continue };
        let owner = matches!(by, QuotaSubject::Owner).then_some(fresh.owner.as_str());
        let living = self::living(tx, &fresh.workspace, owner, limit).await?;
        if living >= u64::from(limit) {
            return Ok(Some(QuotaReached { by, deleted: 0 }));
        }
        let deleted = self::deleted(tx, &fresh.workspace, owner, now).await?;
        let too_many = (living + deleted + 1).saturating_sub(u64::from(limit));
        let own = self::deleted(tx, &fresh.workspace, Some(&fresh.owner), now).await?;
        if too_many > own {
            return Ok(Some(QuotaReached { by, deleted }));
        }
        excess = excess.max(too_many);
    }
    if excess > 0 {
        evict(tx, fresh, excess, audit).await?;
    }
    Ok(None)
}

/// Counts live sandboxes, up to the limit.
async fn living(tx: &mut AnyConnection, workspace: &str, owner: Option<&str>, limit: u32) -> Stored<u64> {
    let counted = sqlx::query(
        "SELECT count(*) AS n FROM
         (SELECT id FROM sandboxes WHERE workspace_id = $1 AND ended_at IS NULL AND ($2 IS NULL OR owner = $2) LIMIT $3) AS living",
    );
    rows::count(&counted.bind(workspace).bind(owner).bind(i64::from(limit)).fetch_one(tx).await?, "n")
}

/// Counts deleted sandboxes that can be restored. Expired ones don't count: their node removes the files in its next
/// round.
async fn deleted(tx: &mut AnyConnection, workspace: &str, owner: Option<&str>, now: Timestamp) -> Stored<u64> {
    let counted = sqlx::query(
        "SELECT count(*) AS n FROM sandboxes
         WHERE workspace_id = $1 AND restore_until IS NOT NULL AND restore_until > $3 AND ($2 IS NULL OR owner = $2)",
    );
    rows::count(&counted.bind(workspace).bind(owner).bind(now.unix()).fetch_one(tx).await?, "n")
}

/// Evicts the owner's oldest deleted sandboxes.
async fn evict(tx: &mut AnyConnection, fresh: &Sandbox, count: u64, audit: &AuditRecord) -> Stored<()> {
    const REASON: &str = "it was deleted, and made room for another sandbox of its owner";
    let oldest = sqlx::query(
        "SELECT id FROM sandboxes WHERE workspace_id = $1 AND owner = $2 AND restore_until IS NOT NULL AND restore_until > $3
         ORDER BY ended_at, id LIMIT $4",
    );
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    let oldest = oldest.bind(&fresh.workspace).bind(&fresh.owner).bind(fresh.created_at.unix()).bind(count).fetch_all(&mut *tx).await?;
    let ids = oldest.iter().map(|row| row.try_get::<&str, _>("id")).collect::<Result<std::collections::BTreeSet<_>, _>>()?;
    lock::sandboxes(tx, ids.clone()).await?;
    for id in ids {
        let done = sqlx::query(
            "UPDATE sandboxes SET intent = 'destroy', restore_until = NULL, reason = $2 WHERE id = $1 AND restore_until IS NOT NULL",
        );
        if done.bind(id).bind(REASON).execute(&mut *tx).await?.rows_affected() == 0 {
            continue;
        }
        let id: SandboxId = id.parse().map_err(|_| rows::corrupt("id", id))?;
        let AuditRecord { at, workspace, request_id, principal, actor, .. } = audit.clone();
        let purged =
            AuditRecord { request_id, principal, actor, sandbox: Some(id.clone()), ..AuditRecord::new(at, &workspace, "sandbox.purged") };
        audit_records::add(tx, &purged.detail(REASON)).await?;
        notify::send(tx, &ChangeNotice::Sandbox(id)).await?;
    }
    Ok(())
}

impl Store {
    /// Deleted sandboxes whose files are still kept, newest first.
    pub async fn deleted_sandboxes(&self, viewer: &Viewer, now: Timestamp, page: &PageParams) -> Stored<Vec<Sandbox>> {
        asked!(self, db => list(db, viewer, now, page))
    }

    /// Makes a deleted sandbox a suspended one again, under `name`, with a new key: tokens from before the deletion stay
    /// invalid.
    pub async fn restore_sandbox(
        &self,
        id: &SandboxId,
        name: Option<&str>,
        now: Timestamp,
        audit: &AuditRecord,
    ) -> Stored<RestoredSandbox> {
        let mut tx = self.base.begin().await?;
        let restored = restore(&mut tx, id, name, now, audit).await?;
        if matches!(restored, RestoredSandbox::Restored(_)) {
            self.base.commit_with_event(tx, id).await?;
        }
        Ok(restored)
    }
}
