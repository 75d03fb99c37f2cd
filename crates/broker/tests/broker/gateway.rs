//! Tests of the gateway with the broker behind it: keys are not forwarded, and bytes pass unchanged in both directions.

use axum::body::{Body, Bytes};
use cobox_protocol::key::PrincipalKind;
use futures_util::{SinkExt, StreamExt};
use http::{Method, Request, StatusCode};
use http_body_util::BodyExt;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::{net::TcpStream, sync::mpsc};
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest};

use crate::harness::{Client, NEWEST, World, claims, sandbox_id, session_path};

#[tokio::test]
async fn the_callers_request_id_and_valid_trace_reach_the_sandbox_but_no_credential_does() {
    const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    for trace in [TRACE, "00-0-0-0"] {
        let headers = [
            ("traceparent", trace),
            ("tracestate", "vendor=1"),
            ("x-request-id", "their-own.id:7"),
            ("cookie", "a=b"),
            ("x-thread-authorization", "secret"),
            ("proxy-authorization", "secret"),
        ];
        ann.call(Method::GET, &format!("/dp/{id}/v1/x"), None, &headers).await.ok(200);
    }
    let seen = world.provider.boxd(&id).seen.lock().unwrap().clone();
    let [valid, invalid] = &seen[..] else { panic!("{seen:?}") };
    assert_eq!((&valid.headers["traceparent"], &valid.headers["tracestate"]), (&TRACE.parse().unwrap(), &"vendor=1".parse().unwrap()));
    assert!(!invalid.headers.contains_key("traceparent") && !invalid.headers.contains_key("tracestate"));
    for request in &seen {
        assert_eq!(request.headers["x-request-id"], "their-own.id:7");
        for gone in ["cookie", "x-thread-authorization", "proxy-authorization"] {
            assert!(!request.headers.contains_key(gone), "{gone}");
        }
    }
}

#[tokio::test]
async fn an_api_key_is_exchanged_for_a_token_and_not_forwarded() {
    let world = World::new();
    let broker = world.start().await;
    let bot = broker.key("bot", PrincipalKind::Agent).await;
    let made = bot.ensure("t").await;
    let id = sandbox_id(&made);
    let key = bot.key.clone().unwrap();
    let nobody = Client { key: None, ..bot.clone() };
    let headers = [
        ("x-api-key", key.expose()),
        ("cookie", "a=b"),
        ("x-forwarded-for", "1.2.3.4"),
        ("connection", "x-hop"),
        ("x-hop", "1"),
        ("x-kept", "yes"),
    ];
    nobody.call(Method::GET, &format!("/dp/{id}/v1/x"), None, &headers).await.ok(200);
    bot.get(&format!("/v1/sandbox/relay/{}/v1/x", made["session_id"].as_str().unwrap())).await.ok(200);
    let seen = world.provider.boxd(&id).seen.lock().unwrap().clone();
    assert_eq!(seen.len(), 2);
    for request in &seen {
        assert_eq!((&request.method, request.uri.as_str()), (&Method::GET, "/v1/x"));
        assert!(!format!("{request:?}").contains(&key.expose()[4..]), "the request to boxd must not contain the key");
        let token = request.headers["authorization"].to_str().unwrap().strip_prefix("Bearer ").unwrap();
        assert_eq!(token.split('.').count(), 3);
        let claims = claims(token);
        assert_eq!(claims["sub"], "bot");
        assert_eq!(claims["sid"], made["session_id"]);
        assert_eq!(claims["scope"], "fs:rw process shell:ro");
        assert_eq!(request.headers["host"], "boxd");
        assert!(request.headers["x-request-id"].to_str().unwrap().starts_with("req_"));
    }
    for gone in ["x-api-key", "cookie", "x-forwarded-for", "x-hop", "connection"] {
        assert!(!seen[0].headers.contains_key(gone), "{gone}");
    }
    assert_eq!(seen[0].headers["x-kept"], "yes");
    let store = broker.broker.as_ref().unwrap().store().clone();
    crate::harness::eventually("the audit record", || async {
        let used = store.audit("default", None, &NEWEST).await.unwrap();
        used.iter().filter(|(_, r)| r.action == "dataplane.used").count() == 2
    })
    .await;
    // Negotiation issued one token, and each request with the key issued another. Every use has an issue record, and
    // every record names its principal.
    let records: Vec<_> = store.audit("default", None, &NEWEST).await.unwrap().into_iter().map(|(_, r)| r).collect();
    let of = |action: &str| records.iter().filter(|r| r.action == action).collect::<Vec<_>>();
    let (issued, used) = (of("token.issued"), of("dataplane.used"));
    assert_eq!((issued.len(), used.len()), (3, 2));
    for record in issued.iter().chain(&used) {
        assert!(record.request_id.is_some() && record.jti.is_some(), "{record:?}");
        assert_eq!((record.principal.as_deref(), record.actor.as_deref()), (Some("bot"), Some("agent")));
        assert_eq!((record.thread.as_deref(), record.sandbox.as_ref()), (Some("t"), Some(&id)));
        assert_eq!(record.session.as_ref().map(|s| s.as_str()), made["session_id"].as_str());
    }
    assert!(used.iter().all(|u| issued.iter().any(|i| i.jti == u.jti && i.request_id == u.request_id)));
}

