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
    let mut it = Transcript::at(&broker);
    it.both(&["session", "ensure", "demo", "--tag", "team=blue"]);
    it.is("session_ensure");
    let mut it = Transcript::at(&broker);
    it.both(&["session", "get", "demo"]);
    it.run(&["session", "get", "nobody"]);
    it.is("session_get");
    let mut it = Transcript::at(&broker);
    it.both(&["session", "list"]);
    it.both(&["session", "list", "--tag", "team=red"]);
    it.is("session_list");
    let mut it = Transcript::at(&broker);
    it.both(&["session", "refresh", "demo"]);
    it.is("session_refresh");
    let mut it = Transcript::at(&broker);
    it.both(&["session", "heartbeat", "demo"]);
    it.is("session_heartbeat");
    let mut it = Transcript::at(&broker);
    it.run(&["session", "exec", "demo", "--", "echo", "hello"]);
    it.run(&["--json", "session", "exec", "demo", "-c", "echo hello; exit 3"]);
    it.is("session_exec");
    let mut it = Transcript::at(&broker);
    it.run(&["session", "release", "demo", "--yes"]);
    it.run(&["session", "release", "demo", "--yes"]);
    broker.cobox().args(["session", "ensure", "demo"]).output().unwrap();
    it.run(&["--json", "session", "release", "demo", "--yes"]);
    it.is("session_release");
}

#[tokio::test]
async fn sandboxes() {
    let broker = TestBroker::start().await;
    let mut it = Transcript::at(&broker);
    it.run(&["sandbox", "create", "--name", "build", "--keep", "--tag", "team=blue"]);
    it.run(&["--json", "sandbox", "create", "--name", "test"]);
    it.run(&["sandbox", "create", "--name", "build"]);
    it.is("sandbox_create");
    let mut it = Transcript::at(&broker);
    it.both(&["sandbox", "list", "--tag", "team=blue"]);
    it.is("sandbox_list");
    let mut it = Transcript::at(&broker);
    it.both(&["sandbox", "get", "build"]);
    it.run(&["sandbox", "get", "nothing"]);
    it.is("sandbox_get");
    let mut it = Transcript::at(&broker);
    it.both(&["sandbox", "set", "build", "--no-keep", "--tag", "team=red"]);
    it.run(&["sandbox", "set", "build"]);
    it.is("sandbox_set");
    let mut it = Transcript::at(&broker);
    it.both(&["sandbox", "templates"]);
    it.is("sandbox_templates");
    let mut it = Transcript::at(&broker);
    it.run(&["sandbox", "exec", "build", "--", "echo", "hello"]);
    it.run(&["--json", "sandbox", "exec", "build", "--", "echo", "hello"]);
    it.is("sandbox_exec");
    let mut it = Transcript::at(&broker);
    it.run(&["sandbox", "delete", "build", "--yes"]);
    it.run(&["--json", "sandbox", "delete", "test", "--yes"]);
    it.is("sandbox_delete");
}

#[tokio::test]
async fn shares_keys_and_principals() {
    let broker = TestBroker::start().await;
    let mut it = Transcript::at(&broker);
    it.run(&["keys", "create", "bob", "--kind", "human"]);
    it.run(&["--json", "keys", "create", "bot", "--kind", "agent", "--expires", "30d"]);
    it.is("keys_create");
    let mut it = Transcript::at(&broker);
    it.both(&["keys", "list"]);
    it.is("keys_list");
    let listed = broker.cobox().args(["--json", "keys", "list"]).output().unwrap();
    let keys: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let key = |name: &str| keys["items"].as_array().unwrap().iter().find(|k| k["name"] == name).unwrap()["id"].as_str().unwrap().to_owned();
    let (bob, bot) = (key("bob"), key("bot"));
    let mut it = Transcript::at(&broker);
    it.both(&["keys", "expire", &bot, "--in", "1d"]);
    it.is("keys_expire");
    let mut it = Transcript::at(&broker);
    broker.cobox().args(["session", "ensure", "demo", "--access", "owner"]).output().unwrap();
    it.both(&["share", "grant", "demo", "bob", "--capability", "fs_read"]);
    it.is("share_grant");
    let mut it = Transcript::at(&broker);
    it.both(&["share", "list", "demo"]);
    it.is("share_list");
    let mut it = Transcript::at(&broker);
    it.run(&["share", "revoke", "demo", "bob"]);
    it.run(&["--json", "share", "revoke", "demo", "bob"]);
    it.is("share_revoke");
    let mut it = Transcript::at(&broker);
    it.run(&["keys", "revoke", &bob]);
    it.run(&["--json", "keys", "revoke", &bot]);
    it.is("keys_revoke");
    let mut it = Transcript::at(&broker);
    it.both(&["principals", "list"]);
    it.is("principals_list");
    let mut it = Transcript::at(&broker);
    it.both(&["principals", "disable", "bob"]);
    it.is("principals_disable");
    let mut it = Transcript::at(&broker);
    it.both(&["principals", "enable", "bob"]);
    it.is("principals_enable");
}

