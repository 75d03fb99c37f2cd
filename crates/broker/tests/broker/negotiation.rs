//! Tests of negotiation in every mode and for every scope: notices, names, tags and conflicts.

use std::{collections::HashSet, sync::atomic::Ordering};

use http::Method;
use serde_json::{Value, json};

use crate::harness::{Client, World, claims, sandbox_id, session_path};

const SESSIONS: &str = "/v1/sandbox/sessions";

async fn ask(client: &Client, thread: &str, extra: Value) -> crate::harness::Answer {
    let mut body = json!({ "thread_id": thread, "mode": "ensure" });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    client.post(SESSIONS, body).await
}

#[tokio::test]
async fn create_only_creates_a_session_and_refuses_an_existing_one() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ask(&ann, "t", json!({ "mode": "create_only" })).await.ok(200);
    let again = ask(&bob, "t", json!({ "mode": "create_only" })).await;
    let details = again.json()["error"]["details"].clone();
    assert_eq!((&details["session_id"], &details["sandbox_id"]), (&made["session_id"], &made["sandbox"]["id"]));
    assert_eq!(again.error(409), "SESSION_CONFLICT");
    let full = json!({ "scope": { "type": "thread", "id": "t" }, "mode": "create_only" });
    let again = bob.post(SESSIONS, full).await;
    assert_eq!(again.json()["error"]["details"]["binding_id"], made["binding"]["id"]);
    assert_eq!(again.error(409), "BINDING_CONFLICT");
    ask(&ann, "private", json!({ "access": "owner" })).await.ok(200);
    assert_eq!(ask(&bob, "private", json!({ "mode": "create_only" })).await.error(403), "FORBIDDEN");
    ann.delete(&session_path(&made)).await;
    assert_ne!(ask(&bob, "t", json!({ "mode": "create_only" })).await.ok(200)["session_id"], made["session_id"]);
}

#[tokio::test]
async fn of_racing_create_only_requests_one_succeeds() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let answers = futures_util::future::join_all((0..20).map(|_| ask(&ann, "t", json!({ "mode": "create_only" })))).await;
    let (made, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|a| a.status == 200);
    let made: Vec<Value> = made.into_iter().map(|a| a.ok(200)).collect();
    assert_eq!(made.len(), 1);
    for refused in refused {
        assert_eq!(refused.json()["error"]["details"]["session_id"], made[0]["session_id"]);
        assert_eq!(refused.error(409), "SESSION_CONFLICT");
    }
    assert_eq!(world.provider.starts.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_retry_of_create_only_gets_the_first_response_and_a_conflict_stays_a_conflict() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let send = async |thread: &str, key: &str| {
        let body = json!({ "thread_id": thread, "mode": "create_only" });
        ann.call(Method::POST, SESSIONS, Some(body), &[("idempotency-key", key)]).await
    };
    let made = send("t", "k1").await.ok(200);
    assert_eq!(send("t", "k1").await.ok(200)["session_id"], made["session_id"]);
    for _ in 0..2 {
        assert_eq!(send("t", "k2").await.error(409), "SESSION_CONFLICT");
    }
    // Expires to the second, and not only at the next reaper round.
    world.clock.advance(24 * 3600);
    send("t", "k1").await.ok(200);
    world.clock.advance(1);
    assert_eq!(send("t", "k1").await.error(409), "SESSION_CONFLICT");
}

#[tokio::test]
async fn a_replay_after_the_end_of_the_session_reports_it_as_over() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let dev = ann.post("/v1/sandboxes", json!({})).await.ok(201);
    let body = json!({ "thread_id": "t", "mode": "ensure", "sandbox_hint": dev["id"] });
    let send = async || ann.call(Method::POST, SESSIONS, Some(body.clone()), &[("idempotency-key", "k")]).await;
    let made = send().await.ok(200);
    assert_eq!(made["sandbox"]["id"], dev["id"]);
    ann.delete(&session_path(&made)).await;
    assert_eq!(send().await.error(410), "SESSION_EXPIRED");
}

