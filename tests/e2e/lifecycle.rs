//! Sandboxes survive a broker's restart, and their files survive the end of both.

use cobox_protocol::{
    ErrorCode,
    session::{Mode, State},
};
use cobox_testkit::{BrokerOptions, TestBroker, ensure, eventually, negotiate, sh};
use futures_util::future::join_all;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

#[tokio::test]
async fn a_sandbox_keeps_running_while_its_broker_is_dead_and_is_adopted_again() {
    let mut broker = TestBroker::start().await;
    let before = ensure(&broker.client(), "t").await.info().clone();
    let session = ensure(&broker.client(), "t").await;
    sh(session.dataplane(), "echo kept > f; (while :; do date +%s%N > alive; sleep 0.05; done) >/dev/null 2>&1 &").await;
    let pids = broker.sandbox_pids();
    broker.kill();
    drop(session);
    broker.launch().await;
    assert_eq!(broker.sandbox_pids(), pids, "the same processes");
    let after = ensure(&broker.client(), "t").await;
    assert_eq!(after.info().session_id, before.session_id);
    assert_eq!(after.info().sandbox.id, before.sandbox.id);
    let was = sh(after.dataplane(), "cat f alive").await.stdout;
    assert!(was.starts_with("kept\n"), "{was}");
    let first = sh(after.dataplane(), "cat alive").await.stdout;
    eventually("the background job to continue", || async { (sh(after.dataplane(), "cat alive").await.stdout != first).then_some(()) })
        .await;
}

#[tokio::test]
async fn ctrl_c_suspends_sandboxes_and_the_next_ensure_restores_their_files() {
    let mut broker = TestBroker::start().await;
    let session = ensure(&broker.client(), "t").await;
    let before = session.info().clone();
    sh(session.dataplane(), "echo kept > /workspace/f; echo also > /tmp/g; sleep 1000 >/dev/null 2>&1 &").await;
    drop(session);
    assert!(broker.interrupt().success());
    assert!(broker.sandbox_pids().is_empty(), "nothing runs");
    let log = broker.log();
    assert!(log.contains("suspended 1 sandbox"), "{log}");
    broker.launch().await;
    assert_eq!(broker.client().get_sandbox(before.sandbox.id.as_str()).await.unwrap().state, State::Suspended);
    let after = ensure(&broker.client(), "t").await;
    assert_eq!((after.info().session_id.clone(), after.info().sandbox.id.clone()), (before.session_id, before.sandbox.id));
    assert_eq!(sh(after.dataplane(), "cat f /tmp/g; pgrep -c sleep").await.stdout, "kept\nalso\n0\n");
}

#[tokio::test]
async fn after_a_reboot_a_sandbox_is_suspended_and_resumes_with_its_files() {
    let mut broker = TestBroker::start().await;
    let session = ensure(&broker.client(), "t").await;
    let before = session.info().clone();
    sh(session.dataplane(), "echo kept > /workspace/f; sync").await;
    drop(session);
    // Only the data directory remains, as after a power failure: no processes, sockets or cgroups.
    broker.kill();
    let pids = broker.sandbox_pids();
    pids.iter().for_each(|(_, pid)| kill(*pid));
    for (id, pid) in pids {
        eventually("its end", || async { (!std::path::Path::new(&format!("/proc/{pid}")).exists()).then_some(()) }).await;
        let record = broker.data_dir().join("sandboxes").join(id).join("run.json");
        // After a reboot, the same pid may belong to another process.
        let other = r#"{"pid": 1, "start_time": 1, "boot_id": "another"}"#;
        std::fs::write(record, other).unwrap();
    }
    broker.sweep();
    broker.launch().await;
    assert_eq!(broker.client().get_sandbox(before.sandbox.id.as_str()).await.unwrap().state, State::Suspended);
    let after = ensure(&broker.client(), "t").await;
    assert_eq!((after.info().session_id.clone(), after.info().sandbox.id.clone()), (before.session_id, before.sandbox.id));
    assert_eq!(sh(after.dataplane(), "cat f").await.stdout, "kept\n");
}

#[tokio::test]
async fn a_sandbox_whose_boxd_was_killed_is_resumed_by_traffic() {
    let broker = TestBroker::start().await;
    let session = ensure(&broker.client(), "t").await;
    sh(session.dataplane(), "echo kept > f").await;
    let (_, pid) = broker.sandbox_pids().remove(0);
    kill(pid);
    // The old token is still valid: same session, same sandbox, same key.
    let answer = eventually("the sandbox to come back", || async {
        session.dataplane().exec(&cobox_protocol::exec::ExecRequest { command: Some("cat f".into()), ..Default::default() }).await.ok()
    })
    .await;
    assert_eq!(answer.stdout, "kept\n");
    assert_ne!(broker.sandbox_pids()[0].1, pid);
}

