//! Tests of rate limits: principals are independent of each other, upkeep is limited separately from other requests,
//! and addresses that send invalid credentials are limited.

use cobox_broker::RateLimits;
use cobox_protocol::Secret;
use http::Method;
use serde_json::json;

use crate::harness::{Client, World, sandbox_id, session_path};

/// A burst of a few requests, then one a second.
fn world_with_low_limits() -> World {
    let mut world = World::new();
    world.config.rate_limits = RateLimits {
        requests_per_second: 1,
        request_burst: 3,
        upkeep_per_second: 1,
        upkeep_burst: 2,
        failures_per_minute: Some(6),
        failure_burst: 3,
    };
    world
}

#[tokio::test]
async fn a_principal_over_its_limit_gets_a_retry_time_and_others_are_not_limited() {
    let world = world_with_low_limits();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    for _ in 0..3 {
        ann.get("/v1/sandboxes").await.ok(200);
    }
    let refused = ann.get("/v1/sandboxes").await;
    assert_eq!(refused.headers["retry-after"], "1");
    assert!(refused.json()["error"]["message"].as_str().unwrap().contains("too many requests from ann"));
    assert_eq!(refused.error(429), "RATE_LIMITED");
    bob.get("/v1/sandboxes").await.ok(200);
    world.clock.advance(1);
    ann.get("/v1/sandboxes").await.ok(200);
    assert_eq!(ann.get("/v1/sandboxes").await.error(429), "RATE_LIMITED");
    world.clock.advance(3600);
    for _ in 0..3 {
        ann.get("/v1/sandboxes").await.ok(200);
    }
    assert_eq!(ann.get("/v1/sandboxes").await.error(429), "RATE_LIMITED", "a long pause allows no more than the burst");
}

#[tokio::test]
async fn a_principal_over_its_limit_can_still_keep_and_end_its_sessions() {
    let world = world_with_low_limits();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let session = session_path(&ann.ensure("t").await);
    while ann.get("/v1/sandboxes").await.status != 429 {}
    ann.post(&format!("{session}/heartbeat"), json!({})).await.ok(200);
    ann.delete(&session).await.ok(204);
    assert_eq!(ann.post(&format!("{session}/heartbeat"), json!({})).await.error(429), "RATE_LIMITED", "heartbeats are limited too");
}

#[tokio::test]
async fn requests_with_a_token_count_against_the_limit_of_its_principal() {
    let world = world_with_low_limits();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ann.ensure("t").await;
    let (holder, bobs) = (ann.with(&made["token"]), bob.with(&bob.ensure("t").await["token"]));
    let delegate = format!("{}/delegate", session_path(&made));
    let params = json!({ "capabilities": ["fs_read"], "token_format": "opaque" });
    // One request is used up.
    holder.post(&delegate, params.clone()).await.ok(200);
    drop(holder.watch(&made, "", &[]).await);
    let of_sandbox = format!("/sandbox/{}/delegate", sandbox_id(&made));
    for path in [&delegate, &of_sandbox] {
        let refused = holder.post(path, params.clone()).await;
        assert_eq!(refused.headers["retry-after"], "1");
        assert_eq!(refused.error(429), "RATE_LIMITED");
    }
    for by in [&holder, &ann] {
        assert_eq!(by.begin_watch(&made, "", &[]).await.status(), 429);
    }
    assert_eq!(ann.get("/v1/sandboxes").await.error(429), "RATE_LIMITED", "both share one limit");
    bobs.post(&delegate, params.clone()).await.ok(200);
    world.clock.advance(1);
    holder.post(&of_sandbox, params).await.ok(200);
}

