//! Connections cut at random moments, in the middle of frames: every byte of a command and of a shell still arrives
//! exactly once.

use std::{collections::VecDeque, time::Duration};

use cobox_client::{Client, Dataplane, ExecEvent, Reconnect, ShellEvent, ShellOutput};
use cobox_protocol::{
    frame::{ExecStart, ShellStart, StdinStart},
    shell::ShellCreate,
};
use cobox_testkit::{CutPolicy, CuttingProxy, TestBroker, ensure, sh};
use sha2::{Digest, Sha256};
use tokio::time::timeout;

/// A minimum: the output continues until the last cut.
const EXEC_BYTES: u64 = 64 << 20;
const STDIN_BYTES: usize = 8 << 20;
/// Longer than any pause between two events on a machine that is busy with other tests.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// A thread's sandbox, reached through a proxy that cuts connections.
async fn connect_through(proxy: &CuttingProxy, broker: &TestBroker, thread: &str) -> (cobox_client::Session, Dataplane) {
    let session = ensure(&broker.client(), thread).await;
    let client = Client::new(&proxy.url(), broker.key().clone()).unwrap();
    // Shorter than the default for users, so that a thousand cuts take minutes.
    let reconnect = Reconnect { first_wait: Duration::from_millis(10), ..Reconnect::default() };
    let cut = client.sandbox(&session.info().sandbox.id).with_reconnect(reconnect);
    (session, cut)
}

fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

/// Runs an exec through `cuts` cuts and returns the number of bytes received.
async fn exec_through(cuts: u64, seed: u64) -> u64 {
    let broker = TestBroker::start().await;
    let plan = CutPolicy { count: cuts, within_bytes: EXEC_BYTES * 3 / 2 / cuts, within: Duration::from_secs(10) };
    let proxy = CuttingProxy::in_front_of(broker.url(), plan, seed).await;
    let (session, cut) = connect_through(&proxy, &broker, "t").await;
    // Further output is slow enough that it doesn't exceed boxd's buffer while the connection is down, which is most
    // of the time.
    let command = format!(
        "head -c {EXEC_BYTES} /dev/urandom | tee out; \
         until test -e enough; do head -c 16384 /dev/urandom | tee -a out; sleep 0.02; done; echo 'all of it' >&2; exit 7"
    );
    let mut exec = cut.exec_stream(ExecStart { command: Some(command), ..Default::default() }).await.unwrap();
    let (mut hash, mut bytes, mut stderr) = (Sha256::new(), 0, Vec::new());
    let mut is_enough = false;
    let code = loop {
        if !is_enough && proxy.cuts() >= cuts {
            is_enough = true;
            sh(session.dataplane(), "touch enough").await;
        }
        match timeout(STALL_TIMEOUT, exec.output.next()).await.expect("the stream continues").expect("it has an exit").unwrap() {
            ExecEvent::Stdout(chunk) => {
                hash.update(&chunk);
                bytes += chunk.len() as u64;
            }
            ExecEvent::Stderr(chunk) => stderr.extend_from_slice(&chunk),
            ExecEvent::Exit { exit_code, .. } => break exit_code,
            ExecEvent::Gap { .. } => panic!("seed {seed}: something was lost"),
            _ => {}
        }
    };
    assert_eq!((code, stderr.as_slice()), (7, b"all of it\n".as_slice()), "seed {seed}, {} cuts", proxy.cuts());
    assert!(bytes >= EXEC_BYTES && proxy.cuts() >= cuts, "seed {seed}: {bytes} bytes over {} cuts", proxy.cuts());
    let inside = sh(session.dataplane(), "stat -c %s out; sha256sum < out").await.stdout;
    assert_eq!(inside, format!("{bytes}\n{}  -\n", hex(hash.finalize())), "seed {seed}");
    bytes
}

