//! Frames of the dataplane's WebSockets: JSON text in both directions, and binary frames for output if the client requested them.

use std::collections::BTreeMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};

use crate::{CapabilitySet, Secret, ShellId, error::ErrorBody, key::PrincipalKind, process::SignalName};

/// Maximum size of a frame, in either direction.
pub const MAX_FRAME_BYTES: usize = 1024 * 1024;
/// Maximum size of an `auth` frame, fragmented or not: many times the longest token. The gateway does not inspect longer frames, so boxd
/// must not accept them.
pub const MAX_AUTH_FRAME_BYTES: usize = 16 * 1024;
/// Maximum rows and columns of a terminal; larger screens would only cost memory.
pub const MAX_TERMINAL_SIDE: u16 = 1000;
pub const DEFAULT_COLS: u16 = 80;
pub const DEFAULT_ROWS: u16 = 24;
/// Name of the shared shell that a client joins by default.
pub const DEFAULT_SHELL_NAME: &str = "main";

/// WebSocket close codes.
pub mod close {
    use crate::ErrorCode;

    pub const GOING_AWAY: u16 = 1001;
    pub const UNAUTHENTICATED: u16 = 4401;
    pub const CAPABILITY: u16 = 4403;
    pub const AUTH_TIMEOUT: u16 = 4408;
    /// Another connection of the same client replaced this one.
    pub const TAKEN_OVER: u16 = 4409;
    pub const ENDED: u16 = 4410;
    /// A frame could not be parsed.
    pub const INVALID: u16 = 1007;
    pub const TOO_BIG: u16 = 1009;
    const INTERNAL: u16 = 1011;
    const TRY_AGAIN_LATER: u16 = 1013;

    /// Close code for an error.
    pub const fn code_for(code: ErrorCode) -> u16 {
        match code {
            ErrorCode::Unauthenticated | ErrorCode::TokenExpired => UNAUTHENTICATED,
            ErrorCode::TokenRevoked | ErrorCode::SessionExpired => ENDED,
            ErrorCode::ProviderUnavailable => GOING_AWAY,
            ErrorCode::TooLarge => TOO_BIG,
            ErrorCode::CapabilityDenied => CAPABILITY,
            ErrorCode::RateLimited | ErrorCode::QuotaExceeded | ErrorCode::BackendUnavailable => TRY_AGAIN_LATER,
            ErrorCode::Internal => INTERNAL,
            _ => INVALID,
        }
    }
}

/// Frame from a client; `S` is the `start` frame of the route. Unknown fields are refused, even from newer clients, because an ignored
/// field might be a restriction. Clients ignore unknown fields in frames of boxd.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "ClientFrame_{S}"))]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum ClientFrame<S> {
    Auth {
        token: Secret,
    },
    Start(S),
    Stdin {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data_b64: Option<String>,
        /// Sequence number of the client's input. boxd drops input that it has already received.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seq: Option<u64>,
    },
    CloseStdin,
    Resize {
        cols: u16,
        rows: u16,
    },
    Signal {
        signal: SignalName,
    },
    /// The client has consumed everything before `offset`; boxd need not keep it.
    Ack {
        offset: u64,
        /// stdout by default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stream: Option<OutputStream>,
    },
    Control {
        action: ControlAction,
    },
    Ping {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<serde_json::Value>,
    },
    Close,
}

/// Values of `type` in client frames.
pub const CLIENT_FRAME_TYPES: [&str; 10] = ["auth", "start", "stdin", "close_stdin", "resize", "signal", "ack", "control", "ping", "close"];

