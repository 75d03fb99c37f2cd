//! Response bodies, headers and media types of the file and archive routes.

use serde::{Deserialize, Serialize};

/// Response to the PUT of a file or to an upload.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileWritten {
    pub path: String,
    /// Exact bytes, set when the path is not UTF-8 and `path` therefore has replacement characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    pub size: u64,
    pub etag: String,
}

/// `false` on GET, HEAD and PUT of a file: a path that contains a symbolic link is refused. The gateway sends it for every file link,
/// because a link grants access to one file, and a program in the sandbox could replace that file with a symbolic link.
pub const FILE_FOLLOW_HEADER: &str = "x-file-follow";

/// Permission bits of a file in octal, such as `644`: sent by the client on PUT, returned on GET and HEAD.
pub const FILE_MODE_HEADER: &str = "x-file-mode";

/// File type, such as `directory`, of a path that GET and HEAD refuse. A response to HEAD has no body for it.
pub const FILE_KIND_HEADER: &str = "x-file-kind";

/// Response to the PUT of an archive.
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

/// PAX global record in an archive, in the place of an entry that the sandbox's user may not read. Its value is the entry's name,
/// percent-encoded. Other archive readers ignore unknown records.
pub const ARCHIVE_SKIPPED: &str = "COBOX.skipped";
