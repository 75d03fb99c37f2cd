//! Requests and responses of the `/v1/fs/*` routes, which list, search, edit and move files in the sandbox.
//!
//! A request with `path` also accepts `path_b64`: the exact bytes in base64, for names that are not UTF-8. Responses have both if the
//! path is not UTF-8.

use serde::{Deserialize, Serialize};

use crate::{Timestamp, error::ErrorBody};

/// File type of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    File,
    Directory,
    Symlink,
    Fifo,
    Socket,
    Device,
    Unknown,
}

/// A file system entry, as `list`, `stat` and `glob` return it. For a symbolic link this describes the link, not its target.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileEntry {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name_b64: Option<String>,
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    #[serde(rename = "type")]
    pub kind: FileKind,
    pub size: u64,
    /// Permission bits in octal, such as `644`.
    pub mode: String,
    pub mtime: Timestamp,
    /// Set for regular files: the value for `If-Match`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// Target of a symbolic link, as stored in the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_b64: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum SortBy {
    #[default]
    Name,
    Mtime,
    Size,
}

/// `POST /v1/fs/list`. Pages remain correct while the directory changes: a cursor is a position in the sort order, not a count.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct ListRequest {
    /// The shared folder by default.
    pub path: Option<String>,
    pub path_b64: Option<String>,
    pub limit: Option<u32>,
    pub cursor: Option<String>,
    pub sort: SortBy,
    pub descending: bool,
    /// Also lists all descendants, each directory before its contents. Only with `sort` by name.
    pub recursive: bool,
    /// Maximum depth of a recursive list; 1 is the directory's own entries.
    pub max_depth: Option<u32>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ListResponse {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    pub entries: Vec<FileEntry>,
    /// Set if there are more entries: the cursor of the next page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
    /// `depth` if directories on this page were nested too deeply to enter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<StoppedBy>,
}

/// `POST /v1/fs/stat`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct StatRequest {
    pub path: Option<String>,
    pub path_b64: Option<String>,
    /// Describes the target of a symbolic link instead of the link.
    pub follow: bool,
}

/// `POST /v1/fs/mkdir`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct MkdirRequest {
    pub path: Option<String>,
    pub path_b64: Option<String>,
    /// Also creates missing parent directories.
    pub parents: bool,
    /// An existing directory is not an error.
    pub exist_ok: bool,
    /// Permission bits of the new directory in octal; 755 by default.
    pub mode: Option<String>,
}

/// `POST /v1/fs/move` and `/v1/fs/copy`. `to` is the new path itself, never a directory that receives it. Missing parents of `to` are
/// created.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct TransferRequest {
    pub from: Option<String>,
    pub from_b64: Option<String>,
    pub to: Option<String>,
    pub to_b64: Option<String>,
    /// Replaces an existing file. A directory that is not empty is never replaced.
    pub overwrite: bool,
    /// Required to copy a directory.
    pub recursive: bool,
}

/// `POST /v1/fs/remove`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct RemoveRequest {
    pub path: Option<String>,
    pub path_b64: Option<String>,
    pub recursive: bool,
    pub missing_ok: bool,
}

/// Result of mkdir, move, copy and remove.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "Changed"))]
pub struct ChangeResponse {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    /// False if the requested state already existed.
    pub changed: bool,
    /// Number of files, directories and links created, moved or removed.
    pub entries: u64,
    /// Bytes copied.
    #[serde(default)]
    pub bytes: u64,
    /// Number of fifos, sockets and devices, which are not copied.
    #[serde(default)]
    pub skipped: u64,
}

/// `POST /v1/fs/edit`: replaces exact text, all edits or none. `old` must occur exactly once unless `replace_all` is set.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct EditRequest {
    pub path: Option<String>,
    pub path_b64: Option<String>,
    pub old: Option<String>,
    pub new: Option<String>,
    pub replace_all: bool,
    /// Several replacements, applied in order, instead of `old` and `new`.
    pub edits: Option<Vec<Replacement>>,
    pub if_match: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Replacement {
    pub old: String,
    pub new: String,
    #[serde(default)]
    pub replace_all: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "Edited"))]
