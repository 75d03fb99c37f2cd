//! Tests with a boxd that violates HTTP: endless or huge heads, wrong lengths, unsolicited responses. A client gets an
//! error or a truncated response, never the response of another request, and the broker uses little memory and keeps
//! serving.

use std::{fs, path::Path, time::Duration};

use cobox_client::{Dataplane, ExecEvent, SyncUnavailable};
use cobox_protocol::{exec::ExecRequest, frame::ExecStart, fs::ListRequest, key::PrincipalKind, session::Mode};
use cobox_sync::{ConnectError, Connection, Engine, Settings};
use cobox_testkit::negotiate;
use futures_util::StreamExt;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use crate::{
    fake_provider::{FakeClaims, RawResponse},
    false_responses,
    harness::{Client, NEWEST, World, eventually, sandbox_id, session_path},
};

const EVENT_TIMEOUT: Duration = Duration::from_secs(60);
const EVIL: &str = "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nEVIL";

fn raw_response(first: impl Into<Vec<u8>>) -> RawResponse {
    RawResponse { first: first.into(), then: None, closes: true }
}

/// Everything that one request on its own connection receives, until the end or `enough` bytes.
async fn receive_raw(client: &Client, made: &Value, enough: usize) -> String {
    let mut stream = TcpStream::connect(client.addr).await.unwrap();
    let head = format!(
        "GET /dp/{}/v1/x HTTP/1.1\r\nhost: broker\r\nconnection: close\r\nauthorization: Bearer {}\r\n\r\n",
        sandbox_id(made),
        made["token"].as_str().unwrap()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut got = Vec::new();
    let reading = async { while got.len() < enough && stream.read_buf(&mut got).await.unwrap_or(0) > 0 {} };
    timeout(EVENT_TIMEOUT, reading).await.expect("the answer ends");
    String::from_utf8_lossy(&got).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_that_is_not_http_is_an_error_of_the_sandbox() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let filler = |n: usize| "x".repeat(n);
    for (what, raw_response) in [
        ("nothing", raw_response("")),
        ("no HTTP", raw_response("SSH-2.0-OpenSSH_9.9\r\n\r\n")),
        ("half a head", raw_response("HTTP/1.1 200 OK\r\ncontent-le")),
        ("a head that is too large", raw_response(format!("HTTP/1.1 200 OK\r\nx-big: {}\r\n\r\n", filler(2 << 20)))),
        ("too many headers", raw_response(format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(10_000)))),
        ("a head without end", RawResponse { then: Some(b"a: b\r\n".repeat(1000)), ..raw_response("HTTP/1.1 200 OK\r\n") }),
        ("a line without end", RawResponse { then: Some(vec![b'x'; 4096]), ..raw_response("HTTP/1.1 200 ") }),
        ("two lengths", raw_response("HTTP/1.1 200 OK\r\ncontent-length: 4\r\ncontent-length: 40\r\n\r\nfour")),
        ("a length that is no number", raw_response("HTTP/1.1 200 OK\r\ncontent-length: +4\r\n\r\nfour")),
        ("a negative length", raw_response("HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nfour")),
        ("an unknown coding", raw_response("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, gzip\r\n\r\n4\r\nfour\r\n0\r\n\r\n")),
        ("another protocol", raw_response("HTTP/1.1 101 Switching Protocols\r\nupgrade: evil\r\nconnection: upgrade\r\n\r\n")),
        ("a status that is none", raw_response("HTTP/1.1 99999 OK\r\n\r\n")),
        ("a line break in a header", raw_response("HTTP/1.1 200 OK\r\nx-a: b\nset-cookie: a=b\r\n\rx: y\r\n\r\n")),
    ] {
        *world.provider.raw_response.lock().unwrap() = Some(raw_response);
        let got = receive_raw(&ann, &made, 1 << 20).await;
        let status = got.get(9..12).unwrap_or_default();
        assert!(status == "503" || status == "200" && !got.contains("set-cookie") && what.contains("unknown"), "{what}: {got:.200}");
    }
    *world.provider.raw_response.lock().unwrap() = None;
    ann.with(&made["token"]).get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.ok(200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_of_the_wrong_length_ends_its_connection_and_does_not_affect_the_next() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    // Shorter than announced: the client must notice.
    *world.provider.raw_response.lock().unwrap() = Some(raw_response("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort"));
    let got = receive_raw(&ann, &made, 1 << 20).await;
    assert!(got.starts_with("HTTP/1.1 200 ") && got.contains("content-length: 100") && got.ends_with("short"), "{got}");
    // Truncated chunks are not terminated as if they were complete.
    *world.provider.raw_response.lock().unwrap() =
        Some(raw_response("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nshort\r\n"));
    let got = receive_raw(&ann, &made, 1 << 20).await;
    assert!(got.starts_with("HTTP/1.1 200 ") && !got.ends_with("0\r\n\r\n"), "{got}");
    // Longer than announced, or with both kinds of lengths: the bytes that follow are no response to any request.
    for first in [
        format!("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ngood{EVIL}"),
        format!("HTTP/1.1 200 OK\r\ncontent-length: 400\r\ntransfer-encoding: chunked\r\n\r\n4\r\ngood\r\n0\r\n\r\n{EVIL}"),
        format!("HTTP/1.1 204 No Content\r\ncontent-length: 4\r\n\r\n{EVIL}"),
        format!("HTTP/1.1 304 Not Modified\r\ncontent-length: 4\r\n\r\n{EVIL}"),
    ] {
        for closes in [true, false] {
            *world.provider.raw_response.lock().unwrap() = Some(RawResponse { closes, ..raw_response(first.clone()) });
            let mut stream = TcpStream::connect(ann.addr).await.unwrap();
            let request =
                |path: &str, credential: &str| format!("GET {path} HTTP/1.1\r\nhost: broker\r\nauthorization: Bearer {credential}\r\n\r\n");
            let lied = request(&format!("/dp/{}/v1/x", sandbox_id(&made)), made["token"].as_str().unwrap());
            let own = request("/v1/sandboxes", ann.key.as_ref().unwrap().expose()).replacen("host", "connection: close\r\nhost", 1);
            // Two requests to the sandbox, then one to the broker itself, on one connection.
            stream.write_all(format!("{lied}{lied}{own}").as_bytes()).await.unwrap();
            let mut got = String::new();
            timeout(EVENT_TIMEOUT, stream.read_to_string(&mut got)).await.unwrap().unwrap();
            assert!(!got.contains("EVIL"), "{first:?}: {got}");
            assert!(got.ends_with("\"next_cursor\":null}") || got.contains("\"items\""), "{first:?}: {got}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endless_response_is_forwarded_as_it_is_read_and_ends_with_its_client() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let endless = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunk = [b"10000\r\n".as_slice(), &[b'x'; 0x10000], b"\r\n"].concat();
    *world.provider.raw_response.lock().unwrap() = Some(RawResponse { then: Some(chunk), ..raw_response(endless) });
    let got = receive_raw(&ann, &made, 8 << 20).await;
    assert!(got.len() >= 8 << 20 && got.starts_with("HTTP/1.1 200 "));
    *world.provider.raw_response.lock().unwrap() = None;
    ann.with(&made["token"]).get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.ok(200);
}

#[tokio::test]
async fn reports_of_a_boxd_are_bounded_and_only_about_its_own_sandbox() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let (mine, other) = (ann.ensure("mine").await, ann.ensure("other").await);
    let boxd = world.provider.boxd(&sandbox_id(&mine));
    // It claims to be another sandbox, in another session, by another principal, from the future, with terminal
    // sequences.
    boxd.claims.send_replace(FakeClaims::Batch(json!({ "life": "1\u{1b}]0;x\u{7}", "lost": u64::MAX, "more": true, "items": [{
        "seq": u64::MAX, "at": "2999-01-01T00:00:00Z", "request_id": "x\r\ny", "jti": "j".repeat(100_000), "principal": "root\u{1b}[2J",
        "session_id": other["session_id"], "method": "GET", "route": "/\u{202e}", "status": 65535, "duration_ms": u64::MAX,
    }] })));
    let root = broker.key("root", cobox_protocol::key::PrincipalKind::Operator).await;
    let records_of = async |session: &Value| root.get(&format!("/v1/audit?sandbox={}&limit=200", sandbox_id(session))).await;
    let has_claim = async || String::from_utf8_lossy(&records_of(&mine).await.bytes).contains("sandbox.claim");
    eventually("its claim is stored", has_claim).await;
    let of_other = records_of(&other).await.ok(200);
    assert!(of_other["items"].as_array().unwrap().iter().all(|item| item["action"] != "sandbox.claim"), "{of_other}");
    let answer = records_of(&mine).await;
    assert!(answer.bytes.len() < 64 * 1024, "{} bytes", answer.bytes.len());
    assert!(!String::from_utf8_lossy(&answer.bytes).contains("\\u001b"));
    ann.get("/v1/sandboxes").await.ok(200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_boxd_that_lies_to_broker_client_and_sync_gains_nothing() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, root) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await);
    let other = ann.ensure("other").await;
    let client = cobox_client::Client::new(&format!("http://{}", broker.addr), ann.key.clone().unwrap()).unwrap();
    let session = client.open(&negotiate("liar", Mode::Ensure)).await.unwrap();
    let id = session.info().sandbox.id.clone();
    // Sent to the broker: activity of another session, by another principal, at another time, and more than exists.
    let boxd = world.provider.boxd(&id);
    boxd.claims.send_replace(FakeClaims::Batch(json!({ "life": "1", "lost": u64::MAX, "more": true, "items": [{
        "seq": u64::MAX, "at": "2999-01-01T00:00:00Z", "request_id": "x", "principal": "root", "session_id": other["session_id"],
        "method": "DELETE", "route": "/", "status": 200, "duration_ms": 0,
    }] })));
    let deed = json!({ "type": "exec", "command": "rm -rf /", "exit_code": 0, "duration_ms": 1 });
    let activity = |seq: u64| json!({ "seq": seq, "at": "2999-01-01T00:00:00Z", "principal": "root", "session_id": other["session_id"], "what": deed });
    boxd.activity_items.send_replace((1..=20).map(activity).collect());
    world.provider.liars.lock().unwrap().insert(id.clone(), false_responses::router());

    let laptop = tempfile::tempdir().unwrap();
    fs::create_dir(laptop.path().join("here")).unwrap();
    fs::write(laptop.path().join("here/mine"), "mine").unwrap();
    let to_broker = async {
        for _ in 0..20 {
            broker.tick().await;
        }
    };
    let to_others = async {
        for _ in 0..50 {
            ann.with(&other["token"]).get(&format!("/dp/{}/v1/x", sandbox_id(&other))).await.ok(200);
        }
    };
    let all = async {
        tokio::join!(to_broker, to_others, lied_to_a_client(session.dataplane()), lied_to_a_sync(session.dataplane(), laptop.path()))
    };
    timeout(EVENT_TIMEOUT, all).await.expect("no response of boxd may block the broker");

    // Neither a file outside the folder nor a wrong one in it.
    assert_eq!(fs::read_to_string(laptop.path().join("here/mine")).unwrap(), "mine");
    assert!(!laptop.path().join("evil").exists());
    let names = |dir: &Path| {
        fs::read_dir(dir)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .filter(|n| !n.starts_with('.'))
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&laptop.path().join("here")), ["mine"]);
    // Nothing is attributed to the other session, neither in its events nor in its audit.
    let mut events = ann.watch(&other, "", &[]).await;
    ann.delete(&session_path(&other)).await.ok(204);
    let types: Vec<String> = events.until("terminated").await.into_iter().filter(|kind| kind != "connected").collect();
    assert_eq!(types, ["created", "active", "terminated"], "only the broker's own events");
    let of_other = root.get(&format!("/v1/audit?sandbox={}&limit=200", sandbox_id(&other))).await.ok(200);
    assert!(of_other["items"].as_array().unwrap().iter().all(|item| item["action"] != "sandbox.claim"), "{of_other}");
    let records = broker.broker.as_ref().unwrap().store().audit("default", None, &NEWEST).await.unwrap();
    assert!(records.iter().all(|(_, r)| r.action != "session.ended" || r.principal.as_deref() == Some("ann")));
    ann.get("/v1/sandboxes").await.ok(200);
}

/// Each response is an error or ends in one: it is never accepted as complete or correct.
async fn lied_to_a_client(dataplane: &Dataplane) {
    for _ in 0..false_responses::LIES {
        dataplane.exec(&ExecRequest { command: Some("true".to_owned()), ..Default::default() }).await.unwrap_err();
    }
    dataplane.list_files(&ListRequest::default()).await.unwrap_err();
    // The connection may break before the response's head was sent.
    if let Ok(file) = dataplane.read_file(b"/workspace/a").await {
        let pieces: Vec<_> = file.into_stream().collect().await;
        assert!(pieces.last().unwrap().is_err(), "a truncated file must be an error");
    }
    let mut stream = dataplane.exec_stream(ExecStart { command: Some("true".to_owned()), ..Default::default() }).await.unwrap();
    let (mut output, mut failed) = (Vec::new(), false);
    while let Some(event) = stream.output.next().await {
        match event {
            Ok(ExecEvent::Stdout(bytes)) => output.extend_from_slice(&bytes),
            Ok(ExecEvent::Exit { .. }) => panic!("incomplete output was accepted as complete"),
            Ok(_) => {}
            Err(_) => failed = true,
        }
    }
    assert!(failed);
    assert_eq!(output, b"real");
}

/// One connection per lie.
async fn lied_to_a_sync(dataplane: &Dataplane, laptop: &Path) {
    for number in 0..false_responses::LIES {
        let (dataplane, laptop, runtime) = (dataplane.clone(), laptop.to_owned(), tokio::runtime::Handle::current());
        let ran = tokio::task::spawn_blocking(move || {
            let mut is_first = true;
            let mut dial = || {
                if !std::mem::take(&mut is_first) {
                    return Err(ConnectError::Permanent("there is no second connection".to_owned()));
                }
                match runtime.block_on(dataplane.open_sync(b"/workspace", false)) {
                    Ok((reader, writer)) => Ok(Connection { reader: Box::new(reader), writer: Box::new(writer) }),
                    Err(SyncUnavailable::Transient(cause)) => Err(ConnectError::Permanent(cause)),
                    Err(SyncUnavailable::Final(error)) => Err(ConnectError::Permanent(error.to_string())),
                }
            };
            let settings = Settings { once: true, ..Settings::default() };
            let base = laptop.join(format!("base-{number}"));
            Engine::open(&laptop.join("here"), &base, settings, Box::new(|_| ())).unwrap().run(&mut dial)
        });
        // Wrong content may be reported only as a conflict or a problem; the other lies are refused.
        let ended = ran.await.unwrap();
        assert!(ended.is_err() || number == 1, "{number}: {ended:?}");
    }
}
