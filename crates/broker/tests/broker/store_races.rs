//! Tests of operations whose outcome must not depend on concurrency, through one or several brokers' stores.

use std::collections::HashSet;

use cobox_broker::store::{AddedSandbox, EnsureParams, Ensured, Note, PageParams, RetentionLimits, RevokedKey, Store, postgres, sqlite};
use cobox_protocol::{control::Revocation, key::PrincipalKind, session::State};
use cobox_testkit::TestDatabase;
use futures_util::future::join_all;

use crate::store_suite::{WORKSPACE, api_key, at, audit, ending, ensure_params, quota, sandbox};

const RACERS: usize = 64;
const ROUNDS: usize = 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn races_on_sqlite_have_one_outcome() {
    let dir = tempfile::tempdir().unwrap();
    run(&[sqlite::open(&dir.path().join("broker.db")).await.unwrap()]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn races_of_three_brokers_on_postgres_have_one_outcome() {
    let database = TestDatabase::new().await;
    let url = database.secret_url();
    // Opened concurrently, so that they also race to create the tables.
    let stores = join_all((0..3).map(|_| postgres::open(&url))).await;
    run(&stores.into_iter().map(Result::unwrap).collect::<Vec<_>>()).await;
}

async fn run(stores: &[Store]) {
    stores[0].add_key(&api_key("ann", PrincipalKind::Human), &audit("key.created")).await.unwrap();
    ensures_of_one_scope_agree(stores).await;
    one_of_many_ends_a_session(stores).await;
    an_end_wins_over_what_was_under_way(stores).await;
    a_name_is_given_once(stores).await;
    every_revocation_changes_the_sequence(stores).await;
    a_quota_is_never_passed(stores).await;
    every_note_is_kept(stores).await;
}

/// The store of the nth racer.
fn store_of(stores: &[Store], n: usize) -> &Store {
    &stores[n % stores.len()]
}

async fn ensures_of_one_scope_agree(stores: &[Store]) {
    for round in 0..ROUNDS {
        let ensures: Vec<EnsureParams> = (0..RACERS).map(|_| ensure_params(&format!("race {round}"))).collect();
        let outcomes = join_all(ensures.iter().enumerate().map(|(n, w)| store_of(stores, n).ensure(w))).await;
        let mut ids = HashSet::new();
        let mut created = 0;
        for outcome in outcomes {
            match outcome.unwrap() {
                Ensured::Created(b) => {
                    created += 1;
                    ids.insert((b.session.id, b.sandbox.id));
                }
                Ensured::Existing(b) => {
                    ids.insert((b.session.id, b.sandbox.id));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((created, ids.len()), (1, 1));
    }
}

async fn one_of_many_ends_a_session(stores: &[Store]) {
    for round in 0..ROUNDS {
        let ensure_params = ensure_params(&format!("end {round}"));
        stores[0].ensure(&ensure_params).await.unwrap();
        let ending = ending(1);
        let ends = join_all((0..8).map(|n| store_of(stores, n).end_session(&ensure_params.fresh.session.id, &ending))).await;
        assert_eq!(ends.into_iter().filter(|e| e.as_ref().unwrap().is_some()).count(), 1);
    }
}

async fn an_end_wins_over_what_was_under_way(stores: &[Store]) {
    for round in 0..ROUNDS {
        let ensure_params = ensure_params(&format!("started {round}"));
        stores[0].ensure(&ensure_params).await.unwrap();
        let begun = &ensure_params.fresh.sandbox;
        let (started, ending) = (begun.started(at(1)), ending(2));
        let (started, ended) = tokio::join!(
            store_of(stores, 1).replace_sandbox(begun, &started, None),
            store_of(stores, 2).end_session(&ensure_params.fresh.session.id, &ending)
        );
        started.unwrap();
        assert!(ended.unwrap().is_some());
        assert_eq!(stores[0].sandbox(&begun.id).await.unwrap().unwrap().state, State::Terminated);
    }
}

async fn a_name_is_given_once(stores: &[Store]) {
    let sandboxes: Vec<_> = (0..RACERS).map(|_| sandbox(Some("wanted"))).collect();
    let audit = audit("sandbox.created");
    let none = cobox_protocol::tags::Tags::new();
    let many = quota(10_000);
    let added = join_all(sandboxes.iter().enumerate().map(|(n, s)| store_of(stores, n).add_sandbox(s, &none, &many, &audit))).await;
    assert_eq!(added.into_iter().filter(|a| *a.as_ref().unwrap() == AddedSandbox::Added).count(), 1);
}

/// A broker that pushed all revocations up to a sequence must see a different sequence when there are more.
async fn every_revocation_changes_the_sequence(stores: &[Store]) {
    let looker = sandbox(None);
    let keys: Vec<_> = (0..RACERS).map(|n| api_key(&format!("bot {n}"), PrincipalKind::Agent)).collect();
    for key in &keys {
        stores[0].add_key(key, &audit("key.created")).await.unwrap();
    }
    let is_done = std::sync::atomic::AtomicBool::new(false);
    let looking = async {
        let mut seen: (u64, Vec<Revocation>) = Default::default();
        while !is_done.load(std::sync::atomic::Ordering::SeqCst) {
            let view = store_of(stores, 1).revocations(&looker, at(3)).await.unwrap();
            assert!(view.list == seen.1 || view.sequence > seen.0, "the list grew at the same sequence {}", seen.0);
            seen = (view.sequence, view.list.clone());
            // Cached reads return immediately, and the other tasks need a turn.
            tokio::task::yield_now().await;
        }
    };
    let ending = ending(2);
    let revoking = async {
        let revoked = join_all(keys.iter().enumerate().map(|(n, key)| store_of(stores, n).revoke_key(&key.id, &ending))).await;
        assert!(revoked.into_iter().all(|r| matches!(r.unwrap(), RevokedKey::Revoked(_))));
        is_done.store(true, std::sync::atomic::Ordering::SeqCst);
    };
    tokio::join!(looking, revoking);
    assert_eq!(stores[0].revocations(&looker, at(3)).await.unwrap().list.len(), RACERS);
}

async fn a_quota_is_never_passed(stores: &[Store]) {
    let living = stores[0].sandboxes_of_node(crate::store_suite::NODE).await.unwrap().into_iter().filter(|s| s.ended_at.is_none()).count();
    let most = u32::try_from(living).unwrap() + 5;
    let ensures: Vec<_> = (0..RACERS).map(|n| EnsureParams { quota: quota(most), ..ensure_params(&format!("quota {n}")) }).collect();
    let outcomes = join_all(ensures.iter().enumerate().map(|(n, w)| store_of(stores, n).ensure(w))).await;
    let count = |is: fn(&Ensured) -> bool| outcomes.iter().filter(|o| is(o.as_ref().unwrap())).count();
    assert_eq!(count(|o| matches!(o, Ensured::Created(_))), 5);
    assert_eq!(count(|o| matches!(o, Ensured::QuotaReached(_))), RACERS - 5);
    assert!(stores[0].session_of(WORKSPACE, "thread", "nobody's").await.unwrap().is_none());
}

async fn every_note_is_kept(stores: &[Store]) {
    let ensures: Vec<_> = (0..8).map(|n| EnsureParams { quota: quota(10_000), ..ensure_params(&format!("noted {n}")) }).collect();
    for ensure_params in &ensures {
        stores[0].ensure(ensure_params).await.unwrap();
    }
    let horizon = RetentionLimits { now: at(0), idempotency_before: at(0), ended_before: at(0), audit_before: at(1_000_000) };
    stores[0].prune(&horizon).await.unwrap();
    let notes: Vec<_> = (0..500)
        .map(|n: usize| {
            // Each updates several sandboxes in a different order: no deadlock may result.
            let mut sandboxes: Vec<_> = ensures.iter().map(|w| (w.fresh.sandbox.id.clone(), at(n as i64 % 7))).collect();
            sandboxes.rotate_left(n % 8);
            Note { sandboxes, audit: vec![audit("token.issued").detail(n.to_string())], ..Note::default() }
        })
        .collect();
    let written = join_all(notes.iter().enumerate().map(|(n, note)| store_of(stores, n).note(note))).await;
    assert!(written.iter().all(Result::is_ok), "{written:?}");
    let kept = stores[0].audit(WORKSPACE, None, &PageParams { before: None, limit: 1000 }).await.unwrap();
    let kept: HashSet<_> = kept.into_iter().map(|(_, record)| record.detail.unwrap()).collect();
    assert_eq!(kept.len(), 500);
    for ensure_params in &ensures {
        assert_eq!(stores[0].sandbox(&ensure_params.fresh.sandbox.id).await.unwrap().unwrap().last_active_at, at(6));
    }
}

#[tokio::test]
async fn a_refused_note_does_not_affect_others() {
    let database = TestDatabase::new().await;
    let store = postgres::open(&database.secret_url()).await.unwrap();
    // PostgreSQL text can't contain this character.
    let notes = ["a", "b\0", "c", "d"].map(|detail| Note { audit: vec![audit("token.issued").detail(detail)], ..Note::default() });
    let written = join_all(notes.iter().map(|note| store.note(note))).await;
    assert_eq!(written.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true, true]);
    assert_eq!(store.audit(WORKSPACE, None, &PageParams { before: None, limit: 10 }).await.unwrap().len(), 3);
}
