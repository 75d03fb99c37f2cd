//! The client against a small real server: retries, token refresh and error reports.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    extract::{
        Request, State, WebSocketUpgrade,
        ws::{Message, WebSocket},
    },
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use cobox_client::{Client, ClientError, ShellEvent, Upload};
use cobox_protocol::{
    ApiError, ErrorCode, RequestId, SandboxId, Secret, SessionId, ShellId, Timestamp,
    exec::ExecRequest,
    frame::{self, OutputStream, ShellReady, ShellStart},
    session::{Mode, NegotiateRequest},
};
use futures_util::StreamExt;
use serde_json::{Value, json};
use tokio::sync::mpsc;

type ClientFrame = frame::ClientFrame<ShellStart>;
type ServerFrame = frame::ServerFrame<ShellReady>;

/// Acts as broker and sandbox in one, and records the requests.
struct Stub {
    address: SocketAddr,
    refreshes: AtomicU32,
    execs: AtomicU32,
    starting: AtomicU32,
    /// Lifetime of its tokens, in seconds.
    ttl: AtomicU32,
    /// Idle timeout of its sandbox, in seconds.
    idle: AtomicU32,
    heartbeats: tokio::sync::Notify,
    uploads: Mutex<Vec<Vec<u8>>>,
    frames: mpsc::UnboundedSender<ClientFrame>,
}

impl Stub {
    fn token(&self) -> String {
        format!("token-{}", self.refreshes.load(Ordering::SeqCst))
    }
    fn expires(&self) -> Timestamp {
        Timestamp::now().plus(Duration::from_secs(self.ttl.load(Ordering::SeqCst).into()))
    }
    fn client(&self) -> Client {
        Client::new(&format!("http://{}/", self.address), Secret::new("cbx_key")).unwrap()
    }
}

type Stubbed = State<Arc<Stub>>;

async fn start() -> (Arc<Stub>, mpsc::UnboundedReceiver<ClientFrame>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (frames, seen) = mpsc::unbounded_channel();
    let stub = Arc::new(Stub {
        address: listener.local_addr().unwrap(),
        refreshes: AtomicU32::new(0),
        execs: AtomicU32::new(0),
        starting: AtomicU32::new(0),
        ttl: AtomicU32::new(900),
        idle: AtomicU32::new(900),
        heartbeats: tokio::sync::Notify::new(),
        uploads: Mutex::default(),
        frames,
    });
    let app = Router::new()
        .route("/v1/sandbox/sessions", post(negotiate))
        .route("/v1/sandbox/sessions/{id}", get(negotiate))
        .route("/v1/sandbox/sessions/{id}/refresh", post(refresh))
        .route("/v1/sandbox/sessions/{id}/heartbeat", post(heartbeat))
        .route("/dp/v1/exec", post(exec))
        .route("/dp/v1/files/{*path}", any(file))
        .route("/dp/v1/shell/ws", get(shell))
        .route("/v1/sandboxes/{id}", get(async || (StatusCode::BAD_GATEWAY, "<html>proxy\x1b[2J</html>")))
        .with_state(stub.clone());
    tokio::spawn(async move { axum::serve(listener, app).await });
    (stub, seen)
}

fn refuse(code: ErrorCode) -> Response {
    let error = ApiError::new(code, "because");
    let mut response = (StatusCode::from_u16(code.status()).unwrap(), Json(error.envelope(&RequestId::new()))).into_response();
    if error.retry_after.is_some() {
        response.headers_mut().insert("retry-after", "0".parse().unwrap());
    }
    response
}

fn bearer(headers: &HeaderMap) -> &str {
    headers["authorization"].to_str().unwrap().strip_prefix("Bearer ").unwrap()
}