#[tokio::test]
async fn a_sandbox_without_a_session_gets_a_token_without_one() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.post("/v1/sandboxes", json!({})).await.ok(201);
    let id = made["id"].as_str().unwrap().parse().unwrap();
    ann.get(&format!("/dp/{id}/v1/x")).await.ok(200);
    let seen = world.provider.boxd(&id).seen.lock().unwrap()[0].clone();
    let claims = claims(seen.headers["authorization"].to_str().unwrap().strip_prefix("Bearer ").unwrap());
    assert_eq!(claims.get("sid"), None);
    assert_eq!(claims["aud"], made["id"]);
}

#[tokio::test]
async fn only_valid_tokens_pass() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let (made, other) = (ann.ensure("t").await, ann.ensure("other").await);
    let path = format!("/dp/{}/v1/x", sandbox_id(&made));
    let token = made["token"].as_str().unwrap();
    ann.with(&json!(token)).get(&path).await.ok(200);
    let mut parts: Vec<&str> = token.split('.').collect();
    let unsigned = format!("eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0.{}.", parts[1]);
    let swapped = {
        parts[2] = other["token"].as_str().unwrap().rsplit('.').next().unwrap();
        parts.join(".")
    };
    for bad in ["junk", unsigned.as_str(), swapped.as_str(), other["token"].as_str().unwrap()] {
        assert_eq!(ann.with(&json!(bad)).get(&path).await.error(401), "UNAUTHENTICATED", "{bad}");
    }
    let relay = format!("/v1/sandbox/relay/{}/v1/x", other["session_id"].as_str().unwrap());
    assert_eq!(ann.with(&json!(token)).get(&relay).await.error(401), "UNAUTHENTICATED");
    let nobody = Client { key: None, ..ann.clone() };
    assert_eq!(nobody.get(&path).await.error(401), "UNAUTHENTICATED");
    assert_eq!(nobody.get(&format!("/dp/{}/healthz", sandbox_id(&made))).await.status, 200);
    world.clock.advance(906);
    assert_eq!(ann.with(&json!(token)).get(&path).await.error(401), "TOKEN_EXPIRED");
    let seen = world.provider.boxd(&sandbox_id(&made)).seen.lock().unwrap().len();
    assert_eq!(seen, 2, "malformed requests must not reach boxd");
}

#[tokio::test]
async fn a_path_is_forwarded_byte_for_byte_and_a_response_is_sanitized() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    let rest = "/v1/files/a%2Fb%20c%FF/..%2e/%E4?path=%2Fx&y=a+b%00";
    ann.get(&format!("/dp/{id}{rest}")).await.ok(200);
    assert_eq!(world.provider.boxd(&id).seen.lock().unwrap()[0].uri, rest);
    let page = ann.get(&format!("/dp/{id}/v1/html")).await;
    assert_eq!(page.bytes, "<script>");
    assert_eq!(page.headers["content-disposition"], "attachment");
    assert_eq!(page.headers["content-security-policy"], "sandbox");
    assert_eq!(page.headers["x-content-type-options"], "nosniff");
    assert!(page.headers["x-request-id"].to_str().unwrap().starts_with("req_"));
    for gone in ["set-cookie", "server"] {
        assert!(!page.headers.contains_key(gone), "{gone}");
    }
}

