//! The command line as users run it: the real binary with a real broker.

use std::{
    fs,
    io::{BufRead, BufReader, Seek, Write},
    process::{Child, ChildStdout, Output, Stdio},
    time::Duration,
};

use cobox_protocol::session::Mode;
use cobox_testkit::{BrokerOptions, TestBroker, TestTerminal, eventually, negotiate};
use rustix::process::{Pid, Signal, kill_process};

/// Time limit for a program to react to a signal: longer than the time it allows itself to end its command and to
/// write the rest.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(20);

fn run(broker: &TestBroker, args: &[&str]) -> Output {
    broker.cobox().args(args).output().expect("cobox runs")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[tokio::test]
async fn exec_returns_output_and_exit_code() {
    let broker = TestBroker::start().await;
    let output = run(&broker, &["exec", "-t", "t", "--", "sh", "-c", "echo out; echo err >&2; exit 3"]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (b"out\n".as_slice(), b"err\n".as_slice()));
}

/// Starts an `exec` with pipes for its input and output.
fn start_exec(broker: &TestBroker, script: &str) -> (Child, BufReader<ChildStdout>) {
    let mut command = broker.cobox();
    command.args(["exec", "-t", "t", "--", "sh", "-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    (child, output)
}

fn read_line(output: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    line
}

#[tokio::test]
async fn exec_streams_input_and_output_while_the_command_runs() {
    let broker = TestBroker::start().await;
    let (mut child, mut output) = start_exec(&broker, "while read line; do echo got $line; done; echo over; exit 4");
    let mut input = child.stdin.take().unwrap();
    for word in ["one", "two"] {
        writeln!(input, "{word}").unwrap();
        assert_eq!(read_line(&mut output), format!("got {word}\n"));
    }
    drop(input);
    assert_eq!(read_line(&mut output), "over\n");
    assert_eq!(child.wait().unwrap().code(), Some(4));
}

#[tokio::test]
async fn ctrl_c_interrupts_the_command_and_a_second_one_ends_it() {
    let broker = TestBroker::start().await;
    let (mut child, mut output) = start_exec(&broker, "trap 'echo stopping; exit 9' INT; echo ready; while :; do sleep 0.05; done");
    assert_eq!(read_line(&mut output), "ready\n");
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(read_line(&mut output), "stopping\n");
    assert_eq!(child.wait().unwrap().code(), Some(9));

    let (mut child, mut output) = start_exec(&broker, "trap 'echo no' INT; trap '' TERM; echo ready; while :; do sleep 0.05; done");
    assert_eq!(read_line(&mut output), "ready\n");
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(read_line(&mut output), "no\n");
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(stdout(&run(&broker, &["ps", "t"])), "", "nothing keeps running");
    assert!(stdout(&run(&broker, &["ps", "t", "--all"])).contains("cmd_"));
}

#[tokio::test]
async fn closing_the_output_of_exec_ends_its_command() {
    let broker = TestBroker::start().await;
    let (mut child, mut output) = start_exec(&broker, "while :; do echo yes; done");
    assert_eq!(read_line(&mut output), "yes\n");
    drop(output);
    assert_eq!(child.wait().unwrap().code(), Some(141));
    assert_eq!(stdout(&run(&broker, &["ps", "t"])), "");
}

#[tokio::test]
async fn exec_without_stdin_leaves_the_input_unread() {
    let broker = TestBroker::start().await;
    let mut input = tempfile::tempfile().unwrap();
    input.write_all(b"for another program\n").unwrap();
    input.rewind().unwrap();
    let mut command = broker.cobox();
    // Long enough for the input to be read, if it were read.
    command.args(["exec", "-n", "-t", "t", "--", "sh", "-c", "sleep 0.2; cat; echo done"]).stdin(input.try_clone().unwrap());
    assert_eq!(stdout(&command.output().unwrap()), "done\n");
    assert_eq!(input.stream_position().unwrap(), 0);
}

#[tokio::test]
async fn exec_in_the_background_of_a_shell_is_not_stopped() {
    let broker = TestBroker::start().await;
    let cobox = broker.cobox();
    let mut shell = std::process::Command::new("bash");
    shell.env_clear().envs(cobox.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let script = r#"set -m; "$0" exec -t t -- sh -c 'sleep 0.2; echo did it' & wait %1; echo "code $?"; read -r line; echo "<$line>""#;
    shell.args(["--norc", "-c", script]).arg(cobox.get_program());
    let mut terminal = TestTerminal::start("ada", &shell, (80, 24));
    terminal.wait_for("code ").await;
    assert!(terminal.screen_text().contains("did it") && terminal.screen_text().contains("code 0"), "{}", terminal.screen_text());
    terminal.press("words\r");
    terminal.wait_for("<words>").await;
}

#[tokio::test]
async fn exec_handles_a_signal_while_its_output_is_blocked() {
    let broker = TestBroker::start().await;
    let (mut child, mut output) = start_exec(&broker, "exec yes");
    assert_eq!(read_line(&mut output), "y\n");
    // A pipe whose fill level stays the same for so many checks is full, so that its writer is blocked.
    let (mut before, mut checks) = (0, 0);
    eventually("the pipe to be full", || {
        let waiting = rustix::io::ioctl_fionread(output.get_ref()).unwrap();
        checks = if waiting > 0 && waiting == before { checks + 1 } else { 0 };
        before = waiting;
        std::future::ready((checks == 40).then_some(()))
    })
    .await;
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let code = tokio::task::spawn_blocking(move || child.wait().unwrap().code());
    let code = tokio::time::timeout(SIGNAL_TIMEOUT, code).await.expect("it ends although its output is not read").unwrap();
    assert_eq!(code, Some(143));
    assert_eq!(stdout(&run(&broker, &["ps", "t"])), "", "nothing keeps running");
}

#[tokio::test]
async fn exec_with_json_output_reads_its_input() {
    let broker = TestBroker::start().await;
    let cat = |flags: &[&str], input: &[u8]| -> serde_json::Value {
        let mut command = broker.cobox();
        command.args(["--json", "exec", "-t", "t"]).args(flags).args(["--", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        serde_json::from_str(&stdout(&child.wait_with_output().unwrap())).unwrap()
    };
    assert_eq!(cat(&[], b"some words\n")["stdout"], "some words\n");
    assert_eq!(cat(&["-n"], b"some words\n")["stdout"], "");
    assert_eq!(cat(&["--stdin"], b"\xff")["stdout_b64"], "/w==");
    let mut command = broker.cobox();
    command.args(["--json", "exec", "-t", "t", "--", "echo", "out"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let held = child.stdin.take();
    let output = child.wait_with_output().unwrap();
    drop(held);
    assert!(stdout(&output).contains("out\\n"), "a command that reads nothing doesn't wait for the end of its input");
}

#[tokio::test]
async fn exec_with_tty_runs_the_command_on_a_terminal() {
    let broker = TestBroker::start().await;
    let mut command = broker.cobox();
    command.args(["exec", "-t", "t", "--tty", "--", "sh", "-c", "stty size; read x; echo \"<$x>\"; exit 6"]);
    let mut terminal = TestTerminal::start("ada", &command, (91, 27));
    terminal.wait_for("27 91").await;
    terminal.press("words\r");
    terminal.wait_for("<words>").await;
    assert_eq!(terminal.ended().await.code(), Some(6));
}

#[tokio::test]
async fn files_and_folders_are_copied_in_both_directions() {
    let broker = TestBroker::start().await;
    let here = tempfile::tempdir().unwrap();
    let tree = here.path().join("tree");
    fs::create_dir_all(tree.join("sub")).unwrap();
    fs::write(tree.join("sub/a.txt"), "a").unwrap();
    fs::write(tree.join("b.bin"), [0u8, 255, 1]).unwrap();
    stdout(&run(&broker, &["cp", tree.to_str().unwrap(), "t:/workspace/"]));
    assert_eq!(stdout(&run(&broker, &["exec", "-t", "t", "--", "find", "tree", "-type", "f"])).lines().count(), 2);
    let back = here.path().join("back");
    stdout(&run(&broker, &["cp", "t:/workspace/tree", back.to_str().unwrap()]));
    assert_eq!(fs::read(back.join("sub/a.txt")).unwrap(), b"a");
    assert_eq!(fs::read(back.join("b.bin")).unwrap(), [0, 255, 1]);
    let one = here.path().join("one");
    stdout(&run(&broker, &["cp", "t:/workspace/tree/b.bin", one.to_str().unwrap()]));
    assert_eq!(fs::read(one).unwrap(), [0, 255, 1]);
}

#[tokio::test]
async fn copying_a_folder_given_as_a_dot_copies_its_contents() {
    let broker = TestBroker::start().await;
    let here = tempfile::tempdir().unwrap();
    fs::write(here.path().join("a.txt"), "a").unwrap();
    // To a folder that exists and to one that does not, like cp -r.
    for to in ["t:/workspace", "t:/workspace/new"] {
        stdout(&broker.cobox().current_dir(&here).args(["cp", "-r", ".", to]).output().unwrap());
    }
    assert_eq!(stdout(&run(&broker, &["exec", "-t", "t", "-c", "find . -type f | sort"])), "./a.txt\n./new/a.txt\n");
    let back = tempfile::tempdir().unwrap();
    stdout(&run(&broker, &["cp", "t:/workspace/new/.", back.path().to_str().unwrap()]));
    assert_eq!(fs::read(back.path().join("a.txt")).unwrap(), b"a");
}

#[tokio::test]
async fn a_file_is_copied_from_standard_input_and_to_standard_output() {
    let broker = TestBroker::start().await;
    let copy = |args: &[&str], input: &[u8]| {
        let mut command = broker.cobox();
        command.arg("cp").args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        child.wait_with_output().unwrap()
    };
    assert_eq!(stdout(&copy(&["-", "t:/workspace/in.bin"], b"some words")), "copied 1 file, 10 B\n");
    assert_eq!(stdout(&copy(&["t:/workspace/in.bin", "-"], b"")), "some words");
    let refused = copy(&["-", "t:/workspace"], b"");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is a folder"), "{refused:?}");
    // A file in /proc reports a size of 0.
    stdout(&copy(&["/proc/version", "t:/workspace/version"], b""));
    assert_eq!(copy(&["t:/workspace/version", "-"], b"").stdout, fs::read("/proc/version").unwrap());
}

#[tokio::test]
async fn a_name_means_a_sandbox_if_no_thread_has_it() {
    let broker = TestBroker::start().await;
    let json = |args: &[&str]| -> serde_json::Value { serde_json::from_str(&stdout(&run(&broker, args))).expect("JSON") };
    stdout(&run(&broker, &["sandbox", "create", "--name", "build"]));
    stdout(&run(&broker, &["sandbox", "exec", "build", "--", "sh", "-c", "echo mine > who.txt"]));
    assert_eq!(stdout(&run(&broker, &["cp", "build:who.txt", "-"])), "mine\n");
    assert_eq!(json(&["--json", "ps", "build"])["shells"], serde_json::json!([]));
    let mut shell = broker.cobox().args(["shell", "build"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    shell.stdin.take().unwrap().write_all(b"cat who.txt; exit\n").unwrap();
    assert!(String::from_utf8_lossy(&shell.wait_with_output().unwrap().stdout).contains("mine"));
    let watched = run(&broker, &["watch", "build"]);
    assert!(String::from_utf8_lossy(&watched.stderr).contains("no thread uses sandbox build"), "{watched:?}");
    assert_eq!(json(&["--json", "sandbox", "list"])["items"].as_array().unwrap().len(), 1, "none was created");
    // An existing thread takes precedence.
    stdout(&run(&broker, &["exec", "-t", "build", "--", "sh", "-c", "echo theirs > who.txt"]));
    assert_eq!(stdout(&run(&broker, &["cp", "build:who.txt", "-"])), "theirs\n");
    let other_home = tempfile::tempdir().unwrap();
    let without_cache = broker.cobox().env("HOME", other_home.path()).args(["cp", "build:who.txt", "-"]).output().unwrap();
    assert_eq!(stdout(&without_cache), "theirs\n");
}

#[tokio::test]
async fn sync_once_skips_ignored_files() {
    let broker = TestBroker::start().await;
    let here = tempfile::tempdir().unwrap();
    for (name, text) in [("keep.txt", "k"), ("skip.log", "s"), (".gitignore", "*.log\n"), (".coboxignore", "private\n"), ("private", "p")] {
        fs::write(here.path().join(name), text).unwrap();
    }
    stdout(&run(&broker, &["sync", "--once", here.path().to_str().unwrap(), "t:/workspace"]));
    assert_eq!(stdout(&run(&broker, &["exec", "-t", "t", "--", "ls"])), "keep.txt\n");
}

#[tokio::test]
async fn sandbox_sync_accepts_the_json_flag_after_the_name() {
    let broker = TestBroker::start().await;
    let here = tempfile::tempdir().unwrap();
    fs::write(here.path().join("a.txt"), "a").unwrap();
    stdout(&run(&broker, &["sandbox", "create", "--name", "build"]));
    let synced = broker.cobox().current_dir(&here).args(["sandbox", "sync", "build", "--once", "--json"]).output().unwrap();
    let synced: serde_json::Value = serde_json::from_str(&stdout(&synced)).unwrap();
    assert_eq!((&synced["files"], &synced["path"]), (&1.into(), &"/workspace".into()));
}

#[tokio::test]
async fn session_sandbox_and_key_commands_print_json() {
    let broker = TestBroker::start().await;
    let json = |args: &[&str]| -> serde_json::Value { serde_json::from_str(&stdout(&run(&broker, args))).expect("JSON") };
    let session = json(&["--json", "session", "ensure", "t"]);
    assert_eq!(session["thread_id"], "t");
    assert!(session["token"].as_str().unwrap().contains('.'));
    assert_eq!(json(&["--json", "session", "get", "t"])["session_id"], session["session_id"]);
    assert!(json(&["--json", "session", "refresh", "t"])["expires_at"].is_string());
    assert_eq!(json(&["--json", "sandbox", "list"])["items"][0]["id"], session["sandbox"]["id"]);
    assert!(json(&["--json", "keys", "create", "bot", "--kind", "agent"]).to_string().contains("cbx_"));
    assert!(!stdout(&run(&broker, &["keys", "list"])).contains("_secret"));
    stdout(&run(&broker, &["session", "release", "t", "--yes"]));
    assert!(!run(&broker, &["session", "get", "t"]).status.success());
    let doctor = json(&["--json", "doctor"]);
    assert!(doctor.to_string().contains("namespaces"), "{doctor}");
}

#[tokio::test]
async fn an_error_says_what_to_do_next() {
    let broker = TestBroker::start().await;
    let output = run(&broker, &["session", "get", "nobody"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(error.contains("nobody") && error.contains("req_"), "{error}");
    let dead = broker.cobox().env("COBOX_URL", "http://127.0.0.1:1").args(["exec", "--", "true"]).output().unwrap();
    assert_eq!(dead.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&dead.stderr).contains("cobox up"));
}

#[tokio::test]
async fn exec_at_the_sandbox_limit_fails_at_once_and_says_what_to_delete() {
    let config = "max_sandboxes_per_workspace = 1\n[metrics]\npublic = true\n".to_owned();
    let broker = TestBroker::start_with(BrokerOptions { config, ..BrokerOptions::default() }).await;
    let first = broker.client().negotiate(&negotiate("first", Mode::Ensure)).await.unwrap();
    let refused = run(&broker, &["exec", "-t", "second", "--", "true"]);
    assert_eq!(refused.status.code(), Some(125));
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(error.contains("1 sandboxes, which is the limit (max_sandboxes_per_workspace)"), "{error}");
    assert!(error.contains(first.sandbox.id.as_str()) && error.contains("cobox sandbox delete"), "{error}");
    // It asked once and waited for no start.
    let metrics = reqwest::get(format!("{}/metrics", broker.url())).await.unwrap().text().await.unwrap();
    for line in [
        "cobox_requests_total{route=\"/v1/sandbox/sessions\",method=\"POST\",status=\"429\"} 1",
        "cobox_sandbox_start_duration_seconds_count{kind=\"create\"} 1",
        "cobox_sandbox_starts_failed_total{kind=\"create\"} 0",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line}\n{metrics}");
    }
    stdout(&run(&broker, &["sandbox", "delete", first.sandbox.id.as_str(), "--yes"]));
    stdout(&run(&broker, &["exec", "-t", "second", "--", "true"]));
}

#[tokio::test]
async fn the_example_agent_reads_the_file_of_the_human() {
    let broker = TestBroker::start().await;
    stdout(&run(&broker, &["exec", "-t", "demo", "--", "sh", "-c", "echo 'from ada' > from-human.txt"]));
    let agent = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/agent.py");
    let output = std::process::Command::new("python3")
        .arg(agent)
        .args(["--thread", "demo"])
        .env("COBOX_URL", broker.url())
        .env("COBOX_API_KEY", broker.key().expose())
        .output()
        .unwrap();
    assert!(stdout(&output).contains("from ada"), "{output:?}");
}
