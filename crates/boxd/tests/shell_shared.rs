//! Tests of shells with several participants: permission to type, the window size that applies, what each participant
//! sees, and recovery from a broken connection.

mod support;

use std::time::Duration;

use cobox_protocol::{
    Secret,
    frame::{ControlAction, ShellStart, TerminalPermission, close},
    key::PrincipalKind,
};
use support::{
    SOON, TestBoxd,
    viewer::{ClientFrame, ServerFrame, Viewer},
};

fn token(boxd: &TestBoxd, name: &str, kind: PrincipalKind, scope: &str) -> Secret {
    let mut claims = boxd.claims(scope);
    claims.sub = name.into();
    claims.act.kind = kind;
    claims.act.id = name.into();
    boxd.key.mint(&claims)
}

fn human(boxd: &TestBoxd, name: &str) -> Secret {
    token(boxd, name, PrincipalKind::Human, "shell")
}

fn agent(boxd: &TestBoxd) -> Secret {
    token(boxd, "bot", PrincipalKind::Agent, "shell")
}

fn watcher(boxd: &TestBoxd) -> Secret {
    token(boxd, "eve", PrincipalKind::Human, "shell_observe")
}

fn running(command: &str) -> ShellStart {
    ShellStart { command: Some(command.into()), ..Default::default() }
}

fn start_with_size(cols: u16, rows: u16) -> ShellStart {
    ShellStart { cols: Some(cols), rows: Some(rows), ..Default::default() }
}

#[tokio::test]
async fn two_terminals_and_an_observer_share_a_shell_and_control_passes_between_them() {
    let boxd = TestBoxd::start();
    let mut ada = Viewer::attach(&boxd, &human(&boxd, "ada"), ShellStart { command: Some("cat".into()), ..start_with_size(100, 30) }).await;
    let mut bot = Viewer::attach(&boxd, &agent(&boxd), start_with_size(60, 20)).await;
    let mut eve = Viewer::attach(&boxd, &watcher(&boxd), ShellStart::default()).await;
    assert_eq!(
        (ada.ready.shell_id.clone(), bot.ready.cols, eve.ready.rows),
        (bot.ready.shell_id.clone(), 100, 30),
        "observers don't shrink it"
    );
    for ready in [&ada.ready, &bot.ready, &eve.ready] {
        assert_eq!(ready.controller.as_ref().unwrap().principal, "ada");
    }
    ada.type_in("hello\n").await;
    for viewer in [&mut ada, &mut bot, &mut eve] {
        viewer.shows("hello\nhello").await;
    }

    bot.type_in("me too\n").await;
    let (code, message) = bot.error().await;
    assert!(code == "FORBIDDEN" && message.contains("ada") && message.contains("control"), "{code}: {message}");
    bot.send(ClientFrame::Resize { cols: 50, rows: 10 }).await;
    assert_eq!(bot.error().await.0, "FORBIDDEN");
    bot.control(ControlAction::Request).await;
    assert_eq!(bot.error().await.0, "SHELL_BUSY", "a human has just typed");

    let mut bob = Viewer::attach(&boxd, &human(&boxd, "bob"), start_with_size(120, 40)).await;
    bob.control(ControlAction::Take).await;
    for viewer in [&mut ada, &mut bot, &mut eve, &mut bob] {
        assert_eq!(viewer.controller().await.unwrap().principal, "bob");
        assert_eq!(viewer.resized().await, (120, 40), "the size is that of the new controller");
    }
    ada.type_in("not mine any more\n").await;
    assert!(ada.error().await.1.contains("bob"));
    bob.control(ControlAction::Release).await;
    assert_eq!(ada.controller().await, None);
    bot.control(ControlAction::Request).await;
    assert_eq!(ada.controller().await.unwrap().actor, PrincipalKind::Agent);
    bot.type_in("by the agent\n").await;
    eve.shows("by the agent").await;
    assert!(!eve.screen.screen().contents().contains("me too"));
}

