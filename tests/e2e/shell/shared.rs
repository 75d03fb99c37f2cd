//! Two people and an agent in one shell, each with their own permissions and their own terminal size.

use cobox_client::Dataplane;
use cobox_protocol::shell::ShellRun;
use cobox_testkit::{TestTerminal, ensure};

use super::*;

async fn agent(broker: &TestBroker) -> (cobox_client::Session, Dataplane) {
    let session = ensure(&broker.client_of("bot", PrincipalKind::Agent, None).await, "demo").await;
    let dataplane = session.dataplane().clone();
    (session, dataplane)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_people_and_an_agent_share_a_shell() {
    let broker = broker_with_sandbox().await;
    let mut ada = attach(&broker, "ada", &[]).await;
    ada.wait_for("$ ").await;
    let mut bob = attach(&broker, "bob", &["--status"]).await;
    bob.wait_for("ada (human) has control").await;
    let (_session, bot) = agent(&broker).await;

    // The agent runs a command at the prompt, visible to all.
    let run = |command: &str| ShellRun { command: command.to_owned(), timeout_seconds: None, max_output_bytes: None };
    let done = bot.run_in_shell("main", &run("echo by-the-agent-$((6*7))")).await.unwrap();
    assert_eq!((done.exit_code, done.output.trim()), (Some(0), "by-the-agent-42"));
    for person in [&ada, &bob] {
        person.wait_for("by-the-agent-42").await;
    }
    // It is refused while a user is typing a line.
    ada.press("echo half a li");
    bob.wait_for("half a li").await;
    assert!(bot.run_in_shell("main", &run("echo in the way")).await.is_err());
    // Bob takes control with one key, and Ada is notified.
    bob.press("\x14");
    bob.wait_until_printed("you have control").await;
    ada.wait_until_printed("bob (human) has control").await;
    bob.press("ne\r");
    for person in [&ada, &bob] {
        person.wait_for("half a line").await;
    }
    // Ada's input is ignored until she takes control back.
    ada.press("echo nowhere\r");
    ada.wait_until_printed("bob (human) has control · Ctrl-T takes it").await;
    ada.press("\x14echo back-$((6*7))\r");
    for person in [&ada, &bob] {
        person.wait_for("back-42").await;
        assert!(!person.screen_text().contains("nowhere"));
    }
    ada.press("\r~r");
    bob.wait_for("no controller").await;
    bob.press("exit 8\r");
    assert_eq!((bob.ended().await.code(), ada.ended().await.code()), (Some(8), Some(8)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_observer_with_another_terminal_size_sees_the_screen_unchanged() {
    let broker = broker_with_sandbox().await;
    let mut ada = attach(&broker, "ada", &[]).await;
    ada.wait_for("$ ").await;
    ada.press("vim -u NONE -i NONE -n -N --cmd 'set mouse=a' wide.txt\r");
    ada.wait_for("[New]").await;
    ada.press(&format!("i{} 漢字 end of it\r", "0123456789".repeat(5)));
    ada.press("second line\r\x1b");
    let command = shell_command(&broker, "eve", &["--observe"]).await;
    let small = TestTerminal::start("small", &command, (40, 10));
    let large = TestTerminal::start("large", &command, (120, 40));
    for (eve, cols) in [(&small, 40), (&large, 80)] {
        eve.wait_for("second line").await;
        let rows = |t: &TestTerminal| t.look(|s| s.rows(0, cols).map(|r| r.trim_end().to_owned()).collect::<Vec<_>>());
        cobox_testkit::eventually("the same rows", || async {
            let (theirs, hers) = (rows(eve), rows(&ada));
            let shown = theirs.len().min(hers.len());
            (theirs[..shown] == hers[..shown]).then_some(())
        })
        .await;
        assert_eq!(eve.look(|s| s.mouse_protocol_mode()), vt100::MouseProtocolMode::None, "their mouse is theirs");
    }
    ada.press("othird\x1b");
    large.wait_for("third").await;
    assert_eq!(ada.look(|s| s.size()), (24, 80));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_observer_takes_control_with_one_key_unless_its_capabilities_forbid_it() {
    let broker = broker_with_sandbox().await;
    let ada = attach(&broker, "ada", &[]).await;
    ada.wait_for("$ ").await;
    let command = shell_command(&broker, "bob", &["--observe"]).await;
    let mut bob = TestTerminal::start("bob", &command, (100, 30));
    bob.wait_for("$ ").await;
    bob.press("echo nothing\r");
    bob.wait_until_printed("read-only · Ctrl-T joins").await;
    bob.press("\x14");
    bob.wait_for("you have control").await;
    ada.wait_until_printed("bob (human) has control").await;
    bob.press("echo size $(stty size)\r");
    for person in [&ada, &bob] {
        person.wait_for("size 30 100").await;
        assert!(!person.screen_text().contains("nothing"));
    }
    bob.press("\r~.");
    assert_eq!(bob.ended().await.code(), Some(255));

    let key = broker.key_of("bot", PrincipalKind::Agent, None).await;
    let mut command = broker.cobox();
    command.env("COBOX_API_KEY", key.expose()).args(["shell", "demo"]);
    let mut bot = TestTerminal::start("bot", &command, SIZE);
    bot.wait_until_printed("attached read-only, as with --observe").await;
    bot.wait_until_printed("size 30 100").await;
    bot.press("\x14x");
    bot.wait_until_printed("read-only; you have no permission to type here").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_at_two_terminals_sees_which_one_has_control() {
    let broker = broker_with_sandbox().await;
    let command = shell_command(&broker, "ada", &["--status"]).await;
    let desk = TestTerminal::start("desk", &command, SIZE);
    desk.wait_for("you have control").await;
    let mut laptop = TestTerminal::start("laptop", &command, SIZE);
    laptop.wait_for("another terminal of yours has control").await;
    laptop.press("\x14");
    laptop.wait_for("you have control").await;
    desk.wait_for("another terminal of yours has control").await;
    laptop.press("echo from the laptop $((6*7))\r");
    desk.wait_for("from the laptop 42").await;
}
