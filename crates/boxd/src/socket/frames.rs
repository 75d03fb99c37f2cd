//! Frames on the socket: reading one, writing one, and how a connection ends.

use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket};
use bytes::Bytes;
use cobox_protocol::{
    ApiError, ErrorCode, RequestId, Secret,
    frame::{CLIENT_FRAME_TYPES, ClientFrame, MAX_AUTH_FRAME_BYTES, MAX_FRAME_BYTES, ServerFrame, close},
    json::describe_parse_error,
};
use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use serde::{Serialize, de::DeserializeOwned};

use crate::auth::OpenStream;

pub type Sink = SplitSink<WebSocket, Message>;
pub type Stream = SplitStream<WebSocket>;

/// What a client gets to take the last frames and answer the close.
const GOODBYE_WITHIN: Duration = Duration::from_secs(1);
/// Of an unknown frame's type, repeated to whoever sent it.
const MAX_SHOWN_CHARS: usize = 64;
const NORMAL: u16 = 1000;

/// How a connection ends: the close code, and an error frame before it where there is something to say.
#[derive(Debug)]
pub struct End {
    pub code: u16,
    pub error: Option<ApiError>,
}

impl End {
    pub fn plain(code: u16) -> Self {
        Self { code, error: None }
    }
    /// Over, as it should be; also where the client has gone and nobody will read the code.
    pub fn normal() -> Self {
        Self::plain(NORMAL)
    }
}

impl From<ApiError> for End {
    fn from(error: ApiError) -> Self {
        Self { code: close::code_for(error.code), error: Some(error) }
    }
}

/// How a socket's clients speak: the frames they send, and how they are told what went wrong.
pub trait Dialect: DeserializeOwned + Send {
    /// The words of a frame's `type`.
    const TYPES: &'static [&'static str];

    /// What is every socket's to answer, apart from what the conversation is about.
    fn sorted(self) -> Received<Self>;

    /// A frame that is not text, where these clients send such.
    fn of_bytes(bytes: Bytes) -> Option<Self> {
        drop(bytes);
        None
    }

    fn error(error: &ApiError, request_id: &RequestId) -> Message {
        encode(&ServerFrame::<()>::Error { error: error.envelope(request_id).error })
    }

    /// What is said last, and the close code.
    fn farewell(end: &End, request_id: &RequestId) -> (Option<Message>, u16) {
        (end.error.as_ref().map(|error| Self::error(error, request_id)), end.code)
    }
}

impl<S: DeserializeOwned + Send> Dialect for ClientFrame<S> {
    const TYPES: &'static [&'static str] = &CLIENT_FRAME_TYPES;

    fn sorted(self) -> Received<Self> {
        match self {
            ClientFrame::Auth { token } => Received::Auth(token),
            ClientFrame::Ping { id } => Received::Ping(id),
            ClientFrame::Close => Received::Close,
            frame => Received::Frame(frame),
        }
    }
}

pub enum Received<D> {
    Auth(Secret),
    Ping(Option<serde_json::Value>),
    Close,
    Frame(D),
    /// The socket's own keep-alive.
    Nothing,
}

/// What came from the socket, read.
pub fn receive<D: Dialect>(message: Option<Result<Message, axum::Error>>) -> Result<Received<D>, End> {
    let unreadable = |why: String| End::from(ApiError::invalid(format!("a frame can't be read: {why}")));
    match message {
        Some(Ok(Message::Text(text))) => {
            let frame: D = serde_json::from_str(&text).map_err(|e| unreadable(complaint::<D>(&text, &e)))?;
            match frame.sorted() {
                // One that the gateway has not seen: its token was neither checked nor recorded there.
                Received::Auth(_) if text.len() > MAX_AUTH_FRAME_BYTES => {
                    Err(ApiError::new(ErrorCode::TooLarge, format!("an `auth` frame is larger than {MAX_AUTH_FRAME_BYTES} bytes")).into())
                }
                received => Ok(received),
            }
        }
        Some(Ok(Message::Binary(bytes))) => {
            D::of_bytes(bytes).map(Received::Frame).ok_or_else(|| unreadable("frames from clients are JSON text".to_owned()))
        }
        Some(Ok(Message::Ping(_) | Message::Pong(_))) => Ok(Received::Nothing),
        Some(Ok(Message::Close(_))) | None => Err(End::normal()),
        Some(Err(error)) if is_too_big(&error) => {
            Err(ApiError::new(ErrorCode::TooLarge, format!("a frame is larger than {MAX_FRAME_BYTES} bytes")).into())
        }
        Some(Err(error)) => Err(unreadable(error.to_string())),
    }
}

