//! Tests of leases with a manual clock: idle, suspended, terminated, hard TTLs and disks.

use std::sync::atomic::Ordering;

use cobox_broker::Clock;
use cobox_provider::DiskUsage;
use serde_json::json;

use crate::harness::{World, eventually, sandbox_id, session_path};

/// Short enough for few reaper rounds, each of which counts at most a minute.
const KEEP_SUSPENDED: u64 = 1800;
const MONTH: i64 = 30 * 24 * 3600;

#[tokio::test]
async fn an_unused_sandbox_becomes_idle_then_suspended_then_terminated() {
    let mut world = World::new();
    world.config.keep_suspended_seconds = KEEP_SUSPENDED;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    world.clock.advance(899);
    broker.tick().await;
    assert_eq!(ann.state(&id).await, "active");
    world.clock.advance(1);
    broker.tick().await;
    assert_eq!(ann.state(&id).await, "idle");
    assert_eq!(world.provider.running(), 1);
    world.clock.advance(2700);
    broker.tick().await;
    assert_eq!(ann.state(&id).await, "suspended");
    assert_eq!(world.provider.running(), 0);

    let back = ann.ensure("t").await;
    assert_eq!((&back["session_id"], &back["sandbox"]["id"]), (&made["session_id"], &made["sandbox"]["id"]));
    assert_eq!(ann.state(&id).await, "active");
    world.clock.advance(3600);
    broker.tick().await;
    broker.run_for(&world.clock, KEEP_SUSPENDED as i64 - 1).await;
    assert_eq!(ann.state(&id).await, "suspended");
    broker.run_for(&world.clock, 1).await;
    assert_eq!(ann.state(&id).await, "gone");
    assert_eq!(ann.get(&session_path(&made)).await.error(410), "SESSION_EXPIRED");
    assert_eq!(*world.provider.destroyed.lock().unwrap(), [id]);
}

#[tokio::test]
async fn traffic_refreshes_and_open_streams_extend_the_lease() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    let path = format!("/dp/{id}/v1/x");
    for _ in 0..5 {
        world.clock.advance(800);
        ann.get(&path).await.ok(200);
        broker.tick().await;
        assert_eq!(ann.state(&id).await, "active");
    }
    world.clock.advance(800);
    ann.post(&format!("{}/refresh", session_path(&made)), json!({})).await.ok(200);
    world.clock.advance(800);
    broker.tick().await;
    assert_eq!(ann.state(&id).await, "active");
    let boxd = world.provider.boxd(&id);
    boxd.open_streams.store(1, Ordering::SeqCst);
    world.clock.advance(5000);
    broker.tick().await;
    assert_eq!(ann.state(&id).await, "active", "a client is connected");
    boxd.open_streams.store(0, Ordering::SeqCst);
    world.clock.advance(3600);
    broker.tick().await;
    assert_eq!(ann.state(&id).await, "suspended");
}

