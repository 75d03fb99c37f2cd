//! Releasing and deleting on the command line: the command counts the files, asks for confirmation, and the sandbox can
//! be restored with its files.

use std::process::Output;

use cobox_testkit::{BrokerOptions, TestBroker, TestTerminal};

use crate::resources::OWN_DISK_BYTES;

fn run(broker: &TestBroker, args: &[&str]) -> Output {
    broker.cobox().args(args).output().expect("cobox runs")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr_of_failure(output: &Output) -> String {
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr.clone()).unwrap()
}

const KEEP_DELETED: &str = "keep_deleted_seconds = 3600\n";

async fn broker_that_keeps_deleted() -> TestBroker {
    TestBroker::start_with(BrokerOptions { config: KEEP_DELETED.into(), ..BrokerOptions::default() }).await
}

#[tokio::test]
async fn a_release_counts_the_files_needs_yes_without_a_terminal_and_can_be_undone() {
    for disk_bytes in [None, Some(OWN_DISK_BYTES)] {
        let config = KEEP_DELETED.to_owned();
        let broker = TestBroker::start_with(BrokerOptions { config, disk_bytes, ..BrokerOptions::default() }).await;
        stdout(&run(&broker, &["exec", "-t", "t", "-c", "mkdir src; head -c 1000 /dev/zero > src/a; head -c 24 /dev/zero > b"]));
        let refused = stderr_of_failure(&run(&broker, &["session", "release", "t"]));
        assert!(refused.contains("2 files, 1.00 KiB") && refused.contains("--yes") && refused.contains("restore"), "{refused}");
        assert_eq!(stdout(&run(&broker, &["exec", "-t", "t", "--", "ls"])), "b\nsrc\n", "nothing was changed");
        let released = stdout(&run(&broker, &["session", "release", "t", "--yes"]));
        assert!(released.contains("2 files, 1.00 KiB"), "{released}");
        assert!(released.contains("within 1h, or until one of your new sandboxes would exceed a limit"), "{released}");
        let listed = stdout(&run(&broker, &["sandbox", "list", "--deleted"]));
        assert!(listed.contains("sb_") && listed.contains("  t  "), "{listed}");
        stdout(&run(&broker, &["sandbox", "restore", "t"]));
        assert_eq!(stdout(&run(&broker, &["exec", "-t", "t", "--", "ls"])), "b\nsrc\n");
        let nothing = stderr_of_failure(&run(&broker, &["sandbox", "restore", "t"]));
        assert!(nothing.contains("sandbox list --deleted"), "{nothing}");
    }
}

#[tokio::test]
async fn a_deletion_on_a_terminal_needs_confirmation() {
    let broker = broker_that_keeps_deleted().await;
    stdout(&run(&broker, &["sandbox", "create", "--name", "dev"]));
    stdout(&run(&broker, &["exec", "--sandbox", "dev", "-c", "echo kept > file"]));
    for (answer, is_deleted) in [("n", false), ("", false), ("y", true)] {
        let mut command = broker.cobox();
        command.args(["sandbox", "delete", "dev"]);
        let mut terminal = TestTerminal::start("ada", &command, (200, 24));
        terminal.wait_for("1 file, 5 B").await;
        terminal.wait_for("[y/N]").await;
        terminal.press(&format!("{answer}\r"));
        assert_eq!(terminal.ended().await.success(), is_deleted, "answered {answer:?}");
    }
    stderr_of_failure(&run(&broker, &["exec", "--sandbox", "dev", "--", "cat", "file"]));
    stdout(&run(&broker, &["sandbox", "restore", "dev"]));
    assert_eq!(stdout(&run(&broker, &["exec", "--sandbox", "dev", "--", "cat", "file"])), "kept\n");
    stdout(&run(&broker, &["sandbox", "delete", "dev", "--permanent", "--yes"]));
    stderr_of_failure(&run(&broker, &["sandbox", "restore", "dev"]));
}

