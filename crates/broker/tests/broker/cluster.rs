//! Tests with several brokers on one PostgreSQL: each answers for every session, and only a sandbox's own node acts on
//! it.

use std::{collections::HashSet, sync::atomic::Ordering};

use cobox_broker::Broker;
use cobox_protocol::{control::Revocation, key::PrincipalKind};
use cobox_testkit::{DATABASE_PASSWORD, TestDatabase};
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::{
    harness::{Client, TestBroker, World, eventually, sandbox_id, session_path},
    log_capture::Log,
};

/// In total longer than a broker may be silent and count as alive, in steps shorter than a heartbeat interval.
const SILENCE_STEPS: usize = 10;
const SILENCE_STEP: i64 = 3;

/// Lets time pass while one broker runs its ticks and the others continue by themselves.
async fn silence(world: &World, looking: &TestBroker) {
    for _ in 0..SILENCE_STEPS {
        world.clock.advance(SILENCE_STEP);
        looking.tick().await;
    }
}

async fn two_brokers() -> (TestDatabase, Vec<World>, TestBroker, TestBroker) {
    let database = TestDatabase::new().await;
    let worlds = World::cluster(&database, 2);
    let (a, b) = (worlds[0].start().await, worlds[1].start().await);
    (database, worlds, a, b)
}

async fn ensure_without_waiting(client: &Client, thread: &str) -> crate::harness::Answer {
    let body = json!({ "thread_id": thread, "mode": "ensure" });
    client.call(http::Method::POST, "/v1/sandbox/sessions", Some(body), &[("prefer", "wait=0")]).await
}

#[tokio::test]
async fn files_of_a_remote_sandbox_are_not_counted_and_the_response_has_the_reason() {
    let (_database, _worlds, a, b) = two_brokers().await;
    let ann = a.human("ann").await;
    let path = format!("/v1/sandboxes/{}/usage", sandbox_id(&ann.ensure("t").await));
    let here = ann.get(&path).await.ok(200);
    assert_eq!((&here["files"], here.get("uncounted")), (&json!(3), None));
    let there = ann.at(&b).get(&path).await.ok(200);
    assert_eq!((&there["files"], &there["uncounted"]), (&json!(null), &json!("other_node")));
}

#[tokio::test]
async fn every_broker_answers_for_every_session_and_names_its_node() {
    let (_database, worlds, a, b) = two_brokers().await;
    let ann = a.human("ann").await;
    let made = ann.ensure("t").await;
    let there = ann.at(&b);
    let found = there.ensure("t").await;
    assert_eq!((&found["session_id"], &found["sandbox"]), (&made["session_id"], &made["sandbox"]));
    assert!(found["dataplane"]["http_base_url"].as_str().unwrap().starts_with(&format!("http://{}/dp/", a.addr)));
    assert_eq!(there.get(&session_path(&made)).await.ok(200)["sandbox"], made["sandbox"]);
    // A token issued by one broker is valid at a sandbox of the other.
    let refreshed = there.post(&format!("{}/refresh", session_path(&made)), json!({ "current_token": made["token"] })).await.ok(200);
    let dataplane_path = format!("/dp/{}/v1/hello", sandbox_id(&made));
    assert_eq!(ann.with(&refreshed["token"]).get(&dataplane_path).await.status, 200);
    // The gateway of the other broker returns the URL of the right node.
    let lost = there.with(&refreshed["token"]).get(&dataplane_path).await;
    let url = lost.json()["error"]["details"]["http_base_url"].clone();
    assert_eq!(lost.error(503), "PROVIDER_UNAVAILABLE");
    assert_eq!(url, made["dataplane"]["http_base_url"]);
    assert_eq!(worlds[1].provider.starts.load(Ordering::SeqCst), 0);

    assert_eq!(there.delete(&session_path(&made)).await.status, 204);
    assert_eq!(ann.get(&session_path(&made)).await.error(410), "SESSION_EXPIRED");
    eventually("its own node to destroy the sandbox", || async { worlds[0].provider.running() == 0 }).await;
}

