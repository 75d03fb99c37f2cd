//! Snapshots: rows that are written before their files exist, and removed after them.

use cobox_protocol::{SnapshotId, resources::SnapshotState};
use sqlx::{AnyConnection, Row, any::AnyRow};

use super::{
    asked, audit_records, lock,
    resources::{self, NewResource},
    rows,
};
use crate::{
    domain::{model::AuditRecord, resources::records::Snapshot},
    store::{AddedResource, ResourceLimits, SnapshotFilter, Store, Stored, Viewer},
};

pub async fn add(tx: &mut AnyConnection, s: &Snapshot, by: &Viewer, limits: &ResourceLimits, audit: &AuditRecord) -> Stored<AddedResource> {
    lock::workspace(tx, &s.workspace).await?;
    if !by.sees_all && owner_of_name(tx, &s.workspace, &s.name).await?.is_some_and(|owner| owner != by.principal) {
        return Ok(AddedResource::NameTaken);
    }
    if let Some(full) = resources::is_full(tx, NewResource::Snapshot(s), limits).await? {
        return Ok(full);
    }
    sqlx::query(
        "INSERT INTO snapshots (id, workspace_id, name, tag, owner, access, provider, node_id, state, reason, sandbox_id, making,
                                size_bytes, created_at, updated_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)",
    )
    .bind(s.id.as_str())
    .bind(&s.workspace)
    .bind(&s.name)
    .bind(&s.tag)
    .bind(&s.owner)
    .bind(rows::access_as_str(s.access))
    .bind(&s.provider)
    .bind(&s.node)
    .bind(s.state.as_str())
    .bind(s.reason.as_deref())
    .bind(s.sandbox.as_ref().map(|id| id.as_str()))
    .bind(rows::encoded_spec(&s.spec)?)
    .bind(s.size_bytes.map(stored_bytes))
    .bind(s.created_at.unix())
    .bind(s.updated_at.unix())
    .execute(&mut *tx)
    .await?;
    audit_records::add(tx, audit).await?;
    Ok(AddedResource::Added)
}

pub async fn get(db: &mut AnyConnection, id: &SnapshotId) -> Stored<Option<Snapshot>> {
    let row = sqlx::query("SELECT * FROM snapshots WHERE id = $1").bind(id.as_str()).fetch_optional(db).await?;
    row.as_ref().map(snapshot).transpose()
}

/// Failed snapshots reserve no name.
async fn owner_of_name(tx: &mut AnyConnection, workspace: &str, name: &str) -> Stored<Option<String>> {
    let row = sqlx::query(
        "SELECT owner FROM snapshots WHERE workspace_id = $1 AND name = $2 AND state IN ('building', 'ready') ORDER BY id LIMIT 1",
    );
    let row = row.bind(workspace).bind(name).fetch_optional(tx).await?;
    Ok(row.map(|row| row.try_get("owner")).transpose()?)
}

pub async fn named(db: &mut AnyConnection, viewer: &Viewer, name: &str, tag: Option<&str>) -> Stored<Option<Snapshot>> {
    let row = sqlx::query(
        "SELECT * FROM snapshots
         WHERE workspace_id = $1 AND name = $2 AND ($3 IS NULL OR tag = $3) AND state <> 'deleting'
           AND ($4 OR access = 'workspace' OR owner = $5)
         ORDER BY CASE WHEN state = 'ready' THEN 0 ELSE 1 END, id DESC LIMIT 1",
    )
    .bind(&viewer.workspace)
    .bind(name)
    .bind(tag)
    .bind(viewer.sees_all)
    .bind(&viewer.principal)
    .fetch_optional(db)
    .await?;
    row.as_ref().map(snapshot).transpose()
}

pub async fn list(db: &mut AnyConnection, viewer: &Viewer, filter: &SnapshotFilter) -> Stored<Vec<Snapshot>> {
    let found = sqlx::query(
        "SELECT * FROM snapshots
         WHERE workspace_id = $1 AND ($2 OR access = 'workspace' OR owner = $3) AND ($4 IS NULL OR lower(name) LIKE $4 ESCAPE '!')
           AND ($5 IS NULL OR name = $5)
         ORDER BY id DESC LIMIT $6 OFFSET $7",
    )
    .bind(&viewer.workspace)
    .bind(viewer.sees_all)
    .bind(&viewer.principal)
    .bind(filter.name_contains.as_deref().map(|part| resources::containing(&part.to_lowercase())))
    .bind(filter.name.as_deref())
    .bind(i64::from(filter.limit))
    .bind(i64::from(filter.offset))
    .fetch_all(db)
    .await?;
    found.iter().map(snapshot).collect()
}

pub async fn due(db: &mut AnyConnection, node: &str) -> Stored<Vec<Snapshot>> {
    let found = sqlx::query("SELECT * FROM snapshots WHERE node_id = $1 AND state IN ('building', 'deleting') ORDER BY id")
        .bind(node)
        .fetch_all(db)
        .await?;
    found.iter().map(snapshot).collect()
}

