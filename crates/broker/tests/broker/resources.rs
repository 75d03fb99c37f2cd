//! Tests of resources: templates, snapshots and volumes, over the API and across crashes.

use std::sync::atomic::Ordering;

use crate::{
    fake_provider::IMAGE,
    harness::{Client, TestBroker, World, eventually, sandbox_id, session_path},
};
use cobox_broker::domain::resources::records::TemplateSpec;
use cobox_protocol::{
    SandboxId, SnapshotId, VolumeId,
    key::PrincipalKind,
    resources::{Cpus, Env, Resources},
};
use cobox_provider::{SandboxRoot, SandboxSpec};
use serde_json::{Value, json};

const SESSIONS: &str = "/v1/sandbox/sessions";

fn ensure(thread: &str, template: &str) -> Value {
    json!({ "thread_id": thread, "mode": "ensure", "template": template })
}

fn id(info: &Value) -> SandboxId {
    info["id"].as_str().unwrap().parse().unwrap()
}

/// A world with a template configured by the operator.
fn with_template() -> World {
    let mut world = World::new();
    let spec = TemplateSpec {
        image: Some(IMAGE.to_owned()),
        resources: Resources { cpus: Cpus::from_count(0.5), memory_bytes: Some(256 << 20), ..Resources::default() },
        env: Env([("LANG".to_owned(), "de".to_owned())].into()),
        ..TemplateSpec::default()
    };
    world.config.templates.insert("python".to_owned(), spec);
    world
}

#[tokio::test]
async fn a_sandbox_starts_from_its_template_every_time() {
    let world = with_template();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.post(SESSIONS, ensure("t", "python")).await.ok(200);
    let sandbox = sandbox_id(&made);
    let info = ann.get(&format!("/v1/sandboxes/{sandbox}")).await.ok(200);
    assert_eq!((&info["template"], &info["resources"]), (&json!("python"), &json!({ "cpus": 0.5, "memory_bytes": 256 << 20 })));
    // The sandbox is suspended, and the broker restarts with a changed template.
    world.clock.advance(3600);
    broker.tick().await;
    assert_eq!(ann.state(&sandbox).await, "suspended");
    broker.kill().await;
    let mut world = world;
    world.config.templates.clear();
    let broker = world.start().await;
    let ann = ann.at(&broker);
    assert_eq!(ann.post(SESSIONS, ensure("t", "python")).await.ok(200)["sandbox"]["id"], made["sandbox"]["id"]);
    let starts = world.provider.made_of.lock().unwrap()[&sandbox].clone();
    assert_eq!(starts.len(), 2);
    assert_eq!(starts[0], starts[1]);
    assert_eq!(starts[0].root, Some(SandboxRoot::Image(IMAGE.to_owned())));
    assert_eq!((starts[0].resources.cpus, starts[0].env.0["LANG"].as_str()), (Some(Cpus(500)), "de"));
    assert_eq!(ann.post(SESSIONS, ensure("u", "python")).await.error(400), "INVALID_REQUEST", "new sandboxes can't use a deleted template");
    ann.ensure("plain").await;
    assert!(world.provider.made_of.lock().unwrap().values().any(|m| m[0] == SandboxSpec::default()));
}

#[tokio::test]
async fn a_sandbox_keeps_the_image_version_it_was_created_from() {
    let world = with_template();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let stands_for = |what: &str| *world.provider.image_is.lock().unwrap() = Some(what.to_owned());
    let base_of = |id: &SandboxId| world.provider.made_of.lock().unwrap()[id].last().unwrap().base.clone();
    stands_for("one");
    let first = id(&ann.post("/v1/sandboxes", json!({ "template": "python" })).await.ok(201));
    let snapshot = take_snapshot(&ann, &first, "s").await;
    wait_for_state(&ann, &snapshot, "ready").await;
    stands_for("two");
    let second = id(&ann.post("/v1/sandboxes", json!({ "template": "python" })).await.ok(201));
    let from = id(&ann.post("/v1/sandboxes", json!({ "snapshot": "s" })).await.ok(201));
    world.clock.advance(3600);
    broker.tick().await;
    ann.get(&format!("/dp/{first}/v1/x")).await.ok(200);
    assert_eq!(world.provider.made_of.lock().unwrap()[&first].len(), 2, "the sandbox was started again");
    assert_eq!([base_of(&first), base_of(&second), base_of(&from)], [Some("one".into()), Some("two".into()), Some("one".into())]);
    let plain = sandbox_id(&ann.ensure("plain").await);
    assert_eq!(base_of(&plain), None);
}

