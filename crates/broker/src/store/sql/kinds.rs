//! The store's methods for resources (templates, snapshots, volumes, pools), and the checks that a new sandbox's
//! resources exist.

use async_trait::async_trait;
use cobox_protocol::{PoolId, SnapshotId, Timestamp, VolumeId, tags::Tags};
use cobox_provider::SandboxSpec;
use sqlx::AnyConnection;

use super::{
    SqlStore, asked, lock, notes, pools, rows, sandboxes, snapshots,
    tags::{self, On},
    templates, volumes,
};
use crate::{
    domain::{
        model::{AuditRecord, Sandbox},
        resources::records::{Pool, PoolTrouble, Snapshot, Template, Volume, VolumeState},
    },
    policy::Quota,
    store::{AddedKind, AddedMember, ChangedKind, KindStore, PoolTaking, RemovedKind, Room, SnapshotFilter, Stored, Viewer},
};

/// Leaves out resources being deleted on a node that is gone.
macro_rules! counting {
    ($what:literal) => {
        concat!(
            $what,
            " WHERE workspace_id = $1
                AND NOT (state = 'deleting' AND node_id <> $3 AND node_id NOT IN (SELECT id FROM nodes WHERE seen_at >= $2))"
        )
    };
}

/// The snapshot or volume of a new sandbox's spec that can no longer be used, if any. The caller holds the workspace's
/// lock, so the answer stays valid.
pub async fn missing(tx: &mut AnyConnection, making: &SandboxSpec) -> Stored<Option<String>> {
    // The first layer keeps those below it.
    if let Some(id) = making.layers.first() {
        let row =
            sqlx::query("SELECT id FROM snapshots WHERE id = $1 AND state = 'ready'").bind(id.as_str()).fetch_optional(&mut *tx).await?;
        if row.is_none() {
            return Ok(Some(format!("snapshot {id}")));
        }
    }
    for mount in &making.mounts {
        let row = sqlx::query("SELECT id FROM volumes WHERE id = $1 AND state = 'ready'").bind(mount.volume.as_str());
        if row.fetch_optional(&mut *tx).await?.is_none() {
            return Ok(Some(format!("volume {}", mount.volume)));
        }
    }
    Ok(None)
}

/// Includes ended sandboxes whose processes may still exist.
pub async fn sandboxes_made_of(db: &mut AnyConnection, workspace: &str, id: &str) -> Stored<Vec<Sandbox>> {
    let found = sqlx::query(
        "SELECT * FROM sandboxes
         WHERE workspace_id = $1 AND (ended_at IS NULL OR intent IS NOT NULL) AND making LIKE $2 ESCAPE '!' ORDER BY id",
    )
    .bind(workspace)
    .bind(containing(id))
    .fetch_all(db)
    .await?;
    let found = found.iter().map(rows::sandbox).collect::<Stored<Vec<_>>>()?;
    Ok(found.into_iter().filter(|s| is_made_of(&s.spec, id)).collect())
}

/// The text match of the database may be a false positive: the value of a variable can contain any id.
pub fn is_made_of(making: &SandboxSpec, id: &str) -> bool {
    making.layers.iter().any(|layer| layer.as_str() == id) || making.mounts.iter().any(|mount| mount.volume.as_str() == id)
}

/// A pattern for `LIKE … ESCAPE '!'`.
pub fn containing(text: &str) -> String {
    let escaped: String = text.chars().flat_map(|c| if matches!(c, '%' | '_' | '!') { vec!['!', c] } else { vec![c] }).collect();
    format!("%{escaped}%")
}

