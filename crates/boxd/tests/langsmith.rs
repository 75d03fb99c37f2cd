//! Tests of commands in the frames and events of the LangSmith SDKs: every byte is delivered once, and nothing the SDKs
//! would misread.

mod support;

use cobox_protocol::control::Revocation;
use futures_util::SinkExt;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use support::{
    SOON, TestBoxd, is_running,
    sdk_client::{Ended, SdkClient},
    wait_for,
};
use tokio_tungstenite::tungstenite::Message;

fn error_type(ended: Ended) -> String {
    match ended {
        Ended::Error(kind, _) => kind,
        other => panic!("{other:?} in place of an error"),
    }
}

#[tokio::test]
async fn a_command_starts_prints_and_exits_in_the_sdks_frames() {
    let boxd = TestBoxd::start();
    let more = json!({ "timeout_seconds": 60, "close_stdin": true, "command_id": "0192", "env": {"A": "b"}, "cwd": "/tmp" });
    let mut client = SdkClient::run(&boxd, "echo $A in $PWD; cat; echo err >&2; exit 3", more).await;
    assert!(client.pid > 0 && client.command_id == "0192");
    assert_eq!(client.end().await, Ended::Exit(3));
    assert_eq!((client.stdout.as_str(), client.stderr.as_str()), ("b in /tmp\n", "err\n"));
    assert_eq!(client.next().await, None);
    assert_eq!(client.close_code, Some(1000));
}

#[tokio::test]
async fn run_config_replaces_cwd_and_env_and_refuses_another_user() {
    let boxd = TestBoxd::start();
    let config = json!({ "run_config": { "user": "user", "work_dir": "/tmp", "env_vars": {"A": "b"} }, "close_stdin": true });
    let mut client = SdkClient::run(&boxd, "echo $A in $PWD", config).await;
    assert_eq!((client.end().await, client.stdout.as_str()), (Ended::Exit(0), "b in /tmp\n"));
    for refused in [
        json!({ "run_config": { "user": "root" } }),
        json!({ "run_config": { "work_dir": "/tmp" }, "cwd": "/tmp" }),
        json!({ "ssh_agent_forward": true }),
    ] {
        let mut client = SdkClient::dial(&boxd).await;
        let mut first = json!({ "type": "execute", "command": "true" });
        first.as_object_mut().unwrap().extend(refused.as_object().unwrap().clone());
        assert_eq!(error_type(client.begin(first).await.unwrap_err()), "CommandError", "{refused}");
    }
}

#[tokio::test]
async fn repeated_requests_with_a_command_id_join_it_and_run_it_once() {
    let boxd = TestBoxd::start();
    let more = || json!({ "command_id": "once" });
    let mut first = SdkClient::run(&boxd, "echo ran >> runs; echo begun; read line; echo $line", more()).await;
    first.read_until("begun").await;
    let mut second = SdkClient::run(&boxd, "echo another >> runs", more()).await;
    assert_eq!((second.command_id.as_str(), second.pid), ("once", first.pid));
    second.send(json!({ "type": "input", "data": "end\n" })).await;
    for client in [&mut first, &mut second] {
        assert_eq!(client.end().await, Ended::Exit(0));
        assert_eq!(client.stdout, "begun\nend\n");
    }
    assert_eq!(std::fs::read_to_string(boxd.host("/workspace/runs")).unwrap(), "ran\n");
}

#[tokio::test]
async fn a_reconnecting_client_gets_every_byte_once_and_no_split_character() {
    let boxd = TestBoxd::start();
    // Characters of one, two, three and four bytes, and invalid bytes.
    let command = r"for i in $(seq 1 20000); do printf '%s a\303\244\342\202\254\360\237\230\200\377\342\202\n' $i; done";
    let expected: String = (1..=20000).map(|i| format!("{i} aä€😀???\n")).collect();
    let mut client = SdkClient::run(&boxd, command, json!({ "command_id": "lost", "close_stdin": true })).await;
    let mut got = String::new();
    let mut cuts = 0;
    let ended = loop {
        match client.step().await {
            Some(ended) => break ended,
            // Cuts the connection after some of the frames.
            None if cuts < 50 => {
                cuts += 1;
                got.push_str(&client.stdout);
                let (at, err) = (client.stdout_at, client.stderr_at);
                assert_eq!(at, got.len() as u64, "the client computes offsets from the received text");
                drop(client);
                client = SdkClient::reconnect(&boxd, "lost", at, err).await.unwrap();
                assert_eq!(client.command_id, "lost", "`started` is sent on every connection");
            }
            None => {}
        }
    };
    got.push_str(&client.stdout);
    assert_eq!(ended, Ended::Exit(0));
    assert!(cuts > 0 && got == expected);
}

