//! Tests of pools: each waiting sandbox is taken once, and the pool is soon refilled.

use std::sync::atomic::Ordering;

use crate::{
    fake_provider::IMAGE,
    harness::{Client, TestBroker, World, eventually, sandbox_id},
    store_suite::audit,
};
use cobox_broker::domain::{
    model::Sandbox,
    resources::records::{Pool, TemplateSpec},
};
use cobox_protocol::{PoolId, SandboxId, key::PrincipalKind};
use cobox_testkit::TestDatabase;
use serde_json::{Value, json};

const SESSIONS: &str = "/v1/sandbox/sessions";

fn world() -> World {
    let mut world = World::new();
    world.config.templates.insert("python".to_owned(), TemplateSpec { image: Some(IMAGE.to_owned()), ..TemplateSpec::default() });
    world
}

fn ensure(thread: &str) -> Value {
    json!({ "thread_id": thread, "mode": "ensure", "template": "python" })
}

async fn pool(world: &World, broker: &TestBroker, replicas: u32) -> Pool {
    use cobox_broker::Clock;
    let now = world.clock.now();
    let pool = Pool {
        id: PoolId::new(),
        workspace: "default".into(),
        name: "warm".into(),
        template: "python".into(),
        owner: "ann".into(),
        owner_kind: PrincipalKind::Human,
        replicas,
        trouble: Default::default(),
        created_at: now,
        updated_at: now,
    };
    broker.broker.as_ref().unwrap().store().add_pool(&pool, 10, &audit("pool.created")).await.unwrap();
    pool
}

async fn members(broker: &TestBroker, pool: &Pool) -> Vec<Sandbox> {
    broker.broker.as_ref().unwrap().store().pool_members(&pool.id).await.unwrap()
}

async fn wait_until_full(broker: &TestBroker, pool: &Pool) -> Vec<SandboxId> {
    eventually("a full pool", || async {
        broker.tick().await;
        let members = members(broker, pool).await;
        members.len() == pool.replicas as usize && members.iter().all(Sandbox::is_running)
    })
    .await;
    members(broker, pool).await.into_iter().map(|m| m.id).collect()
}

async fn list(caller: &Client) -> usize {
    caller.get("/v1/sandboxes").await.ok(200)["items"].as_array().unwrap().len()
}

#[tokio::test]
async fn a_request_for_the_template_gets_a_sandbox_of_the_pool() {
    let world = world();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let pool = pool(&world, &broker, 2).await;
    let waiting = wait_until_full(&broker, &pool).await;
    // Not assigned yet: not even the owner of the pool can access it.
    assert_eq!(list(&ann).await, 0);
    assert_eq!(ann.get(&format!("/v1/sandboxes/{}", waiting[0])).await.error(404), "SANDBOX_NOT_FOUND");
    assert_eq!(ann.get(&format!("/dp/{}/v1/echo", waiting[0])).await.error(404), "SANDBOX_NOT_FOUND");
    let attach = json!({ "thread_id": "x", "mode": "ensure", "sandbox_id": waiting[0] });
    assert_eq!(ann.post(SESSIONS, attach).await.error(404), "SANDBOX_NOT_FOUND");

    let starts = world.provider.made_of.lock().unwrap().len();
    let first = bob.post(SESSIONS, ensure("t")).await.ok(200);
    assert_eq!(sandbox_id(&first), waiting[0]);
    let second = bob.post("/v1/sandboxes", json!({ "template": "python", "name": "dev", "access": "owner" })).await.ok(201);
    assert_eq!((&second["id"], &second["owner"], &second["name"]), (&json!(waiting[1]), &json!("bob"), &json!("dev")));
    assert_eq!(ann.get("/v1/sandboxes/dev").await.error(403), "FORBIDDEN");
    assert_eq!(world.provider.made_of.lock().unwrap().len(), starts, "no sandbox was created");
    let third = bob.post("/v1/sandboxes", json!({ "template": "python" })).await.ok(201);
    assert!(!waiting.contains(&third["id"].as_str().unwrap().parse().unwrap()), "without a waiting sandbox, one is created");
    assert_eq!(
        wait_until_full(&broker, &pool).await.iter().filter(|m| waiting.contains(m)).count(),
        0,
        "the pool is refilled with other sandboxes"
    );
    assert_eq!(list(&bob).await, 3);
}

