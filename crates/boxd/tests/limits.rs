//! Tests of boxd's limits on clients: at each limit the error names it, and all other clients are still served.

mod support;

use cobox_protocol::{
    Secret,
    control::DataplaneLimits,
    frame::{ExecStart, ShellStart, close},
    shell::ShellInfo,
};
use futures_util::{SinkExt, StreamExt};
use http::Method;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use support::{
    EVERYTHING, SOON, TestBoxd,
    exec_client::{ClientFrame, ExecClient, named},
    viewer::Viewer,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{self, Message, client::IntoClientRequest},
};

const MIB: u64 = 1024 * 1024;
/// Close code of a refused stream's socket.
const TRY_AGAIN_LATER: u16 = 1013;

type Socket = WebSocketStream<UnixStream>;

/// Raises the descriptor limit, because both ends of a thousand connections are in this process.
fn take_all_descriptors() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

/// Resident memory of this process, which boxd is a part of here.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Opens a socket. An error is the HTTP status and body returned instead.
async fn socket(boxd: &TestBoxd, path: &str, token: Option<&Secret>) -> Result<Socket, (u16, String)> {
    let mut request = format!("ws://boxd{path}").into_client_request().unwrap();
    if let Some(token) = token {
        request.headers_mut().insert("authorization", format!("Bearer {}", token.expose()).parse().unwrap());
    }
    match tokio_tungstenite::client_async(request, boxd.dial("clients").await).await {
        Ok((socket, _)) => Ok(socket),
        Err(tungstenite::Error::Http(answer)) => {
            let body = String::from_utf8_lossy(answer.body().as_deref().unwrap_or_default()).into_owned();
            Err((answer.status().as_u16(), body))
        }
        Err(other) => panic!("{other}"),
    }
}

/// Checks that everything a client needs still works, and quickly.
async fn still_answers(boxd: &TestBoxd) {
    let all = async {
        boxd.get("/healthz").without("authorization").send().await.ok(200);
        boxd.put("/v1/files/workspace/still", "here").send().await;
        assert_eq!(boxd.get("/v1/files/workspace/still").send().await.ok(200).body, "here");
        let done = boxd.post("/v1/exec", json!({ "command": "echo still" }).to_string()).send().await.ok(200);
        assert_eq!(done.json::<serde_json::Value>()["stdout"], "still\n");
        boxd.post("/v1/fs/list", "{}").send().await.ok(200);
    };
    tokio::time::timeout(SOON, all).await.expect("boxd responds in time");
}

