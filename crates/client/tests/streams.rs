//! Streams against a real WebSocket server that the test controls: what survives a lost connection, and how permanent failures are reported.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    extract::{
        State, WebSocketUpgrade,
        ws::{CloseFrame, Message, WebSocket},
    },
    http::HeaderMap,
    routing::{get, post},
};
use cobox_client::{Client, ClientError, Dataplane, ExecEvent, Reconnect, ShellEvent};
use cobox_protocol::{
    ApiError, ErrorCode, RequestId, SandboxId, Secret, SessionId, ShellId, Timestamp,
    frame::{
        BinaryFrame, BinaryKind, ClientFrame, ControlAction, Controller, ExecReady, ExecStart, OutputStream, ServerFrame, ShellReady,
        ShellStart,
    },
    key::PrincipalKind,
    session::{Mode, NegotiateRequest},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// Maximum wait of a test for one condition.
const EVENT_TIMEOUT: Duration = Duration::from_secs(20);

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(EVENT_TIMEOUT, what).await.expect("it happens in time")
}

/// Server end of one connection; dropping it cuts the connection.
struct Peer {
    socket: WebSocket,
    token: String,
}

impl Peer {
    async fn frame<S: DeserializeOwned>(&mut self) -> ClientFrame<S> {
        loop {
            match soon(self.socket.recv()).await.expect("a frame").expect("a frame") {
                Message::Text(text) => return serde_json::from_str(&text).unwrap(),
                Message::Close(_) => panic!("the client closed"),
                _ => {}
            }
        }
    }

    async fn start<S: DeserializeOwned>(&mut self) -> S {
        match self.frame().await {
            ClientFrame::Start(start) => start,
            _ => panic!("the first frame is `start`"),
        }
    }