#[tokio::test]
async fn an_observer_can_only_watch() {
    let boxd = TestBoxd::start();
    let absent = Viewer::refused(&boxd, &watcher(&boxd), ShellStart::default()).await;
    assert_eq!(absent.0.as_deref(), Some("SHELL_NOT_FOUND"));
    let observing = ShellStart { observe: true, ..Default::default() };
    let absent = Viewer::refused(&boxd, &human(&boxd, "ada"), observing.clone()).await;
    assert_eq!(absent.0.as_deref(), Some("SHELL_NOT_FOUND"));

    let mut ada = Viewer::attach(&boxd, &human(&boxd, "ada"), running("cat")).await;
    let by_token = Viewer::attach(&boxd, &watcher(&boxd), ShellStart::default()).await;
    let by_request = Viewer::attach(&boxd, &human(&boxd, "bob"), observing).await;
    for mut eve in [by_token, by_request] {
        for frame in [
            ClientFrame::stdin(b"typed by eve\n", Some(1)),
            ClientFrame::Resize { cols: 10, rows: 10 },
            ClientFrame::Signal { signal: "INT".into() },
            ClientFrame::Control { action: ControlAction::Take },
            ClientFrame::CloseStdin,
        ] {
            eve.send(frame).await;
            assert_eq!(eve.error().await.0, "CAPABILITY_DENIED");
        }
        eve.send(ClientFrame::Ack { offset: 0, stream: None }).await;
        eve.send(ClientFrame::Ping { id: Some(1.into()) }).await;
        eve.frame(|frame| matches!(frame, ServerFrame::Pong { .. }).then_some(())).await;
    }
    ada.type_in("done\n").await;
    ada.shows("done\ndone").await;
    assert!(!ada.screen.screen().contents().contains("eve"));
    assert_eq!(ada.screen.screen().size(), (24, 80));
}

#[tokio::test]
async fn a_user_with_two_terminals_sees_which_one_has_control() {
    let boxd = TestBoxd::start();
    let ada = human(&boxd, "ada");
    let mut desktop = Viewer::attach(&boxd, &ada, ShellStart { command: Some("cat".into()), ..start_with_size(100, 30) }).await;
    let mut laptop = Viewer::attach(&boxd, &ada, start_with_size(60, 20)).await;
    assert_eq!((desktop.ready.yours, laptop.ready.yours), (Some(true), Some(false)));
    laptop.control(ControlAction::Take).await;
    let yours = |frame: &ServerFrame| match frame {
        ServerFrame::Control { controller: Some(c), yours } if c.principal == "ada" => *yours,
        _ => None,
    };
    assert!(laptop.frame(yours).await);
    assert!(!desktop.frame(yours).await);
}

#[tokio::test]
async fn a_token_renewed_with_fewer_capabilities_loses_control() {
    let boxd = TestBoxd::start();
    let mut ada = Viewer::attach(&boxd, &human(&boxd, "ada"), running("cat")).await;
    let narrower = token(&boxd, "ada", PrincipalKind::Human, "shell_observe");
    ada.send(ClientFrame::Auth { token: narrower }).await;
    ada.type_in("x\n").await;
    assert_eq!(ada.error().await.0, "CAPABILITY_DENIED");
    assert_eq!(ada.controller().await, None);
}

#[tokio::test]
async fn input_resent_after_a_broken_connection_is_typed_once() {
    let boxd = TestBoxd::start();
    let ada = human(&boxd, "ada");
    let start = || ShellStart { client: Some("tab-7".into()), ..running("stty -echo; echo go; cat") };
    let mut first = Viewer::attach(&boxd, &ada, start()).await;
    first.read_until("go").await;
    for (seq, keys) in [(1, "one\n"), (2, "two\n")] {
        first.send(ClientFrame::stdin(keys.as_bytes(), Some(seq))).await;
        first.frame(|frame| matches!(frame, ServerFrame::StdinAck { seq: s } if *s == seq).then_some(())).await;
    }
    // A second connection of the same client replaces the first, whose end boxd has not detected.
    let mut second = Viewer::attach(&boxd, &ada, start()).await;
    assert_eq!(first.end().await, Some(close::TAKEN_OVER));
    assert_eq!(second.ready.controller.as_ref().unwrap().principal, "ada");
    for (seq, keys) in [(1, "one\n"), (2, "two\n"), (3, "three\n")] {
        second.send(ClientFrame::stdin(keys.as_bytes(), Some(seq))).await;
        second.frame(|frame| matches!(frame, ServerFrame::StdinAck { seq: s } if *s == seq).then_some(())).await;
    }
    second.shows("three").await;
    let shown = second.screen.screen().contents();
    assert_eq!((shown.matches("one").count(), shown.matches("two").count(), shown.matches("three").count()), (1, 1, 1), "{shown}");
}

