//! Reads a file for a response, whole or in part, in pieces as the client consumes them.

use std::{
    io,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use cobox_kernel::{FileSender, MAX_PLACEHOLDER_BYTES};
use cobox_protocol::{
    ApiError, ErrorCode,
    files::{FILE_KIND_HEADER, FILE_MODE_HEADER},
};
use futures_util::{Stream, stream};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use rustix::{
    fs::{FileType, Stat},
    io::Errno,
};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::{
    FileStore,
    change_log::version,
    digest,
    errors::{file_type_name, link_error, not_a_regular_file},
    etag::{Conditions, WriteLog},
    path::SandboxPath,
    root::{Root, SymbolicLinks, kind},
    symbolic_links,
    workers::operation_aborted,
};
use crate::{auth::OpenStream, http_listener::Connection};

/// Size of one read: large enough that the overhead of using a worker is negligible.
const CHUNK_BYTES: u64 = 512 * 1024;
/// If the last piece took no longer, it was in the page cache, and the next one is assumed to be too: the kernel then
/// sends it directly from there. A wrong assumption delays all other requests that boxd serves.
const CACHED_READ_TIME: Duration = Duration::from_micros(500);
/// After a piece that was not cached, this many bytes are read by workers however fast they are, because the kernel's
/// read-ahead may end soon.
const WORKER_READ_BYTES: u64 = 32 * 1024 * 1024;
/// Files up to this size are read in the same step that opens them.
const SMALL_FILE_BYTES: u64 = 128 * 1024;

/// A GET or HEAD request.
pub struct ReadRequest<'a> {
    pub method: &'a Method,
    pub uri: &'a Uri,
    pub headers: &'a HeaderMap,
    pub path: &'a SandboxPath,
}

/// Answers GET or HEAD for a file.
pub async fn respond(
    store: &FileStore,
    request: ReadRequest<'_>,
    stream: OpenStream,
    connection: &Connection,
) -> Result<Response, ApiError> {
    let ReadRequest { method, uri, headers, path } = request;
    let digests = digest::RequestedDigests::from_request(uri, headers)?;
    let conditions = Conditions::from_headers(headers)?;
    let is_metadata_only = method == Method::HEAD && !digests.is_any();
    let opened = match open(store, path, is_metadata_only, symbolic_links(headers)?).await? {
        Ok(opened) => opened,
        Err(kind) => {
            let mut response = crate::request_layer::ErrorResponse(not_a_regular_file(kind, path)).into_response();
            set_header(response.headers_mut(), http::HeaderName::from_static(FILE_KIND_HEADER), file_type_name(kind).to_owned());
            return Ok(response);
        }
    };
    let (size, etag) = (opened.size(), opened.etag.clone());
    let is_unchanged = conditions.check_read(&etag, path)?;
    let mut response = StatusCode::OK.into_response();
    set_metadata_headers(response.headers_mut(), &opened.stat, &etag);
    if is_unchanged {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        response.headers_mut().remove(header::CONTENT_TYPE);
        return Ok(response);
    }
    // Ranges apply only to GET. HEAD describes the whole file.
    let range = if method == Method::HEAD { RequestedRange::Whole } else { requested_range(headers, size, &etag) };
    let (from, length) = match range {
        RequestedRange::Whole => (0, size),
        RequestedRange::Range { from, length } => {
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            set_header(response.headers_mut(), header::CONTENT_RANGE, format!("bytes {from}-{}/{size}", from + length - 1));
            (from, length)
        }
        RequestedRange::Unsatisfiable => {
            let error =
                ApiError::new(ErrorCode::RangeNotSatisfiable, format!("{path} has {size} bytes; the requested range is outside of it"));
            let mut response = crate::request_layer::ErrorResponse(error).into_response();
            set_header(response.headers_mut(), header::CONTENT_RANGE, format!("bytes */{size}"));
            return Ok(response);
        }
    };
    if digests.is_any()
        && let Some(digest) = stream.until_revoked(opened.digest(store, digests)).await?
    {
        set_header(response.headers_mut(), digest::REPR_DIGEST, digest);
    }
    set_header(response.headers_mut(), header::CONTENT_LENGTH, length.to_string());
    if method != Method::HEAD {
        stream.close_with_stream(connection);
        *response.body_mut() = opened.body(store, connection, from, length, stream);
    }
    Ok(response)
}

/// A file that was found, and the content read while opening it.
pub struct OpenedFile {
    pub stat: Stat,
    pub etag: String,
    pub content: Content,
}

