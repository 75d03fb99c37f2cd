//! Tests of terminals over a WebSocket: real programs in a real pty, from the first frame to the close code.

mod support;

use std::time::{Duration, Instant};

use cobox_protocol::{
    Secret, Timestamp,
    control::{Revocation, StopReason},
    frame::{self, ShellReady, ShellStart, close, frame_bytes},
};
use futures_util::{SinkExt, StreamExt};
use http::{Method, StatusCode};
use support::{EVERYTHING, SOON, TestBoxd};
use tokio::net::UnixStream;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{self, Message, client::IntoClientRequest},
};

type ClientFrame = frame::ClientFrame<ShellStart>;
type ServerFrame = frame::ServerFrame<ShellReady>;

struct Client {
    socket: WebSocketStream<UnixStream>,
    output: Vec<u8>,
}

impl Client {
    async fn dial(boxd: &TestBoxd, token: Option<&Secret>) -> Result<Self, tungstenite::Error> {
        let mut request = "ws://boxd/v1/shell/ws".into_client_request()?;
        if let Some(token) = token {
            request.headers_mut().insert("authorization", format!("Bearer {}", token.expose()).parse().unwrap());
        }
        let (socket, _) = tokio_tungstenite::client_async(request, boxd.dial("clients").await).await?;
        Ok(Self { socket, output: Vec::new() })
    }

    async fn started(boxd: &TestBoxd, start: ShellStart) -> Self {
        let mut client = Self::dial(boxd, Some(&boxd.token(EVERYTHING))).await.unwrap();
        client.send(ClientFrame::Start(start)).await;
        assert!(matches!(client.next().await, ServerFrame::Ready(ShellReady { offset: 0, .. })));
        client
    }

    async fn send(&mut self, frame: ClientFrame) {
        self.socket.send(Message::text(serde_json::to_string(&frame).unwrap())).await.unwrap();
    }

    async fn type_in(&mut self, text: &str) {
        self.send(ClientFrame::stdin(text.as_bytes(), None)).await;
    }

    async fn message(&mut self) -> Message {
        tokio::time::timeout(SOON, self.socket.next()).await.expect("a frame arrives in time").expect("the socket is open").unwrap()
    }

