//! Tests of delegation: narrower tokens, derived from a caller's own grant or from a presented token.

use cobox_protocol::{
    control::{IssuedBefore, IssuedTo, Revocation},
    key::PrincipalKind,
};
use serde_json::{Value, json};

use crate::harness::{Client, NEWEST, World, claims, sandbox_id, session_path};

fn claims_of(answer: &Value) -> Value {
    claims(answer["token"].as_str().unwrap())
}

#[tokio::test]
async fn a_delegated_token_is_narrower_than_the_grant_with_the_requested_lifetime() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let delegate = format!("{}/delegate", session_path(&made));
    let got = ann.post(&delegate, json!({ "capabilities": ["fs_read", "ports"], "ttl": 120 })).await.ok(200);
    assert_eq!((&got["granted_capabilities"], &got["scopes"]), (&json!(["fs_read"]), &json!(["fs:ro"])));
    let token = claims_of(&got);
    assert_eq!((&token["sub"], &token["sid"], &token["scope"]), (&json!("ann"), &made["session_id"], &json!("fs:ro")));
    assert_eq!(token["exp"].as_i64().unwrap() - token["iat"].as_i64().unwrap(), 120);
    assert_eq!((&token["jti"], token.get("parent")), (&got["jti"], None));
    ann.with(&got["token"]).get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.ok(200);
    // Limited to the maximum lifetime of tokens.
    let long = ann.post(&delegate, json!({ "scopes": ["fs:rw"], "ttl": 86400 })).await.ok(200);
    assert_eq!(claims_of(&long)["exp"].as_i64().unwrap() - claims_of(&long)["iat"].as_i64().unwrap(), 900);
    // Delegation to a less privileged actor.
    let agents = ann.post(&delegate, json!({ "capabilities": ["exec", "shell"], "actor": "agent" })).await.ok(200);
    assert_eq!((&agents["granted_capabilities"], &claims_of(&agents)["act"]["type"]), (&json!(["exec", "shell_observe"]), &json!("agent")));

    for (body, code) in [
        (json!({}), "INVALID_REQUEST"),
        (json!({ "capabilities": ["root"] }), "INVALID_REQUEST"),
        (json!({ "capabilities": ["exec"], "scopes": ["process"] }), "INVALID_REQUEST"),
        (json!({ "capabilities": ["exec"], "ttl": 0 }), "INVALID_REQUEST"),
        (json!({ "capabilities": ["exec"], "token_format": "saml" }), "INVALID_REQUEST"),
    ] {
        assert_eq!(ann.post(&delegate, body).await.error(400), code);
    }
    assert_eq!(ann.post(&delegate, json!({ "capabilities": ["ports"] })).await.error(403), "CAPABILITY_DENIED");
    let audit = broker.broker.as_ref().unwrap().store().audit("default", None, &NEWEST).await.unwrap();
    assert!(audit.iter().any(|(_, r)| r.action == "token.issued" && r.jti.as_deref() == got["jti"].as_str()));
}

#[tokio::test]
async fn a_refreshed_delegated_token_stays_as_narrow() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ann.ensure("t").await;
    let narrow = ann.post(&format!("{}/delegate", session_path(&made)), json!({ "capabilities": ["fs_read"] })).await.ok(200);
    let refresh = format!("{}/refresh", session_path(&made));
    world.clock.advance(1000);
    let renewed = ann.post(&refresh, json!({ "current_token": narrow["token"] })).await.ok(200);
    assert_eq!(claims_of(&renewed)["scope"], "fs:ro");
    assert_eq!(bob.post(&refresh, json!({ "current_token": narrow["token"] })).await.error(403), "FORBIDDEN");
    ann.delete(&session_path(&made)).await;
    let path = format!("/dp/{}/v1/x", sandbox_id(&made));
    assert_eq!(ann.with(&renewed["token"]).get(&path).await.error(401), "TOKEN_REVOKED");
    let delegate = format!("{}/delegate", session_path(&made));
    assert_eq!(ann.post(&delegate, json!({ "capabilities": ["fs_read"] })).await.error(410), "SESSION_EXPIRED");
}

