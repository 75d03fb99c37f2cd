//! Sandbox rows: state and intent are only changed if they are still what the writer last read.

use cobox_protocol::{
    SandboxId,
    event::EventKind,
    session::{Access, State},
    tags::{TagFilter, Tags},
};
use sqlx::{AnyConnection, AssertSqlSafe};

use super::{
    asked, audit_records, deleted, events, lock, notify, resources, rows, sessions,
    tags::{self, TagOwner},
};
use crate::{
    domain::model::{AuditRecord, Event, OldKeys, Sandbox},
    policy::Quota,
    store::{
        AddedSandbox, ChangeNotice, ChangedSandbox, DueTimes, Ending, PageParams, Rotated, Rotation, SandboxChange, Store, Stored, Viewer,
    },
};

pub async fn add(tx: &mut AnyConnection, sandbox: &Sandbox, tags: &Tags, quota: &Quota, audit: &AuditRecord) -> Stored<AddedSandbox> {
    lock::workspace(tx, &sandbox.workspace).await?;
    if let Some(name) = &sandbox.name
        && let Some(taken) = named(tx, &sandbox.workspace, name).await?
    {
        return Ok(AddedSandbox::NameTaken(taken.id));
    }
    if let Some(missing) = resources::missing(tx, &sandbox.spec).await? {
        return Ok(AddedSandbox::SpecPartMissing(missing));
    }
    if let Some(reached) = deleted::make_room(tx, sandbox, quota, audit).await? {
        return Ok(AddedSandbox::QuotaReached(reached));
    }
    insert(tx, sandbox).await?;
    tags::set(tx, TagOwner::Sandbox, &sandbox.workspace, sandbox.id.as_str(), tags).await?;
    audit_records::add(tx, audit).await?;
    Ok(AddedSandbox::Added)
}

/// The caller must only commit if the sandbox was changed.
pub async fn change(tx: &mut AnyConnection, id: &SandboxId, change: &SandboxChange, audit: &AuditRecord) -> Stored<ChangedSandbox> {
    let Some(sandbox) = locked(tx, id).await?.filter(|s| s.ended_at.is_none()) else { return Ok(ChangedSandbox::Gone) };
    if let Some(Some(name)) = &change.name
        && let Some(other) = named(tx, &sandbox.workspace, name).await?.filter(|other| other.id != *id)
    {
        return Ok(ChangedSandbox::NameTaken(other.id));
    }
    let access = change.access.unwrap_or(sandbox.access);
    // Principals that lose access may hold tokens; the next key ends them.
    let is_closed = sandbox.access == Access::Workspace && access == Access::Owner;
    let changed = Sandbox {
        generation: if is_closed { sandbox.generation + 1 } else { sandbox.generation },
        old_keys: sandbox.old_keys.filter(|_| !is_closed),
        name: change.name.clone().unwrap_or(sandbox.name),
        is_kept: change.is_kept.unwrap_or(sandbox.is_kept),
        own_lease: change.own_lease.unwrap_or(sandbox.own_lease),
        own_keep: change.own_keep.unwrap_or(sandbox.own_keep),
        access,
        ..sandbox
    };
    sqlx::query(
        "UPDATE sandboxes SET name = $2, kept = $3, access = $4, generation = $5, old_keys_from = $6, old_keys_until = $7,
                              lease_seconds = $8, keep_suspended_seconds = $9 WHERE id = $1",
    )
    .bind(id.as_str())
    .bind(changed.name.as_deref())
    .bind(i64::from(changed.is_kept))
    .bind(rows::access_as_str(changed.access))
    .bind(i64::from(changed.generation))
    .bind(changed.old_keys.map(|old| i64::from(old.from)))
    .bind(changed.old_keys.map(|old| old.until.unix()))
    .bind(changed.own_lease.map(rows::stored_seconds))
    .bind(changed.own_keep.map(rows::stored_seconds))
    .execute(&mut *tx)
    .await?;
    if is_closed {
        notify::send(tx, &ChangeNotice::Sandbox(id.clone())).await?;
    }
    for key in &change.remove_tags {
        tags::remove(tx, TagOwner::Sandbox, id.as_str(), key).await?;
    }
    if !change.set_tags.is_empty() {
        tags::set(tx, TagOwner::Sandbox, &changed.workspace, id.as_str(), &change.set_tags).await?;
        let count = tags::of(tx, TagOwner::Sandbox, &[id.as_str()]).await?.remove(id.as_str()).map_or(0, |t| t.len());
        if count > change.max_tags {
            return Ok(ChangedSandbox::TooManyTags(count));
        }
    }
    let what = EventKind::Changed { change: audit.detail.clone().unwrap_or_default() };
    events::append(tx, &[Event::of_sandbox(audit.at, &changed, what).by(audit)]).await?;
    audit_records::add(tx, audit).await?;
    Ok(ChangedSandbox::Changed(Box::new(changed)))
}

