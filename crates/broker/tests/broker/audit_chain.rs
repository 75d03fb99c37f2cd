//! Tests of the audit chains: every change to a record outside the broker is detected, and the broker itself never
//! breaks a chain.

use std::sync::Arc;

use crate::{
    harness::{Client, World},
    store_suite::{api_key, at, audit, ending},
};
use cobox_broker::{
    audit_hash::{Fault, KeptHead, Verifier, from_hex},
    domain::model::AuditRecord,
    store::{Note, RetentionLimits, Store, postgres, sqlite},
};
use cobox_protocol::{
    audit::{AuditHead, AuditLink},
    key::PrincipalKind,
};
use cobox_testkit::TestDatabase;
use proptest::prelude::*;
use serde_json::{Value, json};
use sqlx::{AnyConnection, AssertSqlSafe, Connection};

const RECORDS: u64 = 12;
const KEY: [u8; 32] = [5; 32];

/// Writes records in every supported way: in groups, alone, and together with other changes.
async fn fill(store: &Store) {
    store.write_as("node_a");
    for n in 0..RECORDS / 3 {
        let key = api_key(&format!("p{n}"), PrincipalKind::Human);
        store.add_key(&key, &audit("key.created")).await.unwrap();
        let mut record = AuditRecord { detail: Some(format!("number {n}")), ..audit("token.issued") };
        record.jti = Some(format!("tok_{n}"));
        let note = Note { audit: vec![record, audit("dataplane.used")], ..Note::default() };
        store.note(&note).await.unwrap();
    }
}

/// Verifies all chains as an operator of that workspace would.
pub async fn verify(store: &Store, kept: &[KeptHead]) -> Vec<Fault> {
    let mut faults = Vec::new();
    for head in store.audit_heads().await.unwrap() {
        let head = AuditHead {
            writer: head.writer,
            number: head.number,
            hash: hex::encode(head.hash),
            kept_after: head.kept_after,
            kept_after_hash: hex::encode(head.kept_after_hash),
            kept_after_sealed: head.is_beginning_sealed,
        };
        let mut verifier = Verifier::new(&head, kept);
        for link in store.audit_links(&head.writer, 0, 1000).await.unwrap() {
            let (workspace, entry) = (link.record.workspace.clone(), link.record.entry(link.sequence));
            let digest = hex::encode(cobox_broker::audit_hash::Content::of_entry(&workspace, &entry).digest());
            let writer = head.writer.clone();
            verifier.take(&AuditLink {
                writer,
                number: link.number,
                hash: hex::encode(link.hash),
                digest,
                workspace: Some(workspace),
                record: Some(entry),
            });
        }
        verifier.finish(&head);
        faults.extend(verifier.faults);
    }
    faults
}

pub async fn kept(store: &Store) -> Vec<KeptHead> {
    let heads = store.audit_heads().await.unwrap();
    heads.into_iter().map(|h| KeptHead { writer: h.writer, number: h.number, hash: h.hash }).collect()
}