#[tokio::test]
async fn a_workspace_has_its_own_templates_besides_the_operators() {
    let world = with_template();
    let broker = world.start().await;
    let (ann, bob, eve) = (broker.human("ann").await, broker.human("bob").await, broker.stranger().await);
    let params = json!({ "name": "mine", "image": IMAGE, "resources": { "cpus": 2, "disk_bytes": 1 << 30 }, "env": { "A": "1" } });
    let made = ann.post("/v1/templates", params.clone()).await.ok(201);
    assert_eq!((&made["owner"], &made["is_operators"]), (&json!("ann"), &json!(false)));
    assert_eq!(ann.post("/v1/templates", params).await.error(409), "NAME_TAKEN");
    assert_eq!(ann.post("/v1/templates", json!({ "name": "python" })).await.error(409), "NAME_TAKEN", "the operator's");
    for (params, words) in [
        (json!({ "name": "x", "image": "rust:1" }), "image: there is no `rust:1` here"),
        (json!({ "name": "x", "rootfs": "/" }), "rootfs"),
        (json!({ "name": "x", "provider": "docker" }), "provider: there is no `docker`"),
        (json!({ "name": "../x" }), "name: "),
        (json!({ "name": "x", "env": { "A=B": "1" } }), "env: "),
        (json!({ "name": "x", "mounts": [{ "volume": "v", "path": "/proc" }] }), "mounts[0].path"),
        (json!({ "name": "x", "mounts": [{ "volume": "v", "path": "/taken/x" }] }), "mounts[0].path: is taken"),
    ] {
        let answer = ann.post("/v1/templates", params).await;
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(words), "{message}");
        assert_eq!(answer.error(400), "INVALID_REQUEST");
    }
    let names = async |client: &Client| {
        let list = client.get("/v1/templates").await.ok(200);
        list["items"].as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!((names(&bob).await, names(&eve).await), (vec!["mine".to_owned(), "python".to_owned()], vec!["python".to_owned()]));
    assert_eq!(eve.get("/v1/templates/mine").await.error(404), "TEMPLATE_NOT_FOUND");
    assert_eq!(eve.post("/v1/sandboxes", json!({ "template": "mine" })).await.error(404), "TEMPLATE_NOT_FOUND");
    // Settings of the request take precedence over the template's.
    let made = bob.post("/v1/sandboxes", json!({ "template": "mine", "resources": { "cpus": 1 }, "env": { "B": "2" } })).await.ok(201);
    let spec = world.provider.made_of.lock().unwrap()[&id(&made)][0].clone();
    assert_eq!((spec.resources.cpus, spec.resources.disk_bytes), (Some(Cpus(1000)), Some(1 << 30)));
    assert_eq!(spec.env.0.keys().collect::<Vec<_>>(), ["A", "B"]);
    assert_eq!(bob.delete("/v1/templates/mine").await.error(403), "FORBIDDEN");
    assert_eq!(ann.delete("/v1/templates/python").await.error(403), "FORBIDDEN");
    assert_eq!(ann.delete("/v1/templates/mine").await.status, 204);
    assert_eq!(ann.delete("/v1/templates/mine").await.error(404), "TEMPLATE_NOT_FOUND");
}