pub async fn insert(tx: &mut AnyConnection, s: &Sandbox) -> Stored<()> {
    sqlx::query(
        "INSERT INTO sandboxes (id, workspace_id, name, owner, access, provider, node_id, generation, state, intent, reason, kept,
                                created_at, last_active_at, running_since, active_seconds, suspended_at, ended_at, owner_kind,
                                making, template, pool_id, lease_seconds, keep_suspended_seconds)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24)",
    )
    .bind(s.id.as_str())
    .bind(&s.workspace)
    .bind(s.name.as_deref())
    .bind(&s.owner)
    .bind(rows::access_as_str(s.access))
    .bind(&s.provider)
    .bind(&s.node)
    .bind(i64::from(s.generation))
    .bind(s.state.as_str())
    .bind(s.intent.map(|i| i.as_str()))
    .bind(s.reason.as_deref())
    .bind(i64::from(s.is_kept))
    .bind(s.created_at.unix())
    .bind(s.last_active_at.unix())
    .bind(s.counted_until.map(|t| t.unix()))
    .bind(rows::stored_seconds(s.active))
    .bind(s.suspended_at.map(|t| t.unix()))
    .bind(s.ended_at.map(|t| t.unix()))
    .bind(s.owner_kind.as_str())
    .bind(rows::encoded_spec(&s.spec)?)
    .bind(s.template.as_deref())
    .bind(s.pool.as_ref().map(|p| p.as_str()))
    .bind(s.own_lease.map(rows::stored_seconds))
    .bind(s.own_keep.map(rows::stored_seconds))
    .execute(&mut *tx)
    .await?;
    if s.spec.layers.is_empty() && s.spec.mounts.is_empty() {
        return Ok(());
    }
    // Another node may have to create it: the one with its files.
    notify::send(tx, &ChangeNotice::Sandbox(s.id.clone())).await
}

pub async fn get(db: &mut AnyConnection, id: &SandboxId) -> Stored<Option<Sandbox>> {
    sqlx::query("SELECT * FROM sandboxes WHERE id = $1")
        .bind(id.as_str())
        .fetch_optional(db)
        .await?
        .map(|row| rows::sandbox(&row))
        .transpose()
}

pub async fn named(db: &mut AnyConnection, workspace: &str, name: &str) -> Stored<Option<Sandbox>> {
    sqlx::query("SELECT * FROM sandboxes WHERE workspace_id = $1 AND name = $2 AND ended_at IS NULL")
        .bind(workspace)
        .bind(name)
        .fetch_optional(db)
        .await?
        .map(|row| rows::sandbox(&row))
        .transpose()
}

pub async fn last_ended_with_name(db: &mut AnyConnection, workspace: &str, name: &str) -> Stored<Option<Sandbox>> {
    let found =
        sqlx::query("SELECT * FROM sandboxes WHERE workspace_id = $1 AND name = $2 AND ended_at IS NOT NULL ORDER BY id DESC LIMIT 1");
    found.bind(workspace).bind(name).fetch_optional(db).await?.map(|row| rows::sandbox(&row)).transpose()
}