/// Manipulations by someone with access to the database, with the record numbers of which verification must name one.
#[derive(Clone, Debug)]
enum Tampering {
    Alter(u64, &'static str),
    AlterHash(u64),
    Remove(u64),
    Swap(u64, u64),
    CutOff(u64),
    /// Removes the first records as if they had expired.
    Behead(u64),
    /// Inserts a row with the former mark of a record that waits to be linked.
    Smuggle,
}

impl Tampering {
    fn statements(&self) -> Vec<String> {
        match self {
            Tampering::Alter(n, column) if *column == "at" => vec![format!("UPDATE audit SET at = at + 1 WHERE number = {n}")],
            Tampering::Alter(n, column) => vec![format!("UPDATE audit SET {column} = coalesce({column}, '') || 'x' WHERE number = {n}")],
            Tampering::AlterHash(n) => {
                let other = if n % 2 == 0 {
                    "(SELECT hash FROM audit WHERE number = 1 LIMIT 1)"
                } else {
                    "(SELECT hash FROM audit_anchors LIMIT 1)"
                };
                vec![format!("UPDATE audit SET hash = {other} WHERE number = {n}")]
            }
            Tampering::Remove(n) => vec![format!("DELETE FROM audit WHERE number = {n}")],
            Tampering::Swap(a, b) => vec![
                format!("UPDATE audit SET number = -1 WHERE number = {a}"),
                format!("UPDATE audit SET number = {a} WHERE number = {b}"),
                format!("UPDATE audit SET number = {b} WHERE number = -1"),
            ],
            Tampering::CutOff(n) => vec![format!("DELETE FROM audit WHERE number > {n}")],
            Tampering::Behead(n) => vec![
                format!("UPDATE audit_anchors SET number = {n}, hash = (SELECT hash FROM audit WHERE number = {n})"),
                format!("DELETE FROM audit WHERE number <= {n}"),
            ],
            Tampering::Smuggle => vec!["INSERT INTO audit (at, workspace_id, action, writer) VALUES (1, 'w', 'smuggled', '')".to_owned()],
        }
    }

    fn matches_fault(&self, fault: &Fault) -> bool {
        match (self, fault) {
            (Tampering::Alter(n, _) | Tampering::AlterHash(n), Fault::Altered { number, .. }) => number == n,
            (Tampering::Remove(n), Fault::Missing { from, to, .. }) => from == n && to == n,
            (Tampering::Swap(a, b), Fault::Altered { number, .. }) => number == a || number == b,
            (Tampering::CutOff(n), Fault::CutOff { end, .. }) => end == n,
            (Tampering::Behead(n), Fault::Beheaded { number, .. }) => number == n,
            _ => false,
        }
    }
}

fn tampering() -> impl Strategy<Value = Tampering> {
    let number = || 1..=RECORDS;
    prop_oneof![
        (number(), prop::sample::select(vec!["at", "workspace_id", "action", "principal", "actor", "thread", "jti", "detail"]))
            .prop_map(|(n, column)| Tampering::Alter(n, column)),
        (2..=RECORDS).prop_map(Tampering::AlterHash),
        (1..RECORDS).prop_map(Tampering::Remove),
        (number(), number()).prop_filter("two different numbers", |(a, b)| a != b).prop_map(|(a, b)| Tampering::Swap(a, b)),
        (0..RECORDS).prop_map(Tampering::CutOff),
        number().prop_map(Tampering::Behead),
    ]
}

async fn tamper(url: &str, tampering: &Tampering) {
    let mut db = AnyConnection::connect(url).await.unwrap();
    for statement in tampering.statements() {
        sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut db).await.unwrap();
    }
    db.close().await.unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_change_to_an_audit_record_is_detected_and_named(tampering in tampering()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let faults = runtime.block_on(async {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("db");
            let store = sqlite::open(&path).await.unwrap();
            store.seal_with(KEY);
            fill(&store).await;
            let kept = kept(&store).await;
            assert_eq!(verify(&store, &kept).await, []);
            drop(store);
            tamper(&format!("sqlite://{}", path.display()), &tampering).await;
            // Opened again, because the broker that wrote it might have died since.
            let again = sqlite::open(&path).await.unwrap();
            again.seal_with(KEY);
            verify(&again, &kept).await
        });
        prop_assert!(faults.iter().any(|f| tampering.matches_fault(f)), "{tampering:?}: {faults:?}");
    }
}