pub struct EditResponse {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    pub size: u64,
    pub etag: String,
    pub replacements: u64,
}

/// One pattern or a list of patterns.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    pub fn as_slice(&self) -> &[String] {
        match self {
            OneOrMany::One(one) => std::slice::from_ref(one),
            OneOrMany::Many(many) => many,
        }
    }
}

/// `POST /v1/fs/glob`. `*` and `?` do not match `/`, `**` does.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct GlobRequest {
    pub pattern: String,
    pub path: Option<String>,
    pub path_b64: Option<String>,
    pub limit: Option<u32>,
    /// Patterns to exclude; a matching directory is not entered.
    pub ignore: Option<OneOrMany>,
    pub respect_ignore: bool,
    /// Whether names that begin with a dot are included. True by default, unless `respect_ignore` is set.
    pub hidden: Option<bool>,
    pub case_insensitive: bool,
    /// With `mtime`, the newest files come first.
    pub sort: SortBy,
    pub timeout_seconds: Option<f64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GlobResponse {
    pub matches: Vec<FileEntry>,
    pub truncated: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<StoppedBy>,
    /// Number of directories that the sandbox's user may not read; their contents are missing from the result.
    #[serde(default)]
    pub directories_unreadable: u64,
}

/// Why a search ended early or is incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum StoppedBy {
    MaxMatches,
    MaxBytes,
    Timeout,
    /// Some directories were nested too deeply to enter.
    Depth,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum GrepOutput {
    #[default]
    Content,
    Files,
    Count,
}

/// `POST /v1/fs/grep`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct GrepRequest {
    pub pattern: String,
    pub path: Option<String>,
    pub path_b64: Option<String>,
    /// Treats the pattern as text instead of a regular expression.
    pub literal: bool,
    pub case_insensitive: bool,
    pub word: bool,
    pub multiline: bool,
    /// Searches only matching files, as ripgrep's `--glob` does: `*.rs` matches at any depth, `!` excludes.
    pub glob: Option<OneOrMany>,
    pub respect_ignore: bool,
    /// Whether names that begin with a dot are searched. True by default, unless `respect_ignore` is set.
    pub hidden: Option<bool>,
    pub before: Option<u32>,
    pub after: Option<u32>,
    pub context: Option<u32>,
    pub max_matches: Option<u32>,
    pub max_per_file: Option<u32>,
    /// Maximum length of a returned line; longer lines are truncated.
    pub max_line_bytes: Option<u32>,
    pub timeout_seconds: Option<f64>,
    pub output: GrepOutput,
}

/// Response to `POST /v1/fs/grep`, sorted by path. Of `matches`, `files` and `counts`, only the requested `output` is set.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GrepResponse {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matches: Option<Vec<GrepMatch>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Vec<GrepFile>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counts: Option<Vec<GrepFile>>,
    pub truncated: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<StoppedBy>,
    pub files_searched: u64,
    pub bytes_searched: u64,
    /// Number of binary files, which are not searched.
    pub files_binary: u64,
    /// Number of files that could not be read, or could not be split into lines.
    pub files_unreadable: u64,
    /// Number of directories that the sandbox's user may not read; their contents were not searched.
    #[serde(default)]
    pub directories_unreadable: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GrepMatch {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    #[serde(flatten)]
    pub line: GrepLine,
    /// Context lines before the match. Each context line appears once, with the nearest match in file order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<GrepLine>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<GrepLine>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GrepLine {
    pub line_number: u64,
    /// The line without its line ending.
    pub text: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text_b64: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_cut: bool,
    /// Start and end offset, in bytes from 0, of the first few matches in the line.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<(u32, u32)>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GrepFile {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    pub count: u64,
}

/// Result for one file of `POST /v1/files/upload`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "Uploaded"))]
pub struct UploadedFile {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct UploadResponse {
    pub files: Vec<UploadedFile>,
}
