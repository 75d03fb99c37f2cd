//! Tests of bodies that arrive slowly, incompletely, or for a refused request: none of them blocks other clients or
//! loses its response.

use std::time::Duration;

use cobox_broker::BodyLimits;
use cobox_protocol::{Secret, key::PrincipalKind};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use crate::harness::{Client, World, sandbox_id};

/// Much longer than any step here takes, to detect a broker that doesn't answer at all.
const EVENT_TIMEOUT: Duration = Duration::from_secs(120);
const SESSIONS: &str = "POST /v1/sandbox/sessions";

/// The head of a request with a body of this length.
fn head(route: &str, credential: Option<&str>, length: usize) -> String {
    let credential = credential.map_or_else(String::new, |c| format!("authorization: Bearer {c}\r\n"));
    format!("{route} HTTP/1.1\r\nhost: broker\r\n{credential}content-length: {length}\r\n\r\n")
}

/// The status and the body of the next response.
async fn answer(stream: &mut TcpStream) -> (u16, Value) {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse::<usize>().ok());
            if length.is_none_or(|length| body.len() >= length) {
                let status = head.split(' ').nth(1).unwrap().parse().unwrap();
                return (status, serde_json::from_str(body).unwrap_or(Value::Null));
            }
        }
        let read = stream.read_buf(&mut bytes).await.expect("a response, not a reset");
        assert!(read > 0, "the connection ended after {text:?}");
    }
}

async fn ask(client: &Client, request: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(client.addr).await.unwrap();
    stream.write_all(request).await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_half_sent_bodies_leave_health_and_valid_keys_working() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let wrong = format!("cbx_{}_{}", "0".repeat(26), "x".repeat(43));
    let mut held = Vec::new();
    for n in 0..4096 {
        let credential = (n % 2 == 0).then_some(wrong.as_str());
        let half = head(SESSIONS, credential, 1000) + "{\"thread_id\": ";
        held.push(ask(&ann, half.as_bytes()).await);
    }
    let working = async {
        Client { key: None, ..ann.clone() }.get("/healthz").await.ok(200);
        ann.ensure("t").await;
        broker.human("bob").await.ensure("t").await;
    };
    timeout(EVENT_TIMEOUT, working).await.expect("the broker answers");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_send_nothing_leave_health_and_valid_keys_working() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let mut held = Vec::new();
    for n in 0..4200 {
        let begun: &[u8] = if n % 2 == 0 { b"" } else { b"GET /v1/sandboxes HTTP/1.1\r\nauthoriz" };
        held.push(ask(&ann, begun).await);
    }
    let working = async {
        Client { key: None, ..ann.clone() }.get("/healthz").await.ok(200);
        ann.ensure("t").await;
    };
    timeout(EVENT_TIMEOUT, working).await.expect("the broker answers");
}

