//! Pools, and the standby sandboxes in them, each of which is taken once.

use cobox_protocol::{PoolId, key::PrincipalKind, tags::Tags};
use sqlx::{AnyConnection, Row, any::AnyRow};

use super::{
    asked, audit_records, deleted, lock, notify, resources, rows, sandboxes,
    tags::{self, TagOwner},
};
use crate::{
    domain::{
        model::{AuditRecord, Sandbox},
        resources::{
            pools::MAX_REPLICAS,
            records::{Pool, PoolTrouble},
        },
    },
    policy::Quota,
    store::{AddedPoolMember, AddedResource, ChangeNotice, ChangedResource, PoolAssignment, Store, Stored},
};

pub async fn add(tx: &mut AnyConnection, pool: &Pool, most: u32, audit: &AuditRecord) -> Stored<AddedResource> {
    lock::workspace(tx, &pool.workspace).await?;
    if get(tx, &pool.workspace, &pool.name).await?.is_some() {
        return Ok(AddedResource::NameTaken);
    }
    if resources::count(tx, "SELECT count(*) AS n FROM pools WHERE workspace_id = $1", &pool.workspace).await? >= u64::from(most) {
        return Ok(AddedResource::TooMany);
    }
    sqlx::query(
        "INSERT INTO pools (id, workspace_id, name, template, owner, owner_kind, replicas, created_at, updated_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
    )
    .bind(pool.id.as_str())
    .bind(&pool.workspace)
    .bind(&pool.name)
    .bind(&pool.template)
    .bind(&pool.owner)
    .bind(pool.owner_kind.as_str())
    .bind(i64::from(pool.replicas))
    .bind(pool.created_at.unix())
    .bind(pool.updated_at.unix())
    .execute(&mut *tx)
    .await?;
    audit_records::add(tx, audit).await?;
    Ok(AddedResource::Added)
}

pub async fn get(db: &mut AnyConnection, workspace: &str, name: &str) -> Stored<Option<Pool>> {
    let row =
        sqlx::query("SELECT * FROM pools WHERE workspace_id = $1 AND name = $2").bind(workspace).bind(name).fetch_optional(db).await?;
    row.as_ref().map(pool).transpose()
}

pub async fn by_id(db: &mut AnyConnection, id: &PoolId) -> Stored<Option<Pool>> {
    let row = sqlx::query("SELECT * FROM pools WHERE id = $1").bind(id.as_str()).fetch_optional(db).await?;
    row.as_ref().map(pool).transpose()
}

/// Concurrent failures count once.
pub async fn note_trouble(tx: &mut AnyConnection, seen: &Pool, trouble: &PoolTrouble) -> Stored<bool> {
    let done = sqlx::query("UPDATE pools SET failures = $2, retry_at = $3, reason = $4 WHERE id = $1 AND failures = $5")
        .bind(seen.id.as_str())
        .bind(i64::from(trouble.failures))
        .bind(trouble.retry_at.map(|t| t.unix()))
        .bind(trouble.reason.as_deref())
        .bind(i64::from(seen.trouble.failures))
        .execute(tx)
        .await?;
    Ok(done.rows_affected() == 1)
}

pub async fn list(db: &mut AnyConnection, workspace: Option<&str>) -> Stored<Vec<Pool>> {
    let found = sqlx::query("SELECT * FROM pools WHERE $1 IS NULL OR workspace_id = $1 ORDER BY workspace_id, name");
    found.bind(workspace).fetch_all(db).await?.iter().map(pool).collect()
}

