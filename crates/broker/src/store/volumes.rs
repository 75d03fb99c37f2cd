//! Volumes: rows that are written before their files exist, and removed after them.

use cobox_protocol::{Timestamp, VolumeId};
use sqlx::{AnyConnection, Row, any::AnyRow};

use super::{
    asked, audit_records, lock,
    resources::{self, NewResource},
    rows,
    snapshots::stored_bytes,
};
use crate::{
    domain::{
        model::AuditRecord,
        resources::records::{Volume, VolumeState},
    },
    store::{AddedResource, ChangedResource, RemovedResource, ResourceLimits, Store, Stored, Viewer},
};

pub async fn add(tx: &mut AnyConnection, v: &Volume, limits: &ResourceLimits, audit: &AuditRecord) -> Stored<AddedResource> {
    lock::workspace(tx, &v.workspace).await?;
    if named(tx, &v.workspace, &v.name).await?.is_some() {
        return Ok(AddedResource::NameTaken);
    }
    if let Some(full) = resources::is_full(tx, NewResource::Volume(v), limits).await? {
        return Ok(full);
    }
    sqlx::query(
        "INSERT INTO volumes (id, workspace_id, name, owner, access, provider, node_id, state, size_bytes, created_at, updated_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
    )
    .bind(v.id.as_str())
    .bind(&v.workspace)
    .bind(&v.name)
    .bind(&v.owner)
    .bind(rows::access_as_str(v.access))
    .bind(&v.provider)
    .bind(&v.node)
    .bind(v.state.as_str())
    .bind(stored_bytes(v.size_bytes))
    .bind(v.created_at.unix())
    .bind(v.updated_at.unix())
    .execute(&mut *tx)
    .await?;
    audit_records::add(tx, audit).await?;
    Ok(AddedResource::Added)
}

pub async fn get(db: &mut AnyConnection, id: &VolumeId) -> Stored<Option<Volume>> {
    let row = sqlx::query("SELECT * FROM volumes WHERE id = $1").bind(id.as_str()).fetch_optional(db).await?;
    row.as_ref().map(volume).transpose()
}

pub async fn named(db: &mut AnyConnection, workspace: &str, name: &str) -> Stored<Option<Volume>> {
    let row = sqlx::query("SELECT * FROM volumes WHERE workspace_id = $1 AND name = $2 AND state <> 'deleting'")
        .bind(workspace)
        .bind(name)
        .fetch_optional(db)
        .await?;
    row.as_ref().map(volume).transpose()
}

pub async fn list(db: &mut AnyConnection, viewer: &Viewer) -> Stored<Vec<Volume>> {
    let found = sqlx::query(
        "SELECT * FROM volumes WHERE workspace_id = $1 AND state <> 'deleting' AND ($2 OR access = 'workspace' OR owner = $3) ORDER BY name",
    )
    .bind(&viewer.workspace)
    .bind(viewer.sees_all)
    .bind(&viewer.principal)
    .fetch_all(db)
    .await?;
    found.iter().map(volume).collect()
}

pub async fn due(db: &mut AnyConnection, node: &str) -> Stored<Vec<Volume>> {
    let found = sqlx::query("SELECT * FROM volumes WHERE node_id = $1 AND state <> 'ready' ORDER BY id").bind(node).fetch_all(db).await?;
    found.iter().map(volume).collect()
}

pub async fn settle(tx: &mut AnyConnection, v: &Volume, state: VolumeState) -> Stored<bool> {
    let done = sqlx::query("UPDATE volumes SET state = $2 WHERE id = $1 AND state = $3")
        .bind(v.id.as_str())
        .bind(state.as_str())
        .bind(v.state.as_str())
        .execute(tx)
        .await?;
    Ok(done.rows_affected() == 1)
}

pub async fn rename(tx: &mut AnyConnection, v: &Volume, name: &str, now: Timestamp, audit: &AuditRecord) -> Stored<ChangedResource> {
    lock::workspace(tx, &v.workspace).await?;
    if named(tx, &v.workspace, name).await?.is_some_and(|other| other.id != v.id) {
        return Ok(ChangedResource::NameTaken);
    }
    let done = sqlx::query("UPDATE volumes SET name = $2, updated_at = $3 WHERE id = $1 AND state <> 'deleting'")
        .bind(v.id.as_str())
        .bind(name)
        .bind(now.unix())
        .execute(&mut *tx)
        .await?;
    if done.rows_affected() == 0 {
        return Ok(ChangedResource::Gone);
    }
    audit_records::add(tx, audit).await?;
    Ok(ChangedResource::Changed)
}

