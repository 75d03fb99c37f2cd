//! `POST /v1/exec` as an event stream: a command's output frames as server-sent events. A client resumes by repeating
//! the request with the position where the stream broke off.

use std::{sync::Arc, time::Duration};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use cobox_protocol::{
    ApiError,
    frame::{ExecReady, ExecStart, ServerFrame},
};
use futures_util::stream;
use http::{HeaderMap, HeaderValue, header};
use tokio::sync::mpsc;

use super::{
    Commands,
    run_spec::{LifetimePolicy, MAX_TIMEOUT},
    viewer::{OutputEncoding, OutputEvent, Viewer, sleep_until_some},
    websocket::{event_frame, ready},
};
use crate::{
    auth::{Caller, Exec},
    http_listener::Connection,
    server::Server,
};

/// Events queued for a slow client; beyond it the output stays in the command's log.
const MAX_QUEUED_EVENTS: usize = 2;
/// Interval of keep-alive comments while there is no output, so that proxies don't close the connection as idle.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
const LAST_EVENT_ID: &str = "last-event-id";

/// Whether the client accepts only an event stream; one that also accepts JSON gets the whole answer.
pub fn is_requested(headers: &HeaderMap) -> bool {
    let accepts = |kind: &str| headers.get_all(header::ACCEPT).iter().any(|v| v.to_str().is_ok_and(|v| v.contains(kind)));
    accepts("text/event-stream") && !accepts("application/json") && !accepts("*/*")
}

/// Encodes a command's events for one dialect.
pub trait EventEncoder: Send + 'static {
    const ENCODING: OutputEncoding;

    fn ready(&mut self, ready: ExecReady, positions: (u64, u64)) -> Bytes;
    /// `positions` are the offsets at which both streams continue after it.
    fn event(&mut self, event: OutputEvent, positions: (u64, u64)) -> Bytes;
    /// The event for a stream that ends before the command does.
    fn interrupted(&mut self, reason: Interruption, positions: (u64, u64)) -> Option<Bytes>;
}

pub enum Interruption {
    /// The token has expired or was revoked.
    Refused(ApiError),
    /// boxd is about to exit.
    Shutdown,
}

/// An event stream that is about to start.
pub struct EventStream<S> {
    pub start: ExecStart,
    pub policy: LifetimePolicy,
    /// Maximum bytes of each stream, if limited.
    pub max_output: Option<u64>,
    pub encoder: S,
}

pub async fn respond(
    server: &Arc<Server>,
    caller: Caller<Exec>,
    headers: &HeaderMap,
    connection: &Connection,
    mut start: ExecStart,
    max_output: Option<u64>,
) -> Result<Response, ApiError> {
    if let Some((stdout, stderr)) = parse_last_event_id(headers)? {
        start.stdout_from = start.stdout_from.or(Some(stdout));
        start.stderr_from = start.stderr_from.or(Some(stderr));
    }
    EventStream { start, policy: LifetimePolicy::with_timeout(MAX_TIMEOUT), max_output, encoder: FrameEvents }
        .respond(server, caller, connection)
        .await
}

impl<S: EventEncoder> EventStream<S> {
    pub async fn respond(self, server: &Arc<Server>, caller: Caller<Exec>, connection: &Connection) -> Result<Response, ApiError> {
        let EventStream { start, policy, max_output, mut encoder } = self;
        let slot = server.slots.stream(&caller.claims)?;
        let (stdout_from, stderr_from) = (start.stdout_from.unwrap_or(0), start.stderr_from.unwrap_or(0));
        let claims = caller.claims.clone();
        let attachment = caller.stream.until_revoked(Commands::start(server, start, policy, &claims)).await?;
        let mut viewer = Viewer::new(attachment, stdout_from, stderr_from, S::ENCODING);
        if let Some(limit) = max_output {
            viewer.limit_to(limit);
        }
        caller.stream.close_with_stream(connection);
        let (events, receiver) = mpsc::channel(MAX_QUEUED_EVENTS);
        let (authority, shutdown) = (server.authority.clone(), server.shutdown.clone());
        server.tasks.spawn(async move {
            let mut viewer = viewer;
            let interruption = tokio::select! {
                () = send_events(&mut viewer, &mut encoder, &events) => None,
                reason = caller.stream.revoked() => Some(Interruption::Refused(reason)),
                reason = authority.wait_until_expired(&claims) => Some(Interruption::Refused(reason)),
                () = shutdown.cancelled() => Some(Interruption::Shutdown),
            };
            if let Some(event) = interruption.and_then(|reason| encoder.interrupted(reason, viewer.positions())) {
                // The event is dropped where the queue is full: the connection of a client that doesn't read is closed
                // instead.
                let _ = events.try_send(event);
            }
            drop(slot);
        });
        let body = stream::unfold(receiver, async |mut receiver| {
            receiver.recv().await.map(|event| (Ok::<_, std::convert::Infallible>(event), receiver))
        });
        let mut response = Response::new(Body::from_stream(body));
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        Ok(response)
    }
}

