//! The interface of sandbox providers, which start, suspend, list and remove sandboxes and open connections to boxd, and its local
//! implementation.

#![deny(unsafe_op_in_unsafe_fn)]

pub mod adapter;
pub mod control;
pub mod local;
pub mod private_dir;
pub mod sandbox_spec;

use std::sync::Arc;

use async_trait::async_trait;
use cobox_protocol::{ErrorCode, SandboxId, SnapshotId, VolumeId, control::ControlState};
use tokio::io::{AsyncRead, AsyncWrite};

pub use adapter::{Adapter, AdapterError, AdapterResult, FileContent};
pub use sandbox_spec::{ProviderFeatures, SandboxRoot, SandboxSpec, VolumeMount};

/// A connection to boxd: a UNIX socket for the local provider, TCP or TLS for others.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}
pub type BoxedStream = Box<dyn Stream>;

/// One of boxd's two listeners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoxdSocket {
    /// For humans and agents, who authenticate with tokens.
    Client,
    /// For the broker only: keys, revocations and the lease.
    Control,
}

/// A sandbox that exists at the provider, independent of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderSandbox {
    pub id: SandboxId,
    pub is_running: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ProviderError {
    /// The request can't be fulfilled, now or later.
    #[error("{0}")]
    Refused(String),
    /// A failure on the host; a retry may succeed.
    #[error("{0}")]
    Unavailable(String),
    #[error("sandbox {0} is not running")]
    NotRunning(SandboxId),
}

impl ProviderError {
    pub const fn code(&self) -> ErrorCode {
        match self {
            ProviderError::Refused(_) => ErrorCode::InvalidRequest,
            ProviderError::Unavailable(_) | ProviderError::NotRunning(_) => ErrorCode::ProviderUnavailable,
        }
    }
}

/// A sandbox provider. All calls are idempotent, because the broker repeats them after a crash: starting a running sandbox, suspending a
/// suspended one and destroying a missing one succeed.
#[async_trait]
pub trait Provider: Send + Sync {
    fn name(&self) -> &'static str;

    /// Checks whether a sandbox could be started now, as far as that is possible without starting one.
    async fn ready(&self) -> Result<(), ProviderError> {
        Ok(())
    }

    fn features(&self) -> ProviderFeatures {
        ProviderFeatures::default()
    }

    /// Checks whether a sandbox with this spec could be created, as far as that is possible without creating one. Called before a request
    /// is accepted.
    fn check_spec(&self, spec: &SandboxSpec) -> Result<(), ProviderError> {
        match *spec == SandboxSpec::default() {
            true => Ok(()),
            false => Err(ProviderError::Refused(format!("the {} provider doesn't support sandbox specs", self.name()))),
        }
    }

    /// Resolves the spec's root to its current content and stores the result in the spec, unless it has one already, so that every start
    /// uses the same content.
    fn pin_root(&self, spec: SandboxSpec) -> Result<SandboxSpec, ProviderError> {
        Ok(spec)
    }

    /// Checks whether any volumes can be mounted at these paths of a sandbox with this spec.
    fn check_mount_paths(&self, _spec: &SandboxSpec, _paths: &[&str]) -> Result<(), ProviderError> {
        Ok(())
    }

    /// Starts a new sandbox, or an existing one with its files. `spec` is the same at each start. Returns when boxd accepts connections.
    async fn start(&self, id: &SandboxId, spec: &SandboxSpec, state: &ControlState) -> Result<(), ProviderError>;

    /// Whether a sandbox's files outlive its processes. If not, a sandbox is ended instead of suspended.
    fn can_suspend(&self) -> bool {
        true
    }

    /// Ends the sandbox's processes and keeps its files.
    async fn suspend(&self, id: &SandboxId) -> Result<(), ProviderError>;

    /// Ends the sandbox's processes and removes all its data.
    async fn destroy(&self, id: &SandboxId) -> Result<(), ProviderError>;

    /// All sandboxes of this node, running or not.
    async fn list(&self) -> Result<Vec<ProviderSandbox>, ProviderError>;

    async fn is_running(&self, id: &SandboxId) -> bool;

    /// Resolves when the sandbox no longer runs; immediately if it isn't running.
    async fn ended(&self, id: &SandboxId);

    /// Opens a connection to the sandbox's boxd.
    async fn dial(&self, id: &SandboxId, socket: BoxdSocket) -> Result<BoxedStream, ProviderError>;

    /// Replaces boxd where the provider's sandboxes can't run it; `dial` is not called then.
    fn adapter(&self) -> Option<Arc<dyn Adapter>> {
        None
    }