pub enum Content {
    /// Only its metadata was read.
    Unread,
    /// The complete content.
    Whole(Bytes),
    Open(Arc<OwnedFd>),
}

/// Opens a file and also reads it if it is small, which saves a second step.
pub async fn open(
    store: &FileStore,
    path: &SandboxPath,
    is_metadata_only: bool,
    links: SymbolicLinks,
) -> Result<Result<OpenedFile, FileType>, ApiError> {
    let (shown, writes) = (path.clone(), store.writes.clone());
    let step = move |root: &Root| match links {
        SymbolicLinks::Follow => open_and_read(root, shown.bytes(), &writes, is_metadata_only),
        SymbolicLinks::Refuse => open_and_read(&root.refusing_links()?, shown.bytes(), &writes, is_metadata_only),
    };
    store.workers.run_quick(step).await?.map_err(|errno| link_error(errno, links, path))
}

fn open_and_read(root: &Root, path: &[u8], writes: &WriteLog, is_metadata_only: bool) -> Result<Result<OpenedFile, FileType>, Errno> {
    if is_metadata_only {
        let stat = root.stat(path)?;
        return Ok(match kind(&stat) {
            FileType::RegularFile => Ok(OpenedFile { etag: writes.etag(&stat), stat, content: Content::Unread }),
            other => Err(other),
        });
    }
    let (file, stat) = match root.open_regular(path)? {
        Ok(opened) => opened,
        Err(kind) => return Ok(Err(kind)),
    };
    let (size, etag) = (u64::try_from(stat.st_size).unwrap_or(0), writes.etag(&stat));
    if size <= SMALL_FILE_BYTES {
        let content = read_whole(&file, size)?;
        // A file that grew or shrank in between is read while it is sent, where the change is detected.
        if content.len() as u64 == size {
            return Ok(Ok(OpenedFile { stat, etag, content: Content::Whole(content.into()) }));
        }
    }
    Ok(Ok(OpenedFile { stat, etag, content: Content::Open(Arc::new(file)) }))
}

fn read_whole(file: &OwnedFd, size: u64) -> Result<Vec<u8>, Errno> {
    let mut content = Vec::with_capacity(usize::try_from(size).map_err(|_| Errno::FBIG)?);
    while (content.len() as u64) < size {
        let at = content.len() as u64;
        if rustix::io::retry_on_intr(|| rustix::io::pread(file, rustix::buffer::spare_capacity(&mut content), at))? == 0 {
            break;
        }
    }
    Ok(content)
}

impl OpenedFile {
    pub fn size(&self) -> u64 {
        u64::try_from(self.stat.st_size).unwrap_or(0)
    }

    /// The file's digest; `None` if the file changed while it was read, because the hash would match neither version.
    async fn digest(&self, store: &FileStore, requested: digest::RequestedDigests) -> Result<Option<String>, ApiError> {
        let file = match &self.content {
            Content::Unread => return Ok(None),
            Content::Whole(bytes) => return Ok(Some(digest::digest_bytes(bytes, requested))),
            Content::Open(file) => file.clone(),
        };
        let (cancellation, version_before) = (CancellationToken::new(), version(&self.stat));
        let _stopped_when_dropped = cancellation.clone().drop_guard();
        let slot = store.workers.long_slots(1).await?;
        let hash = move |_: &Root| {
            let digest = digest::digest_file(&file, requested, || !cancellation.is_cancelled())?;
            let is_same = version(&rustix::fs::fstat(&*file)?) == version_before;
            io::Result::Ok(digest.filter(|_| is_same))
        };
        let done = store.workers.run_long(slot, hash).await?.await.map_err(|_| operation_aborted())?;
        done.map_err(|e| ApiError::new(ErrorCode::Internal, format!("hashing the file: {e}")))
    }

    fn body(self, store: &FileStore, connection: &Connection, from: u64, length: u64, stream: OpenStream) -> Body {
        match self.content {
            Content::Whole(bytes) => Body::from(slice_range(&bytes, from, length)),
            Content::Open(file) => Body::from_stream(file_chunks(store.clone(), connection.outgoing.clone(), file, from, length, stream)),
            Content::Unread => Body::empty(),
        }
    }
}

fn slice_range(bytes: &Bytes, from: u64, length: u64) -> Bytes {
    // Both are within the size of the content.
    bytes.slice(from as usize..(from + length) as usize)
}

