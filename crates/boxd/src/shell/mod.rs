//! `WS /v1/shell/ws`: a terminal in the sandbox, from the upgrade over the first frames to the close code. It lives as long as its connection.

mod frames;
mod session;
mod terminal;

use std::{sync::Arc, time::Duration};

use axum::{
    Extension,
    extract::{
        State, WebSocketUpgrade,
        ws::{WebSocket, rejection::WebSocketUpgradeRejection},
    },
    response::Response,
};
use cobox_protocol::{
    ApiError, Capability, ErrorCode,
    frame::{ClientFrame, MAX_FRAME_BYTES, ServerFrame, close},
};
use cobox_token::Claims;
use futures_util::StreamExt;
use http::{HeaderMap, header};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use self::frames::{End, Received, encode, goodbye, receive};
use crate::{
    answer::{Failure, RequestRecord},
    server::Server,
};

/// Terminals at once in one sandbox: people and agents together rarely have more than a handful.
const MAX_SHELLS: usize = 64;
/// Connections that have not shown their token yet; apart from the shells, so that strangers can't take their places.
const MAX_HANDSHAKES: usize = 64;
/// How long a connection without a header may take over its `auth` frame.
const AUTH_WITHIN: Duration = Duration::from_secs(5);

pub struct Limits {
    handshakes: Arc<Semaphore>,
    shells: Arc<Semaphore>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { handshakes: Arc::new(Semaphore::new(MAX_HANDSHAKES)), shells: Arc::new(Semaphore::new(MAX_SHELLS)) }
    }
}

fn slot(of: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, ApiError> {
    let full = |_| ApiError::new(ErrorCode::RateLimited, format!("{MAX_SHELLS} shells are already open here; close one and try again"));
    of.clone().try_acquire_owned().map_err(full)
}

pub async fn open(
    State(server): State<Arc<Server>>,
    Extension(record): Extension<Arc<RequestRecord>>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Failure> {
    record.needs(Capability::Shell);
    // A token in the header is checked before the upgrade, where a refusal still is an ordinary answer.
    let claims = match headers.contains_key(header::AUTHORIZATION) {
        true => Some(Arc::new(server.authority.authorize(&headers, Capability::Shell)?)),
        false => None,
    };
    if let Some(claims) = &claims {
        record.came_from(claims.clone());
    }
    let upgrade = upgrade.map_err(|e| ApiError::invalid(format!("this route is a WebSocket: {e}")))?;
    let handshake = slot(&server.shells.handshakes)?;
    let tasks = server.tasks.clone();
    let talk = move |socket| tasks.track_future(talk(server, socket, claims, record, handshake));
    Ok(upgrade.max_message_size(MAX_FRAME_BYTES).max_frame_size(MAX_FRAME_BYTES).on_upgrade(talk))
}

async fn talk(
    server: Arc<Server>,
    socket: WebSocket,
    claims: Option<Arc<Claims>>,
    record: Arc<RequestRecord>,
    handshake: OwnedSemaphorePermit,
) {
    let (mut sink, mut stream) = socket.split();
    let admitted = match claims {
        Some(claims) => Ok(claims),
        None => {
            let hello = tokio::time::timeout(AUTH_WITHIN, authenticate(&server, &mut sink, &mut stream));
            tokio::select! {
                hello = hello => hello.unwrap_or_else(|_| Err(auth_timeout())),
                () = server.shutdown.cancelled() => Err(End::plain(close::GOING_AWAY)),
            }
        }
    };
    drop(handshake);
    let (end, open) = match admitted.and_then(|claims| Ok((claims, slot(&server.shells.shells)?))) {
        Ok((claims, _slot)) => {
            let open = server.authority.open(claims.clone());
            (session::run(&server, &mut sink, &mut stream, &open, claims, &record.request_id).await, Some(open))
        }
        Err(end) => (end, None),
    };
    tracing::info!(request_id = %record.request_id, code = end.code, reason = end.error.as_ref().map(|e| e.code.as_str()), "shell connection ended");
    goodbye(&mut sink, &mut stream, end, open, &record.request_id).await;
}

async fn authenticate(server: &Server, sink: &mut frames::Sink, stream: &mut frames::Stream) -> Result<Arc<Claims>, End> {
    let token = loop {
        match receive(stream.next().await)? {
            Received::Frame(ClientFrame::Auth { token }) => break token,
            Received::Frame(_) => {
                return Err(ApiError::new(ErrorCode::Unauthenticated, "the first frame must be `auth` with a token").into());
            }
            Received::Nothing => {}
        }
    };
    let claims = server.authority.authorize_token(token.expose(), Capability::Shell)?;
    frames::send(sink, encode(&auth_ok(&claims))).await?;
    Ok(Arc::new(claims))
}

fn auth_timeout() -> End {
    let message = format!("no `auth` frame with a token came within {} s", AUTH_WITHIN.as_secs());
    End { code: close::AUTH_TIMEOUT, error: Some(ApiError::new(ErrorCode::Unauthenticated, message)) }
}

fn auth_ok(claims: &Claims) -> ServerFrame {
    ServerFrame::AuthOk { session_id: claims.sid.clone(), capabilities: claims.scope }
}
