//! The frames of the dataplane's WebSockets: JSON text both ways, and binary ones for output where the client asked for them.

use std::collections::BTreeMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};

use crate::{CapabilitySet, Secret, ShellId, error::ErrorBody, key::PrincipalKind, process::SignalName};

/// Largest frame either side sends.
pub const MAX_FRAME_BYTES: usize = 1024 * 1024;
/// Longest `auth` frame, in one piece or several: many times the longest token. The gateway looks at no longer ones, so boxd takes none.
pub const MAX_AUTH_FRAME_BYTES: usize = 16 * 1024;
/// Largest terminal: beyond it a screen costs more memory than any real one needs.
pub const MAX_TERMINAL_SIDE: u16 = 1000;
pub const DEFAULT_COLS: u16 = 80;
pub const DEFAULT_ROWS: u16 = 24;
/// The shell people and agents meet in when nobody names one.
pub const DEFAULT_SHELL_NAME: &str = "main";

/// WebSocket close codes of the protocol.
pub mod close {
    use crate::ErrorCode;

    pub const GOING_AWAY: u16 = 1001;
    pub const UNAUTHENTICATED: u16 = 4401;
    pub const CAPABILITY: u16 = 4403;
    pub const AUTH_TIMEOUT: u16 = 4408;
    /// Another connection of the same client stands in this one's place.
    pub const TAKEN_OVER: u16 = 4409;
    pub const ENDED: u16 = 4410;
    /// A frame we could not read.
    pub const INVALID: u16 = 1007;
    pub const TOO_BIG: u16 = 1009;
    const INTERNAL: u16 = 1011;
    const TRY_AGAIN_LATER: u16 = 1013;

