//! Tests of shares: another principal enters a session under its own name, with at most the shared capabilities, until
//! the share is revoked.

use cobox_protocol::{Timestamp, control::Revocation, key::PrincipalKind};
use serde_json::{Value, json};

use crate::harness::{Client, TestBroker, World, claims, sandbox_id, session_path};

const SESSIONS: &str = "/v1/sandbox/sessions";

async fn private(ann: &Client) -> Value {
    ann.post(SESSIONS, json!({ "thread_id": "t", "mode": "ensure", "access": "owner" })).await.ok(200)
}

async fn principals(broker: &TestBroker) -> (Client, Client, Client, Client) {
    let root = broker.key("root", PrincipalKind::Operator).await;
    (broker.human("ann").await, broker.human("bob").await, broker.human("carl").await, root)
}

#[tokio::test]
async fn a_share_admits_one_principal_with_at_most_its_capabilities() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, carl, root) = principals(&broker).await;
    let made = private(&ann).await;
    let (id, share) = (sandbox_id(&made), format!("{}/share", session_path(&made)));
    let params = json!({ "principal": "bob", "capabilities": ["fs_read", "shell:ro"] });
    for other in [&bob, &carl] {
        assert_eq!(other.post(&share, params.clone()).await.error(403), "FORBIDDEN");
        assert_eq!(other.get(&share).await.error(403), "FORBIDDEN");
    }
    let shared = ann.post(&share, params.clone()).await.ok(201);
    assert_eq!((&shared["capabilities"], &shared["scopes"]), (&json!(["fs_read", "shell_observe"]), &json!(["fs:ro", "shell:ro"])));
    assert_eq!((&shared["shared_by"], &shared["is_limit"]), (&json!("ann"), &json!(true)));
    let listed = root.get(&share).await.ok(200);
    assert_eq!((listed["items"].as_array().unwrap().len(), &listed["items"][0]["principal"]), (1, &json!("bob")));

    // Through every route.
    let as_bob = bob.ensure("t").await;
    assert_eq!((&as_bob["session_id"], &as_bob["scopes"]), (&made["session_id"], &json!(["fs:ro", "shell:ro"])));
    assert_eq!(claims(as_bob["token"].as_str().unwrap())["sub"], "bob");
    let looked = bob.get(&session_path(&made)).await.ok(200);
    assert_eq!(looked["scopes"], json!(["fs:ro", "shell:ro"]));
    for body in [json!({}), json!({ "current_token": as_bob["token"] })] {
        let refreshed = bob.post(&format!("{}/refresh", session_path(&made)), body).await.ok(200);
        assert_eq!(claims(refreshed["token"].as_str().unwrap())["scope"], "fs:ro shell:ro");
    }
    let delegated = bob.post(&format!("{}/delegate", session_path(&made)), json!({ "capabilities": ["fs_read", "exec"] })).await.ok(200);
    assert_eq!(delegated["granted_capabilities"], json!(["fs_read"]));
    bob.post(&format!("{}/heartbeat", session_path(&made)), json!({})).await.ok(200);
    assert_eq!(bob.get(SESSIONS).await.ok(200)["items"][0]["session_id"], made["session_id"]);
    for path in [format!("/dp/{id}/v1/x"), format!("/v1/sandbox/relay/{}/v1/x", made["session_id"].as_str().unwrap())] {
        bob.get(&path).await.ok(200);
        let sent = world.provider.boxd(&id).seen.lock().unwrap().last().unwrap().headers["authorization"].to_str().unwrap().to_owned();
        assert_eq!(claims(sent.strip_prefix("Bearer ").unwrap())["scope"], "fs:ro shell:ro");
        assert_eq!(carl.get(&path).await.error(403), "FORBIDDEN");
    }
    assert_eq!(bob.post(SESSIONS, json!({ "thread_id": "t", "mode": "get", "scopes": ["process"] })).await.error(403), "CAPABILITY_DENIED");
    assert_eq!(bob.post(SESSIONS, json!({ "thread_id": "t", "mode": "create_only" })).await.error(409), "SESSION_CONFLICT");
    // A share doesn't confer ownership.
    assert_eq!(bob.delete(&session_path(&made)).await.error(403), "FORBIDDEN");
    assert_eq!(bob.get(&format!("/v1/sandboxes/{id}")).await.error(403), "FORBIDDEN");
    assert_eq!(carl.get(SESSIONS).await.ok(200)["items"], json!([]));
    ann.delete(&session_path(&made)).await;
    assert_eq!(ann.post(&share, params).await.error(410), "SESSION_EXPIRED");
}

