//! Tests of negotiating, refreshing and releasing: one session and one sandbox per thread, despite races and failures.

use std::{collections::HashSet, sync::atomic::Ordering};

use cobox_protocol::key::PrincipalKind;
use http::Method;
use serde_json::json;

use crate::harness::{Client, World, eventually, sandbox_id, session_path};

#[tokio::test]
async fn fifty_racing_ensures_get_one_session_and_one_sandbox() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let answers = futures_util::future::join_all((0..50).map(|_| ann.ensure("t"))).await;
    let ids: HashSet<_> = answers.iter().map(|a| (a["session_id"].to_string(), a["sandbox"]["id"].to_string())).collect();
    assert_eq!(ids.len(), 1);
    assert_eq!(world.provider.starts.load(Ordering::SeqCst), 1);
    assert_eq!(world.provider.running(), 1);
}

#[tokio::test]
async fn a_response_has_the_simple_and_the_full_fields() {
    let world = World::new();
    let broker = world.start().await;
    let agent = broker.key("bot", PrincipalKind::Agent).await;
    let s = agent.ensure("t").await;
    assert_eq!(s["session_id"], s["binding"]["id"]);
    assert_eq!(s["thread_id"], "t");
    assert_eq!(s["token"], s["credentials"]["access_token"]);
    assert_eq!(s["binding"]["state"], "active");
    assert_eq!(s["binding"]["scope"], json!({ "type": "thread", "id": "t" }));
    assert_eq!(s["scopes"], json!(["fs:rw", "process", "shell:ro"]));
    assert_eq!(s["credentials"]["granted_capabilities"], json!(["fs_read", "fs_write", "exec", "shell_observe"]));
    assert_eq!(s["policy"], json!({ "idle_timeout_seconds": 900, "hard_ttl_seconds": 28800 }));
    let base = format!("http://{}/dp/{}/v1", broker.addr, sandbox_id(&s));
    assert_eq!(s["sandbox"]["http_base_url"], base);
    assert_eq!(s["dataplane"]["ws_base_url"], base.replace("http", "ws"));
}

#[tokio::test]
async fn get_finds_an_existing_session_and_creates_none() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let get = json!({ "thread_id": "t", "mode": "get" });
    assert_eq!(ann.post("/v1/sandbox/sessions", get.clone()).await.error(404), "SESSION_NOT_FOUND");
    assert_eq!(world.provider.starts.load(Ordering::SeqCst), 0);
    let made = ann.ensure("t").await;
    assert_eq!(ann.post("/v1/sandbox/sessions", get).await.ok(200)["session_id"], made["session_id"]);
    assert_eq!(ann.get(&session_path(&made)).await.ok(200)["sandbox"], made["sandbox"]);
    let listed = ann.get("/v1/sandbox/sessions?scope_type=thread&scope_id=t").await.ok(200);
    assert_eq!(listed["items"][0]["session_id"], made["session_id"]);
    assert_eq!(listed["next_cursor"], json!(null));
}

#[tokio::test]
async fn a_released_session_is_over_and_its_thread_gets_a_new_one() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    assert_eq!(ann.delete(&session_path(&made)).await.status, 204);
    assert_eq!(world.provider.running(), 0);
    assert_eq!(*world.provider.destroyed.lock().unwrap(), [sandbox_id(&made)]);
    assert_eq!(ann.get(&session_path(&made)).await.error(410), "SESSION_EXPIRED");
    assert_eq!(ann.post(&format!("{}/refresh", session_path(&made)), json!({})).await.error(410), "SESSION_EXPIRED");
    assert_eq!(ann.delete(&session_path(&made)).await.error(404), "SESSION_NOT_FOUND");
    let path = format!("/dp/{}/v1/x", sandbox_id(&made));
    assert_eq!(ann.with(&made["token"]).get(&path).await.error(401), "TOKEN_REVOKED");
    assert_eq!(ann.get(&path).await.error(404), "SANDBOX_NOT_FOUND");
    let next = ann.ensure("t").await;
    assert_ne!(next["session_id"], made["session_id"]);
    assert_ne!(next["sandbox"]["id"], made["sandbox"]["id"]);
}

#[tokio::test]
async fn a_refresh_checks_and_renews_the_presented_token() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ann.ensure("t").await;
    let refresh = format!("{}/refresh", session_path(&made));
    let renewed = ann.call(Method::POST, &refresh, None, &[]).await.ok(200);
    assert_ne!(renewed["token"], made["token"]);
    assert!(renewed["refresh_before"].as_str() < renewed["expires_at"].as_str());
    assert_eq!(bob.post(&refresh, json!({ "current_token": made["token"] })).await.error(403), "FORBIDDEN");
    assert_eq!(ann.post(&refresh, json!({ "current_token": "a.b.c" })).await.error(401), "UNAUTHENTICATED");
    world.clock.advance(900 + 1800);
    ann.post(&refresh, json!({ "current_token": made["token"] })).await.ok(200);
    world.clock.advance(1800);
    assert_eq!(ann.post(&refresh, json!({ "current_token": made["token"] })).await.error(401), "TOKEN_EXPIRED");
}