pub async fn change(tx: &mut AnyConnection, old: &Pool, new: &Pool, audit: &AuditRecord) -> Stored<ChangedResource> {
    lock::workspace(tx, &old.workspace).await?;
    if get(tx, &old.workspace, &new.name).await?.is_some_and(|other| other.id != old.id) {
        return Ok(ChangedResource::NameTaken);
    }
    let done = sqlx::query(
        "UPDATE pools SET name = $2, replicas = $3, updated_at = $4, failures = 0, retry_at = NULL, reason = NULL WHERE id = $1",
    )
    .bind(old.id.as_str())
    .bind(&new.name)
    .bind(i64::from(new.replicas))
    .bind(new.updated_at.unix())
    .execute(&mut *tx)
    .await?;
    if done.rows_affected() == 0 {
        return Ok(ChangedResource::Gone);
    }
    audit_records::add(tx, audit).await?;
    Ok(ChangedResource::Changed)
}

pub async fn remove(tx: &mut AnyConnection, pool: &Pool, audit: &AuditRecord) -> Stored<bool> {
    lock::workspace(tx, &pool.workspace).await?;
    let done = sqlx::query("DELETE FROM pools WHERE id = $1").bind(pool.id.as_str()).execute(&mut *tx).await?;
    if done.rows_affected() == 1 {
        audit_records::add(tx, audit).await?;
    }
    Ok(done.rows_affected() == 1)
}

pub async fn members(db: &mut AnyConnection, id: &PoolId) -> Stored<Vec<Sandbox>> {
    let found = sqlx::query("SELECT * FROM sandboxes WHERE pool_id = $1 AND ended_at IS NULL ORDER BY id").bind(id.as_str()).fetch_all(db);
    found.await?.iter().map(rows::sandbox).collect()
}

pub async fn members_of_deleted_pools(db: &mut AnyConnection) -> Stored<Vec<Sandbox>> {
    let found = sqlx::query(
        "SELECT * FROM sandboxes WHERE pool_id IS NOT NULL AND ended_at IS NULL AND pool_id NOT IN (SELECT id FROM pools) ORDER BY id",
    );
    found.fetch_all(db).await?.iter().map(rows::sandbox).collect()
}

pub async fn leave(tx: &mut AnyConnection, member: &Sandbox) -> Stored<bool> {
    lock::workspace(tx, &member.workspace).await?;
    let done = sqlx::query("UPDATE sandboxes SET pool_id = NULL WHERE id = $1 AND pool_id = $2")
        .bind(member.id.as_str())
        .bind(member.pool.as_ref().map(|p| p.as_str()))
        .execute(tx)
        .await?;
    Ok(done.rows_affected() == 1)
}

pub async fn add_member(tx: &mut AnyConnection, sandbox: &Sandbox, quota: &Quota, audit: &AuditRecord) -> Stored<AddedPoolMember> {
    let Some(id) = &sandbox.pool else { return Ok(AddedPoolMember::NotWanted) };
    lock::workspace(tx, &sandbox.workspace).await?;
    let row = sqlx::query("SELECT replicas FROM pools WHERE id = $1").bind(id.as_str()).fetch_optional(&mut *tx).await?;
    let wanted = row.map(|row| rows::count(&row, "replicas")).transpose()?.unwrap_or(0);
    if members(tx, id).await?.len() as u64 >= wanted {
        return Ok(AddedPoolMember::NotWanted);
    }
    if let Some(missing) = resources::missing(tx, &sandbox.spec).await? {
        return Ok(AddedPoolMember::SpecPartMissing(missing));
    }
    if let Some(reached) = deleted::make_room(tx, sandbox, quota, audit).await? {
        return Ok(AddedPoolMember::QuotaReached(reached));
    }
    sandboxes::insert(tx, sandbox).await?;
    audit_records::add(tx, audit).await?;
    Ok(AddedPoolMember::Added)
}

