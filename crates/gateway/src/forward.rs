//! Carries one request to boxd and the answer back, without holding either in memory.

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
    headers::{to_caller, to_sandbox},
    slots::{Flight, Slot},
    socket::Socket,
    upstream::{KeepFor, Upstream},
};

/// What a request holds on its way, and what becomes of its connection afterwards.
pub(crate) struct Way {
    pub slot: Slot,
    pub keep: Option<KeepFor>,
}

/// An ordinary request. One that boxd never saw, because a kept connection had just ended, comes back to be sent over a fresh one.
pub(crate) async fn forward(mut upstream: Upstream, request: Request<Body>, way: Way) -> Result<Response, Unanswered> {
    let answer = match upstream.sender.try_send_request(request).await {
        Ok(answer) => answer,
        Err(mut failed) => {
            return Err(match failed.take_message() {
                Some(request) => Unanswered::Unsent(Box::new((request, way))),
                None => Unanswered::Broken(broken(failed.into_error())),
            });
        }
    };
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        return Err(Unanswered::Broken(Broken::Protocol));
    }
    let (parts, body) = answer.into_parts();
    let body = Body::new(Streaming::new(body, way.slot, upstream, way.keep));
    Ok(assemble(parts.status, to_caller(parts.headers, false), body))
}

/// A request to become a WebSocket, over a connection of its own.
pub(crate) async fn upgrade(
    mut upstream: Upstream,
    request: Request<Body>,
    client_side: OnUpgrade,
    socket: Socket,
) -> Result<Response, Broken> {
    let mut answer = upstream.sender.send_request(request).await.map_err(broken)?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        let (parts, body) = answer.into_parts();
        let body = Body::new(Streaming::new(body, socket.slot, upstream, None));
        return Ok(assemble(parts.status, to_caller(parts.headers, false), body));
    }
    let boxd_side = hyper::upgrade::on(&mut answer);
    tokio::spawn(async move {
        let _held_until_both_ends_are_done = upstream;
        match tokio::try_join!(client_side, boxd_side) {
            Ok((client, boxd)) => socket.carry(TokioIo::new(client), TokioIo::new(boxd)).await,
            Err(error) => tracing::debug!(%error, "an upgrade did not complete"),
        }
    });
    let (parts, _) = answer.into_parts();
    Ok(assemble(parts.status, to_caller(parts.headers, true), Body::empty()))
}

/// The request as boxd gets it.
pub(crate) fn rewrite(
    parts: http::request::Parts,
    body: Body,
    admission: &Admission,
    request_id: &RequestId,
    slot: &Slot,
    is_websocket: bool,
) -> Request<Body> {
    let body = match is_websocket {
        true => Body::empty(),
        false if body.is_end_stream() => body,
        false => Body::new(Carried { body, flight: slot.flight(), _slot: None }),
    };
    let mut upstream = Request::new(body);
    *upstream.method_mut() = parts.method;
    *upstream.uri_mut() = parts.uri;
    *upstream.headers_mut() = to_sandbox(parts.headers, admission.token.as_ref(), request_id, is_websocket);
    upstream
}

/// Why there is no answer.
pub(crate) enum Unanswered {
    Unsent(Box<(Request<Body>, Way)>),
    Broken(Broken),
}

fn assemble(status: StatusCode, headers: http::HeaderMap, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// Which end of a request went away before there was an answer.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The caller stopped sending.
    Caller(hyper::Error),
    Boxd(hyper::Error),
    /// boxd switched to another protocol unasked.
    Protocol,
}

fn broken(error: hyper::Error) -> Broken {
    // The request's body is the one part of it that comes from the caller while it is sent.
    if error.is_user() { Broken::Caller(error) } else { Broken::Boxd(error) }
}

/// An answer's body that holds its slot and its connection until the caller has it all or goes away.
struct Streaming {
    body: hyper::body::Incoming,
    flight: Flight,
    _slot: Slot,
    upstream: Option<Upstream>,
    keep: Option<KeepFor>,
    is_complete: bool,
}

impl Streaming {
    fn new(body: hyper::body::Incoming, slot: Slot, upstream: Upstream, keep: Option<KeepFor>) -> Self {
        Self { body, flight: slot.flight(), _slot: slot, upstream: Some(upstream), keep, is_complete: false }
    }
}

impl HttpBody for Streaming {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        self.is_complete |= matches!(polled, Poll::Ready(None));
        carried(polled, &self.flight)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer that isn't boxd's, and holds its slot all the same.
pub(crate) fn holding(body: Body, slot: Slot) -> Body {
    Body::new(Carried { body, flight: slot.flight(), _slot: Some(slot) })
}

/// A request's body on its way to boxd, or an answer's of an adapter.
struct Carried {
    body: Body,
    flight: Flight,
    _slot: Option<Slot>,
}

impl HttpBody for Carried {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        carried(Pin::new(&mut self.body).poll_frame(cx), &self.flight)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn carried<E>(polled: Poll<Option<Result<Frame<Bytes>, E>>>, flight: &Flight) -> Poll<Option<Result<Frame<Bytes>, E>>> {
    polled.map(|frame| frame.map(|frame| frame.map(|frame| frame.map_data(|bytes| flight.carry(bytes)))))
}

impl Drop for Streaming {
    fn drop(&mut self) {
        // A body that is known to be over may never be asked for its end.
        if (self.is_complete || self.body.is_end_stream())
            && let (Some(upstream), Some(keep)) = (self.upstream.take(), self.keep.take())
        {
            keep.keep(upstream);
        }
    }
}