#[tokio::test]
async fn callers_limited_to_listed_templates_get_nothing_else() {
    let mut world = with_template();
    world.config.templates.insert("rust".to_owned(), TemplateSpec::default());
    let policy = world.config.data_dir.with_file_name("policy.toml");
    std::fs::write(&policy, "[[rule]]\nkind = \"agent\"\ntemplates = [\"python\", \"own\"]\n").unwrap();
    world.config.policy_file = Some(policy);
    let broker = world.start().await;
    let bot = broker.key("bot", PrincipalKind::Agent).await;
    let ann = broker.human("ann").await;
    ann.post("/v1/templates", json!({ "name": "own" })).await.ok(201);
    let of_ann = ann.post("/v1/sandboxes", json!({})).await.ok(201);
    ann.post(&format!("/v1/sandboxes/{}/snapshots", id(&of_ann)), json!({ "name": "s" })).await.ok(202);
    bot.post("/v1/sandboxes", json!({ "template": "python" })).await.ok(201);
    bot.post("/v1/sandboxes", json!({})).await.ok(201);
    for params in [
        json!({ "template": "rust" }),
        json!({ "template": "python", "resources": { "cpus": 8 } }),
        json!({ "resources": { "memory_bytes": 1 << 30 } }),
        json!({ "snapshot": "s" }),
    ] {
        assert_eq!(bot.post("/v1/sandboxes", params.clone()).await.error(403), "FORBIDDEN", "{params}");
    }
    assert_eq!(bot.post("/v1/templates", json!({ "name": "another" })).await.error(403), "FORBIDDEN");
    let displayed = bot.get("/v1/templates").await.ok(200);
    assert_eq!(displayed["items"].as_array().unwrap().len(), 2);
}

async fn take_snapshot(ann: &Client, sandbox: &SandboxId, name: &str) -> SnapshotId {
    let taken = ann.post(&format!("/v1/sandboxes/{sandbox}/snapshots"), json!({ "name": name })).await.ok(202);
    taken["id"].as_str().unwrap().parse().unwrap()
}

async fn wait_for_state(ann: &Client, snapshot: &SnapshotId, state: &str) -> Value {
    let path = format!("/v1/snapshots/{snapshot}");
    eventually(state, || async { ann.get(&path).await.json()["state"] == state }).await;
    ann.get(&path).await.ok(200)
}

async fn is_removed(broker: &TestBroker, ann: &Client, snapshot: &SnapshotId) -> bool {
    broker.tick().await;
    ann.get(&format!("/v1/snapshots/{snapshot}")).await.status == 404
}

