//! `/v1/fs/*`: inspects, searches and changes the sandbox's files. The handlers are here; each operation has its own
//! file.

mod copy;
mod directory_names;
mod edit;
pub(crate) mod glob;
pub(crate) mod grep;
mod ignore_rules;
pub(crate) mod list;
mod metadata;
mod mkdir;
mod remove;
pub(crate) mod stop_signal;
mod transfer;
mod walk;

use std::sync::Arc;

use axum::{Json, body::Body, extract::State};
use cobox_protocol::{
    ApiError, Capability,
    fs::{
        ChangeResponse, EditRequest, EditResponse, FileEntry, GlobRequest, GlobResponse, GrepRequest, GrepResponse, ListRequest,
        ListResponse, MkdirRequest, RemoveRequest, StatRequest, TransferRequest,
    },
    json::read_object,
};
use serde::de::DeserializeOwned;

use self::stop_signal::StopSignal;
pub(crate) use self::{
    directory_names::{entry_type, for_each_name},
    glob::glob as glob_files,
    grep::grep as grep_files,
    list::path_prefix,
    metadata::file_kind,
};
use crate::{
    auth::{Caller, FsRead, FsWrite},
    body,
    files::{Root, SandboxPath, check_disk_space},
    request_layer::ErrorResponse,
    server::Server,
};

/// Maximum request size, except for edits: a few paths and patterns.
const MAX_REQUEST_BYTES: usize = 256 * 1024;
/// An edit contains text: many times twice what fits into one response of an agent.
const MAX_EDIT_REQUEST_BYTES: usize = 16 * 1024 * 1024;

type JsonResult<T> = Result<Json<T>, ErrorResponse>;

async fn read_request<T: DeserializeOwned>(content: Body, limit: usize) -> Result<T, ApiError> {
    read_object(&body::collect(content, limit).await?)
}

/// A path of a request, or the default if it was omitted.
fn path_or_work_dir(server: &Server, text: Option<&str>, b64: Option<&str>) -> Result<SandboxPath, ApiError> {
    match SandboxPath::from_json("path", text, b64)? {
        Some(path) => Ok(path),
        None => SandboxPath::new(server.programs.work_dir().as_bytes().to_vec()),
    }
}

fn required_path(field: &str, text: Option<&str>, b64: Option<&str>) -> Result<SandboxPath, ApiError> {
    SandboxPath::from_json(field, text, b64)?.ok_or_else(|| ApiError::invalid(format!("{field}: is missing")))
}

/// Runs a potentially long operation on a worker, and stops it when the request is dropped because the client has
/// disconnected or its token has ended.
async fn run_long<T: Send + 'static>(
    server: &Server,
    work: impl FnOnce(&Root, &StopSignal) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let slot = server.files.workers().long_slots(1).await?;
    let stop = StopSignal::new(None);
    let _stopped_when_dropped = stop.stop_on_drop();
    let result = server.files.workers().run_long(slot, move |root| work(root, &stop)).await?;
    result.await.map_err(|_| crate::files::operation_aborted())?
}

pub async fn list(State(server): State<Arc<Server>>, caller: Caller<FsRead>, content: Body) -> JsonResult<ListResponse> {
    let request: ListRequest = read_request(content, MAX_REQUEST_BYTES).await?;
    let path = path_or_work_dir(&server, request.path.as_deref(), request.path_b64.as_deref())?;
    caller.set_target(&path.to_string());
    let writes = server.files.writes();
    if !request.recursive {
        let listed = move |root: &Root| list::list(root, &path, &request, &writes, &StopSignal::new(None));
        return Ok(Json(server.files.workers().run(listed).await??));
    }
    let work = run_long(&server, move |root, stop| list::list(root, &path, &request, &writes, stop));
    Ok(Json(caller.stream.until_revoked(work).await?))
}

pub async fn stat(State(server): State<Arc<Server>>, caller: Caller<FsRead>, content: Body) -> JsonResult<FileEntry> {
    let request: StatRequest = read_request(content, MAX_REQUEST_BYTES).await?;
    let path = required_path("path", request.path.as_deref(), request.path_b64.as_deref())?;
    caller.set_target(&path.to_string());
    let writes = server.files.writes();
    Ok(Json(server.files.workers().run_quick(move |root| metadata::stat(root, &path, request.follow, &writes)).await??))
}

pub async fn mkdir(State(server): State<Arc<Server>>, caller: Caller<FsWrite>, content: Body) -> JsonResult<ChangeResponse> {
    let request: MkdirRequest = read_request(content, MAX_REQUEST_BYTES).await?;
    let path = required_path("path", request.path.as_deref(), request.path_b64.as_deref())?;
    caller.set_target(&path.to_string());
    check_disk_space(&server.authority)?;
    let recorder = server.files.recorder(&caller.claims);
    Ok(Json(server.files.workers().run(move |root| mkdir::mkdir(root, &path, &request, &recorder)).await??))
}

