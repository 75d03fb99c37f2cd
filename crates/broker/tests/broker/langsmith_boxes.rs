//! Tests of boxes in the LangSmith API: ordinary sandboxes in that API's shapes, under both prefixes, with errors that
//! its SDKs understand.

use std::sync::atomic::Ordering;

use cobox_protocol::{SandboxId, key::PrincipalKind};
use http::Method;
use serde_json::{Value, json};

use crate::harness::{Answer, Client, World, eventually, sandbox_id};

const PREFIXES: [&str; 2] = ["/v2/sandboxes", "/api/v2/sandboxes"];
const BOXES: &str = "/v2/sandboxes/boxes";

/// The type of an error that isn't about a field.
#[track_caller]
fn refused(answer: Answer, status: u16) -> String {
    let id = answer.headers["x-request-id"].to_str().unwrap().to_owned();
    let body = answer.ok(status);
    assert_eq!(body["detail"]["error_id"], id, "{body}");
    assert!(!body["detail"]["message"].as_str().unwrap().is_empty());
    body["detail"]["error"].as_str().unwrap().to_owned()
}

/// The field that an error names.
#[track_caller]
fn refused_field(answer: Answer) -> String {
    let detail = answer.ok(422)["detail"][0].clone();
    assert_eq!(detail["type"], "value_error");
    detail["loc"].as_array().unwrap().last().unwrap().as_str().unwrap().to_owned()
}

fn id(made: &Value) -> SandboxId {
    made["id"].as_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_box_is_created_found_and_deleted_by_name_and_by_id_under_both_prefixes() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    for prefix in PREFIXES {
        let boxes = format!("{prefix}/boxes");
        let made = ann.post(&boxes, json!({ "wait_for_ready": true, "timeout": 30, "name": "dev" })).await.ok(201);
        assert_eq!((&made["name"], &made["status"]), (&json!("dev"), &json!("ready")));
        let url = made["dataplane_url"].as_str().unwrap();
        assert!(url.ends_with(&format!("/dp/{}", id(&made))), "{url}");
        for which in ["dev", made["id"].as_str().unwrap()] {
            let found = ann.get(&format!("{boxes}/{which}")).await.ok(200);
            assert_eq!((&found["id"], &found["dataplane_url"]), (&made["id"], &made["dataplane_url"]));
            assert_eq!(ann.get(&format!("{boxes}/{which}/status")).await.ok(200)["status"], "ready");
        }
        let nameless = ann.post(&boxes, json!({ "wait_for_ready": true })).await.ok(201);
        assert_eq!(nameless["name"], nameless["id"], "the name must be usable in a path");
        let listed = ann.get(&boxes).await.ok(200);
        assert_eq!((listed["sandboxes"].as_array().unwrap().len(), &listed["items"]), (2, &listed["sandboxes"]));
        for which in ["dev", nameless["name"].as_str().unwrap()] {
            ann.delete(&format!("{boxes}/{which}")).await.ok(204);
            assert_eq!(refused(ann.get(&format!("{boxes}/{which}")).await, 404), "NotFound");
        }
    }
    assert_eq!(world.provider.running(), 0);
}

#[tokio::test]
async fn a_box_is_an_ordinary_sandbox_for_every_other_route() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ann.post(BOXES, json!({ "name": "dev", "labels": { "team": "a" } })).await.ok(201);
    let seen = ann.get("/v1/sandboxes/dev").await.ok(200);
    assert_eq!((&seen["id"], &seen["tags"]["team"], &seen["keep"]), (&made["id"], &json!("a"), &json!(true)));
    let session = bob.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "ensure", "sandbox_hint": "dev" })).await.ok(200);
    assert_eq!(sandbox_id(&session), id(&made));
    // Releasing the thread keeps the box.
    bob.delete(&format!("/v1/sandbox/sessions/{}", session["session_id"].as_str().unwrap())).await.ok(204);
    ann.get(&format!("{BOXES}/dev")).await.ok(200);
    let root = broker.key("root", PrincipalKind::Operator).await;
    let audit = root.get(&format!("/v1/audit?sandbox={}", id(&made))).await.ok(200);
    let actions: Vec<&str> = audit["items"].as_array().unwrap().iter().map(|r| r["action"].as_str().unwrap()).collect();
    assert!(actions.contains(&"sandbox.created") && actions.contains(&"session.created"), "{actions:?}");
    assert_eq!(broker.stranger().await.get(&format!("{BOXES}/dev")).await.status, 404, "boxes of other workspaces are not found");
    assert_eq!(broker.stranger().await.get(BOXES).await.ok(200)["sandboxes"], json!([]));
}