async fn negotiate(State(stub): Stubbed, headers: HeaderMap) -> Response {
    assert_eq!(bearer(&headers), "cbx_key");
    if stub.starting.load(Ordering::SeqCst) > 0 {
        stub.starting.fetch_sub(1, Ordering::SeqCst);
        return refuse(ErrorCode::SandboxStarting);
    }
    let (session, sandbox, base) = (SessionId::new(), SandboxId::new(), format!("http://{}/dp/v1", stub.address));
    let (at, token) = (stub.expires(), stub.token());
    Json(json!({
        "session_id": session, "thread_id": "t", "token": token, "expires_at": at, "refresh_before": at, "scopes": [],
        "sandbox": {"id": sandbox, "provider": "local", "http_base_url": base, "ws_base_url": base},
        "binding": {"id": session, "scope": {"type": "thread", "id": "t"}, "sandbox_id": sandbox, "provider": "local", "state": "active", "lease_expires_at": at},
        "dataplane": {"http_base_url": base, "ws_base_url": base},
        "credentials": {"token_type": "Bearer", "access_token": token, "expires_at": at, "granted_capabilities": ["exec"]},
        "policy": {"idle_timeout_seconds": stub.idle.load(Ordering::SeqCst), "hard_ttl_seconds": 28800},
    }))
    .into_response()
}

async fn refresh(State(stub): Stubbed) -> Json<Value> {
    stub.refreshes.fetch_add(1, Ordering::SeqCst);
    stub.ttl.store(900, Ordering::SeqCst);
    Json(json!({"token": stub.token(), "expires_at": stub.expires(), "refresh_before": stub.expires()}))
}

async fn heartbeat(State(stub): Stubbed) -> Json<Value> {
    stub.heartbeats.notify_one();
    Json(json!({"lease_expires_at": stub.expires(), "state": "active"}))
}

/// `argv[0]` selects the behavior of the sandbox.
async fn exec(State(stub): Stubbed, headers: HeaderMap, Json(request): Json<ExecRequest>) -> Response {
    let nth = stub.execs.fetch_add(1, Ordering::SeqCst);
    match request.argv.unwrap()[0].as_str() {
        "over-quota" => refuse(ErrorCode::QuotaExceeded),
        "first-token-is-stale" if bearer(&headers) == "token-0" => refuse(ErrorCode::TokenExpired),
        "always-expired" => refuse(ErrorCode::TokenExpired),
        "starts-at-the-third-try" if nth < 2 => refuse(ErrorCode::SandboxStarting),
        "never-starts" => refuse(ErrorCode::SandboxStarting),
        "denied" => refuse(ErrorCode::CapabilityDenied),
        _ => Json(json!({"stdout": bearer(&headers), "stderr": "", "exit_code": 0, "timed_out": false, "truncated": false,
            "duration_ms": 1, "command_id": "cmd_00000000000000000000000000"}))
        .into_response(),
    }
}

async fn file(State(stub): Stubbed, request: Request) -> Response {
    if bearer(request.headers()) == "token-0" {
        return refuse(ErrorCode::TokenExpired);
    }
    let path = request.uri().path().to_owned();
    if request.method() == "GET" {
        return ([("x-file-mode", "640")], path).into_response();
    }
    let mode = request.headers()["x-file-mode"].to_str().unwrap().to_owned();
    let length: u64 = request.headers()["content-length"].to_str().unwrap().parse().unwrap();
    let body = axum::body::to_bytes(request.into_body(), 1 << 20).await.unwrap();
    assert_eq!(body.len() as u64, length);
    stub.uploads.lock().unwrap().push(body.to_vec());
    Json(json!({"path": path, "size": length, "etag": mode})).into_response()
}

async fn shell(State(stub): Stubbed, headers: HeaderMap, upgrade: WebSocketUpgrade) -> Response {
    assert_eq!(bearer(&headers), "token-0");
    upgrade.on_upgrade(async move |mut socket: WebSocket| {
        while let Some(Ok(Message::Text(text))) = socket.recv().await {
            let frame: ClientFrame = serde_json::from_str(&text).unwrap();
            let mut replies = Vec::new();
            match &frame {
                ClientFrame::Start(_) => {
                    let shell_id = ShellId::new();
                    let ready = ShellReady { shell_id, epoch: "e".into(), offset: 0, cols: 80, rows: 24, controller: None, yours: None };
                    replies.push(ServerFrame::Ready(ready));
                    replies.push(ServerFrame::output(OutputStream::Stdout, 0, b"$ \xff"));
                }
                ClientFrame::Stdin { .. } => replies.push(ServerFrame::Exit { exit_code: 7, signal: None, timed_out: false }),
                _ => {}
            }
            if !matches!(frame, ClientFrame::Ack { .. }) {
                stub.frames.send(frame).unwrap();
            }
            for reply in replies {
                socket.send(Message::text(serde_json::to_string(&reply).unwrap())).await.unwrap();
            }
        }
    })
}

