//! Upgrade test: an older build leaves its data directory, its database and a running boxd, which this build takes
//! over.

use std::path::PathBuf;

use cobox_client::{Client, EventStream, EventsFrom};
use cobox_protocol::{
    event::EventKind,
    key::PrincipalKind,
    session::{Mode, State},
};
use cobox_testkit::{BrokerOptions, EVENT_TIMEOUT, TestBroker, TestDatabase, ensure, eventually, negotiate, sh};

/// The directory where `scripts/older-build` puts the programs of the oldest supported build.
fn older_programs() -> PathBuf {
    let top = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let programs = top.join("target/older/programs");
    assert!(programs.join("boxd").exists(), "{} is not there: run scripts/older-build", programs.display());
    programs
}

async fn exit_of(events: &mut EventStream, command: &str) -> Option<i32> {
    loop {
        let event = tokio::time::timeout(EVENT_TIMEOUT, events.next()).await.expect("an event").unwrap().expect("the stream goes on");
        if let EventKind::Exec(end) = event.kind
            && end.command == command
        {
            return end.exit_code;
        }
    }
}

async fn is_taken_over(database: Option<&TestDatabase>) {
    let options = BrokerOptions {
        programs: Some(older_programs()),
        database: database.map(TestDatabase::secret_url),
        is_serving: database.is_some(),
        ..BrokerOptions::default()
    };
    let mut broker = TestBroker::start_with(options).await;
    let ann = broker.key_of("ann", PrincipalKind::Human, None).await;
    let session = Client::new(broker.url(), ann.clone()).unwrap().open(&negotiate("t", Mode::Ensure)).await.unwrap();
    let before = session.info().clone();
    sh(session.dataplane(), "echo kept > f; (while :; do date +%s%N > alive; sleep 0.05; done) >/dev/null 2>&1 &").await;
    let pids = broker.sandbox_pids();
    drop(session);
    broker.kill();

    broker.upgrade();
    broker.launch().await;
    assert_eq!(broker.sandbox_pids(), pids, "the older boxd runs on");
    let client = Client::new(broker.url(), ann.clone()).unwrap();
    let session = ensure(&client, "t").await;
    assert_eq!((&session.info().session_id, &session.info().sandbox.id), (&before.session_id, &before.sandbox.id));
    assert_eq!(sh(session.dataplane(), "cat f").await.stdout, "kept\n");
    let first = sh(session.dataplane(), "cat alive").await.stdout;
    eventually("the background job to go on", || async { (sh(session.dataplane(), "cat alive").await.stdout != first).then_some(()) })
        .await;

    // Reports of the older boxd still arrive: events at once, its own audit records slightly later.
    let mut events = client.events(&before.session_id, EventsFrom::Start);
    sh(session.dataplane(), "exit 7").await;
    assert_eq!(exit_of(&mut events, "exit 7").await, Some(7));
    drop((events, session));
    eventually("the sandbox's own records", || async {
        let shown = broker.cobox().args(["audit", "--limit", "1000"]).output().unwrap();
        String::from_utf8_lossy(&shown.stdout).contains("sandbox.claim").then_some(())
    })
    .await;
    // The records of both builds form one chain.
    let verified = broker.cobox().args(["audit", "verify"]).output().unwrap();
    assert!(verified.status.success(), "{verified:?}");

    // Suspended, then restarted with this build's boxd on the same files.
    broker.interrupt();
    broker.launch().await;
    let client = Client::new(broker.url(), ann).unwrap();
    if database.is_none() {
        assert_eq!(client.get_sandbox(before.sandbox.id.as_str()).await.unwrap().state, State::Suspended);
    }
    let session = ensure(&client, "t").await;
    assert_eq!((&session.info().session_id, &session.info().sandbox.id), (&before.session_id, &before.sandbox.id));
    assert_eq!(sh(session.dataplane(), "cat f; echo more > g; cat g").await.stdout, "kept\nmore\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs the programs of an older build, which take minutes; make soak builds them"]
async fn soak_an_older_data_directory_and_running_boxd_are_taken_over() {
    is_taken_over(None).await;
    crate::load::record("a data directory and a running boxd of build 3a84617 on SQLite: taken over, nothing lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs the programs of an older build, which take minutes; make soak builds them"]
async fn soak_an_older_database_on_postgres_and_running_boxd_are_taken_over() {
    is_taken_over(Some(&TestDatabase::new().await)).await;
    crate::load::record("a database and a running boxd of build 3a84617 on PostgreSQL: taken over, nothing lost");
}
