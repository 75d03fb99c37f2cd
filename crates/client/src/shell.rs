//! A shell over a WebSocket: two halves, so that typing never waits for output nor output for typing.

use std::sync::Arc;

use cobox_protocol::{
    Secret,
    frame::{ClientFrame, MAX_FRAME_BYTES, ServerFrame, ShellReady, ShellStart, close, frame_bytes},
};
use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use http::{HeaderName, HeaderValue, Method, header};
use tokio::sync::{Mutex, watch};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        handshake::{client::generate_key, derive_accept_key},
        protocol::{Role, WebSocketConfig},
    },
};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    ApiFailure, ClientError, Dataplane,
    call::{Call, Credential},
    error::{BROKEN_OFF, innermost},
    session::Token,
};

/// Most bytes of typing in one frame: escaped as JSON (six for one, at worst) it still fits the largest frame.
const MAX_STDIN_CHUNK: usize = MAX_FRAME_BYTES / 8;

type Socket = WebSocketStream<reqwest::Upgraded>;
type Sink = Arc<Mutex<SplitSink<Socket, Message>>>;

pub struct Shell {
    pub input: ShellInput,
    pub output: ShellOutput,
}

/// What comes out of a shell.
#[derive(Debug)]
pub enum ShellEvent {
    Ready,
    Output(Vec<u8>),
    Exit { exit_code: i32, signal: Option<i32> },
}

impl Dataplane {
    /// Starts a shell. Its connection stays open across token refreshes.
    pub async fn shell(&self, start: ShellStart) -> Result<Shell, ClientError> {
        let key = generate_key();
        let url = format!("{}/shell/ws", self.base);
        let fixed = |name: &'static str, value: &'static str| (HeaderName::from_static(name), HeaderValue::from_static(value));
        let mut call = Call::new(Method::GET, url.clone());
        call.headers.extend([fixed("connection", "Upgrade"), fixed("upgrade", "websocket"), fixed("sec-websocket-version", "13")]);
        // A WebSocket key is 24 characters of base64.
        call = call.header(header::SEC_WEBSOCKET_KEY, HeaderValue::from_str(&key).expect("base64 is a header value"));

        // Subscribed before the handshake: a refresh during it is then still told to the shell.
        let mut tokens = match &self.credential {
            Credential::Token(keeper) => Some(keeper.subscribe()),
            Credential::ApiKey(_) => None,
        };
        // The upgrade goes through the same client as every other call: same TLS, same proxy, same errors.
        let response = self.sender.send(&call, &self.credential).await?;
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
        let sink = Arc::new(Mutex::new(sink));
        let input = ShellInput { sink: sink.clone(), url: url.clone() };
        input.send(&ClientFrame::Start(start)).await?;
        let reauth = tokens.take().map(|tokens| AbortOnDropHandle::new(tokio::spawn(reauthenticate(tokens, input.clone()))));
        Ok(Shell { input, output: ShellOutput { stream, url, has_exited: false, _reauth: reauth } })
    }
}

/// The typing half.
#[derive(Clone)]
pub struct ShellInput {
    sink: Sink,
    url: String,
}

impl ShellInput {
    pub async fn stdin(&self, bytes: &[u8]) -> Result<(), ClientError> {
        for chunk in bytes.chunks(MAX_STDIN_CHUNK) {
            self.send(&ClientFrame::stdin(chunk, None)).await?;
        }
        Ok(())
    }

    pub async fn resize(&self, cols: u16, rows: u16) -> Result<(), ClientError> {
        self.send(&ClientFrame::Resize { cols, rows }).await
    }

    pub async fn signal(&self, signal: &str) -> Result<(), ClientError> {
        self.send(&ClientFrame::Signal { signal: signal.to_owned() }).await
    }

    pub async fn close(&self) -> Result<(), ClientError> {
        self.send(&ClientFrame::Close).await
    }

    async fn auth(&self, token: Secret) -> Result<(), ClientError> {
        self.send(&ClientFrame::Auth { token }).await
    }