#[tokio::test]
async fn an_incomplete_character_waits_for_its_rest_and_is_sent_at_the_end() {
    let boxd = TestBoxd::start();
    let mut client = SdkClient::run(&boxd, r"printf 'a\342\202'; read x; printf '\254b\342'; exit 0", json!({})).await;
    client.read_until("a").await;
    assert_eq!(client.stdout, "a");
    client.send(json!({ "type": "input", "data": "\n" })).await;
    assert_eq!((client.end().await, client.stdout.as_str()), (Ended::Exit(0), "a€b?"));
}

#[tokio::test]
async fn frames_stay_below_a_mebibyte_even_if_every_byte_must_be_escaped() {
    let boxd = TestBoxd::start();
    let mut client = SdkClient::run(&boxd, "head -c 3000000 /dev/zero", json!({ "close_stdin": true })).await;
    assert_eq!(client.end().await, Ended::Exit(0));
    assert_eq!(client.stdout.len(), 3_000_000);
}

#[tokio::test]
async fn a_killed_command_ends_with_its_process_tree_even_if_its_client_disconnects() {
    let boxd = TestBoxd::start();
    let mut client = SdkClient::run(&boxd, "sleep 1000 & echo $!; wait", json!({})).await;
    client.read_until("\n").await;
    let child = client.stdout.trim().to_owned();
    client.send(json!({ "type": "kill" })).await;
    client.socket.close(None).await.unwrap();
    wait_for(|| !is_running(&child)).await;
    let mut again = SdkClient::reconnect(&boxd, &client.command_id, client.stdout_at, 0).await.unwrap();
    assert_eq!(again.end().await, Ended::Exit(137));
}

#[tokio::test]
async fn a_terminal_without_a_command_runs_the_shell_at_the_requested_size() {
    let boxd = TestBoxd::start();
    let mut client = SdkClient::dial(&boxd).await;
    client.begin(json!({ "type": "execute", "pty": true, "shell": "/bin/sh", "timeout": 1, "env": {"PS1": ""} })).await.unwrap();
    client.send(json!({ "type": "resize", "cols": 123, "rows": 45 })).await;
    client.send(json!({ "type": "input", "data": "stty size; exit 4\n" })).await;
    assert_eq!(client.end().await, Ended::Exit(4));
    assert!(client.stdout.contains("45 123") && client.stderr.is_empty(), "{}", client.stdout);
}

#[tokio::test]
async fn a_command_times_out_and_a_bare_shell_of_an_old_client_does_not() {
    let boxd = TestBoxd::start();
    for spelled in ["timeout", "timeout_seconds"] {
        let mut client = SdkClient::run(&boxd, "echo begun; sleep 1000", json!({ spelled: 0.2 })).await;
        assert_eq!(error_type(client.end().await), "CommandTimeout", "{spelled}");
        assert_eq!(client.stdout, "begun\n");
    }
    // The timeout that would end it has passed when it responds.
    let mut shell = SdkClient::run(&boxd, "/bin/sh", json!({ "timeout": 0.1 })).await;
    shell.send(json!({ "type": "input", "data": "sleep 0.5; echo still here; exit\n" })).await;
    assert_eq!((shell.end().await, shell.stdout.as_str()), (Ended::Exit(0), "still here\n"));
}

