//! Tests of WebSockets through the gateway: a token in a frame is checked and recorded like a token in a header.

use crate::harness::{Client, NEWEST, TestBroker, World, claims, eventually, sandbox_id, session_path};
use cobox_broker::domain::model::AuditRecord;
use cobox_protocol::{SandboxId, SessionId};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Bytes, Message,
        client::IntoClientRequest,
        protocol::frame::{
            Frame,
            coding::{Data, OpCode},
        },
    },
};

type Socket = WebSocketStream<TcpStream>;

async fn open(broker: &TestBroker, id: &SandboxId, token: Option<&Value>) -> Socket {
    let mut request = format!("ws://{}/dp/{id}/v1/ws", broker.addr).into_client_request().unwrap();
    if let Some(token) = token {
        request.headers_mut().insert("authorization", format!("Bearer {}", token.as_str().unwrap()).parse().unwrap());
    }
    request.headers_mut().insert("sec-websocket-extensions", "permessage-deflate".parse().unwrap());
    let stream = TcpStream::connect(broker.addr).await.unwrap();
    let (socket, answer) = tokio_tungstenite::client_async(request, stream).await.unwrap();
    assert!(!answer.headers().contains_key("sec-websocket-extensions"), "no extension is negotiated");
    socket
}

fn auth(token: &Value) -> Message {
    Message::text(json!({ "token": token, "type": "auth" }).to_string())
}

async fn echoed(socket: &mut Socket) -> Value {
    serde_json::from_str(socket.next().await.unwrap().unwrap().to_text().unwrap()).unwrap()
}

/// The error a connection is closed with, and its close code.
async fn refused(mut socket: Socket) -> (String, u16) {
    let error = echoed(&mut socket).await;
    assert_eq!(error["type"], "error");
    let Some(Ok(Message::Close(Some(close)))) = socket.next().await else { panic!("no close after {error}") };
    (error["error"]["code"].as_str().unwrap().to_owned(), close.code.into())
}

/// The use records, once there are that many.
async fn uses(broker: &TestBroker, count: usize) -> Vec<AuditRecord> {
    let store = broker.broker.as_ref().unwrap().store().clone();
    let used = || async {
        let records = store.audit("default", None, &NEWEST).await.unwrap();
        let mut used: Vec<_> = records.into_iter().map(|(_, r)| r).filter(|r| r.action == "dataplane.used").collect();
        used.reverse();
        used
    };
    eventually("the audit records of the use", || async { used().await.len() >= count }).await;
    let used = used().await;
    assert_eq!(used.len(), count, "{used:?}");
    used
}

#[tokio::test]
async fn a_token_in_the_first_frame_is_accepted_and_recorded_like_one_in_the_header() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    for header in [Some(&made["token"]), None] {
        let mut socket = open(&broker, &id, header).await;
        if header.is_none() {
            socket.send(Message::Ping(Bytes::from_static(b"before"))).await.unwrap();
            socket.send(auth(&made["token"])).await.unwrap();
            assert_eq!(socket.next().await.unwrap().unwrap(), Message::Pong(Bytes::from_static(b"before")));
            assert_eq!(echoed(&mut socket).await["token"], made["token"]);
        }
        socket.send(Message::text("hello")).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap(), Message::text("hello"));
    }
    let used = uses(&broker, 2).await;
    for record in &used {
        assert_eq!(record.jti.as_deref(), claims(made["token"].as_str().unwrap())["jti"].as_str());
        assert_eq!(
            (record.principal.as_deref(), record.actor.as_deref(), record.thread.as_deref()),
            (Some("ann"), Some("human"), Some("t"))
        );
        assert_eq!(record.session.as_ref().map(SessionId::as_str), made["session_id"].as_str());
        assert_eq!((record.sandbox.as_ref(), record.detail.as_deref()), (Some(&id), Some("GET /v1/ws 101")));
        assert!(record.request_id.is_some());
    }
    assert_ne!(used[0].request_id, used[1].request_id);
}

