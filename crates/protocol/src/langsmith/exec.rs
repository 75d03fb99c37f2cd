//! Command execution in the LangSmith sandbox SDKs' dialect: one request type for all transports, and the WebSocket frames.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Secret;

/// A command to run, or to join if its `command_id` is known.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "LangsmithExecute"))]
pub struct Execute {
    /// Command line for `shell`. Without it, on a terminal, the shell runs interactively.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// `/bin/bash` by default, or `/bin/sh` if bash is not installed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    /// Sent by newer clients instead of `cwd` and `env`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_config: Option<RunConfig>,
    /// 0 means that only the server's own limit applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
    /// Name of `timeout_seconds` in older clients. Ignored for an interactive shell on a stream, because a user works in it.
    #[serde(default, alias = "timeout_secs", skip_serializing_if = "Option::is_none")]
    pub timeout: Option<f64>,
    /// The command ends after this time without a connected client; negative for never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_seconds: Option<f64>,
    /// How long the output is kept after the command's end, up to the sandbox's own limit; negative for that limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kill_on_disconnect: Option<bool>,
    /// The command has no standard input, or its input ends now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub close_stdin: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cols: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssh_agent_forward: Option<bool>,
}

/// User, working directory and environment of commands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunConfig {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work_dir: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
}

/// Joins a command at the offsets where an earlier connection was lost.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "LangsmithResume"))]
pub struct Resume {
    pub command_id: String,
    #[serde(default)]
    pub stdout_offset: u64,
    #[serde(default)]
    pub stderr_offset: u64,
}

/// Frame from a client on `/execute/ws`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "LangsmithClientFrame"))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum LangsmithClientFrame {
    /// Extension of Cobox for clients that cannot send a header. Sent first, and again with each new token.
    Auth {
        token: Secret,
    },
    Execute(Box<Execute>),
    Reconnect(Resume),
    Input {
        data: String,
    },
    CloseStdin,
    Kill,
    Resize {
        cols: u16,
        rows: u16,
    },
}

pub const CLIENT_FRAME_TYPES: [&str; 7] = ["auth", "execute", "reconnect", "input", "close_stdin", "kill", "resize"];

/// Frame to a client on `/execute/ws`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "LangsmithServerFrame"))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum LangsmithServerFrame {
    /// First frame of every connection, including one that joins a running command.
    Started {
        command_id: String,
        pid: i32,
    },
    /// `offset` is the offset of the first byte. `data` has exactly as many bytes as the output: each byte that is not UTF-8 is replaced by
    /// `?`.
    Stdout {
        data: String,
        offset: u64,
    },
    Stderr {
        data: String,
        offset: u64,
    },
    Exit {
        exit_code: i32,
    },
    Error {
        error_type: String,
        error: String,
    },
}
