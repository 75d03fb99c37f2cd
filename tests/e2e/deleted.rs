//! Releasing and deleting on the command line: it counts the files, asks, and the sandbox can be restored with them.

use std::process::Output;

use cobox_testkit::{BrokerOptions, TestBroker, TestTerminal};

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

async fn broker_that_keeps_deleted() -> TestBroker {
    TestBroker::start_with(BrokerOptions { config: "keep_deleted_seconds = 3600\n".into(), ..BrokerOptions::default() }).await
}

#[tokio::test]
async fn a_release_counts_the_files_needs_yes_without_a_terminal_and_can_be_undone() {
    let broker = broker_that_keeps_deleted().await;
    stdout(&run(&broker, &["exec", "-t", "t", "-c", "mkdir src; head -c 1000 /dev/zero > src/a; head -c 24 /dev/zero > b"]));
    let refused = stderr_of_failure(&run(&broker, &["session", "release", "t"]));
    assert!(refused.contains("2 files, 1.00 KiB") && refused.contains("--yes") && refused.contains("restore"), "{refused}");
    assert_eq!(stdout(&run(&broker, &["exec", "-t", "t", "--", "ls"])), "b\nsrc\n", "nothing was changed");
    let released = stdout(&run(&broker, &["session", "release", "t", "--yes"]));
    assert!(released.contains("2 files, 1.00 KiB") && released.contains("within 1h"), "{released}");
    let listed = stdout(&run(&broker, &["sandbox", "list", "--deleted"]));
    assert!(listed.contains("sb_") && listed.contains("  t  "), "{listed}");
    stdout(&run(&broker, &["sandbox", "restore", "t"]));
    assert_eq!(stdout(&run(&broker, &["exec", "-t", "t", "--", "ls"])), "b\nsrc\n");
    let nothing = stderr_of_failure(&run(&broker, &["sandbox", "restore", "t"]));
    assert!(nothing.contains("sandbox list --deleted"), "{nothing}");
}

#[tokio::test]
async fn a_deletion_asks_on_a_terminal_and_does_nothing_without_a_yes() {
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
async fn options_that_an_existing_session_does_not_have_fail_and_name_the_difference() {
    let broker = TestBroker::start().await;
    stdout(&run(&broker, &["session", "ensure", "demo"]));
    let access = stderr_of_failure(&run(&broker, &["session", "ensure", "demo", "--access", "owner"]));
    assert!(access.contains("access is workspace, not owner"), "{access}");
    let template = stderr_of_failure(&run(&broker, &["session", "ensure", "demo", "--template", "x"]));
    assert!(template.contains("template is none, not x"), "{template}");
    let provider = stderr_of_failure(&run(&broker, &["session", "ensure", "demo", "--provider", "elsewhere"]));
    assert!(provider.contains("elsewhere"), "{provider}");
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
    assert!(warnings.contains("can enter without the share") && warnings.contains("bob can still enter"), "{warnings}");
}
