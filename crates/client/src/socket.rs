//! One WebSocket to a sandbox: how it is dialled, how its frames are read, and a writer that never holds up the reading.

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

/// Frames between a conversation and a slow connection; beyond it the conversation keeps them back.
const OUT_FRAMES: usize = 4;
/// For the last frames to leave; whoever doesn't take them in that time does without.
const FAREWELL: Duration = Duration::from_secs(1);
/// A close without a code.
const NO_CODE: u16 = 1005;

type Raw = WebSocketStream<reqwest::Upgraded>;

pub(crate) struct Socket {
    pub stream: SplitStream<Raw>,
    pub out: mpsc::Sender<Message>,
    writer: AbortOnDropHandle<()>,
}

impl Dataplane {
    /// The upgrade goes the way of every other call, with the same TLS, proxy and errors.
    pub(crate) async fn dial(&self, route: &str) -> Result<Socket, ClientError> {
        let key = generate_key();
        let url = self.url(route);
        let fixed = |name: &'static str, value: &'static str| (HeaderName::from_static(name), HeaderValue::from_static(value));
        let mut call = Call::new(Method::GET, url.clone());
        call.headers.extend([fixed("connection", "Upgrade"), fixed("upgrade", "websocket"), fixed("sec-websocket-version", "13")]);
        // A WebSocket key is 24 characters of base64.
        call = call.header(header::SEC_WEBSOCKET_KEY, HeaderValue::from_str(&key).expect("base64 is a header value"));

        let response = self.sender.send_afresh(&call, &self.credential).await?;
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
    /// Sends the last frames, and gives them a moment to leave.
    pub async fn farewell(self, last: impl IntoIterator<Item = Message>) {
        let Self { out, writer, .. } = self;
        let going = async {
            for message in last {
                if out.send(message).await.is_err() {
                    return;
                }
            }
            drop(out);
            // It ends by itself once everything is written.
            let _ = writer.await;
        };
        let _ = tokio::time::timeout(FAREWELL, going).await;
    }
}

/// Ends with the connection, or when nobody can send any more.
async fn write(mut sink: SplitSink<Raw, Message>, mut waiting: mpsc::Receiver<Message>) {
    while let Some(message) = waiting.recv().await {
        if let Err(error) = sink.send(message).await {
            tracing::debug!(%error, "the connection takes no more; its reading half says why");
            return;
        }
    }
    // The other side is told; if it has gone already, there is nobody to tell.
    let _ = sink.close().await;
}

/// What came from the other side.
pub(crate) enum Incoming<R> {
    Frame(ServerFrame<R>),
    Output {
        kind: BinaryKind,
        offset: u64,
        bytes: Bytes,
    },
    /// A keep-alive, or a frame of a kind this client doesn't know and that is therefore not for it.
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
        // Pings are answered by the library.
        Some(Ok(_)) => Incoming::Nothing,
        Some(Err(e)) => Incoming::Broken(innermost(&e).to_string()),
        None => Incoming::Broken("it ended without a word".to_owned()),
    }
}
