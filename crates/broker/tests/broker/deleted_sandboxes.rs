//! Tests of deleted sandboxes: they can be restored for a while, count against the quotas, and are erased to make space
//! for new ones. Also tests how `ensure` reports options that an existing session can't satisfy.

use cobox_broker::Clock;
use cobox_protocol::{SandboxId, Timestamp, key::PrincipalKind};
use cobox_provider::HostDisk;
use http::Method;
use serde_json::{Value, json};

use crate::harness::{Client, TestBroker, World, claims, sandbox_id, session_path};

/// With the default settings.
fn world() -> World {
    let mut world = World::new();
    world.config.keep_deleted_seconds = 3600;
    world
}

fn destroyed(world: &World) -> Vec<SandboxId> {
    world.provider.destroyed.lock().unwrap().clone()
}

async fn restore(client: &Client, id: &SandboxId) -> Value {
    client.post(&format!("/v1/sandboxes/{id}/restore"), json!({})).await.ok(200)
}

async fn deleted(client: &Client) -> Vec<Value> {
    let page = client.get("/v1/sandboxes?deleted=true").await.ok(200);
    page["items"].as_array().unwrap().clone()
}

async fn release(client: &Client, session: &Value) {
    client.delete(&session_path(session)).await.ok(204);
}

#[tokio::test]
async fn a_released_sandbox_is_stopped_and_its_thread_gets_it_back_after_a_restore() {
    let world = world();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    release(&ann, &made).await;
    assert_eq!((world.provider.running(), destroyed(&world).len()), (0, 0));
    assert_eq!(ann.state(&id).await, "gone");
    let listed = deleted(&ann).await;
    assert_eq!((listed[0]["id"].as_str(), &listed[0]["threads"]), (Some(id.as_str()), &json!(["t"])));

    world.clock.advance(3599);
    broker.tick().await;
    let restored = restore(&ann, &id).await;
    assert_eq!((&restored["state"], restored.get("deleted_at")), (&json!("suspended"), None));
    assert!(deleted(&ann).await.is_empty());
    let again = ann.ensure("t").await;
    assert_eq!(sandbox_id(&again), id);
    assert_ne!(again["session_id"], made["session_id"]);
    assert_eq!(ann.state(&id).await, "active");
    let generation = |session: &Value| claims(session["token"].as_str().unwrap())["gen"].as_u64();
    assert!(generation(&again) > generation(&made), "tokens from before the deletion stay invalid");
    world.clock.advance(2);
    broker.tick().await;
    assert!(destroyed(&world).is_empty(), "a restored sandbox must not be destroyed");
}

#[tokio::test]
async fn a_deleted_sandbox_is_purged_after_an_hour() {
    let world = world();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    ann.delete(&format!("/v1/sandboxes/{id}")).await.ok(204);
    broker.run_for(&world.clock, 3570).await;
    world.clock.advance(30);
    // Applies also before the files are removed.
    assert_eq!(ann.post(&format!("/v1/sandboxes/{id}/restore"), json!({})).await.error(404), "SANDBOX_NOT_FOUND");
    broker.tick().await;
    assert_eq!(destroyed(&world), [id]);
    assert!(deleted(&ann).await.is_empty());
    broker.tick().await;
    assert_eq!(destroyed(&world).len(), 1);
}

#[tokio::test]
async fn a_deleted_sandbox_can_be_restored_after_a_month_without_a_broker() {
    let world = world();
    let mut broker = world.start().await;
    let mut ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    release(&ann, &made).await;
    broker.run_for(&world.clock, 600).await;
    let until = |list: &[Value]| serde_json::from_value::<Timestamp>(list[0]["restore_until"].clone()).unwrap().unix();
    let left = until(&deleted(&ann).await) - world.clock.now().unix();
    assert_eq!(left, 3000);
    broker.kill().await;
    world.clock.advance(40 * 86_400);
    broker = world.start().await;
    ann = ann.at(&broker);
    broker.tick().await;
    let left = until(&deleted(&ann).await) - world.clock.now().unix();
    assert!((3000..=3060).contains(&left), "{left}");
    world.clock.advance(86_400);
    broker.tick().await;
    restore(&ann, &id).await;
    assert_eq!(sandbox_id(&ann.ensure("t").await), id);
    assert!(destroyed(&world).is_empty());
}

