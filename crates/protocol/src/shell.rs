//! Shells over plain HTTP: which there are, making and ending one, and running a command in one that people watch.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{ShellId, Timestamp, frame::Controller};

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ShellInfo {
    pub id: ShellId,
    pub name: String,
    /// What runs in it where that isn't a login shell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    pub cols: u16,
    pub rows: u16,
    /// Output so far, in bytes.
    pub offset: u64,
    pub controller: Option<Controller>,
    pub viewers: u32,
    /// Whether a command could be run in it now; `null` where the shell doesn't tell.
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
    /// Its id unless told.
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
    /// What the terminal showed between the command and the next prompt.
    pub output: String,
    /// The exact bytes, where they are no UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_b64: Option<String>,
    /// `null` where the command did not come to an end in time.
    pub exit_code: Option<i32>,
    pub timed_out: bool,
    pub truncated: bool,
    /// Where it is in the shell's output.
    pub from: u64,
    pub to: u64,
    pub duration_ms: u64,
}