#[tokio::test]
async fn bodies_stream_in_both_directions_while_they_are_sent() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    let (chunks, queue) = mpsc::channel::<Bytes>(1);
    let body =
        Body::from_stream(futures_util::stream::unfold(
            queue,
            |mut q| async move { q.recv().await.map(|c| (Ok::<_, std::io::Error>(c), q)) },
        ));
    let request = Request::post(format!("/dp/{id}/v1/echo"))
        .header("host", "broker")
        .header("authorization", format!("Bearer {}", ann.key.clone().unwrap().expose()))
        .body(body)
        .unwrap();
    let stream = TcpStream::connect(broker.addr).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let answering = tokio::spawn(async move { sender.send_request(request).await.unwrap() });
    chunks.send(Bytes::from_static(b"first")).await.unwrap();
    let mut answer = answering.await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    // The first chunk returns before the second is sent: nothing buffers the whole body.
    assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), "first");
    let block = Bytes::from(vec![7u8; 1 << 20]);
    let sending = tokio::spawn(async move {
        for _ in 0..64 {
            chunks.send(block.clone()).await.unwrap();
        }
    });
    let mut received = 0;
    while let Some(frame) = answer.frame().await {
        received += frame.unwrap().into_data().unwrap().len();
    }
    sending.await.unwrap();
    assert_eq!(received, 64 << 20);
}

#[tokio::test]
async fn a_websocket_passes_with_a_header_or_without_one() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    for credential in [Some(made["token"].as_str().unwrap()), None] {
        let mut request = format!("ws://{}/dp/{id}/v1/ws", broker.addr).into_client_request().unwrap();
        if let Some(token) = credential {
            request.headers_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        let stream = TcpStream::connect(broker.addr).await.unwrap();
        let (mut socket, response) = tokio_tungstenite::client_async(request, stream).await.unwrap();
        assert!(response.headers()["x-request-id"].to_str().unwrap().starts_with("req_"));
        if credential.is_none() {
            let frame = Message::text(json!({ "type": "auth", "token": made["token"] }).to_string());
            socket.send(frame).await.unwrap();
            assert!(socket.next().await.unwrap().unwrap().to_text().unwrap().contains(made["token"].as_str().unwrap()));
        }
        for message in [Message::text("hello"), Message::binary(vec![0u8; 100_000])] {
            socket.send(message.clone()).await.unwrap();
            assert_eq!(socket.next().await.unwrap().unwrap(), message);
        }
        socket.close(None).await.unwrap();
        while let Some(Ok(_)) = socket.next().await {}
    }
}

#[tokio::test]
async fn no_sandbox_is_resumed_without_a_credential() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    world.clock.advance(3600);
    broker.tick().await;
    let nobody = Client { key: None, ..ann.clone() };
    let upgrade = [
        ("connection", "upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA=="),
    ];
    let asleep = nobody.call(Method::GET, &format!("/dp/{id}/v1/ws"), None, &upgrade).await;
    let unknown = nobody.call(Method::GET, &format!("/dp/{}/v1/ws", cobox_protocol::SandboxId::new()), None, &upgrade).await;
    assert_eq!(asleep.json()["error"]["message"], unknown.json()["error"]["message"]);
    assert_eq!(asleep.error(401), "UNAUTHENTICATED");
    assert_eq!(world.provider.running(), 0);
}

#[tokio::test]
async fn a_pending_request_ends_with_its_session_or_sandbox() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let alone = ann.post("/v1/sandboxes", json!({})).await.ok(201);
    let alone_id = alone["id"].as_str().unwrap();
    for (id, end, status, code) in [
        (sandbox_id(&made), session_path(&made), 410, "SESSION_EXPIRED"),
        (alone_id.parse().unwrap(), format!("/v1/sandboxes/{alone_id}"), 404, "SANDBOX_NOT_FOUND"),
    ] {
        let boxd = world.provider.boxd(&id);
        let hanging = tokio::spawn({
            let (ann, id) = (ann.clone(), id.clone());
            async move { ann.get(&format!("/dp/{id}/v1/hang")).await }
        });
        crate::harness::eventually("the request", || async { !boxd.seen.lock().unwrap().is_empty() }).await;
        ann.delete(&end).await.ok(204);
        assert_eq!(hanging.await.unwrap().error(status), code);
        assert_eq!(
            boxd.state.lock().unwrap().stop_reason,
            Some(cobox_protocol::control::StopReason::Ended),
            "the stop notice precedes the end"
        );
    }
}

