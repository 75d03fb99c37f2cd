//! A server on a real socket that imitates a broker and a sandbox, and records its requests.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
};

use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::{Message, WebSocket, handshake::derive_accept_key, protocol::Role};

/// The sandbox of the only thread, `there`.
const SANDBOX: &str = "sb_00000000000000000000000000";
const SESSION: &str = "ssn_00000000000000000000000000";
/// A time far enough in the future for any test.
const FAR_FUTURE: &str = "2999-01-01T00:00:00Z";

#[derive(Clone, Debug)]
pub struct RecordedRequest {
    method: String,
    path: String,
    /// Header names are in lower case.
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl RecordedRequest {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }
}

pub struct Stub {
    pub url: String,
    requests: Arc<Mutex<Vec<RecordedRequest>>>,
}

impl Stub {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests: Arc<Mutex<Vec<RecordedRequest>>> = Arc::default();
        let (base, recorded) = (url.clone(), requests.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (base, recorded) = (base.clone(), recorded.clone());
                // Errors are ignored: some tests close the connection early.
                std::thread::spawn(move || serve(stream, &base, &recorded).ok());
            }
        });
        Self { url, requests }
    }

    /// The requests for paths with this suffix, in order.
    pub fn requests(&self, path: &str) -> Vec<RecordedRequest> {
        self.requests.lock().unwrap().iter().filter(|a| a.path.ends_with(path)).cloned().collect()
    }
}

fn serve(mut stream: TcpStream, base: &str, recorded: &Mutex<Vec<RecordedRequest>>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        match line.trim_end() {
            "" => break,
            line => head.push(line.to_owned()),
        }
    }
    let mut parts = head[0].split(' ').map(str::to_owned);
    let (method, path) = (parts.next().unwrap(), parts.next().unwrap());
    let headers = head[1..].iter().filter_map(|l| l.split_once(": ")).map(|(n, v)| (n.to_lowercase(), v.to_owned())).collect();
    let mut request = RecordedRequest { method, path, headers, body: Vec::new() };
    let length = request.header("content-length").map_or(0, |l| l.parse().unwrap());
    request.body = vec![0; length];
    reader.read_exact(&mut request.body)?;
    if request.path.ends_with("/exec/ws") {
        return exec_stream(stream, request, recorded);
    }
    recorded.lock().unwrap().push(request.clone());
    if request.path.ends_with("/endless") && request.header("range").is_none() {
        // Promises more bytes than it sends, and keeps the connection open until the client closes it.
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nsome of it")?;
        return reader.read_to_end(&mut Vec::new()).map(drop);
    }
    let (status, body) = answer(&request, base);
    write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
}

/// Imitates an exec: accepts the command and reports that it has ended.
fn exec_stream(mut stream: TcpStream, mut request: RecordedRequest, recorded: &Mutex<Vec<RecordedRequest>>) -> std::io::Result<()> {
    let accept = derive_accept_key(request.header("sec-websocket-key").unwrap().as_bytes());
    write!(stream, "HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n\r\n")?;
    let mut socket = WebSocket::from_raw_socket(stream, Role::Server, None);
    request.body = socket.read().unwrap().into_data().to_vec();
    let start = request.json();
    recorded.lock().unwrap().push(request);
    let is_slow = start["argv"][0] == "slow";
    let ready = json!({"type": "ready", "command_id": start["command_id"], "pid": 1, "stdout_offset": 0, "stderr_offset": 0});
    let exit = json!({"type": "exit", "exit_code": if is_slow { 137 } else { 0 }, "timed_out": is_slow});
    for frame in [ready, exit] {
        socket.send(Message::text(frame.to_string())).unwrap();
    }
    while socket.read().is_ok() {}
    Ok(())
}

fn answer(request: &RecordedRequest, base: &str) -> (u16, String) {
    let error_response =
        |status, code| (status, json!({"error": {"code": code, "message": "no", "retryable": false, "request_id": "req_1"}}).to_string());
    if !matches!(request.header("authorization"), Some("Bearer cbx_key" | "Bearer token")) {
        return error_response(401, "UNAUTHENTICATED");
    }
    let file = request.path.strip_prefix("/dp/v1/files/workspace/");
    match (request.method.as_str(), request.path.as_str(), file) {
        ("POST", "/v1/sandbox/sessions", _) => {
            let body = request.json();
            match body["thread_id"].as_str().unwrap() {
                thread if thread == "there" || body["mode"] == "ensure" => (200, session(thread, base).to_string()),
                _ => error_response(404, "SESSION_NOT_FOUND"),
            }
        }
        ("POST", "/dp/v1/exec", _) => {
            let response = json!({"stdout": "", "stderr": "", "exit_code": 0, "timed_out": false, "truncated": false, "duration_ms": 1,
                "command_id": "cmd_00000000000000000000000000"});
            (200, response.to_string())
        }
        ("GET", path, _) if path.starts_with("/v1/sandbox/sessions?") => (200, json!({"items": []}).to_string()),
        ("PUT", path, Some(_)) => (200, json!({"path": path, "size": request.body.len(), "etag": "e"}).to_string()),
        ("GET", _, Some("small" | "endless" | "from-human.txt")) => (200, "x".to_owned()),
        _ => error_response(404, "FILE_NOT_FOUND"),
    }
}

fn session(thread: &str, base: &str) -> Value {
    let base = format!("{base}/dp/v1");
    json!({
        "session_id": SESSION, "thread_id": thread, "token": "token", "expires_at": FAR_FUTURE, "refresh_before": FAR_FUTURE, "scopes": [],
        "sandbox": {"id": SANDBOX, "provider": "local", "http_base_url": base, "ws_base_url": base},
        "binding": {"id": SESSION, "scope": {"type": "thread", "id": thread}, "sandbox_id": SANDBOX, "provider": "local",
            "state": "active", "lease_expires_at": FAR_FUTURE},
        "dataplane": {"http_base_url": base, "ws_base_url": base},
        "credentials": {"token_type": "Bearer", "access_token": "token", "expires_at": FAR_FUTURE, "granted_capabilities": ["exec"]},
        "policy": {"idle_timeout_seconds": 900, "hard_ttl_seconds": 28800},
    })
}