#[tokio::test]
async fn pool_members_outlive_their_lease_and_are_replaced_when_they_die_or_the_template_changes() {
    let mut world = world();
    // A gap between two reaper rounds counts as one minute.
    world.config.hard_ttl_seconds = 21 * 60;
    let broker = world.start().await;
    let _ann = broker.human("ann").await;
    let pool = pool(&world, &broker, 1).await;
    let waiting = wait_until_full(&broker, &pool).await;
    for _ in 0..20 {
        world.clock.advance(300);
        broker.tick().await;
    }
    assert_eq!(wait_until_full(&broker, &pool).await, waiting, "pool members have no lease");
    world.clock.advance(60);
    let next = wait_until_refilled(&broker, &pool, &waiting).await;
    world.provider.kill(&next[0]);
    let next = wait_until_refilled(&broker, &pool, &next).await;
    broker.kill().await;
    world.config.templates.insert("python".to_owned(), TemplateSpec::default());
    let broker = world.start().await;
    let last = wait_until_refilled(&broker, &pool, &next).await;
    broker.broker.as_ref().unwrap().store().remove_pool(&pool, &audit("pool.deleted")).await.unwrap();
    eventually("the end of all pool members", || async {
        broker.tick().await;
        !world.provider.is_up(&last[0]) && members(&broker, &pool).await.is_empty()
    })
    .await;
    assert_eq!(world.provider.running(), 0);
}

#[tokio::test]
async fn the_pool_of_a_disabled_principal_has_no_members() {
    let world = world();
    let broker = world.start().await;
    let (_ann, root) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await);
    let pool = pool(&world, &broker, 2).await;
    wait_until_full(&broker, &pool).await;
    root.post("/v1/principals/ann/disable", json!({})).await;
    eventually("an empty pool", || async {
        broker.tick().await;
        members(&broker, &pool).await.is_empty() && world.provider.running() == 0
    })
    .await;
    let displayed = root.get("/v2/sandboxes/pools/warm").await.ok(200);
    assert!(displayed["status_message"].as_str().unwrap().contains("no valid key"), "{displayed}");
    root.delete("/v2/sandboxes/pools/warm").await.ok(204);
}

#[tokio::test]
async fn pool_members_of_a_dead_node_are_replaced() {
    let database = TestDatabase::new().await;
    let mut worlds = World::cluster(&database, 2);
    for world in &mut worlds {
        world.config.templates.insert("python".to_owned(), TemplateSpec { image: Some(IMAGE.to_owned()), ..TemplateSpec::default() });
    }
    let one = worlds[0].start().await;
    let ann = one.human("ann").await;
    let pool = pool(&worlds[0], &one, 2).await;
    let waiting = wait_until_full(&one, &pool).await;
    // Started only now, because it would have helped to fill the pool.
    let two = worlds[1].start().await;
    one.kill().await;
    let there = ann.at(&two);
    eventually("two members on the other node", || async {
        worlds[0].clock.advance(3);
        two.tick().await;
        let members = members(&two, &pool).await;
        members.len() == 2 && members.iter().all(|m| m.is_running() && !waiting.contains(&m.id))
    })
    .await;
    assert_eq!(there.get("/v2/sandboxes/pools/warm").await.ok(200)["ready_replicas"], 2);
    // If the first node returns, its waiting sandboxes are removed.
    let again = worlds[0].start().await;
    eventually("no members on the first node", || async {
        again.tick().await;
        worlds[0].provider.running() == 0
    })
    .await;
}