#[tokio::test]
async fn a_stopped_box_keeps_its_url_and_starts_on_request_or_traffic() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ann.post(BOXES, json!({ "name": "dev" })).await.ok(201);
    let stopped = ann.post(&format!("{BOXES}/dev/stop"), json!({})).await.ok(200);
    assert_eq!((&stopped["status"], &stopped["dataplane_url"]), (&json!("stopped"), &made["dataplane_url"]));
    assert!(stopped["stopped_at"].is_string() && !world.provider.is_up(&id(&made)));
    // Repeating it changes nothing.
    ann.post(&format!("{BOXES}/dev/stop"), json!({})).await.ok(200);
    assert_eq!(refused(bob.post(&format!("{BOXES}/dev/stop"), json!({})).await, 403), "Forbidden");
    let started = bob.post(&format!("{BOXES}/dev/start"), json!({})).await.ok(200);
    assert_eq!((&started["status"], world.provider.is_up(&id(&made))), (&json!("ready"), true));
    ann.call(Method::POST, &format!("{BOXES}/dev/stop"), None, &[]).await.ok(200);
    let execute = format!("/dp/{}/execute", id(&made));
    ann.post(&execute, json!({ "command": "true" })).await.ok(200);
    assert!(world.provider.is_up(&id(&made)));
    assert_eq!(ann.get(&format!("{BOXES}/dev/status")).await.ok(200)["status"], "ready");
}

#[tokio::test]
async fn a_key_or_token_in_either_header_opens_the_dataplane_and_a_key_is_not_forwarded() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let session = ann.ensure("t").await;
    let execute = format!("/dp/{}/execute", sandbox_id(&session));
    let stranger = Client { key: None, ..ann.clone() };
    let key = ann.key.as_ref().unwrap().expose().to_owned();
    let token = session["token"].as_str().unwrap();
    for (name, value) in [
        ("x-api-key", key.clone()),
        ("authorization", format!("Bearer {key}")),
        ("x-api-key", token.into()),
        ("authorization", format!("Bearer {token}")),
    ] {
        stranger.call(Method::POST, &execute, Some(json!({ "command": "true" })), &[(name, &value)]).await.ok(200);
    }
    for seen in world.provider.boxd(&sandbox_id(&session)).seen.lock().unwrap().iter() {
        assert!(!seen.headers.contains_key("x-api-key"));
        assert!(!seen.headers["authorization"].to_str().unwrap().contains(&key));
    }
}

#[tokio::test]
async fn unsupported_fields_are_refused_by_name_and_nothing_is_created() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    for (body, field) in [
        (json!({ "name": "no/slash" }), "name"),
        (json!({ "idle_ttl_seconds": 61 }), "idle_ttl_seconds"),
        (json!({ "delete_after_stop_seconds": 1 }), "delete_after_stop_seconds"),
        (json!({ "timeout": -1 }), "timeout"),
        (json!({ "mount_config": { "mounts": [] } }), "mount_config"),
        (json!({ "proxy_config": { "rules": [] } }), "proxy_config"),
        (json!({ "access_delegation": { "mode": "INHERIT" } }), "access_delegation"),
        (json!({ "persistent": false }), "persistent"),
        (json!({ "run_config": { "user": "root" } }), "user"),
        (json!({ "ttl_seconds": 60 }), "ttl_seconds"),
        (json!({ "labels": { "no spaces": "x" } }), "labels"),
        (json!({ "run_config": { "work_dir": "/tmp" } }), "work_dir"),
        (json!({ "vcpus": 0 }), "vcpus"),
        (json!({ "vcpus": 1, "cpu_millicores": 1000 }), "cpu_millicores"),
        (json!({ "snapshot": "a", "snapshot_name": "b" }), "snapshot_name"),
        (json!({ "env_vars": { "A=B": "x" } }), "env"),
        (json!({ "gpu": 1 }), "gpu"),
        (json!({ "name": 7 }), "name"),
    ] {
        let answer = ann.post(BOXES, body.clone()).await;
        assert_eq!(answer.status, 422, "{body}");
        assert_eq!(refused_field(answer), field, "{body}");
    }
    for harmless in [json!({ "proxy_config": {} }), json!({ "persistent": true, "mount_config": null, "idle_ttl_seconds": 0 })] {
        let made = ann.post(BOXES, harmless).await.ok(201);
        ann.delete(&format!("{BOXES}/{}", id(&made))).await.ok(204);
    }
    assert_eq!(ann.get(BOXES).await.ok(200)["items"], json!([]));
    for method in [Method::GET, Method::DELETE] {
        let answer = ann.call(method, &format!("{BOXES}/x/service-urls"), None, &[]).await;
        assert_eq!(refused(answer, 400), "NotImplemented");
    }
    assert_eq!(refused(ann.post(&format!("{BOXES}/x/service-url"), json!({ "port": 80 })).await, 400), "NotImplemented");
    assert_eq!(refused(ann.get("/v2/sandboxes/none").await, 404), "NotFound");
    assert_eq!(refused(Client { key: None, ..ann.clone() }.get(BOXES).await, 401), "Unauthorized");
}

