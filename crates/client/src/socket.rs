//! One WebSocket to a sandbox: handshake, frame parsing, and a separate writer task, so that writing never blocks reading.

use std::time::Duration;

use bytes::Bytes;
use cobox_protocol::frame::{BINARY_HEAD_BYTES, BinaryFrame, BinaryKind, MAX_FRAME_BYTES, ServerFrame};
use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use http::{HeaderName, HeaderValue, Method, header};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        self, Message,
        handshake::{client::generate_key, derive_accept_key},
        protocol::{Role, WebSocketConfig},
    },
};
use tokio_util::task::AbortOnDropHandle;

use crate::{ClientError, Dataplane, call::Call, error::innermost};

/// Frames buffered for a slow connection; when the buffer is full, the stream keeps the frames.
const OUT_FRAMES: usize = 4;
/// Timeout for sending the last frames; a peer that does not read them in time does not get them.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Code that RFC 6455 reserves for a close frame without a code.
const NO_CODE: u16 = 1005;

type RawSocket = WebSocketStream<reqwest::Upgraded>;

pub(crate) struct Socket {
    pub stream: SplitStream<RawSocket>,
    pub out: mpsc::Sender<Message>,
    writer: AbortOnDropHandle<()>,
}

impl Dataplane {
    /// Connects. The upgrade request uses the same client as every other call, with the same TLS, proxy and errors.
    pub(crate) async fn dial(&self, route: &str) -> Result<Socket, ClientError> {
        let key = generate_key();
        let url = self.url(route);
        let fixed = |name: &'static str, value: &'static str| (HeaderName::from_static(name), HeaderValue::from_static(value));
        let mut call = Call::new(Method::GET, url.clone());
        call.headers.extend([fixed("connection", "Upgrade"), fixed("upgrade", "websocket"), fixed("sec-websocket-version", "13")]);
        // A WebSocket key has 24 base64 characters.
        call = call.header(header::SEC_WEBSOCKET_KEY, HeaderValue::from_str(&key).expect("base64 is a header value"));

        let response = self.sender.send_on_new_connection(&call, &self.credential).await?;
        let accepted = response
            .headers()
            .get(header::SEC_WEBSOCKET_ACCEPT)
            .is_some_and(|a| a.as_bytes() == derive_accept_key(key.as_bytes()).as_bytes());
        if response.status() != http::StatusCode::SWITCHING_PROTOCOLS || !accepted {
            let excerpt = "the connection did not become a WebSocket".to_owned();
            return Err(ClientError::NotCobox { url, status: response.status().as_u16(), excerpt });
        }
        let upgraded = response.upgrade().await.map_err(|e| ClientError::transport(&url, &e))?;
        let limits = WebSocketConfig::default().max_message_size(Some(MAX_FRAME_BYTES)).max_frame_size(Some(MAX_FRAME_BYTES));
        let (sink, stream) = WebSocketStream::from_raw_socket(upgraded, Role::Client, Some(limits)).await.split();
        let (out, waiting) = mpsc::channel(OUT_FRAMES);
        Ok(Socket { stream, out, writer: AbortOnDropHandle::new(tokio::spawn(write(sink, waiting))) })
    }
}

impl Socket {
    /// Sends the last frames and closes, within a timeout.
    pub async fn send_and_close(self, last: impl IntoIterator<Item = Message>) {
        let Self { out, writer, .. } = self;
        let sending = async {
            for message in last {
                if out.send(message).await.is_err() {
                    return;
                }
            }
            drop(out);
            // The writer ends when everything is written.
            let _ = writer.await;
        };
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, sending).await;
    }
}

/// Writer task; ends with the connection, or when all senders are dropped.
async fn write(mut sink: SplitSink<RawSocket, Message>, mut waiting: mpsc::Receiver<Message>) {
    while let Some(message) = waiting.recv().await {
        if let Err(error) = sink.send(message).await {
            tracing::debug!(%error, "write failed; the reading half reports the cause");
            return;
        }
    }
    // Errors are ignored, because the peer may have closed the connection already.
    let _ = sink.close().await;
}

/// A message from the server.
pub(crate) enum Incoming<R> {
    Frame(ServerFrame<R>),
    Output {
        kind: BinaryKind,
        offset: u64,
        bytes: Bytes,
    },
    /// A keep-alive, or a frame of an unknown type, which is ignored.
    Nothing,
    Closed {
        code: u16,
        reason: String,
    },
    Broken(String),
}

pub(crate) fn read<R: DeserializeOwned>(message: Option<Result<Message, tungstenite::Error>>) -> Incoming<R> {
    match message {
        Some(Ok(Message::Text(text))) => serde_json::from_str(&text).map_or(Incoming::Nothing, Incoming::Frame),
        Some(Ok(Message::Binary(message))) => match BinaryFrame::parse(&message).map(|f| (f.kind, f.offset)) {
            Some((kind, offset)) => Incoming::Output { kind, offset, bytes: message.slice(BINARY_HEAD_BYTES..) },
            None => Incoming::Nothing,
        },
        Some(Ok(Message::Close(frame))) => {
            let (code, reason) = frame.map_or((NO_CODE, String::new()), |f| (u16::from(f.code), f.reason.to_string()));
            Incoming::Closed { code, reason }
        }
        // tungstenite answers pings.
        Some(Ok(_)) => Incoming::Nothing,
        Some(Err(e)) => Incoming::Broken(innermost(&e).to_string()),
        None => Incoming::Broken("it ended without a close frame".to_owned()),
    }
}
