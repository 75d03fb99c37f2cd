//! Property test: after any sequence of uses, failures, crashes and restarts, store and provider agree.

use std::{collections::HashSet, sync::atomic::Ordering};

use cobox_protocol::SandboxId;
use proptest::prelude::*;
use serde_json::json;

use crate::harness::{Client, TestBroker, World, session_path};

#[derive(Clone, Debug)]
enum Step {
    Ensure(u8),
    Release(u8),
    Use(u8),
    BoxdDies(u8),
    StartFails,
    SuspendFails,
    DestroyFails,
    StartsHang(bool),
    Time(i64),
    BrokerDies,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3u8).prop_map(Step::Ensure),
        2 => (0..3u8).prop_map(Step::Release),
        2 => (0..3u8).prop_map(Step::Use),
        2 => (0..3u8).prop_map(Step::BoxdDies),
        1 => Just(Step::StartFails),
        1 => Just(Step::SuspendFails),
        1 => Just(Step::DestroyFails),
        1 => any::<bool>().prop_map(Step::StartsHang),
        2 => prop_oneof![Just(10), Just(901), Just(3601), Just(30_000), Just(8 * 24 * 3600)].prop_map(Step::Time),
        2 => Just(Step::BrokerDies),
    ]
}

proptest! {
    // Each case runs one or more brokers with a database on disk.
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn store_and_provider_agree_after_any_failure(steps in proptest::collection::vec(step(), 1..30)) {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(run(steps));
    }
}

async fn run(steps: Vec<Step>) {
    let world = World::new();
    let mut broker = world.start().await;
    let mut ann = broker.human("ann").await;
    let mut unanswered = Vec::new();
    for step in steps {
        match step {
            Step::Ensure(n) => {
                let body = json!({ "thread_id": format!("t{n}"), "mode": "ensure" });
                let answer = ann.call(http::Method::POST, "/v1/sandbox/sessions", Some(body), &[("prefer", "wait=0")]).await;
                assert!([200, 423, 503].contains(&answer.status.as_u16()), "{}", answer.json());
            }
            Step::Release(n) => {
                if let Some(session) = session(&ann, n).await {
                    // A start that hangs delays the release; the client may disconnect.
                    let (ann, path) = (ann.clone(), session_path(&session));
                    let releasing = tokio::spawn(async move { ann.delete(&path).await.status });
                    if *world.provider.may_start.borrow() {
                        assert!([204, 404].contains(&releasing.await.unwrap().as_u16()));
                    } else {
                        unanswered.push(releasing);
                    }
                }
            }
            Step::Use(n) => {
                if let Some(session) = session(&ann, n).await.filter(|_| *world.provider.may_start.borrow()) {
                    let answer = ann.get(&format!("/dp/{}/v1/x", session["sandbox_id"].as_str().unwrap())).await;
                    assert!([200, 404, 410, 503].contains(&answer.status.as_u16()), "{}", answer.json());
                }
            }
            Step::BoxdDies(n) => {
                let ids: Vec<SandboxId> = world.provider.sandboxes.lock().unwrap().keys().cloned().collect();
                if let Some(id) = ids.get(usize::from(n)) {
                    world.provider.kill(id);
                }
            }
            Step::StartFails => world.provider.failing_starts.store(1, Ordering::SeqCst),
            Step::SuspendFails => world.provider.failing_suspends.store(1, Ordering::SeqCst),
            Step::DestroyFails => world.provider.failing_destroys.store(1, Ordering::SeqCst),
            Step::StartsHang(hang) => drop(world.provider.may_start.send_replace(!hang)),
            Step::Time(seconds) => {
                world.clock.advance(seconds);
                broker.tick().await;
            }
            Step::BrokerDies => {
                broker.kill().await;
                broker = world.start().await;
                ann = Client { addr: broker.addr, key: ann.key };
            }
        }
    }
    world.provider.may_start.send_replace(true);
    for releasing in unanswered {
        // Fails if its broker died before it answered.
        let _ = releasing.await;
    }
    settle(&world, &broker).await;
    for n in 0..3 {
        let thread = format!("t{n}");
        // Each thread may encounter one remaining failure; the next attempt succeeds.
        let body = json!({ "thread_id": thread, "mode": "ensure" });
        if ann.post("/v1/sandbox/sessions", body).await.status != 200 {
            ann.ensure(&thread).await;
        }
    }
    agree(&world, &broker).await;
}

async fn session(ann: &Client, n: u8) -> Option<serde_json::Value> {
    let listed = ann.get(&format!("/v1/sandbox/sessions?scope_id=t{n}")).await.ok(200);
    listed["items"].get(0).cloned()
}

/// Ticks until no work is left: each tick retries what failed.
async fn settle(world: &World, broker: &TestBroker) {
    let store = broker.broker.as_ref().unwrap().store().clone();
    let node = std::fs::read_to_string(world.config.data_dir.join("node.id")).unwrap();
    for _ in 0..1000 {
        let rows = store.sandboxes_of_node(&node).await.unwrap();
        let running = rows.iter().filter(|s| s.is_running()).count();
        if rows.iter().all(|s| s.intent.is_none()) && running == world.provider.running() {
            return;
        }
        world.clock.advance(5);
        broker.tick().await;
    }
    panic!("the deployment never settles");
}

async fn agree(world: &World, broker: &TestBroker) {
    settle(world, broker).await;
    let store = broker.broker.as_ref().unwrap().store().clone();
    let node = std::fs::read_to_string(world.config.data_dir.join("node.id")).unwrap();
    let known: HashSet<SandboxId> = store.sandboxes_of_node(&node).await.unwrap().into_iter().map(|s| s.id).collect();
    let had: HashSet<SandboxId> = world.provider.sandboxes.lock().unwrap().keys().cloned().collect();
    assert_eq!(known, had, "no orphaned and no lost sandboxes");
    for n in 0..3 {
        let bound = store.session_of("default", "thread", &format!("t{n}")).await.unwrap().unwrap();
        assert!(known.contains(&bound.sandbox.id));
    }
}