#[tokio::test]
async fn box_names_are_unique_and_the_workspace_limit_applies() {
    let mut world = World::new();
    world.config.max_sandboxes_per_workspace = 2;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    ann.post(BOXES, json!({ "name": "one" })).await.ok(201);
    assert_eq!(refused(ann.post(BOXES, json!({ "name": "one" })).await, 409), "Conflict");
    let two = ann.post(BOXES, json!({ "name": "two" })).await.ok(201);
    assert_eq!(refused(ann.call(Method::PATCH, &format!("{BOXES}/two"), Some(json!({ "name": "one" })), &[]).await, 409), "Conflict");
    let full = ann.post(BOXES, json!({})).await;
    assert!(!full.headers.contains_key("retry-after"), "a retry doesn't help");
    let body = full.ok(429);
    // The SDK recognizes the limit by these words.
    let message = body["detail"]["message"].as_str().unwrap();
    assert!(message.contains("sandbox") && message.contains("limit"), "{message}");
    let renamed = ann.call(Method::PATCH, &format!("{BOXES}/two"), Some(json!({ "name": "three" })), &[]).await.ok(200);
    assert_eq!((&renamed["name"], &renamed["id"]), (&json!("three"), &two["id"]));
}

#[tokio::test]
async fn a_box_that_fails_to_start_leaves_nothing_behind() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    world.provider.failing_starts.store(3, Ordering::SeqCst);
    // The SDK repeats a POST after a 503.
    for _ in 0..3 {
        assert_eq!(refused(ann.post(BOXES, json!({ "name": "dev" })).await, 503), "Unschedulable");
    }
    ann.post(BOXES, json!({ "name": "dev" })).await.ok(201);
    assert_eq!(ann.get(BOXES).await.ok(200)["items"].as_array().unwrap().len(), 1);
    assert_eq!(world.provider.running(), 1);
    // A client that doesn't wait learns of the failure through the status.
    world.provider.failing_starts.store(1, Ordering::SeqCst);
    world.provider.may_start.send_replace(false);
    let made = ann.post(BOXES, json!({ "wait_for_ready": false })).await.ok(201);
    world.provider.may_start.send_replace(true);
    let path = format!("{BOXES}/{}/status", id(&made));
    eventually("the failure", async || ann.get(&path).await.ok(200)["status"] == "failed").await;
    assert!(ann.get(&path).await.ok(200)["status_message"].is_string());
}

