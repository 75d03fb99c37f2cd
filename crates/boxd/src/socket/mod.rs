//! A client's WebSocket, whatever it is for: the upgrade, the token in the header or the first frame, and the close code at the end.

pub(crate) mod frames;
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
    frame::{ClientFrame, MAX_FRAME_BYTES, ServerFrame, close},
};
use cobox_token::Claims;
use futures_util::StreamExt;
use http::{HeaderMap, header};
use serde::de::IgnoredAny;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub use self::{
    frames::{Dialect, End, Received, encode},
    peer::{Out, Peer},
};
use self::{
    frames::{Sink, Stream, goodbye, receive, send},
    peer::converse,
};
use crate::{
    answer::{Failure, RequestRecord},
    server::Server,
};

/// Connections that have not shown their token yet; apart from the others, so that strangers can't take their places.
const MAX_HANDSHAKES: usize = 64;
/// Read at once from a client: keys and small frames as a rule, and there are hundreds of connections.
const READ_BYTES: usize = 16 * 1024;
/// How long a connection without a header may take over its `auth` frame.
const AUTH_WITHIN: Duration = Duration::from_secs(5);

/// Places for streams, of every kind together.
pub struct Slots {
    handshakes: Arc<Semaphore>,
    streams: Arc<Semaphore>,
    limit: u32,
}

impl Slots {
    pub fn new(limit: u32) -> Self {
        Self { handshakes: Arc::new(Semaphore::new(MAX_HANDSHAKES)), streams: Arc::new(Semaphore::new(limit as usize)), limit }
    }

    /// A place for something that stays open.
    pub fn stream(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.streams.clone().try_acquire_owned().map_err(|_| {
            let message = format!("{} streams are already open in this sandbox; close one and try again", self.limit);
            ApiError::new(ErrorCode::RateLimited, message)
        })
    }

    fn handshake(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.handshakes.clone().try_acquire_owned().map_err(|_| {
            let message =
                format!("{MAX_HANDSHAKES} connections are waiting for their `auth` frame; try again, or send the token as a header");
            ApiError::new(ErrorCode::RateLimited, message)
        })
    }
}

/// What a route does with an admitted connection.
pub trait Conversation: Send + 'static {
    /// What its clients send.
    type Frame: Dialect;
    /// What a token must have to be let in at all.
    const NEEDS: Capability;

    /// Runs until the conversation is over; dropped where the token, the client or boxd ends first.
    fn hold(self, peer: &mut Peer<'_, Self::Frame>) -> impl Future<Output = Result<(), End>> + Send;
}

/// Upgrades the request and holds the conversation.
pub async fn open<C: Conversation>(
    server: Arc<Server>,
    record: Arc<RequestRecord>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
    conversation: C,
) -> Result<Response, Failure> {
    record.needs(C::NEEDS);
    // A token in the header is checked before the upgrade, where a refusal still is an ordinary answer.
    let claims = match headers.contains_key(header::AUTHORIZATION) {
        true => Some(Arc::new(server.authority.authorize(&headers, C::NEEDS)?)),
        false => None,
    };
    let (mut handshake, mut slot) = (None, None);
    match &claims {
        Some(claims) => {
            record.came_from(claims.clone());
            slot = Some(server.slots.stream()?);
        }
        None => handshake = Some(server.slots.handshake()?),
    }
    let upgrade = upgrade.map_err(|e| ApiError::invalid(format!("this route is a WebSocket: {e}")))?;
    let tasks = server.tasks.clone();
    let talk = move |socket| tasks.track_future(talk(server, socket, claims, record, (handshake, slot), conversation));
    let upgrade = upgrade.read_buffer_size(READ_BYTES).max_message_size(MAX_FRAME_BYTES).max_frame_size(MAX_FRAME_BYTES);
    Ok(upgrade.on_upgrade(talk))
}

async fn talk<C: Conversation>(
    server: Arc<Server>,
    socket: WebSocket,
    claims: Option<Arc<Claims>>,
    record: Arc<RequestRecord>,
    (handshake, slot): (Option<OwnedSemaphorePermit>, Option<OwnedSemaphorePermit>),
    conversation: C,
) {
    let (mut sink, mut stream) = socket.split();
    let admitted = match claims {
        Some(claims) => Ok(claims),
        None => {
            let hello = tokio::time::timeout(AUTH_WITHIN, authenticate(&server, &mut sink, &mut stream, C::NEEDS));
            tokio::select! {
                hello = hello => hello.unwrap_or_else(|_| Err(auth_timeout())),
                () = server.shutdown.cancelled() => Err(End::plain(close::GOING_AWAY)),
            }
        }
    };
    drop(handshake);
    let admitted = admitted.and_then(|claims| {
        record.came_from(claims.clone());
        let slot = slot.map_or_else(|| server.slots.stream(), Ok)?;
        Ok((claims, slot))
    });
    let (end, open) = match admitted {
        Ok((claims, _slot)) => {
            let open = server.authority.open(claims.clone());
            (converse(&server, &mut sink, &mut stream, &open, claims, &record, conversation).await, Some(open))
        }
        Err(end) => (end, None),
    };
    // Unless the conversation told what it is about, when it knew.
    record.tell(&server.audit, end.code, end.error.as_ref().map(|e| e.code));
    goodbye::<C::Frame>(&mut sink, &mut stream, end, open, &record.request_id).await;
}

async fn authenticate(server: &Server, sink: &mut Sink, stream: &mut Stream, needs: Capability) -> Result<Arc<Claims>, End> {
    let token = loop {
        match receive::<ClientFrame<IgnoredAny>>(stream.next().await)? {
            Received::Auth(token) => break token,
            Received::Nothing => {}
            _ => {
                return Err(ApiError::new(ErrorCode::Unauthenticated, "the first frame must be `auth` with a token").into());
            }
        }
    };
    let claims = server.authority.authorize_token(token.expose(), needs)?;
    send(sink, encode(&auth_ok(&claims))).await?;
    Ok(Arc::new(claims))
}

fn auth_timeout() -> End {
    let message = format!("no `auth` frame with a token came within {} s", AUTH_WITHIN.as_secs());
    End { code: close::AUTH_TIMEOUT, error: Some(ApiError::new(ErrorCode::Unauthenticated, message)) }
}

fn auth_ok(claims: &Claims) -> ServerFrame<()> {
    ServerFrame::AuthOk { session_id: claims.sid.clone(), capabilities: claims.scope }
}
