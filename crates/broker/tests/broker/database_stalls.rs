//! Tests of a database that falls silent without closing connections: waiting requests fail in time, and the audit
//! chain stays intact.

use std::{sync::Arc, time::Duration};

use crate::{
    audit_chain::{kept, verify},
    store_suite::{api_key, audit},
};
use cobox_broker::{
    audit_hash::Fault,
    domain::{
        audit::{audit_writer::AuditTrail, restore_detection::AuditMark},
        model::AuditRecord,
    },
    store::{AuditGap, Note, Store, StoreError, postgres, transaction::DatabaseTimeouts},
};
use cobox_protocol::key::PrincipalKind;
use cobox_testkit::{EVENT_TIMEOUT, Silence, StallingProxy, TestDatabase, eventually};
use tokio::time::timeout;

/// Short, to keep the tests fast. All uses of one connection run on the thread that owns it.
const SHORT: DatabaseTimeouts = DatabaseTimeouts { turn: Duration::from_secs(1), commit: Duration::from_secs(2) };

async fn store_behind_proxy() -> (TestDatabase, StallingProxy, Arc<Store>) {
    let database = TestDatabase::new().await;
    let proxy = StallingProxy::in_front_of(&database.socket()).await;
    let store = postgres::open_with(&database.secret_url_at(proxy.address()), SHORT).await.unwrap();
    store.write_as("node_a");
    let store = Arc::new(store);
    // Repeated, so that the connection has prepared the statement and sends it in one message.
    for n in 0..3 {
        note(&store, &format!("before {n}")).await.unwrap();
        eventually("the connections to be idle", || async { store.has_no_borrowed_connection().then_some(()) }).await;
    }
    (database, proxy, store)
}

async fn note(store: &Store, detail: &str) -> Result<(), StoreError> {
    let record = AuditRecord { detail: Some(detail.to_owned()), ..audit("x") };
    let noted = timeout(EVENT_TIMEOUT, store.note(&Note { audit: vec![record], ..Note::default() })).await;
    noted.unwrap_or_else(|_| panic!("`{detail}` was neither written nor refused"))
}