#[tokio::test]
async fn a_suspended_sandbox_is_resumed_by_its_own_node() {
    let (_database, worlds, a, b) = two_brokers().await;
    let ann = a.human("ann").await;
    let made = ann.ensure("t").await;
    let there = ann.at(&b);
    worlds[0].clock.advance(3600);
    a.tick().await;
    b.tick().await;
    assert_eq!(there.state(&sandbox_id(&made)).await, "suspended");
    assert_eq!(worlds[0].provider.running(), 0);
    worlds[0].provider.may_start.send_replace(false);
    assert_eq!(ensure_without_waiting(&there, "t").await.error(423), "SANDBOX_STARTING");
    eventually("an attempt of the other node", || async { worlds[0].provider.starts.load(Ordering::SeqCst) == 2 }).await;
    worlds[0].provider.may_start.send_replace(true);
    assert_eq!(there.ensure("t").await["session_id"], made["session_id"]);
    assert_eq!((worlds[0].provider.running(), worlds[1].provider.running()), (1, 0));

    // If waking fails, the error gives the reason and permits a retry.
    worlds[0].provider.kill(&sandbox_id(&made));
    eventually("the suspension", || async { there.state(&sandbox_id(&made)).await == "suspended" }).await;
    worlds[0].provider.failing_starts.store(1, Ordering::SeqCst);
    let refused = there.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "ensure" })).await;
    assert!(refused.json()["error"]["message"].as_str().unwrap().contains("set to fail"));
    assert_eq!(refused.error(503), "PROVIDER_UNAVAILABLE");
    assert_eq!(there.ensure("t").await["session_id"], made["session_id"]);
}

#[tokio::test]
async fn a_revocation_at_one_broker_reaches_the_sandboxes_of_another() {
    let (_database, worlds, a, b) = two_brokers().await;
    let (ann, root) = (a.human("ann").await, b.key("root", PrincipalKind::Operator).await);
    let made = ann.ensure("t").await;
    let bot = root.post("/v1/keys", json!({ "name": "bot", "kind": "agent" })).await.ok(201);
    let bot_id = bot["id"].as_str().unwrap().to_owned();
    assert_eq!(root.delete(&format!("/v1/keys/{bot_id}")).await.status, 204);
    let boxd = worlds[0].provider.boxd(&sandbox_id(&made));
    eventually("the push of the revocation to boxd", || async {
        boxd.state.lock().unwrap().revoked.contains(&Revocation::Grant(bot_id.clone()))
    })
    .await;
}

#[tokio::test]
async fn sandboxes_that_a_dead_node_was_creating_are_created_by_another() {
    let (_database, worlds, a, b) = two_brokers().await;
    let ann = a.human("ann").await;
    let there = ann.at(&b);
    worlds[0].provider.may_start.send_replace(false);
    ensure_without_waiting(&ann, "t").await.error(423);
    let begun = there.get("/v1/sandbox/sessions").await.ok(200)["items"][0].clone();
    a.kill().await;
    assert_eq!(ensure_without_waiting(&there, "t").await.error(423), "SANDBOX_STARTING");
    silence(&worlds[0], &b).await;
    let made = there.ensure("t").await;
    assert_ne!(made["session_id"], begun["session_id"]);
    assert_eq!(worlds[1].provider.running(), 1);
    // If the first node created the sandbox after all, its broker removes it at the next start.
    worlds[0].provider.may_start.send_replace(true);
    let again = worlds[0].start().await;
    assert_eq!(worlds[0].provider.running(), 0);
    assert_eq!(ann.at(&again).ensure("t").await["session_id"], made["session_id"]);
    assert_eq!(worlds[0].provider.running(), 0);
}

#[tokio::test]
async fn a_dead_nodes_sandbox_is_unavailable_until_its_node_is_back() {
    let (_database, worlds, a, b) = two_brokers().await;
    let ann = a.human("ann").await;
    let made = ann.ensure("t").await;
    let there = ann.at(&b);
    a.kill().await;
    silence(&worlds[0], &b).await;
    let refused = there.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "ensure" })).await;
    assert_eq!(refused.json()["error"]["retryable"], json!(true));
    assert_eq!(refused.error(503), "PROVIDER_UNAVAILABLE");
    assert_eq!(there.ensure("another").await["sandbox"]["provider"], "fake");
    let again = worlds[0].start().await;
    assert_eq!(there.ensure("t").await["session_id"], made["session_id"]);
    // The broker returned under another address.
    assert!(there.ensure("t").await["dataplane"]["http_base_url"].as_str().unwrap().contains(&again.addr.to_string()));
}

