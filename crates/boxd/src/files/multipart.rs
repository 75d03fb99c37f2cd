//! Uploads and downloads of many files in one multipart request, each with its own result, in constant memory.

use std::{collections::VecDeque, io, sync::Arc};

use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use cobox_kernel::FileSender;
use cobox_protocol::{
    ApiError,
    fs::{UploadResponse, UploadedFile},
};
use futures_util::{Stream, StreamExt, stream};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode, percent_encode};

use super::{
    Conditions, FileStore, ReadRequest, SandboxPath, SymbolicLinks, check_disk_space,
    errors::not_a_regular_file,
    is_durable, mode,
    path::query_values,
    read::{self, Content, file_chunks, set_metadata_headers},
    write::{MAX_FILE_BYTES, WriteOptions, write_stream},
};
use crate::{
    auth::{Caller, FsRead, FsWrite, OpenStream},
    body,
    http_listener::Connection,
    langsmith::multipart_error,
    request_layer::{ErrorResponse, RequestRecord},
    server::Server,
};

/// Maximum files of one upload. Each adds an entry to the response.
const MAX_UPLOADS: usize = 10_000;
/// Maximum files of one download. The maximum length of a request's head also limits it.
const MAX_DOWNLOADS: usize = 1000;
/// A part's path, percent-encoded, for names that other multipart headers can't carry.
const FILE_PATH_HEADER: &str = "x-file-path";
/// The error code of a part whose file could not be read.
const FILE_ERROR_HEADER: &str = "x-file-error";
/// Also used for a name in a record of an archive.
pub(super) const HEADER_ENCODE_SET: AsciiSet = NON_ALPHANUMERIC.remove(b'/').remove(b'.').remove(b'-').remove(b'_');

/// `POST /v1/files/upload?path=`: each part is a file. Its path is its `X-File-Path`, else its file name, else its
/// name. Relative paths start at `path`. The status is 200 if all were written and 207 if some were not.
pub async fn upload(
    State(server): State<Arc<Server>>,
    caller: Caller<FsWrite>,
    Extension(record): Extension<Arc<RequestRecord>>,
    uri: Uri,
    headers: HeaderMap,
    content: Body,
) -> Result<Response, ErrorResponse> {
    let base = match query_values(&uri, "path").next() {
        Some(base) => SandboxPath::new(base)?,
        None => SandboxPath::new(server.programs.work_dir().as_bytes().to_vec())?,
    };
    let is_durable = is_durable(&uri)?;
    check_disk_space(&server.authority)?;
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let boundary = multer::parse_boundary(content_type).map_err(multipart_error)?;
    let limit = multer::SizeLimit::new().per_field(MAX_FILE_BYTES);
    let mut parts = multer::Multipart::with_constraints(body::chunks(content), boundary, multer::Constraints::new().size_limit(limit));
    let recorder = server.files.recorder(&caller.claims);
    let mut files: Vec<UploadedFile> = Vec::new();
    let write_all_parts = async {
        while let Some(field) = parts.next_field().await.map_err(multipart_error)? {
            if files.len() == MAX_UPLOADS {
                return Err(ApiError::invalid(format!("an upload can have at most {MAX_UPLOADS} files; send the rest in another request")));
            }
            let requested_path = part_path(&field);
            let path = SandboxPath::beneath(Some(base.bytes()), requested_path.clone());
            let written = match (&path, mode(field.headers())) {
                (Ok(path), Ok(mode)) => {
                    let chunks = stream::try_unfold(field, async |mut field| {
                        Ok(field.chunk().await.map_err(multipart_error)?.map(|chunk| (chunk, field)))
                    });
                    let options = WriteOptions {
                        conditions: Conditions::default(),
                        mode,
                        is_durable,
                        recorder: recorder.clone(),
                        links: SymbolicLinks::Follow,
                    };
                    write_stream(&server.files, &server.authority, path, options, Box::pin(chunks)).await
                }
                (Err(e), _) => Err(e.clone()),
                (_, Err(e)) => Err(e),
            };
            let (shown, path_b64) = match &path {
                Ok(path) => path.to_json(),
                Err(_) => cobox_protocol::exec::text_and_b64(requested_path),
            };
            if let (Ok(path), Ok(written)) = (&path, &written) {
                server.activity_log.record_write(&caller.claims, path, written.size);
            }
            files.push(match written {
                Ok(written) => UploadedFile { path: shown, path_b64, size: Some(written.size), etag: Some(written.etag), error: None },
                Err(e) => UploadedFile { path: shown, path_b64, size: None, etag: None, error: Some(e.envelope(&record.request_id).error) },
            });
        }
        Ok(())
    };
    caller.stream.until_revoked(write_all_parts).await?;
    if files.is_empty() {
        return Err(ApiError::invalid("the multipart body contains no file").into());
    }
    let status = if files.iter().all(|f| f.error.is_none()) { StatusCode::OK } else { StatusCode::MULTI_STATUS };
    Ok((status, Json(UploadResponse { files })).into_response())
}