/// Gives a standby member the owner and the name of the sandbox to be created. `None` when none is available, or when the
/// new owner has reached a limit: the creation of a new sandbox reports the latter. The caller holds the workspace's
/// lock.
pub async fn take(
    tx: &mut AnyConnection,
    taking: &PoolAssignment,
    fresh: &Sandbox,
    quota: &Quota,
    audit: &AuditRecord,
) -> Stored<Option<Sandbox>> {
    let found = sqlx::query(
        "SELECT * FROM sandboxes
         WHERE pool_id = $1 AND state IN ('active', 'idle') AND intent IS NULL AND ended_at IS NULL
           AND (node_id = $2 OR node_id IN (SELECT id FROM nodes WHERE seen_at >= $3))
         ORDER BY CASE WHEN node_id = $2 THEN 0 ELSE 1 END, id LIMIT $4",
    )
    .bind(taking.pool.as_str())
    .bind(&fresh.node)
    .bind(taking.alive_since.unix())
    .bind(i64::from(MAX_REPLICAS))
    .fetch_all(&mut *tx)
    .await?;
    let mut suitable = None;
    for row in &found {
        let member = rows::sandbox(row)?;
        if fresh.spec.is_equivalent_to(&member.spec, member.node == fresh.node) {
            suitable = Some(member);
            break;
        }
    }
    let Some(found) = suitable else { return Ok(None) };
    // The member already counts for the workspace, but not for its new owner.
    let quota = Quota { of_workspace: u32::MAX, of_owner: quota.of_owner };
    if deleted::make_room(tx, fresh, &quota, audit).await?.is_some() {
        return Ok(None);
    }
    let done = sqlx::query(
        "UPDATE sandboxes SET pool_id = NULL, name = $2, owner = $3, owner_kind = $4, access = $5, kept = $6, template = $7, state = 'active',
                              last_active_at = $8, running_since = $8, active_seconds = 0, created_at = $8,
                              lease_seconds = $10, keep_suspended_seconds = $11
         WHERE id = $1 AND pool_id = $9 AND state IN ('active', 'idle') AND intent IS NULL",
    )
    .bind(found.id.as_str())
    .bind(fresh.name.as_deref())
    .bind(&fresh.owner)
    .bind(fresh.owner_kind.as_str())
    .bind(rows::access_as_str(fresh.access))
    .bind(i64::from(fresh.is_kept))
    .bind(fresh.template.as_deref())
    .bind(fresh.created_at.unix())
    .bind(taking.pool.as_str())
    .bind(fresh.own_lease.map(rows::stored_seconds))
    .bind(fresh.own_keep.map(rows::stored_seconds))
    .execute(&mut *tx)
    .await?;
    // Suspended at this moment: the caller creates a new one.
    if done.rows_affected() == 0 {
        return Ok(None);
    }
    notify::send(tx, &ChangeNotice::Sandbox(found.id.clone())).await?;
    sandboxes::get(tx, &found.id).await
}

fn number(row: &AnyRow, column: &'static str) -> Stored<u32> {
    u32::try_from(rows::count(row, column)?).map_err(|e| rows::corrupt(column, &e.to_string()))
}

fn pool(row: &AnyRow) -> Stored<Pool> {
    Ok(Pool {
        id: rows::parsed(row, "id")?,
        workspace: row.try_get("workspace_id")?,
        name: row.try_get("name")?,
        template: row.try_get("template")?,
        owner: row.try_get("owner")?,
        owner_kind: rows::parsed_with(row, "owner_kind", |w| w.parse::<PrincipalKind>().ok())?,
        replicas: number(row, "replicas")?,
        trouble: PoolTrouble {
            failures: number(row, "failures")?,
            retry_at: rows::optional_time(row, "retry_at")?,
            reason: row.try_get("reason")?,
        },
        created_at: rows::time(row, "created_at")?,
        updated_at: rows::time(row, "updated_at")?,
    })
}

impl Store {
    pub async fn add_pool(&self, pool: &Pool, most: u32, audit: &AuditRecord) -> Stored<AddedResource> {
        let mut tx = self.base.begin().await?;
        let added = add(&mut tx, pool, most, audit).await?;
        self.base.commit(tx).await?;
        Ok(added)
    }

    pub async fn pool(&self, workspace: &str, name: &str) -> Stored<Option<Pool>> {
        asked!(self, db => get(db, workspace, name))
    }

