//! Connection to the sandbox's end of a sync: blocking reader and writer over one WebSocket, whose token is kept fresh.

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
    reconnect::ConnectionLoss,
    session::Token,
    socket::{Incoming, Socket, read},
};

/// Timeout of one connection attempt, including the wait for a starting sandbox.
const DIAL_WITHIN: Duration = Duration::from_secs(30);
/// Maximum bytes in one frame, below the frame limit.
const CHUNK_BYTES: usize = 256 * 1024;
/// Maximum number of buffered chunks in each direction.
const CHUNKS_IN_FLIGHT: usize = 4;

/// Why the connection could not be opened.
pub enum SyncUnavailable {
    /// Another attempt may succeed.
    Transient(String),
    Final(ClientError),
}

impl Dataplane {
    /// Opens a sync connection for a folder of the sandbox. Makes one attempt; the caller reconnects when it ends.
    pub async fn open_sync(&self, path: &[u8], only_reads: bool) -> Result<(SyncReader, SyncWriter), SyncUnavailable> {
        encode_path(path).map_err(SyncUnavailable::Final)?;
        let route = format!("/sync/ws?path={}&pull={only_reads}", encode_segment(path));
        let socket = match timeout(DIAL_WITHIN, self.dial(&route)).await {
            Ok(Ok(socket)) => socket,
            Ok(Err(error)) => {
                return Err(match ConnectionLoss::refused(error) {
                    ConnectionLoss::Transient(cause) => SyncUnavailable::Transient(cause),
                    // The next attempt uses a new token.
                    ConnectionLoss::Token(error) => SyncUnavailable::Transient(error.to_string()),
                    ConnectionLoss::Final(error) => SyncUnavailable::Final(error),
                });
            }
            Err(_) => return Err(SyncUnavailable::Transient("no response in time".to_owned())),
        };
        let (to_caller, chunks) = mpsc::channel(CHUNKS_IN_FLIGHT);
        let (from_caller, waiting) = mpsc::channel(CHUNKS_IN_FLIGHT);
        tokio::spawn(relay(self.clone(), socket, to_caller, waiting));
        Ok((SyncReader { chunks, chunk: Bytes::new() }, SyncWriter { chunks: from_caller, chunk: BytesMut::new() }))
    }
}

/// Blocking reader, for a thread outside the runtime.
pub struct SyncReader {
    chunks: mpsc::Receiver<Result<Bytes, String>>,
    chunk: Bytes,
}

impl Read for SyncReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.chunk.is_empty() {
            match self.chunks.blocking_recv() {
                Some(Ok(chunk)) => self.chunk = chunk,
                Some(Err(cause)) => return Err(io::Error::other(cause)),
                None => return Ok(0),
            }
        }
        let n = buffer.len().min(self.chunk.len());
        self.chunk.copy_to_slice(&mut buffer[..n]);
        Ok(n)
    }
}

/// Blocking writer, for a thread outside the runtime. Dropping it closes the connection.
pub struct SyncWriter {
    chunks: mpsc::Sender<Bytes>,
    chunk: BytesMut,
}

impl Write for SyncWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(CHUNK_BYTES - self.chunk.len());
        self.chunk.extend_from_slice(&bytes[..n]);
        if self.chunk.len() == CHUNK_BYTES {
            self.flush()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        self.chunks.blocking_send(self.chunk.split().freeze()).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Relays both directions until one ends. Sends new tokens and detects a dead connection.
async fn relay(
    dataplane: Dataplane,
    mut socket: Socket,
    to_caller: mpsc::Sender<Result<Bytes, String>>,
    mut waiting: mpsc::Receiver<Bytes>,
) {
    let mut tokens = match &dataplane.credential {
        Credential::Token(refresher) => Some(refresher.subscribe()),
        Credential::ApiKey(_) => None,
    };
    let silence = dataplane.reconnect.silence;
    let (mut last_received, mut has_pinged) = (Instant::now(), false);
    let mut server_error: Option<ClientError> = None;
    let mut arrived: Option<Bytes> = None;
    let cause = loop {
        let silent_at = last_received + if has_pinged { silence } else { silence / 3 };
        tokio::select! {
            permit = to_caller.reserve(), if arrived.is_some() => match (permit, arrived.take()) {
                (Ok(permit), Some(bytes)) => {
                    permit.send(Ok(bytes));
                    // The silence timeout starts again when reading resumes.
                    last_received = Instant::now();
                }
                _ => break None,
            },
            message = socket.stream.next(), if arrived.is_none() => {
                (last_received, has_pinged) = (Instant::now(), false);
                match message {
                    Some(Ok(Message::Binary(bytes))) => arrived = Some(bytes),
                    other => match read::<IgnoredAny>(other) {
                        Incoming::Frame(ServerFrame::Error { error }) => server_error = Some(ClientError::Api(Box::new(ApiFailure::from_frame(error)))),
                        Incoming::Closed { code, reason } => {
                            break Some(match ConnectionLoss::closed(code, &reason, server_error.take()) {
                                ConnectionLoss::Transient(cause) => cause,
                                ConnectionLoss::Token(error) | ConnectionLoss::Final(error) => error.to_string(),
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
                        break Some("writing to it failed".to_owned());
                    }
                }
                None => break None,
            },
            Some(token) = next_token(&mut tokens) => {
                let frame = ClientFrame::<()>::Auth { token: token.secret };
                // Frames contain only strings, numbers and maps with string keys, so serialization cannot fail.
                let text = serde_json::to_string(&frame).expect("frames serialise");
                if socket.out.send(Message::text(text)).await.is_err() {
                    break Some("writing to it failed".to_owned());
                }
            }
            () = sleep_until(silent_at), if arrived.is_none() => {
                if has_pinged {
                    break Some(format!("nothing was received for {} s", silence.as_secs()));
                }
                has_pinged = true;
                if socket.out.send(Message::Ping(Bytes::new())).await.is_err() {
                    break Some("writing to it failed".to_owned());
                }
            }
        }
    };
    match cause {
        // The error is dropped if the caller has dropped the reader.
        Some(cause) => drop(to_caller.send(Err(cause)).await),
        None => socket.send_and_close([]).await,
    }
}

/// Waits for the next token; pending forever without a token source.
async fn next_token(tokens: &mut Option<watch::Receiver<Token>>) -> Option<Token> {
    if let Some(tokens) = tokens
        && tokens.changed().await.is_ok()
    {
        return Some(tokens.borrow_and_update().clone());
    }
    std::future::pending().await
}