async fn wait_until_refilled(broker: &TestBroker, pool: &Pool, before: &[SandboxId]) -> Vec<SandboxId> {
    eventually("a new member", || async {
        broker.tick().await;
        let members = members(broker, pool).await;
        members.len() == 1 && members[0].is_running() && !before.contains(&members[0].id)
    })
    .await;
    members(broker, pool).await.into_iter().map(|m| m.id).collect()
}

#[tokio::test]
async fn failing_pool_starts_are_retried_with_backoff_and_report_the_reason() {
    let world = world();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    world.provider.failing_starts.store(u32::MAX, Ordering::SeqCst);
    let params = json!({ "name": "warm", "template_name": "python", "replicas": 50, "wait_for_ready": true, "timeout": 1 });
    let refused = ann.post("/v2/sandboxes/pools", params).await;
    assert!(refused.json()["detail"]["message"].as_str().unwrap().contains("set to fail"), "{:?}", refused.json());
    assert_eq!(refused.ok(504)["detail"]["error"], "Timeout");
    let starts = || world.provider.starts.load(Ordering::SeqCst);
    let first = starts();
    assert!((1..=4).contains(&first), "{first}");
    assert_eq!(ann.get("/v2/sandboxes/pools/warm").await.status, 404, "a failed request must leave no pool, because the SDK retries");
    let params = json!({ "name": "warm", "template_name": "python", "replicas": 50, "wait_for_ready": false });
    ann.post("/v2/sandboxes/pools", params).await.ok(201);
    // One attempt at a time, nothing in between, and growing delays.
    let now = async || broker.broker.as_ref().unwrap().store().pool("default", "warm").await.unwrap().unwrap();
    eventually("the first failure", || async { now().await.trouble.failures == 1 }).await;
    let (pool, first, mut tries) = (now().await, starts(), 0);
    for _ in 0..300 {
        world.clock.advance(4);
        broker.tick().await;
        eventually("the end of the start", || async { members(&broker, &pool).await.is_empty() }).await;
        tries = starts() - first;
    }
    assert!((4..=12).contains(&tries), "{tries} tries in 20 minutes");
    let displayed = ann.get("/v2/sandboxes/pools/warm").await.ok(200);
    assert!(displayed["status_message"].as_str().unwrap().contains("set to fail"), "{displayed}");
    // Once the failure is fixed, the pool is filled at the next attempt, or immediately after a change.
    world.provider.failing_starts.store(0, Ordering::SeqCst);
    ann.call(http::Method::PATCH, "/v2/sandboxes/pools/warm", Some(json!({ "replicas": 2 })), &[]).await.ok(200);
    assert_eq!(wait_until_full(&broker, &Pool { replicas: 2, ..pool }).await.len(), 2);
    eventually("the pool to recover", || async { ann.get("/v2/sandboxes/pools/warm").await.ok(200)["status_message"] == Value::Null })
        .await;
}

#[tokio::test]
async fn each_pool_member_is_taken_once_by_racing_requests_on_several_brokers() {
    let database = TestDatabase::new().await;
    let mut worlds = World::cluster(&database, 2);
    for world in &mut worlds {
        world.config.templates.insert("python".to_owned(), TemplateSpec { image: Some(IMAGE.to_owned()), ..TemplateSpec::default() });
    }
    let (one, two) = (worlds[0].start().await, worlds[1].start().await);
    let ann = one.human("ann").await;
    let pool = pool(&worlds[0], &one, 4).await;
    let waiting = wait_until_full(&one, &pool).await;
    let (here, there) = (ann.at(&one), ann.at(&two));
    let requested = (0..8).map(|n| {
        let caller = if n % 2 == 0 { here.clone() } else { there.clone() };
        async move { caller.post(SESSIONS, ensure(&format!("t{n}"))).await.ok(200)["sandbox"]["id"].as_str().unwrap().to_owned() }
    });
    let mut got = futures_util::future::join_all(requested).await;
    let from_pool = got.iter().filter(|id| waiting.iter().any(|w| w.as_str() == id.as_str())).count();
    got.sort_unstable();
    got.dedup();
    assert_eq!((got.len(), from_pool), (8, 4));
}
