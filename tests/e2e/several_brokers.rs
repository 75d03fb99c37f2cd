//! Three `cobox serve` brokers on one PostgreSQL: clients that race on a thread agree on its session, even if one of
//! the brokers is killed in the meantime.

use std::{collections::HashSet, time::Duration};

use cobox_client::Client;
use cobox_protocol::{ErrorCode, session::Mode};
use cobox_testkit::{
    BrokerOptions, DATABASE_PASSWORD, EVENT_TIMEOUT, Leftovers, SeededRng, TestBroker, TestDatabase, eventually, negotiate, sh,
};
use futures_util::future::join_all;

const CLIENTS: usize = 64;
/// Short, so that a dead broker is detected soon.
const CONFIG: &str = "node_timeout_seconds = 4\n";

/// Session id and sandbox id.
type Answer = (String, String);

/// Retries until a broker answers. `None` if the answer is that the sandbox's node is dead.
async fn ensure_somewhere(clients: Vec<Client>, first: usize, thread: String) -> Option<Answer> {
    let deadline = tokio::time::Instant::now() + EVENT_TIMEOUT;
    for attempt in first.. {
        match clients[attempt % clients.len()].negotiate(&negotiate(&thread, Mode::Ensure)).await {
            Ok(made) => return Some((made.session_id.to_string(), made.sandbox.id.to_string())),
            Err(e) if e.is(ErrorCode::ProviderUnavailable) => return None,
            Err(e) => assert!(tokio::time::Instant::now() < deadline, "{thread}: {e}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    None
}

async fn races(rounds: usize, seed: u64) {
    let database = TestDatabase::new().await;
    let options = BrokerOptions { config: CONFIG.to_owned(), database: Some(database.secret_url()), ..BrokerOptions::default() };
    let mut brokers = Vec::new();
    for _ in 0..3 {
        brokers.push(TestBroker::start_with(options.clone()).await);
    }
    let key = brokers[0].key().clone();
    let at = |broker: &TestBroker| Client::new(broker.url(), key.clone()).expect("a client");
    let mut rng = SeededRng::new(seed);
    let (mut made, mut given_up) = (0, 0);
    let mut survivor = None;
    for round in 0..rounds {
        let is_deadly = round == rounds / 2;
        let clients: Vec<Client> = brokers.iter().filter(|b| b.running_pid().is_some()).map(at).collect();
        let thread = format!("race-{round}");
        let racing: Vec<_> = (0..CLIENTS).map(|n| tokio::spawn(ensure_somewhere(clients.clone(), n, thread.clone()))).collect();
        if is_deadly {
            // At a random time within the duration of an ensure, so that each round crashes at a different point.
            tokio::time::sleep(Duration::from_micros(rng.below(60_000))).await;
            brokers[0].kill();
        }
        let answers: Vec<Option<Answer>> = join_all(racing).await.into_iter().map(|a| a.expect("no client panics")).collect();
        let agreed: HashSet<&Answer> = answers.iter().flatten().collect();
        assert!(agreed.len() == 1 || is_deadly && agreed.is_empty(), "round {round}, seed {seed}: {agreed:?}");
        assert!(is_deadly || answers.iter().all(Option::is_some), "round {round}, seed {seed}: some clients got no answer");
        let all: usize = database.sql("SELECT count(*) FROM sandboxes").parse().expect("a number");
        given_up += all - made - 1;
        made = all;
        assert!(given_up <= usize::from(round >= rounds / 2), "round {round}, seed {seed}: more than one sandbox");
        if is_deadly {
            survivor = agreed.into_iter().next().cloned().map(|answer| (thread, answer));
        } else {
            let session = agreed.into_iter().next().expect("one").0.parse().expect("a session's id");
            at(&brokers[1]).release(&session).await.expect("it is released");
        }
    }
    brokers[0].launch().await;
    if let Some((thread, answer)) = survivor {
        let clients = vec![at(&brokers[0]), at(&brokers[1])];
        let again = eventually("the session to be there again", || ensure_somewhere(clients.clone(), 0, thread.clone())).await;
        assert_eq!(again, answer, "acknowledged state holds");
        let session = at(&brokers[2]).open(&negotiate(&thread, Mode::Ensure)).await.expect("any broker answers");
        assert_eq!(sh(session.dataplane(), "echo hello").await.stdout, "hello\n");
        at(&brokers[2]).release(&session.info().session_id).await.expect("it is released");
    }
    let orphans = "SELECT count(*) FROM sandboxes WHERE ended_at IS NULL OR intent IS NOT NULL";
    eventually("every sandbox to be gone", || {
        let left = database.sql(orphans);
        async move { (left == "0").then_some(()) }
    })
    .await;
    for (n, broker) in brokers.iter().enumerate() {
        // A node that has removed no sandbox since its start still has the cgroup directory prepared for the next one,
        // so each removes one here.
        let last = at(broker).negotiate(&negotiate(&format!("last-{n}"), Mode::Ensure)).await.expect("it creates one more");
        at(broker).release(&last.session_id).await.expect("it is released");
        assert!(!broker.log().contains(DATABASE_PASSWORD), "the password of the database is in a log");
        Leftovers::wait_for_none(broker).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn racing_clients_of_three_brokers_get_one_session_although_one_broker_is_killed() {
    races(20, 0x5eed_0101).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes; run by make soak"]
async fn soak_racing_clients_of_three_brokers_get_one_session_two_hundred_times() {
    races(200, 0x5eed_0102).await;
    crate::load::record(
        "64 clients racing 200 times over three brokers on one PostgreSQL, one killed in the middle: all who are answered have one session and one sandbox; a sandbox that died half made with its broker is given up",
    );
}
