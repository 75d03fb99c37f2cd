//! Running commands as the LangSmith sandbox SDKs ask for it: one request for all of their transports, and the frames of the WebSocket.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Secret;

/// A command to run, or to join where its `command_id` is known.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "LangsmithExecute"))]
pub struct Execute {
    /// Run by `shell`. Without it, on a terminal, the shell itself runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// `/bin/bash` unless told, or `/bin/sh` where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    /// What newer clients send in place of `cwd` and `env`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_config: Option<RunConfig>,
    /// 0 means no limit but the server's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
    /// The same as older clients say it; on a stream it doesn't count for a bare shell, which is somebody's terminal.
    #[serde(default, alias = "timeout_secs", skip_serializing_if = "Option::is_none")]
    pub timeout: Option<f64>,
    /// The command ends when nobody is connected to it for so long; negative for never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_seconds: Option<f64>,
    /// How long its output is kept after its end, within the sandbox's own limit; negative for as long as that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kill_on_disconnect: Option<bool>,
    /// It has no standard input, or has it no longer.
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

/// As whom, where and with which variables commands run.
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

/// A command to join where an earlier connection broke off.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "LangsmithResume"))]
pub struct Resume {
    pub command_id: String,
    #[serde(default)]
    pub stdout_offset: u64,
    #[serde(default)]
    pub stderr_offset: u64,
}

/// What a client sends on `/execute/ws`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "LangsmithClientFrame"))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ClientFrame {
    /// Ours: for who can't send a header. It comes first, and again with a fresh token.
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

/// What a client gets on `/execute/ws`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "LangsmithServerFrame"))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ServerFrame {
    /// First on every connection, also on one that joins.
    Started {
        command_id: String,
        pid: i32,
    },
    /// `offset` is that of its first byte, and `data` has as many bytes as were printed: what is not UTF-8 is shown as `?`, byte by byte.
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
