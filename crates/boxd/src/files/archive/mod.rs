//! Whole directories over HTTP as a tar archive, plain or compressed, streamed in both directions.

pub(crate) mod links;
mod pack;
pub(crate) mod pipe;
pub(crate) mod unpack;

use std::sync::Arc;

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
use futures_util::StreamExt;
use http::{HeaderMap, Uri, header};

use self::{links::Links, unpack::Terms};
use super::{
    SandboxPath,
    refusal::{disk_full, not_a_file, refusal},
    refuse_part, refuse_when_full,
    root::Root,
    workers::gone,
};
use crate::{
    answer::Failure,
    auth::{Caller, FsRead, FsWrite},
    body,
    listen::Connection,
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
) -> Result<Response, Failure> {
    let path = SandboxPath::from_query(&uri, None)?;
    let wants_zstd = headers.get_all(header::ACCEPT).iter().any(|v| v.to_str().is_ok_and(|v| v.contains(TAR_ZSTD)));
    let format = if wants_zstd { Format::TarZstd } else { Format::Tar };
    let slot = server.files.workers.archive_slot()?;
    // Errors in the path are reported before the response begins. Later ones can only truncate it.
    let looked_at = path.clone();
    let opened = server.files.workers.run(move |root| pack::open(root, &looked_at)).await?.map_err(|e| refusal(e, &path))?;
    let top = opened.map_err(|kind| not_a_file(kind, &path))?;
    let (out, pieces) = pipe::outgoing();
    let job = move |_: &Root| {
        if let Err(error) = pack::pack(top, format, &out).and_then(|()| out.finish()) {
            tracing::warn!(%error, "an archive ended early");
        }
    };
    // The result is not needed: the end of the stream is the end of the job.
    drop(server.files.workers.run_archive(slot, job).await?);
    caller.stream.ends_connection(&connection);
    let open = caller.stream;
    let body = pieces.inspect(move |_| {
        // Held while the response is sent.
        let _ = &open;
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
) -> Result<Json<ArchiveUnpacked>, Failure> {
    let path = SandboxPath::from_query(&uri, None)?;
    refuse_when_full(&server.authority)?;
    refuse_part(&headers)?;
    let format = sent_format(&headers)?;
    let links = Links::of(&uri)?;
    let slot = server.files.workers.archive_slot()?;
    let work = async {
        let (sender, incoming) = pipe::incoming();
        let job = {
            let (path, writes, authority) = (path.clone(), server.files.writes.clone(), server.authority.clone());
            let author = server.files.author(&caller.claims);
            move |root: &Root| {
                let is_full = || authority.view().disk_full;
                unpack::unpack(root, &path, format, incoming, Terms { links, writes: &writes, author: &author, is_full: &is_full })
            }
        };
        let done = server.files.workers.run_archive(slot, job).await?;
        let mut chunks = body::chunks(content);
        loop {
            let chunk = chunks.next().await.transpose()?;
            if server.authority.view().disk_full {
                return Err(disk_full());
            }
            let is_end = chunk.is_none();
            // The unpacker stops receiving after an error, which its result contains.
            if sender.send(chunk).await.is_err() || is_end {
                break;
            }
        }
        done.await.map_err(|_| gone())?
    };
    let unpacked = caller.stream.until_revoked(work).await?;
    server.happenings.written_beneath(&caller.claims, &path, unpacked.entries);
    let (shown, path_b64) = path.in_json();
    Ok(Json(ArchiveUnpacked { path: shown, path_b64, entries: unpacked.entries, bytes: unpacked.bytes }))
}

fn sent_format(headers: &HeaderMap) -> Result<Format, ApiError> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    match content_type.split(';').next().unwrap_or_default().trim() {
        TAR => Ok(Format::Tar),
        TAR_ZSTD => Ok(Format::TarZstd),
        _ => Err(ApiError::invalid(format!("Content-Type must be {TAR} or {TAR_ZSTD}"))),
    }
}
