//! Carries one request to boxd over a connection of its own, and the answer back, without holding either in memory.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes, HttpBody},
    response::Response,
};
use cobox_protocol::RequestId;
use cobox_provider::BoxedStream;
use http::{Request, StatusCode};
use hyper::{
    body::{Frame, SizeHint},
    upgrade::OnUpgrade,
};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    task::AbortHandle,
};

use crate::{
    Admission,
    headers::{to_caller, to_sandbox},
    slots::Slot,
};

/// Bounds the head of an answer and what is read ahead of its body; large enough to stream files at full speed.
const UPSTREAM_BUFFER_BYTES: usize = 256 * 1024;
/// How long one direction of an upgraded connection may go on after the other has ended: enough to say goodbye.
const LINGER: Duration = Duration::from_secs(5);

pub(crate) async fn forward(
    stream: BoxedStream,
    mut request: Request<Body>,
    admission: &Admission,
    request_id: &RequestId,
    is_websocket: bool,
    slot: Slot,
) -> Result<Response, Broken> {
    let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
        .max_buf_size(UPSTREAM_BUFFER_BYTES)
        .handshake::<_, Body>(TokioIo::new(stream))
        .await
        .map_err(Broken::Boxd)?;
    let connection = EndOnDrop(
        tokio::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "a connection to boxd ended");
            }
        })
        .abort_handle(),
    );

    let client_side = is_websocket.then(|| hyper::upgrade::on(&mut request));
    let (parts, body) = request.into_parts();
    let body = if is_websocket { Body::empty() } else { body };
    let mut upstream = Request::new(body);
    *upstream.method_mut() = parts.method;
    *upstream.uri_mut() = parts.uri;
    *upstream.headers_mut() = to_sandbox(parts.headers, admission.token.as_ref(), request_id, is_websocket);
    let mut answer = sender.send_request(upstream).await.map_err(broken)?;

    let is_switched = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
    let response = match (is_switched, client_side) {
        (true, Some(client_side)) => {
            let boxd_side = hyper::upgrade::on(&mut answer);
            tokio::spawn(async move {
                let _held_until_both_ends_are_done = (slot, connection);
                splice(client_side, boxd_side).await;
            });
            let (parts, _) = answer.into_parts();
            assemble(parts.status, to_caller(parts.headers, true), Body::empty())
        }
        (true, None) => return Err(Broken::Protocol),
        (false, _) => {
            let (parts, body) = answer.into_parts();
            let body = Body::new(Streaming { body, _slot: slot, _connection: connection });
            assemble(parts.status, to_caller(parts.headers, false), body)
        }
    };
    Ok(response)
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

/// Copies both ways until both ends are done, or one is and the other doesn't follow.
async fn splice(client_side: OnUpgrade, boxd_side: OnUpgrade) {
    let (client, boxd) = match tokio::try_join!(client_side, boxd_side) {
        Ok((client, boxd)) => (TokioIo::new(client), TokioIo::new(boxd)),
        Err(error) => {
            tracing::debug!(%error, "an upgrade did not complete");
            return;
        }
    };
    let (client_reads, client_writes) = tokio::io::split(client);
    let (boxd_reads, boxd_writes) = tokio::io::split(boxd);
    let mut up = std::pin::pin!(pump(client_reads, boxd_writes));
    let mut down = std::pin::pin!(pump(boxd_reads, client_writes));
    // An end that doesn't follow within the linger time is dropped with its connection: nobody is left to tell.
    tokio::select! {
        () = &mut up => drop(tokio::time::timeout(LINGER, down).await),
        () = &mut down => drop(tokio::time::timeout(LINGER, up).await),
    }
}

async fn pump(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
    // A reset is an end like any other here: the other side learns of it by its own connection closing.
    let _ = tokio::io::copy(&mut from, &mut to).await;
    let _ = to.shutdown().await;
    // What still comes is read and dropped: closing over unread bytes would reset the connection, and lose what we said last.
    let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
}

struct EndOnDrop(AbortHandle);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An answer's body that holds its slot and its connection until the caller has it all or goes away.
struct Streaming {
    body: hyper::body::Incoming,
    _slot: Slot,
    _connection: EndOnDrop,
}

impl HttpBody for Streaming {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
