//! Store methods for the resources that sandboxes are made of (templates, snapshots, volumes, pools): a part of
//! [`super::Store`].

use async_trait::async_trait;
use cobox_protocol::{PoolId, SnapshotId, Timestamp, VolumeId, tags::Tags};

use super::{QuotaReached, Stored, Viewer};
use crate::{
    domain::{
        model::{AuditRecord, Sandbox},
        resources::records::{Pool, PoolTrouble, Snapshot, Template, Volume, VolumeState},
    },
    policy::Quota,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddedKind {
    Added,
    NameTaken,
    /// The maximum count is reached.
    TooMany,
    /// The storage limit is reached.
    TooLarge,
}

/// Limits of a workspace for one resource type. Resources being deleted count until they are gone, unless their node is
/// dead: then no broker can remove them.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub most: u32,
    /// Snapshots and volumes together.
    pub bytes: u64,
    /// Nodes without a heartbeat since this time count as dead.
    pub alive_since: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangedKind {
    Changed,
    NameTaken,
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemovedKind {
    Removed,
    /// The names of its users.
    InUse(Vec<String>),
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddedMember {
    Added,
    /// The pool is full, or was removed.
    NotWanted,
    QuotaReached(QuotaReached),
    /// The snapshot or volume of its spec that no longer exists.
    MadeOfGone(String),
}

/// A pool from which a matching standby sandbox may be taken instead of creating a new one.
#[derive(Clone, Debug)]
pub struct PoolTaking {
    pub pool: PoolId,
    /// Members on nodes without a heartbeat since this time are not taken.
    pub alive_since: Timestamp,
}

/// Filter and page of a snapshot list.
#[derive(Clone, Debug, Default)]
pub struct SnapshotFilter {
    /// Case-insensitive.
    pub name_contains: Option<String>,
    /// With exactly this name.
    pub name: Option<String>,
    pub limit: u32,
    pub offset: u32,
}

#[async_trait]
pub trait KindStore: Send + Sync {
    async fn add_template(&self, template: &Template, most: u32, audit: &AuditRecord) -> Stored<AddedKind>;
    async fn template(&self, workspace: &str, name: &str) -> Stored<Option<Template>>;
    /// By name.
    async fn templates(&self, workspace: &str) -> Stored<Vec<Template>>;
    /// Renames it; its pools follow.
    async fn rename_template(&self, template: &Template, name: &str, now: Timestamp, audit: &AuditRecord) -> Stored<ChangedKind>;
    /// Sandboxes created from it keep running; a pool of it prevents the removal.
    async fn remove_template(&self, template: &Template, audit: &AuditRecord) -> Stored<RemovedKind>;

    /// Adds the row in its current state, before any of its files exist. A name belongs to the owner of its oldest
    /// snapshot: for anyone else it is taken, unless they see everything.
    async fn add_snapshot(&self, snapshot: &Snapshot, by: &Viewer, room: &Room, audit: &AuditRecord) -> Stored<AddedKind>;
    async fn snapshot(&self, id: &SnapshotId) -> Stored<Option<Snapshot>>;
    /// The newest ready snapshot that the viewer may use; if none is ready, the newest that isn't being deleted. Without
    /// a tag, any tag matches.
    async fn snapshot_named(&self, viewer: &Viewer, name: &str, tag: Option<&str>) -> Stored<Option<Snapshot>>;
    /// Newest first.
    async fn snapshots(&self, viewer: &Viewer, filter: &SnapshotFilter) -> Stored<Vec<Snapshot>>;
    /// Snapshots of a node with unfinished work: being created or deleted.
    async fn snapshots_due(&self, node: &str) -> Stored<Vec<Snapshot>>;
    /// Replaces state, reason, size and access if the state is still that of `old`; returns whether it was.
    async fn settle_snapshot(&self, old: &Snapshot, new: &Snapshot, audit: Option<&AuditRecord>) -> Stored<bool>;
    /// Whether a sandbox or another snapshot is based on it. Once false for a snapshot being deleted, it stays false.
    async fn is_snapshot_used(&self, snapshot: &Snapshot) -> Stored<bool>;
    /// Removes the row of a snapshot that is being deleted.
    async fn forget_snapshot(&self, id: &SnapshotId) -> Stored<()>;

    async fn add_volume(&self, volume: &Volume, room: &Room, audit: &AuditRecord) -> Stored<AddedKind>;
    async fn volume(&self, id: &VolumeId) -> Stored<Option<Volume>>;
    /// A volume that isn't being deleted.
    async fn volume_named(&self, workspace: &str, name: &str) -> Stored<Option<Volume>>;
    /// By name, without those being deleted.
    async fn volumes(&self, viewer: &Viewer) -> Stored<Vec<Volume>>;
    async fn volumes_due(&self, node: &str) -> Stored<Vec<Volume>>;
    async fn settle_volume(&self, volume: &Volume, state: VolumeState) -> Stored<bool>;
    async fn rename_volume(&self, volume: &Volume, name: &str, now: Timestamp, audit: &AuditRecord) -> Stored<ChangedKind>;
    /// Marks it as being deleted, unless a sandbox has it mounted.
    async fn remove_volume(&self, volume: &Volume, audit: &AuditRecord) -> Stored<RemovedKind>;
    /// Removes the row of a volume that is being deleted.
    async fn forget_volume(&self, id: &VolumeId) -> Stored<()>;

    /// The workspace's sandboxes that use a snapshot or a volume, including ended ones that are not removed yet.
    async fn sandboxes_made_of(&self, workspace: &str, id: &str) -> Stored<Vec<Sandbox>>;

    async fn add_pool(&self, pool: &Pool, most: u32, audit: &AuditRecord) -> Stored<AddedKind>;
    async fn pool(&self, workspace: &str, name: &str) -> Stored<Option<Pool>>;
    /// By name.
    async fn pools(&self, workspace: &str) -> Stored<Vec<Pool>>;
    /// Of every workspace.
    async fn all_pools(&self) -> Stored<Vec<Pool>>;
    async fn pool_by_id(&self, id: &PoolId) -> Stored<Option<Pool>>;
    /// Replaces a pool's failure state if its failure count is still that of `seen`; returns whether it was.
    async fn note_pool_trouble(&self, seen: &Pool, trouble: &PoolTrouble) -> Stored<bool>;
    /// Replaces name and size, and clears its failure state.
    async fn change_pool(&self, old: &Pool, new: &Pool, audit: &AuditRecord) -> Stored<ChangedKind>;
    /// Its members can no longer be taken; the caller ends them.
    async fn remove_pool(&self, pool: &Pool, audit: &AuditRecord) -> Stored<bool>;
    /// Its live members, oldest first.
    async fn pool_members(&self, id: &PoolId) -> Stored<Vec<Sandbox>>;
    /// Members whose pool was removed.
    async fn poolless_members(&self) -> Stored<Vec<Sandbox>>;
    /// Removes a member from its pool. Returns whether it was still in it: then it can no longer be taken.
    async fn leave_pool(&self, member: &Sandbox) -> Stored<bool>;
    /// Adds a member's row if the pool still lacks one.
    async fn add_pool_member(&self, sandbox: &Sandbox, quota: &Quota, audit: &AuditRecord) -> Stored<AddedMember>;
    /// Gives a standby member the owner and the name of the sandbox to be created; each member is given once. `None` when
    /// none is available, or for another reason that the creation of a new sandbox will report.
    async fn take_pool_member(
        &self,
        taking: &PoolTaking,
        fresh: &Sandbox,
        tags: &Tags,
        quota: &Quota,
        audit: &AuditRecord,
    ) -> Stored<Option<Sandbox>>;
}