    /// Ordered by name.
    pub async fn pools(&self, workspace: &str) -> Stored<Vec<Pool>> {
        asked!(self, db => list(db, Some(workspace)))
    }

    /// Pools of all workspaces.
    pub async fn all_pools(&self) -> Stored<Vec<Pool>> {
        asked!(self, db => list(db, None))
    }

    pub async fn pool_by_id(&self, id: &PoolId) -> Stored<Option<Pool>> {
        asked!(self, db => by_id(db, id))
    }

    /// Replaces a pool's failure state if its failure count is still that of `seen`; returns whether it was.
    pub async fn note_pool_trouble(&self, seen: &Pool, trouble: &PoolTrouble) -> Stored<bool> {
        let mut tx = self.base.begin().await?;
        let is_noted = note_trouble(&mut tx, seen, trouble).await?;
        self.base.commit(tx).await?;
        Ok(is_noted)
    }

    /// Replaces name and size, and clears its failure state.
    pub async fn change_pool(&self, old: &Pool, new: &Pool, audit: &AuditRecord) -> Stored<ChangedResource> {
        let mut tx = self.base.begin().await?;
        let changed = change(&mut tx, old, new, audit).await?;
        self.base.commit(tx).await?;
        Ok(changed)
    }

    /// Its members can no longer be taken; the caller ends them.
    pub async fn remove_pool(&self, pool: &Pool, audit: &AuditRecord) -> Stored<bool> {
        let mut tx = self.base.begin().await?;
        let is_removed = remove(&mut tx, pool, audit).await?;
        self.base.commit(tx).await?;
        Ok(is_removed)
    }

    /// Its live members, oldest first.
    pub async fn pool_members(&self, id: &PoolId) -> Stored<Vec<Sandbox>> {
        asked!(self, db => members(db, id))
    }

    /// Members whose pool was removed.
    pub async fn members_of_deleted_pools(&self) -> Stored<Vec<Sandbox>> {
        asked!(self, db => members_of_deleted_pools(db))
    }

    /// Removes a member from its pool. Returns whether it was still in it: then it can no longer be taken.
    pub async fn leave_pool(&self, member: &Sandbox) -> Stored<bool> {
        let mut tx = self.base.begin().await?;
        let has_left = leave(&mut tx, member).await?;
        self.base.commit(tx).await?;
        Ok(has_left)
    }

    /// Adds a member's row if the pool still lacks one.
    pub async fn add_pool_member(&self, sandbox: &Sandbox, quota: &Quota, audit: &AuditRecord) -> Stored<AddedPoolMember> {
        let mut tx = self.base.begin().await?;
        let added = add_member(&mut tx, sandbox, quota, audit).await?;
        self.base.commit(tx).await?;
        Ok(added)
    }

    /// Gives a standby member the owner and the name of the sandbox to be created; each member is given once. `None` when
    /// none is available, or for another reason that the creation of a new sandbox will report.
    pub async fn take_pool_member(
        &self,
        taking: &PoolAssignment,
        fresh: &Sandbox,
        tags: &Tags,
        quota: &Quota,
        audit: &AuditRecord,
    ) -> Stored<Option<Sandbox>> {
        let mut tx = self.base.begin().await?;
        lock::workspace(&mut tx, &fresh.workspace).await?;
        if let Some(name) = &fresh.name
            && sandboxes::named(&mut tx, &fresh.workspace, name).await?.is_some()
        {
            return Ok(None);
        }
        let taken = take(&mut tx, taking, fresh, quota, audit).await?;
        if let Some(taken) = &taken {
            tags::set(&mut tx, TagOwner::Sandbox, &taken.workspace, taken.id.as_str(), tags).await?;
            let audit = AuditRecord { sandbox: Some(taken.id.clone()), ..audit.clone() };
            audit_records::add(&mut tx, &audit).await?;
        }
        self.base.commit(tx).await?;
        Ok(taken)
    }
}