#[tokio::test]
async fn on_postgres_changes_are_detected_and_a_running_broker_notices_a_truncated_chain() {
    for tampering in [
        Tampering::Alter(3, "detail"),
        Tampering::AlterHash(6),
        Tampering::Remove(5),
        Tampering::Swap(2, 9),
        Tampering::CutOff(10),
        Tampering::Behead(4),
    ] {
        let database = TestDatabase::new().await;
        let store = postgres::open(&database.secret_url()).await.unwrap();
        store.seal_with(KEY);
        fill(&store).await;
        let kept = kept(&store).await;
        assert_eq!(verify(&store, &kept).await, []);
        tampering.statements().iter().for_each(|s| drop(database.sql(s)));
        let faults = verify(&store, &kept).await;
        assert!(faults.iter().any(|f| tampering.matches_fault(f)), "{tampering:?}: {faults:?}");
        if matches!(tampering, Tampering::CutOff(_)) {
            assert!(verify(&store, &[]).await.iter().any(|f| matches!(f, Fault::Missing { from: 11, to: 12, .. })));
        }
    }
}

#[tokio::test]
async fn old_records_are_removed_from_the_beginning_and_the_rest_stays_verifiable() {
    let dir = tempfile::tempdir().unwrap();
    let sqlite: Arc<Store> = Arc::new(sqlite::open(&dir.path().join("db")).await.unwrap());
    let database = TestDatabase::new().await;
    let postgres: Arc<Store> = Arc::new(postgres::open(&database.secret_url()).await.unwrap());
    for store in [sqlite, postgres] {
        store.write_as("node_a");
        store.seal_with(KEY);
        let all_kept = kept(&store).await;
        // One record claims an impossibly old time: it stays between its neighbors.
        for (n, time) in [10, 20, 1, 30, 40].into_iter().enumerate() {
            let record = AuditRecord { at: at(time), detail: Some(n.to_string()), ..audit("x") };
            store.note(&Note { audit: vec![record], ..Note::default() }).await.unwrap();
        }
        let prune = async |before| {
            let horizon = RetentionLimits { now: at(0), idempotency_before: at(0), ended_before: at(0), audit_before: at(before) };
            store.prune(&horizon).await.unwrap();
            store.audit_links("node_a", 0, 100).await.unwrap().iter().map(|l| l.number).collect::<Vec<_>>()
        };
        let early = kept(&store).await;
        assert_eq!(prune(5).await, [1, 2, 3, 4, 5]);
        assert_eq!(prune(15).await, [2, 3, 4, 5]);
        assert_eq!(verify(&store, &early).await, []);
        assert_eq!(prune(25).await, [4, 5]);
        assert_eq!(verify(&store, &all_kept).await, []);
        assert_eq!(prune(100).await, [0u64; 0]);
        store.note(&Note { audit: vec![AuditRecord { at: at(200), ..audit("y") }], ..Note::default() }).await.unwrap();
        assert_eq!(prune(100).await, [6]);
        assert_eq!(verify(&store, &early).await, []);
        // The record of a revoked key is also linked.
        let key = api_key("p", PrincipalKind::Human);
        store.add_key(&key, &AuditRecord { at: at(300), ..audit("key.created") }).await.unwrap();
        store.revoke_key(&key.id, &ending(300)).await.unwrap();
        assert_eq!(verify(&store, &early).await, []);
        assert_eq!(kept(&store).await[0].number, 8);
    }
}

#[tokio::test]
async fn a_record_inserted_into_the_database_is_not_linked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let store = sqlite::open(&path).await.unwrap();
    fill(&store).await;
    tamper(&format!("sqlite://{}", path.display()), &Tampering::Smuggle).await;
    store.add_key(&api_key("late", PrincipalKind::Human), &audit("key.created")).await.unwrap();
    let links = store.audit_links("node_a", 0, 100).await.unwrap();
    assert_eq!(links.len() as u64, RECORDS + 1);
    assert!(links.iter().all(|l| l.record.action != "smuggled"));
    assert_eq!(verify(&store, &[]).await, []);
}

