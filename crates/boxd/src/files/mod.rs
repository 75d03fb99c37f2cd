//! The sandbox's files over HTTP: thin handlers, and the store that they share.

pub mod archive;
mod change_log;
mod digest;
mod entry_location;
mod errors;
mod etag;
mod job_queue;
pub mod multipart;
pub(crate) mod path;
pub(crate) mod read;
mod root;
pub mod workers;
pub(crate) mod write;

use std::{os::fd::OwnedFd, sync::Arc};

use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use cobox_protocol::{
    ApiError,
    files::{FILE_FOLLOW_HEADER, FILE_MODE_HEADER, FileWritten},
};
use cobox_token::Claims;
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags},
    io::Errno,
};

pub(crate) use self::{
    change_log::{ChangeLog, ChangeRecorder, ChangeSubscription, RecordedChange, version},
    entry_location::{EntryLocation, create_directories, locate_entry},
    errors::{file_error, not_a_regular_file},
    etag::{Conditions, WriteLog},
    path::{SandboxPath, query_values, split_parent},
    read::{ReadRequest, respond as respond_with_file},
    root::{Root, SymbolicLinks, kind, open_beneath, refuse_kernel_files},
    workers::operation_aborted,
    write::{TempFile, WriteOptions, is_temp_file_name, stat_entry, sync_directory, temp_file_name, write_all, write_bytes as write_file},
};
use self::{
    errors::disk_full,
    write::{MAX_FILE_BYTES, write_stream},
};
use crate::{
    FileWorkers,
    auth::{Authority, Caller, FsRead, FsWrite},
    body,
    http_listener::Connection,
    request_layer::ErrorResponse,
    server::Server,
};

const PREFIX: &str = "/v1/files";

/// State shared by all file operations.
#[derive(Clone)]
pub struct FileStore {
    workers: FileWorkers,
    writes: Arc<WriteLog>,
    changes: Arc<ChangeLog>,
}

impl FileStore {
    pub fn new(workers: FileWorkers) -> Self {
        Self { workers, writes: Arc::default(), changes: Arc::default() }
    }

    pub(crate) fn workers(&self) -> &FileWorkers {
        &self.workers
    }

    pub(crate) fn writes(&self) -> Arc<WriteLog> {
        self.writes.clone()
    }

    pub(crate) fn changes(&self) -> Arc<ChangeLog> {
        self.changes.clone()
    }

    /// The author for a request's changes.
    pub(crate) fn recorder(&self, claims: &Claims) -> ChangeRecorder {
        ChangeRecorder::new(self.changes.clone(), claims)
    }

    /// Creates an unnamed file for boxd's own use, on the file system of the directory and charged to the workload's
    /// user.
    pub async fn create_unnamed(&self, directory: &str) -> Result<OwnedFd, ApiError> {
        let path = directory.as_bytes().to_vec();
        let created = self.workers.run(move |root| create_unnamed(root, &path)).await?;
        created.map_err(|e| ApiError::new(cobox_protocol::ErrorCode::Internal, format!("creating a temporary file in the sandbox: {e}")))
    }

    pub async fn is_file(&self, path: &'static str) -> Result<bool, ApiError> {
        self.workers.run_quick(move |root| root.stat(path.as_bytes()).is_ok_and(|s| kind(&s) == FileType::RegularFile)).await
    }
}

fn create_unnamed(root: &Root, path: &[u8]) -> Result<OwnedFd, Errno> {
    let directory = root.open_directory(path)?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::openat(&directory, ".", flags | OFlags::TMPFILE, Mode::RUSR | Mode::WUSR) {
        // For file systems without unnamed files: the file gets a name, which is removed at once.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT) => {
            let name = write::temp_file_name()?;
            let created = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
            let file = rustix::fs::openat(&directory, name.as_str(), created, Mode::empty())?;
            rustix::fs::unlinkat(&directory, name.as_str(), AtFlags::empty())?;
            Ok(file)
        }
        other => other,
    }
}

