//! Tests of commands over WebSockets: input and output as frames, lost and resumed connections, and clients that don't
//! read.

mod support;

use cobox_protocol::frame::{ExecStart, OutputStream, StdinStart};
use futures_util::SinkExt;
use serde_json::{Value, json};
use support::{
    EVERYTHING, SOON, TestBoxd,
    exec_client::{ClientFrame, ExecClient, ServerFrame, command, named},
};

/// The bytes that `seq 1 n` prints.
fn numbers(n: u32) -> Vec<u8> {
    (1..=n).flat_map(|i| format!("{i}\n").into_bytes()).collect()
}

#[tokio::test]
async fn output_is_sent_as_frames_followed_by_the_exit() {
    let boxd = TestBoxd::start();
    let mut client = ExecClient::start(&boxd, command("printf out; printf err >&2; printf '\\377'; exit 3")).await;
    assert!(client.ready.pid > 0 && client.ready.command_id.starts_with("cmd_"));
    assert_eq!(client.exit().await, (3, None, false));
    assert_eq!((client.stdout.as_slice(), client.stderr.as_slice()), (b"out\xff".as_slice(), b"err".as_slice()));
    let binary = ExecStart { binary: true, ..command("seq 1 300000; seq 1 1000 >&2; kill -9 $$") };
    let mut client = ExecClient::start(&boxd, binary).await;
    assert_eq!(client.exit().await, (137, Some(9), false));
    assert!(client.stdout == numbers(300_000) && client.stderr == numbers(1000));
}

