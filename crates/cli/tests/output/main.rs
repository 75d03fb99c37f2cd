//! Snapshots of every command's output, as text and as JSON, against a real broker. They show changes of formats that
//! programs read.

mod sync;
mod transcript;

use std::{
    fs,
    io::{BufRead, BufReader},
    process::Stdio,
};

use cobox_testkit::TestBroker;
use transcript::Transcript;

#[tokio::test]
async fn sessions() {
    let broker = TestBroker::start().await;
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["session", "ensure", "demo", "--tag", "team=blue"]);
    transcript.assert_snapshot("session_ensure");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["session", "get", "demo"]);
    transcript.run(&["session", "get", "nobody"]);
    transcript.assert_snapshot("session_get");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["session", "list"]);
    transcript.run_text_and_json(&["session", "list", "--tag", "team=red"]);
    transcript.assert_snapshot("session_list");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["session", "refresh", "demo"]);
    transcript.assert_snapshot("session_refresh");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["session", "heartbeat", "demo"]);
    transcript.assert_snapshot("session_heartbeat");
    let mut transcript = Transcript::at(&broker);
    transcript.run(&["session", "exec", "demo", "--", "echo", "hello"]);
    transcript.run(&["--json", "session", "exec", "demo", "-c", "echo hello; exit 3"]);
    transcript.assert_snapshot("session_exec");
    let mut transcript = Transcript::at(&broker);
    transcript.run(&["session", "release", "demo", "--yes"]);
    transcript.run(&["session", "release", "demo", "--yes"]);
    broker.cobox().args(["session", "ensure", "demo"]).output().unwrap();
    transcript.run(&["--json", "session", "release", "demo", "--yes"]);
    transcript.assert_snapshot("session_release");
}

#[tokio::test]
async fn sandboxes() {
    let broker = TestBroker::start().await;
    let mut transcript = Transcript::at(&broker);
    transcript.run(&["sandbox", "create", "--name", "build", "--keep", "--tag", "team=blue"]);
    transcript.run(&["--json", "sandbox", "create", "--name", "test"]);
    transcript.run(&["sandbox", "create", "--name", "build"]);
    transcript.assert_snapshot("sandbox_create");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["sandbox", "list", "--tag", "team=blue"]);
    transcript.assert_snapshot("sandbox_list");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["sandbox", "get", "build"]);
    transcript.run(&["sandbox", "get", "nothing"]);
    transcript.assert_snapshot("sandbox_get");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["sandbox", "set", "build", "--no-keep", "--tag", "team=red"]);
    transcript.run(&["sandbox", "set", "build"]);
    transcript.assert_snapshot("sandbox_set");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["sandbox", "templates"]);
    transcript.assert_snapshot("sandbox_templates");
    let mut transcript = Transcript::at(&broker);
    transcript.run(&["sandbox", "exec", "build", "--", "echo", "hello"]);
    transcript.run(&["--json", "sandbox", "exec", "build", "--", "echo", "hello"]);
    transcript.assert_snapshot("sandbox_exec");
    let mut transcript = Transcript::at(&broker);
    transcript.run(&["sandbox", "delete", "build", "--yes"]);
    transcript.run(&["--json", "sandbox", "delete", "test", "--yes"]);
    transcript.assert_snapshot("sandbox_delete");
}

