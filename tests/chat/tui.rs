//! The TUI in a real terminal: a user talks with an agent, watches its actions live, and types in the same sandbox.

use std::process::{Command, Stdio};

use cobox_testkit::{TestBroker, TestTerminal, ensure, eventually, sh};
use rustix::process::Signal;

use crate::deployment::{ANN, Example};

pub fn start_chat(broker: &TestBroker, example: &Example, size: (u16, u16), flags: &[&str]) -> TestTerminal {
    let mut command = broker.cobox();
    command.env("COBOX_DEPLOYMENT_URL", &example.url).env("COBOX_DEPLOYMENT_KEY", ANN).arg("chat").args(flags);
    TestTerminal::start("ann", &command, size)
}

/// The input for Alt with a key.
pub fn alt(key: char) -> String {
    format!("\x1b{key}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a LangGraph server: scripts/check-langgraph"]
async fn a_user_and_an_agent_work_side_by_side() {
    let broker = TestBroker::start().await;
    let example = Example::start(&broker).await;
    let mut ann = start_chat(&broker, &example, (140, 44), &["--sandbox=together"]);

    // The sandbox exists before the first message.
    ann.wait_for("sb_").await;
    ann.wait_for("user@").await;
    let sandbox = broker.client().get_sandbox("together").await.unwrap();
    ann.wait_for(sandbox.id.as_str()).await;

    // The agent's action is visible in three places: the conversation, the feed and the files.
    ann.press("write /workspace/from-agent.txt hello-ann\r");
    ann.wait_for("write_file /workspace/from-agent.txt").await;
    ann.wait_for("wrote /workspace/from-agent.txt").await;
    ann.press(&alt('4'));
    ann.wait_for("+   from-agent.txt (agent)").await;
    ann.press("\r");
    ann.wait_for("+ hello-ann").await;

    // The terminal pane is attached to the same sandbox.
    ann.press(&alt('2'));
    ann.wait_for("you have control").await;
    ann.press("cat from-agent.txt; echo from-ann-$((6*7)) > from-ann.txt\r");
    let in_pane = || {
        let shown = ann
            .screen_text()
            .lines()
            .any(|line| line.chars().skip(70).collect::<String>().contains("hello-ann") && !line.contains("+ hello-ann"));
        async move { shown.then_some(()) }
    };
    eventually("the file's content in the terminal", in_pane).await;
    ann.press("\x1d");
    ann.wait_for("Enter").await;

    // The agent reads the file that the user wrote there.
    ann.press("read /workspace/from-ann.txt\r");
    ann.wait_for("from-ann-42").await;
    eventually("the run's end", || std::future::ready((!ann.screen_text().contains("is working")).then_some(()))).await;

    // The agent asks before it deletes a file.
    ann.press("delete /workspace/from-ann.txt\r");
    ann.wait_for("allow the agent to use delete?").await;
    ann.press("y\r");
    ann.wait_for("you approved (delete)").await;
    let box_ = broker.client().sandbox_at(&sandbox);
    eventually("the file to be gone", || async { (sh(&box_, "ls /workspace").await.stdout == "from-agent.txt\n").then_some(()) }).await;

    // Smaller, then too small, then the original size.
    ann.resize(80, 24);
    ann.wait_for(" 2 terminal ").await;
    ann.resize(60, 20);
    ann.wait_for("Cobox needs 80 columns").await;
    ann.resize(140, 44);
    ann.wait_for("you approved (delete)").await;

    ann.press("/sandbox list\r");
    ann.wait_for("binds this thread").await;
    ann.press("\x1b");
    // Escape followed immediately by another key would be read as one key.
    eventually("the list to close", || std::future::ready((!ann.screen_text().contains("binds this thread")).then_some(()))).await;
    ann.press("/quit\r");
    assert!(ann.ended().await.success());
    assert!(!ann.look(|screen| screen.alternate_screen()), "the terminal is restored");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_deployment_the_sandbox_can_still_be_used() {
    let broker = TestBroker::start().await;
    let session = ensure(&broker.client(), "default").await;
    sh(session.dataplane(), "echo hello > /workspace/there.txt").await;
    let mut ann = TestTerminal::start("ann", &broker.cobox(), (140, 44));
    ann.wait_for("user@").await;
    ann.wait_for("--deployment URL").await;
    ann.press("echo typed-$((6*7))\r");
    ann.wait_for("typed-42").await;
    ann.press(&alt('4'));
    ann.wait_for("there.txt").await;
    ann.press(&alt('1'));
    ann.press("hello?\r");
    ann.wait_for("no deployment: start").await;
    ann.press("\x11");
    assert!(ann.ended().await.success());
    assert!(!ann.look(|screen| screen.alternate_screen() || screen.bracketed_paste()), "the terminal is restored");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_terminal_left_in_the_alternate_screen_is_redrawn_and_restored() {
    let broker = TestBroker::start().await;
    ensure(&broker.client(), "default").await;
    let cobox = broker.cobox();
    let mut after = Command::new("/bin/sh");
    // The state that SIGKILL leaves: the alternate screen with its content.
    let left = r"stty raw -echo; printf '\033[?1049h\033[H'; yes LEFT-BEHIND | head -2000 | tr '\n' ' '";
    after.args(["-c", &format!("{left}; exec {}", cobox.get_program().display())]).env_clear();
    after.envs(cobox.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut ann = TestTerminal::start("ann", &after, (140, 44));
    ann.wait_for("user@").await;
    assert!(!ann.screen_text().contains("LEFT-BEHIND"), "{}", ann.screen_text());
    ann.signal(Signal::TERM);
    ann.ended().await;
    let is_back = ann.look(|screen| !screen.alternate_screen() && !screen.bracketed_paste() && !screen.hide_cursor());
    assert!(is_back, "the terminal is restored after a signal, too");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_restores_the_terminal_and_its_message_is_readable() {
    let broker = TestBroker::start().await;
    ensure(&broker.client(), "default").await;
    let mut command = broker.cobox();
    command.env("COBOX_PANIC_AT", "break-42");
    let mut ann = TestTerminal::start("ann", &command, (140, 44));
    ann.wait_for("user@").await;
    ann.press("echo break-$((6*7))\r");
    assert_eq!(ann.ended().await.code(), Some(1));
    ann.wait_for("the TUI crashed: ").await;
    let is_back = || {
        let is_plain = ann.look(|screen| {
            let has_mouse = screen.mouse_protocol_mode() != vt100::MouseProtocolMode::None;
            !screen.alternate_screen() && !screen.bracketed_paste() && !screen.hide_cursor() && !has_mouse
        });
        std::future::ready((is_plain && ann.is_cooked()).then_some(()))
    };
    eventually("a restored terminal", is_back).await;
    assert!(ann.screen_text().contains("thread and sandbox keep running"), "{}", ann.screen_text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sync_of_a_sandbox_is_shown() {
    let broker = TestBroker::start().await;
    ensure(&broker.client(), "default").await;
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.txt"), "a").unwrap();
    let mut sync = broker.cobox();
    sync.arg("sync").arg(folder.path()).arg("default:/workspace").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut ann = TestTerminal::start("ann", &broker.cobox(), (140, 44));
    ann.wait_for("no sync").await;
    let mut sync = sync.spawn().unwrap();
    ann.wait_for("in sync").await;
    ann.press(&alt('5'));
    ann.wait_for("1 file, two-way-safe").await;
    sync.kill().unwrap();
    sync.wait().unwrap();
    ann.wait_for("no sync").await;
    ann.press("\x11");
    assert!(ann.ended().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cobox_without_arguments_and_terminal_prints_help() {
    let broker = TestBroker::start().await;
    let output = broker.cobox().output().expect("cobox runs");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("Usage: cobox"));
}