#[tokio::test]
async fn a_token_of_a_parent_is_narrower_expires_no_later_and_is_not_refreshed() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, eve) = (broker.human("ann").await, broker.human("bob").await, broker.stranger().await);
    let body = json!({ "thread_id": "t", "mode": "ensure", "access": "owner", "scopes": ["fs:rw", "process"] });
    let made = ann.post("/v1/sandbox/sessions", body).await.ok(200);
    let delegate = format!("{}/delegate", session_path(&made));
    world.clock.advance(600);
    // The holder presents the token, with a key of their own or with no other credential.
    let params = json!({ "capabilities": ["fs_read", "shell"], "parent_token": made["token"] });
    for got in [
        ann.post(&delegate, params.clone()).await.ok(200),
        bob.post(&delegate, params.clone()).await.ok(200),
        ann.with(&made["token"]).post(&delegate, json!({ "capabilities": ["fs_read", "shell"] })).await.ok(200),
        ann.with(&made["token"])
            .post(&format!("/sandbox/{}/delegate", sandbox_id(&made)), json!({ "capabilities": ["fs:ro"] }))
            .await
            .ok(200),
    ] {
        assert_eq!(got["granted_capabilities"], json!(["fs_read"]));
        assert_eq!(got["expires_at"], made["expires_at"], "it must not outlive its parent");
        let (token, parent) = (claims_of(&got), claims(made["token"].as_str().unwrap()));
        assert_eq!((&token["parent"], &token["sub"], &token["grant"]), (&parent["jti"], &json!("ann"), &parent["grant"]));
        let refused = ann.post(&format!("{}/refresh", session_path(&made)), json!({ "current_token": got["token"] })).await;
        assert_eq!(refused.error(403), "FORBIDDEN");
    }
    let wider = json!({ "capabilities": ["shell"], "parent_token": made["token"] });
    assert_eq!(ann.post(&delegate, wider).await.error(403), "CAPABILITY_DENIED");
    let other = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "u", "mode": "ensure" })).await.ok(200);
    let others = json!({ "capabilities": ["fs_read"], "parent_token": other["token"] });
    assert_eq!(ann.post(&delegate, others).await.error(401), "UNAUTHENTICATED", "a token of another sandbox");
    assert_eq!(eve.post(&delegate, params.clone()).await.error(404), "SESSION_NOT_FOUND");
    let nobody = "/v1/sandbox/sessions/ssn_00000000000000000000000000/delegate";
    assert_eq!(ann.with(&made["token"]).post(nobody, json!({ "capabilities": ["fs_read"] })).await.error(401), "UNAUTHENTICATED");
    world.clock.advance(301);
    assert_eq!(ann.post(&delegate, params).await.error(401), "TOKEN_EXPIRED");
}

#[tokio::test]
async fn a_delegated_token_ends_with_each_of_its_ancestors() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, root) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await);
    let made = ann.ensure("t").await;
    let (id, delegate) = (sandbox_id(&made), format!("{}/delegate", session_path(&made)));
    let from = async |parent: &Value| ann.with(parent).post(&delegate, json!({ "capabilities": ["fs_read"] })).await.ok(200);
    let child = from(&made["token"]).await;
    let grandchild = from(&child["token"]).await;
    let last = from(&grandchild["token"]).await;
    let other = ann.post(&delegate, json!({ "capabilities": ["fs_read"] })).await.ok(200);
    let path = format!("/dp/{id}/v1/x");
    ann.with(&last["token"]).get(&path).await.ok(200);
    let jti = claims(made["token"].as_str().unwrap())["jti"].as_str().unwrap().to_owned();
    root.post("/internal/tokens/revoke", json!({ "jti": jti })).await.ok(200);
    for dead in [&made, &child, &grandchild, &last] {
        assert_eq!(ann.with(&dead["token"]).get(&path).await.error(401), "TOKEN_REVOKED");
    }
    ann.with(&other["token"]).get(&path).await.ok(200);
    // boxd detects it by itself: the pushed revocation covers each of them.
    let state = world.provider.boxd(&id).state.lock().unwrap().clone();
    assert_eq!(state.revoked, [Revocation::Jti(jti)]);
    let view = cobox_token::RevocationView::new(&state.revoked);
    for (answer, is_dead) in [(&made, true), (&child, true), (&grandchild, true), (&last, true), (&other, false)] {
        assert_eq!(view.covers(&serde_json::from_value(claims_of(answer)).unwrap()), is_dead);
    }
}