#[tokio::test]
async fn reading_is_no_activity_and_traffic_resumes_a_suspended_sandbox() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    world.clock.advance(3600);
    assert_eq!(ann.get(&session_path(&made)).await.ok(200)["binding"]["state"], "active");
    broker.tick().await;
    let looked = ann.get(&session_path(&made)).await.ok(200);
    assert_eq!(looked["binding"]["state"], "suspended");
    assert_eq!(world.provider.running(), 0);
    ann.with(&looked["token"]).get(&format!("/dp/{id}/v1/x")).await.ok(200);
    assert_eq!(ann.state(&id).await, "active");
    assert_eq!(world.provider.starts.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn the_hard_end_counts_only_running_time_and_limits_tokens() {
    let mut world = World::new();
    world.config.hard_ttl_seconds = 600;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    broker.run_for(&world.clock, 60).await;
    world.clock.advance(3600);
    broker.tick().await;
    // A gap without a reaper round counts as one minute; a day in suspension counts as nothing.
    world.clock.advance(24 * 3600);
    for _ in 0..4 {
        assert_eq!(ann.ensure("t").await["session_id"], made["session_id"]);
        broker.run_for(&world.clock, 100).await;
    }
    let left: i64 = 600 - 60 - 60 - 4 * 100;
    let last = ann.ensure("t").await;
    assert_eq!(time_of(&last["expires_at"]) - world.clock.now().unix(), left, "no token outlives the session");
    broker.run_for(&world.clock, left - 1).await;
    ann.get(&session_path(&made)).await.ok(200);
    broker.run_for(&world.clock, 1).await;
    assert_eq!(ann.get(&session_path(&made)).await.error(410), "SESSION_EXPIRED");
    assert_eq!(world.provider.running(), 0);
}

#[tokio::test]
async fn a_sandbox_at_its_hard_end_is_suspended_and_reused_by_its_thread() {
    let mut world = World::new();
    world.config.hard_ttl_seconds = 60;
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    broker.run_for(&world.clock, 60).await;
    assert_eq!(ann.get(&session_path(&made)).await.error(410), "SESSION_EXPIRED");
    assert_eq!(ann.state(&id).await, "suspended");
    assert!(world.provider.destroyed.lock().unwrap().is_empty(), "its files are kept");

    let again = bob.ensure("t").await;
    assert_ne!(again["session_id"], made["session_id"]);
    assert_eq!(sandbox_id(&again), id, "every user of the thread gets its files");
    broker.run_for(&world.clock, 59).await;
    assert_eq!(ann.ensure("t").await["session_id"], again["session_id"], "the new session has its full running time");

    let own = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "own", "mode": "ensure", "access": "owner" })).await.ok(200);
    broker.run_for(&world.clock, 60).await;
    assert_ne!(sandbox_id(&bob.ensure("own").await), sandbox_id(&own), "another user's private files stay private");
}

#[tokio::test]
async fn a_machine_that_sleeps_for_long_loses_no_files() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    world.clock.advance(9 * 3600);
    broker.tick().await;
    assert_eq!(ann.state(&sandbox_id(&made)).await, "suspended");
    assert!(world.provider.destroyed.lock().unwrap().is_empty());
    let again = ann.ensure("t").await;
    assert_eq!((&again["session_id"], sandbox_id(&again)), (&made["session_id"], sandbox_id(&made)));
}

#[tokio::test]
async fn a_suspended_sandbox_is_not_ended_by_time_without_a_broker_or_by_a_clock_set_forward() {
    let mut world = World::new();
    world.config.keep_suspended_seconds = KEEP_SUSPENDED;
    let mut broker = world.start().await;
    let mut ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    broker.run_for(&world.clock, 3600).await;
    assert_eq!(ann.state(&id).await, "suspended");
    broker.run_for(&world.clock, 600).await;
    for _ in 0..2 {
        broker.kill().await;
        world.clock.advance(MONTH);
        broker = world.start().await;
        ann = ann.at(&broker);
        broker.tick().await;
        assert_eq!(ann.state(&id).await, "suspended", "after a month without a broker");
        world.clock.advance(MONTH);
        broker.tick().await;
        assert_eq!(ann.state(&id).await, "suspended", "after the clock was set forward");
    }
    // Time counted earlier is kept.
    broker.run_for(&world.clock, KEEP_SUSPENDED as i64 - 600).await;
    assert_eq!(ann.state(&id).await, "gone");
    assert_eq!(*world.provider.destroyed.lock().unwrap(), [id]);
}

#[tokio::test]
async fn a_restored_backup_ends_no_sandbox() {
    let mut world = World::with_sqlite();
    world.config.keep_suspended_seconds = KEEP_SUSPENDED;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    broker.run_for(&world.clock, 3600).await;
    broker.kill().await;
    let data = &world.config.data_dir;
    let backup = tempfile::tempdir().unwrap();
    database_is_closed(data).await;
    copy_database(data, backup.path());

    let broker = world.start().await;
    ann.at(&broker).ensure("t").await;
    broker.run_for(&world.clock, 2 * KEEP_SUSPENDED as i64).await;
    broker.kill().await;
    database_is_closed(data).await;
    copy_database(backup.path(), data);
    let broker = world.start().await;
    broker.tick().await;
    assert_eq!(ann.at(&broker).state(&id).await, "suspended");
}