#[tokio::test]
async fn a_randomly_broken_connection_loses_and_repeats_nothing() {
    let boxd = TestBoxd::start();
    let ada = human(&boxd, "ada");
    // Paced by its input, so that the output of each outage fits into the ring buffer.
    let command = "stty -echo raw; echo go; i=0; while [ $i -lt 50 ]; do dd bs=1 count=1 >/dev/null 2>&1; j=0; while [ $j -lt 100 ]; do echo line-$i-$j; j=$((j+1)); done; i=$((i+1)); done";
    let client = || Some("tab".to_owned());
    let mut viewer = Viewer::attach(&boxd, &ada, ShellStart { client: client(), ..running(command) }).await;
    viewer.read_until("go\n").await;
    viewer.output.clear();
    let (shell_id, epoch) = (viewer.ready.shell_id.clone(), viewer.ready.epoch.clone());
    let mut seed = 0x2545_f491_4f6c_dd17_u64;
    let mut all = Vec::new();
    for round in 0..50u64 {
        // Resends input that the broken connection may have lost. It counts once.
        for seq in [round.max(1), round + 1] {
            viewer.send(ClientFrame::stdin(b"x", Some(seq))).await;
        }
        // Cuts after a random number of frames, sometimes before the first.
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        let last = format!("line-{round}-99\n");
        for _ in 0..seed % 12 {
            if !String::from_utf8_lossy(&viewer.output).contains(&last) {
                viewer.step().await;
            }
        }
        if seed.is_multiple_of(3) {
            viewer.read_until(&last).await;
        }
        all.append(&mut viewer.output);
        let from = viewer.next;
        drop(viewer);
        let start = ShellStart {
            shell: Some(shell_id.to_string()),
            epoch: Some(epoch.clone()),
            from: Some(from),
            binary: seed.is_multiple_of(2),
            client: client(),
            ..Default::default()
        };
        viewer = Viewer::attach(&boxd, &ada, start).await;
        assert_eq!(viewer.ready.offset, from, "resumed, not redrawn");
    }
    viewer.send(ClientFrame::stdin(b"x", Some(50))).await;
    while !viewer.frames.iter().any(|f| matches!(f, ServerFrame::Exit { .. })) {
        viewer.step().await;
    }
    all.append(&mut viewer.output);
    let expected: String = (0..50).flat_map(|i| (0..100).map(move |j| format!("line-{i}-{j}\n"))).collect();
    assert_eq!(viewer.keyframes, 0);
    assert!(String::from_utf8(all).unwrap() == expected, "every byte once");
}

#[tokio::test]
async fn after_a_longer_outage_the_screen_is_the_same() {
    let boxd = TestBoxd::start_limited(|limits| limits.shell_ring_bytes = 8192);
    let ada = human(&boxd, "ada");
    let command =
        "stty -echo; while read word; do seq 1 3000; printf '\\033[31mred\\033[0m \\033[?1049h\\033[2J\\033[3;4Hinside-%s' $word; done";
    let mut stays = Viewer::attach(&boxd, &ada, ShellStart { client: Some("stays".into()), ..running(command) }).await;
    let mut leaves = Viewer::attach(&boxd, &ada, ShellStart::default()).await;
    leaves.send(ClientFrame::Ping { id: None }).await;
    leaves.frame(|frame| matches!(frame, ServerFrame::Pong { .. }).then_some(())).await;
    let (epoch, from) = (leaves.ready.epoch.clone(), leaves.next);
    drop(leaves);
    stays.type_in("one\n").await;
    stays.shows("inside-one").await;
    for (epoch, from) in [(Some(epoch), Some(from)), (None, None), (Some("another".into()), Some(stays.next))] {
        let mut back = Viewer::attach(&boxd, &ada, ShellStart { epoch, from, ..Default::default() }).await;
        back.shows("inside-one").await;
        assert_eq!(back.keyframes, 1);
        let (a, b) = (stays.screen.screen(), back.screen.screen());
        assert_eq!((a.contents_formatted(), a.alternate_screen()), (b.contents_formatted(), b.alternate_screen()));
        // The screen below the full-screen program is restored when the program has ended.
        let (mut a, mut b) = (a.clone(), b.clone());
        for screen in [&mut a, &mut b] {
            let mut parser = vt100::Parser::new(24, 80, 0);
            parser.screen_mut().clone_from(screen);
            parser.process(b"\x1b[?1049l");
            screen.clone_from(parser.screen());
        }
        assert_eq!(a.contents(), b.contents());
        assert!(a.contents().contains("3000"));
    }
}

