//! Commands that try to outlive their end, in a real sandbox: not started yet, not inspectable, or seemingly ended.

use cobox_protocol::exec::{ExecRequest, ExecResponse};
use cobox_testkit::{BrokerOptions, TestBroker, ensure, eventually, sh};

struct TestSandbox {
    _broker: TestBroker,
    session: cobox_client::Session,
}

impl TestSandbox {
    async fn start() -> Self {
        let broker = TestBroker::start().await;
        let session = ensure(&broker.client(), "t").await;
        Self { _broker: broker, session }
    }

    async fn exec(&self, request: ExecRequest) -> ExecResponse {
        self.session.dataplane().exec(&request).await.unwrap()
    }

    async fn sh(&self, command: &str) -> String {
        sh(self.session.dataplane(), command).await.stdout
    }
}

fn argv(words: &[&str]) -> ExecRequest {
    ExecRequest { argv: Some(words.iter().map(|&word| word.to_owned()).collect()), ..Default::default() }
}

/// A PATH with so many directories that the search for the program is still running when the time limit expires.
fn long_search_path() -> String {
    "/n:".repeat(40_000) + "/usr/bin:/bin"
}

#[tokio::test]
async fn a_command_that_times_out_before_its_start_never_runs() {
    let test = TestSandbox::start().await;
    let env = [("PATH".to_owned(), long_search_path())];
    let late = ExecRequest { env: Some(env.into()), timeout_seconds: Some(0.005), ..argv(&["sh", "-c", "touch ran; exec sleep 1001"]) };
    for _ in 0..3 {
        assert!(test.exec(late.clone()).await.timed_out);
    }
    for _ in 0..50 {
        test.exec(ExecRequest { timeout_seconds: Some(0.0001), ..argv(&["sleep", "1001"]) }).await;
    }
    let left = test.sh("ls; cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o '[s]leep 1001'").await;
    assert_eq!(left, "");
}

#[tokio::test]
async fn an_unreadable_program_is_ended_like_any_other() {
    let test = TestSandbox::start().await;
    test.sh("cp $(readlink -f $(command -v sleep)) closed; cp $(readlink -f $(command -v bash)) shell; chmod 111 closed shell").await;
    // It can't be identified in /proc, so it is detected by its effect.
    let command = "./shell -c 'while :; do echo > beat; ./closed 0.05; done' & wait".to_owned();
    let done = test.exec(ExecRequest { command: Some(command), timeout_seconds: Some(1.0), ..Default::default() }).await;
    assert!(done.timed_out, "{done:?}");
    assert_eq!(test.sh("rm beat; sleep 0.5; ls").await, "closed\nshell\n");
}

/// The first thread ends, and the others continue.
const WITHOUT_MAIN_THREAD: &str = "
import ctypes, threading, time
def go():
    while True:
        open('beat', 'w').close(); time.sleep(0.02)
threading.Thread(target=go).start()
ctypes.CDLL(None).syscall(60, 0)";

#[tokio::test]
async fn a_program_whose_main_thread_ended_is_ended_like_any_other() {
    let test = TestSandbox::start().await;
    let done = test.exec(ExecRequest { timeout_seconds: Some(1.0), ..argv(&["python3", "-c", WITHOUT_MAIN_THREAD]) }).await;
    assert!(done.timed_out, "{done:?}");
    assert_eq!(test.sh("rm beat; sleep 0.5; ls").await, "");
}

#[tokio::test]
async fn searching_a_long_path_for_a_long_name_fails_without_harm() {
    let test = TestSandbox::start().await;
    let path = |directory: &str| Some([("PATH".to_owned(), directory.repeat(100_000 / directory.len()))].into());
    let done = test.exec(ExecRequest { env: path("a:"), ..argv(&[&"x".repeat(100_000)]) }).await;
    assert_eq!((done.exit_code, done.stderr.contains("not a program name")), (126, true), "{done:?}");
    let done = test.exec(ExecRequest { env: path("a:"), ..argv(&[&"x".repeat(255)]) }).await;
    assert_eq!(done.exit_code, 127, "{done:?}");
    let directory = format!("{}:", "d/".repeat(2000));
    let done = test.exec(ExecRequest { env: path(&directory), ..argv(&[&"x".repeat(255)]) }).await;
    assert_eq!(done.exit_code, 127, "{done:?}");
    assert_eq!(test.sh("echo still here").await, "still here\n");
}