#[tokio::test]
async fn revoking_a_share_ends_exactly_its_tokens_at_once() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, carl, _) = principals(&broker).await;
    let made = private(&ann).await;
    let (id, share) = (sandbox_id(&made), format!("{}/share", session_path(&made)));
    let path = format!("/dp/{id}/v1/x");
    for name in ["bob", "carl"] {
        ann.post(&share, json!({ "principal": name, "capabilities": ["fs_read"] })).await.ok(201);
    }
    let shared = ann.get(&share).await.ok(200)["items"][0]["id"].as_str().unwrap().to_owned();
    let (bobs, carls) = (bob.ensure("t").await, carl.ensure("t").await);
    let child =
        bob.with(&bobs["token"]).post(&format!("{}/delegate", session_path(&made)), json!({ "capabilities": ["fs_read"] })).await.ok(200);
    assert_eq!(ann.delete(&format!("{share}/bob")).await.status, 204);
    assert_eq!(world.provider.boxd(&id).state.lock().unwrap().revoked, [Revocation::Jti(shared)], "the revocation is pushed to boxd");
    for token in [&bobs["token"], &child["token"]] {
        assert_eq!(bob.with(token).get(&path).await.error(401), "TOKEN_REVOKED");
    }
    assert_eq!(bob.get(&path).await.error(403), "FORBIDDEN");
    assert_eq!(bob.get(&session_path(&made)).await.error(403), "FORBIDDEN");
    carl.with(&carls["token"]).get(&path).await.ok(200);
    ann.with(&made["token"]).get(&path).await.ok(200);
    assert_eq!(ann.delete(&format!("{share}/bob")).await.error(404), "SHARE_NOT_FOUND");
    // Shared again in the same second.
    ann.post(&share, json!({ "principal": "bob", "capabilities": ["fs_read"] })).await.ok(201);
    let again = bob.ensure("t").await;
    bob.with(&again["token"]).get(&path).await.ok(200);
    assert_eq!(bob.with(&bobs["token"]).get(&path).await.error(401), "TOKEN_REVOKED");
    // The old token is no longer accepted, for as long as a refresh would otherwise have accepted it.
    world.clock.advance(900 + 3500);
    let refresh = format!("{}/refresh", session_path(&made));
    assert_eq!(bob.post(&refresh, json!({ "current_token": bobs["token"] })).await.error(401), "TOKEN_REVOKED");
    bob.post(&refresh, json!({ "current_token": again["token"] })).await.ok(200);
}

#[tokio::test]
async fn widening_a_share_keeps_its_tokens_and_narrowing_it_ends_them() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, _, _) = principals(&broker).await;
    let made = private(&ann).await;
    let (path, share) = (format!("/dp/{}/v1/x", sandbox_id(&made)), format!("{}/share", session_path(&made)));
    ann.post(&share, json!({ "principal": "bob", "capabilities": ["fs_read"] })).await.ok(201);
    let bobs = bob.ensure("t").await;
    ann.post(&share, json!({ "principal": "bob", "capabilities": ["fs_read", "exec"] })).await.ok(200);
    bob.with(&bobs["token"]).get(&path).await.ok(200);
    let more = bob.ensure("t").await;
    assert_eq!(more["scopes"], json!(["fs:ro", "process"]));
    ann.post(&share, json!({ "principal": "bob", "scopes": ["fs:ro"] })).await.ok(200);
    for token in [&bobs["token"], &more["token"]] {
        assert_eq!(bob.with(token).get(&path).await.error(401), "TOKEN_REVOKED");
    }
    assert_eq!(bob.ensure("t").await["scopes"], json!(["fs:ro"]));
    assert_eq!(ann.get(&share).await.ok(200)["items"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_share_expires_and_no_token_outlives_it() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, _, _) = principals(&broker).await;
    let made = private(&ann).await;
    let share = format!("{}/share", session_path(&made));
    let start: Timestamp = serde_json::from_value(made["expires_at"].clone()).unwrap();
    let at = |seconds: i64| json!(Timestamp::from_unix(start.unix() - 900 + seconds));
    let params = |expires_at: Value| json!({ "principal": "bob", "capabilities": ["fs_read"], "expires_at": expires_at });
    assert_eq!(ann.post(&share, params(at(0))).await.error(400), "INVALID_REQUEST");
    ann.post(&share, params(at(100))).await.ok(201);
    let bobs = bob.ensure("t").await;
    assert_eq!(bobs["expires_at"], at(100));
    world.clock.advance(100);
    assert_eq!(bob.post(SESSIONS, json!({ "thread_id": "t", "mode": "get" })).await.error(403), "FORBIDDEN");
    assert_eq!(bob.get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.error(403), "FORBIDDEN");
    assert_eq!(ann.get(&share).await.ok(200)["items"], json!([]));
    ann.post(&share, params(at(500))).await.ok(200);
    bob.ensure("t").await;
}