#[tokio::test]
async fn an_observer_that_does_not_read_delays_no_other_and_gets_a_keyframe_later() {
    let boxd = TestBoxd::start();
    let mut ada =
        Viewer::attach(&boxd, &human(&boxd, "ada"), running("stty -echo; echo go; read x; seq 1 300000; echo all-done; cat")).await;
    ada.read_until("go").await;
    let mut stalled = Viewer::attach(&boxd, &watcher(&boxd), ShellStart::default()).await;
    ada.type_in("\n").await;
    // 2 MB, far more than the ring buffer and the sockets hold.
    ada.shows("all-done").await;
    assert_eq!(ada.keyframes, 0, "every reader receives every byte");
    stalled.shows("all-done").await;
    assert!(stalled.keyframes > 1);
    assert_eq!(stalled.screen.screen().contents(), ada.screen.screen().contents());
}

#[tokio::test]
async fn an_observer_that_does_not_read_does_not_block_observers_of_another_shell() {
    let boxd = TestBoxd::start();
    let named = |name: &str, command: &str| ShellStart { shell: Some(name.into()), ..running(command) };
    let flood = "stty -echo; echo go; read x; seq 1 600000; echo all-done; cat";
    let mut ada = Viewer::attach(&boxd, &human(&boxd, "ada"), named("flood", flood)).await;
    ada.read_until("go").await;
    let _stalled = Viewer::attach(&boxd, &watcher(&boxd), ShellStart { shell: Some("flood".into()), ..Default::default() }).await;
    let mut grace = Viewer::attach(&boxd, &human(&boxd, "grace"), named("quiet", "cat")).await;
    let mut watches = Viewer::attach(&boxd, &watcher(&boxd), ShellStart { shell: Some("quiet".into()), ..Default::default() }).await;
    ada.type_in("\n").await;
    ada.shows("all-done").await;
    grace.type_in("are you there\n").await;
    tokio::time::timeout(SOON, watches.shows("are you there")).await.expect("it gets its turn");
}

#[tokio::test]
async fn ended_shells_beyond_the_limit_are_freed() {
    let boxd = TestBoxd::start();
    let ada = human(&boxd, "ada");
    let terminals = || {
        let open = std::fs::read_dir("/proc/self/fd").unwrap();
        open.filter(|fd| std::fs::read_link(fd.as_ref().unwrap().path()).is_ok_and(|to| to.ends_with("ptmx"))).count()
    };
    for number in 0..40 {
        let mut viewer = Viewer::attach(&boxd, &ada, ShellStart { shell: Some(format!("s{number}")), ..running("exit 3") }).await;
        viewer.frame(|frame| matches!(frame, ServerFrame::Exit { .. }).then_some(())).await;
    }
    let few = async {
        while terminals() > 20 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, few).await.unwrap_or_else(|_| panic!("{} terminals are still open", terminals()));
}

#[tokio::test]
async fn a_controller_that_does_not_read_delays_the_program_only_briefly() {
    let boxd = TestBoxd::start();
    let path = boxd.host("/workspace/done");
    let command = format!("stty -echo; echo go; read x; seq 1 300000; touch {}; cat", path.display());
    let mut ada = Viewer::attach(&boxd, &human(&boxd, "ada"), running(&command)).await;
    ada.read_until("go").await;
    ada.type_in("\n").await;
    let done = async {
        while !path.exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, done).await.expect("the program keeps running without a controller");
    ada.shows("300000").await;
    assert!(ada.keyframes > 0);
}

