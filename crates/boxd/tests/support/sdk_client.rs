//! A client of `WS /execute/ws` that counts offsets as the LangSmith SDKs do: in bytes of the received text.

use cobox_protocol::langsmith::exec::LangsmithServerFrame;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{self, Message, client::IntoClientRequest},
};

use super::{EVERYTHING, SOON, TestBoxd};

pub struct SdkClient {
    pub socket: WebSocketStream<UnixStream>,
    pub command_id: String,
    pub pid: i32,
    pub stdout: String,
    pub stderr: String,
    /// The offset of the next byte of each stream.
    pub stdout_at: u64,
    pub stderr_at: u64,
    pub close_code: Option<u16>,
}

/// How a stream ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    Exit(i32),
    /// An `error` frame, with its type and message.
    Error(String, String),
    /// Closed without a final frame.
    Closed,
}

impl SdkClient {
    pub async fn dial(boxd: &TestBoxd) -> Self {
        let mut request = "ws://boxd/execute/ws".into_client_request().unwrap();
        request.headers_mut().insert("authorization", format!("Bearer {}", boxd.token(EVERYTHING).expose()).parse().unwrap());
        let socket = tokio_tungstenite::client_async(request, boxd.dial("clients").await).await.unwrap().0;
        let (command_id, stdout, stderr) = (String::new(), String::new(), String::new());
        Self { socket, command_id, pid: 0, stdout, stderr, stdout_at: 0, stderr_at: 0, close_code: None }
    }

    /// Runs a command. `more` are further fields of the first frame.
    pub async fn run(boxd: &TestBoxd, command: &str, more: Value) -> Self {
        let mut client = Self::dial(boxd).await;
        let mut first = json!({ "type": "execute", "command": command, "shell": "/bin/bash" });
        first.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        client.begin(first).await.unwrap();
        client
    }

    pub async fn reconnect(boxd: &TestBoxd, command_id: &str, stdout_at: u64, stderr_at: u64) -> Result<Self, Ended> {
        let mut client = Self { stdout_at, stderr_at, ..Self::dial(boxd).await };
        let first = json!({ "type": "reconnect", "command_id": command_id, "stdout_offset": stdout_at, "stderr_offset": stderr_at });
        client.begin(first).await.map(|()| client)
    }

    pub async fn begin(&mut self, first: Value) -> Result<(), Ended> {
        self.send(first).await;
        match self.next().await {
            Some(LangsmithServerFrame::Started { command_id, pid }) => {
                (self.command_id, self.pid) = (command_id, pid);
                Ok(())
            }
            Some(LangsmithServerFrame::Error { error_type, error }) => Err(Ended::Error(error_type, error)),
            None => Err(Ended::Closed),
            other => panic!("{other:?} in place of `started`"),
        }
    }

    pub async fn send(&mut self, frame: Value) {
        self.socket.send(Message::text(frame.to_string())).await.unwrap();
    }

    pub async fn next(&mut self) -> Option<LangsmithServerFrame> {
        match tokio::time::timeout(SOON, self.socket.next()).await.expect("a frame arrives in time") {
            Some(Ok(Message::Text(text))) => {
                assert!(text.len() < 1 << 20, "the SDK accepts no frame of 1 MiB");
                Some(serde_json::from_str(&text).unwrap())
            }
            Some(Ok(Message::Close(frame))) => {
                self.close_code = frame.map(|f| f.code.into());
                None
            }
            None | Some(Err(tungstenite::Error::ConnectionClosed | tungstenite::Error::AlreadyClosed)) => None,
            other => panic!("{other:?}"),
        }
    }

    /// Stores output until another frame arrives.
    pub async fn step(&mut self) -> Option<Ended> {
        let (stream, at, data, offset) = match self.next().await {
            Some(LangsmithServerFrame::Stdout { data, offset }) => (&mut self.stdout, &mut self.stdout_at, data, offset),
            Some(LangsmithServerFrame::Stderr { data, offset }) => (&mut self.stderr, &mut self.stderr_at, data, offset),
            Some(LangsmithServerFrame::Exit { exit_code }) => return Some(Ended::Exit(exit_code)),
            Some(LangsmithServerFrame::Error { error_type, error }) => return Some(Ended::Error(error_type, error)),
            Some(other) => panic!("{other:?}"),
            None => return Some(Ended::Closed),
        };
        assert_eq!(offset, *at, "no byte is duplicated or missing");
        *at += data.len() as u64;
        stream.push_str(&data);
        None
    }

    pub async fn end(&mut self) -> Ended {
        loop {
            if let Some(ended) = self.step().await {
                return ended;
            }
        }
    }

    pub async fn read_until(&mut self, text: &str) {
        while !self.stdout.contains(text) {
            let step = self.step().await;
            assert_eq!(step, None, "while waiting for {text}; so far {}", self.stdout);
        }
    }
}
