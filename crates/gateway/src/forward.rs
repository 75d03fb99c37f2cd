//! Forwards one request to boxd and streams the response back, buffering neither.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    response::Response,
};
use cobox_protocol::RequestId;
use http::{Request, StatusCode};
use hyper::{
    body::{Frame, SizeHint},
    upgrade::OnUpgrade,
};
use hyper_util::rt::TokioIo;

use crate::{
    Admission,
    connection_cache::CacheReturn,
    headers::{filter_for_caller, filter_for_sandbox},
    request_limiter::{ByteTracker, RequestPermit},
    upstream::Upstream,
    websocket_relay::WebSocketRelay,
};

/// What a request holds until its response is complete.
pub(crate) struct ForwardContext {
    pub permit: RequestPermit,
    pub cache_return: Option<CacheReturn>,
}

/// Forwards an ordinary request. If a cached connection had just closed and nothing was sent, the error returns the request so that it
/// can be sent over a new connection.
pub(crate) async fn forward(mut upstream: Upstream, request: Request<Body>, context: ForwardContext) -> Result<Response, ForwardError> {
    let response = match upstream.sender.try_send_request(request).await {
        Ok(response) => response,
        Err(mut failed) => {
            return Err(match failed.take_message() {
                Some(request) => ForwardError::NotSent(Box::new((request, context))),
                None => ForwardError::ConnectionFailure(classify(failed.into_error())),
            });
        }
    };
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Err(ForwardError::ConnectionFailure(ConnectionFailure::Protocol));
    }
    let (parts, body) = response.into_parts();
    let body = Body::new(ResponseBody::new(body, context.permit, upstream, context.cache_return));
    Ok(build_response(parts.status, filter_for_caller(parts.headers, false), body))
}

/// Forwards a WebSocket handshake over a new connection.
pub(crate) async fn upgrade(
    mut upstream: Upstream,
    request: Request<Body>,
    client_side: OnUpgrade,
    relay: WebSocketRelay,
) -> Result<Response, ConnectionFailure> {
    let mut response = upstream.sender.send_request(request).await.map_err(classify)?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        let (parts, body) = response.into_parts();
        let body = Body::new(ResponseBody::new(body, relay.permit, upstream, None));
        return Ok(build_response(parts.status, filter_for_caller(parts.headers, false), body));
    }
    let boxd_side = hyper::upgrade::on(&mut response);
    tokio::spawn(async move {
        let _open_until_both_ends_are_done = upstream;
        match tokio::try_join!(client_side, boxd_side) {
            Ok((client, boxd)) => relay.run(TokioIo::new(client), TokioIo::new(boxd)).await,
            Err(error) => tracing::debug!(%error, "a WebSocket upgrade did not complete"),
        }
    });
    let (parts, _) = response.into_parts();
    Ok(build_response(parts.status, filter_for_caller(parts.headers, true), Body::empty()))
}

/// Builds the request that is sent to boxd.
pub(crate) fn build_request(
    parts: http::request::Parts,
    body: Body,
    admission: &Admission,
    request_id: &RequestId,
    permit: &RequestPermit,
    is_websocket: bool,
) -> Request<Body> {
    let body = match is_websocket {
        true => Body::empty(),
        false if body.is_end_stream() => body,
        false => Body::new(MeteredBody { body, byte_tracker: permit.byte_tracker(), _permit: None }),
    };
    let mut upstream = Request::new(body);
    *upstream.method_mut() = parts.method;
    *upstream.uri_mut() = parts.uri;
    *upstream.headers_mut() = filter_for_sandbox(parts.headers, admission.token.as_ref(), request_id, is_websocket);
    upstream
}

/// Why there is no response.
pub(crate) enum ForwardError {
    NotSent(Box<(Request<Body>, ForwardContext)>),
    ConnectionFailure(ConnectionFailure),
}

fn build_response(status: StatusCode, headers: http::HeaderMap, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// The side that failed before there was a response.
#[derive(Debug)]
pub(crate) enum ConnectionFailure {
    /// The caller stopped sending its request body.
    Caller(hyper::Error),
    Boxd(hyper::Error),
    /// boxd switched to another protocol without being asked to.
    Protocol,
}

fn classify(error: hyper::Error) -> ConnectionFailure {
    // hyper reports a failing request body as a user error, and only the body comes from the caller during the request.
    if error.is_user() { ConnectionFailure::Caller(error) } else { ConnectionFailure::Boxd(error) }
}

/// A response's body that holds its permit and connection until the caller has received it or disconnected.
struct ResponseBody {
    body: hyper::body::Incoming,
    byte_tracker: ByteTracker,
    _permit: RequestPermit,
    upstream: Option<Upstream>,
    cache_return: Option<CacheReturn>,
    is_complete: bool,
}

impl ResponseBody {
    fn new(body: hyper::body::Incoming, permit: RequestPermit, upstream: Upstream, cache_return: Option<CacheReturn>) -> Self {
        Self { body, byte_tracker: permit.byte_tracker(), _permit: permit, upstream: Some(upstream), cache_return, is_complete: false }
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        self.is_complete |= matches!(polled, Poll::Ready(None));
        meter_frame(polled, &self.byte_tracker)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Makes an adapter's response hold its permit until it was sent.
pub(crate) fn hold_permit(body: Body, permit: RequestPermit) -> Body {
    Body::new(MeteredBody { body, byte_tracker: permit.byte_tracker(), _permit: Some(permit) })
}

/// A request's body or an adapter's response body, whose bytes in flight are counted.
struct MeteredBody {
    body: Body,
    byte_tracker: ByteTracker,
    _permit: Option<RequestPermit>,
}

impl HttpBody for MeteredBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        meter_frame(Pin::new(&mut self.body).poll_frame(cx), &self.byte_tracker)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn meter_frame<E>(polled: Poll<Option<Result<Frame<Bytes>, E>>>, byte_tracker: &ByteTracker) -> Poll<Option<Result<Frame<Bytes>, E>>> {
    polled.map(|frame| frame.map(|frame| frame.map(|frame| frame.map_data(|bytes| byte_tracker.track(bytes)))))
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        // hyper may not poll a body again whose end it already knows.
        if (self.is_complete || self.body.is_end_stream())
            && let (Some(upstream), Some(cache_return)) = (self.upstream.take(), self.cache_return.take())
        {
            cache_return.put(upstream);
        }
    }
}
