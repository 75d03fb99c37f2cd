//! WebSocket frames: reading, writing, and closing a connection.

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

pub type SocketSink = SplitSink<WebSocket, Message>;
pub type SocketStream = SplitStream<WebSocket>;

/// Time for a client to take the last frames and answer the close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum length of an unknown frame's type when it is repeated in the error.
const MAX_SHOWN_CHARS: usize = 64;
const NORMAL: u16 = 1000;

/// Why a connection ends: the close code, and the error frame to send before it, if any.
#[derive(Debug)]
pub struct CloseReason {
    pub code: u16,
    pub error: Option<ApiError>,
}

impl CloseReason {
    pub fn with_code(code: u16) -> Self {
        Self { code, error: None }
    }
    /// The normal end; also used where the client is gone and will not read the code.
    pub fn normal() -> Self {
        Self::with_code(NORMAL)
    }
}

impl From<ApiError> for CloseReason {
    fn from(error: ApiError) -> Self {
        Self { code: close::code_for(error.code), error: Some(error) }
    }
}

/// The protocol that a socket's clients speak: the frames they send, and how errors are reported to them.
pub trait FrameProtocol: DeserializeOwned + Send {
    /// The known values of a frame's `type`.
    const TYPES: &'static [&'static str];

    /// Separates the frames that every socket answers itself from those of the conversation.
    fn classify(self) -> ReceivedFrame<Self>;

    /// Converts a binary frame, for protocols in which clients send them.
    fn from_binary(bytes: Bytes) -> Option<Self> {
        drop(bytes);
        None
    }

    fn error(error: &ApiError, request_id: &RequestId) -> Message {
        encode(&ServerFrame::<()>::Error { error: error.envelope(request_id).error })
    }

    /// The last message and the close code.
    fn close_message(end: &CloseReason, request_id: &RequestId) -> (Option<Message>, u16) {
        (end.error.as_ref().map(|error| Self::error(error, request_id)), end.code)
    }
}

impl<S: DeserializeOwned + Send> FrameProtocol for ClientFrame<S> {
    const TYPES: &'static [&'static str] = &CLIENT_FRAME_TYPES;

    fn classify(self) -> ReceivedFrame<Self> {
        match self {
            ClientFrame::Auth { token } => ReceivedFrame::Auth(token),
            ClientFrame::Ping { id } => ReceivedFrame::Ping(id),
            ClientFrame::Close => ReceivedFrame::Close,
            frame => ReceivedFrame::Frame(frame),
        }
    }
}

pub enum ReceivedFrame<D> {
    Auth(Secret),
    Ping(Option<serde_json::Value>),
    Close,
    Frame(D),
    /// A frame of the WebSocket's own keep-alive.
    KeepAlive,
}

/// Decodes a message from the socket.
pub fn receive<D: FrameProtocol>(message: Option<Result<Message, axum::Error>>) -> Result<ReceivedFrame<D>, CloseReason> {
    let unreadable = |why: String| CloseReason::from(ApiError::invalid(format!("invalid frame: {why}")));
    match message {
        Some(Ok(Message::Text(text))) => {
            let frame: D = serde_json::from_str(&text).map_err(|e| unreadable(describe_frame_error::<D>(&text, &e)))?;
            match frame.classify() {
                // A frame this large bypassed the gateway, which neither checked nor recorded its token.
                ReceivedFrame::Auth(_) if text.len() > MAX_AUTH_FRAME_BYTES => {
                    Err(ApiError::new(ErrorCode::TooLarge, format!("an `auth` frame is larger than {MAX_AUTH_FRAME_BYTES} bytes")).into())
                }
                received => Ok(received),
            }
        }
        Some(Ok(Message::Binary(bytes))) => {
            D::from_binary(bytes).map(ReceivedFrame::Frame).ok_or_else(|| unreadable("frames from clients are JSON text".to_owned()))
        }
        Some(Ok(Message::Ping(_) | Message::Pong(_))) => Ok(ReceivedFrame::KeepAlive),
        Some(Ok(Message::Close(_))) | None => Err(CloseReason::normal()),
        Some(Err(error)) if is_too_big(&error) => {
            Err(ApiError::new(ErrorCode::TooLarge, format!("a frame is larger than {MAX_FRAME_BYTES} bytes")).into())
        }
        Some(Err(error)) => Err(unreadable(error.to_string())),
    }
}

