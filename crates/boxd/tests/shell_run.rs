//! Tests of API commands in a shared shell: typed at its prompt, visible to all participants, or refused while the
//! shell is busy.

mod support;

use cobox_protocol::{
    frame::ShellStart,
    shell::{ShellInfo, ShellRunResult},
};
use support::{
    EVERYTHING, SOON, TestBoxd,
    viewer::{ClientFrame, ServerFrame, Viewer},
};

/// With a real bash, as in most sandboxes.
fn boxd_with_bash() -> TestBoxd {
    let boxd = TestBoxd::start();
    std::fs::create_dir_all(boxd.host("/bin")).unwrap();
    std::fs::write(boxd.host("/bin/bash"), "").unwrap();
    std::fs::create_dir_all(boxd.host("/home")).unwrap();
    std::fs::write(boxd.host("/home/.bashrc"), "PS1='box> '\nPROMPT_COMMAND='true from the user'\nuser_ran_rc=yes\n").unwrap();
    boxd
}

async fn at_a_prompt(boxd: &TestBoxd) -> Viewer {
    let env = [("HOME".to_owned(), boxd.host("/home").display().to_string())].into();
    let mut ada = Viewer::attach(boxd, &boxd.token(EVERYTHING), ShellStart { env: Some(env), ..Default::default() }).await;
    until_at_prompt(boxd).await;
    ada.send(ClientFrame::Ping { id: None }).await;
    ada.frame(|frame| matches!(frame, ServerFrame::Pong { .. }).then_some(())).await;
    ada
}

async fn until_at_prompt(boxd: &TestBoxd) {
    let ready = async {
        while boxd.get("/v1/shells/main").send().await.json::<ShellInfo>().at_prompt != Some(true) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, ready).await.expect("the shell reaches its prompt");
}

async fn run(boxd: &TestBoxd, command: &str) -> ShellRunResult {
    let body = serde_json::json!({ "command": command, "timeout_seconds": 10 });
    boxd.post("/v1/shells/main/run", serde_json::to_vec(&body).unwrap()).send().await.ok(200).json()
}