    async fn send(&self, frame: &ClientFrame<ShellStart>) -> Result<(), ClientError> {
        // Frames hold strings, numbers and maps with string keys: they always serialise.
        let text = serde_json::to_string(frame).expect("frames serialise");
        let mut sink = self.sink.lock().await;
        sink.send(Message::text(text)).await.map_err(|e| ClientError::transport(&self.url, &e))
    }
}

/// The watching half.
pub struct ShellOutput {
    stream: SplitStream<Socket>,
    url: String,
    has_exited: bool,
    _reauth: Option<AbortOnDropHandle<()>>,
}

impl ShellOutput {
    /// What happens next; `None` after the exit. A connection that ends before the exit is an error.
    pub async fn next(&mut self) -> Option<Result<ShellEvent, ClientError>> {
        while !self.has_exited {
            let message = match self.stream.next().await {
                Some(Ok(message)) => message,
                Some(Err(e)) => return Some(Err(broken_off(&innermost(&e).to_string()))),
                None => return Some(Err(broken_off("it ended before the shell did"))),
            };
            let frame = match &message {
                Message::Text(text) => serde_json::from_str::<ServerFrame<ShellReady>>(text),
                Message::Close(frame) => {
                    let (code, reason) = frame.as_ref().map_or((1005, ""), |f| (u16::from(f.code), f.reason.as_str()));
                    return Some(Err(ClientError::ShellClosed { code, reason: closing_words(code, reason) }));
                }
                // Pings are answered by the library; binary frames were not asked for.
                _ => continue,
            };
            // A frame of a kind this client doesn't know yet is not for it.
            let Ok(frame) = frame else { continue };
            match self.event(frame) {
                Some(result) => return Some(result),
                None => continue,
            }
        }
        None
    }

    fn event(&mut self, frame: ServerFrame<ShellReady>) -> Option<Result<ShellEvent, ClientError>> {
        Some(match frame {
            ServerFrame::Ready(_) => Ok(ShellEvent::Ready),
            ServerFrame::Stdout { data, data_b64, .. } => match frame_bytes(data.as_deref(), data_b64.as_deref()) {
                Ok(bytes) => Ok(ShellEvent::Output(bytes)),
                Err(cause) => Err(self.ended(&cause)),
            },
            ServerFrame::Exit { exit_code, signal, .. } => {
                self.has_exited = true;
                Ok(ShellEvent::Exit { exit_code, signal })
            }
            ServerFrame::Error { error } => Err(ClientError::Api(Box::new(ApiFailure {
                status: http::StatusCode::SWITCHING_PROTOCOLS.as_u16(),
                code: error.code,
                message: error.message,
                retryable: error.retryable,
                request_id: error.request_id,
                retry_after: None,
                details: error.details,
            }))),
            _ => return None,
        })
    }

    fn ended(&self, cause: &str) -> ClientError {
        ClientError::Transport { url: self.url.clone(), cause: cause.to_owned() }
    }
}

fn broken_off(cause: &str) -> ClientError {
    ClientError::ShellClosed { code: BROKEN_OFF, reason: cause.to_owned() }
}

/// Hands each new token to the shell, whose stream would otherwise end with the old one.
async fn reauthenticate(mut tokens: watch::Receiver<Token>, input: ShellInput) {
    while tokens.changed().await.is_ok() {
        let secret = tokens.borrow_and_update().secret.clone();
        if let Err(error) = input.auth(secret).await {
            tracing::debug!(%error, "the shell's connection is gone; its reader says why");
            return;
        }
    }
}

fn closing_words(code: u16, reason: &str) -> String {
    if !reason.is_empty() {
        return reason.to_owned();
    }
    match code {
        close::GOING_AWAY => "the broker or the sandbox is going away",
        close::UNAUTHENTICATED => "the token was not accepted",
        close::CAPABILITY => "the token doesn't allow a shell",
        close::AUTH_TIMEOUT => "no token came in time",
        close::ENDED => "the session was ended or released",
        _ => "no reason was given",
    }
    .to_owned()
}
