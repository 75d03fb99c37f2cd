//! `GET /v1/watch`: streams file changes to any number of readers, each of which proceeds at its own speed and can
//! resume.

mod inotify;
mod journal;
mod pending;
mod tree;
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

pub use self::watcher::Watching;
use self::{journal::Next, tree::frame, watcher::Reader};
use crate::{
    answer::{Failure, RequestRecord},
    auth::{Caller, FsRead, OpenStream},
    clock::{Clock, until},
    files::{SandboxPath, query_values},
    listen::Connection,
    principal_slots::PrincipalSlot,
    server::Server,
};

/// Period of empty comments in the stream, which keep proxies from closing the connection and reveal a dead one.
const HEARTBEAT: Duration = Duration::from_secs(15);
const LAST_EVENT_ID: &str = "last-event-id";

/// `<boot id>-<number>`: a position in the events of this run of boxd.
fn cursor(life: &str, number: u64) -> String {
    format!("{life}-{number}")
}

/// The number in a cursor of this run of boxd; `None` for a cursor of another run or an invalid one.
pub(crate) fn number_in(cursor: &str, life: &str) -> Option<u64> {
    cursor.strip_prefix(life)?.strip_prefix('-')?.parse().ok()
}

/// `GET /v1/watch?path=&recursive=&cursor=`.
pub async fn watch(
    State(server): State<Arc<Server>>,
    caller: Caller<FsRead>,
    Extension(connection): Extension<Connection>,
    Extension(record): Extension<Arc<RequestRecord>>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let path = match query_values(&uri, "path").next() {
        Some(path) => SandboxPath::new(path)?,
        None => SandboxPath::new(server.programs.work_dir().as_bytes().to_vec())?,
    };
    caller.aims_at(&path.to_string());
    let recursive = match query_values(&uri, "recursive").next().as_deref() {
        None | Some(b"true") => true,
        Some(b"false") => false,
        Some(_) => return Err(ApiError::invalid("recursive: must be true or false").into()),
    };
    let asked = headers.get(LAST_EVENT_ID).and_then(|v| v.to_str().ok()).map(str::to_owned);
    let asked = asked.or_else(|| query_values(&uri, "cursor").next().map(|c| String::from_utf8_lossy(&c).into_owned()));
    let slot = server.slots.stream(&caller.claims)?;
    let reader = caller.stream.until_revoked(server.watching.watch(&server.files, path.clone(), recursive)).await?;
    caller.stream.ends_connection(&connection);
    let resumed = asked.as_deref().map(|asked| number_in(asked, server.watching.life()));
    let at = match resumed {
        // Without a cursor the stream starts with the next event.
        None => reader.journal.last(),
        Some(Some(number)) => number,
        // A cursor of another run of boxd, or an invalid one: earlier events are unknown. A number above the last makes
        // the journal report lost events.
        Some(None) => reader.journal.last().saturating_add(1),
    };
    let events = Events {
        life: server.watching.life().to_owned(),
        path,
        recursive,
        reader,
        at,
        is_ready: false,
        is_over: false,
        ends_at: Timestamp::from_unix(caller.claims.exp),
        clock: server.authority.clock.clone(),
        open: caller.stream,
        record,
        _slot: slot,
    };
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, Body::from_stream(events.stream())).into_response())
}

struct Events {
    life: String,
    path: SandboxPath,
    recursive: bool,
    reader: Reader,
    /// Number of the last event sent.
    at: u64,
    is_ready: bool,
    is_over: bool,
    ends_at: Timestamp,
    clock: Arc<dyn Clock>,
    open: OpenStream,
    record: Arc<RequestRecord>,
    _slot: PrincipalSlot,
}

impl Events {
    fn stream(self) -> impl Stream<Item = io::Result<Bytes>> {
        stream::unfold(self, async |mut events| events.next().await.map(|frame| (Ok(frame), events)))
    }

    async fn next(&mut self) -> Option<Bytes> {
        if self.is_over {
            return None;
        }
        if !self.is_ready {
            return Some(self.ready());
        }
        // Subscribes before reading, so that events appended in between wake the wait below.
        let mut changed = self.reader.journal.changed();
        changed.mark_unchanged();
        loop {
            match self.reader.journal.after(self.at) {
                Next::Events(frames, number) => {
                    self.at = number;
                    let mut together = BytesMut::with_capacity(frames.iter().map(Bytes::len).sum());
                    frames.iter().for_each(|f| together.extend_from_slice(f));
                    return Some(together.freeze());
                }
                Next::Lost(number) => {
                    self.at = number;
                    return Some(
                        self.overflow(OverflowReason::FellBehind, "changes came faster than they were read; look at the files again"),
                    );
                }
                Next::Over => return None,
                Next::Nothing => {}
            }
            tokio::select! {
                biased;
                why = self.open.revoked() => return Some(self.end(&why)),
                // Fails only when the journal is dropped, but this reader keeps it alive.
                _ = changed.changed() => {}
                () = until(&*self.clock, self.ends_at) => {
                    return Some(self.end(&ApiError::new(ErrorCode::TokenExpired, "the token has expired; come back with a fresh one and the last event's id")));
                }
                () = tokio::time::sleep(HEARTBEAT) => return Some(Bytes::from_static(b":\n\n")),
            }
        }
    }

    fn ready(&mut self) -> Bytes {
        self.is_ready = true;
        let mut lost = Bytes::new();
        if let Next::Lost(number) = self.reader.journal.after(self.at) {
            self.at = number;
            lost = self
                .overflow(OverflowReason::CursorExpired, "what happened since that cursor is not known any more; look at the files again");
        }
        let cursor = cursor(&self.life, self.at);
        let (path, path_b64) = self.path.to_json();
        let ready = frame("ready", Some(&cursor), &WatchReady { cursor: cursor.clone(), path, path_b64, recursive: self.recursive });
        [ready, lost].concat().into()
    }

    fn overflow(&self, reason: OverflowReason, message: &str) -> Bytes {
        frame("overflow", Some(&cursor(&self.life, self.at)), &WatchOverflow { reason, message: message.to_owned() })
    }

    /// Sends the reason for the end of the stream, if the client still reads.
    fn end(&mut self, why: &ApiError) -> Bytes {
        self.is_over = true;
        frame("error", None, &why.envelope(&self.record.request_id))
    }
}
