//! What whoever runs a broker looks at: whether it is ready, and what it counts.

use std::sync::atomic::Ordering;

use cobox_protocol::key::PrincipalKind;
use http::Method;
use serde_json::json;

use crate::harness::{Client, World, eventually, session_path};

#[tokio::test]
async fn a_broker_is_ready_while_its_parts_are_and_says_which_is_not() {
    let world = World::new();
    let broker = world.start().await;
    let anyone = Client { addr: broker.addr, key: None };
    let ready = anyone.get("/readyz").await.ok(200);
    assert_eq!(ready, json!({ "status": "ready", "checks": { "store": "ok", "provider": "ok", "node": "ok", "clock": "ok" } }));
    world.provider.is_ready.store(false, Ordering::SeqCst);
    // An answer counts for a moment.
    eventually("the provider's trouble shows", async || anyone.get("/readyz").await.status == 503).await;
    let unready = anyone.get("/readyz").await;
    assert_eq!(unready.json()["error"]["details"]["checks"], json!({ "store": "ok", "provider": "failed", "node": "ok", "clock": "ok" }));
    assert!(!String::from_utf8_lossy(&unready.bytes).contains("secret words"));
    assert_eq!(unready.error(503), "BACKEND_UNAVAILABLE");
    world.provider.is_ready.store(true, Ordering::SeqCst);
    eventually("it is ready again", async || anyone.get("/readyz").await.status == 200).await;
    assert_eq!(anyone.get("/healthz").await.ok(200)["status"], "ok");
}

#[tokio::test]
async fn the_metrics_tell_of_routes_and_states_and_of_nobody() {
    let mut world = World::new();
    world.config.metrics.public = true;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("a-thread-of-anns").await;
    ann.post(&format!("{}/refresh", session_path(&made)), json!({})).await.ok(200);
    ann.get("/no/such/route?token=hidden").await.error(404);
    let metrics = Client { addr: broker.addr, key: None }.get("/metrics").await;
    assert_eq!(metrics.status, 200);
    assert!(metrics.headers["content-type"].to_str().unwrap().starts_with("text/plain"));
    let text = String::from_utf8(metrics.bytes.to_vec()).unwrap();
    for line in [
        "cobox_requests_total{route=\"/v1/sandbox/sessions\",method=\"POST\",status=\"200\"} 1",
        "cobox_requests_total{route=\"/v1/sandbox/sessions/{id}/refresh\",method=\"POST\",status=\"200\"} 1",
        "cobox_requests_total{route=\"none\",method=\"GET\",status=\"404\"} 1",
        "cobox_request_duration_seconds_count{route=\"/v1/sandbox/sessions\"} 1",
        "cobox_sandboxes{state=\"active\"} 1",
        "cobox_sessions 1",
        "cobox_revocations 0",
        "cobox_tokens_issued_total 2",
        "cobox_store_up 1",
        "cobox_connections_open 1",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
    for part in ["ann", "sb_", "ssn_", "cbx_", "hidden", "a-thread"] {
        assert!(!text.contains(part), "{part}\n{text}");
    }
    let value = |name: &str| -> f64 {
        text.lines().find_map(|l| l.strip_prefix(name)?.trim().parse().ok()).unwrap_or_else(|| panic!("{name}\n{text}"))
    };
    assert!(value("cobox_store_commit_duration_seconds_count") >= 2.0);
    assert!(value("cobox_connection_bytes_total{direction=\"out\"}") > 100.0);
}

#[tokio::test]
async fn the_metrics_are_for_operators_and_who_has_the_scrapers_token_wherever_they_come_from() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, "a-long-word-for-prometheus\n").unwrap();
    let mut world = World::new();
    world.config.metrics.token_file = Some(file.clone());
    let broker = world.start().await;
    let (ann, root) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await);
    let nobody = Client { key: None, ..ann.clone() };
    let with = |token: &str| nobody.with(&json!(token));
    // A proxy on this machine need not say that it is one.
    for headers in [&[][..], &[("x-forwarded-for", "203.0.113.1")], &[("forwarded", "for=203.0.113.1")], &[("via", "nginx")]] {
        let read = async |client: &Client| client.call(Method::GET, "/metrics", None, headers).await;
        assert_eq!(read(&nobody).await.error(401), "UNAUTHENTICATED");
        assert_eq!(read(&with("a-long-word-for-prometheu")).await.error(401), "UNAUTHENTICATED");
        assert_eq!(read(&ann).await.error(403), "FORBIDDEN");
        assert_eq!(read(&root).await.status, 200);
        assert_eq!(read(&with("a-long-word-for-prometheus")).await.status, 200);
    }
    assert_eq!(with("a-long-word-for-prometheus").get("/v1/keys").await.error(401), "UNAUTHENTICATED");
    broker.kill().await;
    std::fs::write(&file, "short").unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let started = cobox_broker::Broker::start(world.whole_config().await, world.provider.clone(), listener).await;
    assert!(started.err().unwrap().to_string().contains("metrics.token_file"));
}
