//! Tests of the thread routes and of the notice that a thread was deleted.

use cobox_protocol::key::PrincipalKind;
use hmac::{Hmac, KeyInit, Mac};
use http::Method;
use serde_json::{Value, json};

use crate::harness::{Answer, Client, NEWEST, World, claims, sandbox_id, session_path};

#[tokio::test]
async fn the_sandbox_of_a_thread_is_created_found_renewed_and_released_by_thread_id() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let path = "/threads/a%2Fb%20c/sandbox";
    for (method, route) in [(Method::GET, ""), (Method::DELETE, ""), (Method::POST, "/refresh"), (Method::POST, "/heartbeat")] {
        assert_eq!(ann.call(method, &format!("{path}{route}"), None, &[]).await.error(404), "SESSION_NOT_FOUND");
    }
    let made = ann.call(Method::POST, path, None, &[]).await.ok(200);
    let base = format!("{}/dp/{}/v1", broker.addr, made["sandbox_id"].as_str().unwrap());
    assert_eq!(made["endpoints"], json!({ "http": format!("http://{base}"), "ws": format!("ws://{base}/ws") }));
    assert_eq!(made["scopes"], json!(["fs:rw", "process", "shell"]));
    assert_eq!(claims(made["token"].as_str().unwrap())["thread_id"], "a/b c");
    assert_eq!(ann.ensure("a/b c").await["session_id"], made["session_id"], "every route finds the same session");
    let found = ann.get(path).await.ok(200);
    assert_eq!((&found["sandbox_id"], &found["session_id"]), (&made["sandbox_id"], &made["session_id"]));
    assert_ne!(found["token"], made["token"]);
    let beat = ann.post(&format!("{path}/heartbeat"), json!({})).await.ok(200);
    assert_eq!(beat["state"], "active");
    assert_eq!(ann.post(path, json!({ "thread_id": "another" })).await.error(400), "INVALID_REQUEST");
    assert_eq!(ann.post(path, json!({ "mode": "create_only" })).await.error(409), "SESSION_CONFLICT");
    assert_eq!(ann.post(path, json!({ "sandbox_id": "nobody" })).await.error(404), "SANDBOX_NOT_FOUND");
    assert_eq!(ann.delete(path).await.status, 204);
    assert_eq!(ann.delete(path).await.error(404), "SESSION_NOT_FOUND");
    assert_eq!(world.provider.running(), 0);
}

#[tokio::test]
async fn on_the_thread_route_a_refresh_rotates_by_default() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let body = json!({ "scopes": ["fs:ro"], "ttl": 600 });
    let (one, two) = (ann.post("/threads/t/sandbox", body.clone()).await.ok(200), ann.post("/threads/t/sandbox", body).await.ok(200));
    let refresh = "/threads/t/sandbox/refresh";
    let renewed = ann.post(refresh, json!({ "sandbox_id": one["sandbox_id"], "current_token": one["token"] })).await.ok(200);
    ann.post(refresh, json!({ "current_token": two["token"], "rotate": false })).await.ok(200);
    ann.post(refresh, json!({})).await.ok(200);
    assert_eq!(claims(renewed["token"].as_str().unwrap())["scope"], "fs:ro", "a refresh must not widen the capabilities");
    world.clock.advance(30);
    let path = format!("/dp/{}/v1/x", one["sandbox_id"].as_str().unwrap());
    assert_eq!(ann.with(&one["token"]).get(&path).await.error(401), "TOKEN_REVOKED");
    for living in [&two, &renewed] {
        ann.with(&living["token"]).get(&path).await.ok(200);
    }
}

#[tokio::test]
async fn the_session_of_a_deleted_thread_ends() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, root) = (broker.human("ann").await, broker.human("bob").await, broker.key("root", PrincipalKind::Operator).await);
    assert_eq!(ann.delete("/threads/t").await.status, 204, "a repeated deletion succeeds");
    let made = ann.ensure("t").await;
    assert_eq!(bob.delete("/threads/t").await.error(403), "FORBIDDEN");
    assert_eq!(broker.stranger().await.delete("/threads/t").await.status, 204, "another workspace's thread is another thread");
    assert_eq!(root.delete("/threads/t").await.status, 204);
    let over = ann.get(&session_path(&made)).await;
    assert!(over.json()["error"]["message"].as_str().unwrap().contains("its thread was deleted"));
    assert_eq!(over.error(410), "SESSION_EXPIRED");
    assert_eq!(*world.provider.destroyed.lock().unwrap(), [sandbox_id(&made)]);
    let kept = ann.post("/threads/u/sandbox", json!({ "name": "dev" })).await.ok(200);
    assert_eq!(ann.delete("/threads/u").await.status, 204);
    assert_eq!(ann.state(&kept["sandbox_id"].as_str().unwrap().parse().unwrap()).await, "suspended");
}

