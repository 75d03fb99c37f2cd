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
    Conversation, auth_ok,
    frames::{Dialect, End, Received, Sink, Stream, encode, receive},
};
use crate::{answer::RequestRecord, auth::OpenStream, server::Server};

/// Frames queued for a slow socket; beyond it the conversation waits.
const OUT_FRAMES: usize = 4;
/// Time for the last output and the exit code to reach a slow client.
const FLUSH_WITHIN: Duration = Duration::from_secs(5);

/// The client's side of a conversation.
pub struct Peer<'a, D> {
    pub server: &'a Arc<Server>,
    pub record: &'a RequestRecord,
    pub out: Out,
    stream: &'a mut Stream,
    /// An answer that is still waiting for a slot in the outgoing queue.
    answer: Option<Message>,
    token: &'a watch::Sender<Arc<Claims>>,
    open: &'a OpenStream,
    needs: cobox_protocol::Capability,
    dialect: PhantomData<fn() -> D>,
}

/// Sender for outgoing frames; every part of a conversation can hold a clone.
#[derive(Clone)]
pub struct Out {
    frames: mpsc::Sender<Message>,
    request_id: RequestId,
    error: fn(&ApiError, &RequestId) -> Message,
}

/// See [`Out::permit`].
pub type Permit = mpsc::OwnedPermit<Message>;

impl Out {
    pub async fn send<R: Serialize>(&self, frame: &ServerFrame<R>) -> Result<(), End> {
        self.message(encode(frame)).await
    }

    pub async fn message(&self, message: Message) -> Result<(), End> {
        self.frames.send(message).await.map_err(|_| End::normal())
    }

    /// Reserves a slot for one frame, for callers that must have a slot before they create the frame. Cancel safe.
    pub async fn permit(&self) -> Result<Permit, End> {
        self.frames.clone().reserve_owned().await.map_err(|_| End::normal())
    }

    /// Sends a frame with the permit, if there is one.
    pub fn send_with(&self, permit: &mut Option<Permit>, message: Message) {
        if let Some(permit) = permit.take() {
            permit.send(message);
        }
    }

    /// The message that [`Out::complain`] sends.
    pub fn complaint(&self, error: &ApiError) -> Message {
        (self.error)(error, &self.request_id)
    }

    /// Reports an invalid frame or request; the conversation continues.
    pub async fn complain(&self, error: &ApiError) -> Result<(), End> {
        self.message(self.complaint(error)).await
    }
}

impl<D: Dialect> Peer<'_, D> {
    /// The next frame for the conversation; answers pings and accepts fresh tokens by itself. Cancel safe: the next
    /// call sends an answer that has no slot yet.
    pub async fn next(&mut self) -> Result<D, End> {
        loop {
            if self.answer.is_some() {
                let mut permit = Some(self.out.permit().await?);
                if let Some(answer) = self.answer.take() {
                    self.out.send_with(&mut permit, answer);
                }
            }
            match receive(self.stream.next().await)? {
                Received::Auth(token) => self.answer = Some(self.renew(token.expose())),
                Received::Ping(id) => self.answer = Some(encode(&ServerFrame::<()>::Pong { id })),
                Received::Close => return Err(End::normal()),
                Received::Frame(frame) => return Ok(frame),
                Received::Nothing => {}
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
        let known = self.claims();
        let renewed = self.server.authority.authorize_token(token, self.needs).and_then(|fresh| {
            let is_same = fresh.sub == known.sub && fresh.sid == known.sid;
            is_same
                .then_some(fresh)
                .ok_or_else(|| ApiError::new(ErrorCode::Forbidden, "the token is of another principal or session than this connection's"))
        });
        match renewed {
            Ok(fresh) => {
                let fresh = Arc::new(fresh);
                self.open.renew(fresh.clone());
                self.token.send_replace(fresh.clone());
                encode(&auth_ok(&fresh))
            }
            Err(error) => self.out.complaint(&error),
        }
    }
}

/// Runs a conversation until it, the client, the token or boxd ends.
pub async fn converse<C: Conversation>(
    server: &Arc<Server>,
    sink: &mut Sink,
    stream: &mut Stream,
    open: &OpenStream,
    claims: Arc<Claims>,
    record: &RequestRecord,
    conversation: C,
) -> End {
    let (frames, mut waiting) = mpsc::channel::<Message>(OUT_FRAMES);
    let token = watch::Sender::new(claims);
    let out = Out { frames, request_id: record.request_id.clone(), error: C::Frame::error };
    let mut writer = pin!(async {
        while let Some(frame) = waiting.recv().await {
            if sink.feed(frame).await.is_err() {
                return;
            }
            // Flushed when the queue is empty: one write for many small frames.
            while let Ok(frame) = waiting.try_recv() {
                if sink.feed(frame).await.is_err() {
                    return;
                }
            }
            if sink.flush().await.is_err() {
                return;
            }
        }
    });
    let talk = async {
        let mut peer = Peer { server, record, out, stream, answer: None, token: &token, open, needs: C::NEEDS, dialect: PhantomData };
        // At the end of this block the last sender is dropped, so the writer sees the end of its queue.
        conversation.hold(&mut peer).await.err().unwrap_or_else(End::normal)
    };
    let end = tokio::select! {
        // Biased: a message that was just queued is written in the same poll, and not after all other tasks that the
        // same output woke.
        biased;
        end = talk => end,
        () = &mut writer => return End::normal(),
        end = over(server, &token, open) => return end,
    };
    if end.code == End::normal().code {
        // A client too slow for this gets the close code without the last output.
        let _ = tokio::time::timeout(FLUSH_WITHIN, writer).await;
    }
    end
}

/// Resolves when the token expires or is revoked, or boxd shuts down.
async fn over(server: &Server, token: &watch::Sender<Arc<Claims>>, open: &OpenStream) -> End {
    let mut token = token.subscribe();
    loop {
        let claims = token.borrow_and_update().clone();
        tokio::select! {
            why = server.authority.expired(&claims) => return why.into(),
            _ = token.changed() => {}
            why = open.revoked() => return why.into(),
            () = server.shutdown.cancelled() => return End::plain(close::GOING_AWAY),
        }
    }
}
