//! Where sandboxes run. A provider starts, suspends, finds and removes them, and opens connections to the boxd inside.

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

/// A connection to boxd: a UNIX socket here, TCP or TLS elsewhere.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}
pub type BoxedStream = Box<dyn Stream>;

/// Which of boxd's two listeners to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoxdSocket {
    /// For humans and agents, who show tokens.
    Client,
    /// For the broker alone: keys, revocations, lease.
    Control,
}

/// A sandbox the provider has, whatever the store says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderSandbox {
    pub id: SandboxId,
    pub is_running: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ProviderError {
    /// The request can't be met, now or later.
    #[error("{0}")]
    Refused(String),
    /// Something on the host is in the way; trying again may help.
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

/// Every call may be repeated after a crash: starting what runs, suspending what stands still and destroying what
/// is gone all succeed.
#[async_trait]
pub trait Provider: Send + Sync {
    fn name(&self) -> &'static str;

    /// Whether it could start one now, as far as that can be said without doing it.
    async fn ready(&self) -> Result<(), ProviderError> {
        Ok(())
    }

    fn features(&self) -> ProviderFeatures {
        ProviderFeatures::default()
    }

    /// Whether a sandbox could be made of this, as far as that can be said without making one: asked before anything is promised.
    fn check_spec(&self, spec: &SandboxSpec) -> Result<(), ProviderError> {
        match *spec == SandboxSpec::default() {
            true => Ok(()),
            false => Err(ProviderError::Refused(format!("the {} provider makes all sandboxes alike", self.name()))),
        }
    }

    /// The same, with what its root stands for now written down, unless it is already: every start then has just that.
    fn pin_root(&self, spec: SandboxSpec) -> Result<SandboxSpec, ProviderError> {
        Ok(spec)
    }

    /// Whether volumes can be mounted at these paths of a sandbox made of this, whichever volumes they are.
    fn check_mount_paths(&self, _spec: &SandboxSpec, _paths: &[&str]) -> Result<(), ProviderError> {
        Ok(())
    }

    /// Starts a sandbox, new or over the files it had. `making` is the same each time. Returns when boxd accepts connections.
    async fn start(&self, id: &SandboxId, spec: &SandboxSpec, state: &ControlState) -> Result<(), ProviderError>;

    /// Whether files outlive processes here. Where they don't, what would be suspended ends.
    fn can_suspend(&self) -> bool {
        true
    }

    /// Ends its processes, keeps its files.
    async fn suspend(&self, id: &SandboxId) -> Result<(), ProviderError>;

    /// Ends its processes and removes everything of it.
    async fn destroy(&self, id: &SandboxId) -> Result<(), ProviderError>;

    /// All it has, running or not, of this node.
    async fn list(&self) -> Result<Vec<ProviderSandbox>, ProviderError>;

    async fn is_running(&self, id: &SandboxId) -> bool;

    /// Resolves when the sandbox no longer runs; at once when it doesn't.
    async fn ended(&self, id: &SandboxId);

    /// Opens a connection to its boxd.
    async fn dial(&self, id: &SandboxId, socket: BoxdSocket) -> Result<BoxedStream, ProviderError>;

    /// Stands in for boxd where the provider's sandboxes can't run it: then nobody dials them.
    fn adapter(&self) -> Option<Arc<dyn Adapter>> {
        None
    }

    /// Where clients reach its boxd without the gateway, without a slash at the end: for providers whose sandboxes have an address of
    /// their own. `None` while there is none, and the gateway is used.
    fn direct_url(&self, _id: &SandboxId) -> Option<String> {
        None
    }

    /// Keeps a sandbox's own files, running or not, for others to start from; answers with what they take. Whole when it returns, and
    /// not there at all when it fails or is interrupted.
    async fn take_snapshot(&self, _from: &SandboxId, _id: &SnapshotId, _spec: &SandboxSpec) -> Result<u64, ProviderError> {
        Err(self.unsupported("take snapshots"))
    }
    async fn remove_snapshot(&self, _id: &SnapshotId) -> Result<(), ProviderError> {
        Err(self.unsupported("remove snapshots"))
    }
    /// All that are whole, of this node.
    async fn snapshots(&self) -> Result<Vec<SnapshotId>, ProviderError> {
        Ok(Vec::new())
    }

    /// Whether there can be a volume of so many bytes.
    fn check_volume(&self, _size_bytes: u64) -> Result<(), ProviderError> {
        Err(self.unsupported("make volumes"))
    }
    /// Makes an empty volume; one that is there stays as it is.
    async fn make_volume(&self, _id: &VolumeId, _size_bytes: u64) -> Result<(), ProviderError> {
        Err(self.unsupported("make volumes"))
    }
    /// Nothing may have it mounted any more.
    async fn remove_volume(&self, _id: &VolumeId) -> Result<(), ProviderError> {
        Err(self.unsupported("remove volumes"))
    }
    /// All there are, of this node.
    async fn volumes(&self) -> Result<Vec<VolumeId>, ProviderError> {
        Ok(Vec::new())
    }

    #[doc(hidden)]
    fn unsupported(&self, what: &str) -> ProviderError {
        ProviderError::Refused(format!("the {} provider can't {what}", self.name()))
    }

    /// How much room the disk has that holds this node's sandboxes, where that is known.
    async fn host_disk(&self) -> Option<HostDisk> {
        None
    }

    /// What of this node runs on a filesystem that failed and takes no more writes. Starting a sandbox again corrects it.
    async fn failed_disks(&self) -> Vec<FailedDisk> {
        Vec::new()
    }

    /// The files written in a sandbox, which destroying it would erase; `None` where they can't be counted.
    async fn written_files(&self, _id: &SandboxId) -> Option<WrittenFiles> {
        None
    }

    /// Bytes its files take, where a soft limit must be watched; `None` where the host enforces the limit itself.
    async fn disk_usage(&self, id: &SandboxId, spec: &SandboxSpec) -> Option<DiskUsage>;
}

/// The files written in a sandbox, without those of its image, snapshot and volumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenFiles {
    pub files: u64,
    /// Their size.
    pub bytes: u64,
    /// False where there are more than were counted.
    pub is_complete: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskUsage {
    /// Which of its places it is: what one takes says nothing about another.
    pub location: u64,
    pub used: u64,
    pub limit: u64,
}

/// The disk that sandboxes' files are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostDisk {
    /// Bytes that can still be written.
    pub available: u64,
    /// Bytes that must stay free: below this sandboxes may not write.
    pub reserve: u64,
}

/// Whose filesystem failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailedDisk {
    Sandbox(SandboxId),
    Volume(VolumeId),
}
