//! `/v1/fs/*`: inspects, searches and changes the sandbox's files. The handlers are here; each operation has its own
//! file.

mod copy;
mod describe;
mod edit;
pub(crate) mod glob;
pub(crate) mod grep;
mod ignore_rules;
pub(crate) mod list;
mod make;
mod names;
mod remove;
pub(crate) mod stop;
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

use self::stop::Stop;
pub(crate) use self::{
    describe::file_kind,
    glob::glob as glob_files,
    grep::grep as grep_files,
    list::path_prefix,
    names::{each_name, kind_of},
};
use crate::{
    answer::Failure,
    auth::{Caller, FsRead, FsWrite},
    body,
    files::{Root, SandboxPath, check_disk_space},
    server::Server,
};

/// Maximum request size, except for edits: a few paths and patterns.
const MAX_REQUEST_BYTES: usize = 256 * 1024;
/// An edit contains text: many times twice what fits into one response of an agent.
const MAX_EDIT_REQUEST_BYTES: usize = 16 * 1024 * 1024;

type Told<T> = Result<Json<T>, Failure>;

async fn read<T: DeserializeOwned>(content: Body, limit: usize) -> Result<T, ApiError> {
    read_object(&body::collect(content, limit).await?)
}

/// A path of a request, or the default if it was omitted.
fn path_or(server: &Server, text: Option<&str>, b64: Option<&str>) -> Result<SandboxPath, ApiError> {
    match SandboxPath::from_json("path", text, b64)? {
        Some(path) => Ok(path),
        None => SandboxPath::new(server.programs.work_dir().as_bytes().to_vec()),
    }
}

fn required(field: &str, text: Option<&str>, b64: Option<&str>) -> Result<SandboxPath, ApiError> {
    SandboxPath::from_json(field, text, b64)?.ok_or_else(|| ApiError::invalid(format!("{field}: is missing")))
}

/// Runs a potentially long operation on a worker, and stops it when the request is dropped because the client has
/// disconnected or its token has ended.
async fn run_long<T: Send + 'static>(
    server: &Server,
    work: impl FnOnce(&Root, &Stop) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let slot = server.files.workers().long_slots(1).await?;
    let stop = Stop::new(None);
    let _stopped_when_dropped = stop.when_dropped();
    let done = server.files.workers().run_long(slot, move |root| work(root, &stop)).await?;
    done.await.map_err(|_| crate::files::operation_aborted())?
}

pub async fn list(State(server): State<Arc<Server>>, caller: Caller<FsRead>, content: Body) -> Told<ListResponse> {
    let request: ListRequest = read(content, MAX_REQUEST_BYTES).await?;
    let path = path_or(&server, request.path.as_deref(), request.path_b64.as_deref())?;
    caller.aims_at(&path.to_string());
    let writes = server.files.writes();
    if !request.recursive {
        let listed = move |root: &Root| list::list(root, &path, &request, &writes, &Stop::new(None));
        return Ok(Json(server.files.workers().run(listed).await??));
    }
    let work = run_long(&server, move |root, stop| list::list(root, &path, &request, &writes, stop));
    Ok(Json(caller.stream.until_revoked(work).await?))
}

pub async fn stat(State(server): State<Arc<Server>>, caller: Caller<FsRead>, content: Body) -> Told<FileEntry> {
    let request: StatRequest = read(content, MAX_REQUEST_BYTES).await?;
    let path = required("path", request.path.as_deref(), request.path_b64.as_deref())?;
    caller.aims_at(&path.to_string());
    let writes = server.files.writes();
    Ok(Json(server.files.workers().run_quick(move |root| describe::stat(root, &path, request.follow, &writes)).await??))
}

pub async fn mkdir(State(server): State<Arc<Server>>, caller: Caller<FsWrite>, content: Body) -> Told<ChangeResponse> {
    let request: MkdirRequest = read(content, MAX_REQUEST_BYTES).await?;
    let path = required("path", request.path.as_deref(), request.path_b64.as_deref())?;
    caller.aims_at(&path.to_string());
    check_disk_space(&server.authority)?;
    let recorder = server.files.recorder(&caller.claims);
    Ok(Json(server.files.workers().run(move |root| make::mkdir(root, &path, &request, &recorder)).await??))
}

pub async fn move_(State(server): State<Arc<Server>>, caller: Caller<FsWrite>, content: Body) -> Told<ChangeResponse> {
    transfer(server, caller, content, transfer::move_, true).await
}

