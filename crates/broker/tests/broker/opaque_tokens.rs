//! Tests of opaque tokens: known only to the broker, by their hashes; through the gateway they work like other tokens.

use cobox_protocol::key::PrincipalKind;
use http::Method;
use serde_json::{Value, json};

use crate::harness::{Client, World, claims, sandbox_id, session_path};

const SESSIONS: &str = "/v1/sandbox/sessions";

async fn opaque(client: &Client) -> Value {
    let made = client.post(SESSIONS, json!({ "thread_id": "t", "mode": "ensure", "token_format": "opaque" })).await.ok(200);
    assert!(made["token"].as_str().unwrap().starts_with("cbo_"));
    assert_eq!(made["token"], made["credentials"]["access_token"]);
    made
}

#[tokio::test]
async fn the_gateway_replaces_an_opaque_token_with_one_of_its_own() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = opaque(&ann).await;
    let id = sandbox_id(&made);
    for path in [format!("/dp/{id}/v1/x"), format!("/v1/sandbox/relay/{}/v1/x", made["session_id"].as_str().unwrap())] {
        ann.with(&made["token"]).get(&path).await.ok(200);
        let seen = world.provider.boxd(&id).seen.lock().unwrap().last().unwrap().headers.clone();
        assert!(!format!("{seen:?}").contains(made["token"].as_str().unwrap()));
        let sent = claims(seen["authorization"].to_str().unwrap().strip_prefix("Bearer ").unwrap());
        assert_eq!((&sent["sub"], &sent["sid"]), (&json!("ann"), &made["session_id"]));
    }
    assert_eq!(ann.with(&json!("cbo_guess")).get(&format!("/dp/{id}/v1/x")).await.error(401), "UNAUTHENTICATED");
    let other = ann.ensure("other").await;
    let wrong = ann.with(&made["token"]).get(&format!("/dp/{}/v1/x", sandbox_id(&other))).await;
    assert_eq!(wrong.error(401), "UNAUTHENTICATED");
    assert_eq!(ann.with(&made["token"]).get(SESSIONS).await.error(401), "UNAUTHENTICATED", "a token is not an API key");
    world.clock.advance(905);
    assert_eq!(ann.with(&made["token"]).get(&format!("/dp/{id}/v1/x")).await.error(401), "TOKEN_EXPIRED");
}

#[tokio::test]
async fn an_opaque_token_is_refreshed_delegated_rotated_and_revoked_like_any_other() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, root) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await);
    let made = opaque(&ann).await;
    let (id, path) = (sandbox_id(&made), format!("/dp/{}/v1/x", sandbox_id(&made)));
    let (refresh, delegate) = (format!("{}/refresh", session_path(&made)), format!("{}/delegate", session_path(&made)));
    let child = ann.with(&made["token"]).post(&delegate, json!({ "capabilities": ["fs_read"] })).await.ok(200);
    assert!(child["token"].as_str().unwrap().starts_with("cbo_"));
    let as_jwt =
        ann.post(&delegate, json!({ "capabilities": ["fs_read"], "parent_token": child["token"], "token_format": "jwt" })).await.ok(200);
    assert_eq!(claims(as_jwt["token"].as_str().unwrap())["parent"], child["jti"]);
    let narrow = ann.post(&delegate, json!({ "capabilities": ["fs_read"], "token_format": "opaque" })).await.ok(200);
    world.clock.advance(1000);
    let renewed = ann.post(&refresh, json!({ "current_token": narrow["token"], "rotate": true })).await.ok(200);
    assert!(renewed["token"].as_str().unwrap().starts_with("cbo_"));
    ann.with(&renewed["token"]).get(&path).await.ok(200);
    assert_eq!(ann.post(&refresh, json!({ "current_token": child["token"] })).await.error(403), "FORBIDDEN");
    world.clock.advance(31);
    assert_eq!(ann.post(&refresh, json!({ "current_token": narrow["token"] })).await.error(401), "TOKEN_REVOKED");
    let reported = root.get(&format!("/internal/tokens/{}", renewed["token"].as_str().unwrap())).await.ok(200);
    assert_eq!((&reported["active"], &reported["scope"]), (&json!(true), &json!("fs:ro")));
    root.post("/internal/tokens/revoke", json!({ "jti": reported["jti"] })).await.ok(200);
    assert_eq!(ann.with(&renewed["token"]).get(&path).await.error(401), "TOKEN_REVOKED");
    let fresh = opaque(&ann).await;
    root.post(&format!("/internal/sandboxes/{id}/rotate-key"), json!({ "mode": "graceful" })).await.ok(200);
    ann.with(&fresh["token"]).get(&path).await.ok(200);
    root.post(&format!("/internal/sandboxes/{id}/rotate-key"), json!({})).await.ok(200);
    assert_eq!(ann.with(&fresh["token"]).get(&path).await.error(401), "TOKEN_REVOKED");
    let last = opaque(&ann).await;
    ann.delete(&session_path(&made)).await;
    assert_eq!(ann.with(&last["token"]).get(&path).await.error(401), "TOKEN_REVOKED");
}