#[tokio::test]
async fn an_abandoned_command_is_ended_and_one_with_a_client_is_not() {
    let boxd = TestBoxd::start();
    let more = || json!({ "idle_timeout_seconds": 0.2, "close_stdin": true });
    let mut left = SdkClient::run(&boxd, "echo $$; exec sleep 1000", more()).await;
    let mut held = SdkClient::run(&boxd, "echo $$; sleep 0.5; echo done", more()).await;
    left.read_until("\n").await;
    let pid = left.stdout.trim().to_owned();
    drop(left);
    wait_for(|| !is_running(&pid)).await;
    assert_eq!(held.end().await, Ended::Exit(0));
    assert!(held.stdout.ends_with("done\n"));
    let mut unwatched = SdkClient::run(&boxd, "echo $$; exec sleep 1000", json!({ "kill_on_disconnect": true })).await;
    unwatched.read_until("\n").await;
    let pid = unwatched.stdout.trim().to_owned();
    drop(unwatched);
    wait_for(|| !is_running(&pid)).await;
}

#[tokio::test]
async fn expired_output_and_unknown_commands_are_reported_differently() {
    let boxd = TestBoxd::start();
    let mut brief = SdkClient::run(&boxd, "echo brief", json!({ "ttl_seconds": 0, "command_id": "brief" })).await;
    let mut kept = SdkClient::run(&boxd, "echo kept", json!({ "ttl_seconds": 600, "command_id": "kept" })).await;
    assert_eq!((brief.end().await, kept.end().await), (Ended::Exit(0), Ended::Exit(0)));
    // Until the expiry task has removed it.
    let gone = loop {
        match SdkClient::reconnect(&boxd, "brief", 0, 0).await {
            Ok(_) => tokio::task::yield_now().await,
            Err(ended) => break error_type(ended),
        }
    };
    assert_eq!(gone, "SessionExpired");
    let mut again = SdkClient::reconnect(&boxd, "kept", 2, 0).await.unwrap();
    assert_eq!((again.end().await, again.stdout.as_str()), (Ended::Exit(0), "pt\n"));
    assert_eq!(error_type(SdkClient::reconnect(&boxd, "never", 0, 0).await.err().unwrap()), "CommandNotFound");
}

#[tokio::test]
async fn input_ends_when_closed_and_is_refused_without_stdin() {
    let boxd = TestBoxd::start();
    let mut client = SdkClient::run(&boxd, "cat", json!({})).await;
    client.send(json!({ "type": "input", "data": "ä\n" })).await;
    client.send(json!({ "type": "close_stdin" })).await;
    assert_eq!((client.end().await, client.stdout.as_str()), (Ended::Exit(0), "ä\n"));
    let mut client = SdkClient::run(&boxd, "sleep 1000", json!({ "close_stdin": true, "kill_on_disconnect": true })).await;
    client.send(json!({ "type": "input", "data": "x" })).await;
    assert_eq!(error_type(client.end().await), "CommandError");
    // A program that no longer reads its input is not an error of the client.
    let mut client = SdkClient::run(&boxd, "exec <&-; echo closed; sleep 0.2; exit 5", json!({})).await;
    client.read_until("closed").await;
    client.send(json!({ "type": "input", "data": "x" })).await;
    assert_eq!(client.end().await, Ended::Exit(5));
}