#[tokio::test]
async fn a_snapshot_starts_sandboxes_and_is_removed_when_nothing_is_based_on_it() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, eve) = (broker.human("ann").await, broker.stranger().await);
    let first = id(&ann.post("/v1/sandboxes", json!({ "resources": { "disk_bytes": 1 << 30 } })).await.ok(201));
    let below = take_snapshot(&ann, &first, "base").await;
    assert_eq!(wait_for_state(&ann, &below, "ready").await["size_bytes"], 4096);
    let second = ann.post("/v1/sandboxes", json!({ "snapshot": "base" })).await.ok(201);
    assert_eq!((&second["snapshot_id"], &second["resources"]["disk_bytes"]), (&json!(below), &json!(1 << 30)));
    let above = take_snapshot(&ann, &id(&second), "more").await;
    wait_for_state(&ann, &above, "ready").await;
    let third = ann.post("/v1/sandboxes", json!({ "snapshot": above })).await.ok(201);
    assert_eq!(world.provider.made_of.lock().unwrap()[&id(&third)][0].layers, [above.clone(), below.clone()]);
    for path in [format!("/v1/snapshots/{below}"), "/v1/snapshots/base".to_owned()] {
        assert_eq!(eve.get(&path).await.error(404), "SNAPSHOT_NOT_FOUND");
    }
    assert_eq!(eve.post("/v1/sandboxes", json!({ "snapshot": below })).await.error(404), "SNAPSHOT_NOT_FOUND");

    // New sandboxes can't use it any more; its files are removed only when no sandbox uses them.
    assert_eq!(ann.delete("/v1/snapshots/base").await.status, 204);
    assert_eq!(ann.post("/v1/sandboxes", json!({ "snapshot": below })).await.error(404), "SNAPSHOT_NOT_FOUND");
    assert!(!is_removed(&broker, &ann, &below).await);
    ann.delete(&format!("/v1/sandboxes/{}", id(&second))).await;
    assert!(!is_removed(&broker, &ann, &below).await, "another snapshot is based on it");
    ann.delete(&format!("/v1/snapshots/{above}")).await;
    assert!(!is_removed(&broker, &ann, &above).await, "a sandbox is based on it");
    ann.delete(&format!("/v1/sandboxes/{}", id(&third))).await;
    eventually("removal of both snapshots", || async {
        is_removed(&broker, &ann, &above).await && is_removed(&broker, &ann, &below).await
    })
    .await;
    assert!(world.provider.snapshots.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_snapshot_is_as_private_as_its_sandbox_and_a_failed_one_has_a_reason() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let private = id(&ann.post("/v1/sandboxes", json!({ "access": "owner" })).await.ok(201));
    let open = id(&ann.post("/v1/sandboxes", json!({})).await.ok(201));
    let kept = take_snapshot(&ann, &private, "private").await;
    wait_for_state(&ann, &kept, "ready").await;
    assert_eq!(bob.get(&format!("/v1/snapshots/{kept}")).await.error(403), "FORBIDDEN");
    assert_eq!(bob.get("/v1/snapshots").await.ok(200)["items"], json!([]));
    let answer = bob.post(&format!("/v1/sandboxes/{open}/snapshots"), json!({ "name": "x" })).await;
    assert_eq!(answer.error(403), "FORBIDDEN", "only the owner, unless the policy allows others");
    world.provider.failing_snapshots.store(1, Ordering::SeqCst);
    let failed = take_snapshot(&ann, &open, "open").await;
    let failed = wait_for_state(&ann, &failed, "failed").await;
    assert!(failed["reason"].as_str().unwrap().contains("set to fail"));
    assert_eq!(ann.post("/v1/sandboxes", json!({ "snapshot": failed["id"] })).await.error(400), "INVALID_REQUEST");
    // A name refers to the newest snapshot that is ready.
    let good = take_snapshot(&ann, &open, "open").await;
    wait_for_state(&ann, &good, "ready").await;
    assert_eq!(ann.get("/v1/snapshots/open").await.ok(200)["id"], json!(good));
    assert_eq!(ann.get("/v1/snapshots/open:latest").await.ok(200)["id"], json!(good));
    assert_eq!(ann.get("/v1/snapshots/open:other").await.error(404), "SNAPSHOT_NOT_FOUND");
}