const SECRET: &str = "a shared secret of both sides";

struct Sender {
    client: Client,
}

fn sign(at: i64, body: &str, secret: &str) -> String {
    let mac = Hmac::<sha2::Sha256>::new_from_slice(secret.as_bytes()).unwrap();
    let mac = mac.chain_update(format!("{at}.{body}")).finalize().into_bytes();
    format!("v1={}", mac.iter().map(|b| format!("{b:02x}")).collect::<String>())
}

impl Sender {
    async fn send(&self, at: i64, body: &Value, secret: &str) -> Answer {
        let signature = sign(at, &body.to_string(), secret);
        let headers = [("x-cobox-timestamp", &*at.to_string()), ("x-cobox-signature", &*signature)];
        self.client.call(Method::POST, "/webhooks/threads", Some(body.clone()), &headers).await
    }
}

#[tokio::test]
async fn a_signed_notice_ends_the_session_of_a_thread_and_a_late_copy_ends_no_other() {
    use cobox_broker::Clock;
    let mut world = World::new();
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), format!("{SECRET}\n")).unwrap();
    world.config.webhook_secret_file = Some(secret.path().to_owned());
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let sender = Sender { client: Client { key: None, ..ann.clone() } };
    let made = ann.ensure("t").await;
    let (now, deleted) = (world.clock.now().unix(), json!({ "event": "thread.deleted", "thread_id": "t" }));
    assert_eq!(sender.send(now, &deleted, "another secret, guessed").await.error(401), "UNAUTHENTICATED");
    assert_eq!(sender.send(now - 301, &deleted, SECRET).await.error(401), "UNAUTHENTICATED");
    let unsigned = sender.client.post("/webhooks/threads", deleted.clone()).await;
    assert_eq!(unsigned.error(401), "UNAUTHENTICATED");
    for wrong in [json!({ "event": "thread.made", "thread_id": "t" }), json!({ "event": "thread.deleted" }), json!([])] {
        assert_eq!(sender.send(now, &wrong, SECRET).await.error(400), "INVALID_REQUEST");
    }
    assert_eq!(world.provider.running(), 1);

    assert_eq!(sender.send(now, &deleted, SECRET).await.ok(200), json!({ "ended": true }));
    assert_eq!(ann.get(&session_path(&made)).await.error(410), "SESSION_EXPIRED");
    assert_eq!(world.provider.running(), 0);
    world.clock.advance(1);
    let next = ann.ensure("t").await;
    assert_eq!(sender.send(now, &deleted, SECRET).await.ok(200), json!({ "ended": false }), "the notice concerns the earlier session");
    ann.get(&session_path(&next)).await.ok(200);
    let restricted = json!({ "event": "thread.archived", "thread_id": "t", "dry_run": true });
    assert_eq!(sender.send(now + 1, &restricted, SECRET).await.error(400), "INVALID_REQUEST", "an unknown field is refused");
    let archived = json!({ "event": "thread.archived", "thread_id": "t" });
    assert_eq!(sender.send(now + 1, &archived, SECRET).await.ok(200), json!({ "ended": true }));
    let audit = broker.broker.as_ref().unwrap().store().audit("default", None, &NEWEST).await.unwrap();
    let ended: Vec<_> = audit.iter().map(|(_, r)| r).filter(|r| r.action == "session.ended").collect();
    assert_eq!(ended.len(), 2);
    assert!(ended.iter().all(|r| r.principal.as_deref() == Some("webhook") && r.thread.as_deref() == Some("t") && r.request_id.is_some()));
}

