//! Tests with a database that is stopped, silent, full or read-only: every route answers `503` with a retry time, the
//! log contains the cause, metrics stay available, and the broker recovers by itself when the database returns.

use cobox_protocol::key::PrincipalKind;
use cobox_testkit::{Silence, SmallDisk, StallingProxy, TestDatabase};
use serde_json::json;
use sqlx::{AnyConnection, Connection};

use crate::{
    harness::{Answer, Client, World, eventually, sandbox_id, session_path},
    log_capture::Log,
    openapi::operations,
};

/// Routes that work without the database.
const WITHOUT_STORE: [(&str, u16); 4] = [("/healthz", 200), ("/openapi.json", 200), ("/metrics", 200), ("/webhooks/threads", 404)];

fn text(answer: &Answer) -> String {
    String::from_utf8_lossy(&answer.bytes).into_owned()
}

/// Whether a response is the refusal that an outage must give.
fn is_unavailable(answer: &Answer) -> bool {
    answer.status == 503 && answer.headers.contains_key("retry-after")
}

fn cluster_of_one(database: &TestDatabase) -> World {
    let mut world = World::cluster(database, 1).pop().unwrap();
    world.config.metrics.public = true;
    world
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_route_answers_503_while_the_database_is_stopped_and_the_log_has_the_cause() {
    let log = Log::capture();
    let database = TestDatabase::on_own_server().await;
    let world = cluster_of_one(&database);
    let broker = world.start().await;
    let (ann, root) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await);
    let made = ann.ensure("t").await;
    database.stop_server().await;

    for (method, path) in operations() {
        let answer = root.call(method.clone(), &path, Some(json!({})), &[]).await;
        if let Some((_, status)) = WITHOUT_STORE.iter().find(|(known, _)| *known == path) {
            assert_eq!(answer.status, *status, "{method} {path}: {}", text(&answer));
            continue;
        }
        assert!(is_unavailable(&answer), "{method} {path}: {} {}", answer.status, text(&answer));
        assert!(!text(&answer).contains("PGSQL"), "the cause must appear only in the log: {}", text(&answer));
        if path == "/readyz" {
            assert_eq!(answer.json()["error"]["details"]["causes"], json!({ "store": "unreachable" }), "{}", text(&answer));
            continue;
        }
        let line = log.request(answer.headers["x-request-id"].to_str().unwrap());
        assert_eq!(line["level"], "ERROR", "{line}");
        assert!(line["cause"].as_str().is_some_and(|cause| cause.contains("database")), "{line}");
    }
    // A token of a running sandbox, at the gateway.
    let used = ann.with(&made["token"]).get(&format!("/dp/{}/v1/hello", sandbox_id(&made))).await;
    assert!(is_unavailable(&used), "{}", text(&used));
    let metrics = ann.get("/metrics").await;
    assert!(text(&metrics).contains("\ncobox_store_up 0\n"), "{}", text(&metrics));

    database.start_server().await;
    let path = session_path(&made);
    eventually("the session to be readable again", || async { ann.get(&path).await.status == 200 }).await;
    assert_eq!(ann.ensure("t").await["session_id"], made["session_id"]);
    // The last check of the database is cached for a moment.
    eventually("the metrics to show it", || async { text(&ann.get("/metrics").await).contains("\ncobox_store_up 1\n") }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recently_accepted_operator_key_reads_the_metrics_during_an_outage() {
    let database = TestDatabase::on_own_server().await;
    let world = World::cluster(&database, 1).pop().unwrap();
    let broker = world.start().await;
    let key = async |name: &str| broker.key(name, PrincipalKind::Operator).await;
    let (ann, root, other) = (broker.human("ann").await, key("root").await, key("other").await);
    assert_eq!(root.get("/metrics").await.status, 200);
    assert_eq!(ann.get("/metrics").await.error(403), "FORBIDDEN");
    database.stop_server().await;
    let metrics = root.get("/metrics").await;
    assert!(metrics.status == 200 && text(&metrics).contains("\ncobox_store_up 0\n"), "{}", text(&metrics));
    for refused in [ann.get("/metrics").await, other.get("/metrics").await, root.get("/v1/keys").await] {
        assert!(is_unavailable(&refused), "{} {}", refused.status, text(&refused));
    }

    database.start_server().await;
    eventually("the database to be back", || async { other.get("/v1/keys").await.status == 200 }).await;
    let keys = other.get("/v1/keys").await.ok(200);
    let of_root = keys["items"].as_array().unwrap().iter().find(|k| k["name"] == "root").unwrap();
    let path = format!("/v1/keys/{}", of_root["id"].as_str().unwrap());
    // A connection from before the outage may fail once more.
    eventually("revocation of the key", || async { [204, 404].contains(&other.delete(&path).await.status.as_u16()) }).await;
    assert_eq!(root.get("/metrics").await.error(401), "UNAUTHENTICATED");
    database.stop_server().await;
    assert!(is_unavailable(&root.get("/metrics").await), "a revoked key is not accepted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_metrics_are_answered_while_the_database_is_silent() {
    let database = TestDatabase::new().await;
    let proxy = StallingProxy::in_front_of(&database.socket()).await;
    let mut world = cluster_of_one(&database);
    world.config.database_url = Some(database.secret_url_at(proxy.address()));
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    ann.ensure("t").await;
    proxy.stall(Silence::Everything);
    let anyone = Client { key: None, ..ann.clone() };
    // Sequential scrapes: none of them waits until a request that needs the database times out.
    let scrapes = async {
        for _ in 0..3 {
            let metrics = anyone.get("/metrics").await;
            assert_eq!(metrics.status, 200);
            assert!(text(&metrics).contains("\ncobox_store_up 0\n"), "{}", text(&metrics));
        }
    };
    let path = "/v1/sandbox/sessions";
    let requests = futures_util::future::join_all((0..16).map(|_| ann.get(path)));
    tokio::select! {
        () = scrapes => {}
        answers = requests => panic!("the database answered: {:?}", answers.iter().map(|a| a.status).collect::<Vec<_>>()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_metrics_are_answered_in_time_and_with_counts_while_the_database_takes_no_writes() {
    let database = TestDatabase::new().await;
    let world = cluster_of_one(&database);
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    ann.ensure("t").await;
    let mut locking = AnyConnection::connect(database.secret_url().expose()).await.unwrap();
    sqlx::raw_sql("BEGIN; LOCK TABLE agreed IN EXCLUSIVE MODE").execute(&mut locking).await.unwrap();
    tokio::select! {
        biased;
        // A check waits for the write twice as long as a scrape may take.
        ready = ann.get("/readyz") => panic!("the check ended first: {}", text(&ready)),
        metrics = ann.get("/metrics") => {
            for line in ["cobox_store_up 0", "cobox_sessions 1"] {
                assert!(text(&metrics).lines().any(|l| l == line), "{line}\n{}", text(&metrics));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_a_restore_has_not_made_yet_is_503() {
    let database = TestDatabase::new().await;
    let world = cluster_of_one(&database);
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    database.sql("ALTER TABLE sessions RENAME TO away");
    let ensure = async || ann.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "ensure" })).await;
    let refused = ensure().await;
    assert!(is_unavailable(&refused), "{} {}", refused.status, text(&refused));
    database.sql("ALTER TABLE away RENAME TO sessions");
    eventually("the session is made", async || ensure().await.status == 200).await;
}

/// These tests mount a filesystem, which requires root.
mod full_disk {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn writes_are_503_until_there_is_room() {
        let disk = SmallDisk::mount();
        let mut world = World::with_sqlite();
        world.config.data_dir = disk.path().join("data");
        world.config.metrics.public = true;
        let broker = world.start().await;
        let ann = broker.human("ann").await;
        let made = ann.ensure("t").await;
        disk.fill();
        // The first writes may still find space.
        let refused = async || {
            let answer = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "ensure" })).await;
            assert!(answer.status == 200 || is_unavailable(&answer), "{} {}", answer.status, text(&answer));
            answer.status == 503
        };
        eventually("the disk to be full", refused).await;
        assert_eq!(ann.get("/metrics").await.status, 200);
        disk.free_space();
        eventually("free disk space", || async { ann.get(&session_path(&made)).await.status == 200 }).await;
        assert_eq!(ann.ensure("t").await["session_id"], made["session_id"]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_filesystem_that_turned_read_only_is_503() {
        let disk = SmallDisk::mount();
        let mut world = World::with_sqlite();
        world.config.data_dir = disk.path().join("data");
        let broker = world.start().await;
        let ann = broker.human("ann").await;
        ann.ensure("t").await;
        disk.turn_read_only();
        for thread in ["t", "another"] {
            let answer = ann.post("/v1/sandbox/sessions", json!({ "thread_id": thread, "mode": "ensure" })).await;
            assert!(is_unavailable(&answer), "{} {}", answer.status, text(&answer));
        }
    }
}
