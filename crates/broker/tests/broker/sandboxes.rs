//! Tests of sandboxes themselves: tags, changes, and how a client that lost its state finds its sandbox again.

use http::Method;
use serde_json::{Value, json};

use crate::harness::{World, sandbox_id, session_path};

fn ids(list: &Value) -> Vec<&str> {
    list["items"].as_array().unwrap().iter().map(|s| s["id"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_negotiated_session_has_automatic_and_requested_tags() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let body = json!({ "thread_id": "t", "mode": "ensure", "tags": { "team": "infra" } });
    let made = ann.call(Method::POST, "/v1/sandbox/sessions", Some(body), &[("user-agent", "ailsd/1.2 (linux)")]).await.ok(200);
    let tags = json!({ "created_by": "ailsd", "principal": "ann", "scope": "thread:t", "team": "infra" });
    assert_eq!(ann.get("/v1/sandbox/sessions").await.ok(200)["items"][0]["tags"], tags);
    assert_eq!(ann.get(&format!("/v1/sandboxes/{}", sandbox_id(&made))).await.ok(200)["tags"], tags);
    let own = json!({ "thread_id": "u", "mode": "ensure", "tags": { "created_by": "me" } });
    ann.post("/v1/sandbox/sessions", own).await.ok(200);
    for (query, threads) in [
        ("tag=team:infra", vec!["t"]),
        ("tag=team%3Dinfra&tag=principal:ann", vec!["t"]),
        ("tag=created_by:me", vec!["u"]),
        ("tag=principal:ann", vec!["t", "u"]),
        ("tag=scope:thread:u", vec!["u"]),
        ("tag=team", vec!["t"]),
        ("tag=team:infra&state=suspended", vec![]),
    ] {
        let found = ann.get(&format!("/v1/sandbox/sessions?{query}")).await.ok(200);
        let mut found: Vec<_> = found["items"].as_array().unwrap().iter().map(|s| s["thread_id"].as_str().unwrap()).collect();
        found.sort_unstable();
        assert_eq!(found, threads, "{query}");
    }
    for query in ["tag=", "tag=a%20b", "tag=a&tag=a&tag=a&tag=a&tag=a&tag=a&tag=a&tag=a&tag=a"] {
        for list in ["/v1/sandbox/sessions", "/v1/sandboxes"] {
            assert_eq!(ann.get(&format!("{list}?{query}")).await.error(400), "INVALID_REQUEST", "{query}");
        }
    }
}

#[tokio::test]
async fn a_client_that_crashed_finds_its_sandbox_by_tag_and_resumes_it() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let tags = json!({ "created_by": "ailsd", "session_id": "local-7", "thread_id": "thr_1" });
    let made = ann.post("/v1/sandboxes", json!({ "tags": tags, "keep": true })).await.ok(201);
    ann.post("/v1/sandboxes", json!({ "tags": { "created_by": "ailsd", "session_id": "local-8" } })).await.ok(201);
    // Unused for long enough to be stopped, but not deleted.
    world.clock.advance(3600);
    broker.tick().await;
    for query in ["tag=session_id:local-7", "tag=thread_id:thr_1&tag=created_by:ailsd"] {
        let found = ann.get(&format!("/v1/sandboxes?{query}")).await.ok(200);
        assert_eq!(ids(&found), [made["id"].as_str().unwrap()]);
        assert_eq!(found["items"][0]["state"], "suspended");
    }
    let attach = json!({ "thread_id": "thr_1", "mode": "ensure", "sandbox_id": made["id"] });
    let back = ann.post("/v1/sandbox/sessions", attach).await.ok(200);
    assert_eq!((&back["sandbox"]["id"], &back["binding"]["state"]), (&made["id"], &json!("active")));
    assert_eq!(
        ids(&ann.get("/v1/sandboxes?tag=scope:thread:thr_1").await.ok(200)),
        [made["id"].as_str().unwrap()],
        "tags of its sessions match too"
    );
    ann.delete(&session_path(&back)).await;
    assert_eq!(ids(&ann.get("/v1/sandboxes?tag=scope:thread:thr_1").await.ok(200)), [""; 0]);
}

#[tokio::test]
async fn a_change_of_a_sandbox_by_its_owner_is_atomic() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, eve) = (broker.human("ann").await, broker.human("bob").await, broker.stranger().await);
    let made = ann.post("/v1/sandboxes", json!({ "name": "dev", "tags": { "a": "1", "b": "2" } })).await.ok(201);
    ann.post("/v1/sandboxes", json!({ "name": "other" })).await.ok(201);
    let path = format!("/v1/sandboxes/{}", made["id"].as_str().unwrap());
    let patch = async |caller: &crate::harness::Client, body: Value| caller.call(Method::PATCH, &path, Some(body), &[]).await;

    let changed = patch(&ann, json!({ "name": "box", "keep": true, "tags": { "a": null, "c": "3" } })).await.ok(200);
    assert_eq!((&changed["name"], &changed["keep"], &changed["state"]), (&json!("box"), &json!(true), &json!("active")));
    assert_eq!(changed["tags"], json!({ "b": "2", "c": "3", "created_by": "unknown", "principal": "ann" }));
    assert_eq!(ann.get("/v1/sandboxes/dev").await.error(404), "SANDBOX_NOT_FOUND");
    assert_eq!(ann.get("/v1/sandboxes/box").await.ok(200), ann.get(&path).await.ok(200));
    assert_eq!(patch(&ann, json!({})).await.ok(200), ann.get(&path).await.ok(200), "an empty change has no effect");
    let taken = patch(&ann, json!({ "name": "other", "keep": false })).await;
    assert_eq!(taken.error(409), "SANDBOX_CONFLICT");
    assert_eq!(ann.get(&path).await.ok(200)["keep"], true);
    assert_eq!(patch(&ann, json!({ "name": null, "access": "owner" })).await.ok(200)["name"], json!(null));
    for body in
        [json!({ "name": "a b" }), json!({ "tags": { "principal": "eve" } }), json!({ "owner": "eve" }), json!({ "tags": { "x": 1 } })]
    {
        assert_eq!(patch(&ann, body).await.error(400), "INVALID_REQUEST");
    }
    let many: serde_json::Map<String, Value> = (0..33).map(|n| (format!("k{n}"), json!("v"))).collect();
    assert_eq!(patch(&ann, json!({ "tags": many })).await.error(400), "INVALID_REQUEST");
    assert_eq!(patch(&bob, json!({ "keep": false })).await.error(403), "FORBIDDEN");
    assert_eq!(patch(&eve, json!({ "keep": false })).await.error(404), "SANDBOX_NOT_FOUND");
}
