//! Tests of sandbox claims: what sandboxes report about their requests, stored beside the broker's own records.

use std::sync::atomic::Ordering;

use cobox_broker::store::PageParams;
use cobox_protocol::key::PrincipalKind;
use futures_util::future::join_all;
use serde_json::json;

use crate::harness::{NEWEST, World, eventually, sandbox_id};

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
    *boxd.claims.lock().unwrap() = Some(json!({ "life": "abc", "items": items, "lost": 7, "more": false }));
    let store = broker.broker.as_ref().unwrap().store().clone();
    let kept = async || {
        let all = store.audit("default", Some(&id), &NEWEST).await.unwrap();
        all.into_iter().map(|(_, r)| r).filter(|r| r.action == "sandbox.claim").collect::<Vec<_>>()
    };
    broker.tick().await;
    let records = kept().await;
    assert_eq!(records.len(), 3);
    let details: Vec<&str> = records.iter().map(|r| r.detail.as_deref().unwrap()).collect();
    assert!(details[0].starts_with("7 requests left no claim"), "{details:?}");
    assert!(details[1].len() < 400, "{details:?}");
    assert_eq!(details[2], "POST /v1/exec 200 make exec");
    assert_eq!((records[2].principal.as_deref(), records[2].jti.as_deref()), (Some("ann\u{fffd}[2J"), Some("tok_1")));

    // Repeated claims are stored once, and the stored position is acknowledged so that boxd can forget them.
    world.clock.advance(120);
    broker.tick().await;
    assert_eq!(kept().await.len(), 3);
    assert_eq!(boxd.asked_for_claims.lock().unwrap().last().unwrap(), "life=abc&after=2");
    // The last claims before the end are also fetched; those of another life are numbered from the start.
    *boxd.claims.lock().unwrap() = Some(json!({ "life": "def", "items": [claim(1, "last")], "lost": 0, "more": false }));
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
    world.provider.boxd(&id).claims_without_end.store(true, Ordering::SeqCst);
    let store = broker.broker.as_ref().unwrap().store().clone();
    let count = async || {
        let all = store.audit("default", Some(&id), &PageParams { before: None, limit: 10_000 }).await.unwrap();
        all.into_iter().filter(|(_, r)| r.action == "sandbox.claim").count()
    };
    // A burst of a thousand, fifty a second after that, and at most one batch beyond the limit.
    broker.tick().await;
    let first = count().await;
    assert!((1000..=1000 + 256).contains(&first), "{first}");
    world.clock.advance(4);
    broker.tick().await;
    let second = count().await;
    assert!(second > first && second <= 1000 + 4 * 50 + 256, "{second}");
    // A suspension and restart don't reset the limit.
    world.provider.boxd(&id).stop();
    let op = broker.key("op", PrincipalKind::Operator).await;
    eventually("the suspension", async || op.state(&id).await == "suspended").await;
    broker.human("ann").await.ensure("t").await;
    world.provider.boxd(&id).claims_without_end.store(true, Ordering::SeqCst);
    world.clock.advance(2);
    broker.tick().await;
    let third = count().await;
    assert!(third <= 1000 + 6 * 50 + 256, "{third}");
}

#[tokio::test]
async fn sandboxes_that_withhold_their_claims_do_not_delay_others() {
    const SLOW: usize = 24;
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let mut slow = Vec::new();
    for n in 0..SLOW {
        let boxd = world.provider.boxd(&sandbox_id(&ann.ensure(&format!("slow {n}")).await));
        boxd.never_claims.store(true, Ordering::SeqCst);
        slow.push(boxd);
    }
    let mut waiting: Vec<_> = slow.iter().map(|boxd| boxd.waiting_for_claims.subscribe()).collect();
    // All sandboxes are queried concurrently, and each query has a timeout.
    let all_asked = join_all(waiting.iter_mut().map(|w| w.wait_for(|n| *n == 1)));
    let together = async {
        drop(all_asked.await);
        assert!(slow.iter().all(|boxd| *boxd.waiting_for_claims.borrow() == 1));
    };
    tokio::join!(broker.tick(), together);
    eventually("the end of all claim requests", async || slow.iter().all(|boxd| *boxd.waiting_for_claims.borrow() == 0)).await;
}
