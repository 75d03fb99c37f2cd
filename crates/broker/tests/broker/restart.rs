//! Tests of a killed broker's successor: it adopts, finishes, rolls back and removes sandboxes.

use std::sync::atomic::Ordering;

use cobox_protocol::{
    SandboxId, Timestamp,
    control::{ControlState, Revocation},
    key::PrincipalKind,
};
use cobox_provider::Provider;
use serde_json::json;

use crate::harness::{Client, TestBroker, World, eventually, sandbox_id, session_path};

/// The same key at the next broker.
fn at(broker: &TestBroker, client: &Client) -> Client {
    Client { addr: broker.addr, key: client.key.clone() }
}

#[tokio::test]
async fn a_running_sandbox_is_adopted_with_the_state_it_missed() {
    let world = World::new();
    let first = world.start().await;
    let ann = first.human("ann").await;
    let root = first.key("root", PrincipalKind::Operator).await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    let bot = root.post("/v1/keys", json!({ "name": "bot", "kind": "agent" })).await.ok(201);
    let bot_id = bot["id"].as_str().unwrap().to_owned();
    assert_eq!(root.delete(&format!("/v1/keys/{bot_id}")).await.status, 204);
    first.kill().await;
    // Simulates that the last push never arrived, from a broker whose clock was ahead.
    let far_ahead = {
        let boxd = world.provider.boxd(&id);
        let mut state = boxd.state.lock().unwrap();
        state.revoked.clear();
        state.version += 1_000_000_000;
        state.version
    };

    let second = world.start().await;
    let ann = at(&second, &ann);
    let reported = world.provider.boxd(&id).state.lock().unwrap().clone();
    assert!(reported.version > far_ahead);
    assert_eq!(reported.revoked, [Revocation::Grant(bot_id)], "the revocation is pushed before any traffic");
    ann.with(&made["token"]).get(&format!("/dp/{id}/v1/x")).await.ok(200);
    assert_eq!(ann.ensure("t").await["session_id"], made["session_id"]);
    assert_eq!(world.provider.starts.load(Ordering::SeqCst), 1);
    world.provider.kill(&id);
    eventually("suspension of the adopted sandbox", || async { ann.state(&id).await == "suspended" }).await;
}

#[tokio::test]
async fn a_sandbox_that_died_without_a_broker_is_suspended_and_can_be_resumed() {
    let world = World::new();
    let first = world.start().await;
    let ann = first.human("ann").await;
    let made = ann.ensure("t").await;
    first.kill().await;
    world.provider.kill(&sandbox_id(&made));
    let second = world.start().await;
    let ann = at(&second, &ann);
    assert_eq!(ann.state(&sandbox_id(&made)).await, "suspended");
    assert_eq!(ann.ensure("t").await["sandbox"]["id"], made["sandbox"]["id"]);
}

#[tokio::test]
async fn an_interrupted_start_is_finished() {
    let world = World::new();
    let first = world.start().await;
    let ann = first.human("ann").await;
    world.provider.may_start.send_replace(false);
    let body = json!({ "thread_id": "t", "mode": "ensure" });
    ann.call(http::Method::POST, "/v1/sandbox/sessions", Some(body), &[("prefer", "wait=0")]).await.error(423);
    let session = ann.get("/v1/sandbox/sessions").await.ok(200)["items"][0].clone();
    first.kill().await;
    world.provider.may_start.send_replace(true);
    let second = world.start().await;
    assert_eq!(at(&second, &ann).ensure("t").await["session_id"], session["session_id"]);
    assert_eq!(world.provider.running(), 1);
}

#[tokio::test]
async fn an_interrupted_release_is_finished() {
    let world = World::new();
    let first = world.start().await;
    let ann = first.human("ann").await;
    let made = ann.ensure("t").await;
    // Fails all attempts: on PostgreSQL the broker is notified of its own change and retries once more.
    world.provider.failing_destroys.store(u32::MAX, Ordering::SeqCst);
    assert_eq!(ann.delete(&session_path(&made)).await.status, 204);
    first.kill().await;
    assert_eq!(world.provider.running(), 1);
    world.provider.failing_destroys.store(0, Ordering::SeqCst);
    let second = world.start().await;
    assert_eq!(world.provider.running(), 0);
    assert_eq!(at(&second, &ann).get(&session_path(&made)).await.error(410), "SESSION_EXPIRED");
}

#[tokio::test]
async fn an_interrupted_resume_is_undone_and_an_interrupted_suspension_finished() {
    let world = World::new();
    let first = world.start().await;
    let ann = first.human("ann").await;
    let (a, b) = (sandbox_id(&ann.ensure("a").await), sandbox_id(&ann.ensure("b").await));
    world.provider.kill(&a);
    eventually("the suspension", || async { ann.state(&a).await == "suspended" }).await;
    world.provider.may_start.send_replace(false);
    let body = json!({ "thread_id": "a", "mode": "ensure" });
    ann.call(http::Method::POST, "/v1/sandbox/sessions", Some(body), &[("prefer", "wait=0")]).await.error(423);
    eventually("the attempt", || async { world.provider.starts.load(Ordering::SeqCst) == 3 }).await;
    world.provider.failing_suspends.store(u32::MAX, Ordering::SeqCst);
    world.clock.advance(3600);
    first.tick().await;
    assert_eq!(world.provider.running(), 1);
    first.kill().await;
    world.provider.failing_suspends.store(0, Ordering::SeqCst);
    world.provider.may_start.send_replace(true);

    let second = world.start().await;
    let ann = at(&second, &ann);
    assert_eq!((ann.state(&a).await, ann.state(&b).await), ("suspended".into(), "suspended".into()));
    assert_eq!(world.provider.running(), 0);
    assert_eq!(sandbox_id(&ann.ensure("a").await), a);
}