#[tokio::test]
async fn contexts() {
    let broker = TestBroker::start().await;
    let elsewhere = tempfile::tempdir().unwrap();
    let path = elsewhere.path().display().to_string();
    let it = || {
        let config = elsewhere.path().join("config.toml").display().to_string();
        Transcript::at(&broker).env("COBOX_CONFIG", &config).env("COBOX_URL", "").env("COBOX_API_KEY", "").naming(&path, "CONFIG")
    };
    let mut that = it();
    that.both(&["config", "path"]);
    that.is("config_path");
    let mut that = it();
    let key = broker.key().expose().to_owned();
    that.run_with(&["config", "add", "here", "--url", broker.url()], &key);
    that.run_with(&["--json", "config", "add", "there", "--url", "https://cobox.invalid", "--no-check", "--store", "file"], &key);
    that.run_with(&["config", "add", "wrong", "--url", broker.url()], "cbx_00000000000000000000000000_nonsense");
    that.run_with(&["config", "add", "empty", "--url", broker.url()], "");
    that.run(&["config", "add", "../x", "--url", broker.url()]);
    that.run(&["config", "add", "local", "--url", broker.url()]);
    that.is("config_add");
    let mut that = it();
    that.both(&["config", "contexts"]);
    that.is("config_contexts");
    let mut that = it();
    that.both(&["config", "use", "there"]);
    that.run(&["config", "use", "nowhere"]);
    that.is("config_use");
    let mut that = it();
    that.both(&["--context", "here", "config", "show"]);
    that.run(&["--url", "https://other.invalid", "config", "show"]);
    that.run(&["--context", "here", "session", "list"]);
    that.is("config_show");
    let mut that = it();
    that.run(&["config", "remove", "here"]);
    that.run(&["--json", "config", "remove", "there"]);
    that.is("config_remove");
    assert_eq!(fs::read_dir(elsewhere.path().join("keys")).unwrap().count(), 0, "keys are removed with their contexts");
}