    /// The URL, without a trailing slash, at which clients reach the sandbox's boxd without the gateway. For providers whose sandboxes
    /// have an address of their own. With `None`, clients use the gateway.
    fn direct_url(&self, _id: &SandboxId) -> Option<String> {
        None
    }

    /// Copies the files of a running or suspended sandbox so that others can start from them, and returns their size in bytes. Atomic: if
    /// it fails or is interrupted, the snapshot doesn't exist.
    async fn take_snapshot(&self, _from: &SandboxId, _id: &SnapshotId, _spec: &SandboxSpec) -> Result<u64, ProviderError> {
        Err(self.unsupported("take snapshots"))
    }
    async fn remove_snapshot(&self, _id: &SnapshotId) -> Result<(), ProviderError> {
        Err(self.unsupported("remove snapshots"))
    }
    /// All complete snapshots of this node.
    async fn snapshots(&self) -> Result<Vec<SnapshotId>, ProviderError> {
        Ok(Vec::new())
    }

    /// Checks whether a volume of this size can be created.
    fn check_volume(&self, _size_bytes: u64) -> Result<(), ProviderError> {
        Err(self.unsupported("make volumes"))
    }
    /// Creates an empty volume; an existing one is left unchanged.
    async fn make_volume(&self, _id: &VolumeId, _size_bytes: u64) -> Result<(), ProviderError> {
        Err(self.unsupported("make volumes"))
    }
    /// Removes a volume, which must not be mounted anywhere.
    async fn remove_volume(&self, _id: &VolumeId) -> Result<(), ProviderError> {
        Err(self.unsupported("remove volumes"))
    }
    /// All volumes of this node.
    async fn volumes(&self) -> Result<Vec<VolumeId>, ProviderError> {
        Ok(Vec::new())
    }

    #[doc(hidden)]
    fn unsupported(&self, what: &str) -> ProviderError {
        ProviderError::Refused(format!("the {} provider can't {what}", self.name()))
    }

    /// Free space of the disk that holds this node's sandboxes, if known; of the fuller one if the data directory is on another disk.
    async fn host_disk(&self) -> Option<HostDisk> {
        None
    }

    /// How much of that disk a sandbox and its volumes use; `None` if they have no images of their own.
    async fn image_usage(&self, _id: &SandboxId, _spec: &SandboxSpec) -> Option<ImageUsage> {
        None
    }

    /// Sandboxes and volumes of this node whose filesystem failed and accepts no more writes. Restarting the sandbox repairs it.
    async fn failed_disks(&self) -> Vec<FailedDisk> {
        Vec::new()
    }

    /// The files written in a sandbox, which would be lost if it were destroyed; `None` if they can't be counted.
    async fn written_files(&self, _id: &SandboxId) -> Option<WrittenFiles> {
        None
    }

    /// Disk usage of the sandbox's files where the broker must enforce a soft limit; `None` where the host enforces the limit.
    async fn disk_usage(&self, id: &SandboxId, spec: &SandboxSpec) -> Option<DiskUsage>;
}

/// Count of the files written in a sandbox, excluding those of its image, snapshot and volumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenFiles {
    pub files: u64,
    /// Total size of the files.
    pub bytes: u64,
    /// False when there are more files than were counted.
    pub is_complete: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskUsage {
    /// Identifies the measured location: 0 is the sandbox's own files, others are its volumes. Measurements of different locations can't
    /// be compared.
    pub location: u64,
    pub used: u64,
    pub limit: u64,
}

/// The disk that holds the sandboxes' files, or a fuller one that holds the rest of the data directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostDisk {
    /// Bytes that are free.
    pub available: u64,
    /// Bytes that sandboxes have written and the kernel has not: they need space that still counts as available.
    pub unwritten: u64,
    /// Bytes that must stay free: below this, sandboxes may not write.
    pub reserve: u64,
    /// Whether sandboxes are on this disk, so that removing one frees space.
    pub holds_sandboxes: bool,
}

impl HostDisk {
    /// Bytes that can still be written.
    pub fn writable(&self) -> u64 {
        self.available.saturating_sub(self.unwritten)
    }
}

/// How much of the host's disk the filesystem images of a sandbox and its volumes use, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageUsage {
    pub allocated: u64,
    /// Written in the sandbox, or in any sandbox if it mounts volumes, but not to an image yet. Some of it may already have space there.
    pub unwritten: u64,
}

/// The owner of a failed filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailedDisk {
    Sandbox(SandboxId),
    Volume(VolumeId),
}
