//! Tests of the master key: a missing, exposed or different key, and its rotation.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use crate::harness::{NEWEST, World, claims, eventually, sandbox_id, session_path};
use cobox_broker::{Broker, MasterKeyRotation, domain::model::AuditRecord, rotate_master_key, store::MasterRotation};
use cobox_testkit::TestDatabase;
use serde_json::json;

const GRACEFUL: MasterKeyRotation = MasterKeyRotation { is_immediate: false, is_lost: false };
const IMMEDIATE: MasterKeyRotation = MasterKeyRotation { is_immediate: true, is_lost: false };
const LOST: MasterKeyRotation = MasterKeyRotation { is_immediate: true, is_lost: true };

async fn refusal(world: &World) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let started = Broker::start_with_clock(world.whole_config().await, world.provider.clone(), listener, world.clock.clone()).await;
    started.err().expect("the broker must not start").to_string()
}

fn key_file(world: &World) -> std::path::PathBuf {
    world.config.data_dir.join("master.key")
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[tokio::test]
async fn a_broker_without_the_right_master_key_names_the_remedy() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    broker.kill().await;
    let (file, away) = (key_file(&world), world.config.data_dir.join("away"));
    fs::rename(&file, &away).unwrap();
    let message = refusal(&world).await;
    assert!(message.contains("master.key is missing") && message.contains("backup") && message.contains("--lost"), "{message}");
    fs::rename(&away, &file).unwrap();
    set_mode(&file, 0o644);
    let message = refusal(&world).await;
    assert!(message.contains("chmod 600"), "{message}");
    set_mode(&file, 0o600);
    let right = fs::read(&file).unwrap();
    fs::write(&file, [9; 32]).unwrap();
    let message = refusal(&world).await;
    assert!(message.contains("is not the master key"), "{message}");
    fs::write(&file, b"short").unwrap();
    assert!(refusal(&world).await.contains("exactly 32 bytes"));
    fs::write(&file, right).unwrap();
    let again = world.start().await;
    ann.at(&again).with(&made["token"]).get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.ok(200);
}

#[tokio::test]
async fn tokens_stay_valid_after_a_graceful_replacement_of_the_master_key() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let opaque = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "get", "token_format": "opaque" })).await.ok(200);
    let (id, path) = (sandbox_id(&made), format!("/dp/{}/v1/x", sandbox_id(&made)));
    let config = world.whole_config().await;
    let message = rotate_master_key(&config, GRACEFUL).await.unwrap_err().to_string();
    assert!(message.contains("in use by another broker"), "{message}");
    broker.kill().await;
    let before = fs::read(key_file(&world)).unwrap();
    let rotated = rotate_master_key(&config, GRACEFUL).await.unwrap();
    assert_eq!(rotated.sandboxes, 1);
    assert_eq!(fs::read(rotated.previous_key.unwrap()).unwrap(), before);
    assert_ne!(fs::read(key_file(&world)).unwrap(), before);
    assert_eq!(fs::metadata(key_file(&world)).unwrap().permissions().mode() & 0o777, 0o600);

    let again = world.start().await;
    let ann = ann.at(&again);
    let key_ids = || world.provider.boxd(&id).state.lock().unwrap().keys.iter().map(|k| k.kid.clone()).collect::<Vec<_>>();
    assert_eq!(key_ids(), [format!("{id}.1"), format!("{id}.2")]);
    let fresh = ann.ensure("t").await;
    assert_eq!(claims(fresh["token"].as_str().unwrap())["gen"], 2);
    for token in [&made["token"], &opaque["token"], &fresh["token"]] {
        ann.with(token).get(&path).await.ok(200);
    }
    // boxd verifies each of them with the keys that were pushed to it.
    let state = world.provider.boxd(&id).state.lock().unwrap().clone();
    let keys = cobox_token::Keyset::new(&state.issuer, &id, &state.keys).unwrap();
    for token in [&made["token"], &fresh["token"]] {
        keys.verify(token.as_str().unwrap(), cobox_broker::Clock::now(&*world.clock)).unwrap();
    }
    ann.post(&format!("{}/refresh", session_path(&made)), json!({ "current_token": made["token"] })).await.ok(200);
    world.clock.advance(3700);
    ann.post(&format!("{}/heartbeat", session_path(&made)), json!({})).await.ok(200);
    again.tick().await;
    assert_eq!(key_ids(), [format!("{id}.2")]);
    assert_eq!(ann.ensure("new").await["sandbox"]["provider"], "fake", "new sandboxes use only the new key");
}

#[tokio::test]
async fn an_immediate_replacement_ends_every_token_but_no_api_key() {
    for (params, is_lost) in [(IMMEDIATE, false), (LOST, true)] {
        let world = World::new();
        let broker = world.start().await;
        let ann = broker.human("ann").await;
        let made = ann.ensure("t").await;
        let path = format!("/dp/{}/v1/x", sandbox_id(&made));
        broker.kill().await;
        let config = world.whole_config().await;
        if is_lost {
            fs::remove_file(key_file(&world)).unwrap();
            let message = rotate_master_key(&config, IMMEDIATE).await.unwrap_err().to_string();
            assert!(message.contains("is missing"), "{message}");
        }
        let rotated = rotate_master_key(&config, params).await.unwrap();
        assert_eq!((rotated.previous_key, rotated.old_tokens_until), (None, None));
        assert!(!world.config.data_dir.join("master.previous.key").exists());
        if is_lost {
            // Simulates an interruption before the new key was renamed.
            fs::rename(key_file(&world), world.config.data_dir.join("master.next.key")).unwrap();
        }
        let again = world.start().await;
        let audit = again.broker.as_ref().unwrap().store().audit("default", None, &NEWEST).await.unwrap();
        let record = &audit.iter().find(|(_, r)| r.action == "master_key.rotated").unwrap().1;
        assert!(record.detail.as_ref().unwrap().starts_with("immediate"));
        let ann = ann.at(&again);
        assert_eq!(ann.with(&made["token"]).get(&path).await.error(401), "TOKEN_REVOKED");
        let fresh = ann.ensure("t").await;
        assert_eq!(fresh["session_id"], made["session_id"]);
        ann.with(&fresh["token"]).get(&path).await.ok(200);
    }
}