#[tokio::test]
async fn commands_in_a_sandbox() {
    let broker = TestBroker::start().await;
    let mut it = Transcript::at(&broker);
    it.run(&["exec", "-t", "demo", "--", "sh", "-c", "echo out; echo err >&2; exit 3"]);
    it.run(&["--json", "exec", "-t", "demo", "-c", "echo out; echo err >&2; exit 3"]);
    it.run(&["exec", "-t", "demo", "--", "no-such-program"]);
    it.run(&["exec", "-t", "demo", "--timeout", "0.1", "--", "sleep", "60"]);
    it.is("exec");

    let mut command = broker.cobox();
    command.args(["exec", "-t", "demo", "--", "sh", "-c", "echo ready; cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let mut it = Transcript::at(&broker);
    it.run(&["ps", "demo"]);
    let listed = it.run(&["--json", "ps", "demo"]);
    it.is("ps");
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let id = listed["processes"][0]["id"].as_str().unwrap();
    let mut it = Transcript::at(&broker);
    it.run(&["kill", "-t", "demo", "--signal", "CONT", id]);
    it.run(&["--json", "kill", "-t", "demo", id]);
    it.run(&["kill", "-t", "demo", "nothing"]);
    it.is("kill");
    drop(child.stdin.take());
    child.wait().unwrap();
}

#[tokio::test]
async fn who_watches_ends_when_its_reader_does() {
    let broker = TestBroker::start().await;
    assert!(broker.cobox().args(["session", "ensure", "demo"]).stdout(Stdio::null()).status().unwrap().success());
    let mut watching = broker.cobox().args(["watch", "demo", "--history"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(watching.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.contains("made the session"), "{first}");
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
    let it = || Transcript::at(&broker).naming(&path, "DIR");
    let mut that = it();
    that.both(&["cp", &format!("{src}/a.txt"), "demo:/workspace/"]);
    that.run(&["cp", "demo:/workspace/a.txt", &format!("{path}/back.txt")]);
    that.run(&["cp", "demo:/workspace/nothing", &path]);
    that.is("cp");
    let mut that = it();
    that.both(&["sync", "--once", &src, "demo:/workspace/src"]);
    that.is("sync");
}

#[tokio::test]
async fn a_folder_that_is_kept_the_same() {
    let broker = TestBroker::start().await;
    let top = tempfile::tempdir().unwrap();
    let top = top.path().canonicalize().unwrap();
    let (path, notes) = (top.display().to_string(), top.join("notes.txt"));
    fs::write(&notes, "first\n").unwrap();
    let it = || Transcript::at(&broker).naming(&path, "DIR");
    let mut that = it();
    that.both(&["sync", "list"]);
    let mut syncing = broker.cobox();
    syncing.args(["--json", "sync", &path, "demo:/workspace/src"]).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut syncing = syncing.spawn().unwrap();
    let mut told = BufReader::new(syncing.stdout.take().unwrap()).lines();
    let mut wait_for = |is_it: &dyn Fn(&serde_json::Value) -> bool| {
        let said = told.by_ref().map(|line| serde_json::from_str(&line.unwrap()).unwrap());
        assert!(said.into_iter().any(|value| is_it(&value)), "it ended before");
    };
    wait_for(&|event| event["phase"] == "watching");
    that.both(&["sync", "list"]);
    that.is("sync_list");

    let s = ["--sync", path.as_str()];
    let mut that = it();
    that.both(&[&["sync", "flush", "--wait"], &s[..]].concat());
    that.is("sync_flush");
    let mut that = it();
    that.both(&[&["sync", "pause"], &s[..]].concat());
    that.is("sync_pause");
    let mut that = it();
    that.both(&[&["sync", "resume"], &s[..]].concat());
    that.is("sync_resume");
    broker.cobox().args([&["sync", "pause"], &s[..]].concat()).output().unwrap();
    fs::write(&notes, "first\nfrom here\n").unwrap();
    let line = "printf 'first\\nfrom there\\n' > /workspace/src/notes.txt";
    assert!(broker.cobox().args(["exec", "-t", "demo", "--no-flush", "-c", line]).status().unwrap().success());
    broker.cobox().args([&["sync", "resume"], &s[..]].concat()).output().unwrap();
    wait_for(&|event| event["status"]["conflicts"].as_array().is_some_and(|c| !c.is_empty()));
    let mut that = it();
    that.both(&[&["sync", "status"], &s[..]].concat());
    that.run(&["sync", "status", "--sync", "/nowhere"]);
    that.is("sync_status");
    let mut that = it();
    that.both(&[&["sync", "diff", "notes.txt"], &s[..]].concat());
    that.is("sync_diff");
    let mut that = it();
    that.both(&[&["sync", "resolve", "--keep", "here", "notes.txt"], &s[..]].concat());
    that.run(&[&["sync", "flush", "--wait"], &s[..]].concat());
    that.run(&["exec", "-t", "demo", "--", "cat", "/workspace/src/notes.txt"]);
    let pid = rustix::process::Pid::from_child(&syncing);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    syncing.wait().unwrap();
    that.run(&[&["sync", "resolve", "--keep", "here", "notes.txt"], &s[..]].concat());
    that.is("sync_resolve");
}

/// A chat with a deployment is tested in tests/chat.
#[tokio::test]
async fn a_chat_without_a_deployment() {
    let broker = TestBroker::start().await;
    let mut it = Transcript::at(&broker);
    it.both(&["chat", "--no-tui"]);
    it.run(&["chat", "--deployment", "http://127.0.0.1:1", "--no-tui"]);
    it.run(&["chat", "--deployment", "ftp://somewhere", "--no-tui"]);
    it.run(&["chat", "--deployment", "http://user:password@127.0.0.1:1", "--no-tui"]);
    it.run(&["chat", "--sandbox", "dev"]);
    it.is("chat");
}

#[tokio::test]
async fn what_a_broker_that_is_not_asked_much_has_in_its_audit() {
    let mut broker = TestBroker::start().await;
    broker.cobox().args(["keys", "create", "bob", "--kind", "human"]).output().unwrap();
    let mut it = Transcript::at(&broker);
    it.both(&["audit", "--limit", "1"]);
    it.is("audit");
    let mut it = Transcript::at(&broker);
    it.both(&["audit", "head"]);
    it.is("audit_head");
    let mut it = Transcript::at(&broker);
    it.both(&["audit", "verify"]);
    it.is("audit_verify");
    let mut it = Transcript::at(&broker);
    it.run(&["audit", "export"]);
    it.is("audit_export");
    let data_dir = broker.data_dir().display().to_string();
    broker.interrupt();
    let mut it = Transcript::at(&broker);
    it.both(&["master-key", "rotate", "--data-dir", &data_dir]);
    it.is("master_key_rotate");
}

#[tokio::test]
async fn policies() {
    let broker = TestBroker::start().await;
    let dir = tempfile::tempdir().unwrap();
    let (path, file) = (dir.path().display().to_string(), dir.path().join("policy.toml").display().to_string());
    fs::write(&file, "[agent]\ncapabilities = [\"fs_read\"]\n").unwrap();
    let it = || Transcript::at(&broker).naming(&path, "DIR");
    let mut that = it();
    that.both(&["policy", "check", &file]);
    that.is("policy_check");
    let mut that = it();
    that.both(&["policy", "explain", "--policy", &file, "--principal", "bot", "--kind", "agent"]);
    that.is("policy_explain");
}

#[tokio::test]
async fn what_goes_wrong() {
    let broker = TestBroker::start().await;
    let mut it = Transcript::at(&broker);
    it.both(&["session", "release", "ssn_00000000000000000000000000"]);
    it.both(&["--url", "http://127.0.0.1:1", "session", "list"]);
    it.run(&["session", "ensure", "demo", "--capability", "root"]);
    it.run(&["exec", "-t", "demo"]);
    it.run(&["no-such-verb"]);
    it.is("errors");
    let mut it = Transcript::at(&broker).env("COBOX_API_KEY", "cbx_wrong");
    it.both(&["session", "list"]);
    it.is("errors_refused_key");
    let mut it = Transcript::at(&broker).env("COBOX_URL", "").env("COBOX_API_KEY", "").env("COBOX_CONFIG", "/nonexistent/config.toml");
    it.both(&["session", "list"]);
    it.is("errors_no_broker");
}