#[tokio::test]
async fn an_unused_sandbox_becomes_idle_then_suspended_and_is_resumed_by_use() {
    let config = "idle_timeout_seconds = 1\nlease_seconds = 2\nreaper_interval_ms = 100\n".to_owned();
    let broker = TestBroker::start_with(BrokerOptions { config, ..BrokerOptions::default() }).await;
    let client = broker.client();
    let info = client.negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
    let id = info.sandbox.id.as_str();
    let mut seen = Vec::new();
    while seen.last() != Some(&State::Suspended) {
        let state =
            eventually("another state", || async { Some(client.get_sandbox(id).await.unwrap().state).filter(|s| seen.last() != Some(s)) })
                .await;
        seen.push(state);
    }
    assert!(seen.contains(&State::Idle), "{seen:?}");
    let log = broker.log();
    assert!(log.lines().any(|line| line.contains("a sandbox was suspended") && line.contains(id)), "`cobox up` says why: {log}");
    assert!(broker.sandbox_pids().is_empty());
    let again = ensure(&client, "t").await;
    assert_eq!(again.info().sandbox.id, info.sandbox.id);
    assert_eq!(sh(again.dataplane(), "echo back").await.stdout, "back\n");
}

#[tokio::test]
async fn a_long_suspended_sandbox_starts_once_and_answers_every_immediate_request() {
    let config = "idle_timeout_seconds = 1\nlease_seconds = 5\nreaper_interval_ms = 100\n[metrics]\npublic = true\n".to_owned();
    let broker = TestBroker::start_with(BrokerOptions { config, ..BrokerOptions::default() }).await;
    let client = broker.client();
    let id = client.negotiate(&negotiate("t", Mode::Ensure)).await.unwrap().sandbox.id;
    // Its lease is over then.
    eventually("its suspension", || async { (client.get_sandbox(id.as_str()).await.unwrap().state == State::Suspended).then_some(()) })
        .await;
    let session = ensure(&client, "t").await;
    let pids = broker.sandbox_pids();
    let info = session.info();
    let http = reqwest::Client::new();
    let requests = (0..40).map(|_| {
        let request = http.post(format!("{}/exec", info.sandbox.http_base_url)).bearer_auth(info.token.expose());
        async { request.json(&json!({ "command": "true" })).send().await.unwrap().status().as_u16() }
    });
    assert_eq!(join_all(requests).await, [200; 40]);
    assert_eq!(broker.sandbox_pids(), pids, "the same boxd");
    let metrics = http.get(format!("{}/metrics", broker.url())).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("\ncobox_sandbox_start_duration_seconds_count{kind=\"resume\"} 1\n"), "{metrics}");
}

#[tokio::test]
async fn the_hard_end_ends_a_session_that_is_in_use() {
    let config =
        "hard_ttl_seconds = 2\nidle_timeout_seconds = 1\nlease_seconds = 2\nreaper_interval_ms = 100\ntoken_ttl_seconds = 60\n".to_owned();
    let broker = TestBroker::start_with(BrokerOptions { config, ..BrokerOptions::default() }).await;
    let client = broker.client();
    let info = client.negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
    eventually("the end of the session", || async {
        client.get_session(&info.session_id).await.is_err_and(|e| e.is(ErrorCode::SessionExpired)).then_some(())
    })
    .await;
    eventually("the end of its processes", || async { broker.sandbox_pids().is_empty().then_some(()) }).await;
}

#[tokio::test]
async fn two_brokers_never_share_a_data_directory() {
    let broker = TestBroker::start().await;
    let output = broker.cobox().args(["up", "--listen", "127.0.0.1:0", "--data-dir"]).arg(broker.data_dir()).output().unwrap();
    assert!(!output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("another broker") || stderr.contains("in use"), "{stderr}");
}

#[tokio::test]
async fn a_lost_database_loses_no_files() {
    let mut broker = TestBroker::start().await;
    let session = ensure(&broker.client(), "t").await;
    sh(session.dataplane(), "echo kept > f").await;
    let dir = broker.data_dir().join("sandboxes").join(session.info().sandbox.id.as_str());
    drop(session);
    broker.kill();
    let (data, lost) = (broker.data_dir(), tempfile::tempdir().unwrap());
    let names = ["broker.db", "broker.db-wal", "broker.db-shm"];
    for name in names {
        // The last two don't always exist.
        let _ = std::fs::copy(data.join(name), lost.path().join(name));
        let _ = std::fs::remove_file(data.join(name));
    }
    broker.launch().await;
    assert!(broker.log().contains("quarantined a sandbox without a record in the database"), "{}", broker.log());
    assert!(dir.exists());
    broker.interrupt();
    for name in names {
        let _ = std::fs::remove_file(data.join(name));
        let _ = std::fs::copy(lost.path().join(name), data.join(name));
    }
    broker.launch().await;
    let session = ensure(&broker.client(), "t").await;
    assert_eq!(sh(session.dataplane(), "cat f").await.stdout, "kept\n");
}