#[tokio::test]
async fn a_snapshot_of_a_private_session_is_private() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, root) = (broker.human("ann").await, broker.human("bob").await, broker.key("root", PrincipalKind::Operator).await);
    let open = id(&ann.post("/v1/sandboxes", json!({ "name": "open" })).await.ok(201));
    let before = take_snapshot(&ann, &open, "before").await;
    wait_for_state(&ann, &before, "ready").await;
    let path = format!("/v1/sandboxes/{open}/snapshots");
    world.provider.may_copy.send_replace(false);
    let meanwhile = take_snapshot(&ann, &open, "meanwhile").await;
    let session =
        ann.post(SESSIONS, json!({ "thread_id": "t", "mode": "ensure", "sandbox_hint": "open", "access": "owner" })).await.ok(200);
    world.provider.may_copy.send_replace(true);
    assert_eq!(bob.get(&format!("/dp/{open}/v1/x")).await.error(403), "FORBIDDEN");
    assert_eq!(wait_for_state(&ann, &meanwhile, "ready").await["access"], "owner", "files may have been copied after the change of access");
    let private = take_snapshot(&ann, &open, "private").await;
    assert_eq!(wait_for_state(&ann, &private, "ready").await["access"], "owner");
    for snapshot in [&meanwhile, &private] {
        assert_eq!(bob.post("/v1/sandboxes", json!({ "snapshot": snapshot })).await.error(403), "FORBIDDEN");
    }
    bob.post("/v1/sandboxes", json!({ "snapshot": before })).await.ok(201);
    assert_eq!(bob.post(&path, json!({ "name": "mine" })).await.error(403), "FORBIDDEN");
    root.post(&path, json!({ "name": "help" })).await.ok(202);
    // Not even the sandbox's owner may, once another principal has the only session on it.
    ann.delete(&session_path(&session)).await;
    bob.post(SESSIONS, json!({ "thread_id": "u", "mode": "ensure", "sandbox_hint": "open", "access": "owner" })).await.ok(200);
    assert_eq!(ann.get(&format!("/dp/{open}/v1/x")).await.error(403), "FORBIDDEN");
    assert_eq!(ann.post(&path, json!({ "name": "his" })).await.error(403), "FORBIDDEN");
}

#[tokio::test]
async fn a_snapshot_name_belongs_to_its_owner_and_resolves_to_a_usable_snapshot() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, root) = (broker.human("ann").await, broker.human("bob").await, broker.key("root", PrincipalKind::Operator).await);
    let of = async |client: &Client, access: &str| id(&client.post("/v1/sandboxes", json!({ "access": access })).await.ok(201));
    let (anns, bobs, roots) = (of(&ann, "workspace").await, of(&bob, "owner").await, of(&root, "owner").await);
    let base = take_snapshot(&ann, &anns, "base").await;
    wait_for_state(&ann, &base, "ready").await;
    // Neither the existing tag nor a new one.
    for params in [json!({ "name": "base" }), json!({ "name": "base", "tag": "v2" })] {
        assert_eq!(bob.post(&format!("/v1/sandboxes/{bobs}/snapshots"), params).await.error(409), "NAME_TAKEN");
    }
    let image = json!({ "name": "base", "docker_image": IMAGE });
    assert_eq!(bob.post("/v2/sandboxes/snapshots", image).await.ok(409)["detail"]["error"], "Conflict");
    // An operator moves the name to a snapshot that others may not use. For them it still refers to the earlier one.
    let helped = take_snapshot(&root, &roots, "base").await;
    wait_for_state(&root, &helped, "ready").await;
    let meant = async |client: &Client| client.get("/v1/snapshots/base").await.ok(200)["id"].as_str().unwrap().to_owned();
    assert_eq!((meant(&bob).await, meant(&ann).await, meant(&root).await), (base.to_string(), base.to_string(), helped.to_string()));
    let displayed = bob.get("/v2/sandboxes/snapshots-by-name/base").await.ok(200);
    assert_eq!(displayed["tags"], json!([{ "tag": "latest", "snapshot_id": base }]));
    let newer = take_snapshot(&ann, &anns, "base").await;
    wait_for_state(&ann, &newer, "ready").await;
    assert_eq!(meant(&bob).await, newer.to_string());
    // The name of a private snapshot is reserved, but not visible to others.
    let private = take_snapshot(&bob, &bobs, "his").await;
    wait_for_state(&bob, &private, "ready").await;
    assert_eq!(ann.get("/v1/snapshots/his").await.error(404), "SNAPSHOT_NOT_FOUND");
    assert_eq!(ann.post(&format!("/v1/sandboxes/{anns}/snapshots"), json!({ "name": "his" })).await.error(409), "NAME_TAKEN");
    bob.delete("/v1/snapshots/his").await.ok(204);
    take_snapshot(&ann, &anns, "his").await;
}