    /// How a connection is closed for an error.
    pub const fn of(code: ErrorCode) -> u16 {
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

/// What a client sends; `S` is the route's own `start`. Unknown fields are refused, also in frames of newer clients: one that was ignored
/// might have been a restriction. Clients ignore unknown fields of what boxd sends.
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
        /// Counts up per client: what was taken already is not taken again.
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
    /// Everything before `offset` has been used and need not be kept.
    Ack {
        offset: u64,
        /// stdout unless told.
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

/// The words of a client frame's `type`.
pub const CLIENT_FRAME_TYPES: [&str; 10] = ["auth", "start", "stdin", "close_stdin", "resize", "signal", "ack", "control", "ping", "close"];

impl<S> ClientFrame<S> {
    /// Input as text where it is text, in base64 where that would change it.
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

/// Joins a shell by its name, and makes it where there is none yet.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ShellStart {
    /// A name or an id; `main` unless told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
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
    /// Only look.
    #[serde(default, skip_serializing_if = "is_false")]
    pub observe: bool,
    /// Of the shell that `from` counts in, as `ready` told it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<String>,
    /// The first byte wanted: where an earlier connection broke off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<u64>,
    /// Output comes in binary frames.
    #[serde(default, skip_serializing_if = "is_false")]
    pub binary: bool,
    /// The client's own name for itself, kept over reconnections: what `stdin`'s `seq` counts for. Without one it counts for the connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// What programs may do to this client's terminal beside printing on it, while it has control.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<Allowed>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Allowed {
    Clipboard,
    Title,
}

/// Runs a command, or joins the one that has this `command_id`.
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
    /// Whether there is a standard input at all, or all of it as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<StdinStart>,
    /// In place of `stdin`: all of it, for bytes that are not text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_b64: Option<String>,
    #[serde(default, alias = "timeout", alias = "timeout_secs", skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
    /// Ends the command when its last connection goes, instead of letting it run on for somebody to come back to.
    #[serde(default, skip_serializing_if = "is_false")]
    pub kill_on_disconnect: bool,
    /// Chosen by the client, or told by `ready`. A known one joins and never runs twice; alone it only joins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_id: Option<String>,
    /// The first bytes wanted: where an earlier connection broke off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_from: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_from: Option<u64>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub binary: bool,
    /// The client's own name for itself, kept over reconnections: what `stdin`'s `seq` counts for. Without one it counts for the connection.
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

/// What boxd sends; `R` is the route's own `ready`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "ServerFrame_{R}"))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ServerFrame<R> {
    AuthOk {
        /// Absent where the token belongs to no session.
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
    /// The screen as it was at `offset`, to be drawn on an empty terminal of that size; what follows comes after it.
    Keyframe {
        offset: u64,
        cols: u16,
        rows: u16,
        data_b64: String,
    },
    /// From `offset` on the terminal has this size.
    Resized {
        offset: u64,
        cols: u16,
        rows: u16,
    },
    /// These bytes are no longer kept.
    Gap {
        from: u64,
        to: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stream: Option<OutputStream>,
    },
    Control {
        controller: Option<Controller>,
        /// Whether that is this very connection: somebody may sit at two terminals.
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

/// Who types in a shell.
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
    /// Changes when a shell of this name is started anew: offsets of another epoch mean nothing.
    pub epoch: String,
    /// Where the output that follows begins.
    pub offset: u64,
    pub cols: u16,
    pub rows: u16,
    pub controller: Option<Controller>,
    /// Whether that is this very connection: somebody may sit at two terminals.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub yours: Option<bool>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExecReady {
    pub command_id: String,
    /// In the sandbox's own numbering.
    pub pid: i32,
    pub stdout_offset: u64,
    pub stderr_offset: u64,
}

/// A binary frame: one byte of kind, the offset as a big-endian u64, the bytes.
/// A keyframe's size is told by the `resized` frame right before it.
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

/// Kind and offset before the bytes of a binary frame.
pub const BINARY_HEAD_BYTES: usize = 9;

impl<'a> BinaryFrame<'a> {
    pub fn head(kind: BinaryKind, offset: u64) -> [u8; BINARY_HEAD_BYTES] {
        let mut head = [0; BINARY_HEAD_BYTES];
        head[0] = kind as u8;
        head[1..].copy_from_slice(&offset.to_be_bytes());
        head
    }

    /// `None` for what is no binary frame of a kind known here.
    pub fn parse(message: &'a [u8]) -> Option<Self> {
        let (head, bytes) = message.split_first_chunk::<BINARY_HEAD_BYTES>()?;
        let kind = [BinaryKind::Stdout, BinaryKind::Stderr, BinaryKind::Keyframe].into_iter().find(|k| *k as u8 == head[0])?;
        let mut offset = [0; 8];
        offset.copy_from_slice(&head[1..]);
        Some(Self { kind, offset: u64::from_be_bytes(offset), bytes })
    }
}

/// Bytes as a `data | data_b64` pair: as text where they are text, in base64 where that would change them.
pub fn data_or_b64(bytes: &[u8]) -> (Option<String>, Option<String>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (Some(text.to_owned()), None),
        Err(_) => (None, Some(STANDARD.encode(bytes))),
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

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(b: &bool) -> bool {
    !b
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_spelled_as_the_protocol_says() {
        let spelled = |frame: &ServerFrame<ShellReady>| serde_json::to_string(frame).unwrap();
        let controller = Controller { principal: "ada".into(), actor: PrincipalKind::Human };
        let told = spelled(&ServerFrame::Control { controller: Some(controller), yours: Some(true) });
        assert_eq!(told, r#"{"type":"control","controller":{"principal":"ada","actor":"human"},"yours":true}"#);
        assert_eq!(spelled(&ServerFrame::Control { controller: None, yours: None }), r#"{"type":"control","controller":null}"#);
        assert_eq!(spelled(&ServerFrame::output(OutputStream::Stderr, 7, b"x")), r#"{"type":"stderr","offset":7,"data":"x"}"#);
        let start: ClientFrame<ExecStart> = serde_json::from_str(r#"{"type":"start","argv":["ls"],"stdin":true,"timeout":3}"#).unwrap();
        let ClientFrame::Start(start) = start else { panic!("{start:?}") };
        assert_eq!((start.stdin, start.timeout_seconds), (Some(StdinStart::Open(true)), Some(3.0)));
        let bare: ClientFrame<ShellStart> = serde_json::from_str(r#"{"type":"close_stdin"}"#).unwrap();
        assert!(matches!(bare, ClientFrame::CloseStdin));
    }

    #[test]
    fn a_binary_frame_is_read_as_it_was_written_and_a_short_or_strange_one_is_none() {
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
