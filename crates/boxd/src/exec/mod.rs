//! Running commands: with a single answer, as an event stream, or over a WebSocket that can be resumed after a
//! disconnect.

mod capture;
mod command;
pub(crate) mod event_stream;
mod input;
mod memory_budget;
mod one_shot;
mod pipe_drainer;
mod registry;
mod response;
mod run_spec;
mod spool;
mod termination;
mod viewer;
mod websocket;

use std::sync::Arc;

use axum::{Extension, body::Body, extract::State, response::Response};
use cobox_protocol::{ApiError, ErrorCode, exec::ExecRequest, frame::OutputStream, json::read_object};
use http::{HeaderMap, header};

#[cfg(test)]
pub(crate) use self::memory_budget::MemoryBudget;
pub(crate) use self::memory_budget::MemoryReservation;
pub(crate) use self::websocket::ready;
use self::{
    capture::OutputCapture,
    one_shot::CommandResult,
    response::CompletedCommand,
    run_spec::{DEFAULT_TIMEOUT, to_exec_start},
};
pub(crate) use self::{
    event_stream::{EventEncoder, EventStream, Interruption},
    response::shell_run_response,
    run_spec::{
        LifetimePolicy, MAX_TIMEOUT, UnattendedPolicy, Variable, describe_command, environment, max_output, reject_nul, terminal_size,
        working_directory,
    },
    viewer::{OutputEncoding, OutputEvent, Viewer, sleep_until_some},
};
pub use self::{registry::Commands, websocket::open};
use crate::{
    auth::{Caller, Exec},
    body,
    http_listener::Connection,
    request_layer::ErrorResponse,
    server::Server,
};

/// `POST /v1/exec`.
pub async fn run(
    State(server): State<Arc<Server>>,
    caller: Caller<Exec>,
    Extension(connection): Extension<Connection>,
    headers: HeaderMap,
    content: Body,
) -> Result<Response, ErrorResponse> {
    if !event_stream::is_requested(&headers) {
        return Ok(run_as(&server, &caller, &headers, content, |request: ExecRequest| Ok(request)).await?.respond(&connection)?);
    }
    let (request, _memory) = caller.stream.until_revoked(read_request::<ExecRequest>(&server, &headers, content)).await?;
    caller.set_target(&describe_command(request.command.as_deref(), request.argv.as_deref(), request.command_id.as_deref()));
    let limit = request.max_output_bytes;
    Ok(event_stream::respond(&server, caller, &headers, &connection, to_exec_start(request), limit).await?)
}

/// Runs a command for another API dialect, which has its own request type.
pub(crate) async fn run_as<R: serde::de::DeserializeOwned>(
    server: &Arc<Server>,
    caller: &Caller<Exec>,
    headers: &HeaderMap,
    content: Body,
    adapt: impl FnOnce(R) -> Result<ExecRequest, ApiError>,
) -> Result<CompletedCommand, ApiError> {
    let result = async {
        let (request, _memory) = read_request::<R>(server, headers, content).await?;
        let request = adapt(request)?;
        caller.set_target(&describe_command(request.command.as_deref(), request.argv.as_deref(), request.command_id.as_deref()));
        if request.command_id.is_some() {
            return run_or_join(server, request, caller).await;
        }
        let _slot = server.commands.slot(&caller.claims)?;
        one_shot::execute(server, request, &caller.claims).await
    };
    caller.stream.until_revoked(result).await
}

pub(crate) async fn read_request<R: serde::de::DeserializeOwned>(
    server: &Server,
    headers: &HeaderMap,
    content: Body,
) -> Result<(R, MemoryReservation), ApiError> {
    let limit = usize::try_from(server.limits.request_bytes).unwrap_or(usize::MAX);
    let announced_length = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    let memory = server.commands.reserve_memory(announced_length.unwrap_or(limit).min(limit))?;
    let bytes = body::collect(content, limit).await?;
    let request = read_object(&bytes)?;
    Ok((request, memory))
}

/// Runs a command with an id, or joins it if it is already running, and returns its whole answer. It outlives its
/// client: repeating the request returns the same answer for as long as the output is retained.
async fn run_or_join(server: &Arc<Server>, request: ExecRequest, caller: &Caller<Exec>) -> Result<CompletedCommand, ApiError> {
    let limit = max_output(request.max_output_bytes, &server.limits);
    let memory = server.commands.reserve_memory(2 * limit)?;
    let attachment = Commands::start(server, to_exec_start(request), LifetimePolicy::with_timeout(DEFAULT_TIMEOUT), &caller.claims).await?;
    let mut viewer = Viewer::new(attachment, 0, 0, OutputEncoding::Bytes);
    let (mut stdout, mut stderr) = (OutputCapture::new(limit), OutputCapture::new(limit));
    let ended = loop {
        match viewer.next().await {
            OutputEvent::Output(output) => match output.stream {
                OutputStream::Stdout => stdout.append(output.bytes()),
                OutputStream::Stderr => stderr.append(output.bytes()),
            },
            OutputEvent::Gap { stream: OutputStream::Stdout, .. } => stdout.truncated = true,
            OutputEvent::Gap { stream: OutputStream::Stderr, .. } => stderr.truncated = true,
            OutputEvent::Exit(ended) => break ended,
        }
    };
    let job = viewer.command().job();
    Ok(CommandResult { ended, stdout, stderr }.complete(job.id.clone(), job.duration(), memory))
}

fn internal(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::Internal, error.to_string())
}