#[tokio::test]
async fn a_permanent_deletion_removes_the_files_at_once_even_of_a_deleted_sandbox() {
    let world = world();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let (first, second) = (sandbox_id(&ann.ensure("a").await), sandbox_id(&ann.ensure("b").await));
    ann.delete(&format!("/v1/sandboxes/{first}?permanent=true")).await.ok(204);
    assert_eq!(destroyed(&world), std::slice::from_ref(&first));
    ann.delete(&format!("/v1/sandboxes/{second}")).await.ok(204);
    assert_eq!(ann.delete(&format!("/v1/sandboxes/{second}")).await.error(404), "SANDBOX_NOT_FOUND");
    ann.delete(&format!("/v1/sandboxes/{second}?permanent=true")).await.ok(204);
    assert_eq!(destroyed(&world), [first, second]);
}

#[tokio::test]
async fn a_restore_does_not_take_a_name_that_is_in_use_again() {
    let world = world();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.post("/v1/sandboxes", json!({ "name": "dev" })).await.ok(201);
    let id: SandboxId = made["id"].as_str().unwrap().parse().unwrap();
    ann.delete("/v1/sandboxes/dev").await.ok(204);
    let other = ann.post("/v1/sandboxes", json!({ "name": "dev" })).await.ok(201);
    let refused = ann.post("/v1/sandboxes/dev/restore", json!({})).await;
    assert!(refused.message().contains("another name"), "{}", refused.message());
    assert_eq!(refused.error(409), "SANDBOX_CONFLICT");
    let restored = ann.post(&format!("/v1/sandboxes/{id}/restore"), json!({ "name": "old-dev" })).await.ok(200);
    assert_eq!(restored["name"], "old-dev");
    assert_eq!(ann.get("/v1/sandboxes/dev").await.ok(200)["id"], other["id"]);
    assert_eq!(ann.post(&format!("/v1/sandboxes/{id}/restore"), json!({ "nam": "x" })).await.error(400), "INVALID_REQUEST");
}

#[tokio::test]
async fn only_principals_who_may_delete_a_sandbox_may_restore_it_and_other_workspaces_do_not_see_it() {
    let world = world();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let open = ann.ensure("open").await;
    let closed = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "closed", "mode": "ensure", "access": "owner" })).await.ok(200);
    release(&ann, &open).await;
    release(&ann, &closed).await;
    let path = |session: &Value| format!("/v1/sandboxes/{}/restore", sandbox_id(session));
    assert_eq!(bob.post(&path(&open), json!({})).await.error(403), "FORBIDDEN");
    assert_eq!(bob.post(&path(&closed), json!({})).await.error(403), "FORBIDDEN");
    assert_eq!(deleted(&bob).await.len(), 1);
    assert_eq!(broker.stranger().await.post(&path(&open), json!({})).await.error(404), "SANDBOX_NOT_FOUND");
    let operator = broker.key("root", PrincipalKind::Operator).await;
    restore(&operator, &sandbox_id(&closed)).await;
    assert_eq!(ann.get(&format!("/v1/sandboxes/{}/usage", sandbox_id(&closed))).await.ok(200)["restorable_seconds"], 3600);
}