#[tokio::test]
async fn only_principals_of_the_workspace_can_receive_a_share() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, _, _) = principals(&broker).await;
    let eve = broker.stranger().await;
    let made = private(&ann).await;
    let share = format!("{}/share", session_path(&made));
    let with = |name: &str| json!({ "principal": name, "capabilities": ["fs_read"] });
    for nobody in ["eve", "nobody", ""] {
        assert_eq!(ann.post(&share, with(nobody)).await.error(404), "PRINCIPAL_NOT_FOUND");
    }
    assert_eq!(ann.post(&share, with("ann")).await.error(400), "INVALID_REQUEST");
    for body in [
        json!({ "principal": "bob" }),
        json!({ "principal": "bob", "capabilities": [] }),
        json!({ "principal": "bob", "capabilities": ["x"] }),
    ] {
        assert_eq!(ann.post(&share, body).await.error(400), "INVALID_REQUEST");
    }
    assert_eq!(eve.post(&share, with("bob")).await.error(404), "SESSION_NOT_FOUND");
    assert_eq!(eve.get(&share).await.error(404), "SESSION_NOT_FOUND");
    assert_eq!(eve.delete(&format!("{share}/bob")).await.error(404), "SESSION_NOT_FOUND");
    assert_eq!(bob.delete(&format!("{share}/bob")).await.error(403), "FORBIDDEN");
}

#[tokio::test]
async fn a_share_limits_access_only_once_the_sandbox_is_private() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, carl, _) = principals(&broker).await;
    let made = ann.post(SESSIONS, json!({ "thread_id": "t", "mode": "ensure", "name": "dev" })).await.ok(200);
    let share = format!("{}/share", session_path(&made));
    let shared = ann.post(&share, json!({ "principal": "bob", "capabilities": ["fs_read"] })).await.ok(201);
    assert_eq!(shared["is_limit"], false);
    let (bobs, carls) = (bob.ensure("t").await, carl.ensure("t").await);
    assert_eq!(bobs["scopes"], carls["scopes"]);
    let (id, path) = (sandbox_id(&made), format!("/dp/{}/v1/x", sandbox_id(&made)));
    let patch =
        async |access: &str| ann.call(http::Method::PATCH, "/v1/sandboxes/dev", Some(json!({ "access": access })), &[]).await.ok(200);
    let key_ids = || world.provider.boxd(&id).state.lock().unwrap().keys.iter().map(|k| k.kid.clone()).collect::<Vec<_>>();
    patch("workspace").await;
    assert_eq!(key_ids(), [format!("{id}.1")]);
    patch("owner").await;
    // Tokens issued while the sandbox was open to the workspace are now invalid, and boxd has been notified.
    assert_eq!(key_ids(), [format!("{id}.2")]);
    for token in [&made["token"], &bobs["token"], &carls["token"]] {
        assert_eq!(ann.with(token).get(&path).await.error(401), "TOKEN_REVOKED");
    }
    let fresh = ann.ensure("t").await;
    patch("owner").await;
    ann.with(&fresh["token"]).get(&path).await.ok(200);
    assert_eq!(bob.ensure("t").await["scopes"], json!(["fs:ro"]));
    assert_eq!(carl.post(SESSIONS, json!({ "thread_id": "t", "mode": "ensure" })).await.error(403), "FORBIDDEN");
    assert_eq!(ann.get(&share).await.ok(200)["items"][0]["is_limit"], true);
}