pub async fn least_used(db: &mut AnyConnection, workspace: &str, owner: &str, limit: u32) -> Stored<Vec<Sandbox>> {
    let found = sqlx::query(
        "SELECT * FROM sandboxes WHERE workspace_id = $1 AND owner = $2 AND ended_at IS NULL AND pool_id IS NULL
         ORDER BY last_active_at, id LIMIT $3",
    );
    let found = found.bind(workspace).bind(owner).bind(i64::from(limit)).fetch_all(db).await?;
    found.iter().map(rows::sandbox).collect()
}

pub async fn list(db: &mut AnyConnection, viewer: &Viewer, filters: &[TagFilter], page: &PageParams) -> Stored<Vec<Sandbox>> {
    let sql = format!(
        "SELECT * FROM sandboxes
         WHERE workspace_id = $1 AND ended_at IS NULL AND pool_id IS NULL AND ($2 OR access = 'workspace' OR owner = $3) AND ($4 IS NULL OR id < $4){}
         ORDER BY id DESC LIMIT $5",
        tags::conditions(TagOwner::Sandbox, filters, 6)
    );
    let query = sqlx::query(AssertSqlSafe(sql))
        .bind(&viewer.workspace)
        .bind(viewer.sees_all)
        .bind(&viewer.principal)
        .bind(page.before.as_deref())
        .bind(i64::from(page.limit));
    tags::bind(query, filters).fetch_all(db).await?.iter().map(rows::sandbox).collect()
}

pub async fn of_node(db: &mut AnyConnection, node: &str) -> Stored<Vec<Sandbox>> {
    sqlx::query(
        "SELECT * FROM sandboxes WHERE node_id = $1 AND (ended_at IS NULL OR intent IS NOT NULL)
         UNION ALL
         SELECT * FROM sandboxes WHERE node_id = $1 AND restore_until IS NOT NULL AND ended_at IS NOT NULL AND intent IS NULL
         ORDER BY id",
    )
    .bind(node)
    .fetch_all(db)
    .await?
    .iter()
    .map(rows::sandbox)
    .collect()
}

pub async fn due(db: &mut AnyConnection, node: &str, by: DueTimes) -> Stored<Vec<Sandbox>> {
    // Four selects, each with an index of its own: nearly all sandboxes of a node may be suspended ones that are not
    // due.
    sqlx::query(
        "SELECT * FROM sandboxes WHERE node_id = $1 AND (state IN ('active', 'idle') OR intent IS NOT NULL)
         UNION ALL
         SELECT * FROM sandboxes WHERE node_id = $1 AND state = 'suspended' AND intent IS NULL AND suspended_at + downtime_seconds <= $2
         UNION ALL
         SELECT * FROM sandboxes WHERE node_id = $1 AND state = 'suspended' AND keep_suspended_seconds IS NOT NULL AND intent IS NULL
                                   AND suspended_at + downtime_seconds > $2 AND suspended_at + downtime_seconds <= $3 - keep_suspended_seconds
         UNION ALL
         SELECT * FROM sandboxes WHERE node_id = $1 AND restore_until IS NOT NULL AND restore_until <= $4 AND intent IS NULL",
    )
    .bind(node)
    .bind(by.suspended.unix())
    .bind(by.now.unix())
    .bind(by.restorable.unix())
    .fetch_all(db)
    .await?
    .iter()
    .map(rows::sandbox)
    .collect()
}

pub async fn running_in(db: &mut AnyConnection, workspace: &str, node: &str) -> Stored<Vec<SandboxId>> {
    sqlx::query(
        "SELECT id FROM sandboxes
         WHERE node_id = $2 AND (state IN ('active', 'idle') OR intent IS NOT NULL) AND workspace_id = $1 AND state IN ('active', 'idle')",
    )
    .bind(workspace)
    .bind(node)
    .fetch_all(db)
    .await?
    .iter()
    .map(|row| rows::parsed(row, "id"))
    .collect()
}

pub async fn any(db: &mut AnyConnection, node: Option<&str>) -> Stored<bool> {
    let found = sqlx::query("SELECT id FROM sandboxes WHERE $1 IS NULL OR node_id = $1 LIMIT 1").bind(node).fetch_optional(db).await?;
    Ok(found.is_some())
}

