//! Request and response of `POST /v1/exec`, which runs one command to its end.

use std::collections::BTreeMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// Command line, interpreted by `shell`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Program and arguments, executed without a shell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    /// Shell that interprets `command`; `/bin/sh` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
    /// Standard input in base64, instead of `stdin`, for bytes that are not text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_b64: Option<String>,
    /// Also accepted as `timeout` and `timeout_secs`. 0 means that only the server's own limit applies.
    #[serde(default, alias = "timeout", alias = "timeout_secs", skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
    /// Maximum for stdout and for stderr, each. In an event stream, a `gap` before the exit covers the bytes beyond it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_output_bytes: Option<u64>,
    /// Idempotency key chosen by the client: a repeated request joins the command instead of running it twice. Without `command`
    /// and `argv` the request only joins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_id: Option<String>,
    /// Offset of the first stdout byte wanted in an event stream: the end of what an earlier stream delivered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_from: Option<u64>,
    /// As `stdout_from`, for stderr.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_from: Option<u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExecResponse {
    pub stdout: String,
    pub stderr: String,
    /// Exact bytes, set when stdout is not UTF-8 and `stdout` therefore has replacement characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_b64: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_b64: Option<String>,
    /// Exit status; 128 + the signal's number if a signal ended the command.
    pub exit_code: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    pub timed_out: bool,
    pub truncated: bool,
    pub duration_ms: u64,
    pub command_id: String,
}

/// Encodes bytes for a JSON response: as text, and also as base64 if they are not UTF-8.
pub fn text_and_b64(bytes: Vec<u8>) -> (String, Option<String>) {
    match String::from_utf8(bytes) {
        Ok(text) => (text, None),
        Err(e) => {
            let b64 = STANDARD.encode(e.as_bytes());
            (String::from_utf8_lossy(e.as_bytes()).into_owned(), Some(b64))
        }
    }
}

/// The reverse of [`text_and_b64`].
pub fn exact_bytes(text: &str, b64: Option<&str>) -> Result<Vec<u8>, base64::DecodeError> {
    match b64 {
        Some(b) => STANDARD.decode(b),
        None => Ok(text.as_bytes().to_vec()),
    }
}
