//! One authenticated connection: incoming frames, outgoing frames and the token's lifetime run independently, so that
//! none blocks another.

use std::{marker::PhantomData, pin::pin, sync::Arc, time::Duration};

use axum::extract::ws::Message;
use cobox_protocol::{
    ApiError, ErrorCode, RequestId,
    frame::{ServerFrame, close},
};
use cobox_token::Claims;
use futures_util::{SinkExt, StreamExt};
use serde::Serialize;
use tokio::sync::{mpsc, watch};

use super::{
    SocketHandler, auth_ok,
    frames::{CloseReason, FrameProtocol, ReceivedFrame, SocketSink, SocketStream, encode, receive},
};
use crate::{auth::OpenStream, request_layer::RequestRecord, server::Server};

/// Frames queued for a slow socket; beyond it the conversation waits.
const MAX_QUEUED_FRAMES: usize = 4;
/// Time for the last output and the exit code to reach a slow client.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// The client's side of a conversation.
pub struct Peer<'a, D> {
    pub server: &'a Arc<Server>,
    pub record: &'a RequestRecord,
    pub out: FrameSender,
    stream: &'a mut SocketStream,
    /// An answer that is still waiting for a slot in the outgoing queue.
    answer: Option<Message>,
    token: &'a watch::Sender<Arc<Claims>>,
    open: &'a OpenStream,
    needs: cobox_protocol::Capability,
    dialect: PhantomData<fn() -> D>,
}

/// Sender for outgoing frames; every part of a conversation can hold a clone.
#[derive(Clone)]
pub struct FrameSender {
    frames: mpsc::Sender<Message>,
    request_id: RequestId,
    error: fn(&ApiError, &RequestId) -> Message,
}

/// See [`FrameSender::permit`].
pub type Permit = mpsc::OwnedPermit<Message>;

impl FrameSender {
    pub async fn send<R: Serialize>(&self, frame: &ServerFrame<R>) -> Result<(), CloseReason> {
        self.message(encode(frame)).await
    }

    pub async fn message(&self, message: Message) -> Result<(), CloseReason> {
        self.frames.send(message).await.map_err(|_| CloseReason::normal())
    }

    /// Reserves a slot for one frame, for callers that must have a slot before they create the frame. Cancel safe.
    pub async fn permit(&self) -> Result<Permit, CloseReason> {
        self.frames.clone().reserve_owned().await.map_err(|_| CloseReason::normal())
    }

    /// Sends a frame with the permit, if there is one.
    pub fn send_with(&self, permit: &mut Option<Permit>, message: Message) {
        if let Some(permit) = permit.take() {
            permit.send(message);
        }
    }

    /// The message that [`FrameSender::send_error`] sends.
    pub fn error_message(&self, error: &ApiError) -> Message {
        (self.error)(error, &self.request_id)
    }

    /// Reports an invalid frame or request; the conversation continues.
    pub async fn send_error(&self, error: &ApiError) -> Result<(), CloseReason> {
        self.message(self.error_message(error)).await
    }
}

impl<D: FrameProtocol> Peer<'_, D> {
    /// The next frame for the conversation; answers pings and accepts fresh tokens by itself. Cancel safe: the next
    /// call sends an answer that has no slot yet.
    pub async fn next(&mut self) -> Result<D, CloseReason> {
        loop {
            if self.answer.is_some() {
                let mut permit = Some(self.out.permit().await?);
                if let Some(answer) = self.answer.take() {
                    self.out.send_with(&mut permit, answer);
                }
            }
            match receive(self.stream.next().await)? {
                ReceivedFrame::Auth(token) => self.answer = Some(self.renew(token.expose())),
                ReceivedFrame::Ping(id) => self.answer = Some(encode(&ServerFrame::<()>::Pong { id })),
                ReceivedFrame::Close => return Err(CloseReason::normal()),
                ReceivedFrame::Frame(frame) => return Ok(frame),
                ReceivedFrame::KeepAlive => {}
            }
        }
    }

    /// The claims of the newest token.
    pub fn claims(&self) -> Arc<Claims> {
        self.token.borrow().clone()
    }

    /// Replaces the token by a fresh one of the same principal and session. Any other token changes nothing, and the
    /// old token's expiry stays in force.
    fn renew(&self, token: &str) -> Message {
        let current = self.claims();
        let renewed = self.server.authority.authorize_token(token, self.needs).and_then(|fresh| {
            let is_same = fresh.sub == current.sub && fresh.sid == current.sid;
            is_same.then_some(fresh).ok_or_else(|| {
                ApiError::new(ErrorCode::Forbidden, "the token belongs to another principal or session than this connection")
            })
        });
        match renewed {
            Ok(fresh) => {
                let fresh = Arc::new(fresh);
                self.open.renew(fresh.clone());
                self.token.send_replace(fresh.clone());
                encode(&auth_ok(&fresh))
            }
            Err(error) => self.out.error_message(&error),
        }
    }
}

/// Runs a conversation until it, the client, the token or boxd ends.
pub async fn run_handler<C: SocketHandler>(
    server: &Arc<Server>,
    sink: &mut SocketSink,
    stream: &mut SocketStream,
    open: &OpenStream,
    claims: Arc<Claims>,
    record: &RequestRecord,
    handler: C,
) -> CloseReason {
    let (frames, mut queue) = mpsc::channel::<Message>(MAX_QUEUED_FRAMES);
    let token = watch::Sender::new(claims);
    let out = FrameSender { frames, request_id: record.request_id.clone(), error: C::Frame::error };
    let mut writer = pin!(async {
        while let Some(frame) = queue.recv().await {
            if sink.feed(frame).await.is_err() {
                return;
            }
            // Flushed when the queue is empty: one write for many small frames.
            while let Ok(frame) = queue.try_recv() {
                if sink.feed(frame).await.is_err() {
                    return;
                }
            }
            if sink.flush().await.is_err() {
                return;
            }
        }
    });
    let handling = async {
        let mut peer =
            Peer { server, record, out, stream, answer: None, token: &token, open, needs: C::REQUIRED_CAPABILITY, dialect: PhantomData };
        // At the end of this block the last sender is dropped, so the writer sees the end of its queue.
        handler.handle(&mut peer).await.err().unwrap_or_else(CloseReason::normal)
    };
    let end = tokio::select! {
        // Biased: a message that was just queued is written in the same poll, and not after all other tasks that the
        // same output woke.
        biased;
        end = handling => end,
        () = &mut writer => return CloseReason::normal(),
        end = wait_for_end(server, &token, open) => return end,
    };
    if end.code == CloseReason::normal().code {
        // A client too slow for this gets the close code without the last output.
        let _ = tokio::time::timeout(FLUSH_TIMEOUT, writer).await;
    }
    end
}

/// Resolves when the token expires or is revoked, or boxd shuts down.
async fn wait_for_end(server: &Server, token: &watch::Sender<Arc<Claims>>, open: &OpenStream) -> CloseReason {
    let mut token = token.subscribe();
    loop {
        let claims = token.borrow_and_update().clone();
        tokio::select! {
            reason = server.authority.wait_until_expired(&claims) => return reason.into(),
            _ = token.changed() => {}
            reason = open.revoked() => return reason.into(),
            () = server.shutdown.cancelled() => return CloseReason::with_code(close::GOING_AWAY),
        }
    }
}