impl<S> ClientFrame<S> {
    /// Input as text if it is UTF-8, otherwise in base64.
    pub fn stdin(bytes: &[u8], seq: Option<u64>) -> Self {
        let (data, data_b64) = data_or_b64(bytes);
        ClientFrame::Stdin { data, data_b64, seq }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OutputStream {
    Stdout,
    Stderr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ControlAction {
    Take,
    Request,
    Release,
}

/// Joins a shell by name, and creates it if it does not exist.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ShellStart {
    /// Name or id; `main` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
    /// Command to run instead of a login shell.
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
    /// Joins as an observer, without input.
    #[serde(default, skip_serializing_if = "is_false")]
    pub observe: bool,
    /// Epoch of the shell to which `from` belongs, from its `ready` frame.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<String>,
    /// Offset of the first byte wanted: the end of what an earlier connection delivered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<u64>,
    /// Requests output in binary frames.
    #[serde(default, skip_serializing_if = "is_false")]
    pub binary: bool,
    /// Client id that is stable over reconnections: `seq` of `stdin` counts per client. Without it, `seq` counts per connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Additional terminal features that programs may use on this client's terminal while the client has control.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<TerminalPermission>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "Allowed"))]
#[serde(rename_all = "snake_case")]
pub enum TerminalPermission {
    Clipboard,
    Title,
}

/// Runs a command, or joins the one with this `command_id`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ExecStart {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub pty: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cols: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u16>,
    /// Whether the command has a standard input, or the whole input as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<StdinStart>,
    /// The whole input in base64, instead of `stdin`, for bytes that are not text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_b64: Option<String>,
    #[serde(default, alias = "timeout", alias = "timeout_secs", skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
    /// Ends the command when its last connection closes, instead of letting it run until a client reconnects.
    #[serde(default, skip_serializing_if = "is_false")]
    pub kill_on_disconnect: bool,
    /// Id chosen by the client, or taken from `ready`. A known id joins the command, which never runs twice. Without `command` and `argv`
    /// the frame only joins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_id: Option<String>,
    /// Offset of the first stdout byte wanted: the end of what an earlier connection delivered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_from: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_from: Option<u64>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub binary: bool,
    /// Client id that is stable over reconnections: `seq` of `stdin` counts per client. Without it, `seq` counts per connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum StdinStart {
    Open(bool),
    Text(String),
}

/// Frame from boxd; `R` is the `ready` frame of the route.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "ServerFrame_{R}"))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ServerFrame<R> {
    AuthOk {
        /// Absent if the token belongs to no session.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        session_id: Option<String>,
        capabilities: CapabilitySet,
    },
    Ready(R),
    Stdout {
        offset: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data_b64: Option<String>,
    },
    Stderr {
        offset: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data_b64: Option<String>,
    },
    /// Screen contents at `offset`, to be drawn on an empty terminal of this size. Output from `offset` on follows.
    Keyframe {
        offset: u64,
        cols: u16,
        rows: u16,
        data_b64: String,
    },
    /// The terminal has this size from `offset` on.
    Resized {
        offset: u64,
        cols: u16,
        rows: u16,
    },
    /// Bytes that are no longer kept.
    Gap {
        from: u64,
        to: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stream: Option<OutputStream>,
    },
    Control {
        controller: Option<Controller>,
        /// Whether this connection has control: one principal may have several connections.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        yours: Option<bool>,
    },
    StdinAck {
        seq: u64,
    },
    Exit {
        exit_code: i32,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signal: Option<i32>,
        #[serde(default, skip_serializing_if = "is_false")]
        timed_out: bool,
    },
    Pong {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<serde_json::Value>,
    },
    Error {
        error: ErrorBody,
    },
}

impl<R> ServerFrame<R> {
    pub fn output(stream: OutputStream, offset: u64, bytes: &[u8]) -> Self {
        let (data, data_b64) = data_or_b64(bytes);
        match stream {
            OutputStream::Stdout => ServerFrame::Stdout { offset, data, data_b64 },
            OutputStream::Stderr => ServerFrame::Stderr { offset, data, data_b64 },
        }
    }
}

/// The participant that controls a shell's input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Controller {
    pub principal: String,
    pub actor: PrincipalKind,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ShellReady {
    pub shell_id: ShellId,
    /// Changes when a shell of this name is started again. Offsets of another epoch are invalid.
    pub epoch: String,
    /// Offset of the first byte of output that follows.
    pub offset: u64,
    pub cols: u16,
    pub rows: u16,
    pub controller: Option<Controller>,
    /// Whether this connection has control: one principal may have several connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub yours: Option<bool>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExecReady {
    pub command_id: String,
    /// Process id in the sandbox's pid namespace.
    pub pid: i32,
    pub stdout_offset: u64,
    pub stderr_offset: u64,
}

/// A binary frame: one byte of kind, the offset as a big-endian u64, the bytes.
/// The `resized` frame directly before a keyframe has its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BinaryFrame<'a> {
    pub kind: BinaryKind,
    pub offset: u64,
    pub bytes: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BinaryKind {
    Stdout = 1,
    Stderr = 2,
    Keyframe = 3,
}

/// Size of the header of a binary frame: kind and offset.
pub const BINARY_HEAD_BYTES: usize = 9;

impl<'a> BinaryFrame<'a> {
    pub fn head(kind: BinaryKind, offset: u64) -> [u8; BINARY_HEAD_BYTES] {
        let mut head = [0; BINARY_HEAD_BYTES];
        head[0] = kind as u8;
        head[1..].copy_from_slice(&offset.to_be_bytes());
        head
    }