/// A killed broker's connections close on threads of their own, and the last one removes the write-ahead log by its path.
async fn database_is_closed(data: &std::path::Path) {
    let is_open = || {
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        descriptors.filter_map(|fd| std::fs::read_link(fd.path()).ok()).any(|file| file.starts_with(data) && file != data)
    };
    eventually("the database to be closed", async || !is_open()).await;
}

fn copy_database(from: &std::path::Path, to: &std::path::Path) {
    let files = |dir: &std::path::Path| {
        let all = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
        all.filter(|e| e.file_name().to_string_lossy().starts_with("broker.db")).map(|e| e.path()).collect::<Vec<_>>()
    };
    files(to).iter().for_each(|old| std::fs::remove_file(old).unwrap());
    for file in files(from) {
        std::fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
}

#[tokio::test]
async fn time_without_a_broker_or_asleep_is_not_running_time() {
    let mut world = World::new();
    // Long enough that the lease has no effect.
    (world.config.lease_seconds, world.config.idle_timeout_seconds, world.config.hard_ttl_seconds) = (1_000_000, 1_000_000, 200);
    let mut broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    broker.run_for(&world.clock, 60).await;
    broker.kill().await;
    world.clock.advance(9 * 3600);
    broker = world.start().await;
    let ann = ann.at(&broker);
    broker.run_for(&world.clock, 60).await;
    ann.get(&session_path(&made)).await.ok(200);
    // Time in which the machine slept counts as at most a minute, and a clock that is set back counts as nothing.
    world.clock.advance(9 * 3600);
    broker.tick().await;
    world.clock.advance(-3600);
    broker.tick().await;
    ann.get(&session_path(&made)).await.ok(200);
    broker.run_for(&world.clock, 30).await;
    assert_eq!(ann.get(&session_path(&made)).await.error(410), "SESSION_EXPIRED");
}

#[tokio::test]
async fn a_restarted_sandbox_gets_a_full_lease() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    world.clock.advance(3600);
    broker.tick().await;
    assert_eq!(ann.state(&id).await, "suspended");
    world.clock.advance(24 * 3600);
    ann.ensure("t").await;
    let lease_end = world.provider.boxd(&id).state.lock().unwrap().lease_expires_at;
    assert_eq!(lease_end.unix() - world.clock.now().unix(), 3600, "boxd receives the end of its lease");
    assert_eq!(world.provider.starts.load(Ordering::SeqCst), 2);
}

fn time_of(value: &serde_json::Value) -> i64 {
    serde_json::from_value::<cobox_protocol::Timestamp>(value.clone()).unwrap().unix()
}

#[tokio::test]
async fn a_named_sandbox_is_suspended_at_its_hard_end_and_can_be_used_again() {
    let mut world = World::new();
    world.config.hard_ttl_seconds = 60;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.post("/v1/sandboxes", json!({ "name": "dev" })).await.ok(201);
    let id = made["id"].as_str().unwrap().parse().unwrap();
    broker.run_for(&world.clock, 60).await;
    assert_eq!(ann.state(&id).await, "suspended");
    ann.get(&format!("/dp/{id}/v1/x")).await.ok(200);
    broker.tick().await;
    assert_eq!(ann.state(&id).await, "active");
}

#[tokio::test]
async fn a_sandbox_whose_boxd_died_is_suspended_at_once_and_resumed_by_traffic() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    world.provider.kill(&id);
    eventually("the suspension", || async { ann.state(&id).await == "suspended" }).await;
    ann.get(&format!("/dp/{id}/v1/x")).await.ok(200);
    assert_eq!(ann.state(&id).await, "active");
    world.provider.kill(&id);
    ann.get(&format!("/dp/{id}/v1/x")).await.ok(200);
}

#[tokio::test]
async fn a_full_disk_is_pushed_to_the_sandbox_and_cleared_a_little_below_the_limit() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    let boxd = world.provider.boxd(&id);
    for (used, is_full) in [(999, false), (1000, true), (960, true), (949, false)] {
        *world.provider.disk.lock().unwrap() = Some(DiskUsage { location: 0, used, limit: 1000 });
        world.clock.advance(5);
        broker.tick().await;
        assert_eq!(boxd.state.lock().unwrap().disk_full, is_full, "{used}");
    }
}