#[tokio::test]
async fn a_snapshot_of_an_image_has_the_tag_of_the_image() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.post("/v2/sandboxes/snapshots", json!({ "name": "Python", "docker_image": IMAGE })).await.ok(201);
    assert_eq!(made["tags"], json!(["3"]));
    let meant = async |name: &str| ann.get(&format!("/v1/snapshots/{name}")).await;
    for name in ["Python:3", "Python"] {
        assert_eq!(meant(name).await.ok(200)["id"], made["id"], "{name}");
    }
    assert_eq!(meant("Python:latest").await.error(404), "SNAPSHOT_NOT_FOUND");
    let latest = ann.post("/v2/sandboxes/snapshots", json!({ "name": "Python", "docker_image": IMAGE, "tag": "latest" })).await.ok(201);
    assert_eq!(meant("Python").await.ok(200)["id"], latest["id"]);
    for (part, many) in [("pyth", 2), ("PYTH", 2), ("on", 2), ("p_th", 0), ("%", 0)] {
        let list = ann.get(&format!("/v2/sandboxes/snapshots?name_contains={}", part.replace('%', "%25"))).await.ok(200);
        assert_eq!(list["snapshots"].as_array().unwrap().len(), many, "{part}");
    }
}

#[tokio::test]
async fn a_principal_with_limited_capabilities_takes_no_snapshot() {
    let mut world = World::new();
    let policy = world.config.data_dir.with_file_name("policy.toml");
    std::fs::write(&policy, "[human]\ncapabilities = [\"fs_read\", \"exec\", \"snapshot\"]\n").unwrap();
    world.config.policy_file = Some(policy);
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let session = ann.post(SESSIONS, json!({ "thread_id": "t", "mode": "ensure", "access": "owner" })).await.ok(200);
    let path = format!("/v1/sandboxes/{}/snapshots", sandbox_id(&session));
    let shares = format!("{}/share", session_path(&session));
    ann.post(&shares, json!({ "principal": "bob", "capabilities": ["fs_read"] })).await.ok(201);
    assert_eq!(bob.post(&path, json!({ "name": "s" })).await.error(403), "FORBIDDEN");
    ann.post(&shares, json!({ "principal": "bob", "capabilities": ["fs_read", "snapshot"] })).await.ok(200);
    assert_eq!(bob.post(&path, json!({ "name": "s" })).await.ok(202)["access"], "owner");
}