    /// `None` if the message is not a binary frame of a known kind.
    pub fn parse(message: &'a [u8]) -> Option<Self> {
        let (head, bytes) = message.split_first_chunk::<BINARY_HEAD_BYTES>()?;
        let kind = [BinaryKind::Stdout, BinaryKind::Stderr, BinaryKind::Keyframe].into_iter().find(|k| *k as u8 == head[0])?;
        let mut offset = [0; 8];
        offset.copy_from_slice(&head[1..]);
        Some(Self { kind, offset: u64::from_be_bytes(offset), bytes })
    }
}

/// Bytes as a `data | data_b64` pair: as text if they are UTF-8, otherwise in base64.
pub fn data_or_b64(bytes: &[u8]) -> (Option<String>, Option<String>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (Some(text.to_owned()), None),
        Err(_) => (None, Some(STANDARD.encode(bytes))),
    }
}

/// Bytes of a `data | data_b64` pair; an error names the field.
pub fn frame_bytes(data: Option<&str>, data_b64: Option<&str>) -> Result<Vec<u8>, String> {
    match (data, data_b64) {
        (Some(text), None) => Ok(text.as_bytes().to_vec()),
        (None, Some(b64)) => STANDARD.decode(b64).map_err(|e| format!("data_b64 is not base64: {e}")),
        (None, None) => Ok(Vec::new()),
        (Some(_), Some(_)) => Err("data and data_b64 can't both be given".to_owned()),
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(b: &bool) -> bool {
    !b
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_the_documented_json_format() {
        let encoded = |frame: &ServerFrame<ShellReady>| serde_json::to_string(frame).unwrap();
        let controller = Controller { principal: "ada".into(), actor: PrincipalKind::Human };
        let control = encoded(&ServerFrame::Control { controller: Some(controller), yours: Some(true) });
        assert_eq!(control, r#"{"type":"control","controller":{"principal":"ada","actor":"human"},"yours":true}"#);
        assert_eq!(encoded(&ServerFrame::Control { controller: None, yours: None }), r#"{"type":"control","controller":null}"#);
        assert_eq!(encoded(&ServerFrame::output(OutputStream::Stderr, 7, b"x")), r#"{"type":"stderr","offset":7,"data":"x"}"#);
        let start: ClientFrame<ExecStart> = serde_json::from_str(r#"{"type":"start","argv":["ls"],"stdin":true,"timeout":3}"#).unwrap();
        let ClientFrame::Start(start) = start else { panic!("{start:?}") };
        assert_eq!((start.stdin, start.timeout_seconds), (Some(StdinStart::Open(true)), Some(3.0)));
        let bare: ClientFrame<ShellStart> = serde_json::from_str(r#"{"type":"close_stdin"}"#).unwrap();
        assert!(matches!(bare, ClientFrame::CloseStdin));
    }

    #[test]
    fn binary_frames_round_trip_and_short_or_unknown_ones_are_rejected() {
        let mut message = BinaryFrame::head(BinaryKind::Stderr, 0x0102).to_vec();
        assert_eq!(message, [2, 0, 0, 0, 0, 0, 0, 1, 2]);
        message.extend_from_slice(b"out");
        let frame = BinaryFrame::parse(&message).unwrap();
        assert_eq!(frame, BinaryFrame { kind: BinaryKind::Stderr, offset: 0x0102, bytes: b"out" });
        assert_eq!(BinaryFrame::parse(&message[..8]), None);
        message[0] = 9;
        assert_eq!(BinaryFrame::parse(&message), None);
    }
}