#[tokio::test]
async fn forged_notices_are_refused_and_end_nothing() {
    use cobox_broker::Clock;
    const MAX_BYTES: usize = 64 * 1024;
    let mut world = World::new();
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), SECRET).unwrap();
    world.config.webhook_secret_file = Some(secret.path().to_owned());
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let anyone = Client { key: None, ..ann.clone() };
    let now = world.clock.now().unix();
    let body = json!({ "event": "thread.deleted", "thread_id": "t" }).to_string();
    let (time, good) = (now.to_string(), sign(now, &body, SECRET));
    let send = async |times: &[&str], signatures: &[&str], body: &str| {
        let mut request = http::Request::post("/webhooks/threads");
        for time in times {
            request = request.header("x-cobox-timestamp", *time);
        }
        for signature in signatures {
            request = request.header("x-cobox-signature", *signature);
        }
        anyone.send(request.body(http_body_util::Full::new(body.to_owned().into())).unwrap()).await
    };
    let of_another_body = sign(now, &body.replace("deleted", "archived"), SECRET);
    let (old, early) = ((now - 301).to_string(), (now + 301).to_string());
    let not_hex = format!("v1={}", "g".repeat(64));
    let next_second = (now + 1).to_string();
    let cases: &[(&str, &[&str], &[&str])] = &[
        ("no headers", &[], &[]),
        ("no signature", &[&time], &[]),
        ("no timestamp", &[], &[&good]),
        ("an empty signature", &[&time], &[""]),
        ("a version without a signature", &[&time], &["v1="]),
        ("no version", &[&time], &[&good[3..]]),
        ("another version", &[&time], &[&good.replace("v1=", "v2=")]),
        ("another secret", &[&time], &[&sign(now, &body, "the secret of another workspace")]),
        ("an empty secret", &[&time], &[&sign(now, &body, "")]),
        ("the signature of another body", &[&time], &[&of_another_body]),
        ("the signature of another time", &[&next_second], &[&good]),
        ("the same time in other digits", &[&format!("0{time}")], &[&good]),
        ("one digit less", &[&time], &[&good[..good.len() - 1]]),
        ("one byte less", &[&time], &[&good[..good.len() - 2]]),
        ("one byte more", &[&time], &[&format!("{good}00")]),
        ("not hexadecimal", &[&time], &[&not_hex]),
        ("too old", &[&old], &[&sign(now - 301, &body, SECRET)]),
        ("from the future", &[&early], &[&sign(now + 301, &body, SECRET)]),
        ("two signatures, the good one first", &[&time], &[&good, &of_another_body]),
        ("two signatures, the good one last", &[&time], &[&of_another_body, &good]),
        ("two timestamps", &[&time, &old], &[&good]),
    ];
    for (what, times, signatures) in cases {
        let answer = send(times, signatures, &body).await;
        assert_eq!(answer.status, 401, "{what}: {}", String::from_utf8_lossy(&answer.bytes));
        assert_eq!(answer.error(401), "UNAUTHENTICATED", "{what}");
    }
    // Larger than any notice: refused regardless of its signature, and before it is read completely.
    let large = format!("{body}{}", " ".repeat(MAX_BYTES));
    assert_eq!(send(&[&time], &[&sign(now, &large, SECRET)], &large).await.error(413), "TOO_LARGE");
    assert_eq!(send(&[&time], &[&good], &" ".repeat(8 * MAX_BYTES)).await.error(413), "TOO_LARGE");

    ann.get(&session_path(&made)).await.ok(200);
    assert_eq!(world.provider.running(), 1);
    let audit = broker.broker.as_ref().unwrap().store().audit("default", None, &NEWEST).await.unwrap();
    assert!(audit.iter().all(|(_, record)| record.action != "session.ended"), "{audit:?}");
    // The notice itself was valid.
    assert_eq!(send(&[&time], &[&good], &body).await.ok(200), json!({ "ended": true }));
}

#[tokio::test]
async fn notices_need_a_secret_and_a_short_one_is_refused_at_start() {
    let mut world = World::new();
    let broker = world.start().await;
    let sender = Sender { client: broker.human("ann").await };
    assert_eq!(sender.send(0, &json!({}), SECRET).await.error(404), "ROUTE_NOT_FOUND");
    drop(broker);
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "short").unwrap();
    world.config.webhook_secret_file = Some(secret.path().to_owned());
    world.config.data_dir = world.config.data_dir.join("another");
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refused = cobox_broker::Broker::start(world.config.clone(), world.provider.clone(), listener).await.err().unwrap();
    assert!(refused.to_string().starts_with("webhook_secret_file: "), "{refused}");
}
