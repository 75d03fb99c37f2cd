//! A terminal connected to a shell's WebSocket. It renders the output and detects every missing or repeated byte.

use std::collections::VecDeque;

use base64::{Engine, engine::general_purpose::STANDARD};
use cobox_protocol::{
    Secret,
    frame::{self, BinaryFrame, BinaryKind, ControlAction, Controller, ShellReady, ShellStart, frame_bytes},
};
use futures_util::{SinkExt, StreamExt};
use tokio::net::UnixStream;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, client::IntoClientRequest},
};

use super::{SOON, TestBoxd};

pub type ClientFrame = frame::ClientFrame<ShellStart>;
pub type ServerFrame = frame::ServerFrame<ShellReady>;

pub struct Viewer {
    pub socket: WebSocketStream<UnixStream>,
    pub ready: ShellReady,
    /// The expected offset of the next byte.
    pub next: u64,
    /// Output since `ready` or the last keyframe.
    pub output: Vec<u8>,
    pub keyframes: u32,
    pub screen: vt100::Parser,
    /// Received frames other than output that were not read yet.
    pub frames: VecDeque<ServerFrame>,
    pub closed: Option<u16>,
}

impl Viewer {
    pub async fn attach(boxd: &TestBoxd, token: &Secret, start: ShellStart) -> Self {
        let mut socket = connect(boxd, token).await;
        socket.send(text(&ClientFrame::Start(start))).await.unwrap();
        let ready = match socket.next().await.expect("the socket is open").unwrap() {
            Message::Text(text) => match serde_json::from_str(&text).unwrap() {
                ServerFrame::Ready(ready) => ready,
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        };
        let screen = vt100::Parser::new(ready.rows, ready.cols, 0);
        let next = ready.offset;
        Self { socket, ready, next, output: Vec::new(), keyframes: 0, screen, frames: VecDeque::new(), closed: None }
    }

    /// The error code and close code returned for a refused `start`.
    pub async fn refused(boxd: &TestBoxd, token: &Secret, start: ShellStart) -> (Option<String>, u16) {
        let mut socket = connect(boxd, token).await;
        socket.send(text(&ClientFrame::Start(start))).await.unwrap();
        let mut error_code = None;
        loop {
            match socket.next().await.expect("the socket is open").unwrap() {
                Message::Text(text) => match serde_json::from_str(&text).unwrap() {
                    ServerFrame::Error { error } => error_code = Some(error.code),
                    other => panic!("{other:?}"),
                },
                Message::Close(frame) => return (error_code, frame.unwrap().code.into()),
                _ => {}
            }
        }
    }

    pub async fn send(&mut self, frame: ClientFrame) {
        self.socket.send(text(&frame)).await.unwrap();
    }

    pub async fn type_in(&mut self, keys: &str) {
        self.send(ClientFrame::stdin(keys.as_bytes(), None)).await;
    }

    pub async fn control(&mut self, action: ControlAction) {
        self.send(ClientFrame::Control { action }).await;
    }

    /// Handles the next message; `false` when the socket has closed.
    pub async fn step(&mut self) -> bool {
        let message = tokio::time::timeout(SOON, self.socket.next()).await;
        match message.unwrap_or_else(|_| panic!("nothing arrives; so far {:?}", String::from_utf8_lossy(&self.output))) {
            Some(Ok(message)) => self.take(message),
            _ => false,
        }
    }

    pub fn take(&mut self, message: Message) -> bool {
        match message {
            Message::Text(text) => match serde_json::from_str::<ServerFrame>(&text).unwrap() {
                ServerFrame::Stdout { offset, data, data_b64 } => {
                    self.printed(offset, &frame_bytes(data.as_deref(), data_b64.as_deref()).unwrap());
                }
                ServerFrame::Keyframe { offset, cols, rows, data_b64 } => {
                    self.screen.screen_mut().set_size(rows, cols);
                    self.redraw(offset, &STANDARD.decode(data_b64).unwrap());
                }
                other => {
                    if let ServerFrame::Resized { cols, rows, .. } = other {
                        self.screen.screen_mut().set_size(rows, cols);
                    }
                    self.frames.push_back(other);
                }
            },
            Message::Binary(bytes) => {
                let BinaryFrame { kind, offset, bytes } = BinaryFrame::parse(&bytes).unwrap();
                match kind {
                    BinaryKind::Stdout => self.printed(offset, bytes),
                    BinaryKind::Keyframe => self.redraw(offset, bytes),
                    BinaryKind::Stderr => panic!("a shell has one output"),
                }
            }
            Message::Close(frame) => {
                self.closed = Some(frame.unwrap().code.into());
                return false;
            }
            _ => {}
        }
        true
    }

    fn printed(&mut self, offset: u64, bytes: &[u8]) {
        assert_eq!(offset, self.next, "each frame continues where the last ended");
        self.next += bytes.len() as u64;
        self.output.extend_from_slice(bytes);
        self.screen.process(bytes);
    }

    fn redraw(&mut self, offset: u64, ansi: &[u8]) {
        self.keyframes += 1;
        self.output.clear();
        self.next = offset;
        self.screen.process(ansi);
    }

    pub async fn read_until(&mut self, text: &str) {
        while !String::from_utf8_lossy(&self.output).contains(text) {
            assert!(self.step().await, "closed ({:?}) while waiting for {text}", self.closed);
        }
    }

    pub async fn shows(&mut self, text: &str) {
        while !self.screen.screen().contents().contains(text) {
            assert!(self.step().await, "closed ({:?}) while waiting for {text}", self.closed);
        }
    }

    /// The next matching frame other than output.
    pub async fn frame<T>(&mut self, fits: impl Fn(&ServerFrame) -> Option<T>) -> T {
        loop {
            while let Some(frame) = self.frames.pop_front() {
                if let Some(found) = fits(&frame) {
                    return found;
                }
            }
            assert!(self.step().await, "closed ({:?})", self.closed);
        }
    }

    pub async fn error(&mut self) -> (String, String) {
        self.frame(|frame| match frame {
            ServerFrame::Error { error } => Some((error.code.clone(), error.message.clone())),
            _ => None,
        })
        .await
    }

    pub async fn controller(&mut self) -> Option<Controller> {
        self.frame(|frame| match frame {
            ServerFrame::Control { controller, .. } => Some(controller.clone()),
            _ => None,
        })
        .await
    }

    pub async fn resized(&mut self) -> (u16, u16) {
        self.frame(|frame| match frame {
            ServerFrame::Resized { cols, rows, .. } => Some((*cols, *rows)),
            _ => None,
        })
        .await
    }

    /// Reads until the close code.
    pub async fn end(&mut self) -> Option<u16> {
        while self.step().await {}
        self.closed
    }
}

async fn connect(boxd: &TestBoxd, token: &Secret) -> WebSocketStream<UnixStream> {
    let mut request = "ws://boxd/v1/shell/ws".into_client_request().unwrap();
    request.headers_mut().insert("authorization", format!("Bearer {}", token.expose()).parse().unwrap());
    tokio_tungstenite::client_async(request, boxd.dial("clients").await).await.unwrap().0
}

fn text(frame: &ClientFrame) -> Message {
    Message::text(serde_json::to_string(frame).unwrap())
}
