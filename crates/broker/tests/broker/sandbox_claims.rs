//! Tests of sandbox claims: what sandboxes report about their requests, stored beside the broker's own records.

use std::{sync::atomic::Ordering, time::Duration};

use cobox_broker::store::{PageParams, Store};
use cobox_protocol::{SandboxId, key::PrincipalKind};
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::{
    fake_provider::FakeClaims,
    harness::{NEWEST, World, eventually, sandbox_id},
};

#[tokio::test]
async fn sandbox_claims_are_stored_once_bounded_and_readable_by_operators_only() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, op) = (broker.human("ann").await, broker.key("op", PrincipalKind::Operator).await);
    let id = sandbox_id(&ann.ensure("t").await);
    let boxd = world.provider.boxd(&id);
    let claim = |seq: u64, target: &str| {
        json!({ "seq": seq, "at": "2020-01-01T00:00:00Z", "request_id": "req_1", "jti": "tok_1", "principal": "ann\u{1b}[2J", "actor": "human",
                "capability": "exec", "method": "POST", "route": "/v1/exec", "target": target, "status": 200, "duration_ms": 3 })
    };
    let items = json!([claim(1, "make"), claim(2, &"x".repeat(100_000))]);
    boxd.claims.send_replace(FakeClaims::Batch(json!({ "life": "abc", "items": items, "lost": 7, "more": false })));
    let store = broker.broker.as_ref().unwrap().store().clone();
    let kept = async || {
        let all = store.audit("default", Some(&id), &NEWEST).await.unwrap();
        all.into_iter().map(|(_, r)| r).filter(|r| r.action == "sandbox.claim").collect::<Vec<_>>()
    };
    eventually("they are stored", async || !kept().await.is_empty()).await;
    let records = kept().await;
    assert_eq!(records.len(), 3);
    let details: Vec<&str> = records.iter().map(|r| r.detail.as_deref().unwrap()).collect();
    assert!(details[0].starts_with("7 requests left no claim"), "{details:?}");
    assert!(details[1].len() < 400, "{details:?}");
    assert_eq!(details[2], "POST /v1/exec 200 make exec");
    assert_eq!((records[2].principal.as_deref(), records[2].jti.as_deref()), (Some("ann\u{fffd}[2J"), Some("tok_1")));

    // Repeated claims are stored once, and the stored position is acknowledged so that boxd can forget them.
    let acknowledgements = || boxd.fetches.lock().unwrap().iter().filter(|fetch| fetch.contains("claims=abc:2")).count();
    eventually("the claims are acknowledged", async || acknowledgements() > 0).await;
    boxd.claims.send_modify(|_| ());
    eventually("they are fetched again", async || acknowledgements() > 1).await;
    assert_eq!(kept().await.len(), 3);
    // The last claims before the end are also fetched; those of another life are numbered from the start.
    boxd.claims.send_replace(FakeClaims::Batch(json!({ "life": "def", "items": [claim(1, "last")], "lost": 0, "more": false })));
    op.delete(&format!("/v1/sandboxes/{id}")).await.ok(204);
    assert_eq!(kept().await.len(), 4);

    assert_eq!(ann.get("/v1/audit").await.error(403), "FORBIDDEN");
    let page = op.get(&format!("/v1/audit?sandbox={id}&limit=2")).await.ok(200);
    assert_eq!(page["items"].as_array().unwrap().len(), 2);
    let next = op.get(&format!("/v1/audit?sandbox={id}&cursor={}", page["next_cursor"].as_str().unwrap())).await.ok(200);
    let newest = page["items"][1]["sequence"].as_u64().unwrap();
    assert!(next["items"].as_array().unwrap().iter().all(|e| e["sequence"].as_u64().unwrap() < newest));
    assert_eq!(op.get("/v1/audit?limit=0").await.error(400), "INVALID_REQUEST");
}