/// The library's own error type isn't ours to name; these words of it are held by a test.
fn is_too_big(error: &axum::Error) -> bool {
    error.to_string().contains("too long")
}

/// What is wrong with a frame. Nothing of its contents is repeated, because it may be a token.
fn complaint<D: Dialect>(text: &str, error: &serde_json::Error) -> String {
    let frame: serde_json::Value = match serde_json::from_str(text) {
        Ok(frame) => frame,
        Err(e) => return format!("it is not JSON (at column {})", e.column()),
    };
    match frame.get("type").and_then(serde_json::Value::as_str) {
        Some(kind) if D::TYPES.contains(&kind) => describe_parse_error(&format!("`{kind}`"), &error.to_string()),
        Some(kind) => {
            let shown: String = kind.escape_default().take(MAX_SHOWN_CHARS).collect();
            format!("`{shown}` is not a type of frame; known are {}", D::TYPES.join(", "))
        }
        None => "it must be an object with a `type`".to_owned(),
    }
}

pub fn encode<R: Serialize>(frame: &ServerFrame<R>) -> Message {
    // Strings, numbers and maps with string keys always serialise.
    Message::Text(Utf8Bytes::from(serde_json::to_string(frame).unwrap_or_default()))
}

pub async fn send(sink: &mut Sink, message: Message) -> Result<(), End> {
    sink.send(message).await.map_err(|_| End::normal())
}

/// Says why, closes, and waits a moment for the client to have heard it.
pub async fn goodbye<D: Dialect>(sink: &mut Sink, stream: &mut Stream, end: End, open: Option<OpenStream>, request_id: &RequestId) {
    let reason = end.error.as_ref().map_or("", |e| e.code.as_str());
    let farewell = async {
        let (said, code) = D::farewell(&end, request_id);
        if let Some(said) = said {
            send(sink, said).await?;
        }
        send(sink, Message::Close(Some(CloseFrame { code, reason: Utf8Bytes::from_static(reason) }))).await?;
        // It has been told, which is all that an ending sandbox waits for.
        drop(open);
        while let Some(Ok(_)) = stream.next().await {}
        Ok::<(), End>(())
    };
    // A client that doesn't listen any more has nothing to be told.
    let _ = tokio::time::timeout(GOODBYE_WITHIN, farewell).await;
}

#[cfg(test)]
mod tests {
    use serde::de::IgnoredAny;

    use super::*;

    #[test]
    fn an_auth_frame_longer_than_the_gateway_reads_is_refused_and_other_frames_may_be_longer() {
        let received = |text: String| receive::<ClientFrame<IgnoredAny>>(Some(Ok(Message::text(text))));
        let auth = |length: usize| {
            let text = r#"{"type":"auth","token":"t"}"#;
            format!("{}{text}", " ".repeat(length - text.len()))
        };
        assert!(matches!(received(auth(MAX_AUTH_FRAME_BYTES)), Ok(Received::Auth(_))));
        let end = received(auth(MAX_AUTH_FRAME_BYTES + 1)).err().unwrap();
        assert_eq!((end.code, end.error.unwrap().code), (close::TOO_BIG, ErrorCode::TooLarge));
        let long = format!(r#"{{"type":"stdin","data":"{}"}}"#, "x".repeat(MAX_AUTH_FRAME_BYTES));
        assert!(matches!(received(long), Ok(Received::Frame(ClientFrame::Stdin { .. }))));
    }
}