#[tokio::test]
async fn an_unreadable_frame_is_refused_in_the_sdks_format() {
    let boxd = TestBoxd::start();
    for (frame, expected) in [
        (r#"{"type":"resize","cols":1,"rows":1}"#, "no command on this connection"),
        (r#"{"type":"brew"}"#, "known types are auth, execute, reconnect"),
        (r#"{"type":"execute"}"#, "command: is missing"),
        (r#"{"type":"execute","command":7}"#, "`execute`"),
        ("[", "not JSON"),
    ] {
        let mut client = SdkClient::dial(&boxd).await;
        client.socket.send(Message::text(frame)).await.unwrap();
        let Ended::Error(_, message) = client.end().await else { panic!("{frame} was accepted") };
        assert!(message.contains(expected) && message.contains("error_id=req_"), "{frame}: {message}");
        assert_eq!(client.next().await, None);
    }
}

#[tokio::test]
async fn a_revoked_token_ends_the_stream_with_an_error_and_a_shutdown_asks_to_reconnect() {
    let mut boxd = TestBoxd::start();
    let mut client = SdkClient::run(&boxd, "echo begun; sleep 1000", json!({})).await;
    client.read_until("begun").await;
    boxd.revoke(vec![Revocation::Principal("ada".into())]).await;
    assert_eq!(error_type(client.end().await), "Unauthorized");
    boxd.revoke(vec![]).await;
    let mut client = SdkClient::run(&boxd, "echo begun; sleep 1000", json!({})).await;
    client.read_until("begun").await;
    boxd.control(http::Method::POST, "/control/shutdown").send().await;
    assert_eq!(client.end().await, Ended::Closed);
    assert_eq!(client.close_code, Some(1001));
}

/// The events of a stream until it ends, with `data` decoded.
async fn events(boxd: &TestBoxd, path: &str, body: Value) -> Vec<(String, Value)> {
    use base64::{Engine, engine::general_purpose::STANDARD};
    let response = boxd.post(path, body.to_string()).open().await;
    assert_eq!((response.status().as_u16(), response.headers()["content-type"].to_str().unwrap()), (200, "text/event-stream"));
    let body = tokio::time::timeout(SOON, response.into_body().collect()).await.expect("it ends soon").unwrap().to_bytes();
    let field = |event: &str, name: &str| event.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(": ")).map(str::to_owned);
    let decoded = |mut data: Value| {
        if let Some(text) = data["data"].as_str() {
            data["data"] = json!(String::from_utf8(STANDARD.decode(text).unwrap()).unwrap());
        }
        data
    };
    let text = String::from_utf8(body.to_vec()).unwrap();
    let each = text.split("\n\n").filter_map(|e| Some((field(e, "event")?, decoded(serde_json::from_str(&field(e, "data")?).unwrap()))));
    each.collect()
}

#[tokio::test]
async fn a_command_is_streamed_as_the_sdks_events_and_resumed_at_its_offsets() {
    let boxd = TestBoxd::start();
    let request = json!({ "command": "echo out; cat; exit 3", "command_id": "sse", "shell": "/bin/bash", "timeout_seconds": 60 });
    let started = events(&boxd, "/execute/stream/start", request).await;
    assert_eq!((started[0].0.as_str(), started[0].1["command_id"].as_str()), ("started", Some("sse")));
    let rest = [
        ("stdout".to_owned(), json!({ "offset": 0, "data": "out\n" })),
        ("stream_end".to_owned(), json!({ "stream": "stdout", "offset": 4 })),
        ("stream_end".to_owned(), json!({ "stream": "stderr", "offset": 0 })),
        ("exit".to_owned(), json!({ "exit_code": 3 })),
    ];
    assert_eq!(started[1..], rest);
    let resumed = events(&boxd, "/execute/stream/resume", json!({ "command_id": "sse", "stdout_offset": 2, "stderr_offset": 0 })).await;
    assert_eq!(resumed[1], ("stdout".to_owned(), json!({ "offset": 2, "data": "t\n" })));
    let late = events(&boxd, "/execute/stream/start", json!({ "command": "sleep 1000", "timeout_seconds": 0.2 })).await;
    assert_eq!((late.last().unwrap().0.as_str(), &late.last().unwrap().1["error_type"]), ("error", &json!("CommandTimeout")));
    let unknown = boxd.post("/execute/stream/resume", json!({ "command_id": "never" }).to_string()).send().await.ok(404);
    assert_eq!(unknown.json::<Value>()["detail"]["error"], "CommandNotFound");
}

#[tokio::test]
async fn tunnels_are_refused_in_the_sdks_format() {
    let boxd = TestBoxd::start();
    let answer: Value = boxd.get("/tunnel").send().await.ok(400).json();
    assert_eq!(answer["detail"]["error"], "NotImplemented");
}

#[tokio::test]
async fn a_plain_answer_reports_a_timeout_and_truncated_output() {
    let boxd = TestBoxd::start();
    let run = |body: Value| boxd.post("/execute", body.to_string()).send();
    let late: Value = run(json!({ "command": "echo begun; sleep 1000", "timeout": 0.2 })).await.ok(200).json();
    assert_eq!((late["stdout"].as_str(), late["exit_code"].as_i64()), (Some("begun\n"), Some(137)));
    assert!(late["stderr"].as_str().unwrap().contains("timeout"));
    let long: Value = run(json!({ "command": "head -c 2000000 /dev/zero | tr '\\0' x" })).await.ok(200).json();
    assert_eq!(long["stdout"].as_str().unwrap().len(), 1 << 20);
    assert!(long["stderr"].as_str().unwrap().contains("more output"));
}