/// Updates only the fields that change in a sandbox's life, and only if state and intent were not changed concurrently.
/// While it keeps running, its running time is left to `count_running`, which may have written since `old` was read;
/// downtime is left to `running_time` in the same way.
pub async fn replace(tx: &mut AnyConnection, old: &Sandbox, new: &Sandbox) -> Stored<bool> {
    let event = events::of_change(old, new);
    if event.is_some() {
        lock::workspace(tx, &new.workspace).await?;
    }
    let done = sqlx::query(
        "UPDATE sandboxes SET state = $2, intent = $3, reason = $4, suspended_at = $8, ended_at = $9,
                              downtime_seconds = CASE WHEN suspended_at IS NOT DISTINCT FROM $8 THEN downtime_seconds ELSE 0 END,
                              restore_until = CASE WHEN restore_until IS NOT NULL AND $12 IS NOT NULL THEN restore_until ELSE $12 END,
                              last_active_at = CASE WHEN last_active_at < $5 THEN $5 ELSE last_active_at END,
                              active_seconds = CASE WHEN running_since IS NOT NULL AND $6 IS NOT NULL THEN active_seconds ELSE $7 END,
                              running_since = CASE WHEN running_since IS NOT NULL AND $6 IS NOT NULL THEN running_since ELSE $6 END
         WHERE id = $1 AND state = $10 AND intent IS NOT DISTINCT FROM $11",
    )
    .bind(new.id.as_str())
    .bind(new.state.as_str())
    .bind(new.intent.map(|i| i.as_str()))
    .bind(new.reason.as_deref())
    .bind(new.last_active_at.unix())
    .bind(new.counted_until.map(|t| t.unix()))
    .bind(rows::stored_seconds(new.active))
    .bind(new.suspended_at.map(|t| t.unix()))
    .bind(new.ended_at.map(|t| t.unix()))
    .bind(old.state.as_str())
    .bind(old.intent.map(|i| i.as_str()))
    .bind(new.restore_until.map(|t| t.unix()))
    .execute(&mut *tx)
    .await?;
    let is_replaced = done.rows_affected() == 1;
    if is_replaced {
        events::append(tx, event.as_slice()).await?;
        notify::send(tx, &ChangeNotice::Sandbox(new.id.clone())).await?;
    }
    Ok(is_replaced)
}

/// Moves to the next generation of its token key. Only one old key at a time: all old keys share one end, so another
/// rotation would postpone it.
pub async fn rotate(tx: &mut AnyConnection, id: &SandboxId, rotation: &Rotation, audit: &AuditRecord) -> Stored<Rotated> {
    let Some(sandbox) = locked(tx, id).await?.filter(|s| s.ended_at.is_none()) else { return Ok(Rotated::Gone) };
    if let (Some(_), Some(old)) = (rotation.old_until, sandbox.old_keys.filter(|old| rotation.now < old.until)) {
        return Ok(Rotated::TooSoon(old.until));
    }
    let old_keys = rotation.old_until.map(|until| OldKeys { from: sandbox.generation, until });
    let generation = sandbox.generation + 1;
    sqlx::query("UPDATE sandboxes SET generation = $2, old_keys_from = $3, old_keys_until = $4 WHERE id = $1")
        .bind(id.as_str())
        .bind(i64::from(generation))
        .bind(old_keys.map(|old| i64::from(old.from)))
        .bind(old_keys.map(|old| old.until.unix()))
        .execute(&mut *tx)
        .await?;
    audit_records::add(tx, audit).await?;
    notify::send(tx, &ChangeNotice::Sandbox(id.clone())).await?;
    Ok(Rotated::Rotated(Box::new(Sandbox { generation, old_keys, ..sandbox })))
}

/// Under the same locks as binding a session: a session's hard end counts from the running time it read.
pub async fn renew(tx: &mut AnyConnection, id: &SandboxId) -> Stored<()> {
    locked(tx, id).await?;
    sqlx::query(
        "UPDATE sandboxes SET active_seconds = 0
         WHERE id = $1 AND state = 'suspended' AND NOT EXISTS (SELECT 1 FROM sessions WHERE sandbox_id = $1 AND ended_at IS NULL)",
    )
    .bind(id.as_str())
    .execute(tx)
    .await?;
    Ok(())
}

