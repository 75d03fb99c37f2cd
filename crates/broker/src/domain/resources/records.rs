//! Records of the resources that sandboxes are made of: templates, snapshots, volumes and pools.

use std::path::PathBuf;

use cobox_protocol::{
    PoolId, SandboxId, SnapshotId, Timestamp, VolumeId,
    key::PrincipalKind,
    resources::{Env, MountParams, Resources, SnapshotState, check_mounts},
    session::Access,
};
use cobox_provider::{SandboxRoot, SandboxSpec};
use serde::{Deserialize, Serialize};

use crate::domain::access::Owned;

/// Contents of a template; in the broker's settings under `[templates.<name>]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TemplateSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// A directory or an archive of this machine. Only allowed in settings, because callers could read the host's files
    /// with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rootfs: Option<PathBuf>,
    #[serde(skip_serializing_if = "Resources::is_default")]
    pub resources: Resources,
    #[serde(skip_serializing_if = "Env::is_empty")]
    pub env: Env,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<MountParams>,
}

/// Longest name of an image, in characters.
pub const MAX_IMAGE_CHARS: usize = 256;

impl TemplateSpec {
    /// Checks that don't depend on the provider.
    pub fn check(&self) -> Result<(), cobox_protocol::ApiError> {
        let invalid = |message: String| Err(cobox_protocol::ApiError::invalid(message));
        if self.image.is_some() && self.rootfs.is_some() {
            return invalid("image: send it or rootfs, not both".to_owned());
        }
        if self.image.as_ref().is_some_and(|i| i.is_empty() || i.chars().count() > MAX_IMAGE_CHARS || i.chars().any(char::is_control)) {
            return invalid(format!("image: must have 1 to {MAX_IMAGE_CHARS} characters and no control characters"));
        }
        if self.rootfs.as_ref().is_some_and(|path| !path.is_absolute()) {
            return invalid("rootfs: must be an absolute path".to_owned());
        }
        self.env.check()?;
        check_mounts(&self.mounts)
    }

    pub fn root(&self) -> Option<SandboxRoot> {
        match (&self.image, &self.rootfs) {
            (Some(image), _) => Some(SandboxRoot::Image(image.clone())),
            (None, Some(path)) => Some(SandboxRoot::Rootfs(path.clone())),
            (None, None) => None,
        }
    }
}

/// A template of a workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    pub workspace: String,
    pub name: String,
    pub owner: String,
    pub spec: TemplateSpec,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub id: SnapshotId,
    pub workspace: String,
    pub name: String,
    pub tag: String,
    pub owner: String,
    pub access: Access,
    pub provider: String,
    pub node: String,
    pub state: SnapshotState,
    pub reason: Option<String>,
    /// The sandbox it was taken of; none for a snapshot of an image.
    pub sandbox: Option<SandboxId>,
    /// Spec of a sandbox created from it: the root and its layers. The snapshot is the first layer unless it is of an
    /// image.
    pub spec: SandboxSpec,
    pub size_bytes: Option<u64>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeState {
    Creating,
    Ready,
    Deleting,
}

impl VolumeState {
    pub const fn as_str(self) -> &'static str {
        match self {
            VolumeState::Creating => "making",
            VolumeState::Ready => "ready",
            VolumeState::Deleting => "deleting",
        }
    }
    pub fn parse(w: &str) -> Option<Self> {
        [VolumeState::Creating, VolumeState::Ready, VolumeState::Deleting].into_iter().find(|s| s.as_str() == w)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    pub id: VolumeId,
    pub workspace: String,
    pub name: String,
    pub owner: String,
    pub access: Access,
    pub provider: String,
    pub node: String,
    pub state: VolumeState,
    pub size_bytes: u64,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

/// Standby sandboxes of a template, ready to be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    pub id: PoolId,
    pub workspace: String,
    pub name: String,
    pub template: String,
    pub owner: String,
    pub owner_kind: PrincipalKind,
    pub replicas: u32,
    pub trouble: PoolTrouble,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

/// Why a pool isn't full; empty if all is well.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolTrouble {
    /// Consecutive failed starts.
    pub failures: u32,
    /// No start is attempted before this time.
    pub retry_at: Option<Timestamp>,
    pub reason: Option<String>,
}

macro_rules! owned {
    ($($name:ident),*) => {$(
        impl Owned for $name {
            fn workspace(&self) -> &str {
                &self.workspace
            }
            fn owner(&self) -> &str {
                &self.owner
            }
            fn access(&self) -> Access {
                self.access
            }
        }
    )*};
}
owned!(Snapshot, Volume);

/// Resources without an access rule of their own may be used by the whole workspace.
macro_rules! open_to_workspace {
    ($($name:ident),*) => {$(
        impl Owned for $name {
            fn workspace(&self) -> &str {
                &self.workspace
            }
            fn owner(&self) -> &str {
                &self.owner
            }
            fn access(&self) -> Access {
                Access::Workspace
            }
        }
    )*};
}
open_to_workspace!(Template, Pool);
