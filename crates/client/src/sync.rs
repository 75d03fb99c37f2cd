//! The way to a sandbox's end of a sync: bytes both ways for a thread that blocks, over one WebSocket with its token kept fresh.

use std::{
    io::{self, Read, Write},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use cobox_protocol::frame::{ClientFrame, ServerFrame};
use futures_util::StreamExt;
use serde::de::IgnoredAny;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until, timeout},
};
use tokio_tungstenite::tungstenite::Message;

use crate::{
    ApiFailure, ClientError, Dataplane,
    call::Credential,
    path::{encode_path, encode_segment},
    reconnect::Loss,
    session::Token,
    socket::{Incoming, Socket, read},
};

/// For one try to dial, a starting sandbox included.
const DIAL_WITHIN: Duration = Duration::from_secs(30);
/// Sent at once, at most: within what one frame may be.
const PIECE_BYTES: usize = 256 * 1024;
/// Pieces on their way, each direction.
const PIECES: usize = 4;

/// Why there is no connection now.
pub enum NoLine {
    /// Another try may do.
    Passing(String),
    Final(ClientError),
}

impl Dataplane {
    /// Opens the sandbox's end for a folder there. One try; who wants it kept open asks again when it has ended.
    pub async fn open_sync(&self, path: &[u8], only_reads: bool) -> Result<(SyncReader, SyncWriter), NoLine> {
        encode_path(path).map_err(NoLine::Final)?;
        let route = format!("/sync/ws?path={}&pull={only_reads}", encode_segment(path));
        let socket = match timeout(DIAL_WITHIN, self.dial(&route)).await {
            Ok(Ok(socket)) => socket,
            Ok(Err(error)) => {
                return Err(match Loss::refused(error) {
                    Loss::Passing(cause) => NoLine::Passing(cause),
                    // The next try takes another token.
                    Loss::Token(error) => NoLine::Passing(error.to_string()),
                    Loss::Final(error) => NoLine::Final(error),
                });
            }
            Err(_) => return Err(NoLine::Passing("no answer in time".to_owned())),
        };
        let (to_caller, pieces) = mpsc::channel(PIECES);
        let (from_caller, waiting) = mpsc::channel(PIECES);
        tokio::spawn(carry(self.clone(), socket, to_caller, waiting));
        Ok((SyncReader { pieces, piece: Bytes::new() }, SyncWriter { pieces: from_caller, piece: BytesMut::new() }))
    }
}

/// Blocks; for a thread outside the runtime.
pub struct SyncReader {
    pieces: mpsc::Receiver<Result<Bytes, String>>,
    piece: Bytes,
}

impl Read for SyncReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.pieces.blocking_recv() {
                Some(Ok(piece)) => self.piece = piece,
                Some(Err(cause)) => return Err(io::Error::other(cause)),
                None => return Ok(0),
            }
        }
        let n = buffer.len().min(self.piece.len());
        self.piece.copy_to_slice(&mut buffer[..n]);
        Ok(n)
    }
}

/// Blocks; for a thread outside the runtime. Dropped, it ends the connection.
pub struct SyncWriter {
    pieces: mpsc::Sender<Bytes>,
    piece: BytesMut,
}

impl Write for SyncWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(PIECE_BYTES - self.piece.len());
        self.piece.extend_from_slice(&bytes[..n]);
        if self.piece.len() == PIECE_BYTES {
            self.flush()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        self.pieces.blocking_send(self.piece.split().freeze()).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Both directions until one ends, the token kept fresh and a dead connection noticed.
async fn carry(
    dataplane: Dataplane,
    mut socket: Socket,
    to_caller: mpsc::Sender<Result<Bytes, String>>,
    mut waiting: mpsc::Receiver<Bytes>,
) {
    let mut tokens = match &dataplane.credential {
        Credential::Token(keeper) => Some(keeper.subscribe()),
        Credential::ApiKey(_) => None,
    };
    let silence = dataplane.reconnect.silence;
    let (mut heard, mut has_pinged) = (Instant::now(), false);
    let mut told: Option<ClientError> = None;
    let mut arrived: Option<Bytes> = None;
    let cause = loop {
        let silent_at = heard + if has_pinged { silence } else { silence / 3 };
        tokio::select! {
            room = to_caller.reserve(), if arrived.is_some() => match (room, arrived.take()) {
                (Ok(room), Some(bytes)) => {
                    room.send(Ok(bytes));
                    // Silence counts from when we listen again.
                    heard = Instant::now();
                }
                _ => break None,
            },
            message = socket.stream.next(), if arrived.is_none() => {
                (heard, has_pinged) = (Instant::now(), false);
                match message {
                    Some(Ok(Message::Binary(bytes))) => arrived = Some(bytes),
                    other => match read::<IgnoredAny>(other) {
                        Incoming::Frame(ServerFrame::Error { error }) => told = Some(ClientError::Api(Box::new(ApiFailure::in_a_frame(error)))),
                        Incoming::Closed { code, reason } => {
                            break Some(match Loss::closed(code, &reason, told.take()) {
                                Loss::Passing(cause) => cause,
                                Loss::Token(error) | Loss::Final(error) => error.to_string(),
                            });
                        }
                        Incoming::Broken(cause) => break Some(cause),
                        _ => {}
                    },
                }
            }
            bytes = waiting.recv() => match bytes {
                Some(bytes) => {
                    if socket.out.send(Message::Binary(bytes)).await.is_err() {
                        break Some("it takes no more".to_owned());
                    }
                }
                None => break None,
            },
            Some(token) = fresh(&mut tokens) => {
                let frame = ClientFrame::<()>::Auth { token: token.secret };
                // Frames hold strings, numbers and maps with string keys: they always serialise.
                let text = serde_json::to_string(&frame).expect("frames serialise");
                if socket.out.send(Message::text(text)).await.is_err() {
                    break Some("it takes no more".to_owned());
                }
            }
            () = sleep_until(silent_at), if arrived.is_none() => {
                if has_pinged {
                    break Some(format!("nothing came for {} s", silence.as_secs()));
                }
                has_pinged = true;
                if socket.out.send(Message::Ping(Bytes::new())).await.is_err() {
                    break Some("it takes no more".to_owned());
                }
            }
        }
    };
    match cause {
        // A caller who doesn't listen any more has nothing to be told.
        Some(cause) => drop(to_caller.send(Err(cause)).await),
        None => socket.farewell([]).await,
    }
}

/// The next token; never where there are none to come.
async fn fresh(tokens: &mut Option<watch::Receiver<Token>>) -> Option<Token> {
    if let Some(tokens) = tokens
        && tokens.changed().await.is_ok()
    {
        return Some(tokens.borrow_and_update().clone());
    }
    std::future::pending().await
}
