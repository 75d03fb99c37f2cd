//! Whole directories over HTTP as a tar archive, plain or compressed, streamed in both directions.

pub(crate) mod links;
mod pack;
pub(crate) mod unpack;

use std::{io, sync::Arc};

use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use cobox_protocol::{
    ApiError,
    files::{ArchiveUnpacked, TAR, TAR_ZSTD},
};
use futures_util::{StreamExt, stream};
use http::{HeaderMap, Uri, header};

use self::{links::LinkPolicy, unpack::UnpackOptions};
use super::{
    SandboxPath, check_disk_space,
    errors::{disk_full, file_error, not_a_regular_file},
    refuse_partial_content,
    root::Root,
    workers::operation_aborted,
};
use crate::{
    auth::{Caller, FsRead, FsWrite},
    body,
    http_listener::Connection,
    pipe,
    request_layer::ErrorResponse,
    server::Server,
};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Format {
    Tar,
    TarZstd,
}

/// `GET /v1/archive?path=`: the contents of a directory, or one file, as a tar archive with relative names.
pub async fn get(
    State(server): State<Arc<Server>>,
    caller: Caller<FsRead>,
    Extension(connection): Extension<Connection>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ErrorResponse> {
    let path = SandboxPath::from_query(&uri, None)?;
    let wants_zstd = headers.get_all(header::ACCEPT).iter().any(|v| v.to_str().is_ok_and(|v| v.contains(TAR_ZSTD)));
    let format = if wants_zstd { Format::TarZstd } else { Format::Tar };
    let slot = server.files.workers.archive_slot()?;
    // Errors in the path are reported before the response begins. Later ones can only truncate it.
    let path_to_open = path.clone();
    let opened = server.files.workers.run(move |root| pack::open(root, &path_to_open)).await?.map_err(|e| file_error(e, &path))?;
    let source = opened.map_err(|kind| not_a_regular_file(kind, &path))?;
    let (out, mut chunks) = pipe::to_client();
    let result = server.files.workers.run_archive(slot, move |_: &Root| pack::pack(source, format, out)).await?;
    // An error instead of the end of the stream: an archive that is incomplete must not look complete.
    let end = stream::once(result).filter_map(|packed| async {
        let error = packed.unwrap_or_else(|_| Err(io::ErrorKind::Interrupted.into())).err()?;
        tracing::warn!(%error, "an archive ended early");
        Some(Err(error))
    });
    caller.stream.close_with_stream(&connection);
    let stream = caller.stream;
    let body = stream::poll_fn(move |context| chunks.poll_recv(context)).map(Ok).chain(end).inspect(move |_| {
        // Held while the response is sent.
        let _ = &stream;
    });
    let content_type = if format == Format::Tar { TAR } else { TAR_ZSTD };
    Ok(([(header::CONTENT_TYPE, content_type)], Body::from_stream(body)).into_response())
}

/// `PUT /v1/archive?path=`: unpacks into a directory, which is created if missing. Entries unpacked before an error
/// remain.
pub async fn put(
    State(server): State<Arc<Server>>,
    caller: Caller<FsWrite>,
    uri: Uri,
    headers: HeaderMap,
    content: Body,
) -> Result<Json<ArchiveUnpacked>, ErrorResponse> {
    let path = SandboxPath::from_query(&uri, None)?;
    check_disk_space(&server.authority)?;
    refuse_partial_content(&headers)?;
    let format = request_format(&headers)?;
    let links = LinkPolicy::from_query(&uri)?;
    let slot = server.files.workers.archive_slot()?;
    let work = async {
        let (sender, archive_reader) = pipe::from_client();
        let work = {
            let (path, writes, authority) = (path.clone(), server.files.writes.clone(), server.authority.clone());
            let recorder = server.files.recorder(&caller.claims);
            move |root: &Root| {
                let is_full = || authority.pushed_state().disk_full;
                unpack::unpack(
                    root,
                    &path,
                    format,
                    archive_reader,
                    UnpackOptions { links, writes: &writes, recorder: &recorder, is_full: &is_full },
                )
            }
        };
        let result = server.files.workers.run_archive(slot, work).await?;
        let mut body_chunks = body::chunks(content);
        loop {
            let chunk = body_chunks.next().await.transpose()?;
            if server.authority.pushed_state().disk_full {
                return Err(disk_full());
            }
            let is_end = chunk.is_none();
            // The unpacker stops receiving after an error, which its result contains.
            if sender.send(chunk).await.is_err() || is_end {
                break;
            }
        }
        result.await.map_err(|_| operation_aborted())?
    };
    let unpacked = caller.stream.until_revoked(work).await?;
    server.activity_log.record_writes_beneath(&caller.claims, &path, unpacked.entries);
    let (shown, path_b64) = path.to_json();
    Ok(Json(ArchiveUnpacked { path: shown, path_b64, entries: unpacked.entries, bytes: unpacked.bytes }))
}

fn request_format(headers: &HeaderMap) -> Result<Format, ApiError> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    match content_type.split(';').next().unwrap_or_default().trim() {
        TAR => Ok(Format::Tar),
        TAR_ZSTD => Ok(Format::TarZstd),
        _ => Err(ApiError::invalid(format!("Content-Type must be {TAR} or {TAR_ZSTD}"))),
    }
}