pub async fn remove(tx: &mut AnyConnection, v: &Volume, audit: &AuditRecord) -> Stored<RemovedResource> {
    lock::workspace(tx, &v.workspace).await?;
    let users = resources::sandboxes_made_of(tx, &v.workspace, v.id.as_str()).await?;
    if !users.is_empty() {
        return Ok(RemovedResource::InUse(users.iter().map(|s| s.id.to_string()).collect()));
    }
    let done =
        sqlx::query("UPDATE volumes SET state = 'deleting' WHERE id = $1 AND state <> 'deleting'").bind(v.id.as_str()).execute(&mut *tx);
    if done.await?.rows_affected() == 0 {
        return Ok(RemovedResource::Gone);
    }
    audit_records::add(tx, audit).await?;
    Ok(RemovedResource::Removed)
}

pub async fn forget(tx: &mut AnyConnection, id: &VolumeId) -> Stored<()> {
    sqlx::query("DELETE FROM volumes WHERE id = $1 AND state = 'deleting'").bind(id.as_str()).execute(tx).await?;
    Ok(())
}

fn volume(row: &AnyRow) -> Stored<Volume> {
    Ok(Volume {
        id: rows::parsed(row, "id")?,
        workspace: row.try_get("workspace_id")?,
        name: row.try_get("name")?,
        owner: row.try_get("owner")?,
        access: rows::parsed_with(row, "access", rows::access_from_str)?,
        provider: row.try_get("provider")?,
        node: row.try_get("node_id")?,
        state: rows::parsed_with(row, "state", VolumeState::parse)?,
        size_bytes: rows::count(row, "size_bytes")?,
        created_at: rows::time(row, "created_at")?,
        updated_at: rows::time(row, "updated_at")?,
    })
}

impl Store {
    pub async fn add_volume(&self, volume: &Volume, limits: &ResourceLimits, audit: &AuditRecord) -> Stored<AddedResource> {
        let mut tx = self.base.begin().await?;
        let added = add(&mut tx, volume, limits, audit).await?;
        self.base.commit(tx).await?;
        Ok(added)
    }

    pub async fn volume(&self, id: &VolumeId) -> Stored<Option<Volume>> {
        asked!(self, db => get(db, id))
    }

    /// A volume that isn't being deleted.
    pub async fn volume_named(&self, workspace: &str, name: &str) -> Stored<Option<Volume>> {
        asked!(self, db => named(db, workspace, name))
    }

    /// By name, without those being deleted.
    pub async fn volumes(&self, viewer: &Viewer) -> Stored<Vec<Volume>> {
        asked!(self, db => list(db, viewer))
    }

    pub async fn volumes_due(&self, node: &str) -> Stored<Vec<Volume>> {
        asked!(self, db => due(db, node))
    }

    pub async fn settle_volume(&self, volume: &Volume, state: VolumeState) -> Stored<bool> {
        let mut tx = self.base.begin().await?;
        let is_settled = settle(&mut tx, volume, state).await?;
        self.base.commit(tx).await?;
        Ok(is_settled)
    }

    pub async fn rename_volume(&self, volume: &Volume, name: &str, now: Timestamp, audit: &AuditRecord) -> Stored<ChangedResource> {
        let mut tx = self.base.begin().await?;
        let changed = rename(&mut tx, volume, name, now, audit).await?;
        self.base.commit(tx).await?;
        Ok(changed)
    }

    /// Marks it as being deleted, unless a sandbox has it mounted.
    pub async fn remove_volume(&self, volume: &Volume, audit: &AuditRecord) -> Stored<RemovedResource> {
        let mut tx = self.base.begin().await?;
        let removed = remove(&mut tx, volume, audit).await?;
        self.base.commit(tx).await?;
        Ok(removed)
    }

    /// Removes the row of a volume that is being deleted.
    pub async fn forget_volume(&self, id: &VolumeId) -> Stored<()> {
        let mut tx = self.base.begin().await?;
        forget(&mut tx, id).await?;
        self.base.commit(tx).await
    }
}