/// Creates a sandbox at the provider without a record.
async fn unknown_sandbox(world: &World) -> SandboxId {
    let id = SandboxId::new();
    let state = ControlState {
        version: 0,
        issuer: String::new(),
        keys: Vec::new(),
        revoked: Vec::new(),
        lease_expires_at: Timestamp::now(),
        stop_reason: None,
        disk_full: false,
    };
    world.provider.start(&id, &cobox_provider::SandboxSpec::default(), &state).await.unwrap();
    id
}

#[tokio::test]
async fn a_sandbox_without_files_becomes_failed() {
    let world = World::new();
    let first = world.start().await;
    let ann = first.human("ann").await;
    let made = ann.ensure("t").await;
    first.kill().await;
    world.provider.lose_disk(&sandbox_id(&made));

    let second = world.start().await;
    let ann = at(&second, &ann);
    let gone = ann.get(&session_path(&made)).await;
    assert!(gone.json()["error"]["message"].as_str().unwrap().contains("files"));
    assert_eq!(gone.error(410), "SESSION_EXPIRED");
    assert_ne!(ann.ensure("t").await["sandbox"]["id"], made["sandbox"]["id"]);
}

#[tokio::test]
async fn a_sandbox_without_a_record_is_quarantined_and_removed_after_the_retention() {
    let mut world = World::new();
    world.config.quarantine_keep_seconds = 1800;
    let first = world.start().await;
    let root = first.key("root", PrincipalKind::Operator).await;
    root.ensure("t").await;
    first.kill().await;
    let unknown = unknown_sandbox(&world).await;

    let second = world.start().await;
    let root = at(&second, &root);
    let is_destroyed = || world.provider.destroyed.lock().unwrap().contains(&unknown);
    assert!(!world.provider.is_up(&unknown), "the processes of a quarantined sandbox end");
    let listed = cobox_broker::read_quarantine(&world.config.data_dir).unwrap();
    assert_eq!(listed.iter().map(|q| q.item.id()).collect::<Vec<_>>(), [unknown.as_str()]);
    let metrics = root.get("/metrics").await;
    assert!(String::from_utf8_lossy(&metrics.bytes).contains("\ncobox_quarantined_sandboxes 1\n"));
    let audit = root.get(&format!("/v1/audit?sandbox={unknown}")).await.ok(200);
    assert_eq!(audit["items"][0]["action"], "sandbox.quarantined");
    second.run_for(&world.clock, 1500).await;
    world.clock.advance(30 * 86_400);
    second.tick().await;
    second.kill().await;
    world.clock.advance(30 * 86_400);

    let third = world.start().await;
    third.tick().await;
    assert!(!is_destroyed(), "time without a broker and jumps of the clock do not count");
    third.run_for(&world.clock, 400).await;
    eventually("removal of the quarantined sandbox", || async {
        is_destroyed() && cobox_broker::read_quarantine(&world.config.data_dir).unwrap().is_empty()
    })
    .await;
}

#[tokio::test]
async fn a_restart_is_not_taken_for_a_restored_database() {
    let world = World::new();
    for round in 0..3 {
        let broker = world.start().await;
        assert_eq!(cobox_broker::read_restored(&world.config.data_dir).unwrap(), None);
        broker.human("ann").await.ensure(&format!("t{round}")).await;
        broker.tick().await;
        world.clock.advance(1000);
        broker.kill().await;
    }
}

#[tokio::test]
async fn suspend_all_suspends_every_sandbox_and_returns_their_ids() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let mut ids = vec![sandbox_id(&ann.ensure("a").await), sandbox_id(&ann.ensure("b").await)];
    let mut suspended = broker.broker.as_ref().unwrap().suspend_all().await.unwrap();
    ids.sort();
    suspended.sort();
    assert_eq!(suspended, ids);
    assert_eq!(world.provider.running(), 0);
    assert!(ids.contains(&sandbox_id(&ann.ensure("a").await)));
}

#[tokio::test]
async fn a_second_broker_on_a_data_directory_and_a_lost_master_key_are_refused() {
    let world = World::new();
    let first = world.start().await;
    first.human("ann").await.ensure("t").await;
    let start = async || {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        cobox_broker::Broker::start(world.whole_config().await, world.provider.clone(), listener).await.err().unwrap().to_string()
    };
    assert!(start().await.contains("in use by another broker"));
    first.kill().await;
    std::fs::remove_file(world.config.data_dir.join("master.key")).unwrap();
    assert!(start().await.contains("master.key is missing"));
}
