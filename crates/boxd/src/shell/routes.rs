//! `/v1/shells`: lists, creates and ends shells, and runs a command in one.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Body,
    extract::{Path, State},
    response::Response,
};
use cobox_protocol::{
    Capability,
    frame::DEFAULT_SHELL_NAME,
    shell::{ShellCreate, ShellInfo, ShellList, ShellRun},
};
use http::StatusCode;
use serde::de::DeserializeOwned;

use super::command as shell_command;
use crate::{
    activity_log::command_text,
    auth::{Caller, Exec, Shell, ShellObserve},
    body, exec,
    http_listener::Connection,
    request_layer::ErrorResponse,
    server::Server,
};

pub async fn list(State(server): State<Arc<Server>>, _caller: Caller<ShellObserve>) -> Json<ShellList> {
    Json(ShellList { items: server.shells.list().iter().map(|shell| shell.info()).collect() })
}

pub async fn create(
    State(server): State<Arc<Server>>,
    caller: Caller<Shell>,
    content: Body,
) -> Result<(StatusCode, Json<ShellInfo>), ErrorResponse> {
    let create: ShellCreate = read(&server, content).await?;
    let shell = caller.stream.until_revoked(server.shells.create(&server, create, &caller.claims)).await?;
    Ok((StatusCode::CREATED, Json(shell.info())))
}

pub async fn inspect(
    State(server): State<Arc<Server>>,
    _caller: Caller<ShellObserve>,
    Path(shell): Path<String>,
) -> Result<Json<ShellInfo>, ErrorResponse> {
    Ok(Json(server.shells.find(&shell)?.info()))
}

/// Hangs up the shell and answers when everything in it has ended.
pub async fn end(
    State(server): State<Arc<Server>>,
    _caller: Caller<Shell>,
    Path(shell): Path<String>,
) -> Result<StatusCode, ErrorResponse> {
    let shell = server.shells.find(&shell)?;
    shell.hang_up.cancel();
    let mut exit = shell.exit.subscribe();
    // An error means that boxd shuts down.
    let _ = exit.wait_for(Option::is_some).await;
    // Another task ends the descendants too, and may not have finished.
    shell.terminal.program.kill_tree().await;
    Ok(StatusCode::NO_CONTENT)
}

pub async fn run(
    State(server): State<Arc<Server>>,
    caller: Caller<Exec>,
    Extension(connection): Extension<Connection>,
    Path(shell): Path<String>,
    content: Body,
) -> Result<Response, ErrorResponse> {
    caller.stream.require_capability(Capability::ShellObserve)?;
    let request: ShellRun = read(&server, content).await?;
    let shell = match server.shells.find(&shell) {
        // The default shell is created by its first user. The capability `exec` suffices, because it permits running
        // any command anyway.
        Err(_) if shell == DEFAULT_SHELL_NAME => {
            let create = ShellCreate { name: Some(shell), ..Default::default() };
            caller.stream.until_revoked(server.shells.find_or_create(&server, create, &caller.claims)).await?.0
        }
        shell => shell?,
    };
    let memory = server.commands.reserve_memory(exec::max_output(request.max_output_bytes, &server.limits))?;
    let command_text = command_text(Some(&request.command), None);
    let result = caller.stream.until_revoked(shell_command::run(&shell, request, server.limits.output_bytes)).await?;
    server.activity_log.record_shell_command(&caller.claims, command_text, result.exit_code, result.timed_out, result.duration_ms);
    Ok(exec::shell_run_response(result, memory, &server.commands, &connection)?)
}

async fn read<T: DeserializeOwned>(server: &Server, content: Body) -> Result<T, ErrorResponse> {
    let limit = usize::try_from(server.limits.request_bytes).unwrap_or(usize::MAX);
    let bytes = body::collect(content, limit).await?;
    // Most of these bodies have a default for every field, so an empty body is valid.
    let bytes: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
    Ok(cobox_protocol::json::read_object(bytes)?)
}
