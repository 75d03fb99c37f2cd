//! The answer for a command that ran to its end: sent as one short piece, or in pieces that carry their memory
//! reservation.

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use cobox_protocol::{
    ApiError,
    exec::{ExecResponse, text_and_b64},
    shell::ShellRunResult,
};
use serde_json::json;

use super::{Commands, internal, memory_budget::MemoryReservation};
use crate::{
    http_listener::Connection,
    streamed_json::{self, TextField},
};

/// Output up to this size is answered in one piece: in any encoding, a socket's send buffer takes it without waiting
/// for the client.
const SHORT_BYTES: usize = 16 * 1024;

/// Appended to stderr for clients whose answer format has no field for it.
const TIMED_OUT: &str = "\n[the command took longer than its timeout and was ended]\n";
const TRUNCATED: &str = "\n[there was more output than fits an answer; stream it or write it to a file]\n";

pub struct CompletedCommand {
    /// The whole answer except the output.
    pub response: ExecResponse,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// The memory reservation of the output.
    pub memory: MemoryReservation,
}

impl CompletedCommand {
    pub fn respond(mut self, connection: &Connection) -> Result<Response, ApiError> {
        if self.is_short() {
            (self.response.stdout, self.response.stdout_b64) = text_and_b64(self.stdout);
            (self.response.stderr, self.response.stderr_b64) = text_and_b64(self.stderr);
            return Ok(Json(self.response).into_response());
        }
        let mut texts = Vec::new();
        for (text, b64, bytes) in [("stdout", "stdout_b64", self.stdout), ("stderr", "stderr_b64", self.stderr)] {
            let is_text = std::str::from_utf8(&bytes).is_ok();
            let bytes = Bytes::from(bytes);
            texts.push((text, TextField::Shown(bytes.clone())));
            if !is_text {
                texts.push((b64, TextField::Base64(bytes)));
            }
        }
        streamed_json::respond(&self.response, texts, self.memory, connection).map_err(internal)
    }

    /// The answer in the format of the LangSmith SDK.
    pub fn respond_langsmith(mut self, connection: &Connection) -> Result<Response, ApiError> {
        // That format has no fields for these two facts, so they are appended to stderr.
        for (applies, note) in [(self.response.timed_out, TIMED_OUT), (self.response.truncated, TRUNCATED)] {
            if applies {
                self.stderr.extend_from_slice(note.as_bytes());
            }
        }
        if self.is_short() {
            let (stdout, stderr) = (String::from_utf8_lossy(&self.stdout), String::from_utf8_lossy(&self.stderr));
            return Ok(Json(json!({ "stdout": stdout, "stderr": stderr, "exit_code": self.response.exit_code })).into_response());
        }
        let texts = vec![("stdout", TextField::Shown(self.stdout.into())), ("stderr", TextField::Shown(self.stderr.into()))];
        streamed_json::respond(&json!({ "exit_code": self.response.exit_code }), texts, self.memory, connection).map_err(internal)
    }

    fn is_short(&self) -> bool {
        self.stdout.len() + self.stderr.len() <= SHORT_BYTES
    }
}

/// The answer for a command that was typed into a shell; `memory` is its reservation.
pub fn shell_run_response(
    result: ShellRunResult,
    memory: MemoryReservation,
    commands: &Commands,
    connection: &Connection,
) -> Result<Response, ApiError> {
    let length = result.output.len() + result.output_b64.as_ref().map_or(0, String::len);
    if length <= SHORT_BYTES {
        return Ok(Json(result).into_response());
    }
    let memory = memory.resize(length, commands.memory_budget())?;
    let mut result = result;
    let mut texts = vec![("output", TextField::Shown(std::mem::take(&mut result.output).into()))];
    texts.extend(result.output_b64.take().map(|b64| ("output_b64", TextField::Shown(b64.into()))));
    streamed_json::respond(&result, texts, memory, connection).map_err(internal)
}
