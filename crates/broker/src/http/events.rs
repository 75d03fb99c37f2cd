//! `/v1/sandbox/sessions/{id}/events`: the events of a session as server-sent events.

use std::time::Duration;

use axum::{
    body::{Body, Bytes},
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use cobox_gateway::Credential;
use cobox_protocol::{
    ApiError, ErrorCode, RequestId,
    event::{ERROR_NAME, EVENT_NAME, SandboxEvent},
};
use futures_util::stream;
use http::{Extensions, HeaderMap, HeaderValue, header};
use serde::Deserialize;
use tokio::sync::mpsc;

use super::{
    Api,
    body::UnexpectedBody,
    error::{Failure, RequestRecord},
    paging::Params,
    sessions::session_id,
};
use crate::domain::{
    access::rate_limiter::RequestClass,
    events::event_streams::{self, EventStream, StreamCredentials, StreamItem, StreamStart, missing_credential},
    model::Principal,
};

const LAST_EVENT_ID: &str = "last-event-id";
/// Accepted in place of an event's id.
const NOW: &str = "now";
/// Batches buffered between the database and a slow client. Further events wait in the database.
const BUFFERED_BATCHES: usize = 2;
/// A client that reads nothing for this long loses its stream. It can resume where it stopped.
const CLIENT_READ_TIMEOUT: Duration = Duration::from_secs(30);
/// How soon a browser reconnects.
const PREAMBLE: &[u8] = b"retry: 1000\n\n";
const HEARTBEAT: &[u8] = b":\n\n";

#[derive(Deserialize)]
pub struct EventsQuery {
    /// For clients that can't send `Last-Event-ID`, which takes precedence.
    after: Option<String>,
}

pub async fn events(
    State(api): State<Api>,
    Path(id): Path<String>,
    Params(query): Params<EventsQuery>,
    headers: HeaderMap,
    extensions: Extensions,
) -> Result<Response, Failure> {
    let from = begin(&headers, query.after.as_deref())?;
    let authority = api.context.thread_authority.as_ref();
    let credentials = StreamCredentials {
        credential: Credential::from_headers(&headers)?.map(stream_credential),
        for_threads: authority.and_then(|a| a.credential(&headers)),
    };
    if credentials.credential.is_none() {
        // Checked before anything is disclosed about the id.
        return Err(missing_credential().into());
    }
    let charge = |auth: &Principal| api.charge(extensions.get::<RequestRecord>(), auth, RequestClass::Request);
    let stream = api.events.open(credentials, &session_id(&id)?, from, &charge).await?;
    UnexpectedBody::must_be_empty(&extensions).await?;
    let request_id = extensions.get::<RequestId>().cloned().unwrap_or_else(RequestId::new);
    let (sender, receiver) = mpsc::channel(BUFFERED_BATCHES);
    let preamble = preamble(&stream);
    // Runs outside the connection's own thread: it must continue, and end, while the client reads nothing.
    api.context.background.spawn(send_events(stream, sender, request_id));
    let body = stream::unfold((Some(preamble), receiver), async |(first, mut receiver)| {
        let bytes = match first {
            Some(first) => first,
            None => receiver.recv().await?,
        };
        Some((Ok::<_, std::convert::Infallible>(bytes), (None, receiver)))
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        // Some proxies buffer responses.
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    Ok((headers, Body::from_stream(body)).into_response())
}

/// Sends an id without an event: readers of server-sent events store it without reporting an event.
fn preamble(stream: &EventStream) -> Bytes {
    match stream.begins_at() {
        Some(id) => [format!("id: {id}\n").as_bytes(), PREAMBLE].concat().into(),
        None => Bytes::from_static(PREAMBLE),
    }
}

fn stream_credential(credential: Credential) -> event_streams::Credential {
    match credential {
        Credential::ApiKey(key) => event_streams::Credential::ApiKey(key),
        Credential::Token(token) => event_streams::Credential::Token(token),
        Credential::Link(_) => event_streams::Credential::FileLink,
    }
}

fn begin(headers: &HeaderMap, after: Option<&str>) -> Result<StreamStart, ApiError> {
    let (name, value) = match headers.get(LAST_EVENT_ID) {
        Some(value) => ("Last-Event-ID", value.to_str().unwrap_or("?")),
        None => ("after", after.unwrap_or_default()),
    };
    match value {
        "" => Ok(StreamStart::Start),
        NOW => Ok(StreamStart::Now),
        id => Ok(StreamStart::After(id.parse().map_err(|_| ApiError::invalid(format!("{name}: must be the id of an event, or `{NOW}`")))?)),
    }
}

/// Sends events until the stream ends or the client disconnects.
async fn send_events(mut stream: EventStream, sender: mpsc::Sender<Bytes>, request_id: RequestId) {
    // Reserve a slot, so that the final error can always be sent.
    let Ok(last) = sender.clone().reserve_owned().await else { return };
    let end = loop {
        let item = tokio::select! {
            item = stream.next() => item,
            () = sender.closed() => return,
        };
        let bytes = match item {
            StreamItem::Events(events) => events.iter().map(text).collect::<String>().into(),
            StreamItem::Heartbeat => Bytes::from_static(HEARTBEAT),
            StreamItem::End(end) => break end,
        };
        match sender.send_timeout(bytes, CLIENT_READ_TIMEOUT).await {
            Ok(()) => {}
            Err(mpsc::error::SendTimeoutError::Closed(_)) => return,
            Err(mpsc::error::SendTimeoutError::Timeout(_)) => {
                break Some(ApiError::new(ErrorCode::RateLimited, "the client read no events for too long; reconnect with Last-Event-ID"));
            }
        }
    };
    if let Some(error) = end {
        let envelope = serde_json::json!(error.envelope(&request_id));
        last.send(format!("event: {ERROR_NAME}\ndata: {envelope}\n\n").into());
    }
}

fn text(event: &SandboxEvent) -> String {
    // JSON escapes line breaks, even in names chosen by a sandbox. These types always serialise.
    let data = serde_json::to_string(event).unwrap_or_default();
    format!("id: {}\nevent: {EVENT_NAME}\ndata: {data}\n\n", event.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_begins_at_the_start_now_or_after_an_event() {
        let none = HeaderMap::new();
        let id = "evt_00000000000000000000000001";
        let mut with_id = HeaderMap::new();
        with_id.insert(LAST_EVENT_ID, HeaderValue::from_static("evt_00000000000000000000000001"));
        assert_eq!(begin(&none, None).unwrap(), StreamStart::Start);
        assert_eq!(begin(&none, Some("now")).unwrap(), StreamStart::Now);
        assert_eq!(begin(&none, Some(id)).unwrap(), StreamStart::After(id.parse().unwrap()));
        assert_eq!(begin(&with_id, Some("now")).unwrap(), StreamStart::After(id.parse().unwrap()));
        assert!(begin(&none, Some("7")).unwrap_err().message.starts_with("after:"));
    }
}