pub async fn end(tx: &mut AnyConnection, id: &SandboxId, state: State, ending: &Ending) -> Stored<Option<Sandbox>> {
    let Some(sandbox) = locked(tx, id).await?.filter(|s| s.ended_at.is_none()) else { return Ok(None) };
    for session in sessions::on_sandbox(tx, id).await? {
        sessions::close(tx, &session, state, ending).await?;
        // A retry of a request whose sandbox failed must be able to create another.
        sqlx::query("DELETE FROM idempotency WHERE session_id = $1").bind(session.id.as_str()).execute(&mut *tx).await?;
    }
    let ended = mark_ended(tx, &sandbox, state, ending).await?;
    audit_records::add(tx, &ending.audit).await?;
    Ok(Some(ended))
}

pub async fn end_unbound(tx: &mut AnyConnection, id: &SandboxId, ending: &Ending) -> Stored<Option<Sandbox>> {
    // Binding a session takes the same locks.
    let Some(_) = locked(tx, id).await? else { return Ok(None) };
    if !sessions::on_sandbox(tx, id).await?.is_empty() {
        return Ok(None);
    }
    end(tx, id, State::Terminated, ending).await
}

/// Reads a sandbox and locks it and its workspace until the transaction ends.
pub async fn locked(tx: &mut AnyConnection, id: &SandboxId) -> Stored<Option<Sandbox>> {
    let Some(found) = get(tx, id).await? else { return Ok(None) };
    lock::workspace(tx, &found.workspace).await?;
    lock::sandbox(tx, id).await?;
    get(tx, id).await
}

/// An operation in progress loses: when it settles, it finds another state and intent. The caller holds the sandbox's
/// lock.
pub async fn mark_ended(tx: &mut AnyConnection, sandbox: &Sandbox, state: State, ending: &Ending) -> Stored<Sandbox> {
    use crate::domain::model::Intent;
    let is_restorable = state == State::Terminated && sandbox.pool.is_none() && !ending.keep_files.is_zero();
    // A sandbox that never ran has no files.
    let has_files = is_restorable && (sandbox.is_running() || sandbox.state == State::Suspended);
    let ended = Sandbox {
        state,
        intent: Some(Intent::Destroy),
        reason: Some(ending.reason.clone()),
        active: sandbox.active_until(ending.now),
        counted_until: None,
        ended_at: Some(ending.now),
        restore_until: has_files.then(|| ending.now.plus(ending.keep_files)),
        ..sandbox.clone()
    };
    replace(tx, sandbox, &ended).await?;
    Ok(ended)
}

impl Store {
    pub async fn add_sandbox(&self, sandbox: &Sandbox, tags: &Tags, quota: &Quota, audit: &AuditRecord) -> Stored<AddedSandbox> {
        let mut tx = self.base.begin().await?;
        let added = add(&mut tx, sandbox, tags, quota, audit).await?;
        self.base.commit(tx).await?;
        Ok(added)
    }

    /// If access changes to owner-only, the sandbox gets its next key, which ends all its tokens.
    pub async fn change_sandbox(&self, id: &SandboxId, change: &SandboxChange, audit: &AuditRecord) -> Stored<ChangedSandbox> {
        let mut tx = self.base.begin().await?;
        let changed = self::change(&mut tx, id, change, audit).await?;
        if matches!(changed, ChangedSandbox::Changed(_)) {
            self.base.commit_with_event(tx, id).await?;
        }
        Ok(changed)
    }

    /// A sandbox, ended or not.
    pub async fn sandbox(&self, id: &SandboxId) -> Stored<Option<Sandbox>> {
        let ask = async { asked!(self, db => get(db, id)) };
        self.known(&self.known_sandboxes, id.clone(), 0, ask).await
    }