/// `GET` and `HEAD /v1/files/{path}`.
pub async fn get(
    State(server): State<Arc<Server>>,
    caller: Caller<FsRead>,
    Extension(connection): Extension<Connection>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ErrorResponse> {
    let path = SandboxPath::from_uri(&uri, PREFIX)?;
    let request = ReadRequest { method: &method, uri: &uri, headers: &headers, path: &path };
    Ok(read::respond(&server.files, request, caller.stream, &connection).await?)
}

/// `PUT /v1/files/{path}`: the body is the content.
pub async fn put(
    State(server): State<Arc<Server>>,
    caller: Caller<FsWrite>,
    uri: Uri,
    headers: HeaderMap,
    content: Body,
) -> Result<Response, ErrorResponse> {
    let path = SandboxPath::from_uri(&uri, PREFIX)?;
    check_disk_space(&server.authority)?;
    check_announced_length(&headers, MAX_FILE_BYTES)?;
    refuse_partial_content(&headers)?;
    let options = WriteOptions {
        conditions: Conditions::from_headers(&headers)?,
        mode: mode(&headers)?,
        is_durable: is_durable(&uri)?,
        recorder: server.files.recorder(&caller.claims),
        links: symbolic_links(&headers)?,
    };
    let write = write_stream(&server.files, &server.authority, &path, options, body::chunks(content));
    let written = caller.stream.until_revoked(write).await?;
    server.activity_log.record_write(&caller.claims, &path, written.size);
    let status = if written.is_new { StatusCode::CREATED } else { StatusCode::OK };
    let etag = HeaderValue::try_from(&written.etag).map_err(|e| ApiError::invalid(e.to_string()))?;
    let (shown, path_b64) = path.to_json();
    let response = FileWritten { path: shown, path_b64, size: written.size, etag: written.etag };
    Ok((status, [(header::ETAG, etag)], Json(response)).into_response())
}

/// `DELETE /v1/files/{path}`: removes a file, a link itself, or an empty directory.
pub async fn delete(
    State(server): State<Arc<Server>>,
    caller: Caller<FsWrite>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<StatusCode, ErrorResponse> {
    let path = SandboxPath::from_uri(&uri, PREFIX)?;
    let conditions = Conditions::from_headers(&headers)?;
    let writes = server.files.writes.clone();
    let recorder = server.files.recorder(&caller.claims);
    let work = {
        let path = path.clone();
        move |root: &Root| remove(root, &path, &conditions, &writes, &recorder)
    };
    server.files.workers.run(work).await??;
    server.activity_log.record_removal(&caller.claims, &path, None);
    Ok(StatusCode::NO_CONTENT)
}

fn remove(root: &Root, path: &SandboxPath, conditions: &Conditions, writes: &WriteLog, recorder: &ChangeRecorder) -> Result<(), ApiError> {
    let to_api_error = |e| file_error(e, path);
    let writes = writes.lock();
    let location = locate_entry(root, path.bytes()).map_err(to_api_error)?;
    conditions.check_change(location.existing.as_ref().map(|s| writes.etag(s)).as_deref(), path)?;
    let existing = location.existing.ok_or(Errno::NOENT).map_err(to_api_error)?;
    let flags = if kind(&existing) == FileType::Directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
    let removal = recorder.begin_removal(&location.parent, &location.name);
    rustix::fs::unlinkat(&location.parent, location.name.as_slice(), flags).map_err(to_api_error)?;
    removal.commit();
    drop(writes);
    write::sync_directory(&location.parent).map_err(to_api_error)
}

/// Refuses a request before its body is sent if the broker has reported that the disk quota is used up.
pub(crate) fn check_disk_space(authority: &Authority) -> Result<(), ApiError> {
    if authority.pushed_state().disk_full { Err(disk_full()) } else { Ok(()) }
}

fn check_announced_length(headers: &HeaderMap, limit: u64) -> Result<(), ApiError> {
    let announced_length = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if announced_length.is_some_and(|n| n > limit) { Err(body::too_large("the body", limit)) } else { Ok(()) }
}

/// A PUT replaces the whole file. Treating a part as the whole would lose the rest.
fn refuse_partial_content(headers: &HeaderMap) -> Result<(), ApiError> {
    match headers.contains_key(header::CONTENT_RANGE) {
        true => Err(ApiError::invalid("Content-Range: partial writes are not supported; send the whole file without it")),
        false => Ok(()),
    }
}

pub(crate) fn mode(headers: &HeaderMap) -> Result<Option<u32>, ApiError> {
    let Some(value) = headers.get(FILE_MODE_HEADER) else { return Ok(None) };
    let mode = value.to_str().ok().and_then(parse_mode);
    mode.map(Some).ok_or_else(|| ApiError::invalid("X-File-Mode must be permission bits in octal, such as 644"))
}

/// `X-File-Follow`: whether symbolic links in the path are followed.
fn symbolic_links(headers: &HeaderMap) -> Result<SymbolicLinks, ApiError> {
    match headers.get(FILE_FOLLOW_HEADER).map(HeaderValue::as_bytes) {
        None | Some(b"true") => Ok(SymbolicLinks::Follow),
        Some(b"false") => Ok(SymbolicLinks::Refuse),
        Some(_) => Err(ApiError::invalid("X-File-Follow: must be true or false")),
    }
}

/// Parses permission bits in octal.
pub(crate) fn parse_mode(text: &str) -> Option<u32> {
    let is_octal = text.bytes().all(|b| matches!(b, b'0'..=b'7'));
    u32::from_str_radix(text, 8).ok().filter(|m| is_octal && *m <= 0o777)
}

/// `?sync=false`: the response doesn't wait until the data is on disk.
pub(crate) fn is_durable(uri: &Uri) -> Result<bool, ApiError> {
    match query_values(uri, "sync").next().as_deref() {
        None | Some(b"true") => Ok(true),
        Some(b"false") => Ok(false),
        Some(_) => Err(ApiError::invalid("sync: must be true or false")),
    }
}