pub async fn move_(State(server): State<Arc<Server>>, caller: Caller<FsWrite>, content: Body) -> JsonResult<ChangeResponse> {
    transfer(server, caller, content, transfer::move_, true).await
}

pub async fn copy(State(server): State<Arc<Server>>, caller: Caller<FsWrite>, content: Body) -> JsonResult<ChangeResponse> {
    // A copy reveals the amount of data and puts the content where other tokens may read it.
    caller.stream.require_capability(Capability::FsRead)?;
    transfer(server, caller, content, transfer::copy, false).await
}

async fn transfer(
    server: Arc<Server>,
    caller: Caller<FsWrite>,
    content: Body,
    work: fn(&transfer::Transfer<'_>) -> Result<ChangeResponse, ApiError>,
    removes_source: bool,
) -> JsonResult<ChangeResponse> {
    let request: TransferRequest = read_request(content, MAX_REQUEST_BYTES).await?;
    let from = required_path("from", request.from.as_deref(), request.from_b64.as_deref())?;
    let to = required_path("to", request.to.as_deref(), request.to_b64.as_deref())?;
    caller.set_target(&format!("{from} -> {to}"));
    check_disk_space(&server.authority)?;
    let (recorder, writes, authority) = (server.files.recorder(&caller.claims), server.files.writes(), server.authority.clone());
    let (source, target) = (from.clone(), to.clone());
    let run = run_long(&server, move |root, stop| {
        let is_full = || authority.pushed_state().disk_full;
        let (overwrite, recursive) = (request.overwrite, request.recursive);
        let (from, to, recorder, writes, is_full) = (&from, &to, &recorder, &*writes, &is_full);
        work(&transfer::Transfer { root, from, to, overwrite, recursive, recorder, writes, stop, is_full })
    });
    let response = caller.stream.until_revoked(run).await?;
    if response.changed {
        if removes_source {
            server.activity_log.record_removal(&caller.claims, &source, Some(response.entries));
        }
        server.activity_log.record_writes_beneath(&caller.claims, &target, response.entries);
    }
    Ok(Json(response))
}

pub async fn remove(State(server): State<Arc<Server>>, caller: Caller<FsWrite>, content: Body) -> JsonResult<ChangeResponse> {
    let request: RemoveRequest = read_request(content, MAX_REQUEST_BYTES).await?;
    let path = required_path("path", request.path.as_deref(), request.path_b64.as_deref())?;
    caller.set_target(&path.to_string());
    let recorder = server.files.recorder(&caller.claims);
    let removed = path.clone();
    let work = run_long(&server, move |root, stop| remove::remove(root, &path, &request, &recorder, stop));
    let response = caller.stream.until_revoked(work).await?;
    if response.changed {
        server.activity_log.record_removal(&caller.claims, &removed, Some(response.entries));
    }
    Ok(Json(response))
}

pub async fn edit(State(server): State<Arc<Server>>, caller: Caller<FsWrite>, content: Body) -> JsonResult<EditResponse> {
    // The response reveals whether `old` is in the file, and how often. A token that may only write could otherwise
    // guess the content piece by piece.
    caller.stream.require_capability(Capability::FsRead)?;
    let request: EditRequest = read_request(content, MAX_EDIT_REQUEST_BYTES).await?;
    let path = required_path("path", request.path.as_deref(), request.path_b64.as_deref())?;
    caller.set_target(&path.to_string());
    check_disk_space(&server.authority)?;
    let (recorder, writes) = (server.files.recorder(&caller.claims), server.files.writes());
    let work = {
        let path = path.clone();
        move |root: &Root| edit::edit(root, &path, request, &writes, &recorder)
    };
    let edited = server.files.workers().run(work).await??;
    server.activity_log.record_write(&caller.claims, &path, edited.size);
    Ok(Json(edited))
}

pub async fn glob(State(server): State<Arc<Server>>, caller: Caller<FsRead>, content: Body) -> JsonResult<GlobResponse> {
    let request: GlobRequest = read_request(content, MAX_REQUEST_BYTES).await?;
    caller.set_target(request.path.as_deref().unwrap_or_else(|| server.programs.work_dir()));
    Ok(Json(caller.stream.until_revoked(glob::glob(&server, request)).await?))
}

pub async fn grep(State(server): State<Arc<Server>>, caller: Caller<FsRead>, content: Body) -> JsonResult<GrepResponse> {
    let request: GrepRequest = read_request(content, MAX_REQUEST_BYTES).await?;
    caller.set_target(request.path.as_deref().unwrap_or_else(|| server.programs.work_dir()));
    Ok(Json(caller.stream.until_revoked(grep::grep(&server, request)).await?))
}