fn ensure() -> NegotiateRequest {
    NegotiateRequest::new("t", Mode::Ensure)
}

fn argv(word: &str) -> ExecRequest {
    ExecRequest { argv: Some(vec![word.to_owned()]), ..ExecRequest::default() }
}

#[tokio::test]
async fn an_expired_token_is_refreshed_once_and_the_call_repeated() {
    let (stub, _) = start().await;
    let session = stub.client().open(&ensure()).await.unwrap();
    let answer = session.dataplane().exec(&argv("first-token-is-stale")).await.unwrap();
    assert_eq!(answer.stdout, "token-1");
    assert_eq!(session.token().expose(), "token-1");

    let error = session.dataplane().exec(&argv("always-expired")).await.unwrap_err();
    assert!(error.is(ErrorCode::TokenExpired));
    assert_eq!(stub.refreshes.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn concurrent_calls_with_an_expired_token_refresh_it_once() {
    let (stub, _) = start().await;
    let session = stub.client().open(&ensure()).await.unwrap();
    let request = argv("first-token-is-stale");
    let calls = (0..20).map(|_| session.dataplane().exec(&request));
    for answer in futures_util::future::join_all(calls).await {
        assert_eq!(answer.unwrap().stdout, "token-1");
    }
    assert_eq!(stub.refreshes.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_token_about_to_end_is_replaced_before_the_call() {
    let (stub, _) = start().await;
    stub.ttl.store(3, Ordering::SeqCst);
    let session = stub.client().open(&ensure()).await.unwrap();
    assert_eq!(session.dataplane().exec(&argv("plain")).await.unwrap().stdout, "token-1");
    assert_eq!(stub.execs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn an_open_session_sends_heartbeats_before_its_sandbox_becomes_idle() {
    let (stub, _) = start().await;
    stub.idle.store(6, Ordering::SeqCst);
    let session = stub.client().open(&ensure()).await.unwrap();
    stub.heartbeats.notified().await;
    stub.heartbeats.notified().await;
    assert_eq!(stub.refreshes.load(Ordering::SeqCst), 0, "a heartbeat does not refresh the token");
    let again = stub.client().attach(&session.info().session_id).await.unwrap();
    drop(session);
    stub.heartbeats.notified().await;
    drop(again);
}

#[tokio::test]
async fn calls_wait_for_a_starting_sandbox() {
    let (stub, _) = start().await;
    stub.starting.store(2, Ordering::SeqCst);
    let session = stub.client().open(&ensure()).await.unwrap();
    assert!(session.dataplane().exec(&argv("starts-at-the-third-try")).await.is_ok());
    assert_eq!(stub.execs.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn an_exceeded_quota_is_reported_without_a_retry() {
    let (stub, _) = start().await;
    let session = stub.client().open(&ensure()).await.unwrap();
    let error = session.dataplane().exec(&argv("over-quota")).await.unwrap_err();
    assert!(error.is(ErrorCode::QuotaExceeded) && !error.is_retryable());
    assert!(error.advice().unwrap().contains("cobox sandbox delete"));
    assert_eq!(stub.execs.load(Ordering::SeqCst), 1, "the request was not repeated");
}

#[tokio::test]
async fn waiting_for_a_sandbox_ends_at_the_deadline_with_the_servers_error() {
    let (stub, _) = start().await;
    let client = stub.client().with_start_deadline(Duration::from_millis(300));
    let session = client.open(&ensure()).await.unwrap();
    let error = session.dataplane().exec(&argv("never-starts")).await.unwrap_err();
    assert!(error.is(ErrorCode::SandboxStarting) && error.is_retryable());
}

#[tokio::test]
async fn an_api_error_has_code_message_and_request_id() {
    let (stub, _) = start().await;
    let session = stub.client().open(&ensure()).await.unwrap();
    let error = session.dataplane().exec(&argv("denied")).await.unwrap_err();
    let failure = error.api().unwrap();
    assert_eq!((failure.status, failure.code.as_str(), failure.message.as_str()), (403, "CAPABILITY_DENIED", "because"));
    assert!(error.request_id().unwrap().starts_with("req_"));
    assert!(!error.is_retryable());
    assert_eq!(error.to_string(), "because (CAPABILITY_DENIED)");
}

#[tokio::test]
async fn a_foreign_response_is_quoted_without_control_characters() {
    let (stub, _) = start().await;
    let error = stub.client().get_sandbox("x").await.unwrap_err();
    assert!(matches!(&error, ClientError::NotCobox { status: 502, excerpt, .. } if excerpt == "<html>proxy [2J</html>"), "{error:?}");
}

#[tokio::test]
async fn an_unreachable_broker_is_named_with_advice() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let error = Client::new(&url, Secret::new("cbx_secret")).unwrap().negotiate(&ensure()).await.unwrap_err();
    assert!(error.to_string().contains(&url), "{error}");
    assert!(error.advice().unwrap().contains("cobox up"));
    assert!(!format!("{error:?}").contains("cbx_secret"));
}

#[tokio::test]
async fn an_upload_is_reopened_for_a_retry_with_its_length_and_mode() {
    let (stub, _) = start().await;
    let session = stub.client().open(&ensure()).await.unwrap();
    let upload = Upload::from_stream(Some(10), || async {
        Ok(futures_util::stream::iter([Ok(bytes::Bytes::from_static(b"hello")), Ok(bytes::Bytes::from_static(b"world"))]))
    });
    let written = session.dataplane().write_file(b"/workspace/a b\xff", Some(0o755), upload).await.unwrap();
    assert_eq!((written.path.as_str(), written.size, written.etag.as_str()), ("/dp/v1/files/workspace/a%20b%FF", 10, "755"));
    assert_eq!(*stub.uploads.lock().unwrap(), [b"helloworld"]);

    let file = session.dataplane().read_file(b"/x").await.unwrap();
    assert_eq!(file.mode, Some(0o640));
    let chunks: Vec<_> = file.into_stream().collect().await;
    assert_eq!(chunks.into_iter().flat_map(|c| c.unwrap().to_vec()).collect::<Vec<_>>(), b"/dp/v1/files/x");
}

#[tokio::test]
async fn a_shell_stream_delivers_output_and_exit_code_and_sends_new_tokens() {
    let (stub, mut seen) = start().await;
    let session = stub.client().open(&ensure()).await.unwrap();
    let mut shell = session.dataplane().shell(ShellStart::default()).await.unwrap();
    assert!(matches!(seen.recv().await.unwrap(), ClientFrame::Start(_)));
    assert!(matches!(shell.output.next().await, Some(Ok(ShellEvent::Ready(_)))));
    assert!(matches!(shell.output.next().await, Some(Ok(ShellEvent::Output(bytes))) if bytes[..] == *b"$ \xff"));

    // Any call that finds the token expired replaces it; the shell stream sends the new one.
    session.dataplane().exec(&argv("first-token-is-stale")).await.unwrap();
    assert!(matches!(seen.recv().await.unwrap(), ClientFrame::Auth { token } if token.expose() == "token-1"));

    shell.input.stdin(b"exit\n").await.unwrap();
    assert!(matches!(shell.output.next().await, Some(Ok(ShellEvent::Exit { exit_code: 7, .. }))));
    assert!(shell.output.next().await.is_none());
}

#[tokio::test]
async fn broker_urls_with_credentials_or_without_http_are_refused() {
    for bad in ["ftp://x", "not a url", "http://user:pass@host/"] {
        assert!(matches!(Client::new(bad, Secret::new("k")), Err(ClientError::InvalidUrl { .. })), "{bad}");
    }
}
