//! One admitted connection with its terminal: input, output, the token's life and the socket, each going on without waiting for the others.

use std::{pin::pin, sync::Arc, time::Duration};

use axum::extract::ws::Message;
use bytes::{Buf, BytesMut};
use cobox_protocol::{
    ApiError, Capability, ErrorCode, RequestId, ShellId, Timestamp,
    frame::{ClientFrame, ServerFrame, ShellStart, close, frame_bytes},
};
use cobox_token::{Claims, TokenError};
use futures_util::{SinkExt, StreamExt};
use tokio::sync::{mpsc, watch};

use super::{
    auth_ok,
    frames::{End, Received, Sink, Stream, encode, error_frame, receive},
    terminal::Terminal,
};
use crate::{auth::OpenStream, server::Server};

/// Frames between the terminal and a slow socket; beyond it the terminal isn't read and its programs wait.
const OUT_FRAMES: usize = 4;
/// Typed or pasted and not yet taken by the program; beyond it the socket isn't read.
const MAX_PENDING_INPUT_BYTES: usize = 1024 * 1024;
/// The token's end is in wall-clock time and sleeping is not, so the clock is looked at again at least this often.
const CLOCK_CHECK: Duration = Duration::from_secs(30);
/// For the last output and the exit code to reach a slow client.
const FLUSH_WITHIN: Duration = Duration::from_secs(5);

/// Runs until the program, the client, the token or boxd ends.
pub async fn run(
    server: &Arc<Server>,
    sink: &mut Sink,
    stream: &mut Stream,
    open: &OpenStream,
    claims: Arc<Claims>,
    request_id: &RequestId,
) -> End {
    let (out, mut frames) = mpsc::channel::<Message>(OUT_FRAMES);
    let token = watch::Sender::new(claims);
    let session = Session { server, out, token: &token, open, request_id };
    let mut writer = pin!(async {
        while let Some(frame) = frames.recv().await {
            if sink.send(frame).await.is_err() {
                return;
            }
        }
    });
    let end = tokio::select! {
        end = session.talk(stream) => end,
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

struct Session<'a> {
    server: &'a Arc<Server>,
    out: mpsc::Sender<Message>,
    token: &'a watch::Sender<Arc<Claims>>,
    open: &'a OpenStream,
    request_id: &'a RequestId,
}

impl Session<'_> {
    /// By value, so that the writer sees the end of its frames when this is over.
    async fn talk(self, stream: &mut Stream) -> End {
        match self.talk_through(stream).await {
            Ok(()) => End::normal(),
            Err(end) => end,
        }
    }

    async fn talk_through(&self, stream: &mut Stream) -> Result<(), End> {
        let mut input = BytesMut::new();
        let start = self.wait_for_start(stream, &mut input).await?;
        let mut terminal = Terminal::start(self.server, start).await?;
        let shell_id = ShellId::new();
        tracing::info!(request_id = %self.request_id, jti = self.token.borrow().jti, sub = self.token.borrow().sub, %shell_id, "shell started");
        self.send(&ServerFrame::Ready { shell_id, offset: 0, cols: terminal.cols, rows: terminal.rows }).await?;
        let exit = tokio::select! {
            exit = terminal.output(&self.out) => exit?,
            end = self.take_input(stream, &terminal, input) => return Err(end),
        };
        terminal.has_ended();
        self.send(&ServerFrame::Exit { exit_code: exit.code, signal: exit.signal }).await
    }

    /// The `start` frame, or what a `stdin` in its place means: the defaults.
    async fn wait_for_start(&self, stream: &mut Stream, input: &mut BytesMut) -> Result<ShellStart, End> {
        let mut size = None;
        loop {
            match receive(stream.next().await)? {
                Received::Frame(ClientFrame::Start(start)) => return Ok(start),
                Received::Frame(ClientFrame::Stdin { data, data_b64 }) => {
                    input.extend_from_slice(&frame_bytes(data.as_deref(), data_b64.as_deref()).map_err(ApiError::invalid)?);
                    let (cols, rows) = size.unzip();
                    return Ok(ShellStart { cols, rows, ..Default::default() });
                }
                // A client that tells its size first and then just types.
                Received::Frame(ClientFrame::Resize { cols, rows }) => size = Some((cols, rows)),
                Received::Frame(ClientFrame::Signal { .. }) => {
                    self.complain(&ApiError::invalid("there is no shell yet; send `start`")).await?
                }
                Received::Frame(ClientFrame::Close) => return Err(End::normal()),
                Received::Frame(ClientFrame::Auth { token }) => self.renew(token.expose()).await?,
                Received::Frame(ClientFrame::Ping { id }) => self.send(&ServerFrame::Pong { id }).await?,
                Received::Nothing => {}
            }
        }
    }

    /// Takes frames for as long as there is room for what they carry, and meanwhile feeds the terminal as fast as it reads.
    async fn take_input(&self, stream: &mut Stream, terminal: &Terminal, mut pending: BytesMut) -> End {
        loop {
            tokio::select! {
                written = terminal.pty.write(&pending), if !pending.is_empty() => match written {
                    Ok(n) => pending.advance(n),
                    // Nobody reads the terminal any more; its end is told by the output.
                    Err(_) => pending.clear(),
                },
                message = stream.next(), if pending.len() < MAX_PENDING_INPUT_BYTES => {
                    let taken = match receive(message) {
                        Ok(Received::Frame(frame)) => self.obey(frame, terminal, &mut pending).await,
                        Ok(Received::Nothing) => Ok(()),
                        Err(end) => Err(end),
                    };
                    if let Err(end) = taken {
                        return end;
                    }
                }
            }
        }
    }

    async fn obey(&self, frame: ClientFrame, terminal: &Terminal, pending: &mut BytesMut) -> Result<(), End> {
        let done = match frame {
            ClientFrame::Stdin { data, data_b64 } => {
                frame_bytes(data.as_deref(), data_b64.as_deref()).map(|bytes| pending.extend_from_slice(&bytes)).map_err(ApiError::invalid)
            }
            ClientFrame::Resize { cols, rows } => terminal.resize(cols, rows),
            ClientFrame::Signal { signal } => terminal.signal(&signal),
            ClientFrame::Ping { id } => return self.send(&ServerFrame::Pong { id }).await,
            ClientFrame::Auth { token } => return self.renew(token.expose()).await,
            ClientFrame::Start(_) => Err(ApiError::invalid("this connection has its shell already; open another for a second one")),
            ClientFrame::Close => return Err(End::normal()),
        };
        match done {
            Ok(()) => Ok(()),
            Err(error) => self.complain(&error).await,
        }
    }

    /// A fresh token of the same principal and session takes over; any other changes nothing, and the old one's end stays the end.
    async fn renew(&self, token: &str) -> Result<(), End> {
        let known = self.token.borrow().clone();
        let renewed = self.server.authority.authorize_token(token, Capability::Shell).and_then(|fresh| {
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
                self.send(&auth_ok(&fresh)).await
            }
            Err(error) => self.complain(&error).await,
        }
    }

    async fn complain(&self, error: &ApiError) -> Result<(), End> {
        self.out.send(error_frame(error, self.request_id)).await.map_err(|_| End::normal())
    }

    async fn send(&self, frame: &ServerFrame) -> Result<(), End> {
        self.out.send(encode(frame)).await.map_err(|_| End::normal())
    }
}
