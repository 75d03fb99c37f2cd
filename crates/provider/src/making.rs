//! What a sandbox is made of: decided once, kept in its record, and the same each time it starts.

use std::path::PathBuf;

use cobox_protocol::{
    SnapshotId, VolumeId,
    resources::{Env, Resources},
};
use serde::{Deserialize, Serialize};

/// The default is what the provider gives everybody.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Making {
    /// What `/` starts as, below the layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<Root>,
    /// What `root` stood for when this was decided, in the provider's own words: a name may stand for something else by now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
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

impl Making {
    /// Whether what was made of the other is as good as what would be made of this. What a root stands for every node says in its own
    /// words, so between two nodes only the root counts.
    pub fn is_as_good_as(&self, other: &Making, are_of_one_node: bool) -> bool {
        let base = if are_of_one_node { self.base.clone() } else { other.base.clone() };
        Making { base, ..self.clone() } == *other
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_nodes_it_does_not_matter_what_a_root_stands_for() {
        let of = |base: &str| Making { root: Some(Root::Image("i".into())), base: Some(base.into()), ..Making::default() };
        assert!(of("one").is_as_good_as(&of("one"), true) && !of("one").is_as_good_as(&of("two"), true));
        assert!(of("one").is_as_good_as(&of("two"), false));
        assert!(!Making::default().is_as_good_as(&of("two"), false));
    }
}