#[tokio::test]
async fn deleted_sandboxes_count_against_the_quota_and_the_oldest_are_evicted_first() {
    let mut world = world();
    world.config.max_sandboxes_per_workspace = 3;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let mut ids = Vec::new();
    for thread in ["a", "b", "c"] {
        let made = ann.ensure(thread).await;
        ids.push(sandbox_id(&made));
        if thread != "c" {
            release(&ann, &made).await;
            world.clock.advance(1);
        }
    }
    // A round leaves a sandbox to the next one while its suspension is being recorded.
    let (world, broker, ids) = (&world, &broker, &ids);
    let oldest_are_destroyed = |count: usize| {
        crate::harness::eventually("the eviction", move || async move {
            broker.tick().await;
            destroyed(world) == ids[..count]
        })
    };
    ann.ensure("d").await;
    oldest_are_destroyed(1).await;
    ann.ensure("e").await;
    world.clock.advance(5);
    oldest_are_destroyed(2).await;
    let refused = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "f", "mode": "ensure" })).await;
    assert_eq!(refused.error(429), "QUOTA_EXCEEDED");
}

#[tokio::test]
async fn a_new_sandbox_at_the_quota_erases_no_deleted_sandbox_of_another_owner() {
    let mut world = world();
    world.config.max_sandboxes_per_workspace = 3;
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let hers = ann.ensure("hers").await;
    release(&ann, &hers).await;
    world.clock.advance(1);
    let first = bob.ensure("first").await;
    release(&bob, &first).await;
    bob.ensure("second").await;
    // Both deleted sandboxes fit beside a third. Of the two, only bob's own may be erased for his next one.
    bob.ensure("third").await;
    broker.tick().await;
    assert_eq!(destroyed(&world), [sandbox_id(&first)]);
    let refused = bob.post("/v1/sandboxes", json!({})).await;
    assert!(refused.message().contains("1 deleted sandbox"), "{}", refused.message());
    assert!(refused.message().contains("cobox sandbox delete --permanent"), "{}", refused.message());
    assert_eq!((&refused.json()["error"]["details"]["deleted"], &refused.json()["error"]["details"]["limit"]), (&json!(1), &json!(3)));
    assert_eq!(refused.error(429), "QUOTA_EXCEEDED");
    broker.tick().await;
    assert_eq!(destroyed(&world), [sandbox_id(&first)]);
    restore(&ann, &sandbox_id(&hers)).await;
    let refused = bob.post("/v1/sandboxes", json!({})).await;
    assert_eq!(refused.json()["error"]["details"]["deleted"], 0);
    assert_eq!(refused.error(429), "QUOTA_EXCEEDED");
    ann.delete(&format!("/v1/sandboxes/{}?permanent=true", sandbox_id(&hers))).await.ok(204);
    bob.post("/v1/sandboxes", json!({})).await.ok(201);
}

#[tokio::test]
async fn an_eviction_is_audited_with_the_principal_whose_sandbox_caused_it() {
    let mut world = world();
    world.config.max_sandboxes_per_workspace = 1;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    release(&ann, &made).await;
    ann.ensure("u").await;
    let root = broker.key("root", PrincipalKind::Operator).await;
    let purged = audited(&root, &sandbox_id(&made), "sandbox.purged").await;
    assert_eq!((&purged["principal"], purged["request_id"].is_string()), (&json!("ann"), true));
    assert!(purged["detail"].as_str().unwrap().contains("made room"), "{purged}");
}

#[tokio::test]
async fn an_expired_deleted_sandbox_does_not_count_against_the_quota() {
    let mut world = world();
    world.config.max_sandboxes_per_workspace = 1;
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ann.ensure("hers").await;
    release(&ann, &made).await;
    world.clock.advance(3600);
    // Possible before the files are removed, which the node of a dead broker can't do.
    bob.ensure("his").await;
}

async fn audited(operator: &Client, id: &SandboxId, action: &str) -> Value {
    let audit = operator.get(&format!("/v1/audit?sandbox={id}")).await.ok(200);
    let found = audit["items"].as_array().unwrap().iter().find(|r| r["action"] == action);
    found.unwrap_or_else(|| panic!("no {action} in {audit}")).clone()
}