pub fn set_metadata_headers(headers: &mut HeaderMap, stat: &Stat, etag: &str) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    set_header(headers, header::ETAG, etag.to_owned());
    #[allow(clippy::unnecessary_cast, reason = "the field is narrower on some machines")]
    if let Some(date) = http_date(stat.st_mtime as i64) {
        set_header(headers, header::LAST_MODIFIED, date);
    }
    set_header(headers, http::HeaderName::from_static(FILE_MODE_HEADER), format!("{:03o}", stat.st_mode & 0o777));
}

pub fn set_header(headers: &mut HeaderMap, name: http::HeaderName, value: String) {
    // All values consist of digits, letters and punctuation. An invalid one is omitted instead of failing the request.
    if let Ok(value) = HeaderValue::try_from(value) {
        headers.insert(name, value);
    }
}

/// The file's bytes, or placeholders that `outgoing` replaces when sending. If the disk is slow, the next piece is read
/// while the last is sent. A file that shrinks in the meantime ends the stream with an error, never with a short body.
/// `guard` lives as long as the stream.
pub fn file_chunks<H>(
    store: FileStore,
    outgoing: FileSender,
    file: Arc<OwnedFd>,
    from: u64,
    length: u64,
    guard: H,
) -> impl Stream<Item = io::Result<Bytes>> {
    let state =
        FileChunks { store, outgoing, file, at: from, left: length, read_ahead: None, is_cached: false, worker_bytes_left: 0, guard };
    stream::try_unfold(state, async |mut state| match state.next().await? {
        Some(chunk) => Ok(Some((chunk, state))),
        None => Ok(None),
    })
}

/// A piece, and how long reading it took.
type TimedRead = (io::Result<Vec<u8>>, Duration);

struct FileChunks<H> {
    store: FileStore,
    outgoing: FileSender,
    file: Arc<OwnedFd>,
    /// Offset of the piece that was requested last.
    at: u64,
    left: u64,
    read_ahead: Option<oneshot::Receiver<TimedRead>>,
    /// Whether the next piece is assumed to be in the page cache.
    is_cached: bool,
    /// Number of bytes still to be read by workers regardless of speed.
    worker_bytes_left: u64,
    #[allow(dead_code, reason = "dropped with the stream")]
    guard: H,
}

impl<H> FileChunks<H> {
    async fn next(&mut self) -> io::Result<Option<Bytes>> {
        if self.left == 0 {
            return Ok(None);
        }
        let workers = &self.store.workers;
        if self.is_cached {
            let duration = self.outgoing.take_longest_send();
            workers.record_inline_duration(duration);
            self.update_cache_guess(duration);
        }
        if self.is_cached {
            let bytes = self.left.min(MAX_PLACEHOLDER_BYTES as u64);
            let chunk = self.outgoing.placeholder(self.file.clone(), self.at, bytes as usize);
            self.advance(chunk.len());
            return Ok(Some(Bytes::from_static(chunk)));
        }
        let pending = match self.read_ahead.take() {
            Some(pending) => pending,
            None => self.request_chunk().await?,
        };
        let (read, duration) = pending.await.map_err(io::Error::other)?;
        let read = read?;
        if read.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file was truncated while it was read"));
        }
        self.advance(read.len());
        self.worker_bytes_left = self.worker_bytes_left.saturating_sub(read.len() as u64);
        self.update_cache_guess(duration);
        if self.left > 0 && !self.is_cached {
            self.read_ahead = Some(self.request_chunk().await?);
        }
        Ok(Some(Bytes::from(read)))
    }

    /// Decides from the duration of the last read whether the next piece is in the page cache.
    fn update_cache_guess(&mut self, duration: Duration) {
        if duration > CACHED_READ_TIME {
            self.worker_bytes_left = WORKER_READ_BYTES;
        }
        self.is_cached = self.worker_bytes_left == 0 && self.store.workers.may_run_inline();
    }

    fn advance(&mut self, bytes: usize) {
        self.at += bytes as u64;
        self.left -= bytes as u64;
    }

    async fn request_chunk(&self) -> io::Result<oneshot::Receiver<TimedRead>> {
        let (file, at) = (self.file.clone(), self.at);
        // Allocated on the thread that frees it. Otherwise each worker's malloc arena would come to hold the memory of
        // a piece.
        let chunk = Vec::with_capacity(self.left.min(CHUNK_BYTES) as usize);
        let step = move |_: &Root| {
            let started = Instant::now();
            (read_chunk(&file, at, chunk), started.elapsed())
        };
        self.store.workers.submit(step).await.map_err(io::Error::other)
    }
}

