//! File changes in the sandbox, sent by `GET /v1/watch` as server-sent events.
//!
//! `event:` is the kind (`ready`, `created`, `modified`, `removed`, `renamed`, `overflow`, `error`), `id:` the cursor to resume with as
//! `Last-Event-ID` or `?cursor=`, and `data:` one of the types below.

use serde::{Deserialize, Serialize};

use crate::{Timestamp, fs::FileKind};

/// First event, also after a resume: all changes after this cursor follow.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WatchReady {
    pub cursor: String,
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    pub recursive: bool,
}

/// One change. Changes of the same file within a short time are merged.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WatchEvent {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    pub kind: FileKind,
    pub by: ChangedBy,
    pub at: Timestamp,
    /// Old path of a rename. `to` is the new one, the same as `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_b64: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_b64: Option<String>,
}

/// Author of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum ChangedBy {
    /// A client, through boxd.
    Client { principal: String, actor: String },
    /// A program in the sandbox; the value is always `process`.
    Process(String),
}

/// Events were lost; the client must list the files again.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WatchOverflow {
    pub reason: OverflowReason,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OverflowReason {
    /// The cursor is older than the kept events, or belongs to an earlier run of the sandbox.
    CursorExpired,
    /// The client read more slowly than changes occurred.
    FellBehind,
    /// The kernel dropped events.
    KernelQueue,
    /// The limit of watched directories is reached; further directories are not watched.
    WatchLimit,
    /// The watched path was removed or moved away. The stream ends.
    Gone,
}