#[tokio::test]
async fn purging_a_deleted_sandbox_is_audited_with_the_caller() {
    let world = world();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    ann.delete(&format!("/v1/sandboxes/{id}")).await.ok(204);
    ann.delete(&format!("/v1/sandboxes/{id}?permanent=true")).await.ok(204);
    let root = broker.key("root", PrincipalKind::Operator).await;
    let purged = audited(&root, &id, "sandbox.purged").await;
    assert_eq!((&purged["principal"], &purged["actor"]), (&json!("ann"), &json!("human")));
    assert!(purged["request_id"].is_string(), "{purged}");
}

#[tokio::test]
async fn the_files_of_a_deleted_sandbox_are_counted_before_its_permanent_deletion() {
    let world = world();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ann.post("/v1/sandboxes", json!({ "name": "dev" })).await.ok(201);
    let usage = |id: &str| format!("/v1/sandboxes/{id}/usage?deleted=true");
    assert_eq!(ann.get(&usage("dev")).await.error(404), "SANDBOX_NOT_FOUND", "it lives");
    ann.delete("/v1/sandboxes/dev").await.ok(204);
    assert_eq!(ann.get("/v1/sandboxes/dev/usage").await.error(404), "SANDBOX_NOT_FOUND");
    for id in ["dev", made["id"].as_str().unwrap()] {
        let counted = ann.get(&usage(id)).await.ok(200);
        assert_eq!((&counted["files"], &counted["restorable_seconds"]), (&json!(3), &json!(0)));
    }
    assert_eq!(bob.get(&usage("dev")).await.error(403), "FORBIDDEN");
    assert_eq!(ann.get(&usage("nothing")).await.error(404), "SANDBOX_NOT_FOUND");
}

#[tokio::test]
async fn a_restore_lists_the_threads_that_return_and_those_with_another_sandbox() {
    let world = world();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let (a, b, c) = (ann.ensure("a").await, ann.ensure("b").await, ann.ensure("c").await);
    for made in [&a, &b, &c] {
        release(&ann, made).await;
    }
    let restored = restore(&ann, &sandbox_id(&a)).await;
    assert_eq!((&restored["returning_threads"], &restored["threads_elsewhere"]), (&json!(["a"]), &json!([])));
    let again = ann.ensure("b").await;
    let restored = restore(&ann, &sandbox_id(&b)).await;
    assert_eq!((&restored["returning_threads"], &restored["threads_elsewhere"]), (&json!([]), &json!(["b"])));
    assert_eq!(ann.ensure("b").await["session_id"], again["session_id"]);
    // The last session of its thread was a different one, which has also ended.
    world.clock.advance(1);
    let again = ann.ensure("c").await;
    release(&ann, &again).await;
    let restored = restore(&ann, &sandbox_id(&c)).await;
    assert_eq!((&restored["returning_threads"], &restored["threads_elsewhere"]), (&json!([]), &json!(["c"])));
}

#[tokio::test]
async fn the_policy_can_disable_restoring() {
    let mut world = world();
    std::fs::create_dir_all(&world.config.data_dir).unwrap();
    std::fs::write(world.config.data_dir.join("policy.toml"), "[agent]\nkeep_deleted_seconds = 0\n").unwrap();
    world.config.policy_file = Some(world.config.data_dir.join("policy.toml"));
    let broker = world.start().await;
    let (ann, bot) = (broker.human("ann").await, broker.key("bot", PrincipalKind::Agent).await);
    let (hers, its) = (ann.ensure("hers").await, bot.ensure("its").await);
    release(&ann, &hers).await;
    release(&bot, &its).await;
    assert_eq!(destroyed(&world), [sandbox_id(&its)]);
    restore(&ann, &sandbox_id(&hers)).await;
}