#[tokio::test]
async fn a_sandbox_with_endless_claims_stays_within_the_ingest_limit() {
    let world = World::new();
    let broker = world.start().await;
    let id = sandbox_id(&broker.human("ann").await.ensure("t").await);
    world.provider.boxd(&id).claims.send_replace(FakeClaims::Endless);
    let store = broker.broker.as_ref().unwrap().store().clone();
    let count = async || count(&store, &id).await;
    // A burst of a thousand, fifty a second after that, and at most one batch beyond the limit.
    eventually("the burst is stored", async || count().await >= 1000).await;
    let first = count().await;
    assert!((1000..=1000 + 256).contains(&first), "{first}");
    world.clock.advance(4);
    eventually("more is stored", async || count().await > first).await;
    let second = count().await;
    assert!(second <= 1000 + 4 * 50 + 256, "{second}");
    // A suspension and restart don't reset the limit.
    world.provider.boxd(&id).stop();
    let op = broker.key("op", PrincipalKind::Operator).await;
    eventually("the suspension", async || op.state(&id).await == "suspended").await;
    broker.human("ann").await.ensure("t").await;
    world.clock.advance(2);
    eventually("more is stored", async || count().await > second).await;
    let third = count().await;
    assert!(third <= 1000 + 6 * 50 + 256, "{third}");
}

#[tokio::test]
async fn sandboxes_that_withhold_their_claims_do_not_delay_others() {
    const SLOW: usize = 24;
    let world = World::new();
    let broker = world.start().await;
    let (ann, op) = (broker.human("ann").await, broker.key("op", PrincipalKind::Operator).await);
    let mut slow = Vec::new();
    for n in 0..SLOW {
        let id = sandbox_id(&ann.ensure(&format!("slow {n}")).await);
        let boxd = world.provider.boxd(&id);
        boxd.claims.send_replace(FakeClaims::Withheld);
        slow.push((id, boxd));
    }
    let mut withheld: Vec<_> = slow.iter().map(|(_, boxd)| boxd.withheld.subscribe()).collect();
    for outcome in join_all(withheld.iter_mut().map(|w| w.wait_for(|n| *n == 1))).await {
        drop(outcome.unwrap());
    }
    // All are asked at the same time, and neither another sandbox nor the reaper waits for them.
    let quick = sandbox_id(&ann.ensure("quick").await);
    world.provider.boxd(&quick).claims.send_replace(claims_up_to(1));
    let store = broker.broker.as_ref().unwrap().store().clone();
    eventually("the other's claim is stored", async || count(&store, &quick).await == 1).await;
    broker.tick().await;
    assert!(slow.iter().all(|(_, boxd)| *boxd.withheld.borrow() == 1));
    // The end of a sandbox does not wait either.
    op.delete(&format!("/v1/sandboxes/{}", slow[0].0)).await.ok(204);
    eventually("nobody waits for it", async || *slow[0].1.withheld.borrow() == 0).await;
}

fn claims_up_to(last: u64) -> FakeClaims {
    let claim = |seq: u64| json!({ "seq": seq, "at": "2020-01-01T00:00:00Z", "request_id": "", "method": "GET", "route": "/", "status": 200, "duration_ms": 0 });
    FakeClaims::Batch(json!({ "life": "1", "items": (1..=last).map(claim).collect::<Vec<_>>(), "lost": 0, "more": false }))
}

async fn count(store: &Store, id: &SandboxId) -> usize {
    let all = store.audit("default", Some(id), &PageParams { before: None, limit: 10_000 }).await.unwrap();
    all.into_iter().filter(|(_, r)| r.action == "sandbox.claim").count()
}

fn exec(seq: u64, session: &Value) -> Value {
    let what = json!({ "type": "exec", "command": seq.to_string(), "exit_code": 0, "duration_ms": 1 });
    json!({ "seq": seq, "at": "2020-01-01T00:00:00Z", "principal": "ann", "actor": "human", "session_id": session["session_id"], "what": what })
}