fn part_path(field: &multer::Field<'_>) -> Vec<u8> {
    match field.headers().get(FILE_PATH_HEADER) {
        Some(path) => percent_decode(path.as_bytes()).collect(),
        None => field.file_name().or(field.name()).unwrap_or_default().as_bytes().to_vec(),
    }
}

/// `GET /v1/files/download?path=&path=`: `multipart/mixed` with a part for each path, in order. Without `path` it
/// returns the file `/download`.
pub async fn download(
    State(server): State<Arc<Server>>,
    caller: Caller<FsRead>,
    Extension(connection): Extension<Connection>,
    Extension(record): Extension<Arc<RequestRecord>>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ErrorResponse> {
    let base = server.programs.work_dir().as_bytes();
    let paths: Vec<SandboxPath> = query_values(&uri, "path").map(|p| SandboxPath::beneath(Some(base), p)).collect::<Result<_, _>>()?;
    if paths.is_empty() {
        let path = SandboxPath::from_uri(&uri, super::PREFIX)?;
        let request = ReadRequest { method: &Method::GET, uri: &uri, headers: &headers, path: &path };
        return Ok(read::respond(&server.files, request, caller.stream, &connection).await?);
    }
    if paths.len() > MAX_DOWNLOADS {
        return Err(ApiError::invalid(format!("a download can have at most {MAX_DOWNLOADS} files; get the rest in another request")).into());
    }
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|e| ApiError::new(cobox_protocol::ErrorCode::Internal, e.to_string()))?;
    let boundary = format!("cobox-{:032x}", u128::from_ne_bytes(random));
    caller.stream.close_with_stream(&connection);
    let content_type =
        HeaderValue::try_from(format!("multipart/mixed; boundary={boundary}")).map_err(|e| ApiError::invalid(e.to_string()))?;
    let (store, outgoing) = (server.files.clone(), connection.outgoing);
    let parts = MultipartDownload { store, outgoing, paths: paths.into(), boundary, record, _stream: caller.stream, is_finished: false };
    Ok(([(header::CONTENT_TYPE, content_type)], Body::from_stream(parts.stream())).into_response())
}

struct MultipartDownload {
    store: FileStore,
    outgoing: FileSender,
    paths: VecDeque<SandboxPath>,
    boundary: String,
    record: Arc<RequestRecord>,
    /// Held while the response is sent.
    _stream: OpenStream,
    is_finished: bool,
}

type PartStream = stream::BoxStream<'static, io::Result<Bytes>>;

impl MultipartDownload {
    fn stream(self) -> impl Stream<Item = io::Result<Bytes>> {
        let parts = stream::unfold(self, async |mut parts| parts.next().await.map(|part| (part, parts)));
        parts.flatten()
    }

    async fn next(&mut self) -> Option<PartStream> {
        let Some(path) = self.paths.pop_front() else {
            let end = format!("--{}--\r\n", self.boundary);
            return (!std::mem::replace(&mut self.is_finished, true)).then(|| single_chunk(end.into()));
        };
        let mut headers = HeaderMap::new();
        let encoded = percent_encode(path.bytes(), &HEADER_ENCODE_SET).to_string();
        read::set_header(&mut headers, http::HeaderName::from_static(FILE_PATH_HEADER), encoded);
        let opened = read::open(&self.store, &path, false, SymbolicLinks::Follow)
            .await
            .and_then(|opened| opened.map_err(|kind| not_a_regular_file(kind, &path)));
        Some(match opened {
            Ok(opened) => {
                let size = opened.size();
                set_metadata_headers(&mut headers, &opened.stat, &opened.etag);
                let head = single_chunk(self.head(&headers, size));
                let content = match opened.content {
                    Content::Whole(bytes) => single_chunk(bytes),
                    Content::Open(file) => file_chunks(self.store.clone(), self.outgoing.clone(), file, 0, size, ()).boxed(),
                    Content::Unread => stream::empty().boxed(),
                };
                head.chain(content).chain(single_chunk(Bytes::from_static(b"\r\n"))).boxed()
            }
            Err(error) => {
                read::set_header(&mut headers, http::HeaderName::from_static(FILE_ERROR_HEADER), error.code.as_str().to_owned());
                headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
                // Serializing strings and a flag doesn't fail. If it did, an empty part would be better than a panic.
                let text = serde_json::to_vec(&error.envelope(&self.record.request_id)).unwrap_or_default();
                let head = self.head(&headers, text.len() as u64);
                single_chunk([head.as_ref(), &text, b"\r\n"].concat().into())
            }
        })
    }

    fn head(&self, headers: &HeaderMap, length: u64) -> Bytes {
        let mut head = format!("--{}\r\ncontent-length: {length}\r\n", self.boundary).into_bytes();
        for (name, value) in headers {
            head.extend_from_slice(name.as_str().as_bytes());
            head.extend_from_slice(b": ");
            head.extend_from_slice(value.as_bytes());
            head.extend_from_slice(b"\r\n");
        }
        head.extend_from_slice(b"\r\n");
        head.into()
    }
}

fn single_chunk(bytes: Bytes) -> PartStream {
    stream::once(async move { Ok(bytes) }).boxed()
}
