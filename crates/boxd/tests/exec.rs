//! Tests of commands from request to response, with real processes.

mod support;

use std::time::{Duration, Instant};

use cobox_protocol::{
    control::{ControlState, Revocation, StopReason},
    exec::ExecResponse,
};
use http::Method;
use serde_json::{Value, json};
use support::{TestBoxd, is_running, wait_for};
use tokio::io::AsyncWriteExt;

async fn exec(boxd: &TestBoxd, request: Value) -> ExecResponse {
    boxd.post("/v1/exec", request.to_string()).send().await.ok(200).json()
}

#[tokio::test]
async fn a_command_returns_its_output_and_exit_code() {
    let boxd = TestBoxd::start();
    let done = exec(&boxd, json!({ "command": "printf out; printf err >&2; exit 3", "env": {"A": "b"} })).await;
    assert_eq!((done.stdout.as_str(), done.stderr.as_str(), done.exit_code), ("out", "err", 3));
    assert_eq!((done.signal, done.timed_out, done.truncated), (None, false, false));
    let done =
        exec(&boxd, json!({ "argv": ["/bin/sh", "-c", "cat; printf \"$A\"; pwd -P"], "stdin": "in ", "env": {"A": "b "}, "cwd": "/" }))
            .await;
    assert_eq!(done.stdout, "in b /\n");
    let done = exec(&boxd, json!({ "command": "printf '\\377a'" })).await;
    assert_eq!((done.stdout.as_str(), done.stdout_b64.as_deref()), ("\u{fffd}a", Some("/2E=")));
    let done = exec(&boxd, json!({ "command": "kill -TERM $$" })).await;
    assert_eq!((done.exit_code, done.signal), (143, Some(15)));
}

