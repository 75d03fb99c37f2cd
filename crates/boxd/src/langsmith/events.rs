//! `POST /execute/stream/start` and `…/resume`: a command as the LangSmith SDK's server-sent events, with base64
//! output.

use std::sync::Arc;

use axum::{Extension, body::Body, extract::State, response::Response};
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use cobox_protocol::{
    ErrorCode,
    frame::{ExecReady, ExecStart, OutputStream},
    json::read_object,
    langsmith::{
        self,
        exec::{Execute, Resume},
    },
};
use http::HeaderMap;
use serde_json::{Value, json};

use super::command::{AvailableShells, stream_start};
use crate::{
    auth::{Caller, Exec},
    body,
    exec::{self, EventEncoder, EventStream, Interruption, LifetimePolicy, MAX_TIMEOUT, OutputEncoding, OutputEvent, describe_command},
    http_listener::Connection,
    request_layer::ErrorResponse,
    server::Server,
};

/// Maximum size of a resume request, which holds a command id and two offsets.
const MAX_RESUME_BYTES: usize = 64 * 1024;

pub async fn start(
    State(server): State<Arc<Server>>,
    caller: Caller<Exec>,
    Extension(connection): Extension<Connection>,
    headers: HeaderMap,
    content: Body,
) -> Result<Response, ErrorResponse> {
    let shells = AvailableShells::find(&server).await?;
    let (request, _memory) = caller.stream.until_revoked(exec::read_request::<Execute>(&server, &headers, content)).await?;
    caller.set_target(&describe_command(request.command.as_deref(), None, request.command_id.as_deref()));
    // This API has no request that sends input later.
    let (start, policy) = stream_start(Execute { close_stdin: Some(true), ..request }, &server, shells)?;
    Ok(EventStream { start, policy, max_output: None, encoder: SdkEvents }.respond(&server, caller, &connection).await?)
}

pub async fn resume(
    State(server): State<Arc<Server>>,
    caller: Caller<Exec>,
    Extension(connection): Extension<Connection>,
    content: Body,
) -> Result<Response, ErrorResponse> {
    let request: Resume = read_object(&body::collect(content, MAX_RESUME_BYTES).await?)?;
    caller.set_target(&request.command_id);
    let events = EventStream {
        start: resume_start(request),
        policy: LifetimePolicy::with_timeout(MAX_TIMEOUT),
        max_output: None,
        encoder: SdkEvents,
    };
    Ok(events.respond(&server, caller, &connection).await?)
}

/// A `start` that only joins a command, at the offsets the client has reached.
pub fn resume_start(request: Resume) -> ExecStart {
    ExecStart {
        command_id: Some(request.command_id),
        stdout_from: Some(request.stdout_offset),
        stderr_from: Some(request.stderr_offset),
        ..Default::default()
    }
}

struct SdkEvents;

impl EventEncoder for SdkEvents {
    const ENCODING: OutputEncoding = OutputEncoding::Bytes;

    fn ready(&mut self, ready: ExecReady, _: (u64, u64)) -> Bytes {
        event("started", &json!({ "command_id": ready.command_id, "pid": ready.pid }))
    }

    fn event(&mut self, output_event: OutputEvent, (stdout, stderr): (u64, u64)) -> Bytes {
        match output_event {
            OutputEvent::Output(output) => {
                event(stream_name(output.stream), &json!({ "offset": output.offset, "data": STANDARD.encode(output.bytes()) }))
            }
            // The SDK has no event for a gap: the offset of the next output shows it.
            OutputEvent::Gap { .. } => Bytes::from_static(b":\n\n"),
            OutputEvent::Exit(ended) => {
                let last_event = match ended.timed_out {
                    true => event("error", &json!({ "error_type": super::COMMAND_TIMEOUT, "error": super::TIMEOUT_MESSAGE })),
                    false => event("exit", &json!({ "exit_code": ended.exit.code })),
                };
                let stream_end = |stream, offset: u64| event("stream_end", &json!({ "stream": stream_name(stream), "offset": offset }));
                [stream_end(OutputStream::Stdout, stdout), stream_end(OutputStream::Stderr, stderr), last_event].concat().into()
            }
        }
    }

    fn interrupted(&mut self, interruption: Interruption, (stdout, stderr): (u64, u64)) -> Option<Bytes> {
        match interruption {
            // The client reconnects immediately, and the gateway exchanges its API key for a fresh token.
            Interruption::Refused(error) if matches!(error.code, ErrorCode::TokenExpired | ErrorCode::ProviderUnavailable) => {
                Some(event("ack_required", &json!({ "stdout_offset": stdout, "stderr_offset": stderr })))
            }
            Interruption::Refused(error) => {
                let error_type = langsmith::error_type(error.code, "CommandError");
                Some(event("error", &json!({ "error_type": error_type, "error": error.message })))
            }
            Interruption::Shutdown => {
                Some(event("error", &json!({ "error_type": "ServerShuttingDown", "error": "the sandbox is stopping; resume" })))
            }
        }
    }
}

fn stream_name(stream: OutputStream) -> &'static str {
    match stream {
        OutputStream::Stdout => "stdout",
        OutputStream::Stderr => "stderr",
    }
}

fn event(name: &str, data: &Value) -> Bytes {
    // JSON contains no raw line breaks.
    Bytes::from(format!("event: {name}\ndata: {data}\n\n"))
}