/// Input of a command arrives once, in order and complete, through `cuts` cuts; returns the number of bytes sent.
async fn stdin_through(cuts: u64, seed: u64) -> u64 {
    let broker = TestBroker::start().await;
    let plan = CutPolicy { count: cuts, within_bytes: STDIN_BYTES as u64 * 4 / cuts, within: Duration::from_secs(10) };
    let proxy = CuttingProxy::in_front_of(broker.url(), plan, seed).await;
    let (session, cut) = connect_through(&proxy, &broker, "t").await;
    let start = ExecStart { command: Some("cat > in".into()), stdin: Some(StdinStart::Open(true)), ..Default::default() };
    let mut exec = cut.exec_stream(start).await.unwrap();
    let input = exec.input.clone();
    let typing = async {
        let (mut hash, mut given, mut piece) = (Sha256::new(), 0, vec![0u8; 256 * 1024]);
        while given < STDIN_BYTES || proxy.cuts() < cuts {
            getrandom::fill(&mut piece).unwrap();
            hash.update(&piece);
            given += piece.len();
            input.stdin(&piece).await.unwrap();
        }
        input.close_stdin().await.unwrap();
        (given as u64, hex(hash.finalize()))
    };
    let ending = async {
        loop {
            if let ExecEvent::Exit { exit_code, .. } =
                timeout(STALL_TIMEOUT, exec.output.next()).await.expect("the stream continues").unwrap().unwrap()
            {
                return exit_code;
            }
        }
    };
    let ((given, hash), code) = tokio::join!(typing, ending);
    assert_eq!(code, 0, "seed {seed}");
    let inside = sh(session.dataplane(), "stat -c %s in; sha256sum < in").await.stdout;
    assert_eq!(inside, format!("{given}\n{hash}  -\n"), "seed {seed}");
    given
}

/// Collects a shell's output up to and including a text.
async fn bytes_until(output: &mut ShellOutput, text: &str) -> Vec<u8> {
    let mut bytes: Vec<u8> = Vec::new();
    // The last other events, for the failure message.
    let mut others: VecDeque<String> = VecDeque::new();
    loop {
        if let Some(at) = bytes.windows(text.len()).position(|w| w == text.as_bytes()) {
            // How much more output arrives in the same frame is random.
            bytes.truncate(at + text.len());
            return bytes;
        }
        let Ok(event) = timeout(STALL_TIMEOUT, output.next()).await else {
            let tail = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(400)..]).into_owned();
            panic!("nothing came for {STALL_TIMEOUT:?}; the last was {tail:?}, and the other events were {others:#?}");
        };
        match event.expect("the stream continues").unwrap() {
            ShellEvent::Output(chunk) => bytes.extend_from_slice(&chunk),
            ShellEvent::Keyframe { .. } | ShellEvent::Gap { .. } => panic!("the outages fit what the shell keeps"),
            ShellEvent::Exit { .. } => panic!("it ended: {}", String::from_utf8_lossy(&bytes)),
            other => {
                others.push_back(format!("{other:?}"));
                others.drain(..others.len().saturating_sub(8));
            }
        }
    }
}