#[tokio::test]
async fn deleted_sandboxes_are_purged_first_when_the_host_disk_is_full() {
    let world = world();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    release(&ann, &made).await;
    *world.provider.host_disk.lock().unwrap() = Some(HostDisk { available: 1, unwritten: 0, reserve: 1000, holds_sandboxes: true });
    broker.tick().await;
    broker.tick().await;
    assert_eq!(destroyed(&world), [sandbox_id(&made)]);
    let root = broker.key("root", PrincipalKind::Operator).await;
    let purged = audited(&root, &sandbox_id(&made), "sandbox.purged").await;
    assert!(purged["detail"].as_str().unwrap().contains("disk has 1 bytes left, less than its reserve of 1000"), "{purged}");
}

#[tokio::test]
async fn no_deleted_sandbox_is_purged_while_the_host_disk_has_its_reserve() {
    let world = world();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let set = |available, holds_sandboxes| {
        *world.provider.host_disk.lock().unwrap() = Some(HostDisk { available, unwritten: 0, reserve: 1000, holds_sandboxes })
    };
    set(999, true);
    broker.tick().await;
    // Writers stay stopped until there is a quarter more space, but that requires no erasure.
    set(1000, true);
    broker.tick().await;
    release(&ann, &made).await;
    broker.tick().await;
    // The database's own disk gains nothing.
    set(1, false);
    broker.tick().await;
    broker.tick().await;
    assert!(destroyed(&world).is_empty());
    set(2000, true);
    broker.tick().await;
    restore(&ann, &sandbox_id(&made)).await;
}

#[tokio::test]
async fn a_restart_keeps_deleted_sandboxes_and_stops_those_that_still_run() {
    let world = world();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let (a, b) = (ann.ensure("a").await, ann.ensure("b").await);
    let (a, b) = (sandbox_id(&a), sandbox_id(&b));
    ann.delete(&format!("/v1/sandboxes/{a}")).await.ok(204);
    // Deleted, and the broker dies before the sandbox is stopped.
    world.provider.failing_suspends.store(u32::MAX, std::sync::atomic::Ordering::SeqCst);
    ann.delete(&format!("/v1/sandboxes/{b}")).await.ok(204);
    assert_eq!(ann.post(&format!("/v1/sandboxes/{b}/restore"), json!({})).await.error(423), "SANDBOX_STARTING");
    broker.kill().await;
    world.provider.failing_suspends.store(0, std::sync::atomic::Ordering::SeqCst);
    let broker: TestBroker = world.start().await;
    let ann = ann.at(&broker);
    crate::harness::eventually("the sandbox to stop", || async { world.provider.running() == 0 }).await;
    assert_eq!((destroyed(&world).len(), deleted(&ann).await.len()), (0, 2));
    restore(&ann, &a).await;
    restore(&ann, &b).await;
    assert_eq!(sandbox_id(&ann.ensure("b").await), b);
}

#[tokio::test]
async fn a_sandbox_that_was_suspended_for_too_long_can_be_restored_too() {
    let mut world = world();
    world.config.keep_suspended_seconds = 600;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    world.clock.advance(3600);
    broker.tick().await;
    broker.run_for(&world.clock, 600).await;
    assert_eq!(ann.state(&id).await, "gone");
    restore(&ann, &id).await;
    assert_eq!(sandbox_id(&ann.ensure("t").await), id);
}

#[tokio::test]
async fn deletion_and_restore_are_in_the_audit_and_the_metrics() {
    let world = world();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    release(&ann, &made).await;
    restore(&ann, &id).await;
    let operator = broker.key("root", PrincipalKind::Operator).await;
    let audit = operator.get(&format!("/v1/audit?sandbox={id}")).await.ok(200);
    let actions: Vec<&str> = audit["items"].as_array().unwrap().iter().filter_map(|r| r["action"].as_str()).collect();
    assert!(actions.contains(&"session.released") && actions.contains(&"sandbox.restored"), "{actions:?}");
}