#[tokio::test]
async fn clients_are_not_sent_to_a_node_that_just_died_and_no_error_advises_a_release() {
    let (_database, worlds, a, b) = two_brokers().await;
    let ann = a.human("ann").await;
    let made = ann.ensure("t").await;
    let there = ann.at(&b);
    assert_eq!(there.ensure("t").await["sandbox"], made["sandbox"], "a working node returns the same sandbox");
    a.kill().await;
    // No time passes: according to its last heartbeat, the node is alive.
    let body = json!({ "thread_id": "t", "mode": "ensure" });
    let refused = async || there.post("/v1/sandbox/sessions", body.clone()).await.status == 503;
    eventually("the node to count as dead", refused).await;
    let refused = there.post("/v1/sandbox/sessions", body.clone()).await;
    assert!(refused.headers.contains_key("retry-after"));
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("does not answer") && message.contains("files are kept") && !message.contains("release"), "{message}");
    assert_eq!(refused.error(503), "PROVIDER_UNAVAILABLE");
    let _again = worlds[0].start().await;
    eventually("the node to be back", async || there.post("/v1/sandbox/sessions", body.clone()).await.status == 200).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn live_nodes_do_not_count_as_dead_after_a_database_outage() {
    let database = TestDatabase::on_own_server().await;
    let mut worlds = World::cluster(&database, 2);
    worlds[1].config.metrics.public = true;
    let (a, b) = (worlds[0].start().await, worlds[1].start().await);
    let ann = a.human("ann").await;
    // Creations in progress on a dead node are given up.
    worlds[0].provider.may_start.send_replace(false);
    assert_eq!(ensure_without_waiting(&ann, "t").await.error(423), "SANDBOX_STARTING");
    let there = ann.at(&b);
    let begun = there.get("/v1/sandbox/sessions").await.ok(200)["items"][0].clone();
    database.stop_server().await;
    worlds[0].clock.advance(SILENCE_STEPS as i64 * SILENCE_STEP);
    let metrics = String::from_utf8(there.get("/metrics").await.bytes.to_vec()).unwrap();
    assert!(metrics.contains("\ncobox_peers{state=\"alive\"} 1\ncobox_peers{state=\"dead\"} 0\n"), "{metrics}");
    database.start_server().await;
    // The second broker may check before the first one sends a heartbeat again.
    eventually("the database to be back", async || there.get("/v1/sandbox/sessions").await.status == 200).await;
    b.tick().await;
    assert_eq!(there.get("/v1/sandbox/sessions").await.ok(200)["items"][0]["session_id"], begun["session_id"]);
    worlds[0].provider.may_start.send_replace(true);
    // The node repeats the work that it could not record in time.
    let body = json!({ "thread_id": "t", "mode": "ensure" });
    let is_made = async || {
        // The reaper measures its retry delay with this clock.
        worlds[0].clock.advance(1);
        a.tick().await;
        there.call(http::Method::POST, "/v1/sandbox/sessions", Some(body.clone()), &[("prefer", "wait=1")]).await.status == 200
    };
    eventually("its own node to create the sandbox", is_made).await;
    assert_eq!(there.ensure("t").await["session_id"], begun["session_id"]);
}

#[tokio::test]
async fn a_clock_skew_is_reported_and_tokens_are_still_accepted() {
    const AHEAD: i64 = 4;
    let database = TestDatabase::new().await;
    let mut worlds = World::cluster(&database, 2);
    let ahead = worlds[0].clock.ahead(AHEAD);
    worlds[1].clock = ahead;
    for world in &mut worlds {
        world.config.metrics.public = true;
    }
    let (a, b) = (worlds[0].start().await, worlds[1].start().await);
    a.tick().await;
    for broker in [&a, &b] {
        let anyone = Client { addr: broker.addr, key: None };
        let skewed = async || anyone.get("/readyz").await.ok(200)["checks"]["clock"] == "skewed";
        eventually("detection of the clock skew", skewed).await;
        let is_right = |seconds: f64| (seconds - AHEAD as f64).abs() < 1.0;
        assert!(is_right(anyone.get("/readyz").await.ok(200)["clock_skew_seconds"].as_f64().unwrap()));
        let metrics = String::from_utf8(anyone.get("/metrics").await.bytes.to_vec()).unwrap();
        let skew = metrics.lines().find_map(|l| l.strip_prefix("cobox_clock_skew_seconds ")).unwrap();
        assert!(is_right(skew.parse().unwrap()), "{skew}");
        assert!(metrics.contains("\ncobox_peers{state=\"alive\"} 1\n"), "{metrics}");
    }
    // A sandbox of either broker accepts the other's tokens, with clocks ahead and behind.
    let ann = a.human("ann").await;
    for (own, other, thread) in [(&a, &b, "one"), (&b, &a, "two")] {
        let made = ann.at(own).ensure(thread).await;
        let path = format!("{}/refresh", session_path(&made));
        let token = ann.at(other).post(&path, json!({})).await.ok(200)["token"].clone();
        assert_eq!(ann.at(own).with(&token).get(&format!("/dp/{}/v1/hello", sandbox_id(&made))).await.status, 200);
    }
}