#[tokio::test]
async fn a_key_in_a_frame_is_exchanged_for_a_token_and_not_forwarded() {
    let world = World::new();
    let broker = world.start().await;
    let bot = broker.key("bot", cobox_protocol::key::PrincipalKind::Agent).await;
    let made = bot.ensure("t").await;
    let key = json!(bot.key.as_ref().unwrap().expose());
    let mut socket = open(&broker, &sandbox_id(&made), None).await;
    // As the first message, and again while the connection lasts.
    for _ in 0..2 {
        socket.send(auth(&key)).await.unwrap();
        let seen = echoed(&mut socket).await;
        let claims = claims(seen["token"].as_str().unwrap());
        assert_eq!(
            (&claims["sub"], &claims["sid"], &claims["scope"]),
            (&json!("bot"), &made["session_id"], &json!("fs:rw process shell:ro"))
        );
    }
    let used = uses(&broker, 2).await;
    let details: Vec<_> = used.iter().map(|u| u.detail.as_deref().unwrap()).collect();
    assert_eq!(details, ["GET /v1/ws 101", "AUTH /v1/ws 101"]);
    assert_ne!(used[0].jti, used[1].jti);
}

#[tokio::test]
async fn an_opaque_token_in_a_frame_is_replaced_with_one_that_boxd_can_verify() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let params = json!({ "thread_id": "t", "mode": "ensure", "token_format": "opaque" });
    let made = ann.post("/v1/sandbox/sessions", params).await.ok(200);
    assert_ne!(made["token"].as_str().unwrap().split('.').count(), 3, "{made}");
    let mut socket = open(&broker, &sandbox_id(&made), None).await;
    for _ in 0..2 {
        socket.send(auth(&made["token"])).await.unwrap();
        let seen = echoed(&mut socket).await;
        assert_eq!(claims(seen["token"].as_str().unwrap())["sid"], made["session_id"]);
    }
    uses(&broker, 2).await;
}

#[tokio::test]
async fn a_connection_without_a_valid_first_token_is_closed_and_nothing_is_forwarded() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let (made, other) = (ann.ensure("t").await, ann.ensure("other").await);
    let id = sandbox_id(&made);
    let part = Frame::message(format!("{{\"type\":\"auth\",\"token\":{}}}", made["token"]), OpCode::Data(Data::Text), false);
    for first in [
        Message::text("hello"),
        Message::text(json!({ "type": "start", "token": made["token"] }).to_string()),
        Message::binary(json!({ "type": "auth", "token": made["token"] }).to_string()),
        Message::text("x".repeat(20_000)),
        Message::Frame(part),
        auth(&json!("junk")),
        auth(&json!("cbx_junk")),
        auth(&other["token"]),
        auth(&json!(broker.stranger().await.key.unwrap().expose())),
    ] {
        let mut socket = open(&broker, &id, None).await;
        socket.send(first.clone()).await.unwrap();
        let (code, close) = refused(socket).await;
        // A key of another workspace is valid, but the sandbox doesn't exist for it.
        let expected = if code == "SANDBOX_NOT_FOUND" { 1007 } else { 4401 };
        assert_eq!(close, expected, "{code}: {first}");
    }
    ann.delete(&session_path(&made)).await.ok(204);
    assert!(world.provider.received_frames.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_silent_connection_is_closed() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let socket = open(&broker, &sandbox_id(&ann.ensure("t").await), None).await;
    assert_eq!(refused(socket).await, ("UNAUTHENTICATED".to_owned(), 4408));
}

