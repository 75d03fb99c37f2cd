//! Running commands: with a single answer, as an event stream, or over a WebSocket that can be resumed after a
//! disconnect.

mod command;
mod done;
pub(crate) mod events;
mod input;
mod leftovers;
mod memory;
mod once;
mod outcome;
mod output;
mod plan;
mod registry;
mod session;
mod spool;
mod viewer;

use std::sync::Arc;

use axum::{Extension, body::Body, extract::State, response::Response};
use cobox_protocol::{ApiError, ErrorCode, exec::ExecRequest, frame::OutputStream, json::read_object};
use http::{HeaderMap, header};

pub(crate) use self::memory::Memory;
#[cfg(test)]
pub(crate) use self::memory::MemoryBudget;
pub(crate) use self::session::ready;
use self::{
    done::Done,
    once::Outcome,
    output::Capture,
    plan::{DEFAULT_TIMEOUT, as_start},
};
pub(crate) use self::{
    done::answer_of_a_shell,
    events::{CutOff, Events, Script},
    plan::{MAX_TIMEOUT, Terms, Unattended, Variable, directory, environment, max_output, subject, terminal_size, text},
    viewer::{Event, Form, Viewer, at},
};
pub use self::{registry::Commands, session::open};
use crate::{
    answer::Failure,
    auth::{Caller, Exec},
    body,
    listen::Connection,
    server::Server,
};

/// `POST /v1/exec`.
pub async fn run(
    State(server): State<Arc<Server>>,
    caller: Caller<Exec>,
    Extension(connection): Extension<Connection>,
    headers: HeaderMap,
    content: Body,
) -> Result<Response, Failure> {
    if !events::are_wanted(&headers) {
        return Ok(run_as(&server, &caller, &headers, content, |request: ExecRequest| Ok(request)).await?.answer(&connection)?);
    }
    let (request, _memory) = caller.stream.until_revoked(read_request::<ExecRequest>(&server, &headers, content)).await?;
    caller.aims_at(&subject(request.command.as_deref(), request.argv.as_deref(), request.command_id.as_deref()));
    let most = request.max_output_bytes;
    Ok(events::answer(&server, caller, &headers, &connection, as_start(request), most).await?)
}

/// Runs a command for another API dialect, which has its own request type.
pub(crate) async fn run_as<R: serde::de::DeserializeOwned>(
    server: &Arc<Server>,
    caller: &Caller<Exec>,
    headers: &HeaderMap,
    content: Body,
    adapt: impl FnOnce(R) -> Result<ExecRequest, ApiError>,
) -> Result<Done, ApiError> {
    let answer = async {
        let (request, _memory) = read_request::<R>(server, headers, content).await?;
        let request = adapt(request)?;
        caller.aims_at(&subject(request.command.as_deref(), request.argv.as_deref(), request.command_id.as_deref()));
        if request.command_id.is_some() {
            return join(server, request, caller).await;
        }
        let _slot = server.commands.slot(&caller.claims)?;
        once::execute(server, request, &caller.claims).await
    };
    caller.stream.until_revoked(answer).await
}

pub(crate) async fn read_request<R: serde::de::DeserializeOwned>(
    server: &Server,
    headers: &HeaderMap,
    content: Body,
) -> Result<(R, Memory), ApiError> {
    let limit = usize::try_from(server.limits.request_bytes).unwrap_or(usize::MAX);
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    let memory = server.commands.memory(announced.unwrap_or(limit).min(limit))?;
    let bytes = body::collect(content, limit).await?;
    let request = read_object(&bytes)?;
    Ok((request, memory))
}

/// Runs a command with an id, or joins it if it is already running, and returns its whole answer. It outlives its
/// client: repeating the request returns the same answer for as long as the output is retained.
async fn join(server: &Arc<Server>, request: ExecRequest, caller: &Caller<Exec>) -> Result<Done, ApiError> {
    let limit = max_output(request.max_output_bytes, &server.limits);
    let memory = server.commands.memory(2 * limit)?;
    let attached = Commands::start(server, as_start(request), Terms::timeout(DEFAULT_TIMEOUT), &caller.claims).await?;
    let mut viewer = Viewer::new(attached, 0, 0, Form::Bytes);
    let (mut stdout, mut stderr) = (Capture::new(limit), Capture::new(limit));
    let ended = loop {
        match viewer.next().await {
            Event::Output(output) => match output.stream {
                OutputStream::Stdout => stdout.take(output.bytes()),
                OutputStream::Stderr => stderr.take(output.bytes()),
            },
            Event::Gap { stream: OutputStream::Stdout, .. } => stdout.truncated = true,
            Event::Gap { stream: OutputStream::Stderr, .. } => stderr.truncated = true,
            Event::Exit(ended) => break ended,
        }
    };
    let job = viewer.command().job();
    Ok(Outcome { ended, stdout, stderr }.done(job.id.clone(), job.took(), memory))
}

fn internal(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::Internal, error.to_string())
}