#[tokio::test]
async fn a_node_that_was_stopped_for_a_month_keeps_its_unreleased_sandboxes() {
    let (_database, worlds, a, b) = two_brokers().await;
    let ann = a.human("ann").await;
    let (kept, released) = (ann.ensure("kept").await, ann.ensure("released").await);
    let there = ann.at(&b);
    a.kill().await;
    silence(&worlds[0], &b).await;
    assert_eq!(there.delete(&session_path(&released)).await.status, 204);
    assert_ne!(there.ensure("released").await["session_id"], released["session_id"]);

    worlds[0].clock.advance(3600);
    silence(&worlds[0], &b).await;
    assert_eq!(there.state(&sandbox_id(&kept)).await, "suspended");
    let body = json!({ "thread_id": "kept", "mode": "ensure" });
    assert_eq!(there.post("/v1/sandbox/sessions", body).await.error(503), "PROVIDER_UNAVAILABLE");
    worlds[0].clock.advance(30 * 24 * 3600);
    silence(&worlds[0], &b).await;
    assert_eq!(there.state(&sandbox_id(&kept)).await, "suspended");
    let again = worlds[0].start().await;
    again.tick().await;
    assert_eq!(*worlds[0].provider.destroyed.lock().unwrap(), [sandbox_id(&released)], "a sandbox released during the outage is removed");
    let back = ann.at(&again).ensure("kept").await;
    assert_eq!((&back["session_id"], sandbox_id(&back)), (&kept["session_id"], sandbox_id(&kept)));
}