/// Opens a socket that stays silent, and opens it again whenever it is closed. Sends one signal each time.
async fn stay_silent(broker: std::net::SocketAddr, id: SandboxId, opened: tokio::sync::mpsc::UnboundedSender<()>) {
    loop {
        let request = format!("ws://{broker}/dp/{id}/v1/ws").into_client_request().unwrap();
        let stream = TcpStream::connect(broker).await.unwrap();
        // A connection that is closed while it is being opened is also opened again.
        if let Ok((mut socket, _)) = tokio_tungstenite::client_async(request, stream).await {
            if opened.send(()).is_err() {
                return;
            }
            while let Some(Ok(_)) = socket.next().await {}
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeatedly_opened_silent_sockets_do_not_keep_valid_clients_out() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    let (opened, mut openings) = tokio::sync::mpsc::unbounded_channel();
    // More than the limit, so that they constantly displace each other.
    let silent: Vec<_> = (0..160).map(|_| tokio::spawn(stay_silent(broker.addr, id.clone(), opened.clone()))).collect();
    for _ in 0..160 {
        openings.recv().await.unwrap();
    }
    for _ in 0..3 {
        let mut socket = open(&broker, &id, None).await;
        socket.send(auth(&made["token"])).await.unwrap();
        assert_eq!(echoed(&mut socket).await["token"], made["token"]);
        Client { key: None, ..ann.clone() }.get(&format!("/dp/{id}/healthz")).await.ok(200);
        ann.with(&made["token"]).get(&format!("/dp/{id}/v1/x")).await.ok(200);
    }
    silent.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn a_token_sent_later_is_checked_too() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let (made, other) = (ann.ensure("t").await, ann.ensure("other").await);
    let id = sandbox_id(&made);
    let mut socket = open(&broker, &id, Some(&made["token"])).await;
    world.clock.advance(10);
    let fresh = ann.post(&format!("{}/refresh", session_path(&made)), json!({})).await.ok(200);
    let bobs = bob.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "get" })).await.ok(200);
    // boxd judges tokens of its own sandbox. Tokens of other sandboxes and invalid ones never reach it.
    for (displayed, seen) in
        [(&fresh["token"], &fresh["token"]), (&bobs["token"], &bobs["token"]), (&other["token"], &json!("")), (&json!("junk"), &json!(""))]
    {
        socket.send(auth(displayed)).await.unwrap();
        assert_eq!(&echoed(&mut socket).await["token"], seen);
    }
    let details: Vec<_> = uses(&broker, 2).await.into_iter().map(|u| (u.jti.unwrap(), u.detail.unwrap())).collect();
    let jti = |token: &Value| claims(token.as_str().unwrap())["jti"].as_str().unwrap().to_owned();
    assert_eq!(details, [(jti(&made["token"]), "GET /v1/ws 101".to_owned()), (jti(&fresh["token"]), "AUTH /v1/ws 101".to_owned())]);
}

#[tokio::test]
async fn a_key_is_exchanged_in_any_spelling_and_fragmentation_of_its_frame() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let key = ann.key.as_ref().unwrap().expose().to_owned();
    let mut socket = open(&broker, &sandbox_id(&made), Some(&made["token"])).await;
    let piece = |text: &str, opcode, is_last| Message::Frame(Frame::message(text.to_owned(), OpCode::Data(opcode), is_last));
    let (one, two) = ("{\"type\":\"au", format!("th\",\"token\":\"{key}\"}}"));
    let displayed = [
        vec![Message::text(format!("{{\"type\":\"\\u0061uth\",\"token\":\"{key}\"}}"))],
        vec![piece(one, Data::Text, false), piece(&two, Data::Continue, true)],
        vec![
            piece(one, Data::Text, false),
            piece("", Data::Continue, false),
            piece(&two, Data::Continue, false),
            piece("", Data::Continue, true),
        ],
    ];
    for pieces in displayed {
        for piece in pieces {
            socket.send(piece).await.unwrap();
        }
        assert_eq!(claims(echoed(&mut socket).await["token"].as_str().unwrap())["sub"], "ann");
    }
    let details: Vec<_> = uses(&broker, 4).await.into_iter().map(|u| u.detail.unwrap()).collect();
    assert_eq!(details[1..], ["AUTH /v1/ws 101"; 3]);
    let received_frames = world.provider.received_frames.lock().unwrap();
    assert!(!format!("{received_frames:?}").contains(&key), "the key reached the sandbox");
}

