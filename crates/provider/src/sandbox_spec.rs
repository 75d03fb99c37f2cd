//! The spec of a sandbox: root filesystem, layers, resources, environment and mounts. Resolved once, stored in the sandbox's record and
//! used for each start.

use std::path::PathBuf;

use cobox_protocol::{
    SnapshotId, VolumeId,
    resources::{Env, Resources},
};
use serde::{Deserialize, Serialize};

/// The default spec gives the provider's defaults. Stored as JSON in the database: the field names must not change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// The root filesystem below the layers; `None` for the provider's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<SandboxRoot>,
    /// The content that `root` referred to when the spec was resolved, in a format of the provider: a name may refer to other content
    /// later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// The snapshots that the sandbox started from, topmost first: files of the first hide those of the next.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<SnapshotId>,
    #[serde(default, skip_serializing_if = "Resources::is_default")]
    pub resources: Resources,
    #[serde(default, skip_serializing_if = "Env::is_empty")]
    pub env: Env,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<VolumeMount>,
}

impl SandboxSpec {
    /// Whether a sandbox with the other spec can be used instead of one with this spec. Each node resolves a root in its own format, so
    /// between two nodes `base` is ignored.
    pub fn is_equivalent_to(&self, other: &SandboxSpec, is_same_node: bool) -> bool {
        let base = if is_same_node { self.base.clone() } else { other.base.clone() };
        SandboxSpec { base, ..self.clone() } == *other
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxRoot {
    /// An image name that the provider resolves.
    Image(String),
    /// A directory or an archive on the host. Only allowed in an operator's settings: a caller could read the host's files with it.
    Rootfs(PathBuf),
}

/// A volume and its mount point in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeMount {
    pub volume: VolumeId,
    pub path: String,
    #[serde(default)]
    pub read_only: bool,
}

/// Optional features of a provider. A request for a missing feature is refused with an error that names the provider; it is never
/// replaced by another behavior.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProviderFeatures {
    /// Snapshots of a sandbox's files, from which others start.
    pub snapshots: bool,
    /// Volumes that several sandboxes can mount at the same time.
    pub volumes: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resolved_root_is_only_compared_on_the_same_node() {
        let of = |base: &str| SandboxSpec { root: Some(SandboxRoot::Image("i".into())), base: Some(base.into()), ..SandboxSpec::default() };
        assert!(of("one").is_equivalent_to(&of("one"), true) && !of("one").is_equivalent_to(&of("two"), true));
        assert!(of("one").is_equivalent_to(&of("two"), false));
        assert!(!SandboxSpec::default().is_equivalent_to(&of("two"), false));
    }
}