pub async fn copy(State(server): State<Arc<Server>>, caller: Caller<FsWrite>, content: Body) -> Told<ChangeResponse> {
    // A copy reveals the amount of data and puts the content where other tokens may read it.
    caller.stream.also_needs(Capability::FsRead)?;
    transfer(server, caller, content, transfer::copy, false).await
}

async fn transfer(
    server: Arc<Server>,
    caller: Caller<FsWrite>,
    content: Body,
    work: fn(&transfer::Transfer<'_>) -> Result<ChangeResponse, ApiError>,
    takes_away: bool,
) -> Told<ChangeResponse> {
    let request: TransferRequest = read(content, MAX_REQUEST_BYTES).await?;
    let from = required("from", request.from.as_deref(), request.from_b64.as_deref())?;
    let to = required("to", request.to.as_deref(), request.to_b64.as_deref())?;
    caller.aims_at(&format!("{from} -> {to}"));
    check_disk_space(&server.authority)?;
    let (recorder, writes, authority) = (server.files.recorder(&caller.claims), server.files.writes(), server.authority.clone());
    let (source, target) = (from.clone(), to.clone());
    let run = run_long(&server, move |root, stop| {
        let is_full = || authority.view().disk_full;
        let (overwrite, recursive) = (request.overwrite, request.recursive);
        let (from, to, recorder, writes, is_full) = (&from, &to, &recorder, &*writes, &is_full);
        work(&transfer::Transfer { root, from, to, overwrite, recursive, recorder, writes, stop, is_full })
    });
    let done = caller.stream.until_revoked(run).await?;
    if done.changed {
        if takes_away {
            server.happenings.removed(&caller.claims, &source, Some(done.entries));
        }
        server.happenings.written_beneath(&caller.claims, &target, done.entries);
    }
    Ok(Json(done))
}

pub async fn remove(State(server): State<Arc<Server>>, caller: Caller<FsWrite>, content: Body) -> Told<ChangeResponse> {
    let request: RemoveRequest = read(content, MAX_REQUEST_BYTES).await?;
    let path = required("path", request.path.as_deref(), request.path_b64.as_deref())?;
    caller.aims_at(&path.to_string());
    let recorder = server.files.recorder(&caller.claims);
    let removed = path.clone();
    let work = run_long(&server, move |root, stop| remove::remove(root, &path, &request, &recorder, stop));
    let done = caller.stream.until_revoked(work).await?;
    if done.changed {
        server.happenings.removed(&caller.claims, &removed, Some(done.entries));
    }
    Ok(Json(done))
}

pub async fn edit(State(server): State<Arc<Server>>, caller: Caller<FsWrite>, content: Body) -> Told<EditResponse> {
    // The response reveals whether `old` is in the file, and how often. A token that may only write could otherwise
    // guess the content piece by piece.
    caller.stream.also_needs(Capability::FsRead)?;
    let request: EditRequest = read(content, MAX_EDIT_REQUEST_BYTES).await?;
    let path = required("path", request.path.as_deref(), request.path_b64.as_deref())?;
    caller.aims_at(&path.to_string());
    check_disk_space(&server.authority)?;
    let (recorder, writes) = (server.files.recorder(&caller.claims), server.files.writes());
    let work = {
        let path = path.clone();
        move |root: &Root| edit::edit(root, &path, request, &writes, &recorder)
    };
    let edited = server.files.workers().run(work).await??;
    server.happenings.written(&caller.claims, &path, edited.size);
    Ok(Json(edited))
}

pub async fn glob(State(server): State<Arc<Server>>, caller: Caller<FsRead>, content: Body) -> Told<GlobResponse> {
    let request: GlobRequest = read(content, MAX_REQUEST_BYTES).await?;
    caller.aims_at(request.path.as_deref().unwrap_or_else(|| server.programs.work_dir()));
    Ok(Json(caller.stream.until_revoked(glob::glob(&server, request)).await?))
}

pub async fn grep(State(server): State<Arc<Server>>, caller: Caller<FsRead>, content: Body) -> Told<GrepResponse> {
    let request: GrepRequest = read(content, MAX_REQUEST_BYTES).await?;
    caller.aims_at(request.path.as_deref().unwrap_or_else(|| server.programs.work_dir()));
    Ok(Json(caller.stream.until_revoked(grep::grep(&server, request)).await?))
}