#[tokio::test]
async fn a_program_stopped_before_its_start_is_ended_and_reported() {
    let test = TestSandbox::start().await;
    // Stops every process that starts in the meantime, at any point of its start.
    let stopper = "import os, time
end = time.time() + 20
while time.time() < end:
    try: os.kill(-1, 19)
    except OSError: pass";
    let stopping = ExecRequest { timeout_seconds: Some(15.0), ..argv(&["python3", "-c", stopper]) };
    let start = async |n: u32| {
        let request = ExecRequest { command_id: Some(n.to_string()), timeout_seconds: Some(1.0), ..argv(&["true"]) };
        test.session.dataplane().exec(&request).await
    };
    let starts = async { futures_util::future::join_all((0..30).map(start)).await };
    let (stopped, answers) = tokio::join!(test.exec(stopping), starts);
    assert!(stopped.timed_out);
    // Each program was stopped and timed out, or was stopped before it ran, which the error reports.
    for answer in answers {
        match answer {
            Ok(done) => assert!(done.timed_out || done.exit_code == 0, "{done:?}"),
            Err(error) => assert!(error.to_string().contains("did not start"), "{error}"),
        }
    }
    assert_eq!(test.sh("echo still here").await, "still here\n");
}

/// Each child is reparented to the process that started this program.
const REPARENTED_CHILDREN: &str = "
import ctypes, os
libc = ctypes.CDLL(None)
CLONE_PARENT, SIGCHLD, SYS_clone = 0x8000, 17, 56
for n in range(150):
    if libc.syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0) == 0:
        if n == 0: os.execvp('sleep', ['sleep', '1002'])
        os._exit(3)
print('given')";

#[tokio::test]
async fn reparented_children_are_reaped_and_ended_with_their_program() {
    let test = TestSandbox::start().await;
    let given = ExecRequest { timeout_seconds: Some(30.0), ..argv(&["python3", "-c", REPARENTED_CHILDREN]) };
    assert_eq!(test.exec(given.clone()).await.stdout, "given\n");
    let ended = "grep -l ') Z ' /proc/[0-9]*/stat | wc -l";
    eventually("ended children to be reaped", || async { (test.sh(ended).await == "0\n").then_some(()) }).await;
    let running = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o '[s]leep 1002' | wc -l";
    assert_eq!(test.sh(running).await, "1\n", "background processes keep running");
    let late = ExecRequest { timeout_seconds: Some(1.0), ..argv(&["python3", "-c", &format!("{REPARENTED_CHILDREN}\nwhile True: pass")]) };
    assert!(test.exec(late).await.timed_out);
    assert_eq!(test.sh(running).await, "1\n", "those of a command that timed out do not");
}

#[tokio::test]
async fn programs_start_with_default_signal_handling() {
    let test = TestSandbox::start().await;
    let ignored = test.sh("grep SigIgn /proc/self/status | cut -f 2; grep SigBlk /proc/self/status | cut -f 2").await;
    // Except SIGXFSZ, which is ignored.
    assert_eq!(ignored, "0000000001000000\n0000000000000000\n");
}

#[tokio::test]
async fn a_write_beyond_the_disk_limit_fails_without_killing_the_program() {
    let config = "reaper_interval_ms = 100\n[local]\ndisk = \"soft\"\ndisk_bytes = 67108864\n".to_owned();
    let broker = TestBroker::start_with(BrokerOptions { config, ..Default::default() }).await;
    let session = ensure(&broker.client(), "full").await;
    let d = session.dataplane();
    sh(d, "head -c 80000000 /dev/zero > fill").await;
    eventually("writes to be refused", || async {
        let tried = sh(d, "echo hi > f || echo lived").await;
        assert!(tried.signal.is_none() && tried.exit_code == 0, "{tried:?}");
        (tried.stdout == "lived\n").then_some(())
    })
    .await;
}