#[tokio::test]
async fn a_list_without_a_page_size_has_all_boxes_and_unknown_filters_are_refused() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    for n in 0..60 {
        let caller = if n % 2 == 0 { &ann } else { &bob };
        caller.post(BOXES, json!({ "name": format!("box{n}") })).await.ok(201);
    }
    let count = |list: &Value| list["sandboxes"].as_array().unwrap().len();
    let all = ann.get(BOXES).await.ok(200);
    assert_eq!((count(&all), &all["next_cursor"]), (60, &Value::Null));
    let page = ann.get(&format!("{BOXES}?page_size=40")).await.ok(200);
    let rest = ann.get(&format!("{BOXES}?page_size=40&cursor={}", page["next_cursor"].as_str().unwrap())).await.ok(200);
    assert_eq!((count(&page), count(&rest), &rest["next_cursor"]), (40, 20, &Value::Null));
    ann.post(&format!("{BOXES}/box0/stop"), json!({})).await.ok(200);
    for (query, many) in [
        ("created_by=me", 30),
        ("created_by=bob", 30),
        ("status=stopped", 1),
        ("status=ready&created_by=me", 29),
        ("sort_by=created_at&sort_order=desc", 60),
        ("status=failed", 0),
    ] {
        assert_eq!(count(&ann.get(&format!("{BOXES}?{query}")).await.ok(200)), many, "{query}");
    }
    for (query, field) in [("label=a", "label"), ("sort_by=name", "sort_by"), ("sort_order=asc", "sort_order"), ("limit=0", "limit")] {
        assert_eq!(refused_field(ann.get(&format!("{BOXES}?{query}")).await), field, "{query}");
    }
    ann.get(&format!("{BOXES}?status=odd")).await.ok(422);
}

#[tokio::test]
async fn polling_by_name_reports_a_failed_box() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, eve) = (broker.human("ann").await, broker.stranger().await);
    world.provider.failing_starts.store(1, Ordering::SeqCst);
    world.provider.may_start.send_replace(false);
    ann.post(BOXES, json!({ "name": "dev", "wait_for_ready": false })).await.ok(201);
    world.provider.may_start.send_replace(true);
    let path = format!("{BOXES}/dev/status");
    eventually("the failure", async || ann.get(&path).await.ok(200)["status"] == "failed").await;
    assert!(ann.get(&path).await.ok(200)["status_message"].as_str().unwrap().contains("set to fail"));
    assert_eq!(refused(eve.get(&path).await, 404), "NotFound");
    // A new box of the same name is independent of the failed one, and so is its deletion.
    ann.post(BOXES, json!({ "name": "dev" })).await.ok(201);
    assert_eq!(ann.get(&path).await.ok(200)["status"], "ready");
    ann.delete(&format!("{BOXES}/dev")).await.ok(204);
    assert_eq!(refused(ann.get(&path).await, 404), "NotFound");
    world.provider.failing_starts.store(1, Ordering::SeqCst);
    world.provider.may_start.send_replace(false);
    ann.post(BOXES, json!({ "name": "dev", "wait_for_ready": false })).await.ok(201);
    world.provider.may_start.send_replace(true);
    eventually("the failure", async || ann.get(&path).await.ok(200)["status"] == "failed").await;
    world.clock.advance(3600);
    assert_eq!(refused(ann.get(&path).await, 404), "NotFound", "a failed box is hidden after an hour");
}

#[tokio::test]
async fn a_start_responds_before_it_completes_and_reports_a_failure() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    ann.post(BOXES, json!({ "name": "dev" })).await.ok(201);
    ann.post(&format!("{BOXES}/dev/stop"), json!({})).await.ok(200);
    let status = async || ann.get(&format!("{BOXES}/dev/status")).await.ok(200)["status"].as_str().unwrap().to_owned();
    world.provider.may_start.send_replace(false);
    let starting = ann.post(&format!("{BOXES}/dev/start"), json!({})).await.ok(200);
    assert_eq!((starting["status"].as_str().unwrap(), status().await.as_str()), ("provisioning", "provisioning"));
    assert_eq!(ann.get(BOXES).await.ok(200)["items"][0]["status"], "provisioning");
    world.provider.failing_starts.store(1, Ordering::SeqCst);
    world.provider.may_start.send_replace(true);
    eventually("the failure", async || status().await == "failed").await;
    let displayed = ann.get(&format!("{BOXES}/dev")).await.ok(200);
    assert!(displayed["status_message"].as_str().unwrap().contains("set to fail"), "{displayed}");
    // A failure that is known immediately is reported immediately, and the next start may succeed.
    world.provider.failing_starts.store(1, Ordering::SeqCst);
    assert_eq!(ann.post(&format!("{BOXES}/dev/start"), json!({})).await.ok(200)["status"], "failed");
    assert_eq!(ann.post(&format!("{BOXES}/dev/start"), json!({})).await.ok(200)["status"], "ready");
}