#[tokio::test]
async fn an_option_that_differs_from_the_existing_session_is_refused_with_the_difference() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let ensure = async |extra: Value| {
        let mut body = json!({ "thread_id": "t", "mode": "ensure" });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ann.post("/v1/sandbox/sessions", body).await
    };
    for (field, requested_value, is) in [("access", json!("owner"), "workspace"), ("keep", json!(true), "false")] {
        let refused = ensure(json!({ field: requested_value })).await;
        let difference = refused.json()["error"]["details"]["differences"][0].clone();
        assert_eq!(difference["actual"], is, "{field}: {difference}");
        assert!(refused.message().contains(is), "{}", refused.message());
        assert_eq!(refused.json()["error"]["details"]["session_id"], made["session_id"]);
        assert_eq!(refused.error(409), "SESSION_CONFLICT");
    }
    ensure(json!({ "access": "workspace", "provider_preference": "auto" })).await.ok(200);
    // Clients tag every request with their identity. Only the tags of the request that created the session are used.
    ensure(json!({ "tags": { "team": "red" } })).await.ok(200);
    let patch = json!({ "access": "owner" });
    ann.call(Method::PATCH, &format!("/v1/sandboxes/{}", sandbox_id(&made)), Some(patch), &[]).await.ok(200);
    // The sandbox's own access mode applies on every path to it.
    let refused = ensure(json!({ "access": "workspace" })).await;
    assert!(refused.message().contains("access is owner, not workspace"), "{}", refused.message());
    assert_eq!(refused.error(409), "SESSION_CONFLICT");
    ensure(json!({ "access": "owner" })).await.ok(200);
    assert_eq!(ensure(json!({ "provider_preference": "elsewhere" })).await.error(400), "INVALID_REQUEST");
}

#[tokio::test]
async fn a_template_that_differs_from_the_existing_sandbox_is_refused() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    ann.post("/v1/templates", json!({ "name": "small" })).await.ok(201);
    ann.post("/v1/sandboxes", json!({ "name": "dev" })).await.ok(201);
    ann.ensure("t").await;
    let of_thread = json!({ "thread_id": "t", "mode": "ensure", "template": "small" });
    let refused = ann.call(Method::POST, "/v1/sandbox/sessions", Some(of_thread), &[]).await;
    assert!(refused.message().contains("template is none, not small"), "{}", refused.message());
    assert_eq!(refused.error(409), "SESSION_CONFLICT");
    let attaching = json!({ "thread_id": "u", "mode": "ensure", "name": "dev", "template": "small" });
    assert_eq!(ann.post("/v1/sandbox/sessions", attaching).await.error(409), "SESSION_CONFLICT");
    assert_eq!(ann.post("/v1/sandbox/sessions", json!({ "thread_id": "u", "mode": "get" })).await.error(404), "SESSION_NOT_FOUND");
    let made_by_it = json!({ "thread_id": "v", "mode": "ensure", "template": "small" });
    ann.post("/v1/sandbox/sessions", made_by_it.clone()).await.ok(200);
    ann.post("/v1/sandbox/sessions", made_by_it).await.ok(200);
}

#[tokio::test]
async fn a_workspace_session_cannot_be_created_on_a_private_sandbox() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    ann.post("/v1/sandboxes", json!({ "name": "dev", "access": "owner" })).await.ok(201);
    let params = |access: &str| json!({ "thread_id": "t", "mode": "ensure", "sandbox_id": "dev", "access": access });
    let refused = ann.post("/v1/sandbox/sessions", params("workspace")).await;
    assert_eq!(
        refused.json()["error"]["details"]["differences"],
        json!([{ "field": "access", "requested": "workspace", "actual": "owner" }])
    );
    assert_eq!(refused.error(409), "SESSION_CONFLICT");
    assert_eq!(ann.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "get" })).await.error(404), "SESSION_NOT_FOUND");
    ann.post("/v1/sandbox/sessions", params("owner")).await.ok(200);
}
