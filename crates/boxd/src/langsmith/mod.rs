//! The routes of the LangSmith sandbox SDK: its request and error formats on top of boxd's operations.

pub mod command;
pub mod events;
pub mod socket;
mod text;

use std::sync::Arc;

use axum::{Extension, Json, body::Body, extract::State, response::Response};
use cobox_protocol::{
    ApiError, ErrorCode,
    fs::{FileEntry, FileKind, GlobRequest, GrepMatch, GrepRequest, OneOrMany},
    json::read_object,
};
use futures_util::stream;
use http::{HeaderMap, Method, StatusCode, Uri, header};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    auth::{Caller, FsRead, FsWrite},
    body::{self, too_large},
    files::{
        self, Conditions, SandboxPath, SymbolicLinks, check_disk_space,
        write::{MAX_FILE_BYTES, WriteOptions, write_stream},
    },
    fs,
    http_listener::Connection,
    request_layer::ErrorResponse,
    server::Server,
};

/// The SDK's error type for a command that exceeded its timeout.
const COMMAND_TIMEOUT: &str = "CommandTimeout";
const TIMEOUT_MESSAGE: &str = "the command took longer than its timeout and was ended";

/// Maximum size of a search request, which holds a pattern and two paths.
const MAX_SEARCH_BYTES: usize = 64 * 1024;

/// `POST /upload?path=`: multipart, one field `file`.
pub async fn upload(
    State(server): State<Arc<Server>>,
    caller: Caller<FsWrite>,
    uri: Uri,
    headers: HeaderMap,
    content: Body,
) -> Result<(StatusCode, Json<Value>), ErrorResponse> {
    let path = SandboxPath::from_query(&uri, Some(server.programs.work_dir()))?;
    check_disk_space(&server.authority)?;
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let boundary = multer::parse_boundary(content_type).map_err(multipart_error)?;
    let limit = multer::SizeLimit::new().per_field(MAX_FILE_BYTES);
    let mut parts = multer::Multipart::with_constraints(body::chunks(content), boundary, multer::Constraints::new().size_limit(limit));
    let write = async {
        let mut field = parts.next_field().await.map_err(multipart_error)?.filter(|f| f.name() == Some("file"));
        let Some(field) = field.take() else { return Err(ApiError::invalid("the first field of the multipart body must be `file`")) };
        let chunks =
            stream::try_unfold(field, async |mut field| Ok(field.chunk().await.map_err(multipart_error)?.map(|chunk| (chunk, field))));
        let recorder = server.files.recorder(&caller.claims);
        let options =
            WriteOptions { conditions: Conditions::default(), mode: None, is_durable: true, recorder, links: SymbolicLinks::Follow };
        write_stream(&server.files, &server.authority, &path, options, Box::pin(chunks)).await
    };
    let written = caller.stream.until_revoked(write).await?;
    server.activity_log.record_write(&caller.claims, &path, written.size);
    let (shown, path_b64) = path.to_json();
    let status = if written.is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(with_exact_bytes(json!({ "path": shown, "size": written.size, "etag": written.etag }), path_b64.as_deref()))))
}

/// Adds a path's exact bytes where its text is lossy. The SDK ignores fields that it doesn't know.
fn with_exact_bytes(mut value: Value, path_b64: Option<&str>) -> Value {
    if let Some(path_b64) = path_b64 {
        value["path_b64"] = path_b64.into();
    }
    value
}

/// `GET` and `HEAD /download?path=`.
pub async fn download(
    State(server): State<Arc<Server>>,
    caller: Caller<FsRead>,
    Extension(connection): Extension<Connection>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ErrorResponse> {
    let path = SandboxPath::from_query(&uri, Some(server.programs.work_dir()))?;
    let request = files::ReadRequest { method: &method, uri: &uri, headers: &headers, path: &path };
    Ok(files::respond_with_file(&server.files, request, caller.stream, &connection).await?)
}

#[derive(Deserialize)]
struct SearchRequest {
    pattern: String,
    #[serde(default)]
    path: Option<String>,
    #[serde(default)]
    glob: Option<String>,
    #[serde(default)]
    limit: Option<u32>,
}

impl SearchRequest {
    /// The SDK's paths may be relative to the working directory of its commands.
    fn absolute(&self, server: &Server) -> Option<String> {
        let path = self.path.as_deref()?;
        Some(if path.starts_with('/') { path.to_owned() } else { format!("{}/{path}", server.programs.work_dir()) })
    }
}

/// `POST /glob`.
pub async fn glob(State(server): State<Arc<Server>>, caller: Caller<FsRead>, content: Body) -> Result<Json<Value>, ErrorResponse> {
    let request: SearchRequest = read_object(&body::collect(content, MAX_SEARCH_BYTES).await?)?;
    let boxd_request =
        GlobRequest { path: request.absolute(&server), pattern: request.pattern, limit: request.limit, ..GlobRequest::default() };
    let found = caller.stream.until_revoked(fs::glob_files(&server, boxd_request)).await?;
    let to_json = |e: &FileEntry| {
        let entry = json!({ "path": e.path, "is_dir": e.kind == FileKind::Directory, "size_bytes": e.size, "modified_at": e.mtime });
        with_exact_bytes(entry, e.path_b64.as_deref())
    };
    Ok(Json(json!({ "matches": found.matches.iter().map(to_json).collect::<Vec<_>>(), "truncated": found.truncated })))
}

/// `POST /grep`: the pattern is literal text.
pub async fn grep(State(server): State<Arc<Server>>, caller: Caller<FsRead>, content: Body) -> Result<Json<Value>, ErrorResponse> {
    let request: SearchRequest = read_object(&body::collect(content, MAX_SEARCH_BYTES).await?)?;
    let boxd_request = GrepRequest {
        path: request.absolute(&server),
        pattern: request.pattern,
        literal: true,
        glob: request.glob.map(OneOrMany::One),
        max_matches: request.limit,
        ..GrepRequest::default()
    };
    let found = caller.stream.until_revoked(fs::grep_files(&server, boxd_request)).await?;
    let to_json =
        |m: &GrepMatch| with_exact_bytes(json!({ "path": m.path, "line": m.line.line_number, "text": m.line.text }), m.path_b64.as_deref());
    let matches: Vec<Value> = found.matches.iter().flatten().map(to_json).collect();
    Ok(Json(json!({ "matches": matches, "truncated": found.truncated })))
}

/// `GET /tunnel`: not supported, because this sandbox's ports can't be reached from outside.
pub async fn tunnel() -> ErrorResponse {
    let message = "tunnels to sandbox ports are not supported; run clients inside the sandbox";
    ErrorResponse(ApiError::new(ErrorCode::Unsupported, message))
}

pub(crate) fn multipart_error(error: multer::Error) -> ApiError {
    match error {
        multer::Error::FieldSizeExceeded { limit, .. } => too_large("the file", limit),
        other => ApiError::invalid(format!("invalid multipart body: {other}")),
    }
}