#[tokio::test]
async fn json_output_of_release_and_delete_has_the_erased_files_and_bytes() {
    let broker = broker_that_keeps_deleted().await;
    let json = |args: &[&str]| -> serde_json::Value { serde_json::from_str(&stdout(&run(&broker, args))).unwrap() };
    stdout(&run(&broker, &["exec", "-t", "t", "-c", "echo four > a; echo four > b"]));
    let released = json(&["--json", "session", "release", "t", "--yes"]);
    assert_eq!((&released["files"], &released["bytes"], &released["complete"]), (&2.into(), &10.into(), &true.into()));
    assert_eq!(released["restorable_seconds"], 3600);
    stdout(&run(&broker, &["sandbox", "create", "--name", "dev"]));
    stdout(&run(&broker, &["exec", "--sandbox", "dev", "-c", "echo four > a"]));
    stdout(&run(&broker, &["session", "ensure", "u", "--sandbox", "dev"]));
    let released = json(&["--json", "session", "release", "u", "--yes"]);
    assert_eq!((&released["files"], &released["bytes"]), (&0.into(), &0.into()), "its sandbox stays");
    let deleted = json(&["--json", "sandbox", "delete", "dev", "--yes"]);
    assert_eq!((&deleted["files"], &deleted["bytes"], &deleted["restorable_seconds"]), (&1.into(), &5.into(), &3600.into()));
    let purged = json(&["--json", "sandbox", "delete", "dev", "--permanent", "--yes"]);
    assert_eq!((&purged["files"], &purged["bytes"], &purged["restorable_seconds"]), (&1.into(), &5.into(), &0.into()));
}

#[tokio::test]
async fn a_permanent_deletion_shows_what_is_lost_and_a_missing_sandbox_is_not_asked_about() {
    let broker = broker_that_keeps_deleted().await;
    stdout(&run(&broker, &["sandbox", "create", "--name", "dev"]));
    stdout(&run(&broker, &["exec", "--sandbox", "dev", "-c", "echo lost > file"]));
    stdout(&run(&broker, &["sandbox", "delete", "dev", "--yes"]));
    let asked = stderr_of_failure(&run(&broker, &["sandbox", "delete", "dev", "--permanent"]));
    assert!(asked.contains("1 file, 5 B") && asked.contains("can't be restored") && asked.contains("--yes"), "{asked}");
    let nothing = stderr_of_failure(&run(&broker, &["sandbox", "delete", "nothing", "--permanent"]));
    assert!(nothing.contains("nothing") && !nothing.contains("confirmation"), "{nothing}");
}

#[tokio::test]
async fn a_restore_says_whether_its_thread_returns_to_the_sandbox() {
    let broker = broker_that_keeps_deleted().await;
    stdout(&run(&broker, &["exec", "-t", "r1", "-c", "echo old > file"]));
    let listed = || stdout(&run(&broker, &["--json", "sandbox", "list", "--deleted"]));
    stdout(&run(&broker, &["session", "release", "r1", "--yes"]));
    let first: serde_json::Value = serde_json::from_str(&listed()).unwrap();
    let first = first["items"][0]["id"].as_str().unwrap().to_owned();
    stdout(&run(&broker, &["session", "ensure", "r1"]));
    let restored = run(&broker, &["sandbox", "restore", "r1"]);
    stdout(&restored);
    let notes = String::from_utf8(restored.stderr).unwrap();
    assert!(notes.contains("thread r1 uses another sandbox now and keeps it") && !notes.contains("resumes it"), "{notes}");
    assert!(notes.contains(&format!("cobox exec --sandbox {first}")), "{notes}");
    assert_eq!(stdout(&run(&broker, &["exec", "--sandbox", &first, "--", "cat", "file"])), "old\n");

    stdout(&run(&broker, &["exec", "-t", "r2", "--", "true"]));
    stdout(&run(&broker, &["session", "release", "r2", "--yes"]));
    let restored = run(&broker, &["sandbox", "restore", "r2"]);
    stdout(&restored);
    let notes = String::from_utf8(restored.stderr).unwrap();
    assert!(notes.contains("the next command of thread r2 resumes it"), "{notes}");
}