#[tokio::test]
async fn a_box_that_does_not_run_within_the_wait_is_deleted() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    world.provider.may_start.send_replace(false);
    let slow = ann.post(BOXES, json!({ "wait_for_ready": false, "name": "slow" })).await.ok(201);
    assert_eq!(slow["status"], "provisioning");
    assert_eq!(refused(ann.post(BOXES, json!({ "timeout": 0, "name": "late" })).await, 408), "Timeout");
    assert_eq!(ann.get(&format!("{BOXES}/late")).await.status, 404);
    world.provider.may_start.send_replace(true);
    eventually("the start", async || ann.get(&format!("{BOXES}/slow/status")).await.ok(200)["status"] == "ready").await;
    eventually("the end of the late box", async || world.provider.running() == 1).await;
    assert_eq!(ann.get(BOXES).await.ok(200)["items"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_box_has_its_own_lease_and_retention_if_they_are_shorter() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.post(BOXES, json!({ "name": "dev", "idle_ttl_seconds": 120, "delete_after_stop_seconds": 600 })).await.ok(201);
    assert_eq!((&made["idle_ttl_seconds"], &made["delete_after_stop_seconds"]), (&json!(120), &json!(600)));
    let plain = ann.post(BOXES, json!({ "name": "plain", "idle_ttl_seconds": 0 })).await.ok(201);
    assert_eq!(plain["idle_ttl_seconds"], Value::Null);
    let status = async |name: &str| match ann.get(&format!("{BOXES}/{name}/status")).await {
        answer if answer.status == 404 => "gone".to_owned(),
        answer => answer.ok(200)["status"].as_str().unwrap().to_owned(),
    };
    world.clock.advance(119);
    broker.tick().await;
    assert_eq!((status("dev").await, status("plain").await), ("ready".into(), "ready".into()));
    world.clock.advance(2);
    broker.tick().await;
    assert_eq!((status("dev").await, status("plain").await), ("stopped".into(), "ready".into()));
    // Using the box again restarts the timer; a changed setting takes effect.
    ann.post(&format!("{BOXES}/dev/start"), json!({})).await.ok(200);
    let change = json!({ "idle_ttl_seconds": 0, "delete_after_stop_seconds": 60 });
    let changed = ann.call(Method::PATCH, &format!("{BOXES}/dev"), Some(change), &[]).await.ok(200);
    assert_eq!((&changed["idle_ttl_seconds"], &changed["delete_after_stop_seconds"]), (&Value::Null, &json!(60)));
    world.clock.advance(300);
    broker.tick().await;
    assert_eq!(status("dev").await, "ready");
    ann.post(&format!("{BOXES}/dev/stop"), json!({})).await.ok(200);
    world.clock.advance(59);
    broker.tick().await;
    assert_eq!(status("dev").await, "stopped");
    world.clock.advance(2);
    broker.tick().await;
    assert_eq!((status("dev").await, status("plain").await), ("gone".into(), "ready".into()));
}

#[tokio::test]
async fn a_download_url_serves_one_file_without_another_credential() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ann.post(BOXES, json!({ "name": "dev" })).await.ok(201);
    let link =
        ann.post(&format!("{BOXES}/dev/download-url"), json!({ "path": "/workspace/a b.txt", "expires_in_seconds": 60 })).await.ok(200);
    let url = link["download_url"].as_str().unwrap();
    assert!(link["expires_at"].is_string() && url.ends_with(link["token"].as_str().unwrap()));
    let path = url.split_once("/dp/").map(|(_, rest)| format!("/dp/{rest}")).unwrap();
    let nobody = Client { key: None, ..ann.clone() };
    nobody.get(&path).await.ok(200);
    assert_eq!(nobody.get(&path.replace("a%20b", "other")).await.status, 403);
    assert_eq!(refused_field(ann.post(&format!("{BOXES}/dev/download-url"), json!({ "path": "relative" })).await), "path");
    let typed = json!({ "path": "/a", "content_type": "text/html" });
    assert_eq!(refused_field(ann.post(&format!("{BOXES}/dev/download-url"), typed).await), "content_type");
    let private = ann.post("/v1/sandboxes", json!({ "name": "private", "access": "owner" })).await.ok(201);
    let requested = bob.post(&format!("{BOXES}/{}/download-url", id(&private)), json!({ "path": "/a" })).await;
    assert_eq!(refused(requested, 403), "Forbidden");
    drop(made);
}
