//! A client of `WS /v1/exec/ws` that checks a guarantee of the protocol: each stream continues exactly where it was.

use cobox_protocol::{
    Secret,
    frame::{self, BinaryFrame, BinaryKind, ExecReady, ExecStart, OutputStream, frame_bytes},
};
use futures_util::{SinkExt, StreamExt};
use tokio::net::UnixStream;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{self, Message, client::IntoClientRequest},
};

use super::{EVERYTHING, SOON, TestBoxd};

pub type ClientFrame = frame::ClientFrame<ExecStart>;
pub type ServerFrame = frame::ServerFrame<ExecReady>;

pub struct ExecClient {
    pub socket: WebSocketStream<UnixStream>,
    pub ready: ExecReady,
    /// Output of this connection, and the offset of the next byte of each stream.
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub stdout_at: u64,
    pub stderr_at: u64,
    pub gaps: Vec<(OutputStream, u64, u64)>,
}

impl ExecClient {
    pub async fn dial(boxd: &TestBoxd, token: &Secret) -> WebSocketStream<UnixStream> {
        let mut request = "ws://boxd/v1/exec/ws".into_client_request().unwrap();
        request.headers_mut().insert("authorization", format!("Bearer {}", token.expose()).parse().unwrap());
        tokio_tungstenite::client_async(request, boxd.dial("clients").await).await.unwrap().0
    }

    pub async fn start(boxd: &TestBoxd, start: ExecStart) -> Self {
        Self::try_start(boxd, start).await.unwrap()
    }

    pub async fn start_as(boxd: &TestBoxd, token: &Secret, start: ExecStart) -> Self {
        Self::try_start_as(boxd, token, start).await.unwrap()
    }

    /// An error is the code of the error frame received instead of `ready`.
    pub async fn try_start(boxd: &TestBoxd, start: ExecStart) -> Result<Self, String> {
        Self::try_start_as(boxd, &boxd.token(EVERYTHING), start).await
    }

    async fn try_start_as(boxd: &TestBoxd, token: &Secret, start: ExecStart) -> Result<Self, String> {
        let socket = Self::dial(boxd, token).await;
        let ready = ExecReady { command_id: String::new(), pid: 0, stdout_offset: 0, stderr_offset: 0 };
        let mut client = Self { socket, ready, stdout: vec![], stderr: vec![], stdout_at: 0, stderr_at: 0, gaps: vec![] };
        client.send(ClientFrame::Start(start)).await;
        match client.message().await.map(|m| serde_json::from_str(m.to_text().unwrap()).unwrap()) {
            Some(ServerFrame::Ready(ready)) => {
                (client.stdout_at, client.stderr_at) = (ready.stdout_offset, ready.stderr_offset);
                client.ready = ready;
                Ok(client)
            }
            Some(ServerFrame::Error { error }) => Err(error.code),
            other => panic!("{other:?}"),
        }
    }

    pub async fn send(&mut self, frame: ClientFrame) {
        self.socket.send(Message::text(serde_json::to_string(&frame).unwrap())).await.unwrap();
    }

    /// `None` when the connection has ended.
    pub async fn message(&mut self) -> Option<Message> {
        match tokio::time::timeout(SOON, self.socket.next()).await.expect("a frame arrives in time") {
            Some(Ok(Message::Close(_))) | None => None,
            Some(Err(tungstenite::Error::ConnectionClosed | tungstenite::Error::AlreadyClosed)) => None,
            Some(message) => Some(message.unwrap()),
        }
    }

    /// Stores output until a frame of another kind arrives; `None` when the connection has ended.
    pub async fn answer(&mut self) -> Option<ServerFrame> {
        loop {
            if let Some(frame) = self.step().await? {
                return Some(frame);
            }
        }
    }

    /// Handles one message. Output is stored and returns no frame.
    pub async fn step(&mut self) -> Option<Option<ServerFrame>> {
        let message = self.message().await?;
        if let Message::Binary(bytes) = &message {
            let frame = BinaryFrame::parse(bytes).unwrap();
            let stream = if frame.kind == BinaryKind::Stdout { OutputStream::Stdout } else { OutputStream::Stderr };
            self.append(stream, frame.offset, frame.bytes);
            return Some(None);
        }
        match serde_json::from_str(message.to_text().unwrap()).unwrap() {
            ServerFrame::Stdout { offset, data, data_b64 } => {
                self.append(OutputStream::Stdout, offset, &frame_bytes(data.as_deref(), data_b64.as_deref()).unwrap());
            }
            ServerFrame::Stderr { offset, data, data_b64 } => {
                self.append(OutputStream::Stderr, offset, &frame_bytes(data.as_deref(), data_b64.as_deref()).unwrap());
            }
            ServerFrame::Gap { from, to, stream } => {
                let stream = stream.unwrap();
                let at = if stream == OutputStream::Stdout { &mut self.stdout_at } else { &mut self.stderr_at };
                assert!(from == *at && to > from, "a gap from {from} to {to} at {at}");
                *at = to;
                self.gaps.push((stream, from, to));
            }
            other => return Some(Some(other)),
        }
        Some(None)
    }

    fn append(&mut self, stream: OutputStream, offset: u64, bytes: &[u8]) {
        let (all, at) = match stream {
            OutputStream::Stdout => (&mut self.stdout, &mut self.stdout_at),
            OutputStream::Stderr => (&mut self.stderr, &mut self.stderr_at),
        };
        assert_eq!(offset, *at, "no byte is duplicated or missing");
        *at += bytes.len() as u64;
        all.extend_from_slice(bytes);
    }

    pub async fn ack(&mut self) {
        let offset = self.stdout_at;
        self.send(ClientFrame::Ack { offset, stream: None }).await;
    }

    pub async fn read_until(&mut self, text: &str) {
        while !String::from_utf8_lossy(&self.stdout).contains(text) {
            let step = self.step().await;
            assert!(matches!(step, Some(None)), "{step:?} while waiting for {text}; so far {}", String::from_utf8_lossy(&self.stdout));
        }
    }

    /// Reads to the exit. Returns its code and signal, and whether the command timed out.
    pub async fn exit(&mut self) -> (i32, Option<i32>, bool) {
        loop {
            match self.answer().await {
                Some(ServerFrame::Exit { exit_code, signal, timed_out }) => {
                    assert_eq!(self.message().await, None, "nothing is sent after the exit");
                    return (exit_code, signal, timed_out);
                }
                Some(ServerFrame::StdinAck { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

pub fn command(command: &str) -> ExecStart {
    ExecStart { command: Some(command.into()), ..Default::default() }
}

pub fn named(id: &str, start: ExecStart) -> ExecStart {
    ExecStart { command_id: Some(id.into()), ..start }
}