#[tokio::test]
async fn a_broker_with_another_master_key_or_database_kind_is_refused() {
    let (database, worlds, _a, _b) = two_brokers().await;
    let start = async |world: &World| {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let error = Broker::start(world.config.clone(), world.provider.clone(), listener).await.err().unwrap();
        let reported = format!("{error} {error:?}");
        assert!(!reported.contains(DATABASE_PASSWORD), "{reported}");
        error.to_string()
    };
    let mut stranger = World::cluster(&database, 1).pop().unwrap();
    std::fs::write(stranger.config.data_dir.join("master.key"), [1; 32]).unwrap();
    assert!(start(&stranger).await.contains("is not the master key of this database"));

    let mut alone = World::new();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    drop(Broker::start(alone.config.clone(), alone.provider.clone(), listener).await.unwrap());
    alone.config.database_url = worlds[0].config.database_url.clone();
    assert!(start(&alone).await.contains("was used with its own SQLite database"));
    stranger.config.database_url = None;
    assert!(start(&stranger).await.contains("was used with a PostgreSQL database"));

    let mut nowhere = World::new();
    for url in ["postgres://ann:{}@%2Fnowhere/x", "postgres://ann:{}@[/x", "mysql://ann:{}@x/y"] {
        nowhere.config.database_url = Some(cobox_protocol::Secret::new(url.replace("{}", DATABASE_PASSWORD)));
        start(&nowhere).await;
    }
    assert!(!format!("{:?}", nowhere.config).contains(DATABASE_PASSWORD));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn racing_clients_of_three_brokers_get_one_session_even_if_a_broker_dies() {
    const CLIENTS: usize = 64;
    const ROUNDS: usize = 6;
    let database = TestDatabase::new().await;
    let worlds = World::cluster(&database, 3);
    let mut brokers: Vec<Option<TestBroker>> = Vec::new();
    for world in &worlds {
        brokers.push(Some(world.start().await));
    }
    let ann = brokers[0].as_ref().unwrap().human("ann").await;
    for round in 0..ROUNDS {
        let thread = format!("race {round}");
        let clients: Vec<Client> = brokers.iter().flatten().map(|b| ann.at(b)).collect();
        let racing = join_all((0..CLIENTS).map(|n| {
            let (client, thread) = (clients[n % clients.len()].clone(), thread.clone());
            tokio::spawn(async move { client.post("/v1/sandbox/sessions", json!({ "thread_id": thread, "mode": "ensure" })).await.ok(200) })
        }));
        let victim = if round == ROUNDS / 2 { brokers[0].take() } else { None };
        if let Some(victim) = victim {
            // Its clients lose their connections; responses of the other brokers remain valid.
            victim.kill().await;
        }
        let answers: Vec<Value> = racing.await.into_iter().filter_map(Result::ok).collect();
        if brokers.iter().all(Option::is_some) {
            assert_eq!(answers.len(), CLIENTS);
        }
        let agreed: HashSet<_> = answers.iter().map(|a| (a["session_id"].to_string(), a["sandbox"]["id"].to_string())).collect();
        assert!(agreed.len() <= 1, "{agreed:?}");
    }
    let living = "SELECT count(*) FROM sandboxes WHERE ended_at IS NULL";
    let threads = "SELECT count(DISTINCT scope_id) FROM sessions WHERE ended_at IS NULL";
    assert_eq!(database.sql(living), database.sql(threads), "one sandbox per thread");
}

/// A second data directory with a copy of all files of the first.
fn copied(world: &World, database: &TestDatabase) -> World {
    let mut copy = World::cluster(database, 1).pop().unwrap();
    copy.clock = world.clock.clone();
    for entry in std::fs::read_dir(&world.config.data_dir).unwrap().flatten().filter(|e| e.file_type().unwrap().is_file()) {
        std::fs::copy(entry.path(), copy.config.data_dir.join(entry.file_name())).unwrap();
    }
    copy
}

/// Starts a copy beside its original, which sends a heartbeat while the copy watches. Returns the error, and for how many
/// seconds the copy wanted to watch.
async fn refused_beside(original: &TestBroker, copy: &World, log: &Log) -> (String, u64) {
    const WATCHING: &str = "waiting until that broker counts as dead";
    let starting = async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        Broker::start_with_clock(copy.config.clone(), copy.provider.clone(), listener, copy.clock.clone()).await
    };
    let next_beat = async {
        log.line(WATCHING).await;
        original.tick().await;
        std::future::pending::<()>().await;
    };
    let refused = tokio::select! {
        started = starting => started.err().expect("the broker must not start").to_string(),
        () = next_beat => unreachable!(),
    };
    let watching = log.lines().into_iter().find(|l| l["message"].as_str().is_some_and(|m| m.contains(WATCHING))).unwrap();
    (refused, watching["seconds"].as_u64().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_a_data_directory_is_refused_beside_its_original_and_replaces_it_after_its_death() {
    let log = Log::capture();
    let database = TestDatabase::new().await;
    let world = World::cluster(&database, 1).pop().unwrap();
    let original = world.start().await;
    let ann = original.human("ann").await;
    let made = ann.ensure("t").await;
    let mut copy = copied(&world, &database);
    copy.provider = world.provider.clone();
    // Longer than a test may take.
    copy.config.node_timeout_seconds = 3600;
    let (refused, _) = refused_beside(&original, &copy, &log).await;
    assert!(refused.contains(&format!("http://{}", original.addr)), "{refused}");
    assert!(refused.contains("empty data directory") && refused.contains("stop the other one first"), "{refused}");
    assert_eq!(ann.ensure("t").await["session_id"], made["session_id"], "the original broker keeps working");

    // The same directory can start immediately, even if its last heartbeat is recent.
    original.kill().await;
    let original = world.start().await;
    original.kill().await;
    // A directory on another disk or machine can start once the first is known to be dead.
    copy.config.node_timeout_seconds = 4;
    let moved = copy.start().await;
    assert_eq!(ann.at(&moved).ensure("t").await["session_id"], made["session_id"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_a_data_directory_whose_clock_is_ahead_watches_its_original_for_as_long_as_any_other() {
    let log = Log::capture();
    let database = TestDatabase::new().await;
    let world = World::cluster(&database, 1).pop().unwrap();
    let original = world.start().await;
    let mut copy = copied(&world, &database);
    copy.config.node_timeout_seconds = 3600;
    copy.clock = world.clock.ahead(24 * 3600);
    let (refused, watched_seconds) = refused_beside(&original, &copy, &log).await;
    assert!(refused.contains(&format!("http://{}", original.addr)), "{refused}");
    assert!(watched_seconds > 3000, "{watched_seconds}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_whose_node_was_taken_over_stops() {
    let database = TestDatabase::new().await;
    let mut world = World::cluster(&database, 1).pop().unwrap();
    world.config.node_timeout_seconds = 4;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let broker = Broker::start_with_clock(world.config.clone(), world.provider.clone(), listener, world.clock.clone()).await.unwrap();
    let node = broker.store().nodes().await.unwrap().pop().unwrap();
    broker.store().take_node(&cobox_broker::store::Node { instance: "another".to_owned(), ..node }).await.unwrap();
    let stopped = broker.run(std::future::pending()).await.unwrap_err().to_string();
    assert!(stopped.contains("another broker was started with the node id"), "{stopped}");
}
