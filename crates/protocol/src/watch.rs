//! `GET /v1/watch`: what happens to the sandbox's files, as server-sent events.
//!
//! `event:` is the kind (`ready`, `created`, `modified`, `removed`, `renamed`, `overflow`, `error`), `id:` the cursor to come back with
//! as `Last-Event-ID` or `?cursor=`, and `data:` one of the shapes below.

use serde::{Deserialize, Serialize};

use crate::{Timestamp, fs::FileKind};

/// First, and after a resume: everything after this cursor follows.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WatchReady {
    pub cursor: String,
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    pub recursive: bool,
}

/// One change, after those of a short moment were put together.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WatchEvent {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    pub kind: FileKind,
    pub by: ChangedBy,
    pub at: Timestamp,
    /// Of a rename, with `to`, which is `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_b64: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_b64: Option<String>,
}

/// Who made a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum ChangedBy {
    /// Through boxd.
    Client { principal: String, actor: String },
    /// A program of the sandbox: always the word `process`.
    Process(String),
}

/// Events were lost: look at the files again.
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
    /// The cursor is older than what is kept, or of another life of the sandbox.
    CursorExpired,
    /// This reader was slower than the changes.
    FellBehind,
    /// The kernel dropped events.
    KernelQueue,
    /// More directories than may be watched: those beyond are not.
    WatchLimit,
    /// What was watched was removed or moved away. The stream ends.
    Gone,
}
