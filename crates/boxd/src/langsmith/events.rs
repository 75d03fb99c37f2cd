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

use super::command::{Shells, plan};
use crate::{
    answer::Failure,
    auth::{Caller, Exec},
    body,
    exec::{self, EventEncoder, EventStream, Interruption, LifetimePolicy, MAX_TIMEOUT, OutputEncoding, OutputEvent, describe_command},
    listen::Connection,
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
) -> Result<Response, Failure> {
    let shells = Shells::of(&server).await?;
    let (asked, _memory) = caller.stream.until_revoked(exec::read_request::<Execute>(&server, &headers, content)).await?;
    caller.aims_at(&describe_command(asked.command.as_deref(), None, asked.command_id.as_deref()));
    // This API has no request that sends input later.
    let (start, policy) = plan(Execute { close_stdin: Some(true), ..asked }, &server, shells)?;
    Ok(EventStream { start, policy, max_output: None, encoder: Told }.respond(&server, caller, &connection).await?)
}

pub async fn resume(
    State(server): State<Arc<Server>>,
    caller: Caller<Exec>,
    Extension(connection): Extension<Connection>,
    content: Body,
) -> Result<Response, Failure> {
    let asked: Resume = read_object(&body::collect(content, MAX_RESUME_BYTES).await?)?;
    caller.aims_at(&asked.command_id);
    let events = EventStream { start: joining(asked), policy: LifetimePolicy::with_timeout(MAX_TIMEOUT), max_output: None, encoder: Told };
    Ok(events.respond(&server, caller, &connection).await?)
}

/// A `start` that only joins a command, at the offsets the client has reached.
pub fn joining(asked: Resume) -> ExecStart {
    ExecStart {
        command_id: Some(asked.command_id),
        stdout_from: Some(asked.stdout_offset),
        stderr_from: Some(asked.stderr_offset),
        ..Default::default()
    }
}

struct Told;

impl EventEncoder for Told {
    const ENCODING: OutputEncoding = OutputEncoding::Bytes;

    fn ready(&mut self, ready: ExecReady, _: (u64, u64)) -> Bytes {
        event("started", &json!({ "command_id": ready.command_id, "pid": ready.pid }))
    }

    fn event(&mut self, next: OutputEvent, (stdout, stderr): (u64, u64)) -> Bytes {
        match next {
            OutputEvent::Output(output) => {
                event(word(output.stream), &json!({ "offset": output.offset, "data": STANDARD.encode(output.bytes()) }))
            }
            // The SDK has no event for a gap: the offset of the next output shows it.
            OutputEvent::Gap { .. } => Bytes::from_static(b":\n\n"),
            OutputEvent::Exit(ended) => {
                let last = match ended.timed_out {
                    true => event("error", &json!({ "error_type": super::COMMAND_TIMEOUT, "error": super::TOOK_TOO_LONG })),
                    false => event("exit", &json!({ "exit_code": ended.exit.code })),
                };
                let end = |stream, offset: u64| event("stream_end", &json!({ "stream": word(stream), "offset": offset }));
                [end(OutputStream::Stdout, stdout), end(OutputStream::Stderr, stderr), last].concat().into()
            }
        }
    }

    fn interrupted(&mut self, why: Interruption, (stdout, stderr): (u64, u64)) -> Option<Bytes> {
        match why {
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

fn word(stream: OutputStream) -> &'static str {
    match stream {
        OutputStream::Stdout => "stdout",
        OutputStream::Stderr => "stderr",
    }
}

fn event(name: &str, data: &Value) -> Bytes {
    // JSON contains no raw line breaks.
    Bytes::from(format!("event: {name}\ndata: {data}\n\n"))
}