async fn busy_error(boxd: &TestBoxd) -> String {
    boxd.post("/v1/shells/main/run", r#"{"command": "echo no"}"#).send().await.refused(409, "SHELL_BUSY")
}

#[tokio::test]
async fn a_command_is_visible_to_all_participants_and_returns_its_output_and_status() {
    let boxd = boxd_with_bash();
    let mut ada = at_a_prompt(&boxd).await;
    let result = run(&boxd, "echo one; echo \"$user_ran_rc\"; (exit 7)").await;
    assert_eq!((result.output.as_str(), result.exit_code, result.timed_out, result.truncated), ("one\nyes\n", Some(7), false, false));
    ada.shows("box> echo one; echo \"$user_ran_rc\"; (exit 7)\none\nyes\nbox>").await;
    assert!(!String::from_utf8_lossy(&ada.output).contains("7717"), "the marks are hidden from participants");

    let result = run(&boxd, "for i in 1 2 3; do\n\techo line $i\ndone\n").await;
    assert_eq!((result.output.as_str(), result.exit_code), ("line 1\nline 2\nline 3\n", Some(0)));
    let result = run(&boxd, "# nothing at all").await;
    assert_eq!((result.output.as_str(), result.exit_code), ("", Some(0)));
    let result = run(&boxd, "cd /; printf 'no newline'").await;
    assert_eq!(result.output, "no newline");
    assert_eq!(run(&boxd, "pwd").await.output, "/\n", "it is one shell");
    let result = run(&boxd, "printf '\\377'").await;
    assert_eq!((result.output_b64.as_deref(), result.exit_code), (Some("/w=="), Some(0)));
}

#[tokio::test]
async fn the_output_of_a_multi_line_command_begins_with_the_first_line() {
    let boxd = boxd_with_bash();
    let _ada = at_a_prompt(&boxd).await;
    for _ in 0..20 {
        let result = run(&boxd, "echo one\n# between\necho two; echo three\n(exit 4)").await;
        assert_eq!((result.output.as_str(), result.exit_code), ("one\ntwo\nthree\n", Some(4)));
    }
}

#[tokio::test]
async fn a_syntax_error_of_the_shell_is_the_output() {
    let boxd = boxd_with_bash();
    let _ada = at_a_prompt(&boxd).await;
    for command in ["if then", "for i in 1 2; do\n\techo $i\ndone; if then"] {
        let result = run(&boxd, command).await;
        assert!(result.output.ends_with("syntax error near unexpected token `then'\n"), "{result:?}");
        assert!(!result.output.contains("echo"), "the line itself is not in the output: {result:?}");
        assert_eq!((result.exit_code, result.truncated), (Some(2), false));
    }
    assert_eq!(run(&boxd, "echo and goes on").await.output, "and goes on\n");
}

#[tokio::test]
async fn history_expansion_applies_to_typed_lines_and_not_to_api_commands() {
    let boxd = boxd_with_bash();
    let mut ada = at_a_prompt(&boxd).await;
    let result = run(&boxd, "printf \"#!/bin/sh\\n\"; (exit 3)").await;
    assert_eq!((result.output.as_str(), result.exit_code, result.timed_out), ("#!/bin/sh\n", Some(3), false));
    let result = run(&boxd, "echo $? !! \"!ec\"\necho !$").await;
    assert_eq!((result.output.as_str(), result.exit_code), ("3 !! !ec\n!$\n", Some(0)));
    ada.type_in("echo \"<$((1+1))>\"\r").await;
    ada.shows("\n<2>\nbox>").await;
    until_at_prompt(&boxd).await;
    ada.type_in("!! again\r").await;
    ada.shows("\n<2> again\nbox>").await;
    until_at_prompt(&boxd).await;
    assert_eq!(run(&boxd, "set -o vi; echo free").await.output, "free\n");
    assert_eq!(run(&boxd, "echo !!").await.output, "!!\n", "nor in vi mode");
}

#[tokio::test]
async fn resizing_while_a_command_runs_does_not_change_its_output() {
    let boxd = boxd_with_bash();
    let mut ada = at_a_prompt(&boxd).await;
    let resize = async {
        ada.read_until("first").await;
        ada.send(ClientFrame::Resize { cols: 101, rows: 41 }).await;
        ada.type_in("go\n").await;
    };
    let (result, ()) = tokio::join!(run(&boxd, "echo 'fi''rst'; read line; echo \"$line\"; stty size"), resize);
    assert_eq!((result.output.replace("go\ngo", "go").as_str(), result.truncated), ("first\ngo\n41 101\n", false));
}

#[tokio::test]
async fn output_is_cut_at_the_requested_limit_and_may_exceed_the_ring_buffer() {
    let boxd = boxd_with_bash();
    let _ada = at_a_prompt(&boxd).await;
    let result = run(&boxd, "seq 1 100000").await;
    let expected: String = (1..=100_000).map(|i| format!("{i}\n")).collect();
    assert!(result.output == expected || (result.truncated && expected.starts_with(&result.output)));
    let result: ShellRunResult =
        boxd.post("/v1/shells/main/run", r#"{"command": "seq 1 1000", "max_output_bytes": 12}"#).send().await.ok(200).json();
    assert_eq!((result.output.as_str(), result.truncated, result.exit_code), ("1\n2\n3\n4\n", true, Some(0)));
}

#[tokio::test]
async fn a_busy_shell_reports_why_it_is_busy() {
    let boxd = boxd_with_bash();
    let mut ada = at_a_prompt(&boxd).await;
    ada.type_in("echo half").await;
    ada.shows("echo half").await;
    assert!(busy_error(&boxd).await.contains("an unfinished line"));
    ada.type_in("\x15").await;
    ada.send(ClientFrame::Ping { id: None }).await;
    ada.frame(|frame| matches!(frame, ServerFrame::Pong { .. }).then_some(())).await;
    assert_eq!(run(&boxd, "echo free").await.output, "free\n");

    // Keys that arrive before the program has taken over the terminal may be consumed by the line editor.
    ada.type_in("echo me\"ow\"; cat\n").await;
    ada.shows("\nmeow").await;
    ada.type_in("into the cat\n").await;
    ada.shows("into the cat\ninto the cat").await;
    assert!(busy_error(&boxd).await.contains("a program is running"));
    ada.type_in("\x04").await;
    until_at_prompt(&boxd).await;

    ada.type_in("printf '\\033[?1049h'; read -rsn1\n").await;
    while !ada.screen.screen().alternate_screen() {
        ada.step().await;
    }
    assert!(busy_error(&boxd).await.contains("full-screen"));
    ada.type_in("q").await;
    until_at_prompt(&boxd).await;
    ada.type_in("printf '\\033[?1049l'\n").await;
    while ada.screen.screen().alternate_screen() {
        ada.step().await;
    }
    until_at_prompt(&boxd).await;

    let first = tokio::spawn(boxd.post("/v1/shells/main/run", r#"{"command": "echo re\"ady\"; read line; echo got $line"}"#).open_owned());
    ada.shows("\nready").await;
    let why = busy_error(&boxd).await;
    assert!(why.contains("another command") || why.contains("a program is running"), "{why}");
    ada.type_in("word\n").await;
    assert_eq!(first.await.unwrap().json::<ShellRunResult>().output, "ready\nword\ngot word\n");

    let mut other = Viewer::attach(
        &boxd,
        &boxd.token(EVERYTHING),
        ShellStart { shell: Some("own".into()), command: Some("cat".into()), ..Default::default() },
    )
    .await;
    other.type_in("x\n").await;
    other.shows("x\nx").await;
    let why = boxd.post("/v1/shells/own/run", r#"{"command": "echo no"}"#).send().await.refused(409, "SHELL_BUSY");
    assert!(why.contains("with its own command"), "{why}");
}

#[tokio::test]
async fn a_command_that_times_out_is_interrupted_like_ctrl_c() {
    let boxd = boxd_with_bash();
    let mut ada = at_a_prompt(&boxd).await;
    let result: ShellRunResult =
        boxd.post("/v1/shells/main/run", r#"{"command": "echo begun; sleep 1000", "timeout_seconds": 0.3}"#).send().await.ok(200).json();
    assert_eq!((result.timed_out, result.exit_code), (true, Some(130)));
    assert!(result.output.starts_with("begun\n"), "{result:?}");
    assert_eq!(run(&boxd, "echo and goes on").await.output, "and goes on\n");
    ada.shows("and goes on").await;
}

#[tokio::test]
async fn a_command_can_be_run_in_a_new_shell() {
    let boxd = boxd_with_bash();
    std::fs::write(boxd.host("/home/.bashrc"), "sleep 0.5; slow_to_start=yes\n").unwrap();
    let create = serde_json::json!({ "name": "main", "env": { "HOME": boxd.host("/home") } });
    boxd.post("/v1/shells", serde_json::to_vec(&create).unwrap()).send().await.ok(201);
    let result = run(&boxd, "echo $slow_to_start").await;
    assert_eq!((result.output.as_str(), result.exit_code), ("yes\n", Some(0)));
}

#[tokio::test]
async fn a_command_that_ends_the_shell_returns_the_shells_status() {
    let boxd = boxd_with_bash();
    let _ada = at_a_prompt(&boxd).await;
    let result = run(&boxd, "exit 3").await;
    assert_eq!((result.exit_code, result.timed_out), (Some(3), false));
}

#[tokio::test]
async fn a_plain_sh_marks_its_prompts_too() {
    let boxd = TestBoxd::start();
    let mut ada = at_a_prompt(&boxd).await;
    let result = run(&boxd, "echo one; (exit 3)").await;
    assert_eq!((result.output.as_str(), result.exit_code), ("one\n", Some(3)));
    ada.shows("$ echo one; (exit 3)\none\n$").await;
    boxd.post("/v1/shells/main/run", r#"{"command": "echo a\necho b"}"#).send().await.refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn running_requires_exec_and_shell_observe_and_a_command_that_can_be_typed() {
    let boxd = boxd_with_bash();
    let _ada = at_a_prompt(&boxd).await;
    for scope in ["exec", "shell", "shell_observe fs_read"] {
        let call = boxd.post("/v1/shells/main/run", r#"{"command": "echo no"}"#).token(&boxd.token(scope));
        call.send().await.refused(403, "CAPABILITY_DENIED");
    }
    let call = boxd.post("/v1/shells/main/run", r#"{"command": "echo yes"}"#).token(&boxd.token("exec shell_observe"));
    assert_eq!(call.send().await.ok(200).json::<ShellRunResult>().output, "yes\n");
    for bad in [r#"{"command": "  "}"#, r#"{"command": "a\u001b[201~b"}"#, r#"{"command": "a", "timeout_seconds": -1}"#] {
        boxd.post("/v1/shells/main/run", bad).send().await.refused(400, "INVALID_REQUEST");
    }
    boxd.post("/v1/shells/none/run", r#"{"command": "a"}"#).send().await.refused(404, "SHELL_NOT_FOUND");
}

#[tokio::test]
async fn an_agents_first_command_creates_the_default_shell() {
    let boxd = boxd_with_bash();
    let agent = boxd.token("exec shell_observe");
    let call = boxd.post("/v1/shells/main/run", r#"{"command": "echo first"}"#).token(&agent);
    assert_eq!(call.send().await.ok(200).json::<ShellRunResult>().output, "first\n");
    let mut ada = Viewer::attach(&boxd, &boxd.token(EVERYTHING), ShellStart::default()).await;
    ada.shows("first").await;
    // Any other name is treated as a mistake.
    boxd.post("/v1/shells/build/run", r#"{"command": "a"}"#).token(&agent).send().await.refused(404, "SHELL_NOT_FOUND");
}
