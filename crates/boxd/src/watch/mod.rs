//! `GET /v1/watch`: streams file changes to any number of readers, each of which proceeds at its own speed and can
//! resume.

mod inotify;
mod journal;
mod pending_changes;
mod watched_tree;
mod watcher;

use std::{io, sync::Arc, time::Duration};

use axum::{
    Extension,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use bytes::{Bytes, BytesMut};
use cobox_protocol::{
    ApiError, ErrorCode, Timestamp,
    watch::{OverflowReason, WatchOverflow, WatchReady},
};
use futures_util::{Stream, stream};
use http::{HeaderMap, Uri, header};

pub use self::watcher::WatchService;
use self::{journal::JournalRead, watched_tree::sse_frame, watcher::JournalReader};
use crate::{
    auth::{Caller, FsRead, OpenStream},
    clock::{Clock, sleep_until},
    files::{SandboxPath, query_values},
    http_listener::Connection,
    principal_slots::PrincipalSlot,
    request_layer::{ErrorResponse, RequestRecord},
    server::Server,
};

/// Period of empty comments in the stream, which keep proxies from closing the connection and reveal a dead one.
const HEARTBEAT: Duration = Duration::from_secs(15);
const LAST_EVENT_ID: &str = "last-event-id";

/// `<boot id>-<number>`: a position in the events of this run of boxd.
fn cursor(run_id: &str, number: u64) -> String {
    format!("{run_id}-{number}")
}

/// The number in a cursor of this run of boxd; `None` for a cursor of another run or an invalid one.
pub(crate) fn parse_cursor(cursor: &str, run_id: &str) -> Option<u64> {
    cursor.strip_prefix(run_id)?.strip_prefix('-')?.parse().ok()
}

/// `GET /v1/watch?path=&recursive=&cursor=`.
pub async fn watch(
    State(server): State<Arc<Server>>,
    caller: Caller<FsRead>,
    Extension(connection): Extension<Connection>,
    Extension(record): Extension<Arc<RequestRecord>>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ErrorResponse> {
    let path = match query_values(&uri, "path").next() {
        Some(path) => SandboxPath::new(path)?,
        None => SandboxPath::new(server.programs.work_dir().as_bytes().to_vec())?,
    };
    caller.set_target(&path.to_string());
    let recursive = match query_values(&uri, "recursive").next().as_deref() {
        None | Some(b"true") => true,
        Some(b"false") => false,
        Some(_) => return Err(ApiError::invalid("recursive: must be true or false").into()),
    };
    let requested_cursor = headers.get(LAST_EVENT_ID).and_then(|v| v.to_str().ok()).map(str::to_owned);
    let requested_cursor =
        requested_cursor.or_else(|| query_values(&uri, "cursor").next().map(|c| String::from_utf8_lossy(&c).into_owned()));
    let slot = server.slots.stream(&caller.claims)?;
    let reader = caller.stream.until_revoked(server.watch_service.watch(&server.files, path.clone(), recursive)).await?;
    caller.stream.close_with_stream(&connection);
    let resumed = requested_cursor.as_deref().map(|requested_cursor| parse_cursor(requested_cursor, server.watch_service.run_id()));
    let last_sent = match resumed {
        // Without a cursor the stream starts with the next event.
        None => reader.journal.last(),
        Some(Some(number)) => number,
        // A cursor of another run of boxd, or an invalid one: earlier events are unknown. A number above the last makes
        // the journal report lost events.
        Some(None) => reader.journal.last().saturating_add(1),
    };
    let watch_stream = WatchStream {
        run_id: server.watch_service.run_id().to_owned(),
        path,
        recursive,
        reader,
        last_sent,
        is_ready: false,
        has_ended: false,
        ends_at: Timestamp::from_unix(caller.claims.exp),
        clock: server.authority.clock.clone(),
        stream: caller.stream,
        record,
        _slot: slot,
    };
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, Body::from_stream(watch_stream.stream())).into_response())
}

struct WatchStream {
    run_id: String,
    path: SandboxPath,
    recursive: bool,
    reader: JournalReader,
    /// Number of the last event sent.
    last_sent: u64,
    is_ready: bool,
    has_ended: bool,
    ends_at: Timestamp,
    clock: Arc<dyn Clock>,
    stream: OpenStream,
    record: Arc<RequestRecord>,
    _slot: PrincipalSlot,
}

impl WatchStream {
    fn stream(self) -> impl Stream<Item = io::Result<Bytes>> {
        stream::unfold(self, async |mut watch_stream| watch_stream.next().await.map(|frame| (Ok(frame), watch_stream)))
    }

    async fn next(&mut self) -> Option<Bytes> {
        if self.has_ended {
            return None;
        }
        if !self.is_ready {
            return Some(self.ready());
        }
        // Subscribes before reading, so that events appended in between wake the wait below.
        let mut changed = self.reader.journal.subscribe();
        changed.mark_unchanged();
        loop {
            match self.reader.journal.read_after(self.last_sent) {
                JournalRead::Events(frames, number) => {
                    self.last_sent = number;
                    let mut batch = BytesMut::with_capacity(frames.iter().map(Bytes::len).sum());
                    frames.iter().for_each(|f| batch.extend_from_slice(f));
                    return Some(batch.freeze());
                }
                JournalRead::Lost(number) => {
                    self.last_sent = number;
                    return Some(
                        self.overflow(OverflowReason::FellBehind, "changes occurred faster than they were read; list the files again"),
                    );
                }
                JournalRead::Ended => return None,
                JournalRead::Empty => {}
            }
            tokio::select! {
                biased;
                reason = self.stream.revoked() => return Some(self.end(&reason)),
                // Fails only when the journal is dropped, but this reader keeps it alive.
                _ = changed.changed() => {}
                () = sleep_until(&*self.clock, self.ends_at) => {
                    return Some(self.end(&ApiError::new(ErrorCode::TokenExpired, "the token has expired; reconnect with a new token and the last event's ID")));
                }
                () = tokio::time::sleep(HEARTBEAT) => return Some(Bytes::from_static(b":\n\n")),
            }
        }
    }

    fn ready(&mut self) -> Bytes {
        self.is_ready = true;
        let mut overflow = Bytes::new();
        if let JournalRead::Lost(number) = self.reader.journal.read_after(self.last_sent) {
            self.last_sent = number;
            overflow =
                self.overflow(OverflowReason::CursorExpired, "the events after this cursor are no longer available; list the files again");
        }
        let cursor = cursor(&self.run_id, self.last_sent);
        let (path, path_b64) = self.path.to_json();
        let ready = sse_frame("ready", Some(&cursor), &WatchReady { cursor: cursor.clone(), path, path_b64, recursive: self.recursive });
        [ready, overflow].concat().into()
    }

    fn overflow(&self, reason: OverflowReason, message: &str) -> Bytes {
        sse_frame("overflow", Some(&cursor(&self.run_id, self.last_sent)), &WatchOverflow { reason, message: message.to_owned() })
    }

    /// Sends the reason for the end of the stream, if the client still reads.
    fn end(&mut self, reason: &ApiError) -> Bytes {
        self.has_ended = true;
        sse_frame("error", None, &reason.envelope(&self.record.request_id))
    }
}
