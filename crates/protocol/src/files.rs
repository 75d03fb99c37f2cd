//! What the file routes answer beside the bytes themselves.

use serde::{Deserialize, Serialize};

/// The answer to a PUT or an upload.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileWritten {
    pub path: String,
    /// The exact bytes, when the path is not UTF-8 and `path` shows it with replacement characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    pub size: u64,
    pub etag: String,
}

/// `false` on GET, HEAD and PUT of a file: a path that goes through a symbolic link is refused. The gateway sends it with every file link,
/// which is for one file and not for what a program in the sandbox puts in its place.
pub const FILE_FOLLOW_HEADER: &str = "x-file-follow";

/// Permission bits of a file, octal text such as `644`: asked for on PUT, told on GET and HEAD.
pub const FILE_MODE_HEADER: &str = "x-file-mode";

/// What a path is that GET and HEAD refuse, such as `directory`: a HEAD has no body to say so in.
pub const FILE_KIND_HEADER: &str = "x-file-kind";

/// Answer to a PUT of an archive.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ArchiveUnpacked {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    pub entries: u64,
    pub bytes: u64,
}

pub const TAR: &str = "application/x-tar";
pub const TAR_ZSTD: &str = "application/x-tar+zstd";

/// In an archive, at the place of what its user may not read: a PAX global record with the name it would have had, percent-encoded.
/// Other readers of archives pass over records they don't know.
pub const ARCHIVE_SKIPPED: &str = "COBOX.skipped";