#[tokio::test]
async fn an_interrupted_snapshot_is_finished() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let sandbox = id(&ann.post("/v1/sandboxes", json!({ "keep": true })).await.ok(201));
    world.provider.may_copy.send_replace(false);
    let snapshot = take_snapshot(&ann, &sandbox, "s").await;
    assert_eq!(ann.post("/v1/sandboxes", json!({ "snapshot": "s" })).await.error(423), "SANDBOX_STARTING");
    broker.kill().await;
    let broker = world.start().await;
    let ann = ann.at(&broker);
    world.provider.may_copy.send_replace(true);
    broker.tick().await;
    wait_for_state(&ann, &snapshot, "ready").await;
    // A snapshot fails if its sandbox has ended in the meantime.
    world.provider.may_copy.send_replace(false);
    let lost = take_snapshot(&ann, &sandbox, "lost").await;
    ann.delete(&format!("/v1/sandboxes/{sandbox}")).await;
    world.provider.may_copy.send_replace(true);
    wait_for_state(&ann, &lost, "failed").await;
    assert_eq!(world.provider.snapshots.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn snapshots_and_volumes_without_a_record_are_quarantined_and_removed_after_the_retention() {
    let mut world = World::new();
    world.config.quarantine_keep_seconds = 600;
    let broker = world.start().await;
    let root = broker.key("root", PrincipalKind::Operator).await;
    broker.kill().await;
    let (snapshot, volume) = (SnapshotId::new(), VolumeId::new());
    world.provider.snapshots.lock().unwrap().insert(snapshot.clone());
    world.provider.volumes.lock().unwrap().insert(volume.clone());
    let kept = || (world.provider.snapshots.lock().unwrap().len(), world.provider.volumes.lock().unwrap().len());

    let broker = world.start().await;
    let root = root.at(&broker);
    assert_eq!(kept(), (1, 1));
    let listed = cobox_broker::read_quarantine(&world.config.data_dir).unwrap();
    assert_eq!(listed.iter().map(|q| q.item.id()).collect::<Vec<_>>(), [snapshot.as_str(), volume.as_str()]);
    let metrics = root.get("/metrics").await;
    let metrics = String::from_utf8_lossy(&metrics.bytes);
    assert!(metrics.contains("\ncobox_quarantined_snapshots 1\n") && metrics.contains("\ncobox_quarantined_volumes 1\n"), "{metrics}");
    let audit = async || {
        let page = root.get("/v1/audit").await.ok(200);
        let records = page["items"].as_array().unwrap().iter();
        records.map(|r| format!("{} {}", r["action"].as_str().unwrap(), r["detail"].as_str().unwrap_or_default())).collect::<Vec<_>>()
    };
    let has = |records: &[String], action: &str, id: &str| records.iter().any(|r| r.starts_with(action) && r.contains(id));
    let records = audit().await;
    assert!(
        has(&records, "snapshot.quarantined", snapshot.as_str()) && has(&records, "volume.quarantined", volume.as_str()),
        "{records:?}"
    );

    broker.run_for(&world.clock, 540).await;
    assert_eq!(kept(), (1, 1), "the quarantine time is not over");
    broker.run_for(&world.clock, 120).await;
    eventually("removal of both items", || async {
        let records = audit().await;
        has(&records, "snapshot.deleted", snapshot.as_str()) && has(&records, "volume.deleted", volume.as_str())
    })
    .await;
    assert_eq!(kept(), (0, 0));
    assert!(cobox_broker::read_quarantine(&world.config.data_dir).unwrap().is_empty());
}

#[tokio::test]
async fn a_volume_is_mounted_in_several_sandboxes_and_kept_while_mounted() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, eve) = (broker.human("ann").await, broker.human("bob").await, broker.stranger().await);
    let volume = ann.post("/v1/volumes", json!({ "name": "data", "size_bytes": 64 << 20 })).await.ok(201);
    assert_eq!(ann.post("/v1/volumes", json!({ "name": "data", "size_bytes": 64 << 20 })).await.error(409), "NAME_TAKEN");
    assert_eq!(ann.post("/v1/volumes", json!({ "name": "big", "size_bytes": 1u64 << 40 })).await.error(400), "INVALID_REQUEST");
    let mounts = json!([{ "volume": "data", "path": "/data" }]);
    assert_eq!(eve.post("/v1/sandboxes", json!({ "mounts": mounts })).await.error(404), "VOLUME_NOT_FOUND");
    assert_eq!(eve.get("/v1/volumes/data").await.error(404), "VOLUME_NOT_FOUND");
    let one = id(&ann.post("/v1/sandboxes", json!({ "mounts": mounts })).await.ok(201));
    ann.post("/v1/templates", json!({ "name": "with-data", "mounts": [{ "volume": "data", "path": "/d", "read_only": true }] }))
        .await
        .ok(201);
    let two = bob.post(SESSIONS, ensure("t", "with-data")).await.ok(200);
    let mounted = world.provider.made_of.lock().unwrap()[&sandbox_id(&two)][0].mounts.clone();
    assert_eq!((mounted[0].volume.as_str(), mounted[0].read_only), (volume["id"].as_str().unwrap(), true));
    assert_eq!(ann.get("/v1/volumes/data").await.ok(200)["sandboxes"].as_array().unwrap().len(), 2);
    assert_eq!(bob.delete("/v1/volumes/data").await.error(403), "FORBIDDEN");
    assert_eq!(ann.delete("/v1/volumes/data").await.error(409), "IN_USE");
    ann.delete(&format!("/v1/sandboxes/{one}")).await;
    bob.delete(&session_path(&two)).await;
    eventually("a volume without users", || async { ann.get("/v1/volumes/data").await.ok(200)["sandboxes"] == json!([]) }).await;
    assert_eq!(ann.delete("/v1/volumes/data").await.status, 204);
    assert!(world.provider.volumes.lock().unwrap().is_empty());
    let missing = bob.post(SESSIONS, ensure("u", "with-data")).await;
    assert!(missing.json()["error"]["message"].as_str().unwrap().contains("no volume `data`"));
    assert_eq!(missing.error(400), "INVALID_REQUEST");
    ann.post("/v1/volumes", json!({ "name": "data", "size_bytes": 64 << 20 })).await.ok(201);
}