/// Sends a request whose response is not read.
async fn request_unread(boxd: &TestBoxd, method: &str, path: &str, headers: &str, body: &str) -> UnixStream {
    let token = boxd.token(EVERYTHING);
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: boxd\r\nauthorization: Bearer {}\r\ncontent-length: {}\r\n{headers}\r\n",
        token.expose(),
        body.len()
    );
    let mut stream = boxd.dial("clients").await;
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_sockets_beyond_the_limit_are_refused_and_the_others_stay_open() {
    take_all_descriptors();
    let limits = DataplaneLimits::default();
    let boxd = TestBoxd::start_limited(|limits| limits.streams_per_principal = limits.streams);
    let before = resident();
    let token = boxd.token(EVERYTHING);
    let (mut open, mut refused) = (Vec::new(), 0);
    for number in 0..1000 {
        let path = if number % 2 == 0 { "/v1/exec/ws" } else { "/v1/shell/ws" };
        match socket(&boxd, path, Some(&token)).await {
            Ok(socket) => open.push(socket),
            Err((status, body)) => {
                assert_eq!(status, 429, "{body}");
                assert!(body.contains("RATE_LIMITED") && body.contains(&limits.streams.to_string()), "{body}");
                refused += 1;
            }
        }
    }
    assert_eq!((open.len(), refused), (limits.streams as usize, 1000 - limits.streams as usize));
    still_answers(&boxd).await;
    let taken = resident().saturating_sub(before);
    assert!(taken < 256 * MIB, "{} KiB for each socket, both ends", taken / 1024 / open.len() as u64);
    for socket in &mut open {
        socket.send(Message::text(r#"{"type":"ping","id":1}"#)).await.unwrap();
    }
    for socket in &mut open {
        let pong = tokio::time::timeout(SOON, socket.next()).await.unwrap().unwrap().unwrap();
        assert_eq!(pong.to_text().unwrap(), r#"{"type":"pong","id":1}"#);
    }
    // Closing one makes capacity for another.
    drop(open.pop());
    let again = async { while socket(&boxd, "/v1/exec/ws", Some(&token)).await.is_err() {} };
    tokio::time::timeout(SOON, again).await.unwrap();
}

#[tokio::test]
async fn unauthenticated_connections_are_displaced_by_newer_ones() {
    // A quarter of the connections may be unauthenticated.
    let boxd = TestBoxd::start_limited(|limits| (limits.connections, limits.streams) = (256, 200));
    let mut silent = Vec::new();
    for _ in 0..64 {
        silent.push(socket(&boxd, "/v1/shell/ws", None).await.unwrap());
    }
    let mut late = socket(&boxd, "/v1/shell/ws", None).await.unwrap();
    let auth = ClientFrame::Auth { token: boxd.token(EVERYTHING) };
    late.send(Message::text(serde_json::to_string(&auth).unwrap())).await.unwrap();
    let admitted = tokio::time::timeout(SOON, late.next()).await.unwrap().unwrap().unwrap();
    assert!(admitted.to_text().unwrap().contains("auth_ok"), "{admitted}");
    // The oldest of them gets the reason.
    let reply = tokio::time::timeout(SOON, silent[0].next()).await.unwrap().unwrap().unwrap();
    assert!(reply.to_text().unwrap().contains("RATE_LIMITED"), "{reply}");
    assert!(socket(&boxd, "/v1/shell/ws", Some(&boxd.token(EVERYTHING))).await.is_ok());
    still_answers(&boxd).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn boxd_answers_while_a_hundred_clients_never_read() {
    let boxd = TestBoxd::start_limited(|limits| {
        limits.execs = 100;
        limits.exec_spool_bytes = MIB;
    });
    std::fs::write(boxd.host("/workspace/large"), vec![b'x'; 16 * MIB as usize]).unwrap();
    let before = resident();
    let mut clients = Vec::new();
    for _ in 0..25 {
        let command = json!({ "command": "head -c 8000000 /dev/zero; exec sleep 1000" }).to_string();
        clients.push(request_unread(&boxd, "POST", "/v1/exec", "accept: text/event-stream\r\n", &command).await);
        clients.push(request_unread(&boxd, "GET", "/v1/files/workspace/large", "", "").await);
        clients.push(request_unread(&boxd, "GET", "/v1/watch", "", "").await);
        clients.push(request_unread(&boxd, "GET", "/v1/files/download?path=large&path=large", "", "").await);
    }
    // Events that the watchers don't read.
    for number in 0..500 {
        std::fs::write(boxd.host(format!("/workspace/{number}")), "x").unwrap();
    }
    for _ in 0..3 {
        still_answers(&boxd).await;
    }
    let taken = resident().saturating_sub(before);
    assert!(taken < 256 * MIB, "{} MiB", taken / MIB);
    drop(clients);
    // Everything held for the clients is freed when they disconnect, except commands, which can be resumed.
    tokio::time::timeout(SOON, boxd.idle()).await.expect("nothing is kept for disconnected clients");
    let list: serde_json::Value = boxd.get("/v1/processes").send().await.json();
    for process in list["items"].as_array().unwrap() {
        boxd.call(Method::DELETE, &format!("/v1/processes/{}", process["id"].as_str().unwrap())).send().await;
    }
}

#[tokio::test]
async fn a_head_or_body_beyond_its_limit_is_refused() {
    let boxd = TestBoxd::start_limited(|limits| limits.request_bytes = 64 * 1024);
    let large = "x".repeat(100 * 1024);
    // Only slightly above the limit: unread data at the close of the connection would reset it before the response is
    // read.
    let header = format!("x-large: {}\r\n", "x".repeat(33 * 1024));
    let mut stream = request_unread(&boxd, "GET", "/v1/files/a", &header, "").await;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    let body = json!({ "command": "true", "stdin": large }).to_string();
    let message = boxd.post("/v1/exec", body.clone()).send().await.refused(413, "TOO_LARGE");
    assert!(message.contains("65536"), "{message}");
    boxd.post("/v1/shells", body).send().await.refused(413, "TOO_LARGE");
    let list = json!({ "path": "x".repeat(300 * 1024) }).to_string();
    boxd.post("/v1/fs/list", list).send().await.refused(413, "TOO_LARGE");
    boxd.post("/v1/processes/x/signal", json!({ "signal": "x".repeat(2000) }).to_string()).send().await.refused(413, "TOO_LARGE");
    // An announced body that is never sent is refused at once, not after a timeout.
    let mut stream = boxd.dial("clients").await;
    let head = format!(
        "PUT /v1/files/workspace/huge HTTP/1.1\r\nhost: boxd\r\nauthorization: Bearer {}\r\ncontent-length: 99999999999999\r\n\r\n",
        boxd.token(EVERYTHING).expose()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 12];
    tokio::time::timeout(SOON, stream.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(answer, b"HTTP/1.1 413");
    let mut socket = socket(&boxd, "/v1/exec/ws", Some(&boxd.token(EVERYTHING))).await.unwrap();
    let frame = json!({ "type": "start", "command": "x".repeat(2 * MIB as usize) }).to_string();
    // The server may close before everything is sent.
    let _ = socket.send(Message::text(frame)).await;
    let closed = async {
        loop {
            match socket.next().await {
                Some(Ok(Message::Close(frame))) => return frame.map(|f| u16::from(f.code)),
                Some(Ok(_)) => {}
                _ => return None,
            }
        }
    };
    assert_eq!(tokio::time::timeout(SOON, closed).await.unwrap(), Some(close::TOO_BIG));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_endless_output_stays_within_its_memory_and_disk_limits() {
    const PRINTED: u64 = 64 * MIB;
    let boxd = TestBoxd::start_limited(|limits| limits.exec_spool_bytes = MIB);
    let shell: ShellInfo = boxd.post("/v1/shells", r#"{"name": "loud", "command": "yes"}"#).send().await.ok(201).json();
    let endless = ExecStart { command: Some("yes".into()), command_id: Some("loud".into()), ..Default::default() };
    drop(ExecClient::start(&boxd, endless).await);
    let before = resident();
    // A client that resumes learns how much output was dropped.
    let gone = async {
        loop {
            let mut client = ExecClient::start(&boxd, named("loud", ExecStart::default())).await;
            while client.stdout_at == client.ready.stdout_offset {
                client.step().await;
            }
            if client.stdout_at > PRINTED {
                return;
            }
        }
    };
    tokio::time::timeout(6 * SOON, gone).await.expect("it keeps printing");
    let printed = async { while boxd.get(&format!("/v1/shells/{}", shell.id)).send().await.json::<ShellInfo>().offset < PRINTED / 4 {} };
    tokio::time::timeout(6 * SOON, printed).await.expect("the shell keeps printing");
    still_answers(&boxd).await;
    let taken = resident().saturating_sub(before);
    assert!(taken < 48 * MIB, "{} MiB", taken / MIB);
    boxd.call(Method::DELETE, "/v1/processes/loud").send().await.ok(204);
    boxd.call(Method::DELETE, "/v1/shells/loud").send().await.ok(204);
}

#[tokio::test]
async fn each_limit_is_named_in_the_error_when_it_is_reached() {
    let boxd = TestBoxd::start_limited(|limits| {
        (limits.execs, limits.shells, limits.streams) = (2, 3, 4);
    });
    let refused = |answer: support::Answer, limit: &str| {
        let message = answer.refused(429, "RATE_LIMITED");
        assert!(message.contains(limit), "{message}");
        assert_eq!(answer.header("retry-after"), "1");
    };
    // Commands.
    let wait = || ExecStart { command: Some("exec sleep 1000".into()), ..Default::default() };
    let running = [ExecClient::start(&boxd, named("one", wait())).await, ExecClient::start(&boxd, named("two", wait())).await];
    refused(boxd.post("/v1/exec", r#"{"command": "true"}"#).send().await, "2 commands");
    assert_eq!(ExecClient::try_start(&boxd, wait()).await.err().as_deref(), Some("RATE_LIMITED"));
    // Shells.
    for _ in 0..3 {
        boxd.post("/v1/shells", r#"{"command": "sleep 1000"}"#).send().await.ok(201);
    }
    refused(boxd.post("/v1/shells", "{}").send().await, "3 shells");
    let start = ShellStart { shell: Some("another".into()), ..Default::default() };
    let (code, close) = Viewer::refused(&boxd, &boxd.token(EVERYTHING), start).await;
    assert_eq!((code.as_deref(), close), (Some("RATE_LIMITED"), TRY_AGAIN_LATER));
    // Streams: the two commands use two.
    let held = [boxd.get("/v1/watch").open().await, boxd.get("/v1/watch").open().await];
    assert!(held.iter().all(|answer| answer.status() == 200));
    refused(boxd.get("/v1/watch").send().await, "4 streams");
    let events = boxd.post("/v1/exec", r#"{"command": "true"}"#).header("accept", "text/event-stream").send().await;
    refused(events, "4 streams");
    let (status, body) = socket(&boxd, "/v1/shell/ws", Some(&boxd.token(EVERYTHING))).await.err().unwrap();
    assert!(status == 429 && body.contains("4 streams"), "{body}");
    // A connection that authenticates with its first frame gets the error in a frame.
    let mut late = socket(&boxd, "/v1/shell/ws", None).await.unwrap();
    let auth = ClientFrame::Auth { token: boxd.token(EVERYTHING) };
    late.send(Message::text(serde_json::to_string(&auth).unwrap())).await.unwrap();
    let mut reply = Vec::new();
    while let Some(Ok(message)) = late.next().await {
        match message {
            Message::Text(text) => reply.push(text.to_string()),
            Message::Close(frame) => assert_eq!(u16::from(frame.unwrap().code), TRY_AGAIN_LATER),
            _ => {}
        }
    }
    assert!(reply.iter().any(|frame| frame.contains("4 streams")), "{reply:?}");
    // Short requests don't count as streams.
    boxd.get("/healthz").send().await.ok(200);
    boxd.post("/v1/fs/list", "{}").send().await.ok(200);
    drop((running, held));
    for path in ["/v1/processes/one", "/v1/processes/two"] {
        boxd.call(Method::DELETE, path).send().await.ok(204);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_commands_free_their_memory() {
    let boxd = TestBoxd::start();
    let before = resident();
    for number in 0..80 {
        let command = "head -c 1000000 /dev/zero; head -c 1000000 /dev/zero >&2";
        let request = json!({ "command": command, "command_id": format!("c{number}"), "max_output_bytes": 10 });
        boxd.post("/v1/exec", request.to_string()).send().await.ok(200);
    }
    // 160 MB were printed, of which 32 MiB are kept.
    let taken = resident().saturating_sub(before);
    assert!(taken < 80 * MIB, "{} MiB", taken / MIB);
    let again = |id: &str| boxd.post("/v1/exec", json!({ "command_id": id }).to_string());
    again("c79").send().await.ok(200);
    again("c0").send().await.refused(410, "COMMAND_EXPIRED");
}

#[tokio::test]
async fn an_ended_command_frees_its_terminal() {
    let terminals = || {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
        open.filter(|to| to.ends_with("ptmx")).count()
    };
    let boxd = TestBoxd::start();
    for _ in 0..3 {
        let mut client = ExecClient::start(&boxd, ExecStart { command: Some("cat".into()), pty: true, ..Default::default() }).await;
        assert_eq!(terminals(), 1);
        client.send(ClientFrame::CloseStdin).await;
        client.exit().await;
        assert_eq!(terminals(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_responses_take_no_more_memory_than_the_output() {
    let boxd = TestBoxd::start();
    let before = resident();
    // As JSON each output is six times as long.
    let command = "head -c 8000000 /dev/zero | tr '\\0' '\\1' | tee /dev/stderr; touch \"done$N\"";
    let mut clients = Vec::new();
    for number in 0..6 {
        let body = json!({ "command": command, "max_output_bytes": 16 * MIB, "env": { "N": number.to_string() } }).to_string();
        clients.push(request_unread(&boxd, "POST", "/v1/exec", "connection: close\r\n", &body).await);
    }
    for number in 0..6 {
        support::wait_for(|| boxd.host(format!("/workspace/done{number}")).exists()).await;
    }
    // Each response is sent as far as the socket's buffer allows.
    for client in &mut clients {
        let mut begin = [0; 15];
        tokio::time::timeout(SOON, client.read_exact(&mut begin)).await.unwrap().unwrap();
        assert_eq!(&begin, b"HTTP/1.1 200 OK");
    }
    still_answers(&boxd).await;
    let taken = resident().saturating_sub(before);
    assert!(taken < 160 * MIB, "{} MiB", taken / MIB);
    // A response that is read completely contains all the output.
    let mut rest = Vec::new();
    tokio::time::timeout(3 * SOON, clients[0].read_to_end(&mut rest)).await.unwrap().unwrap();
    let text = String::from_utf8(rest).unwrap();
    assert_eq!(text.matches(r"\u0001").count(), 16_000_000);
}

#[tokio::test]
async fn unread_input_counts_against_the_memory_limit() {
    let boxd = TestBoxd::start();
    let body = |number: u32| json!({ "argv": ["sleep", "1000"], "stdin": "x".repeat(15_000_000), "command_id": number.to_string() });
    let start = async |number| boxd.post("/v1/exec", body(number).to_string()).header("accept", "text/event-stream").open().await;
    let mut streams = Vec::new();
    let refused = loop {
        let answer = start(streams.len() as u32).await;
        if answer.status() != 200 {
            break answer.status();
        }
        streams.push(answer);
        assert!(streams.len() < 20, "300 MB are waiting");
    };
    assert_eq!(refused, 429);
    for number in 0..streams.len() {
        boxd.delete(&format!("/v1/processes/{number}")).send().await.ok(204);
    }
    let again = async { while start(100).await.status() != 200 {} };
    tokio::time::timeout(SOON, again).await.expect("input is freed when its programs end");
    boxd.delete("/v1/processes/100").send().await.ok(204);
}

#[tokio::test]
async fn ended_commands_are_retained_within_the_configured_count_and_memory() {
    let boxd = TestBoxd::start_limited(|limits| (limits.execs_kept, limits.exec_kept_memory_bytes) = (3, 300_000));
    let exec = async |request: serde_json::Value| boxd.post("/v1/exec", request.to_string()).send().await;
    let run = async |id: &str, command: &str| exec(json!({ "command": command, "command_id": id })).await.ok(200);
    let kept = async |id: &str| exec(json!({ "command_id": id })).await.ok(200);
    let gone = async |id: &str| {
        // The oldest commands are removed just after the end of a new one is reported.
        let gone = async { while exec(json!({ "command_id": id })).await.status != 410 {} };
        tokio::time::timeout(SOON, gone).await.unwrap_or_else(|_| panic!("{id} goes"));
    };
    for id in ["1", "2", "3", "4"] {
        run(id, "echo little").await;
    }
    gone("1").await;
    for id in ["2", "3", "4"] {
        kept(id).await;
    }
    run("5", "seq 1 40000").await;
    gone("2").await;
    kept("5").await;
    run("6", "seq 1 40000").await;
    gone("5").await;
    kept("6").await;
}
