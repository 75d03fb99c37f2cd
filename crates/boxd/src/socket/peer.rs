//! One admitted connection: its frames in, its frames out and its token's life, none of which waits for another.

use std::{marker::PhantomData, pin::pin, sync::Arc, time::Duration};

use axum::extract::ws::Message;
use cobox_protocol::{
    ApiError, ErrorCode, RequestId, Timestamp,
    frame::{ClientFrame, ServerFrame, close},
};
use cobox_token::{Claims, TokenError};
use futures_util::{SinkExt, StreamExt};
use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::{mpsc, watch};

use super::{
    Conversation, auth_ok,
    frames::{End, Received, Sink, Stream, encode, error_frame, receive},
};
use crate::{answer::RequestRecord, auth::OpenStream, server::Server};

/// Frames between a conversation and a slow socket; beyond it the conversation waits.
const OUT_FRAMES: usize = 4;
/// The token's end is in wall-clock time and sleeping is not, so the clock is looked at again at least this often.
const CLOCK_CHECK: Duration = Duration::from_secs(30);
/// For the last output and the exit code to reach a slow client.
const FLUSH_WITHIN: Duration = Duration::from_secs(5);

/// Whom a conversation is held with.
pub struct Peer<'a, S> {
    pub server: &'a Arc<Server>,
    pub record: &'a RequestRecord,
    pub out: Out,
    stream: &'a mut Stream,
    token: &'a watch::Sender<Arc<Claims>>,
    open: &'a OpenStream,
    needs: cobox_protocol::Capability,
    start: PhantomData<fn() -> S>,
}

/// The way out, for whichever part of a conversation has something to say.
#[derive(Clone)]
pub struct Out {
    frames: mpsc::Sender<Message>,
    request_id: RequestId,
}

impl Out {
    pub async fn send<R: Serialize>(&self, frame: &ServerFrame<R>) -> Result<(), End> {
        self.message(encode(frame)).await
    }

    pub async fn message(&self, message: Message) -> Result<(), End> {
        self.frames.send(message).await.map_err(|_| End::normal())
    }

    /// Says what is wrong with a frame; the conversation goes on.
    pub async fn complain(&self, error: &ApiError) -> Result<(), End> {
        self.message(error_frame(error, &self.request_id)).await
    }
}

impl<S: DeserializeOwned> Peer<'_, S> {
    /// The next frame that is the conversation's own: pings are answered and fresh tokens taken on the way. May be dropped while it waits.
    pub async fn next(&mut self) -> Result<ClientFrame<S>, End> {
        loop {
            match receive(self.stream.next().await)? {
                Received::Frame(ClientFrame::Auth { token }) => self.renew(token.expose()).await?,
                Received::Frame(ClientFrame::Ping { id }) => self.out.send(&ServerFrame::<()>::Pong { id }).await?,
                Received::Frame(ClientFrame::Close) => return Err(End::normal()),
                Received::Frame(frame) => return Ok(frame),
                Received::Nothing => {}
            }
        }
    }

    /// Who this is, by the newest token.
    pub fn claims(&self) -> Arc<Claims> {
        self.token.borrow().clone()
    }

    /// A fresh token of the same principal and session takes over; any other changes nothing, and the old one's end stays the end.
    async fn renew(&self, token: &str) -> Result<(), End> {
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
                self.out.send(&auth_ok(&fresh)).await
            }
            Err(error) => self.out.complain(&error).await,
        }
    }
}

/// Holds a conversation until it, the client, the token or boxd ends.
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
    let out = Out { frames, request_id: record.request_id.clone() };
    let mut writer = pin!(async {
        while let Some(frame) = waiting.recv().await {
            if sink.send(frame).await.is_err() {
                return;
            }
        }
    });
    let talk = async {
        let mut peer = Peer { server, record, out, stream, token: &token, open, needs: C::NEEDS, start: PhantomData };
        // By the end of this block the last way out is dropped, and the writer sees the end of its frames.
        conversation.hold(&mut peer).await.err().unwrap_or_else(End::normal)
    };
    let end = tokio::select! {
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

/// Resolves when the token or boxd is at its end.
async fn over(server: &Server, token: &watch::Sender<Arc<Claims>>, open: &OpenStream) -> End {
    let mut token = token.subscribe();
    loop {
        let left = Timestamp::from_unix(token.borrow_and_update().exp).saturating_since(Timestamp::now());
        if left.is_zero() {
            return ApiError::new(ErrorCode::TokenExpired, TokenError::Expired.to_string()).into();
        }
        tokio::select! {
            () = tokio::time::sleep(left.min(CLOCK_CHECK)) => {}
            _ = token.changed() => {}
            why = open.revoked() => return why.into(),
            () = server.shutdown.cancelled() => return End::plain(close::GOING_AWAY),
        }
    }
}
