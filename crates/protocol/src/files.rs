//! What the file routes answer beside the bytes themselves.

use serde::{Deserialize, Serialize};

/// The answer to a PUT or an upload.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FileWritten {
    pub path: String,
    pub size: u64,
    pub etag: String,
}

/// Permission bits of a file, octal text such as `644`: asked for on PUT, told on GET and HEAD.
pub const FILE_MODE_HEADER: &str = "x-file-mode";

/// Answer to a PUT of an archive.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ArchiveUnpacked {
    pub path: String,
    pub entries: u64,
    pub bytes: u64,
}

pub const TAR: &str = "application/x-tar";
pub const TAR_ZSTD: &str = "application/x-tar+zstd";
