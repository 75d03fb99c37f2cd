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
    plan::{MAX_TIMEOUT, Terms},
    session::{frame, ready},
    viewer::{Event, Form, Viewer, at},
};
use crate::{
    auth::{Caller, Exec},
    listen::Connection,
    server::Server,
};

/// Events queued for a slow client; beyond it the output stays in the command's log.
const WAITING_EVENTS: usize = 2;
/// Interval of keep-alive comments while there is no output, so that proxies don't close the connection as idle.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
const LAST_EVENT_ID: &str = "last-event-id";

/// Whether the client accepts only an event stream; one that also accepts JSON gets the whole answer.
pub fn are_wanted(headers: &HeaderMap) -> bool {
    let accepts = |kind: &str| headers.get_all(header::ACCEPT).iter().any(|v| v.to_str().is_ok_and(|v| v.contains(kind)));
    accepts("text/event-stream") && !accepts("application/json") && !accepts("*/*")
}

/// Encodes a command's events for one dialect.
pub trait Script: Send + 'static {
    const FORM: Form;

    fn ready(&mut self, ready: ExecReady, positions: (u64, u64)) -> Bytes;
    /// `positions` are the offsets at which both streams continue after it.
    fn event(&mut self, event: Event, positions: (u64, u64)) -> Bytes;
    /// The event for a stream that ends before the command does.
    fn cut_off(&mut self, why: CutOff, positions: (u64, u64)) -> Option<Bytes>;
}

pub enum CutOff {
    /// The token has expired or was revoked.
    Refused(ApiError),
    /// boxd is about to exit.
    Shutdown,
}

/// An event stream that is about to start.
pub struct Events<S> {
    pub start: ExecStart,
    pub terms: Terms,
    /// Maximum bytes of each stream, if limited.
    pub max_output: Option<u64>,
    pub script: S,
}

pub async fn answer(
    server: &Arc<Server>,
    caller: Caller<Exec>,
    headers: &HeaderMap,
    connection: &Connection,
    mut start: ExecStart,
    max_output: Option<u64>,
) -> Result<Response, ApiError> {
    if let Some((stdout, stderr)) = last_event(headers)? {
        start.stdout_from = start.stdout_from.or(Some(stdout));
        start.stderr_from = start.stderr_from.or(Some(stderr));
    }
    Events { start, terms: Terms::timeout(MAX_TIMEOUT), max_output, script: Frames }.answer(server, caller, connection).await
}

impl<S: Script> Events<S> {
    pub async fn answer(self, server: &Arc<Server>, caller: Caller<Exec>, connection: &Connection) -> Result<Response, ApiError> {
        let Events { start, terms, max_output, mut script } = self;
        let slot = server.slots.stream(&caller.claims)?;
        let (stdout_from, stderr_from) = (start.stdout_from.unwrap_or(0), start.stderr_from.unwrap_or(0));
        let claims = caller.claims.clone();
        let attached = caller.stream.until_revoked(Commands::start(server, start, terms, &claims)).await?;
        let mut viewer = Viewer::new(attached, stdout_from, stderr_from, S::FORM);
        if let Some(most) = max_output {
            viewer.cut_at(most);
        }
        caller.stream.ends_connection(connection);
        let (events, waiting) = mpsc::channel(WAITING_EVENTS);
        let (authority, shutdown) = (server.authority.clone(), server.shutdown.clone());
        server.tasks.spawn(async move {
            let mut viewer = viewer;
            let cut_off = tokio::select! {
                () = tell(&mut viewer, &mut script, &events) => None,
                why = caller.stream.revoked() => Some(CutOff::Refused(why)),
                why = authority.expired(&claims) => Some(CutOff::Refused(why)),
                () = shutdown.cancelled() => Some(CutOff::Shutdown),
            };
            if let Some(event) = cut_off.and_then(|why| script.cut_off(why, viewer.positions())) {
                // The event is dropped where the queue is full: the connection of a client that doesn't read is closed
                // instead.
                let _ = events.try_send(event);
            }
            drop(slot);
        });
        let body = stream::unfold(waiting, async |mut waiting| {
            waiting.recv().await.map(|event| (Ok::<_, std::convert::Infallible>(event), waiting))
        });
        let mut response = Response::new(Body::from_stream(body));
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        Ok(response)
    }
}

/// Sends events until the command is over or the client is gone.
async fn tell(viewer: &mut Viewer, script: &mut impl Script, events: &mpsc::Sender<Bytes>) {
    let ready = ready(viewer);
    if events.send(script.ready(ready, viewer.positions())).await.is_err() {
        return;
    }
    let mut permit = None;
    loop {
        let stalls_at = viewer.stalls_at();
        tokio::select! {
            free = events.reserve(), if permit.is_none() => match free {
                Ok(free) => permit = Some(free),
                Err(_) => return,
            },
            next = viewer.next(), if permit.is_some() => {
                let is_over = matches!(next, Event::Exit(_));
                let text = script.event(next, viewer.positions());
                if let Some(permit) = permit.take() {
                    permit.send(text);
                }
                if is_over {
                    return;
                }
            }
            () = at(stalls_at) => viewer.let_go(),
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
struct Frames;

impl Script for Frames {
    const FORM: Form = Form::Text;

    fn ready(&mut self, ready: ExecReady, positions: (u64, u64)) -> Bytes {
        event(&ServerFrame::Ready(ready), positions)
    }
    fn event(&mut self, next: Event, positions: (u64, u64)) -> Bytes {
        event(&frame(next), positions)
    }
    fn cut_off(&mut self, why: CutOff, positions: (u64, u64)) -> Option<Bytes> {
        match why {
            CutOff::Refused(error) => {
                let error = error.envelope(&cobox_protocol::RequestId::new()).error;
                Some(event(&ServerFrame::Error { error }, positions))
            }
            CutOff::Shutdown => None,
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

pub(crate) fn last_event(headers: &HeaderMap) -> Result<Option<(u64, u64)>, ApiError> {
    let Some(value) = headers.get(LAST_EVENT_ID) else { return Ok(None) };
    let offsets = value.to_str().ok().and_then(|v| v.split_once('-')).and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    offsets.map(Some).ok_or_else(|| ApiError::invalid("Last-Event-ID must be the id of an event of this route, such as 1024-0"))
}
