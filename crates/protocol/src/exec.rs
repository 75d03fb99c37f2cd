//! Running one command to its end.

use std::collections::BTreeMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// Run by a shell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Run as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    /// The shell for `command`; `/bin/sh` unless told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
    /// In place of `stdin`, for bytes that are not text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_b64: Option<String>,
    /// `timeout` and `timeout_secs` are read too. 0 means no limit but the server's own.
    #[serde(default, alias = "timeout", alias = "timeout_secs", skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
    /// Of stdout, and of stderr. In an event stream a `gap` before the exit says how much more there was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_output_bytes: Option<u64>,
    /// Chosen by the client, so that asking again joins the command instead of running it twice. Alone it only joins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_id: Option<String>,
    /// Of an event stream, the first bytes wanted: where an earlier one broke off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_from: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_from: Option<u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExecResponse {
    pub stdout: String,
    pub stderr: String,
    /// The exact bytes, when `stdout` is not UTF-8 and shows them with replacement characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_b64: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_b64: Option<String>,
    /// 128 + the signal's number when a signal ended it.
    pub exit_code: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    pub timed_out: bool,
    pub truncated: bool,
    pub duration_ms: u64,
    pub command_id: String,
}

/// Bytes as the text a JSON answer shows, and in base64 too when the text would lose something.
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
