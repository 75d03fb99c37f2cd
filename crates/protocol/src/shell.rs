//! Requests and responses of the HTTP shell routes: list, create and end shells, and run a command in a shared shell.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{ShellId, Timestamp, frame::Controller};

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ShellInfo {
    pub id: ShellId,
    pub name: String,
    /// Command that runs in it; absent for a login shell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    pub cols: u16,
    pub rows: u16,
    /// Total output so far, in bytes.
    pub offset: u64,
    pub controller: Option<Controller>,
    pub viewers: u32,
    /// Whether the shell is at its prompt, so that a command can be run; `null` if the shell does not report it.
    pub at_prompt: Option<bool>,
    pub created_at: Timestamp,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ShellList {
    pub items: Vec<ShellInfo>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ShellCreate {
    /// The shell's id by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cols: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u16>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ShellRun {
    pub command: String,
    #[serde(default, alias = "timeout", alias = "timeout_secs", skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_output_bytes: Option<u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ShellRunResult {
    /// Terminal output between the command and the next prompt.
    pub output: String,
    /// Exact bytes, set when the output is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_b64: Option<String>,
    /// `null` if the command did not end within the timeout.
    pub exit_code: Option<i32>,
    pub timed_out: bool,
    pub truncated: bool,
    /// Start offset of this output in the shell's output.
    pub from: u64,
    /// End offset of this output in the shell's output.
    pub to: u64,
    pub duration_ms: u64,
}