#[tokio::test]
async fn a_new_master_key_signs_only_what_the_old_one_signed() {
    for is_ours in [true, false] {
        let world = World::new();
        let broker = world.start().await;
        let (ann, op) = (broker.human("ann").await, broker.key("op", PrincipalKind::Operator).await);
        ann.ensure("t").await;
        let store = broker.broker.as_ref().unwrap().store().clone();
        let now = cobox_broker::Clock::now(&*world.clock);
        if is_ours {
            world.clock.advance(10);
            ann.ensure("t").await;
            let audit_before = now.plus(std::time::Duration::from_secs(5));
            let horizon = RetentionLimits { now: at(0), idempotency_before: at(0), ended_before: at(0), audit_before };
            // The broker may be pruning at the same moment; then this call removes nothing yet.
            crate::harness::eventually("removal of old records", async || {
                store.prune(&horizon).await.unwrap();
                store.audit_heads().await.unwrap()[0].kept_after > 0
            })
            .await;
        } else {
            let config = world.whole_config().await;
            let url =
                config.database_url.map_or_else(|| format!("sqlite://{}/broker.db", config.data_dir.display()), |u| u.expose().to_owned());
            tamper(&url, &Tampering::Behead(1)).await;
        }
        let is_beheaded = |faults: &[Fault]| faults.iter().any(|f| matches!(f, Fault::Beheaded { .. }));
        let (head, _, faults) = chains(&op).await.remove(0);
        assert!(head.kept_after > 0);
        assert_eq!(is_beheaded(&faults), !is_ours, "{faults:?}");
        broker.kill().await;
        let rotation = cobox_broker::MasterKeyRotation { is_immediate: true, is_lost: false };
        cobox_broker::rotate_master_key(&world.whole_config().await, rotation).await.unwrap();
        let again = world.start().await;
        let (_, _, faults) = chains(&op.at(&again)).await.remove(0);
        assert_eq!(is_beheaded(&faults), !is_ours, "{faults:?}");
    }
}

/// Every chain as an operator sees it over HTTP, with its faults.
pub async fn chains(operator: &Client) -> Vec<(AuditHead, Vec<AuditLink>, Vec<Fault>)> {
    let heads: Vec<AuditHead> = serde_json::from_value(operator.get("/v1/audit/heads").await.ok(200)["items"].clone()).unwrap();
    let mut chains = Vec::new();
    for head in heads {
        let (mut verifier, mut all) = (Verifier::new(&head, &[]), Vec::new());
        loop {
            let path = format!("/v1/audit/links?writer={}&after={}&limit=7", head.writer, verifier.last());
            let page: Vec<AuditLink> = serde_json::from_value(operator.get(&path).await.ok(200)["items"].clone()).unwrap();
            if page.is_empty() || verifier.last() >= head.number {
                break;
            }
            page.iter().filter(|l| l.number <= head.number).for_each(|l| verifier.take(l));
            all.extend(page);
        }
        verifier.finish(&head);
        chains.push((head, all, verifier.faults));
    }
    chains
}

#[tokio::test]
async fn three_brokers_write_three_chains_and_operators_see_only_their_workspace() {
    let database = TestDatabase::new().await;
    let worlds = World::cluster(&database, 3);
    let mut brokers = Vec::new();
    for world in &worlds {
        brokers.push(world.start().await);
    }
    let (ann, op) = (brokers[0].human("ann").await, brokers[0].key("op", PrincipalKind::Operator).await);
    let eve = brokers[0].stranger().await;
    let work = (0..24).map(|n| {
        let (ann, eve) = (ann.at(&brokers[n % 3]), eve.at(&brokers[n % 3]));
        async move {
            ann.ensure(&format!("t{}", n / 3)).await;
            eve.ensure(&format!("e{}", n / 3)).await;
        }
    });
    futures_util::future::join_all(work).await;
    let reported = chains(&op).await;
    assert_eq!(reported.len(), 3);
    for (head, links, faults) in &reported {
        assert_eq!(*faults, []);
        assert!(head.number >= 8, "{head:?}");
        let sealed = links.iter().filter(|l| l.record.is_none()).count();
        assert!(sealed > 0 && sealed < links.len(), "records of another workspace contain only hashes");
        assert!(links.iter().all(|l| from_hex(&l.hash).is_some() && l.workspace.as_deref().is_none_or(|w| w == "default")));
    }
    assert_eq!(ann.get("/v1/audit/heads").await.error(403), "FORBIDDEN");
    assert_eq!(ann.get("/v1/audit/links?writer=x").await.error(403), "FORBIDDEN");
    assert_eq!(op.get("/v1/audit/links").await.error(400), "INVALID_REQUEST");
    // A restarted broker continues its chain.
    let restarted = brokers.remove(1);
    restarted.kill().await;
    let again = worlds[1].start().await;
    ann.at(&again).ensure("t0").await;
    let reported = chains(&op).await;
    assert!(
        reported.len() == 3 && reported.iter().all(|(_, _, faults)| faults.is_empty()),
        "{:?}",
        reported.iter().map(|t| &t.2).collect::<Vec<_>>()
    );
}

