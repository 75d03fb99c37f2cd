//! State that the command line keeps between runs: the sandbox of a thread, the chosen broker and its key.

use std::{
    fs,
    io::Write,
    os::unix::fs::PermissionsExt,
    process::{Command, Output, Stdio},
};

use cobox_protocol::key::PrincipalKind;
use cobox_testkit::{TestBroker, TestTerminal};

fn run(broker: &TestBroker, args: &[&str]) -> Output {
    broker.cobox().args(args).output().expect("cobox runs")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_str(&stdout(output)).expect("JSON")
}

/// Like [`run`], with input on stdin.
fn run_with_input(mut command: Command, input: &str) -> Output {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn sandbox_of(broker: &TestBroker, thread: &str) -> String {
    json(&run(broker, &["--json", "session", "get", thread]))["sandbox"]["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_thread_returns_to_its_kept_sandbox_after_its_session_ended() {
    let broker = TestBroker::start().await;
    stdout(&run(&broker, &["session", "ensure", "t", "--keep"]));
    stdout(&run(&broker, &["exec", "-t", "t", "--", "sh", "-c", "echo mine > left"]));
    let before = sandbox_of(&broker, "t");
    // Released by another client: this command line's cache is outdated.
    let session = json(&run(&broker, &["--json", "session", "list"]))["items"][0]["session_id"].as_str().unwrap().to_owned();
    broker.client().release(&session.parse().unwrap()).await.unwrap();
    assert_eq!(stdout(&run(&broker, &["exec", "-t", "t", "--", "cat", "left"])), "mine\n");
    assert_eq!(sandbox_of(&broker, "t"), before);
}

#[tokio::test]
async fn a_cached_sandbox_that_is_gone_is_replaced_with_a_notice() {
    let broker = TestBroker::start().await;
    stdout(&run(&broker, &["exec", "-t", "t", "--", "true"]));
    let before = sandbox_of(&broker, "t");
    let cache = fs::read_to_string(broker.data_dir().parent().unwrap().join(".cache/cobox/threads.json")).unwrap();
    assert!(cache.contains(&before) && !cache.contains("eyJ") && !cache.contains(broker.key().expose()), "{cache}");
    broker.client().delete_sandbox(&before).await.unwrap();
    let mut command = broker.cobox();
    command.args(["exec", "-t", "t", "--", "echo", "here"]);
    let mut terminal = TestTerminal::start("ada", &command, (120, 24));
    terminal.wait_for("created a sandbox for thread t; its previous sandbox").await;
    terminal.wait_for("here").await;
    assert!(terminal.ended().await.success());
    assert_ne!(sandbox_of(&broker, "t"), before);
}

#[tokio::test]
async fn a_release_ends_a_kept_sandbox_too() {
    let broker = TestBroker::start().await;
    stdout(&run(&broker, &["session", "ensure", "t", "--keep"]));
    stdout(&run(&broker, &["exec", "-t", "t", "--", "touch", "left"]));
    stdout(&run(&broker, &["session", "release", "t", "--yes"]));
    assert_eq!(stdout(&run(&broker, &["exec", "-t", "t", "--", "ls"])), "");
}

#[tokio::test]
async fn session_and_sandbox_subcommands_run_commands_shells_and_syncs() {
    let broker = TestBroker::start().await;
    let session = json(&run(&broker, &["--json", "session", "ensure", "t"]));
    let (id, sandbox) = (session["session_id"].as_str().unwrap(), session["sandbox"]["id"].as_str().unwrap());
    for line in [["session", "exec", "t"], ["session", "exec", id], ["sandbox", "exec", sandbox]] {
        let output = broker.cobox().args(line).args(["--", "sh", "-c", "echo \"$0\"; exit 4", "-x"]).output().unwrap();
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(4), b"-x\n".as_slice()), "{line:?}");
    }
    for line in [["session", "connect", "t"], ["session", "connect", id], ["sandbox", "connect", sandbox]] {
        let mut command = broker.cobox();
        command.args(line);
        let output = run_with_input(command, "echo sum $((20+22)); exit 5\n");
        assert_eq!(output.status.code(), Some(5), "{line:?} {}", String::from_utf8_lossy(&output.stderr));
        assert!(String::from_utf8_lossy(&output.stdout).contains("sum 42"), "{line:?}");
    }
    let here = tempfile::tempdir().unwrap();
    fs::write(here.path().join("synced"), "").unwrap();
    stdout(&run(&broker, &["sandbox", "sync", sandbox, "--once", here.path().to_str().unwrap(), ":/workspace/new"]));
    assert_eq!(stdout(&run(&broker, &["exec", "-t", "t", "--", "ls", "new"])), "synced\n");
    let beat = json(&run(&broker, &["--json", "session", "heartbeat", "t"]));
    assert_eq!((&beat["session_id"], &beat["state"]), (&id.into(), &"active".into()));
}