#[tokio::test]
async fn shares_keys_and_principals() {
    let broker = TestBroker::start().await;
    let mut transcript = Transcript::at(&broker);
    transcript.run(&["keys", "create", "bob", "--kind", "human"]);
    transcript.run(&["--json", "keys", "create", "bot", "--kind", "agent", "--expires", "30d"]);
    transcript.assert_snapshot("keys_create");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["keys", "list"]);
    transcript.assert_snapshot("keys_list");
    let listed = broker.cobox().args(["--json", "keys", "list"]).output().unwrap();
    let keys: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let key = |name: &str| keys["items"].as_array().unwrap().iter().find(|k| k["name"] == name).unwrap()["id"].as_str().unwrap().to_owned();
    let (bob, bot) = (key("bob"), key("bot"));
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["keys", "expire", &bot, "--in", "1d"]);
    transcript.assert_snapshot("keys_expire");
    let mut transcript = Transcript::at(&broker);
    broker.cobox().args(["session", "ensure", "demo", "--access", "owner"]).output().unwrap();
    transcript.run_text_and_json(&["share", "grant", "demo", "bob", "--capability", "fs_read"]);
    transcript.assert_snapshot("share_grant");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["share", "list", "demo"]);
    transcript.assert_snapshot("share_list");
    let mut transcript = Transcript::at(&broker);
    transcript.run(&["share", "revoke", "demo", "bob"]);
    transcript.run(&["--json", "share", "revoke", "demo", "bob"]);
    transcript.assert_snapshot("share_revoke");
    let mut transcript = Transcript::at(&broker);
    transcript.run(&["keys", "revoke", &bob]);
    transcript.run(&["--json", "keys", "revoke", &bot]);
    transcript.assert_snapshot("keys_revoke");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["principals", "list"]);
    transcript.assert_snapshot("principals_list");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["principals", "disable", "bob"]);
    transcript.assert_snapshot("principals_disable");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["principals", "enable", "bob"]);
    transcript.assert_snapshot("principals_enable");
}

#[tokio::test]
async fn contexts() {
    let broker = TestBroker::start().await;
    let elsewhere = tempfile::tempdir().unwrap();
    let path = elsewhere.path().display().to_string();
    let new_transcript = || {
        let config = elsewhere.path().join("config.toml").display().to_string();
        Transcript::at(&broker).env("COBOX_CONFIG", &config).env("COBOX_URL", "").env("COBOX_API_KEY", "").redacting(&path, "CONFIG")
    };
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&["config", "path"]);
    transcript.assert_snapshot("config_path");
    let mut transcript = new_transcript();
    let key = broker.key().expose().to_owned();
    transcript.run_with(&["config", "add", "here", "--url", broker.url()], &key);
    transcript.run_with(&["--json", "config", "add", "there", "--url", "https://cobox.invalid", "--no-check", "--store", "file"], &key);
    transcript.run_with(&["config", "add", "wrong", "--url", broker.url()], "cbx_00000000000000000000000000_nonsense");
    transcript.run_with(&["config", "add", "empty", "--url", broker.url()], "");
    transcript.run(&["config", "add", "../x", "--url", broker.url()]);
    transcript.run(&["config", "add", "local", "--url", broker.url()]);
    transcript.assert_snapshot("config_add");
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&["config", "contexts"]);
    transcript.assert_snapshot("config_contexts");
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&["config", "use", "there"]);
    transcript.run(&["config", "use", "nowhere"]);
    transcript.assert_snapshot("config_use");
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&["--context", "here", "config", "show"]);
    transcript.run(&["--url", "https://other.invalid", "config", "show"]);
    transcript.run(&["--context", "here", "session", "list"]);
    transcript.assert_snapshot("config_show");
    let mut transcript = new_transcript();
    transcript.run(&["config", "remove", "here"]);
    transcript.run(&["--json", "config", "remove", "there"]);
    transcript.assert_snapshot("config_remove");
    assert_eq!(fs::read_dir(elsewhere.path().join("keys")).unwrap().count(), 0, "keys are removed with their contexts");
}