/// Matches on the message because the library's error type can't be named here; a test pins this text.
fn is_too_big(error: &axum::Error) -> bool {
    error.to_string().contains("too long")
}

/// Describes the error in a frame. The frame's contents are not repeated, because they may include a token.
fn describe_frame_error<D: FrameProtocol>(text: &str, error: &serde_json::Error) -> String {
    let frame: serde_json::Value = match serde_json::from_str(text) {
        Ok(frame) => frame,
        Err(e) => return format!("it is not JSON (at column {})", e.column()),
    };
    match frame.get("type").and_then(serde_json::Value::as_str) {
        Some(frame_type) if D::TYPES.contains(&frame_type) => describe_parse_error(&format!("`{frame_type}`"), &error.to_string()),
        Some(frame_type) => {
            let shown: String = frame_type.escape_default().take(MAX_SHOWN_CHARS).collect();
            format!("unknown frame type `{shown}`; known types are {}", D::TYPES.join(", "))
        }
        None => "it must be an object with a `type`".to_owned(),
    }
}

pub fn encode<R: Serialize>(frame: &ServerFrame<R>) -> Message {
    // Strings, numbers and maps with string keys always serialise.
    Message::Text(Utf8Bytes::from(serde_json::to_string(frame).unwrap_or_default()))
}

pub async fn send(sink: &mut SocketSink, message: Message) -> Result<(), CloseReason> {
    sink.send(message).await.map_err(|_| CloseReason::normal())
}

/// Sends the reason, closes, and gives the client a moment to receive it.
pub async fn close_connection<D: FrameProtocol>(
    sink: &mut SocketSink,
    stream: &mut SocketStream,
    end: CloseReason,
    open: Option<OpenStream>,
    request_id: &RequestId,
) {
    let reason = end.error.as_ref().map_or("", |e| e.code.as_str());
    let close_handshake = async {
        let (last_message, code) = D::close_message(&end, request_id);
        if let Some(last_message) = last_message {
            send(sink, last_message).await?;
        }
        send(sink, Message::Close(Some(CloseFrame { code, reason: Utf8Bytes::from_static(reason) }))).await?;
        // The client has been notified, which is all that a sandbox that is ending waits for.
        drop(open);
        while let Some(Ok(_)) = stream.next().await {}
        Ok::<(), CloseReason>(())
    };
    // A client that no longer reads can't be notified.
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, close_handshake).await;
}

#[cfg(test)]
mod tests {
    use serde::de::IgnoredAny;

    use super::*;

    #[test]
    fn an_auth_frame_beyond_the_gateways_limit_is_refused_and_other_frames_may_be_longer() {
        let received = |text: String| receive::<ClientFrame<IgnoredAny>>(Some(Ok(Message::text(text))));
        let auth = |length: usize| {
            let text = r#"{"type":"auth","token":"t"}"#;
            format!("{}{text}", " ".repeat(length - text.len()))
        };
        assert!(matches!(received(auth(MAX_AUTH_FRAME_BYTES)), Ok(ReceivedFrame::Auth(_))));
        let end = received(auth(MAX_AUTH_FRAME_BYTES + 1)).err().unwrap();
        assert_eq!((end.code, end.error.unwrap().code), (close::TOO_BIG, ErrorCode::TooLarge));
        let long = format!(r#"{{"type":"stdin","data":"{}"}}"#, "x".repeat(MAX_AUTH_FRAME_BYTES));
        assert!(matches!(received(long), Ok(ReceivedFrame::Frame(ClientFrame::Stdin { .. }))));
    }
}