#[tokio::test]
async fn an_authenticated_connection_is_not_closed_for_new_ones() {
    let mut world = World::new();
    world.config.max_unauthenticated_connections = 4;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let key = ann.key.as_ref().unwrap().expose().to_owned();
    let get = head("GET /v1/sandboxes", Some(&key), 0);
    let mut known = ask(&ann, get.as_bytes()).await;
    assert_eq!(answer(&mut known).await.0, 200);
    let mut idle = Vec::new();
    for _ in 0..8 {
        idle.push(ask(&ann, b"").await);
    }
    // The oldest of them was closed for a newer connection.
    let mut none = Vec::new();
    assert_eq!(timeout(EVENT_TIMEOUT, idle[0].read_to_end(&mut none)).await.unwrap().unwrap_or(0), 0);
    known.write_all(get.as_bytes()).await.unwrap();
    assert_eq!(answer(&mut known).await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_hold_connections_leave_health_and_other_keys_working() {
    let mut world = World::new();
    world.config.max_connections = 64;
    let broker = world.start().await;
    let (ann, bob, eve) = (broker.human("ann").await, broker.human("bob").await, broker.human("eve").await);
    let is_well = async || {
        let requested = Client { key: None, ..ann.clone() };
        timeout(EVENT_TIMEOUT, requested.get("/healthz")).await.expect("the broker answers").ok(200);
    };
    // One principal gets at most half of the connections.
    let held = hold_connections(&ann, 32, 8).await;
    is_well().await;
    timeout(EVENT_TIMEOUT, bob.ensure("t")).await.expect("another key is accepted");
    let _others = hold_connections(&eve, 20, 0).await;
    is_well().await;
    // Connections that never authenticate are closed when no slot is left.
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(ask(&ann, b"").await);
    }
    is_well().await;
    drop(held);
    timeout(EVENT_TIMEOUT, bob.ensure("u")).await.expect("another key is accepted");
}

/// Opens connections whose request waits for its body, and expects the given numbers to be accepted and refused.
async fn hold_connections(client: &Client, taken: usize, refused: usize) -> Vec<TcpStream> {
    // The broker requests a body once its sender is authenticated.
    let head = head(SESSIONS, client.key.as_ref().map(Secret::expose), 1000).replace("\r\n\r\n", "\r\nexpect: 100-continue\r\n\r\n");
    let mut held = Vec::new();
    for number in 0..taken + refused {
        let mut stream = ask(client, head.as_bytes()).await;
        let (status, said) = timeout(EVENT_TIMEOUT, answer(&mut stream)).await.expect("an answer");
        assert_eq!(status, if number < taken { 100 } else { 429 }, "{number}: {said}");
        if status == 100 {
            stream.write_all(b"{\"thread_id\": ").await.unwrap();
            held.push(stream);
        }
    }
    held
}

#[tokio::test]
async fn no_body_is_read_before_its_sender_is_authenticated() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let session = made["session_id"].as_str().unwrap();
    let wrong = format!("cbx_{}_{}", "0".repeat(26), "x".repeat(43));
    let forged = made["token"].as_str().unwrap().rsplit_once('.').unwrap().0.to_owned() + ".AAAA";
    for route in [
        SESSIONS.to_owned(),
        format!("POST /v1/sandbox/sessions/{session}/refresh"),
        format!("POST /v1/sandbox/sessions/{session}/delegate"),
        format!("POST /sandbox/{}/delegate", sandbox_id(&made)),
        format!("POST /v1/sandbox/sessions/{session}/share"),
        format!("POST /v1/sandbox/sessions/{session}/file-links"),
        "POST /threads/t/sandbox".to_owned(),
        "POST /v1/sandboxes".to_owned(),
        "POST /v1/keys".to_owned(),
        "POST /v2/sandboxes/boxes".to_owned(),
        "POST /internal/tokens/introspect".to_owned(),
        format!("PUT /dp/{}/v1/files/a", sandbox_id(&made)),
    ] {
        for credential in [None, Some(&wrong), Some(&forged)] {
            // No byte of the body is ever sent.
            let mut stream = ask(&ann, head(&route, credential.map(String::as_str), 1000).as_bytes()).await;
            let (status, said) = timeout(EVENT_TIMEOUT, answer(&mut stream)).await.expect("an answer without a body");
            assert_eq!(status, 401, "{route}: {said}");
        }
    }
}

#[tokio::test]
async fn a_body_that_stalls_is_refused_at_the_broker_and_at_the_gateway() {
    let mut world = World::new();
    world.config.body_limits = BodyLimits { grace_seconds: 1, ..BodyLimits::default() };
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let (key, token) = (ann.key.as_ref().unwrap().expose(), made["token"].as_str().unwrap());
    let upload = format!("POST /dp/{}/v1/echo", sandbox_id(&made));
    let refresh = format!("POST /v1/sandbox/sessions/{}/refresh", made["session_id"].as_str().unwrap());
    for (route, credential, message) in [
        (SESSIONS, key, "the body arrived at less than 1024 bytes a second"),
        (refresh.as_str(), key, "the body arrived at less than 1024 bytes a second"),
    ] {
        let mut stream = ask(&ann, (head(route, Some(credential), 1000) + "{").as_bytes()).await;
        let (status, said) = timeout(EVENT_TIMEOUT, answer(&mut stream)).await.unwrap();
        assert_eq!(status, 400, "{said}");
        assert!(said["error"]["message"].as_str().unwrap().starts_with(message), "{said}");
    }
    let whole = format!("POST /dp/{}/v1/whole", sandbox_id(&made));
    let mut stream = ask(&ann, (head(&whole, Some(token), 1000) + "half").as_bytes()).await;
    let (status, said) = timeout(EVENT_TIMEOUT, answer(&mut stream)).await.unwrap();
    assert_eq!(status, 400, "{said}");
    assert!(said["error"]["message"].as_str().unwrap().starts_with("the body arrived at less than 1024 bytes a second"), "{said}");
    // The sandbox has already started its response, which ends together with the body that it echoes.
    let mut stream = ask(&ann, (head(&upload, Some(token), 1000) + "half").as_bytes()).await;
    let mut echoed = Vec::new();
    let ended = timeout(EVENT_TIMEOUT, stream.read_to_end(&mut echoed)).await.expect("the upload ends");
    assert!(ended.is_err() || !echoed.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_upload_gets_its_real_status_while_its_body_still_arrives() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, admin) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await);
    let made = ann.ensure("t").await;
    let (key, token) = (admin.key.as_ref().map(Secret::expose).unwrap(), made["token"].as_str().unwrap());
    let refused = format!("PUT /dp/{}/v1/refused", sandbox_id(&made));
    let upload = format!("PUT /dp/{}/v1/files/a", sandbox_id(&made));
    for (route, credential, status) in [
        (refused.as_str(), Some(token), 403),
        (&upload, Some("nonsense"), 401),
        (&upload, None, 401),
        (SESSIONS, None, 401),
        (SESSIONS, Some(key), 413),
    ] {
        for megabytes in [1, 2, 1, 9, 2, 1, 1, 1] {
            // As many clients do, writes everything before reading anything.
            let body = vec![b' '; megabytes << 20];
            let mut stream = ask(&ann, head(route, credential, body.len()).as_bytes()).await;
            stream.write_all(&body).await.unwrap_or_else(|e| panic!("{route}: {e}"));
            let (got, said) = timeout(EVENT_TIMEOUT, answer(&mut stream)).await.unwrap();
            let is_small_enough = status == 413 && body.len() <= 1 << 20;
            assert_eq!(got, if is_small_enough { 400 } else { status }, "{route}, {megabytes} MiB: {said}");
        }
    }
}