#[tokio::test]
async fn commands_in_a_sandbox() {
    let broker = TestBroker::start().await;
    let mut transcript = Transcript::at(&broker);
    transcript.run(&["exec", "-t", "demo", "--", "sh", "-c", "echo out; echo err >&2; exit 3"]);
    transcript.run(&["--json", "exec", "-t", "demo", "-c", "echo out; echo err >&2; exit 3"]);
    transcript.run(&["exec", "-t", "demo", "--", "no-such-program"]);
    transcript.run(&["exec", "-t", "demo", "--timeout", "0.1", "--", "sleep", "60"]);
    transcript.assert_snapshot("exec");

    let mut command = broker.cobox();
    command.args(["exec", "-t", "demo", "--", "sh", "-c", "echo ready; cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let mut transcript = Transcript::at(&broker);
    transcript.run(&["ps", "demo"]);
    let listed = transcript.run(&["--json", "ps", "demo"]);
    transcript.assert_snapshot("ps");
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let id = listed["processes"][0]["id"].as_str().unwrap();
    let mut transcript = Transcript::at(&broker);
    transcript.run(&["kill", "-t", "demo", "--signal", "CONT", id]);
    transcript.run(&["--json", "kill", "-t", "demo", id]);
    transcript.run(&["kill", "-t", "demo", "nothing"]);
    transcript.assert_snapshot("kill");
    drop(child.stdin.take());
    child.wait().unwrap();
}

#[tokio::test]
async fn watch_ends_when_its_reader_closes() {
    let broker = TestBroker::start().await;
    assert!(broker.cobox().args(["session", "ensure", "demo"]).stdout(Stdio::null()).status().unwrap().success());
    let mut watching = broker.cobox().args(["watch", "demo", "--history"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(watching.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.contains("created the session"), "{first}");
    // No further event arrives, and the command ends anyway, as in `cobox watch
    // head -1`.
    assert!(watching.wait().unwrap().success());
}

#[tokio::test]
async fn files() {
    let broker = TestBroker::start().await;
    let here = tempfile::tempdir().unwrap();
    fs::create_dir(here.path().join("src")).unwrap();
    fs::write(here.path().join("src/a.txt"), "a\n").unwrap();
    fs::write(here.path().join("src/.gitignore"), "*.log\n").unwrap();
    fs::write(here.path().join("src/b.log"), "b\n").unwrap();
    let path = here.path().display().to_string();
    let src = format!("{path}/src");
    let new_transcript = || Transcript::at(&broker).redacting(&path, "DIR");
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&["cp", &format!("{src}/a.txt"), "demo:/workspace/"]);
    transcript.run(&["cp", "demo:/workspace/a.txt", &format!("{path}/back.txt")]);
    transcript.run(&["cp", "demo:/workspace/nothing", &path]);
    transcript.assert_snapshot("cp");
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&["sync", "--once", &src, "demo:/workspace/src"]);
    transcript.assert_snapshot("sync");
}

#[tokio::test]
async fn live_sync() {
    let broker = TestBroker::start().await;
    let top = tempfile::tempdir().unwrap();
    let top = top.path().canonicalize().unwrap();
    let (path, notes) = (top.display().to_string(), top.join("notes.txt"));
    fs::write(&notes, "first\n").unwrap();
    let new_transcript = || Transcript::at(&broker).redacting(&path, "DIR");
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&["sync", "list"]);
    let mut syncing = broker.cobox();
    syncing.args(["--json", "sync", &path, "demo:/workspace/src"]).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut syncing = syncing.spawn().unwrap();
    let mut events = BufReader::new(syncing.stdout.take().unwrap()).lines();
    let mut wait_for = |is_it: &dyn Fn(&serde_json::Value) -> bool| {
        let values = events.by_ref().map(|line| serde_json::from_str(&line.unwrap()).unwrap());
        assert!(values.into_iter().any(|value| is_it(&value)), "it ended before");
    };
    wait_for(&|event| event["phase"] == "watching");
    transcript.run_text_and_json(&["sync", "list"]);
    transcript.assert_snapshot("sync_list");

    let s = ["--sync", path.as_str()];
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&[&["sync", "flush", "--wait"], &s[..]].concat());
    transcript.assert_snapshot("sync_flush");
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&[&["sync", "pause"], &s[..]].concat());
    transcript.assert_snapshot("sync_pause");
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&[&["sync", "resume"], &s[..]].concat());
    transcript.assert_snapshot("sync_resume");
    broker.cobox().args([&["sync", "pause"], &s[..]].concat()).output().unwrap();
    fs::write(&notes, "first\nfrom here\n").unwrap();
    let line = "printf 'first\\nfrom there\\n' > /workspace/src/notes.txt";
    assert!(broker.cobox().args(["exec", "-t", "demo", "--no-flush", "-c", line]).status().unwrap().success());
    broker.cobox().args([&["sync", "resume"], &s[..]].concat()).output().unwrap();
    wait_for(&|event| event["status"]["conflicts"].as_array().is_some_and(|c| !c.is_empty()));
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&[&["sync", "status"], &s[..]].concat());
    transcript.run(&["sync", "status", "--sync", "/nowhere"]);
    transcript.assert_snapshot("sync_status");
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&[&["sync", "diff", "notes.txt"], &s[..]].concat());
    transcript.assert_snapshot("sync_diff");
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&[&["sync", "resolve", "--keep", "here", "notes.txt"], &s[..]].concat());
    transcript.run(&[&["sync", "flush", "--wait"], &s[..]].concat());
    transcript.run(&["exec", "-t", "demo", "--", "cat", "/workspace/src/notes.txt"]);
    let pid = rustix::process::Pid::from_child(&syncing);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    syncing.wait().unwrap();
    transcript.run(&[&["sync", "resolve", "--keep", "here", "notes.txt"], &s[..]].concat());
    transcript.assert_snapshot("sync_resolve");
}