/// Sends events until the command is over or the client is gone.
async fn send_events(viewer: &mut Viewer, encoder: &mut impl EventEncoder, events: &mpsc::Sender<Bytes>) {
    let ready = ready(viewer);
    if events.send(encoder.ready(ready, viewer.positions())).await.is_err() {
        return;
    }
    let mut permit = None;
    loop {
        let stalls_at = viewer.stalls_at();
        tokio::select! {
            reserved = events.reserve(), if permit.is_none() => match reserved {
                Ok(reserved) => permit = Some(reserved),
                Err(_) => return,
            },
            event_to_send = viewer.next(), if permit.is_some() => {
                let has_exited = matches!(event_to_send, OutputEvent::Exit(_));
                let text = encoder.event(event_to_send, viewer.positions());
                if let Some(permit) = permit.take() {
                    permit.send(text);
                }
                if has_exited {
                    return;
                }
            }
            () = sleep_until_some(stalls_at) => viewer.release_backpressure(),
            () = tokio::time::sleep(KEEP_ALIVE), if permit.is_some() => {
                if let Some(permit) = permit.take() {
                    permit.send(Bytes::from_static(b":\n\n"));
                }
            }
            () = events.closed() => return,
        }
    }
}

/// boxd's own dialect: the frames of the WebSocket.
struct FrameEvents;

impl EventEncoder for FrameEvents {
    const ENCODING: OutputEncoding = OutputEncoding::Text;

    fn ready(&mut self, ready: ExecReady, positions: (u64, u64)) -> Bytes {
        event(&ServerFrame::Ready(ready), positions)
    }
    fn event(&mut self, event_to_send: OutputEvent, positions: (u64, u64)) -> Bytes {
        event(&event_frame(event_to_send), positions)
    }
    fn interrupted(&mut self, reason: Interruption, positions: (u64, u64)) -> Option<Bytes> {
        match reason {
            Interruption::Refused(error) => {
                let error = error.envelope(&cobox_protocol::RequestId::new()).error;
                Some(event(&ServerFrame::Error { error }, positions))
            }
            Interruption::Shutdown => None,
        }
    }
}

/// One event; its id holds the offsets at which both streams continue after it.
fn event(frame: &ServerFrame<ExecReady>, (stdout, stderr): (u64, u64)) -> Bytes {
    let name = match frame {
        ServerFrame::Ready(_) => "ready",
        ServerFrame::Stdout { .. } => "stdout",
        ServerFrame::Stderr { .. } => "stderr",
        ServerFrame::Gap { .. } => "gap",
        ServerFrame::Exit { .. } => "exit",
        _ => "error",
    };
    // Strings and numbers always serialise, and JSON contains no raw line breaks.
    let data = serde_json::to_string(frame).unwrap_or_default();
    Bytes::from(format!("event: {name}\nid: {stdout}-{stderr}\ndata: {data}\n\n"))
}

pub(crate) fn parse_last_event_id(headers: &HeaderMap) -> Result<Option<(u64, u64)>, ApiError> {
    let Some(value) = headers.get(LAST_EVENT_ID) else { return Ok(None) };
    let offsets = value.to_str().ok().and_then(|v| v.split_once('-')).and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    offsets.map(Some).ok_or_else(|| ApiError::invalid("Last-Event-ID must be the ID of an event of this route, such as 1024-0"))
}