#[tokio::test]
async fn an_idempotency_key_replays_one_request_and_refuses_another() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let send = async |thread: &str| {
        let body = json!({ "thread_id": thread, "mode": "ensure" });
        ann.call(Method::POST, "/v1/sandbox/sessions", Some(body), &[("idempotency-key", "k")]).await
    };
    let first = send("t").await.ok(200);
    let again = send("t").await.ok(200);
    assert_eq!(first["session_id"], again["session_id"]);
    assert_ne!(first["token"], again["token"]);
    assert_eq!(send("other").await.error(409), "IDEMPOTENCY_CONFLICT");
    world.clock.advance(25 * 3600);
    broker.tick().await;
    send("other").await.ok(200);
}

#[tokio::test]
async fn a_provider_failure_is_reported_and_the_next_ensure_works() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    world.provider.failing_starts.store(1, Ordering::SeqCst);
    let body = json!({ "thread_id": "t", "mode": "ensure" });
    let failed = ann.call(Method::POST, "/v1/sandbox/sessions", Some(body.clone()), &[("idempotency-key", "k")]).await;
    assert_eq!(failed.error(503), "PROVIDER_UNAVAILABLE");
    assert_eq!(world.provider.destroyed.lock().unwrap().len(), 1, "the failed sandbox is destroyed");
    ann.call(Method::POST, "/v1/sandbox/sessions", Some(body), &[("idempotency-key", "k")]).await.ok(200);
}

#[tokio::test]
async fn a_slow_start_answers_423_and_continues_without_the_caller() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    world.provider.may_start.send_replace(false);
    let body = json!({ "thread_id": "t", "mode": "ensure" });
    let early = ann.call(Method::POST, "/v1/sandbox/sessions", Some(body.clone()), &[("prefer", "wait=0")]).await;
    assert_eq!(early.headers["retry-after"], "1");
    assert_eq!(early.error(423), "SANDBOX_STARTING");
    world.provider.may_start.send_replace(true);
    eventually("the start", || async { world.provider.running() == 1 }).await;
    ann.ensure("t").await;
    assert_eq!(world.provider.starts.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_release_during_the_start_leaves_nothing_behind() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    world.provider.may_start.send_replace(false);
    let body = json!({ "thread_id": "t", "mode": "ensure" });
    ann.call(Method::POST, "/v1/sandbox/sessions", Some(body), &[("prefer", "wait=0")]).await.error(423);
    let listed = ann.get("/v1/sandbox/sessions").await.ok(200);
    assert_eq!(listed["items"][0]["state"], "provisioning");
    let path = session_path(&listed["items"][0]);
    let releasing = {
        let (ann, path) = (ann.clone(), path.clone());
        tokio::spawn(async move { ann.delete(&path).await.status })
    };
    eventually("the end", || async { ann.get(&path).await.status == 410 }).await;
    world.provider.may_start.send_replace(true);
    assert_eq!(releasing.await.unwrap(), 204);
    assert_eq!(world.provider.running(), 0);
    assert_eq!(world.provider.destroyed.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn invalid_requests_name_the_invalid_field() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    for (body, field) in [
        (json!({ "mode": "ensure" }), "thread_id"),
        (json!({ "thread_id": 3, "mode": "ensure" }), "thread_id"),
        (json!({ "thread_id": "t", "mode": "take" }), "mode"),
        (json!({ "thread_id": "", "mode": "get" }), "thread_id"),
        (json!({ "thread_id": "t", "mode": "ensure", "requested_capabilities": ["root"] }), "`root`"),
    ] {
        let answer = ann.post("/v1/sandbox/sessions", body).await;
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(answer.error(400), "INVALID_REQUEST");
        assert!(message.contains(field), "{message}");
    }
    let denied = json!({ "thread_id": "t", "mode": "ensure", "scopes": ["ports"] });
    assert_eq!(ann.post("/v1/sandbox/sessions", denied).await.error(403), "CAPABILITY_DENIED");
    let large = json!({ "thread_id": "x".repeat(2 << 20), "mode": "get" });
    assert_eq!(ann.post("/v1/sandbox/sessions", large).await.error(413), "TOO_LARGE");
    assert_eq!(ann.get("/v1/nothing").await.error(404), "ROUTE_NOT_FOUND");
    assert_eq!(ann.call(Method::PUT, "/v1/sandbox/sessions", None, &[]).await.error(405), "METHOD_NOT_ALLOWED");
    let nobody = Client { key: None, ..ann.clone() };
    assert_eq!(nobody.get("/v1/sandboxes").await.error(401), "UNAUTHENTICATED");
    assert_eq!(nobody.get("/healthz").await.ok(200)["status"], "ok");
    assert_eq!(nobody.get("/readyz").await.ok(200)["status"], "ready");
    assert_eq!(world.provider.starts.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn the_sandbox_limit_of_a_workspace_applies() {
    let mut world = World::new();
    world.config.max_sandboxes_per_workspace = 1;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("a").await;
    let more = json!({ "thread_id": "b", "mode": "ensure" });
    let refused = ann.post("/v1/sandbox/sessions", more.clone()).await;
    assert!(!refused.headers.contains_key("retry-after"), "a retry doesn't help");
    let error = refused.json()["error"].clone();
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("has 1 sandboxes, which is the limit") && message.contains(sandbox_id(&made).as_str()), "{message}");
    assert_eq!((&error["details"]["limit"], &error["details"]["least_used"][0]["state"]), (&json!(1), &json!("active")));
    assert_eq!(refused.error(429), "QUOTA_EXCEEDED");
    let other = broker.human("bob").await.post("/v1/sandbox/sessions", more).await;
    assert!(other.json()["error"]["message"].as_str().unwrap().contains("none of them is yours"));
    ann.delete(&session_path(&made)).await;
    ann.ensure("b").await;
}