#[tokio::test]
async fn an_id_in_an_unrelated_field_does_not_keep_its_item_in_use() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let volume = ann.post("/v1/volumes", json!({ "name": "data", "size_bytes": 64 << 20 })).await.ok(201);
    let first = id(&ann.post("/v1/sandboxes", json!({})).await.ok(201));
    let snapshot = take_snapshot(&ann, &first, "base").await;
    wait_for_state(&ann, &snapshot, "ready").await;
    let env = json!({ "A": volume["id"], "B": snapshot, "C": format!("{{\"volume\":\"{}\"}}", volume["id"].as_str().unwrap()) });
    let says = bob.post("/v1/sandboxes", json!({ "env": env })).await.ok(201);
    let named = json!({ "name": "says", "docker_image": IMAGE, "run_config": { "env_vars": env } });
    bob.post("/v2/sandboxes/snapshots", named).await.ok(201);
    assert_eq!(ann.get("/v1/volumes/data").await.ok(200)["sandboxes"], json!([]));
    // A sandbox that the caller may not see is counted but not named.
    let mounts = json!([{ "volume": "data", "path": "/data" }]);
    let private = id(&bob.post("/v1/sandboxes", json!({ "access": "owner", "mounts": mounts })).await.ok(201));
    assert_eq!(ann.get("/v1/volumes/data").await.ok(200)["sandboxes"], json!([]));
    assert_eq!(bob.get("/v1/volumes/data").await.ok(200)["sandboxes"], json!([private]));
    let refused = ann.delete("/v1/volumes/data").await;
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(!message.contains(private.as_str()) && message.contains("1 of other principals"), "{message}");
    assert_eq!(refused.error(409), "IN_USE");
    bob.delete(&format!("/v1/sandboxes/{private}")).await.ok(204);
    assert_eq!(ann.delete("/v1/volumes/data").await.status, 204);
    ann.delete("/v1/snapshots/base").await.ok(204);
    eventually("removal of the snapshot's files", || async { is_removed(&broker, &ann, &snapshot).await }).await;
    bob.get(&format!("/v1/sandboxes/{}", id(&says))).await.ok(200);
}

#[tokio::test]
async fn a_volume_that_could_not_be_created_does_not_exist() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    world.provider.failing_volumes.store(1, Ordering::SeqCst);
    assert_eq!(ann.post("/v1/volumes", json!({ "name": "data", "size_bytes": 1 << 20 })).await.error(503), "PROVIDER_UNAVAILABLE");
    assert_eq!(ann.get("/v1/volumes/data").await.error(404), "VOLUME_NOT_FOUND");
    ann.post("/v1/volumes", json!({ "name": "data", "size_bytes": 1 << 20 })).await.ok(201);
    broker.tick().await;
    assert_eq!(world.provider.volumes.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_broker_does_not_start_with_an_unusable_template() {
    let mut world = World::new();
    let spec = TemplateSpec { image: Some("rust:1".to_owned()), ..TemplateSpec::default() };
    world.config.templates.insert("broken".to_owned(), spec);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refused = cobox_broker::Broker::start(world.whole_config().await, world.provider.clone(), listener).await;
    let message = refused.err().unwrap().to_string();
    assert!(message.starts_with("templates.broken: image: there is no `rust:1`"), "{message}");
}