    /// Next input frame, as text.
    async fn stdin(&mut self) -> (u64, String) {
        loop {
            match self.frame::<Value>().await {
                ClientFrame::Stdin { data, seq, .. } => return (seq.unwrap(), data.unwrap()),
                ClientFrame::Ack { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    async fn send<R: Serialize>(&mut self, frame: &ServerFrame<R>) {
        self.socket.send(Message::text(serde_json::to_string(frame).unwrap())).await.unwrap();
    }

    async fn binary(&mut self, kind: BinaryKind, offset: u64, bytes: &[u8]) {
        let mut message = BinaryFrame::head(kind, offset).to_vec();
        message.extend_from_slice(bytes);
        self.socket.send(Message::binary(message)).await.unwrap();
    }

    async fn out(&mut self, offset: u64, bytes: &[u8]) {
        self.binary(BinaryKind::Stdout, offset, bytes).await;
    }

    async fn close(mut self, code: u16) {
        self.socket.send(Message::Close(Some(CloseFrame { code, reason: "".into() }))).await.unwrap();
        while let Some(Ok(_)) = soon(self.socket.recv()).await {}
    }

    async fn exec_ready(&mut self, start: &ExecStart) {
        let (stdout_offset, stderr_offset) = (start.stdout_from.unwrap_or(0), start.stderr_from.unwrap_or(0));
        let command_id = start.command_id.clone().unwrap();
        self.send(&ServerFrame::Ready(ExecReady { command_id, pid: 7, stdout_offset, stderr_offset })).await;
    }

    async fn shell_ready(&mut self, id: &ShellId, epoch: &str, offset: u64) {
        let ready = ShellReady { shell_id: id.clone(), epoch: epoch.into(), offset, cols: 80, rows: 24, controller: None, yours: None };
        self.send(&ServerFrame::Ready(ready)).await;
    }
}

struct Stub {
    url: String,
    connections: mpsc::UnboundedReceiver<Peer>,
    refreshes: Arc<AtomicU32>,
}

#[derive(Clone)]
struct Shared {
    url: String,
    peers: mpsc::UnboundedSender<Peer>,
    refreshes: Arc<AtomicU32>,
}

impl Stub {
    async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (peers, connections) = mpsc::unbounded_channel();
        let refreshes = Arc::new(AtomicU32::new(0));
        let app = Router::new()
            .route("/dp/{id}/v1/exec/ws", get(upgrade))
            .route("/dp/{id}/v1/shell/ws", get(upgrade))
            .route("/v1/sandbox/sessions", post(negotiate))
            .route("/v1/sandbox/sessions/{id}/refresh", post(refresh))
            .with_state(Shared { url: url.clone(), peers, refreshes: refreshes.clone() });
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { url, connections, refreshes }
    }

    fn client(&self) -> Client {
        Client::new(&self.url, Secret::new("cbx_key")).unwrap()
    }

    fn sandbox(&self) -> Dataplane {
        self.client().sandbox(&SandboxId::new())
    }

    async fn peer(&mut self) -> Peer {
        soon(self.connections.recv()).await.unwrap()
    }
}

async fn upgrade(State(shared): State<Shared>, headers: HeaderMap, upgrade: WebSocketUpgrade) -> axum::response::Response {
    let token = headers["authorization"].to_str().unwrap().trim_start_matches("Bearer ").to_owned();
    upgrade.on_upgrade(async move |socket| shared.peers.send(Peer { socket, token }).unwrap_or(()))
}

async fn negotiate(State(shared): State<Shared>) -> Json<Value> {
    let (session, sandbox, at) = (SessionId::new(), SandboxId::new(), Timestamp::now().plus(Duration::from_secs(900)));
    let base = format!("{}/dp/{sandbox}/v1", shared.url);
    Json(json!({
        "session_id": session, "thread_id": "t", "token": "token-0", "expires_at": at, "refresh_before": at, "scopes": [],
        "sandbox": {"id": sandbox, "provider": "local", "http_base_url": base, "ws_base_url": base},
        "binding": {"id": session, "scope": {"type": "thread", "id": "t"}, "sandbox_id": sandbox, "provider": "local", "state": "active", "lease_expires_at": at},
        "dataplane": {"http_base_url": base, "ws_base_url": base},
        "credentials": {"token_type": "Bearer", "access_token": "token-0", "expires_at": at, "granted_capabilities": ["exec"]},
        "policy": {"idle_timeout_seconds": 900, "hard_ttl_seconds": 28800},
    }))
}

async fn refresh(State(shared): State<Shared>) -> Json<Value> {
    let at = Timestamp::now().plus(Duration::from_secs(900));
    let n = shared.refreshes.fetch_add(1, Ordering::SeqCst) + 1;
    Json(json!({"token": format!("token-{n}"), "expires_at": at, "refresh_before": at}))
}

fn argv() -> ExecStart {
    ExecStart { argv: Some(vec!["make".into()]), ..ExecStart::default() }
}

/// Collects output until the stream is over.
async fn to_the_end(mut output: cobox_client::ExecOutput) -> (Vec<u8>, Vec<u8>, Vec<String>) {
    let (mut out, mut err, mut rest) = (Vec::new(), Vec::new(), Vec::new());
    while let Some(event) = soon(output.next()).await {
        match event {
            Ok(ExecEvent::Stdout(bytes)) => out.extend_from_slice(&bytes),
            Ok(ExecEvent::Stderr(bytes)) => err.extend_from_slice(&bytes),
            Ok(ExecEvent::Started { .. }) => rest.push("started".into()),
            Ok(ExecEvent::Gap { from, to, .. }) => rest.push(format!("gap {from} {to}")),
            Ok(ExecEvent::Reconnecting { .. }) => rest.push("lost".into()),
            Ok(ExecEvent::Reconnected) => rest.push("back".into()),
            Ok(ExecEvent::Refused(failure)) => rest.push(failure.code),
            Ok(ExecEvent::Exit { exit_code, .. }) => rest.push(format!("exit {exit_code}")),
            Err(e) => rest.push(e.to_string()),
        }
    }
    (out, err, rest)
}

fn exited(exit_code: i32) -> ServerFrame<()> {
    ServerFrame::Exit { exit_code, signal: None, timed_out: false }
}

#[tokio::test]
async fn a_cut_exec_stream_resumes_at_its_offset_and_the_command_never_runs_twice() {
    let mut stub = Stub::start().await;
    let exec = stub.sandbox().exec_stream(argv()).await.unwrap();
    let collecting = tokio::spawn(to_the_end(exec.output));

    let mut first = stub.peer().await;
    let start: ExecStart = first.start().await;
    assert!(start.binary && start.command_id.as_deref().unwrap().starts_with("cmd_"));
    assert_eq!(start.argv, argv().argv);
    // Cut before the response: the command may run, so the client only joins it by id.
    drop(first);
    let mut second = stub.peer().await;
    let again: ExecStart = second.start().await;
    assert_eq!((&again.command_id, &again.client, &again.argv), (&start.command_id, &start.client, &None));
    second.exec_ready(&again).await;
    second.out(0, b"one ").await;
    second.binary(BinaryKind::Stderr, 0, b"warn").await;
    second.out(4, b"two ").await;
    // The client has received both once it has acknowledged them.
    let mut acked = [0, 0];
    while acked != [8, 4] {
        if let ClientFrame::Ack { offset, stream } = second.frame::<Value>().await {
            acked[usize::from(stream == Some(OutputStream::Stderr))] = offset;
        }
    }
    drop(second);

    let mut third = stub.peer().await;
    let joins: ExecStart = third.start().await;
    assert_eq!((joins.stdout_from, joins.stderr_from), (Some(8), Some(4)));
    assert_eq!((&joins.command_id, &joins.argv), (&start.command_id, &None), "an ID alone joins and does not start");
    third.exec_ready(&joins).await;
    // Repeated bytes are not delivered twice.
    third.out(4, b"two three").await;
    third.send(&exited(3)).await;
    let (out, err, rest) = collecting.await.unwrap();
    assert_eq!((out.as_slice(), err.as_slice()), (b"one two three".as_slice(), b"warn".as_slice()));
    assert_eq!(rest, ["lost", "back", "started", "lost", "back", "exit 3"]);
}

#[tokio::test]
async fn a_gap_is_reported_and_missing_bytes_without_one_are_an_error() {
    let mut stub = Stub::start().await;
    let exec = stub.sandbox().exec_stream(argv()).await.unwrap();
    let mut peer = stub.peer().await;
    let start = peer.start().await;
    peer.exec_ready(&start).await;
    peer.send(&ServerFrame::<()>::Gap { from: 0, to: 10, stream: None }).await;
    peer.out(10, b"x").await;
    peer.out(12, b"z").await;
    let (out, _, rest) = to_the_end(exec.output).await;
    assert_eq!(out, b"x");
    assert_eq!(rest, ["started", "gap 0 10", "bytes 11 to 12 of the output are missing"]);
}

#[tokio::test]
async fn unacknowledged_input_and_its_end_are_resent_with_the_same_sequence_numbers() {
    let mut stub = Stub::start().await;
    let exec = stub.sandbox().exec_stream(argv()).await.unwrap();
    let collecting = tokio::spawn(to_the_end(exec.output));
    let mut peer = stub.peer().await;
    let start = peer.start().await;
    peer.exec_ready(&start).await;
    exec.input.stdin(b"a").await.unwrap();
    exec.input.stdin(b"b").await.unwrap();
    exec.input.close_stdin().await.unwrap();
    assert_eq!((peer.stdin().await, peer.stdin().await), ((1, "a".into()), (2, "b".into())));
    assert!(matches!(peer.frame::<Value>().await, ClientFrame::CloseStdin));
    peer.send(&ServerFrame::<()>::StdinAck { seq: 1 }).await;
    peer.out(0, b".").await;
    while !matches!(peer.frame::<Value>().await, ClientFrame::Ack { .. }) {}
    drop(peer);

    let mut peer = stub.peer().await;
    let start = peer.start().await;
    peer.exec_ready(&start).await;
    assert_eq!(peer.stdin().await, (2, "b".into()));
    assert!(matches!(peer.frame::<Value>().await, ClientFrame::CloseStdin));
    peer.send(&exited(0)).await;
    collecting.await.unwrap();
}

#[tokio::test]
async fn input_beyond_the_window_blocks_the_sender_but_not_the_output() {
    let mut stub = Stub::start().await;
    let mut exec = stub.sandbox().exec_stream(argv()).await.unwrap();
    let input = exec.input.clone();
    let sending = tokio::spawn(async move { input.stdin(&vec![b'x'; 64 << 20]).await });
    let mut peer = stub.peer().await;
    let start = peer.start().await;
    peer.exec_ready(&start).await;
    let taken = soon(async {
        let mut taken = 0;
        for n in 0..200 {
            peer.out(n, b"y").await;
            // Reads the input that arrives with the output; it must stop at the send window.
            while let Ok(Some(Ok(message))) = tokio::time::timeout(Duration::from_millis(2), peer.socket.recv()).await {
                if let Message::Text(text) = message {
                    taken += text.len() * usize::from(text.contains("stdin"));
                }
            }
        }
        taken
    })
    .await;
    assert!(taken < 1 << 20, "{taken} bytes were sent without an acknowledgement");
    for _ in 0..201 {
        soon(exec.output.next()).await.unwrap().unwrap();
    }
    assert!(!sending.is_finished());
    // A signal does not wait behind input.
    exec.input.signal("INT").await.unwrap();
    while !matches!(peer.frame::<Value>().await, ClientFrame::Signal { signal } if signal == "INT".into()) {}
    peer.send(&exited(0)).await;
    assert!(matches!(soon(exec.output.next()).await, Some(Ok(ExecEvent::Exit { .. }))));
    assert!(soon(exec.output.next()).await.is_none());
    assert!(soon(sending).await.unwrap().is_err(), "the stream has ended");
}

#[tokio::test]
async fn an_error_before_ready_ends_the_stream_and_one_after_it_is_an_event() {
    let mut stub = Stub::start().await;
    let refusal = |code| ServerFrame::<()>::Error { error: ApiError::new(code, "because").envelope(&RequestId::new()).error };
    let mut exec = stub.sandbox().exec_stream(argv()).await.unwrap();
    let mut peer = stub.peer().await;
    peer.start::<ExecStart>().await;
    peer.send(&refusal(ErrorCode::InvalidRequest)).await;
    peer.close(1007).await;
    assert!(matches!(soon(exec.output.next()).await, Some(Err(e)) if e.is(ErrorCode::InvalidRequest)));
    assert!(soon(exec.output.next()).await.is_none());

    let exec = stub.sandbox().exec_stream(argv()).await.unwrap();
    let mut peer = stub.peer().await;
    let start = peer.start().await;
    peer.exec_ready(&start).await;
    peer.send(&refusal(ErrorCode::Forbidden)).await;
    peer.send(&exited(0)).await;
    assert_eq!(to_the_end(exec.output).await.2, ["started", "FORBIDDEN", "exit 0"]);
}

#[tokio::test]
async fn a_command_that_may_have_run_is_not_run_again() {
    let mut stub = Stub::start().await;
    let refusal = |code| ServerFrame::<()>::Error { error: ApiError::new(code, "because").envelope(&RequestId::new()).error };
    let mut exec = stub.sandbox().exec_stream(argv()).await.unwrap();
    // The command is sent, and the sandbox dies before it responds; the next sandbox does not know the command.
    stub.peer().await.start::<ExecStart>().await;
    let mut peer = stub.peer().await;
    assert_eq!(peer.start::<ExecStart>().await.argv, None);
    peer.send(&refusal(ErrorCode::CommandNotFound)).await;
    peer.close(1007).await;
    assert!(matches!(soon(exec.output.next()).await, Some(Ok(ExecEvent::Reconnecting { .. }))));
    let error = soon(exec.output.next()).await.unwrap().unwrap_err();
    assert!(matches!(&error, ClientError::MayHaveRun { command_id } if *command_id == exec.command_id), "{error}");

    // After an explicit refusal the command has not run, so it is sent again.
    let exec = stub.sandbox().exec_stream(argv()).await.unwrap();
    let mut peer = stub.peer().await;
    peer.start::<ExecStart>().await;
    peer.send(&refusal(ErrorCode::RateLimited)).await;
    peer.close(1013).await;
    let mut peer = stub.peer().await;
    let start: ExecStart = peer.start().await;
    assert_eq!(start.argv, argv().argv);
    peer.exec_ready(&start).await;
    peer.send(&exited(0)).await;
    assert_eq!(to_the_end(exec.output).await.2, ["lost", "back", "started", "exit 0"]);
}

#[tokio::test]
async fn a_refused_token_is_replaced_once() {
    let mut stub = Stub::start().await;
    let request = NegotiateRequest::new("t", Mode::Ensure);
    let session = stub.client().open(&request).await.unwrap();
    let exec = session.dataplane().exec_stream(argv()).await.unwrap();
    let mut peer = stub.peer().await;
    peer.start::<ExecStart>().await;
    assert_eq!(peer.token, "token-0");
    peer.close(4401).await;
    let mut peer = stub.peer().await;
    assert_eq!(peer.start::<ExecStart>().await.argv, argv().argv, "the command did not run");
    assert_eq!(peer.token, "token-1");
    peer.close(4401).await;
    let (_, _, rest) = to_the_end(exec.output).await;
    assert_eq!(rest.len(), 2, "{rest:?}");
    assert!(rest[1].contains("4401"), "{rest:?}");
    assert_eq!(stub.refreshes.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn reconnecting_gives_up_after_the_limit_and_final_errors_are_reported_immediately() {
    let mut stub = Stub::start().await;
    let policy = Reconnect { give_up_after: Duration::from_millis(400), ..Reconnect::default() };
    let exec = stub.sandbox().with_reconnect(policy).exec_stream(argv()).await.unwrap();
    let collecting = tokio::spawn(to_the_end(exec.output));
    // A server that accepts connections but sends no output does not count as success.
    let rest = loop {
        if collecting.is_finished() {
            break collecting.await.unwrap().2;
        }
        if let Ok(Some(mut peer)) = tokio::time::timeout(Duration::from_millis(100), stub.connections.recv()).await {
            let start = peer.start().await;
            peer.exec_ready(&start).await;
        }
    };
    assert!(rest.last().unwrap().contains("could not be restored"), "{rest:?}");

    for (code, words) in [(4403, "allow"), (4409, "replaced by another connection"), (4410, "ended")] {
        let exec = stub.sandbox().exec_stream(argv()).await.unwrap();
        let mut peer = stub.peer().await;
        peer.start::<ExecStart>().await;
        peer.close(code).await;
        let (_, _, rest) = to_the_end(exec.output).await;
        assert!(rest.len() == 1 && rest[0].contains(words), "{code}: {rest:?}");
    }
}

#[tokio::test]
async fn a_silent_connection_is_replaced() {
    let mut stub = Stub::start().await;
    let policy = Reconnect { silence: Duration::from_millis(300), ..Reconnect::default() };
    let exec = stub.sandbox().with_reconnect(policy).exec_stream(argv()).await.unwrap();
    let collecting = tokio::spawn(to_the_end(exec.output));
    // Never read and never written, so the ping is not answered.
    let _silent = stub.peer().await;
    let mut peer = stub.peer().await;
    let start = peer.start().await;
    peer.exec_ready(&start).await;
    peer.send(&exited(0)).await;
    assert_eq!(collecting.await.unwrap().2, ["lost", "back", "started", "exit 0"]);
}

#[tokio::test]
async fn a_shell_stream_resumes_by_shell_id_epoch_and_offset() {
    let mut stub = Stub::start().await;
    let start = ShellStart { shell: Some("main".into()), command: Some("top".into()), cols: Some(80), ..ShellStart::default() };
    let mut shell = stub.sandbox().shell(start).await.unwrap();
    let id = ShellId::new();
    let mut peer = stub.peer().await;
    let first: ShellStart = peer.start().await;
    assert_eq!((first.shell.as_deref(), first.from, first.binary), (Some("main"), None, true));
    peer.shell_ready(&id, "e1", 100).await;
    peer.out(100, b"$ ").await;
    assert!(matches!(soon(shell.output.next()).await, Some(Ok(ShellEvent::Ready(_)))));
    assert!(matches!(soon(shell.output.next()).await, Some(Ok(ShellEvent::Output(b))) if b == "$ "));
    shell.input.resize(90, 30).await.unwrap();
    shell.input.stdin(b"ls\r").await.unwrap();
    while !matches!(peer.frame::<Value>().await, ClientFrame::Stdin { .. }) {}
    drop(peer);

    let mut peer = stub.peer().await;
    let again: ShellStart = peer.start().await;
    assert_eq!((again.shell.as_deref(), again.epoch.as_deref(), again.from), (Some(id.as_str()), Some("e1"), Some(102)));
    assert_eq!((again.cols, again.rows, &again.client, again.command), (Some(90), Some(30), &first.client, None));
    peer.shell_ready(&id, "e1", 102).await;
    assert_eq!(peer.stdin().await, (1, "ls\r".into()));
    let controller = Controller { principal: "ada".into(), actor: PrincipalKind::Human };
    peer.send(&ServerFrame::<()>::Control { controller: Some(controller), yours: Some(false) }).await;
    // The client is too far behind: it receives the screen instead, preceded by its size.
    peer.send(&ServerFrame::<()>::Resized { offset: 5000, cols: 100, rows: 40 }).await;
    peer.binary(BinaryKind::Keyframe, 5000, b"screen").await;
    peer.out(5000, b"more").await;
    let mut seen = Vec::new();
    while seen.len() < 6 {
        seen.push(soon(shell.output.next()).await.unwrap().unwrap());
    }
    assert!(matches!(&seen[0], ShellEvent::Reconnecting { .. }), "{seen:?}");
    assert!(matches!(&seen[1], ShellEvent::Reconnected), "{seen:?}");
    assert!(matches!(&seen[2], ShellEvent::Control { controller: Some(c), yours: Some(false) } if c.principal == "ada"), "{seen:?}");
    assert!(matches!(&seen[3], ShellEvent::Resized { cols: 100, rows: 40 }), "{seen:?}");
    assert!(matches!(&seen[4], ShellEvent::Keyframe { cols: 100, rows: 40, bytes } if bytes == "screen"), "{seen:?}");
    assert!(matches!(&seen[5], ShellEvent::Output(b) if b == "more"), "{seen:?}");

    shell.input.control(ControlAction::Take).await.unwrap();
    while !matches!(peer.frame::<Value>().await, ClientFrame::Control { action: ControlAction::Take }) {}
    peer.send(&exited(7)).await;
    assert!(matches!(soon(shell.output.next()).await, Some(Ok(ShellEvent::Exit { exit_code: 7, .. }))));
}

#[tokio::test]
async fn keystrokes_from_an_outage_are_sent_if_recent_and_otherwise_dropped_with_a_notice() {
    let mut stub = Stub::start().await;
    let key_age = Duration::from_millis(300);
    let policy = Reconnect { key_age, ..Reconnect::default() };
    let mut shell = stub.sandbox().with_reconnect(policy).shell(ShellStart::default()).await.unwrap();
    let id = ShellId::new();
    let mut peer = stub.peer().await;
    peer.start::<ShellStart>().await;
    peer.shell_ready(&id, "e", 0).await;
    assert!(matches!(soon(shell.output.next()).await, Some(Ok(ShellEvent::Ready(_)))));
    drop(peer);
    assert!(matches!(soon(shell.output.next()).await, Some(Ok(ShellEvent::Reconnecting { .. }))));
    shell.input.stdin(b"old").await.unwrap();
    let mut peer = stub.peer().await;
    peer.start::<ShellStart>().await;
    // Only time makes keystrokes old.
    tokio::time::sleep(key_age * 2).await;
    shell.input.stdin(b"new").await.unwrap();
    peer.shell_ready(&id, "e", 0).await;
    assert_eq!(peer.stdin().await, (2, "new".into()));
    assert!(matches!(soon(shell.output.next()).await, Some(Ok(ShellEvent::Reconnected))));
    assert!(matches!(soon(shell.output.next()).await, Some(Ok(ShellEvent::InputDropped { bytes: 3 }))));
}

#[tokio::test]
async fn leaving_a_shell_closes_the_connection_without_an_error() {
    let mut stub = Stub::start().await;
    let mut shell = stub.sandbox().shell(ShellStart::default()).await.unwrap();
    let mut peer = stub.peer().await;
    peer.start::<ShellStart>().await;
    peer.shell_ready(&ShellId::new(), "e", 0).await;
    shell.input.close().await.unwrap();
    assert!(matches!(peer.frame::<Value>().await, ClientFrame::Close));
    peer.close(1000).await;
    assert!(matches!(soon(shell.output.next()).await, Some(Ok(ShellEvent::Ready(_)))));
    assert!(soon(shell.output.next()).await.is_none());
    assert!(matches!(shell.input.stdin(b"x").await, Err(ClientError::Closed { .. })));
}