async fn details(store: &Store) -> Vec<String> {
    let links = eventually("the links", || async { store.audit_links("node_a", 0, 1000).await.ok() }).await;
    assert!(links.iter().zip(1..).all(|(link, number)| link.number == number));
    links.into_iter().filter_map(|l| l.record.detail).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_database_connection_is_given_up_and_replaced() {
    let (_database, proxy, store) = store_behind_proxy().await;
    let early = kept(&store).await;
    // Several connections, all of which fall silent.
    let keys = (0..8).map(|n| {
        let store = store.clone();
        async move { store.add_key(&api_key(&format!("p{n}"), PrincipalKind::Human), &audit("key.created")).await.unwrap() }
    });
    futures_util::future::join_all(keys).await;
    proxy.stall(Silence::Both);
    let requested = (0..32).map(|n| {
        let store = store.clone();
        tokio::spawn(async move {
            let name = format!("during {n}");
            if n % 2 == 0 {
                return (note(&store, &name).await, name);
            }
            let record = AuditRecord { detail: Some(name.clone()), ..audit("key.created") };
            let key = api_key(&name, PrincipalKind::Human);
            let added = timeout(EVENT_TIMEOUT, store.add_key(&key, &record)).await;
            (added.unwrap_or_else(|_| panic!("`{name}` was neither created nor refused")).map(drop), name)
        })
    });
    let outcomes: Vec<_> = futures_util::future::join_all(requested).await.into_iter().map(Result::unwrap).collect();
    let refused: Vec<_> = outcomes.iter().filter_map(|(outcome, _)| outcome.as_ref().err()).collect();
    assert!(!refused.is_empty() && refused.iter().all(|e| matches!(e, StoreError::Unreachable(_))), "{refused:?}");
    // New connections work, and no lock blocks them.
    eventually("the store to write again", || async { note(&store, "after").await.ok() }).await;
    let written = details(&store).await;
    eventually("stalled connections to be closed", || async { store.audit_heads().await.ok() }).await;
    assert_eq!(verify(&store, &early).await, []);
    for (outcome, name) in outcomes {
        assert!(outcome.is_err() || written.contains(&name), "{name} was acknowledged and is missing");
    }
}

#[tokio::test]
async fn a_commit_without_a_response_is_found_by_the_next_one() {
    let (_database, proxy, store) = store_behind_proxy().await;
    proxy.stall(Silence::Answers);
    let unknown = note(&store, "unknown").await;
    assert!(matches!(unknown, Err(StoreError::Unreachable(_))), "{unknown:?}");
    eventually("the store to write again", || async { note(&store, "after").await.ok() }).await;
    let written = details(&store).await;
    assert_eq!(written[3..5], ["unknown", "after"], "{written:?}");
    eventually("stalled connections to be closed", || async { store.audit_heads().await.ok() }).await;
    assert_eq!(verify(&store, &[]).await, []);
}

#[tokio::test]
async fn a_late_commit_breaks_nothing() {
    let (_database, proxy, store) = store_behind_proxy().await;
    proxy.stall(Silence::Both);
    assert!(matches!(note(&store, "late").await, Err(StoreError::Unreachable(_))));
    eventually("the store to write again", || async { note(&store, "after").await.ok() }).await;
    eventually("stalled connections to be closed", || async { store.audit_heads().await.ok() }).await;
    let before = kept(&store).await;
    timeout(EVENT_TIMEOUT, proxy.resume_and_drain()).await.unwrap();
    assert_eq!(verify(&store, &before).await, []);
    note(&store, "last").await.unwrap();
    assert_eq!(verify(&store, &before).await, []);
    assert_eq!(details(&store).await, ["before 0", "before 1", "before 2", "after", "last"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uses_during_a_database_outage_are_recorded_after_it() {
    let (_database, proxy, store) = store_behind_proxy().await;
    let dir = tempfile::tempdir().unwrap();
    let trail = AuditTrail::start(store.clone(), mark(&dir), EVENT_TIMEOUT);
    let used = |n: usize| AuditRecord { detail: Some(format!("use {n}")), ..audit("dataplane.used") };
    trail.add(used(0)).await;
    trail.flush().await;
    proxy.set_refusing(true);
    // More than one batch.
    for n in 1..600 {
        trail.add(used(n)).await;
    }
    // It was attempted several times.
    timeout(EVENT_TIMEOUT, proxy.wait_for_refused(3)).await.unwrap();
    eventually("what waits to be saved", || async { saved_gap(&dir).filter(|gap| gap.count == 599) }).await;
    proxy.set_refusing(false);
    timeout(EVENT_TIMEOUT, trail.flush()).await.unwrap();
    assert_eq!(saved_gap(&dir), None);
    let uses: Vec<String> = details(&store).await.into_iter().filter(|d| d.starts_with("use ")).collect();
    assert_eq!(uses, (0..600).map(|n| format!("use {n}")).collect::<Vec<_>>());
    assert_eq!(verify(&store, &[]).await, []);
}

fn mark(dir: &tempfile::TempDir) -> Arc<AuditMark> {
    Arc::new(AuditMark::new(dir.path()))
}

/// The gap that a broker leaves if it is killed now.
fn saved_gap(dir: &tempfile::TempDir) -> Option<AuditGap> {
    let text = std::fs::read(dir.path().join("audit-gap.json")).ok()?;
    Some(serde_json::from_slice(&text).unwrap())
}

/// A store on PostgreSQL whose audit table can be taken away.
async fn with_table() -> (TestDatabase, Arc<Store>) {
    let database = TestDatabase::new().await;
    let store = postgres::open(&database.secret_url()).await.unwrap();
    store.write_as("node_a");
    note(&store, "before").await.unwrap();
    (database, Arc::new(store))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audit_records_are_lost_after_the_time_for_retries() {
    let (database, store) = with_table().await;
    let dir = tempfile::tempdir().unwrap();
    let trail = AuditTrail::start(store.clone(), mark(&dir), Duration::from_millis(600));
    database.sql("ALTER TABLE audit RENAME TO away");
    trail.add(audit("dataplane.used")).await;
    trail.flush().await;
    assert_eq!(trail.lost(), 1);
    database.sql("ALTER TABLE away RENAME TO audit");
    trail.add(audit("dataplane.used")).await;
    trail.flush().await;
    let missing = Fault::Missing { writer: "node_a".into(), from: 2, to: 2 };
    assert_eq!(verify(&store, &[]).await, [missing]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audit_records_are_kept_as_long_as_the_queue_has_room_for_more() {
    const QUEUED: usize = 4096;
    let (database, store) = with_table().await;
    let dir = tempfile::tempdir().unwrap();
    // Longer than a test may take.
    let trail = AuditTrail::start(store.clone(), mark(&dir), 10 * EVENT_TIMEOUT);
    database.sql("ALTER TABLE audit RENAME TO away");
    for _ in 0..QUEUED {
        trail.add(audit("dataplane.used")).await;
    }
    assert_eq!(trail.lost(), 0);
    // The batch in hand and the queue are full.
    for _ in 0..QUEUED {
        timeout(EVENT_TIMEOUT, trail.add(audit("dataplane.used"))).await.expect("no request waits for long");
    }
    assert!(trail.lost() > 0, "the oldest records are dropped");
    database.sql("ALTER TABLE away RENAME TO audit");
    timeout(EVENT_TIMEOUT, trail.flush()).await.unwrap();
    assert!(trail.lost() < 2 * QUEUED as u64, "the other records are written");
    let next = &store.audit_links("node_a", 1, 1).await.unwrap()[0];
    assert_eq!((next.number, &*next.record.action), (2 + trail.lost(), "audit.lost"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_stops_during_an_outage_does_not_wait_for_its_end() {
    let (database, store) = with_table().await;
    let dir = tempfile::tempdir().unwrap();
    let trail = AuditTrail::start(store.clone(), mark(&dir), 10 * EVENT_TIMEOUT);
    database.sql("ALTER TABLE audit RENAME TO away");
    trail.add(audit("dataplane.used")).await;
    timeout(EVENT_TIMEOUT, trail.close()).await.unwrap();
    assert_eq!(trail.lost(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_gap_of_lost_records_survives_a_killed_process() {
    let (database, store) = with_table().await;
    let dir = tempfile::tempdir().unwrap();
    let trail = AuditTrail::start(store.clone(), mark(&dir), Duration::ZERO);
    database.sql("ALTER TABLE audit RENAME TO away");
    for _ in 0..3 {
        trail.add(audit("dataplane.used")).await;
    }
    trail.flush().await;
    database.sql("ALTER TABLE away RENAME TO audit");
    drop((trail, store));
    let missing = [Fault::Missing { writer: "node_a".into(), from: 2, to: 4 }];
    // After the second restart the next record has been written: the file, which nobody removed, means nothing.
    for detail in ["first", "second"] {
        let store = Arc::new(postgres::open(&database.secret_url()).await.unwrap());
        store.write_as("node_a");
        mark(&dir).restore_gap(&store, "node_a").await.unwrap();
        note(&store, detail).await.unwrap();
        assert_eq!(verify(&store, &[]).await, missing);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_that_wait_when_the_process_is_killed_leave_a_gap() {
    let (database, store) = with_table().await;
    let dir = tempfile::tempdir().unwrap();
    let process = tokio::runtime::Runtime::new().unwrap();
    let trail = {
        let _context = process.enter();
        // Retries for longer than a test may take.
        AuditTrail::start(store.clone(), mark(&dir), 10 * EVENT_TIMEOUT)
    };
    database.sql("ALTER TABLE audit RENAME TO away");
    for (added, waiting) in [(1, 1), (599, 600)] {
        for _ in 0..added {
            trail.add(audit("dataplane.used")).await;
        }
        eventually("what waits to be saved", || async { saved_gap(&dir).filter(|gap| gap.count == waiting) }).await;
    }
    tokio::task::spawn_blocking(move || process.shutdown_timeout(EVENT_TIMEOUT)).await.unwrap();
    database.sql("ALTER TABLE away RENAME TO audit");
    drop((trail, store));
    let store = Arc::new(postgres::open(&database.secret_url()).await.unwrap());
    store.write_as("node_a");
    mark(&dir).restore_gap(&store, "node_a").await.unwrap();
    let trail = AuditTrail::start(store.clone(), mark(&dir), EVENT_TIMEOUT);
    trail.add(audit("dataplane.used")).await;
    trail.flush().await;
    assert_eq!(verify(&store, &[]).await, [Fault::Missing { writer: "node_a".into(), from: 2, to: 601 }]);
    let explained = &store.audit_links("node_a", 1, 1).await.unwrap()[0].record;
    assert!(explained.action == "audit.lost" && explained.detail.as_deref().unwrap().starts_with("600 records"), "{explained:?}");
}

#[tokio::test]
async fn records_that_were_written_before_the_process_was_killed_are_not_missed() {
    let (_database, store) = with_table().await;
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("audit-gap.json"), r#"{"after": 1, "count": 10}"#).unwrap();
    for detail in ["a", "b", "c", "d"] {
        note(&store, detail).await.unwrap();
    }
    mark(&dir).restore_gap(&store, "node_a").await.unwrap();
    assert_eq!(store.audit_gap(), AuditGap { after: 5, count: 6 });
}
