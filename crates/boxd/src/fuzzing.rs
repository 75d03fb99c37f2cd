//! Entry points for the fuzz targets: one function for each parser of untrusted bytes in boxd.

use std::{cell::Cell, os::fd::OwnedFd, sync::Arc};

use axum::extract::ws::{Message, Utf8Bytes};
use cobox_protocol::{
    ApiError,
    frame::ClientFrame,
    fs::{GlobRequest, GrepRequest, GrepResponse, ListRequest, ListResponse},
};
use cobox_token::Claims;
use http::{HeaderMap, Uri};
use serde::de::DeserializeOwned;

use crate::{
    exec, files,
    files::{
        Conditions, Root, SandboxPath, WriteLog,
        archive::{
            Format,
            links::LinkPolicy,
            unpack::{self, UnpackOptions},
        },
        path, read,
    },
    fs::{glob, grep, list, stop_signal::StopSignal},
    socket::frames::{ReceivedFrame, receive},
    watch,
};

/// Parses a client's text frame; an error is the message sent for an unreadable one.
pub fn frame<S: DeserializeOwned + Send>(text: &str) -> Result<Option<ClientFrame<S>>, String> {
    match receive::<ClientFrame<S>>(Some(Ok(Message::Text(Utf8Bytes::from(text))))) {
        Ok(ReceivedFrame::Frame(frame)) => Ok(Some(frame)),
        Ok(ReceivedFrame::Auth(token)) => Ok(Some(ClientFrame::Auth { token })),
        Ok(ReceivedFrame::Ping(id)) => Ok(Some(ClientFrame::Ping { id })),
        Ok(ReceivedFrame::Close) => Ok(Some(ClientFrame::Close)),
        Ok(ReceivedFrame::KeepAlive) => Ok(None),
        Err(end) => Err(end.error.map(|e| e.message).unwrap_or_default()),
    }
}

/// A parsed path: its bytes, as displayed in messages, and in its JSON form.
pub struct ReadPath {
    pub bytes: Vec<u8>,
    pub shown: String,
    pub json: (String, Option<String>),
}

impl From<SandboxPath> for ReadPath {
    fn from(path: SandboxPath) -> Self {
        // The first step of most file operations.
        let _ = path::split_parent(path.bytes());
        Self { bytes: path.bytes().to_vec(), shown: path.to_string(), json: path.to_json() }
    }
}

pub fn path_in_uri(uri: &Uri) -> Result<ReadPath, ApiError> {
    SandboxPath::from_uri(uri, "/v1/files").map(Into::into)
}

pub fn path_in_query(uri: &Uri) -> Result<ReadPath, ApiError> {
    files::is_durable(uri)?;
    SandboxPath::from_query(uri, Some("/workspace")).map(Into::into)
}

pub fn path_in_json(text: Option<&str>, b64: Option<&str>) -> Result<Option<ReadPath>, ApiError> {
    SandboxPath::from_json("path", text, b64).map(|path| path.map(Into::into))
}

/// The part of a file of this size that a request gets, as start and length; `None` if it gets none.
pub fn range(headers: &HeaderMap, size: u64, etag: &str) -> Option<(u64, u64)> {
    match read::requested_range(headers, size, etag) {
        read::RequestedRange::Whole => Some((0, size)),
        read::RequestedRange::Range { from, length } => Some((from, length)),
        read::RequestedRange::Unsatisfiable => None,
    }
}

/// Whether a change and a read of a file with this ETag are allowed.
pub fn conditions(headers: &HeaderMap, etag: Option<&str>) -> Result<(bool, bool), ApiError> {
    let conditions = Conditions::from_headers(headers)?;
    let _ = files::mode(headers);
    let reads = etag.is_some_and(|etag| conditions.check_read(etag, "f").is_ok());
    Ok((conditions.check_change(etag, "f").is_ok(), reads))
}

/// Unpacks an archive into a directory of a root. Handles at most `steps` pieces and entries, so that an archive bomb
/// stays small.
pub fn unpack(root: OwnedFd, directory: &str, archive: &[u8], is_zstd: bool, claims: &Claims, steps: u32) -> Result<u64, ApiError> {
    let path = SandboxPath::new(directory.as_bytes().to_vec())?;
    let left = Cell::new(steps);
    let is_full = || {
        left.set(left.get().saturating_sub(1));
        left.get() == 0
    };
    let recorder = files::ChangeRecorder::new(Arc::default(), claims);
    let format = if is_zstd { Format::TarZstd } else { Format::Tar };
    // Accepts all links: the test is that nothing is written through those that point outside.
    let options = UnpackOptions { links: LinkPolicy::Any, writes: &WriteLog::default(), recorder: &recorder, is_full: &is_full };
    unpack::unpack(&Root::new(root), &path, format, archive, options).map(|done| done.entries)
}

pub fn list_page(root: OwnedFd, request: &ListRequest) -> Result<ListResponse, ApiError> {
    list::list(&Root::new(root), &SandboxPath::new(b"/".to_vec())?, request, &WriteLog::default(), &StopSignal::new(None))
}

/// The paths that a pattern matches.
pub fn find(root: OwnedFd, request: &GlobRequest) -> Result<Vec<String>, ApiError> {
    let plan = glob::GlobPlan::new(request, SandboxPath::new(b"/".to_vec())?)?;
    let found = glob::search(&Root::new(root), &plan, request, 100, StopSignal::new(None), &WriteLog::default())?;
    Ok(found.matches.into_iter().map(|entry| entry.path).collect())
}

pub fn search(file: OwnedFd, request: &GrepRequest) -> Result<GrepResponse, ApiError> {
    Ok(grep::GrepSearch::new(request, SandboxPath::new(b"/f".to_vec())?, StopSignal::new(None))?.search_file(file))
}

/// Parses the `Last-Event-ID` of a command's event stream.
pub fn exec_cursor(headers: &HeaderMap) -> Result<Option<(u64, u64)>, ApiError> {
    exec::event_stream::parse_last_event_id(headers)
}

pub fn watch_cursor(cursor: &str, life: &str) -> Option<u64> {
    watch::parse_cursor(cursor, life)
}