#[tokio::test]
async fn text_is_split_between_characters() {
    let boxd = TestBoxd::start();
    // Three bytes per character, which no frame's size is a multiple of.
    let mut client = ExecClient::start(&boxd, command("yes € | tr -d '\\n' | head -c 3000000")).await;
    loop {
        match client.message().await.map(|m| serde_json::from_str::<ServerFrame>(m.to_text().unwrap()).unwrap()) {
            Some(ServerFrame::Stdout { data, data_b64, .. }) if data.as_deref().unwrap_or_default().len() > 100_000 => {
                assert!(data_b64.is_none())
            }
            Some(ServerFrame::Stdout { .. }) => {}
            Some(ServerFrame::Exit { .. }) => break,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_missing_program_exits_with_the_code_of_a_shell() {
    let boxd = TestBoxd::start();
    let start = ExecStart { argv: Some(vec!["/bin/no-such-program".into()]), ..Default::default() };
    let mut client = ExecClient::start(&boxd, start).await;
    assert_eq!(client.exit().await, (127, None, false));
    assert_eq!(client.stderr, b"/bin/no-such-program: not found\n");
    let start = ExecStart { cwd: Some("relative".into()), ..command("ls") };
    assert_eq!(ExecClient::try_start(&boxd, start).await.err().as_deref(), Some("INVALID_REQUEST"));
}

#[tokio::test]
async fn resent_input_reaches_the_program_once() {
    let boxd = TestBoxd::start();
    let start = ExecStart { stdin: Some(StdinStart::Open(true)), client: Some("me".into()), ..command("cat") };
    let mut client = ExecClient::start(&boxd, start.clone()).await;
    for seq in [1, 2, 1, 2, 3, 2] {
        client.send(ClientFrame::stdin(format!("{seq} ").as_bytes(), Some(seq))).await;
        assert!(matches!(client.answer().await, Some(ServerFrame::StdinAck { seq: acked }) if acked == seq));
    }
    client.read_until("1 2 3 ").await;
    let id = client.ready.command_id.clone();
    drop(client);
    // Another connection of the same client still knows which input was accepted.
    let mut client = ExecClient::start(&boxd, named(&id, ExecStart { client: Some("me".into()), ..Default::default() })).await;
    for seq in [3, 4] {
        client.send(ClientFrame::stdin(format!("{seq} ").as_bytes(), Some(seq))).await;
    }
    client.send(ClientFrame::CloseStdin).await;
    assert_eq!(client.exit().await, (0, None, false));
    assert_eq!(client.stdout, b"1 2 3 4 ");
}

#[tokio::test]
async fn input_is_numbered_separately_for_each_client_and_principal() {
    let boxd = TestBoxd::start();
    let start = ExecStart { stdin: Some(StdinStart::Open(true)), ..named("typed", command("cat")) };
    let mut first = ExecClient::start(&boxd, start).await;
    // Two connections without a client id of one principal, and one of another principal that uses the first
    // principal's name as its client id.
    let mut second = ExecClient::start(&boxd, named("typed", ExecStart::default())).await;
    let mut claims = boxd.claims(EVERYTHING);
    claims.sub = "bob".into();
    let bob = boxd.key.mint(&claims);
    let mut posing =
        ExecClient::start_as(&boxd, &bob, named("typed", ExecStart { client: Some("ada".into()), ..Default::default() })).await;
    let mut expected = String::new();
    for (name, seq, taken) in [("b", u64::MAX, true), ("1-", 0, true), ("2-", 0, true), ("1-", 1, true), ("2-", 0, false), ("2-", 1, true)]
    {
        let client = match name {
            "b" => &mut posing,
            "1-" => &mut first,
            _ => &mut second,
        };
        client.send(ClientFrame::stdin(format!("{name}{seq} ").as_bytes(), Some(seq))).await;
        assert!(matches!(client.answer().await, Some(ServerFrame::StdinAck { seq: acked }) if acked == seq));
        if taken {
            expected += &format!("{name}{seq} ");
        }
    }
    first.send(ClientFrame::CloseStdin).await;
    assert_eq!(first.exit().await.0, 0);
    assert_eq!(String::from_utf8_lossy(&first.stdout), expected);
}

#[tokio::test]
async fn stdin_can_be_sent_with_the_start_frame_and_is_empty_without_it() {
    let boxd = TestBoxd::start();
    let start = ExecStart { stdin: Some(StdinStart::Text("all of it".into())), ..command("cat") };
    let mut client = ExecClient::start(&boxd, start).await;
    assert_eq!((client.exit().await.0, client.stdout.as_slice()), (0, b"all of it".as_slice()));
    let start = ExecStart { stdin_b64: Some("/wBh".into()), ..command("cat") };
    let mut client = ExecClient::start(&boxd, start).await;
    assert_eq!((client.exit().await.0, client.stdout.as_slice()), (0, b"\xff\0a".as_slice()));
    let mut client = ExecClient::start(&boxd, ExecStart { kill_on_disconnect: true, ..command("cat; echo end; sleep 1000") }).await;
    client.read_until("end").await;
    client.send(ClientFrame::stdin(b"x", Some(1))).await;
    assert!(matches!(client.answer().await, Some(ServerFrame::Error { error }) if error.message.contains("stdin: true")));
}

#[tokio::test]
async fn a_terminal_can_be_resized_and_receives_input() {
    let boxd = TestBoxd::start();
    let start = ExecStart { pty: true, cols: Some(100), rows: Some(30), ..command("stty size; read x; stty size; echo got $x >&2") };
    let mut client = ExecClient::start(&boxd, start).await;
    client.read_until("30 100").await;
    client.send(ClientFrame::Resize { cols: 120, rows: 40 }).await;
    client.send(ClientFrame::stdin(b"word\n", None)).await;
    client.read_until("40 120").await;
    assert_eq!(client.exit().await.0, 0);
    assert!(String::from_utf8_lossy(&client.stdout).contains("got word"), "a terminal has one stream");
    let mut client = ExecClient::start(&boxd, ExecStart { pty: true, ..command("cat; echo over") }).await;
    client.send(ClientFrame::CloseStdin).await;
    client.read_until("over").await;
    assert_eq!(client.exit().await.0, 0);
}

#[tokio::test]
async fn closing_the_input_of_a_terminal_works_in_the_middle_of_a_line() {
    let boxd = TestBoxd::start();
    // The second one continues to read: the end of input was not repeated for it.
    let twice = "cat; echo over; timeout --foreground 0.1 cat; echo $?";
    for typed in ["abc", "abc\n", "abc\r", "abc\u{4}", ""] {
        let start = ExecStart { pty: true, stdin: Some(StdinStart::Text(typed.into())), ..command(twice) };
        let mut client = ExecClient::start(&boxd, start).await;
        client.read_until("over\r\n").await;
        assert_eq!(client.exit().await.0, 0);
        assert!(client.stdout.ends_with(b"over\r\n124\r\n"), "{typed:?}: {}", String::from_utf8_lossy(&client.stdout));
    }
}

#[tokio::test]
async fn every_ping_is_answered_while_output_is_queued() {
    const PINGS: u64 = 200;
    let boxd = TestBoxd::start();
    let start = ExecStart { stdin: Some(StdinStart::Open(true)), ..command("seq 1 300000; cat") };
    let mut client = ExecClient::start(&boxd, start).await;
    client.read_until("1000\n").await;
    // The client reads nothing while it sends, so that responses and output compete for the few places in the send
    // queue.
    for id in 0..PINGS {
        client.send(ClientFrame::Ping { id: Some(id.into()) }).await;
    }
    for id in 0..PINGS {
        assert!(matches!(client.answer().await, Some(ServerFrame::Pong { id: Some(answered) }) if answered == id), "ping {id}");
    }
    client.send(ClientFrame::CloseStdin).await;
    assert_eq!(client.exit().await.0, 0);
    assert!(client.stdout == numbers(300_000));
}

#[tokio::test]
async fn a_signal_reaches_the_program() {
    let boxd = TestBoxd::start();
    let mut client = ExecClient::start(&boxd, command("trap 'echo caught; exit 5' USR1; echo set; while :; do sleep 0.01; done")).await;
    client.read_until("set").await;
    client.send(ClientFrame::Signal { signal: "SIGUSR1".into() }).await;
    assert_eq!(client.exit().await.0, 5);
    assert!(client.stdout.ends_with(b"caught\n"));
    let start = ExecStart { kill_on_disconnect: true, ..command("trap 'exit 6' USR2; echo set; while :; do sleep 0.01; done") };
    let mut client = ExecClient::start(&boxd, start).await;
    client.read_until("set").await;
    // A signal may also be given by its number.
    client.socket.send(tokio_tungstenite::tungstenite::Message::text(r#"{"type": "signal", "signal": 12}"#)).await.unwrap();
    assert_eq!(client.exit().await.0, 6);
}

#[tokio::test]
async fn concurrent_starts_with_one_id_run_it_once_and_all_get_the_whole_output() {
    let boxd = TestBoxd::start();
    let start = || named("mine", command("echo run >> runs; seq 1 20000"));
    let clients = futures_util::future::join_all((0..16).map(|_| ExecClient::start(&boxd, start()))).await;
    for mut client in clients {
        assert_eq!(client.exit().await.0, 0);
        assert!(client.stdout == numbers(20_000));
    }
    // The same after its end.
    let mut again = ExecClient::start(&boxd, start()).await;
    assert_eq!(again.exit().await.0, 0);
    assert!(again.stdout == numbers(20_000));
    let repeated: Value = boxd.post("/v1/exec", json!({"command_id": "mine"}).to_string()).send().await.ok(200).json();
    assert_eq!((repeated["exit_code"].as_i64(), repeated["command_id"].as_str()), (Some(0), Some("mine")));
    assert_eq!(std::fs::read_to_string(boxd.host("/workspace/runs")).unwrap(), "run\n");
}

/// Pseudo-random numbers that are the same in every run.
struct PseudoRandom(u64);

impl PseudoRandom {
    fn next_below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeatedly_broken_connection_loses_and_repeats_no_byte() {
    const CUTS: u64 = 30;
    const BYTES: u64 = 64 << 20;
    let boxd = TestBoxd::start();
    let print = format!("head -c {BYTES} /dev/urandom | tee printed; cat printed | head -c 100000 >&2");
    let mut random = PseudoRandom(7);
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let mut start = ExecStart { binary: true, ..named("cut", command(&print)) };
    for cut in 0..=CUTS {
        start.stdout_from = Some(stdout.len() as u64);
        start.stderr_from = Some(stderr.len() as u64);
        start.binary = cut % 4 != 3;
        let mut client = ExecClient::start(&boxd, start.clone()).await;
        let until = if cut == CUTS { u64::MAX } else { stdout.len() as u64 + random.next_below(2 * BYTES / CUTS) };
        let acks = random.next_below(3);
        let exit = loop {
            if client.stdout_at >= until {
                break None;
            }
            match client.step().await {
                Some(None) if acks > 0 => {
                    if random.next_below(4) < acks {
                        client.ack().await;
                    }
                }
                Some(None) => {}
                Some(Some(ServerFrame::Exit { exit_code, .. })) => break Some(exit_code),
                other => panic!("{other:?}"),
            }
        };
        assert!(client.gaps.is_empty());
        stdout.append(&mut client.stdout);
        stderr.append(&mut client.stderr);
        // Cuts the connection without closing it, in the middle of a transfer.
        drop(client);
        if let Some(code) = exit {
            assert_eq!(code, 0);
            if stderr.len() == 100_000 {
                break;
            }
        }
    }
    let printed = std::fs::read(boxd.host("/workspace/printed")).unwrap();
    assert!(stdout == printed, "received {} of {} bytes", stdout.len(), printed.len());
    assert!(stderr == printed[..100_000]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_without_a_client_is_kept_up_to_a_limit_and_the_rest_is_a_gap() {
    let boxd = TestBoxd::start_limited(|limits| limits.exec_spool_bytes = 1 << 20);
    let start = named("alone", command("seq 1 2000000; touch done"));
    let client = ExecClient::start(&boxd, start).await;
    drop(client);
    support::wait_for(|| boxd.host("/workspace/done").exists()).await;
    let mut client = ExecClient::start(&boxd, named("alone", ExecStart::default())).await;
    assert_eq!(client.exit().await.0, 0);
    let whole = numbers(2_000_000);
    let (stream, from, to) = client.gaps[0];
    assert_eq!((stream, client.gaps.len()), (OutputStream::Stdout, 1));
    assert!(to as usize + client.stdout.len() - from as usize >= 1 << 20, "the ring and the spool are kept");
    assert!(whole[..from as usize] == client.stdout[..from as usize]);
    assert!(client.stdout[from as usize..] == whole[to as usize..]);
}

#[tokio::test]
async fn a_command_is_retained_for_its_time_and_then_reported_as_expired() {
    let boxd = TestBoxd::start_limited(|limits| limits.exec_retention_seconds = 1);
    let mut client = ExecClient::start(&boxd, named("short", command("echo hi"))).await;
    assert_eq!(client.exit().await.0, 0);
    let gone = async {
        loop {
            match ExecClient::try_start(&boxd, named("short", command("echo hi"))).await {
                Ok(mut kept) => assert_eq!((kept.exit().await.0, kept.stdout.as_slice()), (0, b"hi\n".as_slice())),
                Err(code) => return code,
            }
        }
    };
    assert_eq!(tokio::time::timeout(SOON, gone).await.unwrap(), "COMMAND_EXPIRED");
    boxd.post("/v1/exec", json!({"command_id": "short"}).to_string()).send().await.refused(410, "COMMAND_EXPIRED");
    boxd.post("/v1/exec", json!({"command_id": "never"}).to_string()).send().await.refused(404, "COMMAND_NOT_FOUND");
    boxd.post("/v1/exec", json!({"command_id": "a\u{7}b"}).to_string()).send().await.refused(400, "INVALID_REQUEST");
    assert_eq!(ExecClient::try_start(&boxd, named("never", ExecStart::default())).await.err().as_deref(), Some("COMMAND_NOT_FOUND"));
}

#[tokio::test]
async fn the_id_of_an_answered_command_can_not_be_run_again() {
    let boxd = TestBoxd::start();
    let request = json!({"command": "echo ran >> runs; seq 1 3"});
    let done: Value = boxd.post("/v1/exec", request.to_string()).send().await.ok(200).json();
    let id = done["command_id"].as_str().unwrap();
    let again = json!({"command": "echo ran >> runs", "command_id": id});
    for request in [again, json!({"command_id": id})] {
        let why = boxd.post("/v1/exec", request.to_string()).send().await.refused(410, "COMMAND_EXPIRED");
        assert!(why.contains("the request that started"), "{why}");
    }
    assert_eq!(ExecClient::try_start(&boxd, named(id, command("echo ran >> runs"))).await.err().as_deref(), Some("COMMAND_EXPIRED"));
    assert_eq!(std::fs::read_to_string(boxd.host("/workspace/runs")).unwrap(), "ran\n");
}

#[tokio::test]
async fn commands_beyond_the_limit_are_refused_and_a_started_one_can_still_be_joined() {
    let boxd = TestBoxd::start_limited(|limits| limits.execs = 2);
    let wait = || ExecStart { stdin: Some(StdinStart::Open(true)), ..command("read x") };
    let _one = ExecClient::start(&boxd, named("one", wait())).await;
    let mut two = ExecClient::start(&boxd, named("two", wait())).await;
    assert_eq!(ExecClient::try_start(&boxd, named("three", wait())).await.err().as_deref(), Some("RATE_LIMITED"));
    boxd.post("/v1/exec", json!({"command": "true"}).to_string()).send().await.refused(429, "RATE_LIMITED");
    let _joined = ExecClient::start(&boxd, named("one", wait())).await;
    two.send(ClientFrame::CloseStdin).await;
    two.exit().await;
    let mut three = ExecClient::start(&boxd, named("three", command("true"))).await;
    assert_eq!(three.exit().await.0, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_never_reads_blocks_its_program_but_not_boxd() {
    let boxd = TestBoxd::start();
    let mut stuck = ExecClient::start(&boxd, ExecStart { binary: true, ..named("stuck", command("exec yes")) }).await;
    // The command prints as fast as it can and is blocked where this client stopped reading. Other commands are not
    // affected.
    let mut other = ExecClient::start(&boxd, command("seq 1 100000")).await;
    assert_eq!(other.exit().await.0, 0);
    for _ in 0..20 {
        boxd.post("/v1/exec", json!({"command": "true"}).to_string()).send().await.ok(200);
    }
    stuck.step().await;
    boxd.delete("/v1/processes/stuck").send().await.ok(204);
    assert_eq!(stuck.exit().await.1, Some(15));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_viewer_that_never_reads_delays_neither_the_program_nor_the_first() {
    const BYTES: usize = 64 << 20;
    let boxd = TestBoxd::start();
    let print = format!("read go; head -c {BYTES} /dev/zero");
    let start = ExecStart { binary: true, stdin: Some(StdinStart::Open(true)), ..named("watched", command(&print)) };
    let mut quick = ExecClient::start(&boxd, start).await;
    let mut stuck = ExecClient::start(&boxd, named("watched", ExecStart { binary: true, ..Default::default() })).await;
    quick.send(ClientFrame::stdin(b"\n", None)).await;
    // Within the test client's timeout, which is shorter than the time for which boxd waits for a slow viewer.
    assert_eq!(quick.exit().await.0, 0);
    assert_eq!(quick.stdout.len(), BYTES);
    assert_eq!(stuck.exit().await.0, 0);
    assert_eq!((stuck.stdout.len(), stuck.gaps.as_slice()), (BYTES, [].as_slice()), "a late reader receives all of it");
}

#[tokio::test]
async fn a_command_with_kill_on_disconnect_ends_with_its_last_connection() {
    let boxd = TestBoxd::start();
    let start = ExecStart { kill_on_disconnect: true, ..named("held", command(support::DAEMONS)) };
    let one = ExecClient::start(&boxd, start).await;
    let two = ExecClient::start(&boxd, named("held", ExecStart::default())).await;
    let pids = support::daemons(&boxd).await;
    drop(one);
    boxd.post("/v1/exec", json!({"command": "true"}).to_string()).send().await.ok(200);
    assert!(pids.iter().all(|pid| support::is_running(pid)), "one is still connected");
    drop(two);
    support::wait_for(|| !pids.iter().any(|pid| support::is_running(pid))).await;
}

#[tokio::test]
async fn a_command_that_times_out_reports_it() {
    let boxd = TestBoxd::start();
    let mut client = ExecClient::start(&boxd, ExecStart { timeout_seconds: Some(0.5), ..command(support::DAEMONS) }).await;
    let pids = support::daemons(&boxd).await;
    assert_eq!(client.exit().await, (137, Some(9), true));
    assert!(!pids.iter().any(|pid| support::is_running(pid)));
}

#[tokio::test]
async fn invalid_frames_are_refused_and_the_command_continues() {
    let boxd = TestBoxd::start();
    let mut client = ExecClient::start(&boxd, ExecStart { stdin: Some(StdinStart::Open(true)), ..command("cat") }).await;
    for frame in [
        ClientFrame::Start(command("ls")),
        ClientFrame::Resize { cols: 10, rows: 10 },
        ClientFrame::Signal { signal: "NONSENSE".into() },
        ClientFrame::Stdin { data: Some("a".into()), data_b64: Some("YQ==".into()), seq: None },
    ] {
        client.send(frame).await;
        assert!(matches!(client.answer().await, Some(ServerFrame::Error { error }) if error.code == "INVALID_REQUEST"));
    }
    client.send(ClientFrame::CloseStdin).await;
    assert_eq!(client.exit().await.0, 0);
    for (start, named) in [
        (r#"{"type": "start", "command": 7}"#, "INVALID_REQUEST"),
        (r#"{"type": "start", "command": "touch ran", "std_in": "a"}"#, "std_in: is not a field"),
    ] {
        let mut socket = ExecClient::dial(&boxd, &boxd.token("exec")).await;
        socket.send(tokio_tungstenite::tungstenite::Message::text(start)).await.unwrap();
        let reply = tokio::time::timeout(SOON, futures_util::StreamExt::next(&mut socket)).await.unwrap().unwrap().unwrap();
        assert!(reply.to_text().unwrap().contains(named), "{reply}");
    }
    assert!(!boxd.host("/workspace/ran").exists());
}
