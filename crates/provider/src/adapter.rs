//! The adapter of providers whose sandboxes can't run boxd: dataplane operations in terms of the provider's own API. The gateway handles
//! HTTP and checks token and capabilities before it calls an adapter.

use std::pin::Pin;

use async_trait::async_trait;
use cobox_protocol::{
    ApiError, SandboxId,
    exec::{ExecRequest, ExecResponse},
    files::FileWritten,
    fs::{FileEntry, ListRequest, ListResponse},
};
use tokio::io::AsyncRead;

/// A stream of a file's bytes, for reading or writing.
pub type FileContent = Pin<Box<dyn AsyncRead + Send>>;

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// The provider's API doesn't support the operation.
    #[error("the provider can't do this")]
    Unsupported,
    #[error(transparent)]
    Failed(#[from] ApiError),
}

pub type AdapterResult<T> = Result<T, AdapterError>;

/// Dataplane operations of a provider without boxd. Paths are absolute in the sandbox and as the client sent them: the provider must
/// resolve them beneath the sandbox's root. Operations that aren't overridden are refused as unsupported by the provider.
#[async_trait]
pub trait Adapter: Send + Sync {
    async fn exec(&self, _id: &SandboxId, _request: ExecRequest) -> AdapterResult<ExecResponse> {
        Err(AdapterError::Unsupported)
    }

    /// Reads a file: its size, if known in advance, and its content.
    async fn read(&self, _id: &SandboxId, _path: &str) -> AdapterResult<(Option<u64>, FileContent)> {
        Err(AdapterError::Unsupported)
    }

    /// Creates or replaces a file, and creates its parent directories. The boolean is true for a new file.
    async fn write(&self, _id: &SandboxId, _path: &str, _content: FileContent) -> AdapterResult<(FileWritten, bool)> {
        Err(AdapterError::Unsupported)
    }

    /// Deletes a file or an empty directory.
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