#[tokio::test]
async fn options_that_an_existing_session_does_not_have_fail_and_name_the_difference() {
    let broker = TestBroker::start().await;
    stdout(&run(&broker, &["session", "ensure", "demo"]));
    let access = stderr_of_failure(&run(&broker, &["session", "ensure", "demo", "--access", "owner"]));
    assert!(access.contains("access is workspace, not owner"), "{access}");
    let template = stderr_of_failure(&run(&broker, &["session", "ensure", "demo", "--template", "x"]));
    assert!(template.contains("template is none, not x"), "{template}");
    let provider = stderr_of_failure(&run(&broker, &["session", "ensure", "demo", "--provider", "elsewhere"]));
    assert!(provider.contains("elsewhere"), "{provider}");
    let tag = stderr_of_failure(&run(&broker, &["session", "ensure", "demo", "--tag", "team=red"]));
    assert!(tag.contains("tag team is not set, not red"), "{tag}");
    stdout(&run(&broker, &["session", "ensure", "demo", "--access", "workspace", "--provider", "local"]));
}

#[tokio::test]
async fn revoking_a_share_warns_while_the_whole_workspace_may_enter() {
    let broker = TestBroker::start().await;
    broker.key_of("bob", cobox_protocol::key::PrincipalKind::Human, None).await;
    stdout(&run(&broker, &["session", "ensure", "demo"]));
    stdout(&run(&broker, &["share", "grant", "demo", "bob", "--capability", "fs_read"]));
    let revoked = run(&broker, &["share", "revoke", "demo", "bob"]);
    let warnings = String::from_utf8(revoked.stderr.clone()).unwrap();
    stdout(&revoked);
    assert!(warnings.contains("has access without the share") && warnings.contains("bob still has access"), "{warnings}");
}

#[tokio::test]
async fn revoking_a_share_of_a_private_session_warns_while_its_sandbox_is_open_with_and_without_a_share() {
    let broker = TestBroker::start().await;
    let bob = broker.key_of("bob", cobox_protocol::key::PrincipalKind::Human, None).await;
    stdout(&run(&broker, &["sandbox", "create", "--name", "dev"]));
    stdout(&run(&broker, &["session", "ensure", "h2", "--sandbox", "dev", "--access", "owner"]));
    let granted = run(&broker, &["share", "grant", "h2", "bob", "--capability", "fs_read"]);
    assert!(String::from_utf8_lossy(&granted.stderr).contains("has access without the share"), "{granted:?}");
    let revoked = run(&broker, &["share", "revoke", "h2", "bob"]);
    let warnings = String::from_utf8(revoked.stderr.clone()).unwrap();
    assert!(!stdout(&revoked).contains("no longer has access"), "{revoked:?}");
    assert!(warnings.contains("has access without the share") && warnings.contains("bob still has access"), "{warnings}");
    assert!(warnings.contains("cobox sandbox set dev --access owner"), "{warnings}");
    let again = stderr_of_failure(&run(&broker, &["share", "revoke", "h2", "bob"]));
    assert!(again.contains("not shared with `bob`") && again.contains("bob can still enter"), "{again}");
    let entered = broker.cobox().env("COBOX_API_KEY", bob.expose()).args(["session", "ensure", "zz", "--sandbox", "dev"]).output().unwrap();
    assert!(entered.status.success(), "{entered:?}");
    stdout(&run(&broker, &["sandbox", "set", "dev", "--access", "owner"]));
    stdout(&run(&broker, &["share", "grant", "h2", "bob", "--capability", "fs_read"]));
    let revoked = run(&broker, &["share", "revoke", "h2", "bob"]);
    assert_eq!((stdout(&revoked).as_str(), revoked.stderr.len()), ("bob no longer has access\n", 0));
}
