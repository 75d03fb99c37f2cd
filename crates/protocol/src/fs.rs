//! The `/v1/fs/*` requests and answers: looking at, searching and rearranging the sandbox's files.
//!
//! Wherever a request takes `path` it takes `path_b64` too, the exact bytes in base64 for a name that is not UTF-8; answers carry
//! both when the text alone would lose something.

use serde::{Deserialize, Serialize};

use crate::{Timestamp, error::ErrorBody};

/// What a path is.
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

/// One thing in the file system, as `list`, `stat` and `glob` tell it. Links are described themselves, not what they lead to.
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
    /// Of regular files: what `If-Match` takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// Where a symbolic link leads, as it is written in it.
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

/// `POST /v1/fs/list`. Pages stay right while the directory changes: a cursor is a place in the order, not a count.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct ListRequest {
    /// The shared folder unless told.
    pub path: Option<String>,
    pub path_b64: Option<String>,
    pub limit: Option<u32>,
    pub cursor: Option<String>,
    pub sort: SortBy,
    pub descending: bool,
    /// Everything below too, each directory before what is in it; by name only.
    pub recursive: bool,
    /// Of a recursive list: 1 is the directory itself.
    pub max_depth: Option<u32>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ListResponse {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    pub entries: Vec<FileEntry>,
    /// There is more, from here on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
    /// `depth` where directories of this page were nested too deep to enter.
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
    /// Describe what a link leads to instead of the link.
    pub follow: bool,
}

/// `POST /v1/fs/mkdir`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct MkdirRequest {
    pub path: Option<String>,
    pub path_b64: Option<String>,
    /// Make the directories above it too.
    pub parents: bool,
    /// One that is there already is no error.
    pub exist_ok: bool,
    /// Octal permission bits of the new directory; 755 unless told.
    pub mode: Option<String>,
}

/// `POST /v1/fs/move` and `/v1/fs/copy`. `to` is the new name itself, never a directory to put it into; its parents are made.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct TransferRequest {
    pub from: Option<String>,
    pub from_b64: Option<String>,
    pub to: Option<String>,
    pub to_b64: Option<String>,
    /// Replace a file that is there. A directory with something in it is never replaced.
    pub overwrite: bool,
    /// Copying a directory needs it.
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

/// What mkdir, move, copy and remove did.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Changed {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    /// False where it was already as asked for.
    pub changed: bool,
    /// Files, directories and links made, moved or removed.
    pub entries: u64,
    /// Bytes copied.
    #[serde(default)]
    pub bytes: u64,
    /// Fifos, sockets and devices, which are not copied.
    #[serde(default)]
    pub skipped: u64,
}

/// `POST /v1/fs/edit`: exact replacement, all of it or nothing. `old` must be there exactly once unless `replace_all`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct EditRequest {
    pub path: Option<String>,
    pub path_b64: Option<String>,
    pub old: Option<String>,
    pub new: Option<String>,
    pub replace_all: bool,
    /// Several, one after the other, instead of `old` and `new`.
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Edited {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    pub size: u64,
    pub etag: String,
    pub replacements: u64,
}

/// One pattern or several.
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

/// `POST /v1/fs/glob`. `*` and `?` stop at `/`, `**` doesn't.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct GlobRequest {
    pub pattern: String,
    pub path: Option<String>,
    pub path_b64: Option<String>,
    pub limit: Option<u32>,
    /// Patterns of what to leave out; a directory that matches is not entered.
    pub ignore: Option<OneOrMany>,
    pub respect_ignore: bool,
    /// Names that begin with a dot: found unless told otherwise, or `respect_ignore` is set.
    pub hidden: Option<bool>,
    pub case_insensitive: bool,
    /// By `mtime` the newest come first.
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
    /// Directories that the sandbox's user may not read: what is in them was not seen.
    #[serde(default)]
    pub directories_unreadable: u64,
}

/// Why a search ended before it had seen everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum StoppedBy {
    MaxMatches,
    MaxBytes,
    Timeout,
    /// Some directories were nested too deep to enter.
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
    /// The pattern is text, not a regular expression.
    pub literal: bool,
    pub case_insensitive: bool,
    pub word: bool,
    pub multiline: bool,
    /// Only files that match, as ripgrep's `--glob`: `*.rs` at any depth, `!` leaves out.
    pub glob: Option<OneOrMany>,
    pub respect_ignore: bool,
    /// Names that begin with a dot: searched unless told otherwise, or `respect_ignore` is set.
    pub hidden: Option<bool>,
    pub before: Option<u32>,
    pub after: Option<u32>,
    pub context: Option<u32>,
    pub max_matches: Option<u32>,
    pub max_per_file: Option<u32>,
    /// Longer lines are cut.
    pub max_line_bytes: Option<u32>,
    pub timeout_seconds: Option<f64>,
    pub output: GrepOutput,
}

/// Sorted by path. Of `matches`, `files` and `counts` the one that was asked for.
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
    /// Binary files, which are not searched.
    pub files_binary: u64,
    /// Files that could not be read, or not as lines.
    pub files_unreadable: u64,
    /// Directories that the sandbox's user may not read: what is in them was not searched.
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
    /// Lines around it; each is told once, with the match it is nearest to in the order of the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<GrepLine>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<GrepLine>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GrepLine {
    pub line_number: u64,
    /// Without the line's end.
    pub text: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text_b64: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_cut: bool,
    /// Where in the line, in bytes from 0, the pattern matched: start and end of each, the first few.
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

/// One file's result of `POST /v1/files/upload`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Uploaded {
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
    pub files: Vec<Uploaded>,
}