#[tokio::test]
async fn a_connection_that_sends_endless_tokens_is_closed() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let key = json!(ann.key.as_ref().unwrap().expose());
    let mut socket = open(&broker, &sandbox_id(&made), Some(&made["token"])).await;
    let mut taken = 0;
    let error = loop {
        socket.send(auth(&key)).await.unwrap();
        match echoed(&mut socket).await {
            error if error["type"] == "error" => break error,
            _ => taken += 1,
        }
        assert!(taken < 1000, "the client must stop being read");
    };
    assert_eq!(error["error"]["code"], "RATE_LIMITED");
    let Some(Ok(Message::Close(Some(close)))) = socket.next().await else { panic!("no close after {error}") };
    assert_eq!((u16::from(close.code), close.reason.as_str()), (1013, "RATE_LIMITED"));
    assert!(taken >= 16, "{taken}");
    uses(&broker, 1 + taken).await;
}

#[tokio::test]
async fn frames_of_every_size_and_kind_pass_unchanged() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let mut socket = open(&broker, &sandbox_id(&made), Some(&made["token"])).await;
    for size in [0, 1, 125, 126, 16 * 1024, 16 * 1024 + 1, 70_000, 1_000_000] {
        for message in [Message::text("\"auth\"".repeat(size / 6)), Message::binary(vec![7u8; size])] {
            socket.send(message.clone()).await.unwrap();
            assert_eq!(socket.next().await.unwrap().unwrap(), message);
        }
    }
    // In fragments, with a ping between them.
    let piece = |text: &'static str, opcode, is_last| Message::Frame(Frame::message(text, OpCode::Data(opcode), is_last));
    socket.send(piece("one ", Data::Text, false)).await.unwrap();
    socket.send(Message::Ping(Bytes::from_static(b"?"))).await.unwrap();
    socket.send(piece("two", Data::Continue, true)).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), Message::Pong(Bytes::from_static(b"?")));
    assert_eq!(socket.next().await.unwrap().unwrap(), Message::text("one two"));
    // Fragments that together exceed the maximum length of a token.
    let halves = ["ü".repeat(5_000), "x".repeat(15_000)];
    for (text, opcode, is_last) in
        [(&halves[0], Data::Text, false), (&halves[1], Data::Continue, false), (&halves[0], Data::Continue, true)]
    {
        socket.send(Message::Frame(Frame::message(text.clone(), OpCode::Data(opcode), is_last))).await.unwrap();
    }
    assert_eq!(socket.next().await.unwrap().unwrap(), Message::text([&*halves[0], &halves[1], &halves[0]].concat()));
    // A connection that breaks off within a frame counts as closed.
    let mut raw = open(&broker, &sandbox_id(&made), Some(&made["token"])).await.into_inner();
    raw.write_all(&[0x81, 0xfe, 0xff]).await.unwrap();
    raw.shutdown().await.unwrap();
    let mut rest = Vec::new();
    tokio::io::AsyncReadExt::read_to_end(&mut raw, &mut rest).await.unwrap();
}

#[tokio::test]
async fn every_admitted_request_is_recorded_whatever_its_outcome() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    let bearer = ann.with(&made["token"]);
    bearer.get(&format!("/dp/{id}/v1/files/workspace/a%20b?x=secret")).await.ok(200);
    bearer.get(&format!("/dp/{id}/nowhere")).await.ok(200);
    let hang = |who: &Client| {
        let (who, id) = (who.clone(), id.clone());
        tokio::spawn(async move { who.get(&format!("/dp/{id}/v1/hang")).await.status })
    };
    // The caller disconnects, and the session ends in the meantime.
    let boxd = world.provider.boxd(&id);
    let gone = hang(&bearer);
    eventually("the request", || async { boxd.seen.lock().unwrap().len() == 3 }).await;
    gone.abort();
    uses(&broker, 3).await;
    let over = hang(&bearer);
    eventually("the request", || async { boxd.seen.lock().unwrap().len() == 4 }).await;
    ann.delete(&session_path(&made)).await.ok(204);
    assert_eq!(over.await.unwrap(), 410);
    let details: Vec<_> = uses(&broker, 4).await.into_iter().map(|u| u.detail.unwrap()).collect();
    let expected = ["GET /v1/files/{path} 200 /v1/files/workspace/a%20b", "GET /nowhere 200", "GET /v1/hang 499", "GET /v1/hang 410"];
    assert_eq!(details, expected);
}