    async fn next(&mut self) -> ServerFrame {
        match self.message().await {
            Message::Text(text) => serde_json::from_str(&text).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    /// Reads output until it contains a text. Every frame must continue where the last ended.
    async fn read_until(&mut self, text: &str) {
        while !String::from_utf8_lossy(&self.output).contains(text) {
            match self.next().await {
                ServerFrame::Stdout { offset, data, data_b64 } => {
                    assert_eq!(offset, self.output.len() as u64);
                    self.output.extend(frame_bytes(data.as_deref(), data_b64.as_deref()).unwrap());
                }
                ServerFrame::Resized { .. } | ServerFrame::Control { .. } => {}
                other => panic!("{other:?} while waiting for {text}; so far {}", String::from_utf8_lossy(&self.output)),
            }
        }
    }

    /// Skips output and returns the next frame of another kind.
    async fn answer(&mut self) -> ServerFrame {
        loop {
            match self.next().await {
                ServerFrame::Stdout { offset, data, data_b64 } => {
                    assert_eq!(offset, self.output.len() as u64);
                    self.output.extend(frame_bytes(data.as_deref(), data_b64.as_deref()).unwrap());
                }
                ServerFrame::Resized { .. } => {}
                other => return other,
            }
        }
    }

    /// The code of an error frame, if any, and the close code.
    async fn end(&mut self) -> (Option<String>, u16) {
        let mut error_code = None;
        loop {
            match self.message().await {
                Message::Text(text) => {
                    if let ServerFrame::Error { error } = serde_json::from_str(&text).unwrap() {
                        error_code = Some(error.code);
                    }
                }
                Message::Close(frame) => return (error_code, frame.unwrap().code.into()),
                _ => {}
            }
        }
    }
}

fn running(command: &str) -> ShellStart {
    ShellStart { command: Some(command.into()), ..Default::default() }
}

async fn wait_until_gone(pid: &str) {
    let stat = format!("/proc/{}/stat", pid.trim());
    let gone = async {
        while std::fs::read_to_string(&stat).is_ok_and(|s| !s.contains(") Z ")) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, gone).await.expect("the process ends");
}

#[tokio::test]
async fn a_shell_receives_input_and_reports_its_exit_code() {
    let boxd = TestBoxd::start();
    let mut client = Client::started(&boxd, ShellStart { cols: Some(100), rows: Some(30), ..Default::default() }).await;
    client.type_in("stty size; echo héllo-$((40+2))\n").await;
    client.read_until("30 100").await;
    client.read_until("héllo-42").await;
    client.send(ClientFrame::Ping { id: Some(7.into()) }).await;
    assert!(matches!(client.answer().await, ServerFrame::Pong { id: Some(id) } if id == 7));
    client.type_in("exit 5\n").await;
    assert!(matches!(client.answer().await, ServerFrame::Exit { exit_code: 5, signal: None, .. }));
    assert_eq!(client.end().await, (None, 1000));
    tokio::time::timeout(SOON, boxd.idle()).await.unwrap();
}

#[tokio::test]
async fn a_size_a_signal_and_binary_input_reach_the_program() {
    let boxd = TestBoxd::start();
    let script = "trap 'stty size' WINCH; trap 'echo got-usr1; exit 9' USR1; printf 'ready\\377\\n'; while :; do sleep 0.01; done";
    let mut client = Client::started(&boxd, running(script)).await;
    client.read_until("ready").await;
    client.send(ClientFrame::Resize { cols: 132, rows: 50 }).await;
    client.read_until("50 132").await;
    assert!(client.output.contains(&0xff));
    client.send(ClientFrame::Resize { cols: 0, rows: 50 }).await;
    assert!(matches!(client.answer().await, ServerFrame::Error { error } if error.code == "INVALID_REQUEST"));
    client.send(ClientFrame::Signal { signal: "USR1".into() }).await;
    client.read_until("got-usr1").await;
    assert!(matches!(client.answer().await, ServerFrame::Exit { exit_code: 9, .. }));
}

#[tokio::test]
async fn the_first_frame_may_carry_the_token_and_input_starts_a_default_shell() {
    let boxd = TestBoxd::start();
    let mut client = Client::dial(&boxd, None).await.unwrap();
    client.send(ClientFrame::Auth { token: boxd.token(EVERYTHING) }).await;
    match client.next().await {
        ServerFrame::AuthOk { session_id, capabilities } => {
            assert_eq!((session_id.as_deref(), capabilities), (Some("ssn_1"), EVERYTHING.parse().unwrap()));
        }
        other => panic!("{other:?}"),
    }
    client.type_in("echo de\"faul\"ts\n").await;
    assert!(matches!(client.next().await, ServerFrame::Ready(ShellReady { cols: 80, rows: 24, .. })));
    client.read_until("defaults").await;
    client.send(ClientFrame::Close).await;
    assert_eq!(client.end().await, (None, 1000));
}

#[tokio::test]
async fn a_shell_requires_a_valid_token() {
    let boxd = TestBoxd::start();
    let refused = |error| match error {
        tungstenite::Error::Http(response) => response.status(),
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(Client::dial(&boxd, Some(&Secret::new("x.y.z"))).await.err().unwrap()), StatusCode::UNAUTHORIZED);
    assert_eq!(refused(Client::dial(&boxd, Some(&boxd.token("exec fs_read"))).await.err().unwrap()), StatusCode::FORBIDDEN);
    boxd.get("/v1/shell/ws").send().await.refused(400, "INVALID_REQUEST");

    for (frame, code, error_code) in [
        (ClientFrame::Auth { token: Secret::new("x.y.z") }, close::UNAUTHENTICATED, "UNAUTHENTICATED"),
        (ClientFrame::Auth { token: boxd.token("exec fs_read") }, close::CAPABILITY, "CAPABILITY_DENIED"),
        (ClientFrame::Start(ShellStart::default()), close::UNAUTHENTICATED, "UNAUTHENTICATED"),
    ] {
        let mut client = Client::dial(&boxd, None).await.unwrap();
        client.send(frame).await;
        assert_eq!(client.end().await, (Some(error_code.to_owned()), code));
    }
    let mut client = Client::dial(&boxd, None).await.unwrap();
    client.socket.send(Message::text("not json")).await.unwrap();
    assert_eq!(client.end().await, (Some("INVALID_REQUEST".to_owned()), close::INVALID));
}

#[tokio::test]
async fn an_unreadable_frame_is_described_in_the_error_without_its_content() {
    let boxd = TestBoxd::start();
    for (frame, words) in [
        (r#"{"type":"dance"}"#, "unknown frame type `dance`; known types are auth, start"),
        (r#"{"type":"resize","cols":"secret"}"#, "`resize`: must be a whole number"),
        (r#"{"token":"secret"}"#, "must be an object with a `type`"),
        ("secret", "is not JSON"),
        (r#"{"type":"auth","token":"cbx_secret"}"#, "a sandbox takes tokens only"),
    ] {
        let mut client = Client::dial(&boxd, None).await.unwrap();
        client.socket.send(Message::text(frame)).await.unwrap();
        match client.next().await {
            ServerFrame::Error { error } => {
                assert!(error.message.contains(words) && !error.message.contains("secret"), "{}", error.message);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn an_ending_sandbox_sends_the_reason_before_the_broker_proceeds() {
    for (ending, error_code, code) in
        [(StopReason::Ended, "SESSION_EXPIRED", close::ENDED), (StopReason::Suspended, "PROVIDER_UNAVAILABLE", close::GOING_AWAY)]
    {
        let mut boxd = TestBoxd::start();
        let mut client = Client::started(&boxd, running("cat")).await;
        boxd.state.stop_reason = Some(ending);
        assert_eq!(boxd.push().await.open_streams, 0, "answered when all streams have been notified");
        // The frames were already sent: boxd may be killed now.
        boxd.served.take().unwrap().abort();
        assert_eq!(client.end().await, (Some(error_code.to_owned()), code));
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_its_close_frame_does_not_delay_the_end() {
    let mut boxd = TestBoxd::start();
    let mut client = Client::started(&boxd, running("echo ready; yes")).await;
    client.read_until("ready").await;
    boxd.state.stop_reason = Some(StopReason::Ended);
    // The client reads nothing, so a server that waits for it would block until it disconnects.
    tokio::time::timeout(SOON, boxd.push()).await.expect("the broker receives a response while the client is still connected");
}

#[tokio::test]
async fn a_connection_without_an_auth_frame_is_closed_after_five_seconds() {
    let boxd = TestBoxd::start();
    let mut client = Client::dial(&boxd, None).await.unwrap();
    let since = Instant::now();
    assert_eq!(client.end().await, (Some("UNAUTHENTICATED".to_owned()), close::AUTH_TIMEOUT));
    assert!(since.elapsed() >= Duration::from_millis(4900));
}

#[tokio::test]
async fn a_stream_ends_with_its_token_unless_it_is_renewed() {
    let boxd = TestBoxd::start();
    let mut short = boxd.claims("shell");
    short.exp = Timestamp::now().unix() + 2;
    let token = boxd.key.mint(&short);
    let mut left = Client::dial(&boxd, Some(&token)).await.unwrap();
    let mut renewed = Client::dial(&boxd, Some(&token)).await.unwrap();
    for (client, name) in [(&mut left, "left"), (&mut renewed, "renewed")] {
        client.send(ClientFrame::Start(ShellStart { shell: Some(name.into()), ..running("cat") })).await;
        assert!(matches!(client.next().await, ServerFrame::Ready(_)));
    }
    let mut other = boxd.claims("shell");
    other.sub = "mallory".into();
    renewed.send(ClientFrame::Auth { token: boxd.key.mint(&other) }).await;
    assert!(matches!(renewed.next().await, ServerFrame::Error { error } if error.code == "FORBIDDEN"));
    renewed.send(ClientFrame::Auth { token: boxd.token("shell") }).await;
    assert!(matches!(renewed.next().await, ServerFrame::AuthOk { .. }));

    assert_eq!(left.end().await, (Some("TOKEN_EXPIRED".to_owned()), close::UNAUTHENTICATED));
    let late = Timestamp::now().unix() - short.exp;
    assert!((0..=2).contains(&late), "{late} s after the token's end");
    renewed.type_in("still here\n").await;
    renewed.read_until("still here").await;
}

#[tokio::test]
async fn a_revoked_token_ends_its_open_shell_within_a_second() {
    let mut boxd = TestBoxd::start();
    let mut client = Client::started(&boxd, running("echo pid=$$.; cat")).await;
    client.read_until(".").await;
    let pushed = Instant::now();
    boxd.revoke(vec![Revocation::Principal("ada".into())]).await;
    assert_eq!(client.end().await, (Some("TOKEN_REVOKED".to_owned()), close::ENDED));
    assert!(pushed.elapsed() < Duration::from_secs(1));
}

#[tokio::test]
async fn revocation_also_disconnects_a_client_that_reads_nothing() {
    let mut boxd = TestBoxd::start();
    let mut client = Client::started(&boxd, running("echo pid=$$.; yes")).await;
    client.read_until(".").await;
    boxd.revoke(vec![Revocation::Grant("grant-1".into())]).await;
    tokio::time::timeout(SOON, boxd.idle()).await.unwrap();
}

#[tokio::test]
async fn a_shell_outlives_its_client_and_ends_on_request() {
    let boxd = TestBoxd::start();
    let mut client = Client::started(&boxd, running("trap '' HUP; echo pid=$$.; while :; do sleep 1; done")).await;
    client.read_until(".").await;
    let text = String::from_utf8(client.output.clone()).unwrap();
    let pid = text.split_once("pid=").unwrap().1.split_once('.').unwrap().0.to_owned();
    drop(client);
    tokio::time::timeout(SOON, boxd.idle()).await.unwrap();
    assert!(std::path::Path::new(&format!("/proc/{pid}")).exists());
    boxd.call(Method::DELETE, "/v1/shells/main").send().await.ok(204);
    wait_until_gone(&pid).await;
    boxd.get("/v1/shells/main").send().await.refused(404, "SHELL_NOT_FOUND");
}

#[tokio::test]
async fn a_large_paste_arrives_whole() {
    let boxd = TestBoxd::start();
    let mut client = Client::started(&boxd, running("stty raw -echo; echo go; head -c 2000000 | cksum")).await;
    client.read_until("go").await;
    let paste = "0123456789".repeat(50_000);
    for _ in 0..4 {
        client.type_in(&paste).await;
    }
    let sum = std::process::Command::new("sh").args(["-c", "yes 0123456789 | tr -d '\\n' | head -c 2000000 | cksum"]).output().unwrap();
    client.read_until(String::from_utf8(sum.stdout).unwrap().trim()).await;
    assert!(matches!(client.answer().await, ServerFrame::Exit { exit_code: 0, .. }));
}

#[tokio::test]
async fn an_oversized_frame_is_refused() {
    let boxd = TestBoxd::start();
    let mut client = Client::started(&boxd, running("cat")).await;
    let frame = format!("{{\"type\":\"stdin\",\"data\":\"{}\"}}", "x".repeat(1024 * 1024));
    // The server may close before it has received everything.
    let _ = client.socket.send(Message::text(frame)).await;
    assert_eq!(client.end().await, (Some("TOO_LARGE".to_owned()), close::TOO_BIG));
    assert!(client.output.is_empty(), "none of it reaches the program");
    tokio::time::timeout(SOON, boxd.idle()).await.unwrap();
}

#[tokio::test]
async fn boxd_closes_its_shells_with_a_reconnect_code_at_shutdown() {
    let mut boxd = TestBoxd::start();
    let mut client = Client::started(&boxd, running("cat")).await;
    boxd.shutdown.cancel();
    assert_eq!(client.end().await, (None, close::GOING_AWAY));
    tokio::time::timeout(SOON, boxd.served.take().unwrap()).await.unwrap().unwrap().unwrap();
}