#[tokio::test]
async fn the_store_has_only_hashes_of_opaque_tokens_and_removes_expired_ones() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = opaque(&ann).await;
    if world.whole_config().await.database_url.is_none() {
        for entry in std::fs::read_dir(&world.config.data_dir).unwrap().flatten().filter(|e| e.path().is_file()) {
            let bytes = std::fs::read(entry.path()).unwrap();
            let token = made["token"].as_str().unwrap().as_bytes();
            assert!(!bytes.windows(token.len()).any(|w| w == token), "{:?} contains the token", entry.path());
        }
    }
    let hash: [u8; 32] = <sha2::Sha256 as sha2::Digest>::digest(made["token"].as_str().unwrap()).into();
    let store = broker.broker.as_ref().unwrap().store().clone();
    assert!(store.opaque_token(&hash).await.unwrap().is_some());
    world.clock.advance(900 + 3601 + 3600);
    broker.tick().await;
    assert!(store.opaque_token(&hash).await.unwrap().is_none());
}

#[tokio::test]
async fn an_operator_introspects_tokens_of_both_formats() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, root) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await);
    let form = [("content-type", "application/x-www-form-urlencoded")];
    let introspect = async |caller: &Client, token: &str| {
        let request = http::Request::builder().method(Method::POST).uri("/internal/tokens/introspect").header(form[0].0, form[0].1);
        caller.send(request.body(http_body_util::Full::new(format!("token={token}&token_type_hint=access_token").into())).unwrap()).await
    };
    let jwt = ann.ensure("t").await;
    let handle = opaque(&ann).await;
    for (made, format) in [(&jwt, "jwt"), (&handle, "opaque")] {
        let token = made["token"].as_str().unwrap();
        assert_eq!(introspect(&ann, token).await.error(403), "FORBIDDEN");
        let by_form = introspect(&root, token).await;
        assert_eq!(by_form.headers["cache-control"], "no-store");
        let reported = by_form.ok(200);
        assert_eq!(root.get(&format!("/internal/tokens/{token}")).await.ok(200), reported);
        assert_eq!(ann.get(&format!("/internal/tokens/{token}")).await.error(403), "FORBIDDEN");
        for (field, value) in [
            ("active", json!(true)),
            ("token_type", json!("Bearer")),
            ("token_format", json!(format)),
            ("sub", json!("ann")),
            ("aud", made["sandbox"]["id"].clone()),
            ("sid", made["session_id"].clone()),
            ("thread_id", json!("t")),
            ("scope", json!("fs:rw process shell")),
            ("workspace", json!("default")),
        ] {
            assert_eq!(reported[field], value, "{field}");
        }
        assert_eq!(reported["exp"].as_i64().unwrap() - reported["iat"].as_i64().unwrap(), 900);
    }
    let inactive = json!({ "active": false });
    for nothing in ["x", "cbo_x", "a.b.c", "cbx_x", ""] {
        assert_eq!(introspect(&root, nothing).await.ok(200), inactive);
    }
    let request = http::Request::builder().method(Method::POST).uri("/internal/tokens/introspect").body(Default::default()).unwrap();
    assert_eq!(root.send(request).await.error(400), "INVALID_REQUEST");
    world.clock.advance(901);
    assert_eq!(introspect(&root, handle["token"].as_str().unwrap()).await.ok(200), inactive);
    let fresh = opaque(&ann).await;
    ann.delete(&session_path(&fresh)).await;
    assert_eq!(introspect(&root, fresh["token"].as_str().unwrap()).await.ok(200), inactive);
}
