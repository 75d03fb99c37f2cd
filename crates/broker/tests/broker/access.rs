//! Tests of authorization: workspaces, owners, operators and keys.

use cobox_protocol::{control::Revocation, key::PrincipalKind};
use serde_json::json;

use crate::harness::{World, sandbox_id, session_path};

#[tokio::test]
async fn another_workspace_finds_nothing() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, eve) = (broker.human("ann").await, broker.stranger().await);
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    assert_eq!(eve.get(&session_path(&made)).await.error(404), "SESSION_NOT_FOUND");
    assert_eq!(eve.delete(&session_path(&made)).await.error(404), "SESSION_NOT_FOUND");
    assert_eq!(eve.post(&format!("{}/refresh", session_path(&made)), json!({})).await.error(404), "SESSION_NOT_FOUND");
    assert_eq!(eve.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "get" })).await.error(404), "SESSION_NOT_FOUND");
    assert_eq!(eve.get(&format!("/v1/sandboxes/{id}")).await.error(404), "SANDBOX_NOT_FOUND");
    assert_eq!(eve.delete(&format!("/v1/sandboxes/{id}")).await.error(404), "SANDBOX_NOT_FOUND");
    assert_eq!(eve.get(&format!("/dp/{id}/v1/x")).await.error(404), "SANDBOX_NOT_FOUND");
    assert_eq!(eve.get("/v1/sandboxes").await.ok(200)["items"], json!([]));
    assert_ne!(eve.ensure("t").await["sandbox"]["id"], made["sandbox"]["id"], "the same thread id in another workspace is another thread");
}

#[tokio::test]
async fn private_items_are_forbidden_to_all_but_their_owner_and_operators() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, root) = (broker.human("ann").await, broker.human("bob").await, broker.key("root", PrincipalKind::Operator).await);
    let private = json!({ "thread_id": "t", "mode": "ensure", "access": "owner" });
    let made = ann.post("/v1/sandbox/sessions", private).await.ok(200);
    let id = sandbox_id(&made);
    for mode in ["get", "ensure"] {
        assert_eq!(bob.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": mode })).await.error(403), "FORBIDDEN");
    }
    assert_eq!(bob.get(&session_path(&made)).await.error(403), "FORBIDDEN");
    assert_eq!(bob.get(&format!("/v1/sandboxes/{id}")).await.error(403), "FORBIDDEN");
    assert_eq!(bob.get(&format!("/dp/{id}/v1/x")).await.error(403), "FORBIDDEN");
    assert_eq!(bob.get("/v1/sandboxes").await.ok(200)["items"], json!([]));
    assert_eq!(root.ensure("t").await["session_id"], made["session_id"]);
}

#[tokio::test]
async fn any_principal_of_the_workspace_may_join_a_thread_and_only_its_owner_and_operators_may_end_it() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, root) = (broker.human("ann").await, broker.human("bob").await, broker.key("root", PrincipalKind::Operator).await);
    let made = ann.ensure("t").await;
    assert_eq!(bob.ensure("t").await["session_id"], made["session_id"]);
    assert_eq!(bob.delete(&session_path(&made)).await.error(403), "FORBIDDEN");
    assert_eq!(bob.delete(&format!("/v1/sandboxes/{}", sandbox_id(&made))).await.error(403), "FORBIDDEN");
    assert_eq!(root.delete(&session_path(&made)).await.status, 204);
}

#[tokio::test]
async fn a_named_sandbox_is_found_by_name_and_deleted_with_everything() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.post("/v1/sandboxes", json!({ "name": "dev" })).await.ok(201);
    assert_eq!(made["state"], "active");
    assert_eq!(ann.get("/v1/sandboxes/dev").await.ok(200)["id"], made["id"]);
    let taken = ann.post("/v1/sandboxes", json!({ "name": "dev" })).await;
    assert_eq!(taken.json()["error"]["details"]["sandbox_id"], made["id"]);
    assert_eq!(taken.error(409), "SANDBOX_CONFLICT");
    assert_eq!(ann.post("/v1/sandboxes", json!({ "name": "../x" })).await.error(400), "INVALID_REQUEST");
    ann.get(&format!("/dp/{}/v1/x", made["id"].as_str().unwrap())).await.ok(200);
    assert_eq!(ann.delete("/v1/sandboxes/dev").await.status, 204);
    assert_eq!(ann.get("/v1/sandboxes/dev").await.error(404), "SANDBOX_NOT_FOUND");
    assert_eq!(world.provider.running(), 0);
}

#[tokio::test]
async fn keys_are_for_operators_and_a_revoked_key_ends_its_tokens() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, root) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await);
    assert_eq!(ann.get("/v1/keys").await.error(403), "FORBIDDEN");
    assert_eq!(ann.post("/v1/keys", json!({ "name": "x", "kind": "operator" })).await.error(403), "FORBIDDEN");
    let conflict = root.post("/v1/keys", json!({ "name": "ann", "kind": "agent" })).await;
    assert_eq!(conflict.error(400), "INVALID_REQUEST");
    let made = root.post("/v1/keys", json!({ "name": "bot", "kind": "agent" })).await.ok(201);
    let bot = ann.with(&made["api_key"]);
    let session = bot.ensure("t").await;
    let id = sandbox_id(&session);
    let listed = root.get("/v1/keys").await.ok(200);
    assert!(!listed.to_string().contains(made["api_key"].as_str().unwrap()), "a list never contains the key");

    assert_eq!(root.delete(&format!("/v1/keys/{}", made["id"].as_str().unwrap())).await.status, 204);
    assert_eq!(bot.get("/v1/sandboxes").await.error(401), "UNAUTHENTICATED");
    assert_eq!(bot.with(&session["token"]).get(&format!("/dp/{id}/v1/x")).await.error(401), "TOKEN_REVOKED");
    let reported = world.provider.boxd(&id).state.lock().unwrap().revoked.clone();
    assert_eq!(reported, [Revocation::Grant(made["id"].as_str().unwrap().to_owned())], "the revocation is pushed before the response");
    assert_eq!(root.delete(&format!("/v1/keys/{}", made["id"].as_str().unwrap())).await.error(404), "KEY_NOT_FOUND");
}

#[tokio::test]
async fn an_expired_key_is_refused_like_any_wrong_key() {
    let world = World::new();
    let broker = world.start().await;
    let root = broker.key("root", PrincipalKind::Operator).await;
    let soon = root.post("/v1/keys", json!({ "name": "temp", "kind": "human", "expires_at": "2000-01-01T00:00:00Z" })).await;
    assert_eq!(soon.error(400), "INVALID_REQUEST");
    let key = root.key.clone().unwrap();
    let mut forged = key.expose().to_owned();
    forged.replace_range(forged.len() - 4.., "AAAA");
    let mut messages = std::collections::HashSet::new();
    for wrong in [forged.as_str(), "cbx_00000000000000000000000000_x", "cbx_", "a.b.c.d"] {
        let answer = root.with(&json!(wrong)).get("/v1/sandboxes").await;
        if wrong.starts_with("cbx_") {
            messages.insert(answer.json()["error"]["message"].to_string());
        }
        assert_eq!(answer.error(401), "UNAUTHENTICATED");
    }
    assert_eq!(messages.len(), 1);
}