/// Writes the whole body before reading anything.
async fn upload(client: &Client, route: &str, credential: Option<&str>, is_chunked: bool, megabytes: usize) -> u16 {
    let head = head(route, credential, megabytes << 20);
    let (head, piece) = match is_chunked {
        true => (
            head.replace(&format!("content-length: {}", megabytes << 20), "transfer-encoding: chunked"),
            [&b"100000\r\n"[..], &vec![b' '; 1 << 20], b"\r\n"].concat(),
        ),
        false => (head, vec![b' '; 1 << 20]),
    };
    let mut stream = ask(client, head.as_bytes()).await;
    for _ in 0..megabytes {
        stream.write_all(&piece).await.unwrap_or_else(|e| panic!("{route}: {e}"));
    }
    if is_chunked {
        stream.write_all(b"0\r\n\r\n").await.unwrap();
    }
    timeout(EVENT_TIMEOUT, answer(&mut stream)).await.unwrap().0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_upload_of_any_size_gets_its_status_on_every_path() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let token = made["token"].as_str().unwrap();
    let session = made["session_id"].as_str().unwrap();
    for base in [format!("/dp/{}", sandbox_id(&made)), format!("/v1/sandbox/relay/{session}")] {
        for is_chunked in [false, true] {
            // More than 64 MiB: there must be no limit on the size that is drained.
            assert_eq!(upload(&ann, &format!("PUT {base}/v1/refused"), Some(token), is_chunked, 70).await, 403, "{base}");
            assert_eq!(upload(&ann, &format!("PUT {base}/v1/files/a"), None, is_chunked, 70).await, 401, "{base}");
        }
    }
}

#[tokio::test]
async fn a_refused_upload_that_stalls_is_cut() {
    let mut world = World::new();
    world.config.body_limits = BodyLimits { grace_seconds: 1, ..BodyLimits::default() };
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let mut stream = ask(&ann, (head(SESSIONS, None, 1 << 20) + "half").as_bytes()).await;
    assert_eq!(timeout(EVENT_TIMEOUT, answer(&mut stream)).await.unwrap().0, 401);
    let mut rest = Vec::new();
    assert_eq!(timeout(EVENT_TIMEOUT, stream.read_to_end(&mut rest)).await.unwrap().unwrap_or(0), 0);
}

#[tokio::test]
async fn a_refused_upload_that_is_still_read_makes_room_for_newer_connections() {
    let mut world = World::new();
    world.config.max_unauthenticated_connections = 4;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let mut refused = ask(&ann, (head(SESSIONS, None, 1 << 20) + "half").as_bytes()).await;
    assert_eq!(timeout(EVENT_TIMEOUT, answer(&mut refused)).await.unwrap().0, 401);
    let mut newer = Vec::new();
    for _ in 0..4 {
        newer.push(ask(&ann, b"").await);
    }
    let mut rest = Vec::new();
    assert_eq!(timeout(EVENT_TIMEOUT, refused.read_to_end(&mut rest)).await.unwrap().unwrap_or(0), 0);
}

#[tokio::test]
async fn a_client_that_expects_a_continue_is_refused_before_its_body() {
    let world = World::new();
    let broker = world.start().await;
    let nobody = Client { key: None, ..broker.human("ann").await };
    let head = head(SESSIONS, None, 1 << 30).replace("\r\n\r\n", "\r\nexpect: 100-continue\r\n\r\n");
    let mut stream = ask(&nobody, head.as_bytes()).await;
    let mut all = String::new();
    timeout(EVENT_TIMEOUT, stream.read_to_string(&mut all)).await.unwrap().unwrap();
    assert!(all.starts_with("HTTP/1.1 401 "), "{all}");
}
