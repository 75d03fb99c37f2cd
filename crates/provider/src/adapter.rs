//! For providers whose sandboxes can't run boxd: the dataplane's operations, as far as the provider's own API has them. The gateway
//! speaks HTTP and has checked token and capability before it asks.

use std::pin::Pin;

use async_trait::async_trait;
use cobox_protocol::{
    ApiError, SandboxId,
    exec::{ExecRequest, ExecResponse},
    files::FileWritten,
    fs::{FileEntry, ListRequest, ListResponse},
};
use tokio::io::AsyncRead;

/// A file's bytes on their way, in either direction.
pub type FileContent = Pin<Box<dyn AsyncRead + Send>>;

/// Why an operation was not done.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// The provider has nothing that could do it.
    #[error("the provider can't do this")]
    Unsupported,
    #[error(transparent)]
    Failed(#[from] ApiError),
}

pub type AdapterResult<T> = Result<T, AdapterError>;

/// Paths are absolute in the sandbox and as the client said them: resolving them beneath its root is the provider's work. What isn't
/// overridden is refused in the provider's name.
#[async_trait]
pub trait Adapter: Send + Sync {
    async fn exec(&self, _id: &SandboxId, _request: ExecRequest) -> AdapterResult<ExecResponse> {
        Err(AdapterError::Unsupported)
    }

    /// The file's size, where it is known before its bytes, and its bytes.
    async fn read(&self, _id: &SandboxId, _path: &str) -> AdapterResult<(Option<u64>, FileContent)> {
        Err(AdapterError::Unsupported)
    }

    /// Makes the file and the directories above it, or replaces it; says also whether it is new.
    async fn write(&self, _id: &SandboxId, _path: &str, _content: FileContent) -> AdapterResult<(FileWritten, bool)> {
        Err(AdapterError::Unsupported)
    }

    /// A file, or an empty directory.
    async fn delete(&self, _id: &SandboxId, _path: &str) -> AdapterResult<()> {
        Err(AdapterError::Unsupported)
    }

    async fn list(&self, _id: &SandboxId, _request: ListRequest) -> AdapterResult<ListResponse> {
        Err(AdapterError::Unsupported)
    }

    async fn stat(&self, _id: &SandboxId, _path: &str) -> AdapterResult<FileEntry> {
        Err(AdapterError::Unsupported)
    }
}