#[tokio::test]
async fn an_address_that_guesses_keys_is_limited_and_a_valid_key_from_it_is_not() {
    let world = world_with_low_limits();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let guessing = Client { key: Some(Secret::new(format!("cbx_{}_{}", "0".repeat(26), "x".repeat(43)))), ..ann.clone() };
    assert_eq!(guessing.get("/v1/sandboxes").await.error(401), "UNAUTHENTICATED");
    ann.get("/v1/sandboxes").await.ok(200);
    for _ in 0..2 {
        assert_eq!(guessing.get("/v1/sandboxes").await.error(401), "UNAUTHENTICATED");
    }
    let refused = guessing.get("/v1/sandboxes").await;
    assert_eq!(refused.headers["retry-after"], "10");
    assert_eq!(refused.error(429), "RATE_LIMITED");
    let nobody = Client { key: None, ..ann.clone() };
    assert_eq!(nobody.get("/dp/sb_00000000000000000000000000/v1/files/a").await.error(429), "RATE_LIMITED", "the gateway shares the limit");
    ann.get("/v1/sandboxes").await.ok(200);
    world.clock.advance(10);
    assert_eq!(guessing.get("/v1/sandboxes").await.error(401), "UNAUTHENTICATED");
    assert_eq!(guessing.get("/v1/sandboxes").await.error(429), "RATE_LIMITED");
}

#[tokio::test]
async fn a_limited_address_can_still_check_health_and_send_notices() {
    let mut world = world_with_low_limits();
    world.config.metrics.public = true;
    let broker = world.start().await;
    let nobody = Client { key: None, ..broker.human("ann").await };
    let guessing = nobody.with(&json!("cbx_nonsense"));
    while guessing.get("/v1/sandboxes").await.status != 429 {}
    for open in ["/healthz", "/readyz", "/metrics", "/openapi.json"] {
        assert_eq!(nobody.get(open).await.status, 200, "{open}");
    }
    assert_eq!(nobody.post("/webhooks/threads", json!({})).await.error(404), "ROUTE_NOT_FOUND", "no webhook is configured");
    assert_eq!(guessing.get("/metrics").await.status, 200, "public metrics ignore the credential");
}

#[tokio::test]
async fn a_valid_credential_is_never_locked_out_by_invalid_ones_from_its_address() {
    let world = world_with_low_limits();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let (nobody, guessing) = (Client { key: None, ..ann.clone() }, ann.with(&json!("cbx_nonsense")));
    let link = json!({ "path": "/workspace/a", "ttl": 60 });
    let link = ann.post(&format!("{}/file-links", session_path(&made)), link).await.ok(200);
    for bad in [&nobody, &guessing] {
        while bad.get("/v1/sandboxes").await.status != 429 {}
    }
    // These valid credentials are accepted, although none was used from this address before.
    broker.human("bob").await.get("/v1/sandboxes").await.ok(200);
    ann.with(&made["token"]).get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.ok(200);
    let path = link["url"].as_str().unwrap().split_once("/dp/").unwrap().1;
    nobody.get(&format!("/dp/{path}")).await.ok(200);
    // Invalid credentials are still refused.
    assert_eq!(guessing.get("/v1/sandboxes").await.error(429), "RATE_LIMITED");
}

#[tokio::test]
async fn a_refusal_by_the_sandbox_does_not_count_against_the_address() {
    let world = world_with_low_limits();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let (holder, guessing) = (ann.with(&made["token"]), ann.with(&json!("cbx_nonsense")));
    for _ in 0..10 {
        assert_eq!(holder.get(&format!("/dp/{}/v1/refused", sandbox_id(&made))).await.status, 401);
    }
    assert_eq!(guessing.get("/v1/sandboxes").await.error(401), "UNAUTHENTICATED", "this is the first counted failure");
    let delegate = format!("{}/delegate", session_path(&made));
    holder.post(&delegate, json!({ "capabilities": ["fs_read"] })).await.ok(200);
    while guessing.get("/v1/sandboxes").await.status != 429 {}
    holder.post(&delegate, json!({ "capabilities": ["fs_read"] })).await.ok(200);
}

#[tokio::test]
async fn a_limit_of_zero_means_unlimited() {
    let mut world = world_with_low_limits();
    let off = RateLimits { requests_per_second: 0, upkeep_per_second: 0, failures_per_minute: Some(0), ..world.config.rate_limits.clone() };
    world.config.rate_limits = off;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let nobody = Client { key: None, ..ann.clone() };
    for _ in 0..20 {
        ann.get("/v1/sandboxes").await.ok(200);
        assert_eq!(ann.call(Method::DELETE, "/threads/none", None, &[]).await.status, 204);
        assert_eq!(nobody.get("/v1/sandboxes").await.error(401), "UNAUTHENTICATED");
    }
}
