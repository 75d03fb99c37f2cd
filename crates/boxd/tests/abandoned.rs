//! Commands whose clients have disconnected: they end, and free what they hold for others.

mod support;

use cobox_protocol::{
    Secret,
    frame::{ExecStart, StdinStart},
};
use serde_json::{Value, json};
use support::{
    EVERYTHING, SOON, TestBoxd,
    exec_client::{ClientFrame, ExecClient, command, named},
    sdk_client::{Ended, SdkClient},
};

const TRUE: &str = r#"{"command": "true"}"#;

fn token_of(boxd: &TestBoxd, principal: &str) -> Secret {
    boxd.key.mint(&cobox_token::Claims { sub: principal.to_owned(), ..boxd.claims(EVERYTHING) })
}

async fn running(boxd: &TestBoxd) -> usize {
    let list: Value = boxd.get("/v1/processes").send().await.ok(200).json();
    list["items"].as_array().unwrap().iter().filter(|p| p["state"] == "running").count()
}

async fn until_running(boxd: &TestBoxd, count: usize) {
    let ended = async {
        while running(boxd).await > count {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, ended).await.expect("abandoned commands are ended");
}

#[tokio::test]
async fn abandoned_interactive_commands_end_and_free_their_slots() {
    let boxd = TestBoxd::start_limited(|limits| (limits.execs, limits.exec_unattended_seconds) = (4, 1));
    let clients = [
        SdkClient::run(&boxd, "cat", json!({})).await,
        SdkClient::run(&boxd, "/bin/sh", json!({ "timeout": 3600 })).await,
        SdkClient::run(&boxd, "", json!({ "pty": true, "timeout_seconds": 3600 })).await,
    ];
    let other = ExecClient::start(&boxd, ExecStart { stdin: Some(StdinStart::Open(true)), ..command("cat") }).await;
    boxd.post("/v1/exec", TRUE).send().await.refused(429, "RATE_LIMITED");
    drop((clients, other));
    until_running(&boxd, 0).await;
    boxd.post("/v1/exec", TRUE).send().await.ok(200);
}

#[tokio::test]
async fn a_command_with_a_client_or_its_own_timeout_is_not_ended() {
    let boxd = TestBoxd::start_limited(|limits| limits.exec_unattended_seconds = 1);
    let mut attended = ExecClient::start(&boxd, named("here", ExecStart { pty: true, ..command("cat") })).await;
    let timed = ExecStart { stdin: Some(StdinStart::Open(true)), timeout_seconds: Some(600.0), ..command("cat") };
    drop(ExecClient::start(&boxd, named("timed", timed)).await);
    let build = ExecStart { timeout_seconds: Some(600.0), ..command("exec sleep 1000") };
    drop(ExecClient::start(&boxd, named("build", build)).await);
    // The timeout a client sets for a terminal runs only while no client is connected.
    let mut terminal = SdkClient::run(&boxd, "/bin/sh", json!({ "pty": true, "timeout": 1 })).await;
    // An abandoned command that started later has ended, so these would have ended as well.
    drop(ExecClient::start(&boxd, named("left", ExecStart { pty: true, ..command("cat") })).await);
    until_running(&boxd, 4).await;
    assert_eq!(running(&boxd).await, 4);
    attended.send(ClientFrame::stdin(b"still\n", None)).await;
    attended.read_until("still").await;
    terminal.send(json!({ "type": "input", "data": "exit 3\n" })).await;
    assert_eq!(terminal.end().await, Ended::Exit(3));
    for id in ["timed", "build"] {
        boxd.delete(&format!("/v1/processes/{id}")).send().await.ok(204);
    }
}

#[tokio::test]
async fn a_stream_without_a_timeout_ends_when_its_client_does_not_reconnect() {
    let boxd = TestBoxd::start_limited(|limits| limits.exec_unattended_seconds = 1);
    let events = |path: &'static str, body: Value| boxd.post(path, body.to_string()).header("accept", "text/event-stream").open();
    let streams = [
        events("/v1/exec", json!({ "command": "exec sleep 1000" })).await,
        events("/execute/stream/start", json!({ "command": "exec sleep 1000", "idle_timeout_seconds": -1 })).await,
    ];
    let no_limit = ExecStart { timeout_seconds: Some(0.0), ..command("exec sleep 1000") };
    let sockets = [ExecClient::start(&boxd, command("exec sleep 1000")).await, ExecClient::start(&boxd, no_limit).await];
    let sdk = SdkClient::run(&boxd, "exec sleep 1000", json!({ "close_stdin": true })).await;
    assert_eq!(running(&boxd).await, 5);
    drop((streams, sockets, sdk));
    until_running(&boxd, 0).await;
}

#[tokio::test]
async fn a_terminal_without_a_client_ends_with_its_timeout() {
    let boxd = TestBoxd::start();
    let clients = [
        SdkClient::run(&boxd, "/bin/sh", json!({ "timeout": 1 })).await,
        SdkClient::run(&boxd, "/bin/sh", json!({ "pty": true, "timeout": 1 })).await,
        SdkClient::run(&boxd, "/bin/sh", json!({ "pty": true, "timeout": 1, "idle_timeout_seconds": -1 })).await,
        SdkClient::run(&boxd, "/bin/sh", json!({ "pty": true, "timeout": 1, "idle_timeout_seconds": 3600 })).await,
    ];
    drop(clients);
    until_running(&boxd, 0).await;
}

#[tokio::test]
async fn a_command_without_an_idle_limit_ends_after_the_sandboxs_limit() {
    let boxd = TestBoxd::start_limited(|limits| limits.exec_unattended_seconds = 1);
    drop(SdkClient::run(&boxd, "cat", json!({ "idle_timeout_seconds": -1 })).await);
    drop(SdkClient::run(&boxd, "", json!({ "pty": true, "idle_timeout_seconds": -1 })).await);
    until_running(&boxd, 0).await;
}

#[tokio::test]
async fn the_streams_of_one_principal_leave_slots_for_another() {
    let boxd = TestBoxd::start_limited(|limits| (limits.streams, limits.streams_per_principal) = (4, 3));
    let (ann, bob) = (token_of(&boxd, "ann"), token_of(&boxd, "bob"));
    let watch = |token| boxd.get("/v1/watch").token(token);
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(watch(&ann).open().await);
    }
    let message = watch(&ann).send().await.refused(429, "RATE_LIMITED");
    assert!(message.contains("ann has 3 streams open"), "{message}");
    held.push(watch(&bob).open().await);
    let message = watch(&bob).send().await.refused(429, "RATE_LIMITED");
    assert!(message.contains("4 streams are already open"), "{message}");
}

#[tokio::test]
async fn the_commands_of_one_principal_leave_slots_for_another() {
    let boxd = TestBoxd::start_limited(|limits| (limits.execs, limits.execs_per_principal) = (4, 3));
    let (ann, bob) = (token_of(&boxd, "ann"), token_of(&boxd, "bob"));
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(ExecClient::start_as(&boxd, &ann, command("exec sleep 1000")).await);
    }
    let message = boxd.post("/v1/exec", TRUE).token(&ann).send().await.refused(429, "RATE_LIMITED");
    assert!(message.contains("ann has 3 commands running"), "{message}");
    boxd.post("/v1/exec", TRUE).token(&bob).send().await.ok(200);
    held.push(ExecClient::start_as(&boxd, &bob, command("exec sleep 1000")).await);
    let message = boxd.post("/v1/exec", TRUE).token(&bob).send().await.refused(429, "RATE_LIMITED");
    assert!(message.contains("4 commands are already running"), "{message}");
}