#[tokio::test]
async fn scopes_of_different_types_are_independent() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let mut sandboxes = HashSet::new();
    for kind in ["thread", "workspace", "assistant", "deployment"] {
        let scope = json!({ "type": kind, "id": "x" });
        let attach = json!({ "scope": scope, "mode": "attach_only" });
        assert_eq!(ann.post(SESSIONS, attach.clone()).await.error(404), "BINDING_NOT_FOUND");
        let made = ann.post(SESSIONS, json!({ "scope": scope, "mode": "ensure" })).await.ok(200);
        assert_eq!((&made["binding"]["scope"], &made["thread_id"]), (&scope, &json!("x")));
        assert_eq!(ann.post(SESSIONS, attach).await.ok(200)["session_id"], made["session_id"]);
        let claimed = claims(made["token"].as_str().unwrap());
        assert_eq!(claimed.get("thread_id").is_some(), kind == "thread", "only a token of a thread's session names a thread");
        let listed = ann.get(&format!("{SESSIONS}?scope_type={kind}&scope_id=x")).await.ok(200);
        assert_eq!(listed["items"].as_array().unwrap().len(), 1);
        assert_eq!((&listed["items"][0]["scope"], &listed["items"][0]["session_id"]), (&scope, &made["session_id"]));
        sandboxes.insert(sandbox_id(&made));
    }
    assert_eq!(sandboxes.len(), 4);
    assert_eq!(
        ann.post(SESSIONS, json!({ "scope": { "type": "assistant", "id": "" }, "mode": "ensure" })).await.error(400),
        "INVALID_REQUEST"
    );
}

#[tokio::test]
async fn many_threads_share_one_named_sandbox() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let dev = ann.post("/v1/sandboxes", json!({ "name": "dev" })).await.ok(201);
    for (caller, thread, hint) in [
        (&ann, "a", json!({ "sandbox_hint": "dev" })),
        (&bob, "b", json!({ "sandbox_id": dev["id"] })),
        (&bob, "c", json!({ "name": "dev" })),
    ] {
        let made = ask(caller, thread, hint.clone()).await.ok(200);
        assert_eq!(made["sandbox"]["id"], dev["id"]);
        assert_eq!(
            ask(caller, thread, hint).await.ok(200)["session_id"],
            made["session_id"],
            "a hint that matches the session is accepted"
        );
    }
    assert_eq!(world.provider.starts.load(Ordering::SeqCst), 1);
    let seen = ann.get("/v1/sandboxes/dev").await.ok(200);
    assert_eq!(
        seen["threads"].as_array().unwrap().iter().filter_map(Value::as_str).collect::<HashSet<_>>(),
        HashSet::from(["a", "b", "c"])
    );
    // Each session ends by itself; the last one leaves the files.
    for (caller, thread) in [(&ann, "a"), (&bob, "b"), (&bob, "c")] {
        let session = caller.post(SESSIONS, json!({ "thread_id": thread, "mode": "get" })).await.ok(200);
        assert_eq!(caller.delete(&session_path(&session)).await.status, 204);
    }
    assert_eq!(ann.get("/v1/sandboxes/dev").await.ok(200)["state"], "suspended");
    assert!(world.provider.destroyed.lock().unwrap().is_empty());
    let back = ask(&ann, "d", json!({ "name": "dev" })).await.ok(200);
    assert_eq!((&back["sandbox"]["id"], &back["binding"]["state"]), (&dev["id"], &json!("active")));
}

#[tokio::test]
async fn a_hint_to_another_sandbox_is_a_conflict_and_to_a_missing_one_not_found() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, eve) = (broker.human("ann").await, broker.stranger().await);
    let made = ann.ensure("t").await;
    let dev = ann.post("/v1/sandboxes", json!({ "name": "dev" })).await.ok(201);
    for hint in [json!({ "sandbox_hint": "dev" }), json!({ "sandbox_id": dev["id"] }), json!({ "name": "dev" }), json!({ "name": "new" })] {
        let conflict = ask(&ann, "t", hint).await;
        assert_eq!(conflict.json()["error"]["details"]["sandbox_id"], made["sandbox"]["id"]);
        assert_eq!(conflict.error(409), "SESSION_CONFLICT");
    }
    for (caller, hint) in [(&ann, json!("nobody")), (&eve, dev["id"].clone()), (&eve, json!("dev"))] {
        assert_eq!(ask(caller, "fresh", json!({ "sandbox_hint": hint })).await.error(404), "SANDBOX_NOT_FOUND");
    }
    assert_eq!(ask(&ann, "u", json!({ "sandbox_hint": "dev", "name": "dev" })).await.error(400), "INVALID_REQUEST");
    let gone = ann.get(&format!("{SESSIONS}?scope_id=fresh")).await.ok(200);
    assert_eq!(gone["items"], json!([]), "no session was created");
}