#[tokio::test]
async fn several_brokers_are_used_by_name_each_with_its_own_key() {
    let (one, two) = (TestBroker::start().await, TestBroker::start().await);
    let ann = two.key_of("ann", PrincipalKind::Human, None).await;
    let home = tempfile::tempdir().unwrap();
    let cobox = |args: &[&str]| {
        let mut command = one.cobox();
        command.env("HOME", home.path()).env_remove("COBOX_URL").env_remove("COBOX_API_KEY").args(args);
        command
    };
    stdout(&run_with_input(cobox(&["config", "add", "one", "--url", one.url()]), one.key().expose()));
    stdout(&run_with_input(cobox(&["config", "add", "two", "--url", two.url()]), &format!("{}\n", ann.expose())));
    stdout(&cobox(&["exec", "-t", "only-in-one", "--", "true"]).output().unwrap());
    assert_eq!(stdout(&cobox(&["--context", "two", "session", "list"]).output().unwrap()), "");
    stdout(&cobox(&["config", "use", "two"]).output().unwrap());
    stdout(&cobox(&["exec", "-t", "only-in-two", "--", "true"]).output().unwrap());
    let listed = stdout(&cobox(&["session", "list"]).output().unwrap());
    assert!(listed.contains("only-in-two") && listed.contains("ann") && !listed.contains("only-in-one"), "{listed}");
    let by_name = stdout(&cobox(&["session", "list"]).env("COBOX_CONTEXT", "one").output().unwrap());
    assert!(by_name.contains("only-in-one"), "{by_name}");
    // The key of one broker is not sent to the other.
    let stranger = cobox(&["--url", one.url(), "session", "list"]).output().unwrap();
    assert!(String::from_utf8_lossy(&stranger.stderr).contains("no API key is configured for"), "{stranger:?}");

    let config = home.path().join(".config/cobox");
    for file in ["config.toml", "keys/one", "keys/two"] {
        assert_eq!(config.join(file).metadata().unwrap().permissions().mode() & 0o777, 0o600, "{file}");
    }
    assert!(!fs::read_to_string(config.join("config.toml")).unwrap().contains("cbx_"));
    // A key file that others can read is made private, with a warning.
    fs::set_permissions(config.join("keys/two"), fs::Permissions::from_mode(0o644)).unwrap();
    let output = cobox(&["session", "list"]).output().unwrap();
    assert!(output.status.success() && String::from_utf8_lossy(&output.stderr).contains("could read the API key"), "{output:?}");
    assert_eq!(config.join("keys/two").metadata().unwrap().permissions().mode() & 0o777, 0o600);
}

#[tokio::test]
async fn a_prompted_key_is_not_echoed() {
    let broker = TestBroker::start().await;
    let mut command = broker.cobox();
    command.args(["config", "add", "here", "--url", broker.url()]);
    let mut terminal = TestTerminal::start("ada", &command, (120, 24));
    terminal.wait_for("API key for http").await;
    terminal.press(&format!("{}\r", broker.key().expose()));
    terminal.wait_for("added context here").await;
    assert!(terminal.ended().await.success());
    assert!(!terminal.screen_text().contains("cbx_"), "{}", terminal.screen_text());
    let mut terminal = TestTerminal::start("ada", &command, (120, 24));
    terminal.wait_for("API key for http").await;
    terminal.press("cbx\x03");
    assert_eq!(terminal.ended().await.code(), Some(130));
}

#[tokio::test]
async fn a_table_fits_the_terminal_and_colours_can_be_disabled() {
    let broker = TestBroker::start().await;
    let thread = format!("a-thread-with-{}-name", "very-long-".repeat(12));
    stdout(&run(&broker, &["session", "ensure", &thread]));
    let mut command = broker.cobox();
    command.args(["session", "list"]);
    let mut terminal = TestTerminal::start("ada", &command, (110, 24));
    assert!(terminal.ended().await.success());
    terminal.wait_for("ago").await;
    assert_eq!(terminal.screen_text().trim_end().lines().count(), 2, "a header and a row: {}", terminal.screen_text());
    assert!(terminal.look(|screen| screen.cell(0, 0).unwrap().bold()));
    command.env("NO_COLOR", "1");
    let mut terminal = TestTerminal::start("ada", &command, (110, 24));
    assert!(terminal.ended().await.success());
    terminal.wait_for("ago").await;
    assert!(!terminal.look(|screen| screen.cell(0, 0).unwrap().bold()));
    assert!(stdout(&run(&broker, &["session", "list"])).contains(&thread), "complete if a program reads it");
}

#[tokio::test]
async fn a_closed_output_pipe_is_not_an_error() {
    let broker = TestBroker::start().await;
    let cobox = broker.cobox();
    let program = cobox.get_program().to_str().unwrap();
    let mut shell = Command::new("sh");
    shell.env_clear().envs(cobox.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let script = format!("{{ {program} completions bash; echo $? >&2; }} | head -1; {{ {program} keys list; echo $? >&2; }} | true");
    let output = shell.args(["-c", &script]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "0\n0\n");
}