#[tokio::test]
async fn claims_of_a_busy_sandbox_are_fetched_at_most_every_two_seconds() {
    const REQUESTS: u64 = 20;
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let session = ann.ensure("t").await;
    let id = sandbox_id(&session);
    let boxd = world.provider.boxd(&id);
    let store = broker.broker.as_ref().unwrap().store().clone();
    let mut events = ann.watch(&session, "?after=now", &[]).await;
    let began = std::time::Instant::now();
    for n in 1..=REQUESTS {
        boxd.claims.send_replace(claims_up_to(n));
        boxd.activity_items.send_modify(|all| all.push(exec(n, &session)));
        assert_eq!(events.event().await["command"], n.to_string());
    }
    eventually("all claims are stored", async || count(&store, &id).await == REQUESTS as usize).await;
    // One query is always under way; the next one that names claims follows two seconds after claims were stored.
    let named: Vec<String> = boxd.fetches.lock().unwrap().iter().filter(|fetch| fetch.contains("claims=")).cloned().collect();
    let most = 2 + began.elapsed().as_secs() / 2;
    assert!(named.len() as u64 <= most + 1, "{} in {:?}: {named:?}", named.len(), began.elapsed());
}

#[tokio::test]
async fn reports_of_an_older_boxd_are_fetched_by_the_routes_that_it_has() {
    let world = World::new();
    world.provider.starts_older_boxds.store(true, Ordering::SeqCst);
    let broker = world.start().await;
    let (ann, op) = (broker.human("ann").await, broker.key("op", PrincipalKind::Operator).await);
    let session = ann.ensure("t").await;
    let id = sandbox_id(&session);
    let boxd = world.provider.boxd(&id);
    let store = broker.broker.as_ref().unwrap().store().clone();
    let mut events = ann.watch(&session, "?after=now", &[]).await;
    boxd.claims.send_replace(claims_up_to(2));
    let began = std::time::Instant::now();
    for n in 1..=10 {
        boxd.activity_items.send_modify(|all| all.push(exec(n, &session)));
        assert_eq!(events.event().await["command"], n.to_string());
    }
    assert!(began.elapsed() < Duration::from_secs(10), "activities do not wait for the next poll: {:?}", began.elapsed());
    eventually("its claims are stored", async || count(&store, &id).await == 2).await;
    let is_acknowledged = || boxd.fetches.lock().unwrap().iter().any(|fetch| fetch.starts_with("/control/claims?life=1&after=2"));
    eventually("its claims are acknowledged", async || is_acknowledged()).await;
    let attempts = || boxd.fetches.lock().unwrap().iter().filter(|fetch| fetch.starts_with("/control/reports")).count();
    assert_eq!((count(&store, &id).await, attempts()), (2, 1), "once for each run");

    // A broker that takes it over stores its activities once; its last reports are collected before it ends.
    broker.kill().await;
    let broker = world.start().await;
    let mut events = ann.at(&broker).watch(&session, "?after=now", &[]).await;
    boxd.activity_items.send_modify(|all| all.push(exec(11, &session)));
    assert_eq!(events.event().await["command"], "11");
    boxd.claims.send_replace(claims_up_to(3));
    let store = broker.broker.as_ref().unwrap().store().clone();
    op.at(&broker).delete(&format!("/v1/sandboxes/{id}")).await.ok(204);
    assert!((3..=5).contains(&count(&store, &id).await), "the third, and perhaps the first two again");
    assert_eq!(attempts(), 2);
}

#[tokio::test]
async fn unreadable_activities_of_a_newer_boxd_stop_no_claims() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, op) = (broker.human("ann").await, broker.key("op", PrincipalKind::Operator).await);
    let session = ann.ensure("t").await;
    let id = sandbox_id(&session);
    let boxd = world.provider.boxd(&id);
    let store = broker.broker.as_ref().unwrap().store().clone();
    let mut unknown = exec(1, &session);
    unknown["what"]["type"] = json!("of_a_later_version");
    boxd.activity_items.send_replace(vec![unknown]);
    for n in 1..=2 {
        boxd.claims.send_replace(claims_up_to(n));
        eventually("the claim is stored", async || count(&store, &id).await == n as usize).await;
    }
    boxd.claims.send_replace(claims_up_to(3));
    op.delete(&format!("/v1/sandboxes/{id}")).await.ok(204);
    assert_eq!(count(&store, &id).await, 3);
}
