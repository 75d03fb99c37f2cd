//! Every way to leave a shell leaves a usable terminal: in cooked mode, without modes that a program switched on.

use cobox_testkit::{TestTerminal, eventually};
use rustix::process::Signal;

use super::*;

/// Switches on every mode a program can leave on, and prints a text on the alternate screen, escaped so that the typed
/// command doesn't match it.
const ENABLE_ALL_MODES: &str =
    r"printf '\033[?1049h\033[2J\033[H\033[?25l\033[?1h\033=\033[?1003h\033[?1006h\033[?1004h\033[?2004h\033[4h\033[31;44mall\040on'";

fn is_plain(terminal: &TestTerminal) -> bool {
    let is_shown_plainly = terminal.look(|s| {
        !s.alternate_screen()
            && !s.hide_cursor()
            && !s.application_cursor()
            && !s.application_keypad()
            && !s.bracketed_paste()
            && s.mouse_protocol_mode() == vt100::MouseProtocolMode::None
            && s.fgcolor() == vt100::Color::Default
            && s.bgcolor() == vt100::Color::Default
    });
    is_shown_plainly && terminal.is_cooked() && (!terminal.has_printed("\x1b[4h") || terminal.has_printed("\x1b[4l"))
}

/// The last output may not have been processed by the test terminal yet.
async fn wait_until_restored(terminal: &TestTerminal) {
    eventually("a terminal as it was", || async { is_plain(terminal).then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_way_to_leave_restores_the_terminal() {
    let broker = broker_with_sandbox().await;
    for signal in [None, Some(Signal::TERM), Some(Signal::HUP), Some(Signal::INT), Some(Signal::QUIT)] {
        let mut ada = attach(&broker, "ada", &["--name", "modes"]).await;
        ada.wait_for("$ ").await;
        ada.press(&format!("clear; {ENABLE_ALL_MODES}; read line; reset; echo over-$((6*7))\r"));
        ada.wait_for("all on").await;
        assert!(!is_plain(&ada));
        match signal {
            None => ada.press("\r~."),
            Some(signal) => ada.signal(signal),
        }
        assert_eq!(ada.ended().await.code(), Some(255), "{signal:?}");
        ada.wait_for("reattach with: cobox shell demo --name modes").await;
        wait_until_restored(&ada).await;
        // A client that returns finds the shell as it was left.
        let mut again = attach(&broker, "ada", &["--name", "modes", "--take"]).await;
        if signal.is_some() {
            again.wait_for("all on").await;
            assert!(again.look(|s| s.alternate_screen() && s.bracketed_paste()));
            again.press("\r");
        }
        // Input typed while the terminal is being reset is discarded.
        again.wait_for("over-42").await;
        again.press("exit 0\r");
        again.ended().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_killed_with_all_modes_on_leaves_a_usable_terminal() {
    let broker = broker_with_sandbox().await;
    let mut ada = attach(&broker, "ada", &["-c", &format!("{ENABLE_ALL_MODES}; kill -9 $$")]).await;
    assert_eq!(ada.ended().await.code(), Some(137));
    assert!(ada.has_printed("all on"));
    wait_until_restored(&ada).await;
    // The same when the sandbox ends during the attachment.
    let mut bob = attach(&broker, "bob", &["-c", &format!("{ENABLE_ALL_MODES}; sleep 1000")]).await;
    bob.wait_for("all on").await;
    let released = broker.cobox().args(["session", "release", "demo", "--yes"]).output().unwrap();
    assert!(released.status.success(), "{released:?}");
    assert_eq!(bob.ended().await.code(), Some(255));
    bob.wait_for("error:").await;
    wait_until_restored(&bob).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_restores_the_terminal() {
    let broker = broker_with_sandbox().await;
    // On the alternate screen and on the normal one, where a wrong cursor position would be visible.
    for (switch_on, is_alternate) in [(ENABLE_ALL_MODES, true), ("printf '\\033[?1003h\\033[?25lall\\040on'", false)] {
        let program = format!("{switch_on}; read line; printf 'break\\055here'; sleep 1000");
        let mut command = shell_command(&broker, "ada", &["-c", &program]).await;
        command.env("COBOX_PANIC_AT", "break-here");
        let mut ada = TestTerminal::start("ada", &command, SIZE);
        ada.wait_for("all on").await;
        assert_eq!(ada.look(|s| s.alternate_screen()), is_alternate);
        ada.press("\r");
        assert!(!ada.ended().await.success());
        wait_until_restored(&ada).await;
        ada.wait_for("instructed to panic at break-here").await;
        assert_eq!(ada.screen_text().contains("all on"), !is_alternate, "{}", ada.screen_text());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_shell_leaves_the_terminal_unchanged() {
    let broker = broker_with_sandbox().await;
    let mut command = shell_command(&broker, "ada", &[]).await;
    command.env("COBOX_URL", "http://127.0.0.1:1");
    let mut ada = TestTerminal::start("ada", &command, SIZE);
    assert!(ada.ended().await.code().is_some_and(|code| code != 0));
    ada.wait_for("error:").await;
    assert!(ada.is_cooked());
    // There is no such shell to observe: refused after the terminal was already in raw mode.
    let mut eve = attach(&broker, "eve", &["--observe", "--name", "nobodys"]).await;
    assert_eq!(eve.ended().await.code(), Some(255));
    eve.wait_for("error:").await;
    assert!(eve.is_cooked());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_its_output_ends_the_client_and_restores_the_terminal() {
    let broker = broker_with_sandbox().await;
    let shell = shell_command(&broker, "ada", &[]).await;
    let words = [shell.get_program()].into_iter().chain(shell.get_args()).map(|w| w.to_str().unwrap()).collect::<Vec<_>>().join(" ");
    let mut piped = std::process::Command::new("/bin/sh");
    piped.args(["-c", &format!("{words} | head -c 1 >/dev/null; echo over")]);
    piped.envs(shell.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut ada = TestTerminal::start("ada", &piped, SIZE);
    eventually("it to notice", || {
        // Further output has no reader.
        ada.press("echo more\r");
        let is_over = ada.screen_text().contains("over");
        async move { is_over.then_some(()) }
    })
    .await;
    assert!(ada.ended().await.success() && ada.is_cooked());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_terminal_does_not_block_the_exit() {
    let broker = broker_with_sandbox().await;
    let mut ada = attach(&broker, "ada", &[]).await;
    ada.wait_for("$ ").await;
    ada.set_frozen(true);
    ada.press("yes\r");
    // All buffers are full by now: the terminal and the path to it hold a few kilobytes.
    let bob = attach(&broker, "bob", &["--observe"]).await;
    bob.wait_for("y\ny\ny").await;
    ada.signal(Signal::TERM);
    assert_eq!(ada.ended().await.code(), Some(255));
    assert!(ada.is_cooked());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn suspending_returns_the_terminal_to_the_local_shell_and_resuming_takes_it_back() {
    let broker = broker_with_sandbox().await;
    let cobox = shell_command(&broker, "ada", &[]).await;
    let mut bash = std::process::Command::new("/bin/bash");
    bash.args(["--norc", "--noprofile", "-i"]).env("PS1", "local> ").envs(cobox.get_envs().filter_map(|(n, v)| Some((n, v?))));
    let mut ada = TestTerminal::start("ada", &bash, SIZE);
    ada.wait_for("local> ").await;
    ada.press(&format!("{} shell demo\r", cobox.get_program().to_str().unwrap()));
    ada.wait_for("sandbox:/workspace$ ").await;
    for suspend in ["key", "signal"] {
        ada.press("vim -u NONE -i NONE -n -N notes.txt\r");
        ada.wait_for("[New]").await;
        ada.press(&format!("iby {suspend}\x1b"));
        ada.wait_for(&format!("by {suspend}")).await;
        let before = ada.screen_state();
        match suspend {
            "key" => ada.press("\r~\x1a"),
            _ => {
                std::process::Command::new("pkill").args(["-TSTP", "-P"]).arg(ada.pid().to_string()).status().unwrap();
            }
        }
        eventually("the shell below", || async {
            let shown = ada.screen_state();
            (!shown.is_alternate && shown.text.contains("Stopped") && shown.text.trim_end().ends_with("local>")).then_some(())
        })
        .await;
        ada.press(&format!("echo here-$((6*7))-{suspend}\r"));
        ada.wait_for(&format!("here-42-{suspend}")).await;
        ada.press("fg\r");
        eventually("the screen as it was", || async {
            let shown = ada.screen_state();
            (shown.is_alternate && shown.text.contains(&format!("by {suspend}")) && shown.input_modes == before.input_modes).then_some(())
        })
        .await;
        ada.press(":q!\r");
        ada.wait_for("sandbox:/workspace$ ").await;
    }
    ada.press("exit 3\r");
    ada.wait_for("local> ").await;
    ada.press("echo code-$?; exit\r");
    ada.wait_for("code-3").await;
    ada.ended().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_escape_key_can_be_changed() {
    let broker = broker_with_sandbox().await;
    let mut ada = attach(&broker, "ada", &["--escape", "^]", "--status"]).await;
    ada.wait_for("$ ").await;
    ada.wait_for("demo · main · you have control · connected · 80×24").await;
    ada.press("\r~.\r");
    ada.wait_for("~.: command not found").await;
    ada.press("echo in the middle\x1d.");
    assert_eq!(ada.ended().await.code(), Some(255));
    ada.wait_for("reattach with").await;
    let refused = shell_command(&broker, "bob", &["--escape", "^C"]).await.output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("a single character such as ~"), "{refused:?}");
}