#[tokio::test]
async fn a_share_of_a_private_session_limits_nothing_while_its_sandbox_is_open_to_the_workspace() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, _, _) = principals(&broker).await;
    ann.post("/v1/sandboxes", json!({ "name": "dev", "access": "workspace" })).await.ok(201);
    let params = json!({ "thread_id": "h2", "mode": "ensure", "sandbox_id": "dev", "access": "owner" });
    let made = ann.post(SESSIONS, params).await.ok(200);
    let share = format!("{}/share", session_path(&made));
    let shared = ann.post(&share, json!({ "principal": "bob", "capabilities": ["fs_read"] })).await.ok(201);
    assert_eq!(shared["is_limit"], false);
    let before = ann.get(&format!("{share}/bob")).await.ok(200);
    assert_eq!((&before["can_enter_without_share"], &before["access_paths"]), (&json!(true), &json!([{ "kind": "workspace_access" }])));
    assert_eq!(before["share"]["id"], shared["id"]);

    ann.delete(&format!("{share}/bob")).await.ok(204);
    let after = ann.get(&format!("{share}/bob")).await.ok(200);
    assert_eq!((&after["can_enter_without_share"], &after["share"]), (&json!(true), &Value::Null));
    // Without a share there is nothing to revoke, and the response must not suggest that bob has lost access.
    let again = ann.delete(&format!("{share}/bob")).await;
    assert!(again.message().contains("bob can still enter"), "{}", again.message());
    assert_eq!(again.json()["error"]["details"]["access_paths"], json!([{ "kind": "workspace_access" }]));
    assert_eq!(again.error(404), "SHARE_NOT_FOUND");
    bob.post(SESSIONS, json!({ "thread_id": "zz", "mode": "ensure", "sandbox_id": "dev" })).await.ok(200);
}

#[tokio::test]
async fn access_paths_include_shares_of_other_sessions_and_operators() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, carl, _) = principals(&broker).await;
    ann.post("/v1/sandboxes", json!({ "name": "dev", "access": "owner" })).await.ok(201);
    let ensure = async |thread: &str| {
        let params = json!({ "thread_id": thread, "mode": "ensure", "sandbox_id": "dev", "access": "owner" });
        ann.post(SESSIONS, params).await.ok(200)
    };
    let (first, second) = (ensure("one").await, ensure("two").await);
    let share = |session: &Value| format!("{}/share", session_path(session));
    let with = |name: &str| json!({ "principal": name, "capabilities": ["fs_read"] });
    assert_eq!(ann.post(&share(&first), with("bob")).await.ok(201)["is_limit"], true);
    assert_eq!(ann.post(&share(&second), with("bob")).await.ok(201)["is_limit"], false);
    assert_eq!(ann.get(&share(&first)).await.ok(200)["items"][0]["is_limit"], false);
    assert_eq!(ann.post(&share(&first), with("root")).await.ok(201)["is_limit"], false);
    ann.delete(&format!("{}/bob", share(&first))).await.ok(204);
    let left = async |session: &Value, name: &str| ann.get(&format!("{}/{name}", share(session))).await.ok(200)["access_paths"].clone();
    assert_eq!(left(&first, "bob").await, json!([{ "kind": "share", "session_id": second["session_id"] }]));
    assert_eq!(left(&first, "root").await, json!([{ "kind": "operator" }]));
    assert_eq!(left(&first, "ann").await, json!([{ "kind": "sandbox_owner" }]));
    bob.get(&format!("/dp/{}/v1/x", sandbox_id(&first))).await.ok(200);
    ann.delete(&format!("{}/bob", share(&second))).await.ok(204);
    assert_eq!(left(&first, "bob").await, json!([]));
    bob.get(&format!("/dp/{}/v1/x", sandbox_id(&first))).await.error(403);
    assert!(!ann.delete(&format!("{}/bob", share(&first))).await.message().contains("can still enter"));

    assert_eq!(carl.get(&format!("{}/bob", share(&first))).await.error(403), "FORBIDDEN");
    assert_eq!(ann.get(&format!("{}/nobody", share(&first))).await.error(404), "PRINCIPAL_NOT_FOUND");
}
