//! Crashes at random moments: the broker and boxd are killed at any point, and nothing is lost or left behind.

use std::{collections::BTreeMap, time::Duration};

use cobox_client::Client;
use cobox_protocol::{ErrorCode, exec::ExecRequest, session::Mode};
use cobox_testkit::{Leftovers, SeededRng, TestBroker, ensure, negotiate, sh};
use rustix::process::{Pid, Signal, kill_process};

/// State that was acknowledged to the user: a crash must not undo it.
#[derive(Default)]
struct Acknowledged {
    /// Thread to session, for every `ensure` that was answered and not released since.
    sessions: BTreeMap<String, String>,
    /// Thread to the possible contents of its file: the last acknowledged write, then later writes whose answer was
    /// lost.
    files: BTreeMap<String, Vec<String>>,
}

async fn random_operation(client: Client, thread: String, round: u32, kind: u64) -> (String, Option<Change>) {
    let change = match kind {
        0 | 1 => client.negotiate(&negotiate(&thread, Mode::Ensure)).await.ok().map(|s| Change::Ensured(s.session_id.to_string())),
        2 => {
            async {
                let session = client.open(&negotiate(&thread, Mode::Ensure)).await.ok()?;
                let id = session.info().session_id.to_string();
                let text = format!("round {round}");
                let command = Some(format!("echo {text} > acknowledged; sync acknowledged"));
                let ran = session.dataplane().exec(&ExecRequest { command, ..Default::default() }).await;
                Some(if ran.is_ok_and(|r| r.exit_code == 0) { Change::Wrote(id, text) } else { Change::MaybeWrote(id, text) })
            }
            .await
        }
        _ => {
            async {
                let info = client.negotiate(&negotiate(&thread, Mode::Get)).await.ok()?;
                match client.release(&info.session_id).await {
                    Ok(()) => Some(Change::Released),
                    // It may have been executed although the answer was lost.
                    Err(_) => Some(Change::MaybeReleased),
                }
            }
            .await
        }
    };
    (thread, change)
}

enum Change {
    Ensured(String),
    Wrote(String, String),
    MaybeWrote(String, String),
    Released,
    MaybeReleased,
}

async fn crashes(rounds: u32, seed: u64) {
    let mut broker = TestBroker::start().await;
    let mut rng = SeededRng::new(seed);
    let mut acknowledged = Acknowledged::default();
    for round in 0..rounds {
        let client = broker.client();
        let tasks: Vec<_> = (0..3)
            .map(|i| {
                let kind = rng.below(4);
                tokio::spawn(random_operation(client.clone(), format!("thread-{i}"), round, kind))
            })
            .collect();
        // At a random time within the duration of an ensure, so that each round crashes at a different point.
        tokio::time::sleep(Duration::from_micros(rng.below(60_000))).await;
        let kills_boxd = rng.below(3) == 0;
        if kills_boxd {
            for (_, pid) in broker.sandbox_pids() {
                // It may have ended in the meantime.
                let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
            }
        } else {
            broker.kill();
        }
        for task in tasks {
            let (thread, change) = task.await.unwrap();
            match change {
                Some(Change::Ensured(id)) => {
                    acknowledged.sessions.insert(thread, id);
                }
                Some(Change::Wrote(id, text)) => {
                    acknowledged.sessions.insert(thread.clone(), id);
                    acknowledged.files.insert(thread, vec![text]);
                }
                Some(Change::MaybeWrote(id, text)) => {
                    acknowledged.sessions.insert(thread.clone(), id);
                    if let Some(possible) = acknowledged.files.get_mut(&thread) {
                        possible.push(text);
                    }
                }
                Some(Change::Released | Change::MaybeReleased) => {
                    acknowledged.sessions.remove(&thread);
                    acknowledged.files.remove(&thread);
                }
                None => {}
            }
        }
        if !kills_boxd {
            broker.launch().await;
        }
        check(&broker, &acknowledged, round, seed).await;
    }
    for i in 0..3 {
        let client = broker.client();
        if let Ok(info) = client.negotiate(&negotiate(&format!("thread-{i}"), Mode::Get)).await {
            client.release(&info.session_id).await.unwrap();
        }
    }
    Leftovers::wait_for_none(&broker).await;
}

/// Checks that all acknowledged state still holds, and that no unknown sandbox is running.
async fn check(broker: &TestBroker, acknowledged: &Acknowledged, round: u32, seed: u64) {
    let client = broker.client();
    for (thread, id) in &acknowledged.sessions {
        let info = client
            .negotiate(&negotiate(thread, Mode::Get))
            .await
            .unwrap_or_else(|e| panic!("round {round}, seed {seed}: {thread} lost its session: {e}"));
        assert_eq!(info.session_id.as_str(), id, "round {round}, seed {seed}: {thread} has another session");
    }
    for (thread, possible) in &acknowledged.files {
        let session = ensure(&client, thread).await;
        let answer = sh(session.dataplane(), "cat acknowledged").await;
        let holds = answer.stdout.trim();
        // `>` truncates before it writes, so an interrupted write leaves an empty file; only an unacknowledged write
        // may do that.
        let is_whole = possible.iter().any(|text| text == holds) || (possible.len() > 1 && holds.is_empty());
        assert!(is_whole, "round {round}, seed {seed}: {thread} holds {holds:?}, not one of {possible:?}: {}", answer.stderr);
    }
    let known: Vec<String> = client.list_sandboxes(None, None).await.unwrap().items.into_iter().map(|s| s.id.to_string()).collect();
    for (id, _) in broker.sandbox_pids() {
        assert!(known.contains(&id), "round {round}, seed {seed}: {id} runs without a record");
    }
    let e = client.negotiate(&negotiate("never-made", Mode::Get)).await.unwrap_err();
    assert!(e.is(ErrorCode::SessionNotFound), "{e}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_crashes_lose_nothing_and_leave_nothing() {
    crashes(20, 0x5eed_0001).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes; run by make soak"]
async fn soak_a_hundred_crashes_lose_nothing_and_leave_nothing() {
    for seed in [0x5eed_0002, 0x5eed_0003, 0x5eed_0004, 0x5eed_0005] {
        crashes(25, seed).await;
    }
    crate::load::record("100 crashes of the broker and of boxd at random moments of ensure, exec and release: nothing lost, nothing left");
}
