//! A client's WebSocket for any purpose: the upgrade, authentication by header or first frame, and the close code at
//! the end.

pub(crate) mod frames;
mod handshakes;
mod peer;

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{
        WebSocketUpgrade,
        ws::{WebSocket, rejection::WebSocketUpgradeRejection},
    },
    response::Response,
};
use cobox_protocol::{
    ApiError, Capability, ErrorCode,
    control::DataplaneLimits,
    frame::{ClientFrame, MAX_FRAME_BYTES, ServerFrame, close},
};
use cobox_token::Claims;
use futures_util::StreamExt;
use http::{HeaderMap, header};
use serde::de::IgnoredAny;

pub use self::{
    frames::{CloseReason, FrameProtocol, ReceivedFrame, encode},
    peer::{FrameSender, Peer},
};
use self::{
    frames::{SocketSink, SocketStream, close_connection, receive, send},
    handshakes::{Handshake, Handshakes},
    peer::run_handler,
};
use crate::{
    principal_slots::{PrincipalSlot, PrincipalSlots, SlotKind},
    request_layer::{ErrorResponse, RequestRecord},
    server::Server,
};

/// Maximum number of connections that have not sent their token yet; counted separately, so that unauthenticated
/// clients can't exhaust the slots of the others. Higher than the gateway's limit, so that the gateway, which knows the
/// clients' addresses, decides which connection is closed.
const MAX_HANDSHAKES: usize = 192;
/// Divisor of the connection limit: handshakes may use at most this fraction of it, where that is less.
const HANDSHAKES_SHARE: usize = 4;
/// Read buffer per client: messages are usually keystrokes and small frames, and there are hundreds of connections.
const READ_BYTES: usize = 16 * 1024;
/// Time for a connection without an `Authorization` header to send its `auth` frame.
const AUTH_TIMEOUT: Duration = Duration::from_secs(5);

/// Slots for streams of every kind together.
pub struct StreamSlots {
    handshakes: Arc<Handshakes>,
    streams: Arc<PrincipalSlots>,
}

impl StreamSlots {
    pub fn new(limits: &DataplaneLimits) -> Self {
        let handshakes = MAX_HANDSHAKES.min(limits.connections as usize / HANDSHAKES_SHARE);
        let streams = PrincipalSlots::new(SlotKind::Streams, limits.streams, limits.streams_per_principal);
        Self { handshakes: Handshakes::new(handshakes), streams }
    }

    /// Reserves a slot for a long-lived stream.
    pub fn stream(&self, claims: &Claims) -> Result<PrincipalSlot, ApiError> {
        self.streams.take(&claims.sub)
    }
}

/// The limit a connection is counted against.
enum Admission {
    Admitted(Arc<Claims>, PrincipalSlot),
    Handshake(Handshake),
}

/// What a route does with an authenticated connection.
pub trait SocketHandler: Send + 'static {
    /// The frames its clients send.
    type Frame: FrameProtocol;
    /// The capability that a token needs to open it.
    const REQUIRED_CAPABILITY: Capability;

    /// Runs until the conversation is over; dropped if the token, the client or boxd ends first.
    fn handle(self, peer: &mut Peer<'_, Self::Frame>) -> impl Future<Output = Result<(), CloseReason>> + Send;
}

/// Upgrades the request and runs the conversation.
pub async fn open<C: SocketHandler>(
    server: Arc<Server>,
    record: Arc<RequestRecord>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
    handler: C,
) -> Result<Response, ErrorResponse> {
    record.set_capability(C::REQUIRED_CAPABILITY);
    // A token in the header is checked before the upgrade, while a refusal can still be an ordinary HTTP response.
    let admission = match headers.contains_key(header::AUTHORIZATION) {
        true => {
            let claims = Arc::new(server.authority.authorize(&headers, C::REQUIRED_CAPABILITY)?);
            record.set_claims(claims.clone());
            let slot = server.slots.stream(&claims)?;
            Admission::Admitted(claims, slot)
        }
        false => Admission::Handshake(server.slots.handshakes.begin()),
    };
    let upgrade = upgrade.map_err(|e| ApiError::invalid(format!("this route is a WebSocket: {e}")))?;
    let tasks = server.tasks.clone();
    let run = move |socket| tasks.track_future(run_connection(server, socket, record, admission, handler));
    let upgrade = upgrade.read_buffer_size(READ_BYTES).max_message_size(MAX_FRAME_BYTES).max_frame_size(MAX_FRAME_BYTES);
    Ok(upgrade.on_upgrade(run))
}

async fn run_connection<C: SocketHandler>(
    server: Arc<Server>,
    socket: WebSocket,
    record: Arc<RequestRecord>,
    admission: Admission,
    handler: C,
) {
    let (mut sink, mut stream) = socket.split();
    let admitted = match admission {
        Admission::Admitted(claims, slot) => Ok((claims, slot)),
        Admission::Handshake(handshake) => {
            let authentication = tokio::time::timeout(AUTH_TIMEOUT, authenticate(&server, &mut sink, &mut stream, C::REQUIRED_CAPABILITY));
            let claims = tokio::select! {
                // Biased: a client that has just authenticated is not closed in favour of a newer connection.
                biased;
                authentication = authentication => authentication.unwrap_or_else(|_| Err(auth_timeout())),
                () = handshake.must_close() => Err(displaced_handshake().into()),
                () = server.shutdown.cancelled() => Err(CloseReason::with_code(close::GOING_AWAY)),
            };
            claims.and_then(|claims| {
                record.set_claims(claims.clone());
                let slot = server.slots.stream(&claims)?;
                Ok((claims, slot))
            })
        }
    };
    let (end, stream_guard) = match admitted {
        Ok((claims, _slot)) => {
            let stream_guard = server.authority.open_stream(claims.clone());
            (run_handler(&server, &mut sink, &mut stream, &stream_guard, claims, &record, handler).await, Some(stream_guard))
        }
        Err(end) => (end, None),
    };
    // Has no effect if the conversation already recorded the request, when its subject was known.
    record.record_once(&server.sandbox_claims, end.code, end.error.as_ref().map(|e| e.code));
    close_connection::<C::Frame>(&mut sink, &mut stream, end, stream_guard, &record.request_id).await;
}

async fn authenticate(
    server: &Server,
    sink: &mut SocketSink,
    stream: &mut SocketStream,
    needs: Capability,
) -> Result<Arc<Claims>, CloseReason> {
    let token = loop {
        match receive::<ClientFrame<IgnoredAny>>(stream.next().await)? {
            ReceivedFrame::Auth(token) => break token,
            ReceivedFrame::KeepAlive => {}
            _ => {
                return Err(ApiError::new(ErrorCode::Unauthenticated, "the first frame must be `auth` with a token").into());
            }
        }
    };
    let claims = server.authority.authorize_token(token.expose(), needs)?;
    send(sink, encode(&auth_ok(&claims))).await?;
    Ok(Arc::new(claims))
}

fn displaced_handshake() -> ApiError {
    let message = "closed because too many connections have not sent their `auth` frame; send the token as a header";
    ApiError::new(ErrorCode::RateLimited, message)
}

fn auth_timeout() -> CloseReason {
    let message = format!("no `auth` frame with a token was received within {} s", AUTH_TIMEOUT.as_secs());
    CloseReason { code: close::AUTH_TIMEOUT, error: Some(ApiError::new(ErrorCode::Unauthenticated, message)) }
}

fn auth_ok(claims: &Claims) -> ServerFrame<()> {
    ServerFrame::AuthOk { session_id: claims.sid.clone(), capabilities: claims.scope }
}