#[tokio::test]
async fn a_missing_program_returns_the_exit_code_of_a_shell() {
    let boxd = TestBoxd::start();
    let done = exec(&boxd, json!({ "argv": ["/bin/no-such-program"] })).await;
    assert_eq!((done.exit_code, done.stderr.as_str()), (127, "/bin/no-such-program: not found\n"));
    let done = exec(&boxd, json!({ "argv": ["/etc/passwd"] })).await;
    assert_eq!(done.exit_code, 126);
    boxd.post("/v1/exec", "{}").send().await.refused(400, "INVALID_REQUEST");
    boxd.post("/v1/exec", "not json").send().await.refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn output_beyond_the_limit_is_dropped_and_the_program_continues() {
    let boxd = TestBoxd::start();
    let done = exec(&boxd, json!({ "command": "head -c 3000000 /dev/zero | tr '\\0' x; echo end >&2", "max_output_bytes": 1000 })).await;
    assert_eq!((done.stdout.len(), done.truncated, done.exit_code), (1000, true, 0));
    assert_eq!(done.stderr, "end\n");
}

#[tokio::test]
async fn the_whole_output_of_short_and_long_commands_is_returned() {
    let boxd = TestBoxd::start();
    // Cases: ended before its pipes are read; output larger than the pipes; output at the end of a long run.
    for (command, stdout, stderr) in [
        ("echo out; echo err >&2", 4, 4),
        ("head -c 60000 /dev/zero | tr '\\0' x; head -c 60000 /dev/zero | tr '\\0' y >&2", 60_000, 60_000),
        ("head -c 300000 /dev/zero | tr '\\0' x; echo err >&2", 300_000, 4),
        ("echo early; sleep 0.05; echo late; echo err >&2", 11, 4),
    ] {
        let done = exec(&boxd, json!({ "command": command })).await;
        assert_eq!((done.exit_code, done.stdout.len(), done.stderr.len()), (0, stdout, stderr), "{command}");
    }
    let timed = exec(&boxd, json!({ "command": "echo before; sleep 60", "timeout_seconds": 1 })).await;
    assert_eq!((timed.timed_out, timed.stdout.as_str()), (true, "before\n"));
}

#[tokio::test]
async fn a_command_that_times_out_is_killed_with_its_process_tree() {
    let boxd = TestBoxd::start();
    let done = exec(&boxd, json!({ "command": "sleep 1000 & echo $!; wait", "timeout_seconds": 0.3 })).await;
    assert_eq!((done.exit_code, done.signal, done.timed_out), (137, Some(9), true));
    wait_for(|| !is_running(&done.stdout)).await;
    let request = json!({ "command": support::DAEMONS, "timeout_seconds": 1 });
    let (done, pids) = tokio::join!(exec(&boxd, request), support::daemons(&boxd));
    assert!(done.timed_out);
    assert!(!pids.iter().any(|pid| is_running(pid)), "the daemon is ended, too");
}

#[tokio::test]
async fn a_background_child_that_holds_the_pipes_does_not_delay_the_response() {
    let boxd = TestBoxd::start();
    let started = Instant::now();
    let done = exec(&boxd, json!({ "command": "sleep 1000 & echo $!" })).await;
    assert!(started.elapsed() < Duration::from_secs(5));
    assert!(is_running(&done.stdout), "background processes keep running");
    exec(&boxd, json!({ "command": format!("kill {}", done.stdout) })).await;
}

#[tokio::test]
async fn a_command_is_killed_when_its_client_disconnects() {
    let boxd = TestBoxd::start();
    let body = json!({ "command": "echo $$ > pid.tmp; mv pid.tmp pid; sleep 1000" }).to_string();
    let mut stream = boxd.dial("clients").await;
    let token = boxd.token("exec");
    let head =
        format!("POST /v1/exec HTTP/1.1\r\nhost: b\r\nauthorization: Bearer {}\r\ncontent-length: {}\r\n\r\n", token.expose(), body.len());
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    let file = boxd.host("/workspace/pid");
    wait_for(|| file.exists()).await;
    let pid = std::fs::read_to_string(file).unwrap();
    assert!(is_running(&pid));
    drop(stream);
    wait_for(|| !is_running(&pid)).await;
}

#[tokio::test]
async fn a_command_is_killed_when_its_token_is_revoked() {
    let boxd = TestBoxd::start();
    let claims = boxd.claims("exec");
    let call = boxd.post("/v1/exec", json!({ "command": "echo $$ > pid.tmp; mv pid.tmp pid; sleep 1000" }).to_string());
    let waiting = call.token(&boxd.key.mint(&claims)).open();
    let file = boxd.host("/workspace/pid");
    let control = async {
        wait_for(|| file.exists()).await;
        let mut state = boxd.state.clone();
        state.version += 1;
        state.revoked = vec![Revocation::Session(claims.sid.clone().unwrap())];
        boxd.control(Method::PUT, "/control/state").body(serde_json::to_vec(&state).unwrap()).send().await.ok(200);
    };
    let (answer, ()) = tokio::join!(waiting, control);
    assert_eq!(answer.status(), 401);
    let pid = std::fs::read_to_string(&file).unwrap();
    wait_for(|| !is_running(&pid)).await;
}

#[tokio::test]
async fn a_running_command_is_answered_when_the_sandbox_ends() {
    let boxd = TestBoxd::start();
    let waiting = boxd.post("/v1/exec", json!({ "command": "touch begun; sleep 1000" }).to_string()).send();
    let control = async {
        wait_for(|| boxd.host("/workspace/begun").exists()).await;
        let state = ControlState { version: 2, stop_reason: Some(StopReason::Ended), ..boxd.state.clone() };
        boxd.control(Method::PUT, "/control/state").body(serde_json::to_vec(&state).unwrap()).send().await.ok(200);
    };
    let (answer, ()) = tokio::join!(waiting, control);
    answer.refused(410, "SESSION_EXPIRED");
    boxd.post("/v1/exec", json!({ "command": "ls" }).to_string()).send().await.refused(410, "SESSION_EXPIRED");
}

#[tokio::test]
async fn an_invalid_request_is_refused_with_a_message() {
    let boxd = TestBoxd::start();
    for (body, words) in [("[]", "the body: must be a JSON object"), (r#"{"argv": "ls"}"#, "argv: must be a list, not a string")] {
        let message = boxd.post("/v1/exec", body).send().await.refused(400, "INVALID_REQUEST");
        assert_eq!(message, words);
    }
}

#[tokio::test]
async fn the_langsmith_route_answers_in_the_sdks_format() {
    let boxd = TestBoxd::start();
    let run = |body: Value| boxd.post("/execute", body.to_string()).send();
    let done: Value =
        run(json!({ "command": "echo $A; exit 2", "timeout": 5, "shell": "/bin/bash", "env": {"A": "b"} })).await.ok(200).json();
    assert_eq!(done, json!({ "stdout": "b\n", "stderr": "", "exit_code": 2 }));
    let done: Value = run(json!({ "command": "sleep 1000", "timeout_secs": 0.2 })).await.ok(200).json();
    assert_eq!(done["exit_code"], 137);
    let bad: Value = run(json!({ "command": 7 })).await.ok(400).json();
    assert_eq!(bad["detail"]["error"], "CommandError");
    let denied = boxd.post("/execute", json!({ "command": "ls" }).to_string()).token(&boxd.token("fs_read")).send().await;
    assert_eq!(denied.ok(403).json::<Value>()["detail"]["error"], "PermissionDenied");
}

#[tokio::test]
async fn commands_beyond_the_limit_are_rate_limited() {
    let boxd = TestBoxd::start();
    let fifo = boxd.host("/workspace/gate");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR, 0).unwrap();
    // Each command waits at the fifo until its other side is opened and closed.
    let held: Vec<_> = (0..64).map(|_| Box::pin(exec(&boxd, json!({ "command": "touch at-gate.$$; read x < gate || true" })))).collect();
    let held = futures_util::future::join_all(held);
    let count = || std::fs::read_dir(boxd.host("/workspace")).unwrap().count();
    let refuse_one_and_open_the_gate = async {
        wait_for(|| count() == 1 + 64).await;
        let answer = boxd.post("/v1/exec", json!({ "command": "true" }).to_string()).send().await;
        assert!(answer.refused(429, "RATE_LIMITED").contains("64"));
        // Repeated, because an opening doesn't release a command that hasn't reached the fifo yet.
        loop {
            let _ = rustix::fs::open(&fifo, rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NONBLOCK, rustix::fs::Mode::empty());
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        done = held => assert!(done.iter().all(|d| d.exit_code == 0)),
        () = refuse_one_and_open_the_gate => unreachable!(),
    }
}

#[tokio::test]
async fn input_that_is_not_text_is_sent_as_base64() {
    let boxd = TestBoxd::start();
    let done = exec(&boxd, json!({"argv": ["cat"], "stdin_b64": "/wBh"})).await;
    assert_eq!((done.stdout_b64.as_deref(), done.exit_code), (Some("/wBh"), 0));
    let kept = exec(&boxd, json!({"argv": ["cat"], "stdin_b64": "/wBh", "command_id": "kept"})).await;
    assert_eq!(kept.stdout_b64.as_deref(), Some("/wBh"));
    for bad in [json!({"command": "cat", "stdin_b64": "%"}), json!({"command": "cat", "stdin_b64": "YQ==", "stdin": "a"})] {
        let why = boxd.post("/v1/exec", bad.to_string()).send().await.refused(400, "INVALID_REQUEST");
        assert!(why.contains("stdin_b64"), "{why}");
    }
}

#[tokio::test]
async fn an_unknown_field_is_refused_by_name() {
    let boxd = TestBoxd::start();
    let request = json!({"command": "touch ran", "std_in": "a"}).to_string();
    let why = boxd.post("/v1/exec", request.clone()).send().await.refused(400, "INVALID_REQUEST");
    assert!(why.starts_with("std_in: is not a field"), "{why}");
    let call = boxd.post("/v1/exec", request).header("accept", "text/event-stream");
    call.send().await.refused(400, "INVALID_REQUEST");
    assert!(!boxd.host("/workspace/ran").exists());
    for name in ["timeout", "timeout_secs", "timeout_seconds"] {
        boxd.post("/v1/exec", json!({"command": "true", name: 5}).to_string()).send().await.ok(200);
    }
}

#[tokio::test]
async fn background_processes_of_a_command_continue_even_if_they_print() {
    let boxd = TestBoxd::start();
    // More than the pipes hold, after the command's end.
    let left = |name: &str| {
        format!("(while [ ! -e {name}.go ]; do sleep 0.01; done; seq 1 30000; seq 1 30000 >&2; touch {name}.alive) & echo begun")
    };
    for (name, request) in
        [("once", json!({ "command": left("once") })), ("kept", json!({ "command": left("kept"), "command_id": "kept" }))]
    {
        let done = exec(&boxd, request).await;
        assert_eq!((done.stdout.as_str(), done.exit_code), ("begun\n", 0));
        std::fs::write(boxd.host(format!("/workspace/{name}.go")), "").unwrap();
        wait_for(|| boxd.host(format!("/workspace/{name}.alive")).exists()).await;
    }
}

#[tokio::test]
async fn the_duration_of_an_ended_command_does_not_grow() {
    let boxd = TestBoxd::start();
    let request = json!({ "command": "sleep 0.3", "command_id": "slept" });
    let first = exec(&boxd, request.clone()).await;
    assert!(first.duration_ms > 0, "{first:?}");
    assert_eq!(exec(&boxd, request).await.duration_ms, first.duration_ms);
}