#[tokio::test]
async fn a_private_sandbox_of_another_principal_is_forbidden_on_every_route() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    ann.post("/v1/sandboxes", json!({ "name": "mine", "access": "owner" })).await.ok(201);
    for hint in [json!({ "sandbox_hint": "mine" }), json!({ "name": "mine" })] {
        assert_eq!(ask(&bob, "t", hint).await.error(403), "FORBIDDEN");
    }
    // Not even through a session with wider access, which the sandbox also had when the session was created.
    let set_access =
        async |access: &str| ann.call(Method::PATCH, "/v1/sandboxes/mine", Some(json!({ "access": access })), &[]).await.ok(200);
    set_access("workspace").await;
    let made = ask(&ann, "t", json!({ "sandbox_hint": "mine", "access": "workspace" })).await.ok(200);
    set_access("owner").await;
    assert_eq!(ask(&bob, "t", json!({})).await.error(403), "FORBIDDEN");
    let relay = format!("/v1/sandbox/relay/{}/v1/x", made["session_id"].as_str().unwrap());
    assert_eq!(bob.get(&relay).await.error(403), "FORBIDDEN");
    ann.get(&relay).await.ok(200);
    set_access("workspace").await;
    assert_eq!(ask(&bob, "t", json!({})).await.ok(200)["session_id"], made["session_id"]);
}

#[tokio::test]
async fn racing_threads_that_name_one_sandbox_share_it() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let asking = (0..20).map(|n| {
        let ann = ann.clone();
        async move { ask(&ann, &format!("t{n}"), json!({ "name": "dev" })).await.ok(200) }
    });
    let made = futures_util::future::join_all(asking).await;
    let sandboxes: HashSet<_> = made.iter().map(sandbox_id).collect();
    let sessions: HashSet<_> = made.iter().map(|m| m["session_id"].to_string()).collect();
    assert_eq!((sandboxes.len(), sessions.len()), (1, 20));
    assert_eq!(world.provider.starts.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_kept_sandbox_outlives_its_session_and_a_guest_cannot_end_its_hosts() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ask(&ann, "t", json!({ "keep": true })).await.ok(200);
    assert_eq!(ann.delete(&session_path(&made)).await.status, 204);
    let id = sandbox_id(&made);
    assert_eq!(ann.state(&id).await, "suspended");
    assert!(ann.get(&format!("/v1/sandboxes/{id}")).await.ok(200)["keep"].as_bool().unwrap());

    let shared = ann.post("/v1/sandboxes", json!({})).await.ok(201);
    let session = ask(&bob, "guest", json!({ "sandbox_id": shared["id"] })).await.ok(200);
    assert_eq!(bob.delete(&session_path(&session)).await.status, 204);
    assert_eq!(ann.state(&sandbox_id(&session)).await, "suspended");
    assert!(world.provider.destroyed.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_later_session_on_a_used_sandbox_has_its_full_hard_end() {
    let mut world = World::new();
    world.config.hard_ttl_seconds = 300;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let first = ask(&ann, "a", json!({ "name": "dev" })).await.ok(200);
    broker.run_for(&world.clock, 240).await;
    let second = ask(&ann, "b", json!({ "name": "dev" })).await.ok(200);
    broker.run_for(&world.clock, 60).await;
    assert_eq!(ann.get(&session_path(&first)).await.error(410), "SESSION_EXPIRED", "the first session has used up its running time");
    assert_eq!(ann.get(&session_path(&second)).await.ok(200)["binding"]["state"], "active");
    assert_eq!(world.provider.running(), 1);
}