/// Checks the issue time, so that a delegation that races with a revocation of all earlier tokens is covered by it.
#[tokio::test]
async fn a_delegated_token_has_the_issue_time_of_its_first_ancestor() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let delegate = format!("{}/delegate", session_path(&made));
    let issued_by = claims_of(&made)["iat"].as_i64().unwrap();
    let mut parent = made.clone();
    for _ in 0..2 {
        world.clock.advance(10);
        parent = ann.with(&parent["token"]).post(&delegate, json!({ "capabilities": ["fs_read"] })).await.ok(200);
        let token = claims_of(&parent);
        assert_eq!((&token["iat"], token["nbf"].as_i64()), (&json!(issued_by), Some(cobox_broker::Clock::now(&*world.clock).unix())));
        let of_ann = IssuedBefore { of: IssuedTo::Principal, value: "ann".into(), issued_by };
        let view = cobox_token::RevocationView::new(&[Revocation::IssuedBefore(of_ann)]);
        assert!(view.covers(&serde_json::from_value(token).unwrap()));
    }
    ann.with(&parent["token"]).get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.ok(200);
}

#[tokio::test]
async fn the_delegation_depth_is_limited() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let delegate = format!("{}/delegate", session_path(&made));
    let mut token = made["token"].clone();
    for _ in 0..9 {
        token = ann.with(&token).post(&delegate, json!({ "capabilities": ["fs_read"] })).await.ok(200)["token"].clone();
    }
    let path = format!("/dp/{}/v1/x", sandbox_id(&made));
    ann.with(&token).get(&path).await.ok(200);
    assert_eq!(ann.with(&token).post(&delegate, json!({ "capabilities": ["fs_read"] })).await.error(400), "INVALID_REQUEST");
}

/// Read and write files and run commands, with an expiry, renewable, without permission to delete or manage the
/// sandbox.
#[tokio::test]
async fn a_client_delegates_its_sandbox_to_a_server_as_in_the_protocol_document() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let alone = ann.post("/v1/sandboxes", json!({ "name": "dev" })).await.ok(201);
    let made = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "ensure" })).await.ok(200);
    let id = sandbox_id(&made);
    for sandbox in [id.as_str(), alone["id"].as_str().unwrap(), "dev"] {
        let params = json!({ "scopes": ["fs:rw", "process"], "ttl": 3600 });
        let got = ann.post(&format!("/sandbox/{sandbox}/delegate"), params).await.ok(200);
        assert_eq!(got["granted_capabilities"], json!(["fs_read", "fs_write", "exec"]));
        for field in ["token", "expires_at", "jti"] {
            assert!(!got[field].as_str().unwrap().is_empty());
        }
        let server = ann.with(&got["token"]);
        let at = if sandbox == id.as_str() { &made["sandbox"]["id"] } else { &alone["id"] };
        server.get(&format!("/dp/{}/v1/x", at.as_str().unwrap())).await.ok(200);
        assert_eq!(claims_of(&got)["sid"], if sandbox == id.as_str() { made["session_id"].clone() } else { Value::Null });
        never_changes_a_life(&server, &made).await;
    }
    assert_eq!(ann.post("/sandbox/none/delegate", json!({ "scopes": ["fs:rw"] })).await.error(404), "SANDBOX_NOT_FOUND");
}

async fn never_changes_a_life(server: &Client, made: &Value) {
    let session = session_path(made);
    for refused in [
        server.delete(&session).await,
        server.get(&session).await,
        server.delete(&format!("/v1/sandboxes/{}", sandbox_id(made))).await,
        server.post(&format!("{session}/refresh"), json!({})).await,
        server.post(&format!("{session}/heartbeat"), json!({})).await,
        server.post(&format!("{session}/share"), json!({ "principal": "bob", "capabilities": ["exec"] })).await,
        server.post(&format!("{session}/file-links"), json!({ "path": "/workspace/a" })).await,
        server.delete("/threads/t").await,
        server.post("/internal/tokens/revoke", json!({ "principal": "ann" })).await,
    ] {
        assert_eq!(refused.error(401), "UNAUTHENTICATED");
    }
}