#[tokio::test]
async fn uses_of_a_token_are_found_by_its_id() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, op) = (broker.human("ann").await, broker.key("op", PrincipalKind::Operator).await);
    let session = ann.ensure("t").await;
    ann.ensure("t").await;
    let jti = crate::harness::claims(session["token"].as_str().unwrap())["jti"].clone();
    ann.with(&session["token"]).get(&format!("/dp/{}/v1/x", session["sandbox"]["id"].as_str().unwrap())).await;
    let actions = async || {
        let found = op.get(&format!("/v1/audit?token={}", jti.as_str().unwrap())).await.ok(200);
        found["items"].as_array().unwrap().iter().map(|e| e["action"].clone()).collect::<Vec<Value>>()
    };
    // The use is recorded after the response.
    crate::harness::eventually("the audit record of the use", || async { actions().await.len() == 2 }).await;
    assert_eq!(actions().await, [json!("dataplane.used"), json!("token.issued")]);
    assert_eq!(op.get("/v1/audit?token=a&sandbox=b").await.error(400), "INVALID_REQUEST");
}

#[tokio::test]
async fn a_restarted_broker_keeps_and_explains_the_gap_of_lost_records() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, op) = (broker.human("ann").await, broker.key("op", PrincipalKind::Operator).await);
    let made = ann.ensure("t").await;
    broker.broker.as_ref().unwrap().store().skip_audit(3);
    broker.tick().await;
    let file = world.config.data_dir.join("audit-gap.json");
    assert!(file.exists());
    broker.kill().await;
    let broker = world.start().await;
    let (ann, op) = (ann.at(&broker), op.at(&broker));
    ann.with(&made["token"]).get(&format!("/dp/{}/v1/x", made["sandbox"]["id"].as_str().unwrap())).await;
    let explained = || async {
        let items = op.get("/v1/audit").await.ok(200)["items"].clone();
        items.as_array().unwrap().iter().any(|e| e["action"] == "audit.lost" && e["detail"].as_str().unwrap().starts_with("3 records"))
    };
    crate::harness::eventually("the record that explains the gap", explained).await;
    let faults = chains(&op).await.remove(0).2;
    assert!(matches!(faults[..], [Fault::Missing { from, to, .. }] if to - from == 2), "{faults:?}");
    broker.tick().await;
    assert!(!file.exists());
}

#[tokio::test]
async fn unwritten_records_leave_a_detectable_gap() {
    let dir = tempfile::tempdir().unwrap();
    let store = sqlite::open(&dir.path().join("db")).await.unwrap();
    fill(&store).await;
    store.skip_audit(2);
    store.skip_audit(1);
    store.note(&Note { audit: vec![audit("audit.lost")], ..Note::default() }).await.unwrap();
    store.add_key(&api_key("after", PrincipalKind::Human), &audit("key.created")).await.unwrap();
    let missing = Fault::Missing { writer: "node_a".into(), from: RECORDS + 1, to: RECORDS + 3 };
    assert_eq!(verify(&store, &[]).await, [missing]);
}