/// The caller's transaction must hold no locks yet. The workspace's lock is needed because the creation of a sandbox
/// holds it while it checks the snapshot's state.
pub async fn settle(tx: &mut AnyConnection, old: &Snapshot, new: &Snapshot) -> Stored<bool> {
    lock::workspace(tx, &old.workspace).await?;
    let done = sqlx::query(
        "UPDATE snapshots SET state = $2, reason = $3, size_bytes = $4, updated_at = $5, access = $7 WHERE id = $1 AND state = $6",
    )
    .bind(new.id.as_str())
    .bind(new.state.as_str())
    .bind(new.reason.as_deref())
    .bind(new.size_bytes.map(stored_bytes))
    .bind(new.updated_at.unix())
    .bind(old.state.as_str())
    .bind(rows::access_as_str(new.access))
    .execute(tx)
    .await?;
    Ok(done.rows_affected() == 1)
}

pub async fn is_used(db: &mut AnyConnection, s: &Snapshot) -> Stored<bool> {
    Ok(!resources::sandboxes_made_of(db, &s.workspace, s.id.as_str()).await?.is_empty() || is_below_another(db, s).await?)
}

pub async fn forget(tx: &mut AnyConnection, id: &SnapshotId) -> Stored<()> {
    sqlx::query("DELETE FROM snapshots WHERE id = $1 AND state = 'deleting'").bind(id.as_str()).execute(tx).await?;
    Ok(())
}

/// A snapshot that is itself being deleted still needs this one's files, until the last sandbox created from it is gone.
async fn is_below_another(db: &mut AnyConnection, s: &Snapshot) -> Stored<bool> {
    let found = sqlx::query(
        "SELECT making FROM snapshots WHERE workspace_id = $1 AND id <> $2 AND state <> 'failed' AND making LIKE $3 ESCAPE '!'",
    )
    .bind(&s.workspace)
    .bind(s.id.as_str())
    .bind(resources::containing(s.id.as_str()))
    .fetch_all(db)
    .await?;
    for row in &found {
        if resources::is_made_of(&rows::sandbox_spec(row)?, s.id.as_str()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Sizes of disks are far below the column's limit.
pub fn stored_bytes(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

fn snapshot(row: &AnyRow) -> Stored<Snapshot> {
    Ok(Snapshot {
        id: rows::parsed(row, "id")?,
        workspace: row.try_get("workspace_id")?,
        name: row.try_get("name")?,
        tag: row.try_get("tag")?,
        owner: row.try_get("owner")?,
        access: rows::parsed_with(row, "access", rows::access_from_str)?,
        provider: row.try_get("provider")?,
        node: row.try_get("node_id")?,
        state: rows::parsed_with(row, "state", |w| w.parse::<SnapshotState>().ok())?,
        reason: row.try_get("reason")?,
        sandbox: rows::parsed_optional(row, "sandbox_id")?,
        spec: rows::sandbox_spec(row)?,
        size_bytes: row.try_get::<Option<i64>, _>("size_bytes")?.map(|n| u64::try_from(n).unwrap_or(0)),
        created_at: rows::time(row, "created_at")?,
        updated_at: rows::time(row, "updated_at")?,
    })
}

impl Store {
    /// Adds the row in its current state, before any of its files exist. A name belongs to the owner of its oldest
    /// snapshot: for anyone else it is taken, unless they see everything.
    pub async fn add_snapshot(
        &self,
        snapshot: &Snapshot,
        by: &Viewer,
        limits: &ResourceLimits,
        audit: &AuditRecord,
    ) -> Stored<AddedResource> {
        let mut tx = self.base.begin().await?;
        let added = add(&mut tx, snapshot, by, limits, audit).await?;
        self.base.commit(tx).await?;
        Ok(added)
    }

    pub async fn snapshot(&self, id: &SnapshotId) -> Stored<Option<Snapshot>> {
        asked!(self, db => get(db, id))
    }

    /// The newest ready snapshot that the viewer may use; if none is ready, the newest that isn't being deleted. Without
    /// a tag, any tag matches.
    pub async fn snapshot_named(&self, viewer: &Viewer, name: &str, tag: Option<&str>) -> Stored<Option<Snapshot>> {
        asked!(self, db => named(db, viewer, name, tag))
    }

    /// Newest first.
    pub async fn snapshots(&self, viewer: &Viewer, filter: &SnapshotFilter) -> Stored<Vec<Snapshot>> {
        asked!(self, db => list(db, viewer, filter))
    }

    /// Snapshots of a node with unfinished work: being created or deleted.
    pub async fn snapshots_due(&self, node: &str) -> Stored<Vec<Snapshot>> {
        asked!(self, db => due(db, node))
    }

    /// Replaces state, reason, size and access if the state is still that of `old`; returns whether it was.
    pub async fn settle_snapshot(&self, old: &Snapshot, new: &Snapshot, audit: Option<&AuditRecord>) -> Stored<bool> {
        let mut tx = self.base.begin().await?;
        let is_settled = settle(&mut tx, old, new).await?;
        if let (true, Some(audit)) = (is_settled, audit) {
            audit_records::add(&mut tx, audit).await?;
        }
        self.base.commit(tx).await?;
        Ok(is_settled)
    }

    /// Whether a sandbox or another snapshot is based on it. Once false for a snapshot being deleted, it stays false.
    pub async fn is_snapshot_used(&self, snapshot: &Snapshot) -> Stored<bool> {
        // In one transaction, so that both reads see the same moment.
        let mut tx = self.base.begin().await?;
        is_used(&mut tx, snapshot).await
    }

    /// Removes the row of a snapshot that is being deleted.
    pub async fn forget_snapshot(&self, id: &SnapshotId) -> Stored<()> {
        let mut tx = self.base.begin().await?;
        forget(&mut tx, id).await?;
        self.base.commit(tx).await
    }
}