async fn shell_through(cuts: u64, seed: u64) {
    let broker = TestBroker::start().await;
    let plan = CutPolicy { count: cuts, within_bytes: 16 << 10, within: Duration::from_millis(120) };
    let proxy = CuttingProxy::in_front_of(broker.url(), plan, seed).await;
    let (session, cut) = connect_through(&proxy, &broker, "t").await;
    let made = session.dataplane().create_shell(&ShellCreate { name: Some("cut".into()), ..Default::default() }).await.unwrap();
    // Both start at the first byte, so that even a client that is cut before the first answer can resume.
    let shell = || ShellStart { shell: Some("cut".into()), epoch: Some(made.id.to_string()), from: Some(0), ..Default::default() };
    let mut through = loop {
        match cut.shell(shell()).await {
            Ok(shell) => break shell,
            // Cut before the first answer; this counts as one of the cuts.
            Err(e) => assert!(proxy.cuts() > 0, "{e}"),
        }
    };
    // The reference: a client whose connection is never cut.
    let mut uninterrupted = session.dataplane().shell(ShellStart { observe: true, ..shell() }).await.unwrap();
    let recording = tokio::spawn(async move { bytes_until(&mut uninterrupted.output, "all-42-lines\r\n").await });
    let input = through.input.clone();
    let proxied = async {
        let mut typed = 0;
        // Until all cuts are made: each line is typed once and must appear once.
        while proxy.cuts() < cuts || typed < 20 {
            typed += 1;
            input.stdin(format!("echo {typed} >> typed; echo line-{typed} $((6*7))\r").as_bytes()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        input.stdin(b"echo all-$((6*7))-lines\r").await.unwrap();
        typed
    };
    let (typed, seen) = tokio::join!(proxied, bytes_until(&mut through.output, "all-42-lines\r\n"));
    let recorded = recording.await.unwrap();
    assert!(seen == recorded, "seed {seed}: {} bytes through the cuts, {} without them", seen.len(), recorded.len());
    let lines: String = (1..=typed).map(|n| format!("{n}\n")).collect();
    assert_eq!(sh(session.dataplane(), "cat typed").await.stdout, lines, "seed {seed}: each line was typed once");
    assert!(proxy.cuts() >= cuts, "seed {seed}: only {} cuts", proxy.cuts());
}

/// A terminal emulator fed with a shell's events.
struct ScreenReader {
    output: ShellOutput,
    parser: vt100::Parser,
    keyframes: u32,
}

impl ScreenReader {
    fn new(output: ShellOutput) -> Self {
        Self { output, parser: vt100::Parser::new(24, 80, 0), keyframes: 0 }
    }

    async fn until(&mut self, text: &str) {
        while !self.parser.screen().contents().contains(text) {
            self.next().await;
        }
    }

    async fn next(&mut self) {
        match timeout(STALL_TIMEOUT, self.output.next()).await.expect("the stream continues").expect("the stream continues").unwrap() {
            ShellEvent::Output(bytes) => self.parser.process(&bytes),
            ShellEvent::Keyframe { cols, rows, bytes } => {
                self.parser = vt100::Parser::new(rows, cols, 0);
                self.parser.process(&bytes);
                self.keyframes += 1;
            }
            ShellEvent::Resized { cols, rows } => self.parser.screen_mut().set_size(rows, cols),
            _ => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_an_outage_longer_than_the_output_buffer_the_screen_is_the_same() {
    let broker = TestBroker::start().await;
    let never = CutPolicy { count: 0, within_bytes: 1, within: Duration::ZERO };
    let proxy = CuttingProxy::in_front_of(broker.url(), never, 1).await;
    let (session, cut) = connect_through(&proxy, &broker, "t").await;
    let start = ShellStart { cols: Some(80), rows: Some(24), ..Default::default() };
    let shell = cut.shell(start).await.unwrap();
    let input = shell.input.clone();
    let mut interrupted = ScreenReader::new(shell.output);
    input.stdin(b"until test -e go; do sleep 0.05; done; seq 100000 199999; echo fin\"\"ished\r").await.unwrap();
    interrupted.until("seq 100000").await;
    let mut uninterrupted =
        ScreenReader::new(session.dataplane().shell(ShellStart { observe: true, ..Default::default() }).await.unwrap().output);
    uninterrupted.until("seq 100000").await;

    proxy.set_down(true);
    while !matches!(timeout(STALL_TIMEOUT, interrupted.output.next()).await.unwrap().unwrap().unwrap(), ShellEvent::Reconnecting { .. }) {}
    sh(session.dataplane(), "touch go").await;
    uninterrupted.until("finished\n").await;
    let before = interrupted.keyframes;
    proxy.set_down(false);
    interrupted.until("finished\n").await;
    assert!(interrupted.keyframes > before, "more was printed than is kept");
    // The prompt may not have reached both of them yet.
    let picture = |w: &ScreenReader| (w.parser.screen().contents_formatted(), w.parser.screen().cursor_position());
    while picture(&interrupted) != picture(&uninterrupted) {
        tokio::select! {
            () = interrupted.next() => {}
            () = uninterrupted.next() => {}
        }
    }
    assert!(interrupted.parser.screen().contents().contains("199999"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_of_64_mib_arrives_once_over_a_hundred_lost_connections() {
    exec_through(100, 0xc075).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn input_of_a_command_arrives_once_over_forty_lost_connections() {
    stdin_through(40, 0x57d1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shell_output_is_the_same_over_a_hundred_lost_connections_as_without() {
    shell_through(100, 0x5e11).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes; run by make soak"]
async fn soak_a_thousand_lost_connections_of_a_command_and_a_shell_lose_and_repeat_nothing() {
    let exec = exec_through(1000, 0xc076).await >> 20;
    let stdin = stdin_through(200, 0x57d2).await >> 20;
    shell_through(1000, 0x5e12).await;
    crate::load::record(&format!(
        "connections cut at random: 1000 times during {exec} MiB of a command's output, 200 during {stdin} MiB of its input, 1000 during a shell session: nothing lost, nothing doubled"
    ));
}