#[tokio::test]
async fn only_the_controllers_terminal_is_queried_and_its_clipboard_needs_permission() {
    let boxd = TestBoxd::start();
    let command = "stty -echo; echo go; read x; printf 'a\\033[6nb\\033]52;c;aGk=\\007c\\033]0;title\\007d\\033]11;?\\033\\\\e\\n'; cat";
    let ada = human(&boxd, "ada");
    let start = || ShellStart { allow: vec![TerminalPermission::Clipboard], ..running(command) };
    let mut allows = Viewer::attach(&boxd, &ada, start()).await;
    let mut watches = Viewer::attach(
        &boxd,
        &watcher(&boxd),
        ShellStart { allow: vec![TerminalPermission::Clipboard, TerminalPermission::Title], ..Default::default() },
    )
    .await;
    allows.read_until("go").await;
    allows.type_in("\n").await;
    allows.read_until("e\r\n").await;
    watches.read_until("e\r\n").await;
    let shown = String::from_utf8(allows.output.clone()).unwrap();
    assert!(shown.contains("\x1b[6n") && shown.contains("\x1b]52;c;aGk=\x07") && shown.contains("\x1b]11;?"), "{shown:?}");
    assert!(!shown.contains("title"));
    let shown = String::from_utf8(watches.output.clone()).unwrap();
    assert!(!shown.contains('\x1b') && !shown.contains("title") && !shown.contains("aGk"), "{shown:?}");
    assert!(shown.replace('\0', "").ends_with("abcde\r\n"));
    assert_eq!(watches.next, allows.next, "offsets are the same for all participants");
}

#[tokio::test]
async fn an_unused_shell_is_hung_up_and_the_limits_apply() {
    let boxd = TestBoxd::start_limited(|limits| {
        limits.shell_idle_seconds = 1;
        limits.shells = 2;
    });
    let ada = human(&boxd, "ada");
    let named = |name: &str| ShellStart { shell: Some(name.into()), ..running("cat") };
    let left = Viewer::attach(&boxd, &ada, named("left")).await;
    let mut stays = Viewer::attach(&boxd, &ada, named("stays")).await;
    assert_eq!(Viewer::refused(&boxd, &ada, named("third")).await.0.as_deref(), Some("RATE_LIMITED"));
    assert_eq!(Viewer::refused(&boxd, &ada, named("an invalid name")).await.0.as_deref(), Some("INVALID_REQUEST"));
    drop(left);
    let gone = async {
        while boxd.get("/v1/shells/left").send().await.status == 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, gone).await.unwrap();
    stays.type_in("still here\n").await;
    stays.shows("still here").await;
    let list: cobox_protocol::shell::ShellList = boxd.get("/v1/shells").send().await.json();
    assert_eq!((list.items.len(), list.items[0].name.as_str(), list.items[0].viewers), (1, "stays", 1));
    boxd.post("/v1/shells", r#"{"name": "stays"}"#).send().await.refused(409, "SHELL_EXISTS");
    boxd.post("/v1/shells", r#"{"name": "fresh", "cols": 90}"#).send().await.ok(201);
}

#[tokio::test]
async fn a_shell_is_among_the_processes_and_can_be_ended_there() {
    let boxd = TestBoxd::start();
    let mut ada = Viewer::attach(&boxd, &human(&boxd, "ada"), running("cat")).await;
    let id = ada.ready.shell_id.clone();
    let list: serde_json::Value = boxd.get("/v1/processes").send().await.ok(200).json();
    let [shell] = list["items"].as_array().unwrap().as_slice() else { panic!("{list}") };
    assert_eq!(
        (shell["id"].as_str(), shell["kind"].as_str(), shell["principal"].as_str()),
        (Some(id.as_str()), Some("shell"), Some("ada"))
    );
    assert_eq!(shell["argv"], serde_json::json!(["/bin/sh", "-c", "cat"]));
    boxd.call(http::Method::DELETE, &format!("/v1/processes/{id}")).send().await.ok(204);
    let exit = |frame: &ServerFrame| match frame {
        ServerFrame::Exit { exit_code, signal, .. } => Some((*exit_code, *signal)),
        _ => None,
    };
    assert_eq!(ada.frame(exit).await, (143, Some(15)));
}
