//! The JSON frames of a shell's WebSocket.

use std::collections::BTreeMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};

use crate::{CapabilitySet, Secret, ShellId, error::ErrorBody};

/// Largest frame either side sends.
pub const MAX_FRAME_BYTES: usize = 1024 * 1024;
/// Largest terminal: beyond it a screen costs more memory than any real one needs.
pub const MAX_TERMINAL_SIDE: u16 = 1000;
pub const DEFAULT_COLS: u16 = 80;
pub const DEFAULT_ROWS: u16 = 24;
/// The shell people and agents meet in when nobody names one.
pub const DEFAULT_SHELL_NAME: &str = "main";

/// WebSocket close codes of the protocol.
pub mod close {
    pub const GOING_AWAY: u16 = 1001;
    pub const UNAUTHENTICATED: u16 = 4401;
    pub const CAPABILITY: u16 = 4403;
    pub const AUTH_TIMEOUT: u16 = 4408;
    pub const ENDED: u16 = 4410;
    /// A frame we could not read.
    pub const INVALID: u16 = 1007;
    pub const TOO_BIG: u16 = 1009;
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ClientFrame {
    Auth {
        token: Secret,
    },
    Start(ShellStart),
    Stdin {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data_b64: Option<String>,
    },
    Resize {
        cols: u16,
        rows: u16,
    },
    Signal {
        signal: String,
    },
    Ping {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<serde_json::Value>,
    },
    Close,
}

impl ClientFrame {
    /// The words of `type`.
    pub const TYPES: [&'static str; 7] = ["auth", "start", "stdin", "resize", "signal", "ping", "close"];
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ShellStart {
    /// What to run instead of a login shell.
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

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ServerFrame {
    AuthOk {
        /// Absent where the token belongs to no session.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        session_id: Option<String>,
        capabilities: CapabilitySet,
    },
    Ready {
        shell_id: ShellId,
        offset: u64,
        cols: u16,
        rows: u16,
    },
    Stdout {
        offset: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data_b64: Option<String>,
    },
    Exit {
        exit_code: i32,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signal: Option<i32>,
    },
    Pong {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<serde_json::Value>,
    },
    Error {
        error: ErrorBody,
    },
}

impl ServerFrame {
    /// Output at an offset: as text where it is text, in base64 where that would change it.
    pub fn stdout(offset: u64, bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => ServerFrame::Stdout { offset, data: Some(text.to_owned()), data_b64: None },
            Err(_) => ServerFrame::Stdout { offset, data: None, data_b64: Some(STANDARD.encode(bytes)) },
        }
    }
}

/// The bytes of a `data | data_b64` pair; an error names the field.
pub fn frame_bytes(data: Option<&str>, data_b64: Option<&str>) -> Result<Vec<u8>, String> {
    match (data, data_b64) {
        (Some(text), None) => Ok(text.as_bytes().to_vec()),
        (None, Some(b64)) => STANDARD.decode(b64).map_err(|e| format!("data_b64 is not base64: {e}")),
        (None, None) => Ok(Vec::new()),
        (Some(_), Some(_)) => Err("data and data_b64 can't both be given".to_owned()),
    }
}