/// Reads up to the piece's capacity, or less at the end of the file.
pub fn read_chunk(file: &OwnedFd, at: u64, mut chunk: Vec<u8>) -> io::Result<Vec<u8>> {
    chunk.clear();
    rustix::io::retry_on_intr(|| rustix::io::pread(file, rustix::buffer::spare_capacity(&mut chunk), at))?;
    Ok(chunk)
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RequestedRange {
    Whole,
    Range { from: u64, length: u64 },
    Unsatisfiable,
}

/// Parses a single range. Several ranges and unknown units are answered with the whole file, as the standard allows.
pub(crate) fn requested_range(headers: &HeaderMap, size: u64, etag: &str) -> RequestedRange {
    let text = |name| headers.get(name).and_then(|v: &HeaderValue| v.to_str().ok());
    if text(header::IF_RANGE).is_some_and(|tag| tag != etag) {
        return RequestedRange::Whole;
    }
    let Some((first, last)) = text(header::RANGE).and_then(|r| r.strip_prefix("bytes=")?.split_once('-')) else {
        return RequestedRange::Whole;
    };
    let number = |s: &str| s.bytes().all(|b| b.is_ascii_digit()).then(|| s.parse().unwrap_or(u64::MAX));
    let (from, end) = match (first.trim(), last.trim()) {
        ("", "") => return RequestedRange::Whole,
        ("", suffix) => match number(suffix) {
            Some(n) => (size.saturating_sub(n), size),
            None => return RequestedRange::Whole,
        },
        (first, last) => match (number(first), number(last)) {
            (Some(from), Some(_)) if last.is_empty() => (from, size),
            (Some(from), Some(last)) if last >= from => (from, last.saturating_add(1).min(size)),
            _ => return RequestedRange::Whole,
        },
    };
    if from >= end { RequestedRange::Unsatisfiable } else { RequestedRange::Range { from, length: end - from } }
}

/// The date in RFC 9110's format; `None` if it has none there. A sandbox can set any date.
fn http_date(unix: i64) -> Option<String> {
    /// The first second of the year 10000.
    const END: u64 = 253_402_300_800;
    let seconds = u64::try_from(unix).ok().filter(|seconds| *seconds < END)?;
    Some(httpdate::fmt_http_date(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(value: &str, size: u64) -> RequestedRange {
        requested_range(&HeaderMap::from_iter([(header::RANGE, value.parse().unwrap())]), size, "\"e\"")
    }

    #[test]
    fn a_range_is_clipped_to_the_file_and_one_outside_is_unsatisfiable() {
        assert_eq!(range("bytes=0-3", 10), RequestedRange::Range { from: 0, length: 4 });
        assert_eq!(range("bytes=4-", 10), RequestedRange::Range { from: 4, length: 6 });
        assert_eq!(range("bytes=-3", 10), RequestedRange::Range { from: 7, length: 3 });
        assert_eq!(range("bytes=-30", 10), RequestedRange::Range { from: 0, length: 10 });
        assert_eq!(range("bytes=5-99999999999999999999999", 10), RequestedRange::Range { from: 5, length: 5 });
        for header in ["bytes=10-", "bytes=99-100", "bytes=-0"] {
            assert_eq!(range(header, 10), RequestedRange::Unsatisfiable, "{header}");
        }
        assert_eq!(range("bytes=-5", 0), RequestedRange::Unsatisfiable);
        for header in ["bytes=3-1", "bytes=0-1,4-5", "lines=1-2", "bytes=a-b", "bytes=-"] {
            assert_eq!(range(header, 10), RequestedRange::Whole, "{header}");
        }
    }

    #[test]
    fn a_range_for_another_version_returns_the_whole_file() {
        let headers = HeaderMap::from_iter([(header::RANGE, "bytes=0-1".parse().unwrap()), (header::IF_RANGE, "\"old\"".parse().unwrap())]);
        assert_eq!(requested_range(&headers, 10, "\"new\""), RequestedRange::Whole);
        assert_eq!(requested_range(&headers, 10, "\"old\""), RequestedRange::Range { from: 0, length: 2 });
    }

    #[test]
    fn dates_are_formatted_as_http_dates() {
        assert_eq!(http_date(784_111_777).unwrap(), "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(http_date(253_402_300_799).unwrap(), "Fri, 31 Dec 9999 23:59:59 GMT");
        assert_eq!([http_date(253_402_300_800), http_date(i64::MAX), http_date(-1), http_date(i64::MIN)], [None, None, None, None]);
    }
}