/// A snapshot or volume to be added to a workspace.
pub enum Fresh<'a> {
    Snapshot(&'a Snapshot),
    Volume(&'a Volume),
}

/// The exceeded limit, if any. The caller holds the workspace's lock.
pub async fn is_full(tx: &mut AnyConnection, fresh: Fresh<'_>, room: &Room) -> Stored<Option<AddedKind>> {
    // The size of a snapshot is known when it is taken.
    let (count, workspace, node, bytes) = match fresh {
        Fresh::Snapshot(s) => (counting!("SELECT count(*) AS n FROM snapshots"), &s.workspace, &s.node, 0),
        Fresh::Volume(v) => (counting!("SELECT count(*) AS n FROM volumes"), &v.workspace, &v.node, v.size_bytes),
    };
    // PostgreSQL sums whole numbers up to another type.
    let snapshots = counting!("SELECT CAST(coalesce(sum(size_bytes), 0) AS BIGINT) AS n FROM snapshots");
    let volumes = counting!("SELECT CAST(coalesce(sum(size_bytes), 0) AS BIGINT) AS n FROM volumes");
    let mut numbers = Vec::new();
    for sql in [count, snapshots, volumes] {
        let row = sqlx::query(sql).bind(workspace).bind(room.alive_since.unix()).bind(node).fetch_one(&mut *tx).await?;
        numbers.push(rows::count(&row, "n")?);
    }
    if numbers[0] >= u64::from(room.most) {
        return Ok(Some(AddedKind::TooMany));
    }
    let taken = numbers[1..].iter().fold(bytes, |all, more| all.saturating_add(*more));
    Ok((taken > room.bytes).then_some(AddedKind::TooLarge))
}

/// Removes rows being deleted on a node that is no longer known: no broker can remove their files, and no sandbox is
/// based on them. If the node comes back, it removes files without a record. A broker with a database of its own has no
/// row in `nodes`.
pub async fn forget_lost(tx: &mut AnyConnection) -> Stored<()> {
    for sql in [
        "DELETE FROM snapshots WHERE state = 'deleting' AND node_id NOT IN (SELECT id FROM nodes) AND EXISTS (SELECT 1 FROM nodes)",
        "DELETE FROM volumes WHERE state = 'deleting' AND node_id NOT IN (SELECT id FROM nodes) AND EXISTS (SELECT 1 FROM nodes)",
    ] {
        sqlx::query(sql).execute(&mut *tx).await?;
    }
    Ok(())
}

pub async fn count(db: &mut AnyConnection, sql: &'static str, workspace: &str) -> Stored<u64> {
    rows::count(&sqlx::query(sql).bind(workspace).fetch_one(db).await?, "n")
}

#[async_trait]
impl KindStore for SqlStore {
    async fn add_template(&self, template: &Template, most: u32, audit: &AuditRecord) -> Stored<AddedKind> {
        let mut tx = self.base.begin().await?;
        let added = templates::add(&mut tx, template, most, audit).await?;
        self.base.commit(tx).await?;
        Ok(added)
    }
    async fn template(&self, workspace: &str, name: &str) -> Stored<Option<Template>> {
        asked!(self, db => templates::get(db, workspace, name))
    }
    async fn templates(&self, workspace: &str) -> Stored<Vec<Template>> {
        asked!(self, db => templates::list(db, workspace))
    }
    async fn rename_template(&self, template: &Template, name: &str, now: Timestamp, audit: &AuditRecord) -> Stored<ChangedKind> {
        let mut tx = self.base.begin().await?;
        let changed = templates::rename(&mut tx, template, name, now, audit).await?;
        self.base.commit(tx).await?;
        Ok(changed)
    }
    async fn remove_template(&self, template: &Template, audit: &AuditRecord) -> Stored<RemovedKind> {
        let mut tx = self.base.begin().await?;
        let removed = templates::remove(&mut tx, template, audit).await?;
        self.base.commit(tx).await?;
        Ok(removed)
    }

    async fn add_snapshot(&self, snapshot: &Snapshot, by: &Viewer, room: &Room, audit: &AuditRecord) -> Stored<AddedKind> {
        let mut tx = self.base.begin().await?;
        let added = snapshots::add(&mut tx, snapshot, by, room, audit).await?;
        self.base.commit(tx).await?;
        Ok(added)
    }
    async fn snapshot(&self, id: &SnapshotId) -> Stored<Option<Snapshot>> {
        asked!(self, db => snapshots::get(db, id))
    }
    async fn snapshot_named(&self, viewer: &Viewer, name: &str, tag: Option<&str>) -> Stored<Option<Snapshot>> {
        asked!(self, db => snapshots::named(db, viewer, name, tag))
    }
    async fn snapshots(&self, viewer: &Viewer, filter: &SnapshotFilter) -> Stored<Vec<Snapshot>> {
        asked!(self, db => snapshots::list(db, viewer, filter))
    }
    async fn snapshots_due(&self, node: &str) -> Stored<Vec<Snapshot>> {
        asked!(self, db => snapshots::due(db, node))
    }
    async fn settle_snapshot(&self, old: &Snapshot, new: &Snapshot, audit: Option<&AuditRecord>) -> Stored<bool> {
        let mut tx = self.base.begin().await?;
        let is_settled = snapshots::settle(&mut tx, old, new).await?;
        if let (true, Some(audit)) = (is_settled, audit) {
            notes::audit(&mut tx, audit).await?;
        }
        self.base.commit(tx).await?;
        Ok(is_settled)
    }
    async fn is_snapshot_used(&self, snapshot: &Snapshot) -> Stored<bool> {
        // In one transaction, so that both reads see the same moment.
        let mut tx = self.base.begin().await?;
        snapshots::is_used(&mut tx, snapshot).await
    }
    async fn forget_snapshot(&self, id: &SnapshotId) -> Stored<()> {
        let mut tx = self.base.begin().await?;
        snapshots::forget(&mut tx, id).await?;
        self.base.commit(tx).await
    }

    async fn add_volume(&self, volume: &Volume, room: &Room, audit: &AuditRecord) -> Stored<AddedKind> {
        let mut tx = self.base.begin().await?;
        let added = volumes::add(&mut tx, volume, room, audit).await?;
        self.base.commit(tx).await?;
        Ok(added)
    }
    async fn volume(&self, id: &VolumeId) -> Stored<Option<Volume>> {
        asked!(self, db => volumes::get(db, id))
    }
    async fn volume_named(&self, workspace: &str, name: &str) -> Stored<Option<Volume>> {
        asked!(self, db => volumes::named(db, workspace, name))
    }
    async fn volumes(&self, viewer: &Viewer) -> Stored<Vec<Volume>> {
        asked!(self, db => volumes::list(db, viewer))
    }
    async fn volumes_due(&self, node: &str) -> Stored<Vec<Volume>> {
        asked!(self, db => volumes::due(db, node))
    }
    async fn settle_volume(&self, volume: &Volume, state: VolumeState) -> Stored<bool> {
        let mut tx = self.base.begin().await?;
        let is_settled = volumes::settle(&mut tx, volume, state).await?;
        self.base.commit(tx).await?;
        Ok(is_settled)
    }
    async fn rename_volume(&self, volume: &Volume, name: &str, now: Timestamp, audit: &AuditRecord) -> Stored<ChangedKind> {
        let mut tx = self.base.begin().await?;
        let changed = volumes::rename(&mut tx, volume, name, now, audit).await?;
        self.base.commit(tx).await?;
        Ok(changed)
    }
    async fn remove_volume(&self, volume: &Volume, audit: &AuditRecord) -> Stored<RemovedKind> {
        let mut tx = self.base.begin().await?;
        let removed = volumes::remove(&mut tx, volume, audit).await?;
        self.base.commit(tx).await?;
        Ok(removed)
    }
    async fn forget_volume(&self, id: &VolumeId) -> Stored<()> {
        let mut tx = self.base.begin().await?;
        volumes::forget(&mut tx, id).await?;
        self.base.commit(tx).await
    }

    async fn sandboxes_made_of(&self, workspace: &str, id: &str) -> Stored<Vec<Sandbox>> {
        asked!(self, db => sandboxes_made_of(db, workspace, id))
    }

    async fn add_pool(&self, pool: &Pool, most: u32, audit: &AuditRecord) -> Stored<AddedKind> {
        let mut tx = self.base.begin().await?;
        let added = pools::add(&mut tx, pool, most, audit).await?;
        self.base.commit(tx).await?;
        Ok(added)
    }
    async fn pool(&self, workspace: &str, name: &str) -> Stored<Option<Pool>> {
        asked!(self, db => pools::get(db, workspace, name))
    }
    async fn pools(&self, workspace: &str) -> Stored<Vec<Pool>> {
        asked!(self, db => pools::list(db, Some(workspace)))
    }
    async fn all_pools(&self) -> Stored<Vec<Pool>> {
        asked!(self, db => pools::list(db, None))
    }
    async fn pool_by_id(&self, id: &PoolId) -> Stored<Option<Pool>> {
        asked!(self, db => pools::by_id(db, id))
    }
    async fn note_pool_trouble(&self, seen: &Pool, trouble: &PoolTrouble) -> Stored<bool> {
        let mut tx = self.base.begin().await?;
        let is_noted = pools::note_trouble(&mut tx, seen, trouble).await?;
        self.base.commit(tx).await?;
        Ok(is_noted)
    }
    async fn change_pool(&self, old: &Pool, new: &Pool, audit: &AuditRecord) -> Stored<ChangedKind> {
        let mut tx = self.base.begin().await?;
        let changed = pools::change(&mut tx, old, new, audit).await?;
        self.base.commit(tx).await?;
        Ok(changed)
    }
    async fn remove_pool(&self, pool: &Pool, audit: &AuditRecord) -> Stored<bool> {
        let mut tx = self.base.begin().await?;
        let is_removed = pools::remove(&mut tx, pool, audit).await?;
        self.base.commit(tx).await?;
        Ok(is_removed)
    }
    async fn pool_members(&self, id: &PoolId) -> Stored<Vec<Sandbox>> {
        asked!(self, db => pools::members(db, id))
    }
    async fn poolless_members(&self) -> Stored<Vec<Sandbox>> {
        asked!(self, db => pools::poolless(db))
    }
    async fn leave_pool(&self, member: &Sandbox) -> Stored<bool> {
        let mut tx = self.base.begin().await?;
        let has_left = pools::leave(&mut tx, member).await?;
        self.base.commit(tx).await?;
        Ok(has_left)
    }
    async fn add_pool_member(&self, sandbox: &Sandbox, quota: &Quota, audit: &AuditRecord) -> Stored<AddedMember> {
        let mut tx = self.base.begin().await?;
        let added = pools::add_member(&mut tx, sandbox, quota, audit).await?;
        self.base.commit(tx).await?;
        Ok(added)
    }
    async fn take_pool_member(
        &self,
        taking: &PoolTaking,
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
        let taken = pools::take(&mut tx, taking, fresh, quota, audit).await?;
        if let Some(taken) = &taken {
            tags::set(&mut tx, On::Sandbox, &taken.workspace, taken.id.as_str(), tags).await?;
            let audit = AuditRecord { sandbox: Some(taken.id.clone()), ..audit.clone() };
            notes::audit(&mut tx, &audit).await?;
        }
        self.base.commit(tx).await?;
        Ok(taken)
    }
}
