//! What the store remembers about what sandboxes are made of: a part of [`super::Store`].

use async_trait::async_trait;
use cobox_protocol::{PoolId, SnapshotId, Timestamp, VolumeId, tags::Tags};

use super::{QuotaReached, Stored, Viewer};
use crate::{
    domain::{
        audit::AuditRecord,
        kinds::{Pool, PoolTrouble, Snapshot, Template, Volume, VolumeState},
        model::Sandbox,
    },
    policy::Quota,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddedKind {
    Added,
    NameTaken,
    /// There are as many as may be.
    TooMany,
    /// They take as many bytes as they may.
    TooLarge,
}

/// What a workspace may have of one kind. What is being deleted counts until it is gone, unless its node is: then nobody can remove it.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub most: u32,
    /// Of snapshots and volumes together.
    pub bytes: u64,
    /// Nodes that were silent since are gone.
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
    /// By what.
    InUse(Vec<String>),
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddedMember {
    Added,
    /// The pool has as many as it wants, or is gone.
    NotWanted,
    QuotaReached(QuotaReached),
    /// A snapshot or a volume that it is to be made of.
    MadeOfGone(String),
}

/// What may be taken in place of making a sandbox: a member of a pool that is made of the same.
#[derive(Clone, Debug)]
pub struct PoolTaking {
    pub pool: PoolId,
    /// Members of nodes that were silent since are not taken.
    pub alive_since: Timestamp,
}

/// Which snapshots a list shows.
#[derive(Clone, Debug, Default)]
pub struct SnapshotFilter {
    /// In letters of any size.
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
    /// Gives it another name, which pools of it follow.
    async fn rename_template(&self, template: &Template, name: &str, now: Timestamp, audit: &AuditRecord) -> Stored<ChangedKind>;
    /// Sandboxes made by it go on; a pool of it stands in the way.
    async fn remove_template(&self, template: &Template, audit: &AuditRecord) -> Stored<RemovedKind>;

    /// In the state it has, before any of its files are there. A name is whose the oldest snapshot of it is: who else asks for it finds it
    /// taken, unless they see everything.
    async fn add_snapshot(&self, snapshot: &Snapshot, by: &Viewer, room: &Room, audit: &AuditRecord) -> Stored<AddedKind>;
    async fn snapshot(&self, id: &SnapshotId) -> Stored<Option<Snapshot>>;
    /// Of those the viewer may use the newest that is ready; where none is, the newest that isn't being deleted. Without a tag any will do.
    async fn snapshot_named(&self, viewer: &Viewer, name: &str, tag: Option<&str>) -> Stored<Option<Snapshot>>;
    /// Newest first.
    async fn snapshots(&self, viewer: &Viewer, filter: &SnapshotFilter) -> Stored<Vec<Snapshot>>;
    /// Those of a node that something is to be done about: they are being made or deleted.
    async fn snapshots_due(&self, node: &str) -> Stored<Vec<Snapshot>>;
    /// Replaces state, reason, size and access if the state is still `old`'s; says whether it was.
    async fn settle_snapshot(&self, old: &Snapshot, new: &Snapshot, audit: Option<&AuditRecord>) -> Stored<bool>;
    /// Whether a sandbox or another snapshot stands on it. Of one that is being deleted, false stays false.
    async fn is_snapshot_used(&self, snapshot: &Snapshot) -> Stored<bool>;
    /// Removes the row of one that is being deleted.
    async fn forget_snapshot(&self, id: &SnapshotId) -> Stored<()>;

    async fn add_volume(&self, volume: &Volume, room: &Room, audit: &AuditRecord) -> Stored<AddedKind>;
    async fn volume(&self, id: &VolumeId) -> Stored<Option<Volume>>;
    /// One that isn't being deleted.
    async fn volume_named(&self, workspace: &str, name: &str) -> Stored<Option<Volume>>;
    /// By name; those being deleted are not among them.
    async fn volumes(&self, viewer: &Viewer) -> Stored<Vec<Volume>>;
    async fn volumes_due(&self, node: &str) -> Stored<Vec<Volume>>;
    async fn settle_volume(&self, volume: &Volume, state: VolumeState) -> Stored<bool>;
    async fn rename_volume(&self, volume: &Volume, name: &str, now: Timestamp, audit: &AuditRecord) -> Stored<ChangedKind>;
    /// Marks it as being deleted, unless a sandbox has it mounted.
    async fn remove_volume(&self, volume: &Volume, audit: &AuditRecord) -> Stored<RemovedKind>;
    /// Removes the row of one that is being deleted.
    async fn forget_volume(&self, id: &VolumeId) -> Stored<()>;

    /// The sandboxes of a workspace, not quite gone, that are made of a snapshot or a volume.
    async fn sandboxes_made_of(&self, workspace: &str, id: &str) -> Stored<Vec<Sandbox>>;

    async fn add_pool(&self, pool: &Pool, most: u32, audit: &AuditRecord) -> Stored<AddedKind>;
    async fn pool(&self, workspace: &str, name: &str) -> Stored<Option<Pool>>;
    /// By name.
    async fn pools(&self, workspace: &str) -> Stored<Vec<Pool>>;
    /// Of every workspace.
    async fn all_pools(&self) -> Stored<Vec<Pool>>;
    async fn pool_by_id(&self, id: &PoolId) -> Stored<Option<Pool>>;
    /// Replaces a pool's trouble if it has failed as often as in `seen`; says whether it had.
    async fn note_pool_trouble(&self, seen: &Pool, trouble: &PoolTrouble) -> Stored<bool>;
    /// Replaces name and size, and forgets its trouble.
    async fn change_pool(&self, old: &Pool, new: &Pool, audit: &AuditRecord) -> Stored<ChangedKind>;
    /// Its members are no longer taken; who removed it ends them.
    async fn remove_pool(&self, pool: &Pool, audit: &AuditRecord) -> Stored<bool>;
    /// Its living members, oldest first.
    async fn pool_members(&self, id: &PoolId) -> Stored<Vec<Sandbox>>;
    /// Members whose pool is gone.
    async fn poolless_members(&self) -> Stored<Vec<Sandbox>>;
    /// Says whether it was still in its pool: then nobody takes it any more.
    async fn leave_pool(&self, member: &Sandbox) -> Stored<bool>;
    /// Adds a member's row if the pool still wants one more.
    async fn add_pool_member(&self, sandbox: &Sandbox, quota: &Quota, audit: &AuditRecord) -> Stored<AddedMember>;
    /// Gives a waiting member the owner and the name of a sandbox that would be made; each is given once. `None` when none waits, or
    /// when there is another reason to look more closely at, which whoever makes one finds.
    async fn take_pool_member(
        &self,
        taking: &PoolTaking,
        fresh: &Sandbox,
        tags: &Tags,
        quota: &Quota,
        audit: &AuditRecord,
    ) -> Stored<Option<Sandbox>>;
}