#[tokio::test]
async fn a_broker_stops_when_its_master_key_was_replaced_elsewhere() {
    let database = TestDatabase::new().await;
    let mut world = World::cluster(&database, 1).remove(0);
    // It sends four heartbeats within this time.
    world.config.node_timeout_seconds = 4;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let broker = Broker::start_with_clock(world.config.clone(), world.provider.clone(), listener, world.clock.clone()).await.unwrap();
    let replacing = async {
        let now = cobox_broker::Clock::now(&*world.clock);
        let agreed = [("master_key", "another".to_owned()), ("previous_master_key", "condemned".to_owned())];
        let audit = AuditRecord::new(now, "default", "master_key.rotated");
        broker.store().rotate_master(&MasterRotation { now, old_until: None, agreed, seals: Vec::new(), audit }).await.unwrap();
    };
    let both = async { tokio::join!(broker.run(std::future::pending()), replacing) };
    let (stopped, ()) = tokio::time::timeout(std::time::Duration::from_secs(30), both).await.expect("the broker stops by itself");
    let why = stopped.unwrap_err().to_string();
    assert!(why.contains("was replaced") && why.contains("master.key") && why.contains("start the broker again"), "{why}");
}

#[tokio::test]
async fn the_previous_master_key_is_removed_once_its_tokens_have_expired() {
    let world = World::new();
    world.start().await.kill().await;
    let previous = rotate_master_key(&world.whole_config().await, GRACEFUL).await.unwrap().previous_key.unwrap();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    assert!(previous.exists());
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(2 * 3600);
    fs::File::options().write(true).open(&previous).unwrap().set_modified(long_ago).unwrap();
    eventually("removal of the previous key", async || !previous.exists()).await;
    ann.ensure("t").await;
}

#[tokio::test]
async fn a_graceful_replacement_does_not_extend_an_older_key() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, root) = (broker.human("ann").await, broker.key("root", cobox_protocol::key::PrincipalKind::Operator).await);
    let id = sandbox_id(&ann.ensure("t").await);
    root.post(&format!("/internal/sandboxes/{id}/rotate-key"), json!({ "mode": "graceful" })).await.ok(200);
    let until = broker.broker.as_ref().unwrap().store().sandbox(&id).await.unwrap().unwrap().old_keys.unwrap().until;
    broker.kill().await;
    let (config, before) = (world.whole_config().await, fs::read(key_file(&world)).unwrap());
    let message = rotate_master_key(&config, GRACEFUL).await.unwrap_err().to_string();
    assert!(message.contains(&until.to_string()) && message.contains("--immediate"), "{message}");
    assert_eq!(fs::read(key_file(&world)).unwrap(), before);
    assert!(!world.config.data_dir.join("master.next.key").exists());
    let again = world.start().await;
    let store = again.broker.as_ref().unwrap().store().clone();
    assert_eq!(store.sandbox(&id).await.unwrap().unwrap().old_keys.unwrap().until, until);
    again.kill().await;
    rotate_master_key(&config, IMMEDIATE).await.unwrap();
    let again = world.start().await;
    let store = again.broker.as_ref().unwrap().store().clone();
    assert_eq!(store.sandbox(&id).await.unwrap().unwrap().old_keys, None);
}

#[tokio::test]
async fn brokers_on_one_database_are_stopped_and_need_the_new_key_copied() {
    let database = TestDatabase::new().await;
    let worlds = World::cluster(&database, 2);
    let b = worlds[1].start().await;
    let message = rotate_master_key(&worlds[0].config, GRACEFUL).await.unwrap_err().to_string();
    assert!(message.contains("stop every broker") && message.contains(&b.addr.to_string()), "{message}");
    b.kill().await;

    let database = TestDatabase::new().await;
    let worlds = World::cluster(&database, 2);
    // Started long enough ago that both count as dead once they are.
    worlds[0].clock.advance(-60);
    let (a, b) = (worlds[0].start().await, worlds[1].start().await);
    let ann = a.human("ann").await;
    let made = ann.ensure("t").await;
    a.kill().await;
    b.kill().await;
    rotate_master_key(&worlds[0].config, GRACEFUL).await.unwrap();
    let message = refusal(&worlds[1]).await;
    assert!(message.contains("copy the key of its other brokers here"), "{message}");
    for name in ["master.key", "master.previous.key"] {
        fs::copy(worlds[0].config.data_dir.join(name), worlds[1].config.data_dir.join(name)).unwrap();
    }
    let (a, b) = (worlds[0].start().await, worlds[1].start().await);
    let refreshed = ann.at(&b).post(&format!("{}/refresh", session_path(&made)), json!({ "current_token": made["token"] })).await.ok(200);
    for token in [&made["token"], &refreshed["token"]] {
        ann.at(&a).with(token).get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.ok(200);
    }
}
