//! Several participants with real terminals and the real CLI at one shared shell.

use cobox_protocol::key::PrincipalKind;
use cobox_testkit::{TestBroker, TestTerminal, eventually};

/// Attaches a new participant to the thread's shell.
async fn attach(broker: &TestBroker, name: &'static str, size: (u16, u16), more: &[&str]) -> TestTerminal {
    let key = broker.key_of(name, PrincipalKind::Human, None).await;
    let mut command = broker.cobox();
    command.env("COBOX_API_KEY", key.expose()).args(["shell", "demo"]).args(more);
    TestTerminal::start(name, &command, size)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_people_and_an_observer_share_one_shell() {
    let broker = TestBroker::start().await;
    let mut ada = attach(&broker, "ada", (80, 24), &[]).await;
    ada.wait_for("$ ").await;
    let mut bob = attach(&broker, "bob", (100, 30), &[]).await;
    let mut eve = attach(&broker, "eve", (60, 20), &["--observe"]).await;
    for other in [&bob, &eve] {
        other.wait_for("$ ").await;
    }

    // The controller types, and the pty has the size of the controller's terminal; the observers' sizes have no effect.
    ada.press("echo size $(stty size)\r");
    for person in [&ada, &bob, &eve] {
        person.wait_for("size 24 80").await;
    }

    // Input of observers is discarded, and they see why.
    bob.press("echo bob-was-here-$((6*7))\r");
    bob.wait_for("ada (human) has control").await;
    eve.press("echo eve-was-here-$((6*7))\r");
    eve.wait_for("read-only").await;
    ada.press("echo ada-$((6*7))\r");
    for person in [&ada, &bob, &eve] {
        person.wait_for("ada-42").await;
        assert!(!person.screen_text().contains("was-here"), "{}", person.screen_text());
    }

    // Enter ~t takes control immediately; all participants are notified and the size follows.
    bob.press("\r~t");
    bob.wait_for("you have control").await;
    for other in [&ada, &eve] {
        other.wait_until_printed("bob (human) has control").await;
    }
    bob.press("echo size $(stty size)\r");
    for person in [&ada, &bob, &eve] {
        person.wait_for("size 30 100").await;
    }
    bob.resize(90, 28);
    // The size arrives independently of the input, so the command is repeated until it shows.
    eventually("the new size", || {
        bob.press("echo now $(stty size)\r");
        let shown = bob.screen_text().contains("now 28 90");
        async move { shown.then_some(()) }
    })
    .await;
    ada.resize(70, 20);
    bob.press("clear; echo still $(stty size)\r");
    // Observers lag slightly, so a late clear of their screen would erase the notices of the next step.
    for person in [&ada, &bob, &eve] {
        person.wait_for("still 28 90").await;
    }

    // After a release, the next participant who types gets control.
    bob.press("\r~r");
    ada.wait_until_printed("no controller").await;
    ada.press("clear; echo back-to-ada\r");
    bob.wait_for("back-to-ada").await;

    // Leaving does not affect the shell; `exit` ends it for all participants, with its exit code.
    ada.press("\r~.");
    assert_eq!(ada.ended().await.code(), Some(255));
    ada.wait_for("reattach with").await;
    bob.press("\r~t");
    bob.press("clear; echo alive-$((6*7))\r");
    for person in [&bob, &eve] {
        person.wait_for("alive-42").await;
    }
    bob.press("exit 7\r");
    assert_eq!(bob.ended().await.code(), Some(7));
    assert_eq!(eve.ended().await.code(), Some(7));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_observer_of_a_full_screen_program_sees_the_same_screen() {
    let broker = TestBroker::start().await;
    let mut ada = attach(&broker, "ada", (80, 24), &[]).await;
    ada.wait_for("$ ").await;
    ada.press("echo before; printf '\\033[?1049h\\033[2J\\033[1;1H\\033[44mtitle bar\\033[K\\033[m\\033[5;10Hin the middle\\033[24;1H\\033[7m-- INSERT --\\033[m\\033[5;24H'; read line; printf '\\033[?1049l'; echo after-$line\r");
    ada.wait_for("-- INSERT --").await;
    let bob = attach(&broker, "bob", (80, 24), &[]).await;
    let picture = |t: &TestTerminal| t.look(|s| (s.contents_formatted(), s.cursor_position(), s.alternate_screen()));
    eventually("the same picture", || async { (picture(&ada) == picture(&bob)).then_some(()) }).await;
    assert!(picture(&bob).2 && bob.screen_text().contains("in the middle"));

    ada.press("done\r");
    for person in [&ada, &bob] {
        person.wait_for("after-done").await;
        // The screen from before the program is back, also for a participant who joined late.
        person.wait_for("before").await;
    }
    assert!(!bob.look(|s| s.alternate_screen()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shell_run_by_a_script_is_separate_and_ends_with_it() {
    let broker = TestBroker::start().await;
    let mut ada = attach(&broker, "ada", (80, 24), &[]).await;
    ada.wait_for("$ ").await;
    let mut script = broker.cobox();
    script.args(["shell", "-t", "demo", "-c", "test -t 0 && echo in a terminal; exit 3"]);
    let output = script.output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("in a terminal"), "{output:?}");
    assert!(!ada.screen_text().contains("in a terminal"));
    let listed = broker.cobox().args(["ps", "demo"]).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert_eq!(listed.lines().count(), 2, "{listed}");
    assert!(listed.contains("main") && listed.contains("ada"), "{listed}");
    let killed = broker.cobox().args(["kill", "-t", "demo", "main"]).output().unwrap();
    assert!(killed.status.success(), "{killed:?}");
    assert!(ada.ended().await.code().is_some_and(|code| code != 0));
}

/// Prints each sequence that a terminal must not receive, each followed by a letter.
const ACTS_ON_THE_MACHINE: &str = r"printf 'start\033]52;c;aGk=\007A\033]9;note\007B\033]777;notify;t;b\007C\033[5iD\033[4iE\033_Gt=f;L2V0Yw==\033\\F\033]0;title\007G\033[6nH\n'; printf 'ERR\033]52;c;aGk=\007OR\n' >&2";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exec_on_a_terminal_removes_sequences_that_act_on_this_machine() {
    let broker = TestBroker::start().await;
    let exec = |name: &'static str, more: &[&str]| {
        let mut command = broker.cobox();
        command.args(["exec", "-t", "demo"]).args(more).args(["-c", ACTS_ON_THE_MACHINE]);
        TestTerminal::start(name, &command, (80, 24))
    };
    let sequences = ["\x1b]52", "\x1b]9;", "\x1b]777", "\x1b[5i", "\x1b_G", "\x1b]0;"];
    let mut plain = exec("plain", &[]);
    assert!(plain.ended().await.success());
    assert!(plain.screen_text().contains("startABCDEFGH") && plain.screen_text().contains("ERROR"), "{}", plain.screen_text());
    for sequence in sequences.iter().chain(&["\x1b[6n"]) {
        assert!(!plain.has_printed(sequence), "{sequence:?}");
    }
    // The query of a program on a pty is answered; nothing else gets through.
    let mut tty = exec("tty", &["--tty"]);
    assert!(tty.ended().await.success());
    assert!(tty.has_printed("\x1b[6n"));
    for sequence in sequences {
        assert!(!tty.has_printed(sequence), "{sequence:?}");
    }
    let mut raw = exec("raw", &["--raw"]);
    assert!(raw.ended().await.success());
    for sequence in sequences {
        assert!(raw.has_printed(sequence), "{sequence:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_copied_to_a_terminal_is_filtered_like_command_output() {
    let broker = TestBroker::start().await;
    let hostile = r"printf 'start\033]52;c;aGk=\007A\033]9;note\007B\033[5iC\033P1000p%%begin\033\\D\033[6nE\033X' > f";
    assert!(broker.cobox().args(["exec", "-t", "demo", "-c", hostile]).status().unwrap().success());
    let copy = |name: &'static str, args: &[&str]| {
        let mut command = broker.cobox();
        command.arg("cp").args(args);
        TestTerminal::start(name, &command, (80, 24))
    };
    let sequences = ["\x1b]52", "\x1b]9;", "\x1b[5i", "\x1bP1000p", "\x1b[6n"];
    for (name, to) in [("output", "-"), ("device", "/dev/tty")] {
        let mut plain = copy(name, &["demo:f", to]);
        assert!(plain.ended().await.success());
        assert!(plain.screen_text().contains("startABCDE"), "{name}: {}", plain.screen_text());
        for sequence in sequences {
            assert!(!plain.has_printed(sequence), "{name}: {sequence:?}");
        }
        // Without the terminator the shell's next prompt would be swallowed.
        assert!(plain.has_printed("\x1bX\x1b\\"), "{name}");
    }
    let mut raw = copy("raw", &["--raw", "demo:f", "-"]);
    assert!(raw.ended().await.success());
    for sequence in sequences {
        assert!(raw.has_printed(sequence), "{sequence:?}");
    }
    let piped = broker.cobox().args(["cp", "demo:f", "-"]).output().unwrap().stdout;
    assert!(piped.ends_with(b"E\x1bX"), "{piped:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unterminated_string_sequence_does_not_swallow_later_output() {
    let broker = TestBroker::start().await;
    for (name, more, output) in [
        ("sos", [].as_slice(), r"printf 'a\033Xb'"),
        ("link", &[], r"printf 'a\033]8;;http://x'"),
        ("stderr", &[], r"printf 'a\033_b' >&2"),
        ("c1", &[], r"printf 'a\302\230b'"),
        ("tty", &["--tty"], r"printf 'a\033Xb'"),
        ("tty c1", &["--tty"], r"printf 'a\302\230b'"),
    ] {
        let mut command = broker.cobox();
        command.args(["exec", "-t", "demo"]).args(more).args(["-c", output]);
        let mut terminal = TestTerminal::start(name, &command, (80, 24));
        assert!(terminal.ended().await.success(), "{name}");
        assert!(terminal.has_printed("\x1b\\"), "{name}");
    }
    let piped = broker.cobox().args(["exec", "-t", "demo", "-c", r"printf 'a\033Xb'"]).output().unwrap();
    assert_eq!(piped.stdout, b"a\x1bXb");
}