#[tokio::test]
async fn a_sandbox_is_notified_before_its_suspension_and_suspended_without_a_response_too() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    let boxd = world.provider.boxd(&id);
    broker.broker.as_ref().unwrap().suspend_all().await.unwrap();
    assert_eq!(boxd.state.lock().unwrap().stop_reason, Some(cobox_protocol::control::StopReason::Suspended));
    ann.get(&format!("/dp/{id}/v1/x")).await.ok(200);
    assert_eq!(boxd.state.lock().unwrap().stop_reason, None, "the restored sandbox has no stop notice");
    boxd.ignores_pushes.store(true, std::sync::atomic::Ordering::SeqCst);
    broker.broker.as_ref().unwrap().suspend_all().await.unwrap();
    assert_eq!(ann.state(&id).await, "suspended");
}

#[tokio::test]
async fn the_sdks_routes_are_refused_in_the_sdks_shape() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    let nobody = Client { key: None, ..ann.clone() };
    for (method, route) in [(Method::POST, "execute"), (Method::POST, "upload?path=/x"), (Method::GET, "download?path=/x")] {
        let answer = nobody.call(method.clone(), &format!("/dp/{id}/{route}"), None, &[]).await;
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
        let detail = answer.ok(401)["detail"].clone();
        assert_eq!(detail["error"], "Unauthorized");
        assert!(detail["message"].as_str().unwrap().contains("no credential"));
        let unknown = ann.call(method, &format!("/dp/{}/{route}", cobox_protocol::SandboxId::new()), None, &[]).await.ok(404);
        assert_eq!(unknown["detail"]["error"], "SandboxNotFound");
    }
    assert_eq!(nobody.get(&format!("/dp/{id}/v1/execute")).await.error(401), "UNAUTHENTICATED");
}

#[tokio::test]
async fn a_connection_to_the_sandbox_is_reused_by_its_client_only() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let id = sandbox_id(&ann.ensure("t").await);
    let stream = TcpStream::connect(broker.addr).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let mut echo = async |caller: &Client, text: &'static str| {
        let request = Request::post(format!("/dp/{id}/v1/echo"))
            .header("host", "broker")
            .header("authorization", format!("Bearer {}", caller.key.as_ref().unwrap().expose()))
            .body(http_body_util::Full::new(Bytes::from(text)))
            .unwrap();
        sender.ready().await.unwrap();
        let answer = sender.send_request(request).await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), text);
        world.provider.dialled.load(std::sync::atomic::Ordering::SeqCst)
    };
    let first = echo(&ann, "1").await;
    assert_eq!((echo(&ann, "2").await, echo(&ann, "3").await), (first, first));
    assert_eq!((echo(&bob, "4").await, echo(&bob, "5").await), (first + 1, first + 1), "several callers may share a proxy's connection");
    // Once the connection is known to be closed, the next request uses a new one.
    world.provider.boxd(&id).stop();
    while ann.state(&id).await != "suspended" {
        tokio::task::yield_now().await;
    }
    assert!(echo(&bob, "6").await > first + 1);
}

#[tokio::test]
async fn a_key_in_a_url_is_refused_and_not_forwarded() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    let key = ann.key.as_ref().unwrap().expose();
    let relay = format!("/v1/sandbox/relay/{}", made["session_id"].as_str().unwrap());
    for base in [format!("/dp/{id}"), relay] {
        for rest in [format!("/v1/files/workspace/{key}"), format!("/v1/fs/list?path=/&api_key={key}"), format!("/?{key}")] {
            let refused = ann.get(&format!("{base}{rest}")).await;
            let reported = refused.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(reported.contains("replace") && !reported.contains(key), "{reported}");
            assert_eq!(refused.error(400), "INVALID_REQUEST");
        }
    }
    ann.get(&format!("/dp/{id}/v1/files/cbx_notes?x=cbx_")).await.ok(200);
    assert_eq!(world.provider.boxd(&id).seen.lock().unwrap().len(), 1);
}