#[tokio::test]
async fn usage_of_another_location_is_not_counted_as_growth() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    let takes = async |place, used| {
        *world.provider.disk.lock().unwrap() = Some(DiskUsage { location: place, used, limit: 1000 });
        world.clock.advance(5);
        broker.tick().await;
        ann.state(&id).await
    };
    for (place, used) in [(0, 1000), (1, 1 << 30), (0, 1001), (0, 1002), (1, 1 << 30), (1, 1 << 30)] {
        assert_eq!(takes(place, used).await, "active", "{place} {used}");
    }
    assert_eq!(takes(1, 2 << 30).await, "suspended");
}

#[tokio::test]
async fn an_extended_lease_is_pushed_to_the_sandbox() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    let boxd = world.provider.boxd(&id);
    let first = boxd.state.lock().unwrap().lease_expires_at;
    world.clock.advance(500);
    ann.ensure("t").await;
    broker.tick().await;
    assert_eq!(boxd.state.lock().unwrap().lease_expires_at.unix() - first.unix(), 500);
}

#[tokio::test]
async fn failed_provider_operations_are_retried() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    // Fails all attempts, of which there may be two: on PostgreSQL the broker is also notified of its own change.
    world.provider.failing_destroys.store(u32::MAX, Ordering::SeqCst);
    assert_eq!(ann.delete(&session_path(&made)).await.status, 204, "the release is stored");
    assert_eq!(world.provider.running(), 1);
    world.provider.failing_destroys.store(0, Ordering::SeqCst);
    world.clock.advance(5);
    broker.tick().await;
    assert_eq!(world.provider.running(), 0);

    let id = sandbox_id(&ann.ensure("u").await);
    world.provider.failing_suspends.store(u32::MAX, Ordering::SeqCst);
    world.clock.advance(3600);
    broker.tick().await;
    assert_eq!(world.provider.running(), 1);
    world.provider.failing_suspends.store(0, Ordering::SeqCst);
    world.clock.advance(5);
    broker.tick().await;
    assert_eq!(ann.state(&id).await, "suspended");
}

#[tokio::test]
async fn without_suspension_expired_sandboxes_end_and_others_keep_running() {
    let world = World::new();
    world.provider.can_suspend.store(false, Ordering::SeqCst);
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    world.clock.advance(3600);
    broker.tick().await;
    assert_eq!(ann.state(&sandbox_id(&made)).await, "gone");
    let over = ann.get(&session_path(&made)).await;
    assert!(over.json()["error"]["message"].as_str().unwrap().contains("its lease ran out, and its provider can't suspend"));
    assert_eq!(over.error(410), "SESSION_EXPIRED");

    let named = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "u", "mode": "ensure", "name": "dev" })).await.ok(200);
    let id = sandbox_id(&named);
    ann.delete(&session_path(&named)).await;
    assert_eq!(ann.state(&id).await, "active", "it keeps running until its own lease ends");
    world.clock.advance(3600);
    broker.tick().await;
    assert_eq!(ann.state(&id).await, "gone");

    let id = sandbox_id(&ann.ensure("v").await);
    world.provider.kill(&id);
    eventually("the end", || async { ann.state(&id).await == "gone" }).await;
    assert_eq!(world.provider.running(), 0);
}

#[tokio::test]
async fn a_failed_sandbox_is_listed_with_its_reason() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    world.provider.failing_starts.store(1, Ordering::SeqCst);
    ann.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "ensure" })).await.error(503);
    let failed = ann.get("/v1/sandbox/sessions?state=failed").await.ok(200);
    assert_eq!((&failed["items"][0]["thread_id"], &failed["items"][0]["state"]), (&json!("t"), &json!("failed")));
    let over = ann.get(&session_path(&failed["items"][0])).await;
    assert!(over.json()["error"]["message"].as_str().unwrap().contains("set to fail"));
    assert_eq!(over.error(410), "SESSION_EXPIRED");
    let made = ann.ensure("u").await;
    ann.delete(&session_path(&made)).await;
    let terminated = ann.get("/v1/sandbox/sessions?state=terminated").await.ok(200);
    assert_eq!(terminated["items"].as_array().unwrap().len(), 1);
    assert_eq!(terminated["items"][0]["thread_id"], "u");
}
