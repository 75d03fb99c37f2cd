//! The store's methods for resources (templates, snapshots, volumes, pools), and the checks that a new sandbox's
//! resources exist.

use cobox_provider::SandboxSpec;
use sqlx::AnyConnection;

use super::{Store, asked, rows};
use crate::{
    domain::{
        model::Sandbox,
        resources::records::{Snapshot, Volume},
    },
    store::{AddedResource, ResourceLimits, Stored},
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
pub async fn missing(tx: &mut AnyConnection, spec: &SandboxSpec) -> Stored<Option<String>> {
    // The first layer keeps those below it.
    if let Some(id) = spec.layers.first() {
        let row =
            sqlx::query("SELECT id FROM snapshots WHERE id = $1 AND state = 'ready'").bind(id.as_str()).fetch_optional(&mut *tx).await?;
        if row.is_none() {
            return Ok(Some(format!("snapshot {id}")));
        }
    }
    for mount in &spec.mounts {
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
pub fn is_made_of(spec: &SandboxSpec, id: &str) -> bool {
    spec.layers.iter().any(|layer| layer.as_str() == id) || spec.mounts.iter().any(|mount| mount.volume.as_str() == id)
}

/// A pattern for `LIKE … ESCAPE '!'`.
pub fn containing(text: &str) -> String {
    let escaped: String = text.chars().flat_map(|c| if matches!(c, '%' | '_' | '!') { vec!['!', c] } else { vec![c] }).collect();
    format!("%{escaped}%")
}

/// A snapshot or volume to be added to a workspace.
pub enum NewResource<'a> {
    Snapshot(&'a Snapshot),
    Volume(&'a Volume),
}

/// The exceeded limit, if any. The caller holds the workspace's lock.
pub async fn is_full(tx: &mut AnyConnection, fresh: NewResource<'_>, limits: &ResourceLimits) -> Stored<Option<AddedResource>> {
    // The size of a snapshot is known when it is taken.
    let (count, workspace, node, bytes) = match fresh {
        NewResource::Snapshot(s) => (counting!("SELECT count(*) AS n FROM snapshots"), &s.workspace, &s.node, 0),
        NewResource::Volume(v) => (counting!("SELECT count(*) AS n FROM volumes"), &v.workspace, &v.node, v.size_bytes),
    };
    // PostgreSQL sums whole numbers up to another type.
    let snapshots = counting!("SELECT CAST(coalesce(sum(size_bytes), 0) AS BIGINT) AS n FROM snapshots");
    let volumes = counting!("SELECT CAST(coalesce(sum(size_bytes), 0) AS BIGINT) AS n FROM volumes");
    let mut numbers = Vec::new();
    for sql in [count, snapshots, volumes] {
        let row = sqlx::query(sql).bind(workspace).bind(limits.alive_since.unix()).bind(node).fetch_one(&mut *tx).await?;
        numbers.push(rows::count(&row, "n")?);
    }
    if numbers[0] >= u64::from(limits.most) {
        return Ok(Some(AddedResource::TooMany));
    }
    let taken = numbers[1..].iter().fold(bytes, |all, more| all.saturating_add(*more));
    Ok((taken > limits.bytes).then_some(AddedResource::TooLarge))
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

impl Store {
    /// The workspace's sandboxes that use a snapshot or a volume, including ended ones that are not removed yet.
    pub async fn sandboxes_made_of(&self, workspace: &str, id: &str) -> Stored<Vec<Sandbox>> {
        asked!(self, db => sandboxes_made_of(db, workspace, id))
    }
}
