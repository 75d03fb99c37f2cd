//! Parameter and result types of the store's resource methods: those of templates, snapshots, volumes and pools.

use cobox_protocol::{PoolId, Timestamp};

use super::QuotaReached;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddedResource {
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
pub struct ResourceLimits {
    pub most: u32,
    /// Snapshots and volumes together.
    pub bytes: u64,
    /// Nodes without a heartbeat since this time count as dead.
    pub alive_since: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangedResource {
    Changed,
    NameTaken,
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemovedResource {
    Removed,
    /// The names of its users.
    InUse(Vec<String>),
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddedPoolMember {
    Added,
    /// The pool is full, or was removed.
    NotWanted,
    QuotaReached(QuotaReached),
    /// The snapshot or volume of its spec that no longer exists.
    SpecPartMissing(String),
}

/// A pool from which a matching standby sandbox may be taken instead of creating a new one.
#[derive(Clone, Debug)]
pub struct PoolAssignment {
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