/// A chat with a deployment is tested in tests/chat.
#[tokio::test]
async fn a_chat_without_a_deployment() {
    let broker = TestBroker::start().await;
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["chat", "--no-tui"]);
    transcript.run(&["chat", "--deployment", "http://127.0.0.1:1", "--no-tui"]);
    transcript.run(&["chat", "--deployment", "ftp://somewhere", "--no-tui"]);
    transcript.run(&["chat", "--deployment", "http://user:password@127.0.0.1:1", "--no-tui"]);
    transcript.run(&["chat", "--sandbox", "dev"]);
    transcript.assert_snapshot("chat");
}

#[tokio::test]
async fn audit_and_master_key() {
    let mut broker = TestBroker::start().await;
    broker.cobox().args(["keys", "create", "bob", "--kind", "human"]).output().unwrap();
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["audit", "--limit", "1"]);
    transcript.assert_snapshot("audit");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["audit", "head"]);
    transcript.assert_snapshot("audit_head");
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["audit", "verify"]);
    transcript.assert_snapshot("audit_verify");
    let mut transcript = Transcript::at(&broker);
    transcript.run(&["audit", "export"]);
    transcript.assert_snapshot("audit_export");
    let data_dir = broker.data_dir().display().to_string();
    broker.interrupt();
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["master-key", "rotate", "--data-dir", &data_dir]);
    transcript.assert_snapshot("master_key_rotate");
}

#[tokio::test]
async fn policies() {
    let broker = TestBroker::start().await;
    let dir = tempfile::tempdir().unwrap();
    let (path, file) = (dir.path().display().to_string(), dir.path().join("policy.toml").display().to_string());
    fs::write(&file, "[agent]\ncapabilities = [\"fs_read\"]\n").unwrap();
    let new_transcript = || Transcript::at(&broker).redacting(&path, "DIR");
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&["policy", "check", &file]);
    transcript.assert_snapshot("policy_check");
    let mut transcript = new_transcript();
    transcript.run_text_and_json(&["policy", "explain", "--policy", &file, "--principal", "bot", "--kind", "agent"]);
    transcript.assert_snapshot("policy_explain");
}

#[tokio::test]
async fn errors() {
    let broker = TestBroker::start().await;
    let mut transcript = Transcript::at(&broker);
    transcript.run_text_and_json(&["session", "release", "ssn_00000000000000000000000000"]);
    transcript.run_text_and_json(&["--url", "http://127.0.0.1:1", "session", "list"]);
    transcript.run(&["session", "ensure", "demo", "--capability", "root"]);
    transcript.run(&["exec", "-t", "demo"]);
    transcript.run(&["no-such-verb"]);
    transcript.assert_snapshot("errors");
    let mut transcript = Transcript::at(&broker).env("COBOX_API_KEY", "cbx_wrong");
    transcript.run_text_and_json(&["session", "list"]);
    transcript.assert_snapshot("errors_refused_key");
    let mut transcript =
        Transcript::at(&broker).env("COBOX_URL", "").env("COBOX_API_KEY", "").env("COBOX_CONFIG", "/nonexistent/config.toml");
    transcript.run_text_and_json(&["session", "list"]);
    transcript.assert_snapshot("errors_no_broker");
}
