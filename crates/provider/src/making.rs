//! What a sandbox is made of: decided once, kept in its record, and the same each time it starts.

use std::path::PathBuf;

use cobox_protocol::{
    SnapshotId, VolumeId,
    making::{Env, Resources},
};
use serde::{Deserialize, Serialize};

/// The default is what the provider gives everybody.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Making {
    /// What `/` starts as, below the layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<Root>,
    /// The snapshots it started from: the files of the first are seen before those of the next.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<SnapshotId>,
    #[serde(default, skip_serializing_if = "Resources::is_default")]
    pub resources: Resources,
    #[serde(default, skip_serializing_if = "Env::is_empty")]
    pub env: Env,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Root {
    /// By a name the provider knows.
    Image(String),
    /// A directory or an archive of the host. Only an operator's settings may say so: callers would read the host by it.
    Rootfs(PathBuf),
}

/// A volume and its place in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    pub volume: VolumeId,
    pub path: String,
    #[serde(default)]
    pub read_only: bool,
}

/// What a provider can beside running sandboxes. What it can't is refused in its name, never replaced by something else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abilities {
    /// Snapshots of a sandbox's files, from which others start.
    pub snapshots: bool,
    /// Volumes that several sandboxes mount at once.
    pub volumes: bool,
}