    /// A live sandbox.
    pub async fn sandbox_named(&self, workspace: &str, name: &str) -> Stored<Option<Sandbox>> {
        asked!(self, db => named(db, workspace, name))
    }

    /// Of the ended sandboxes that had the name, the one that ended last.
    pub async fn sandbox_once_named(&self, workspace: &str, name: &str) -> Stored<Option<Sandbox>> {
        asked!(self, db => last_ended_with_name(db, workspace, name))
    }

    /// The live sandboxes that have all these tags, or are used by a session that has them.
    pub async fn sandboxes(&self, viewer: &Viewer, tags: &[TagFilter], page: &PageParams) -> Stored<Vec<Sandbox>> {
        asked!(self, db => list(db, viewer, tags, page))
    }

    /// An owner's live sandboxes, the least recently used first.
    pub async fn least_used(&self, workspace: &str, owner: &str, limit: u32) -> Stored<Vec<Sandbox>> {
        asked!(self, db => least_used(db, workspace, owner, limit))
    }

    /// All sandboxes of a node that are live, can be restored, or have unfinished work.
    pub async fn sandboxes_of_node(&self, node: &str) -> Stored<Vec<Sandbox>> {
        asked!(self, db => of_node(db, node))
    }

    /// Sandboxes of a node that the reaper must check: they run, have unfinished work, or were suspended or deleted for
    /// longer than they are kept.
    pub async fn sandboxes_due(&self, node: &str, by: DueTimes) -> Stored<Vec<Sandbox>> {
        asked!(self, db => due(db, node, by))
    }

    /// Running sandboxes of a workspace on a node, which must receive its revocations.
    pub async fn running_in(&self, workspace: &str, node: &str) -> Stored<Vec<SandboxId>> {
        asked!(self, db => running_in(db, workspace, node))
    }

    /// Whether there is any record of a sandbox (of a node), ended ones included: whether this store has been in use.
    pub async fn has_sandboxes(&self, node: Option<&str>) -> Stored<bool> {
        asked!(self, db => any(db, node))
    }

    /// Replaces `old` by `new` if state and intent are still those of `old`; returns whether they were. The last use only
    /// moves forward.
    pub async fn replace_sandbox(&self, old: &Sandbox, new: &Sandbox, audit: Option<&AuditRecord>) -> Stored<bool> {
        let mut tx = self.base.begin_unsynced().await?;
        let is_replaced = replace(&mut tx, old, new).await?;
        if let (true, Some(audit)) = (is_replaced, audit) {
            audit_records::add(&mut tx, audit).await?;
        }
        self.base.commit_with_event(tx, &new.id).await?;
        Ok(is_replaced)
    }

    /// Resets a suspended sandbox's running time, unless a session is bound to it.
    pub async fn renew_sandbox(&self, id: &SandboxId) -> Stored<()> {
        let mut tx = self.base.begin().await?;
        renew(&mut tx, id).await?;
        self.base.commit(tx).await
    }

    /// Ends a sandbox (`terminated` or `failed`) with its sessions, and stores the intent to destroy it. `None` when it
    /// has ended already.
    pub async fn end_sandbox(&self, id: &SandboxId, state: State, ending: &Ending) -> Stored<Option<Sandbox>> {
        let mut tx = self.base.begin().await?;
        let ended = end(&mut tx, id, state, ending).await?;
        self.base.commit_with_event(tx, id).await?;
        Ok(ended)
    }

    /// As [`Store::end_sandbox`], unless a session is bound to it.
    pub async fn end_unbound_sandbox(&self, id: &SandboxId, ending: &Ending) -> Stored<Option<Sandbox>> {
        let mut tx = self.base.begin().await?;
        let ended = end_unbound(&mut tx, id, ending).await?;
        self.base.commit_with_event(tx, id).await?;
        Ok(ended)
    }

    pub async fn rotate_key(&self, id: &SandboxId, rotation: &Rotation, audit: &AuditRecord) -> Stored<Rotated> {
        let mut tx = self.base.begin().await?;
        let rotated = rotate(&mut tx, id, rotation, audit).await?;
        self.base.commit(tx).await?;
        Ok(rotated)
    }
}
