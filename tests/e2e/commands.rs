//! Commands in a real sandbox: all their descendants end with them, however they try to escape, and a hostile one
//! can't block boxd.

use cobox_protocol::{
    exec::ExecRequest,
    frame::{ClientFrame, ExecReady, ExecStart, ServerFrame},
    session::{Mode, NegotiateResponse},
};
use cobox_testkit::{TestBroker, eventually, negotiate, sh};
use futures_util::{SinkExt, StreamExt};
use tokio::net::TcpStream;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, client::IntoClientRequest},
};

/// Ignores SIGTERM, as its child does; its daemon has left the session and its parents by a double fork.
const STUBBORN: &str = r#"trap "" TERM
sleep 1001 &
setsid sh -c 'trap "" TERM; (setsid sh -c "trap \"\" TERM; touch up; sleep 1002 & wait" &) ; exit 0' > /dev/null 2>&1 < /dev/null
wait"#;

struct TestSandbox {
    broker: TestBroker,
    session: cobox_client::Session,
    info: NegotiateResponse,
}

impl TestSandbox {
    async fn start() -> Self {
        let broker = TestBroker::start().await;
        let client = broker.client();
        let session = client.open(&negotiate("commands", Mode::Ensure)).await.unwrap();
        let info = client.negotiate(&negotiate("commands", Mode::Ensure)).await.unwrap();
        Self { broker, session, info }
    }

    /// Whether the program, its child or its daemon is running.
    async fn is_stubborn_running(&self) -> bool {
        let found = sh(self.session.dataplane(), "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 100[12]'").await;
        found.stdout.trim() != "0"
    }

    async fn wait_until_up(&self) {
        eventually("the daemon to be up", || async {
            let seen = sh(self.session.dataplane(), "[ -e up ] && rm up").await;
            (seen.exit_code == 0).then_some(())
        })
        .await;
    }

    async fn exec_socket(&self, start: ExecStart) -> WebSocketStream<TcpStream> {
        let url = format!("{}/exec/ws", self.info.sandbox.ws_base_url);
        let mut request = url.as_str().into_client_request().unwrap();
        request.headers_mut().insert("authorization", format!("Bearer {}", self.info.token.expose()).parse().unwrap());
        let address = self.broker.url().strip_prefix("http://").unwrap();
        let tcp = TcpStream::connect(address).await.unwrap();
        let (mut socket, _) = tokio_tungstenite::client_async(request, tcp).await.unwrap();
        socket.send(Message::text(serde_json::to_string(&ClientFrame::Start(start)).unwrap())).await.unwrap();
        let first = socket.next().await.unwrap().unwrap();
        let frame: ServerFrame<ExecReady> = serde_json::from_str(first.to_text().unwrap()).unwrap();
        assert!(matches!(frame, ServerFrame::Ready(ExecReady { pid: 2.., .. })), "{frame:?}");
        socket
    }
}

fn stubborn() -> ExecStart {
    ExecStart { command: Some(STUBBORN.into()), command_id: Some("stubborn".into()), ..Default::default() }
}

#[tokio::test]
async fn a_command_that_ignores_term_is_killed_with_its_daemons_at_its_timeout() {
    let test = TestSandbox::start().await;
    let request = ExecRequest { command: Some(STUBBORN.into()), timeout_seconds: Some(2.0), ..Default::default() };
    let (done, ()) = tokio::join!(test.session.dataplane().exec(&request), test.wait_until_up());
    assert!(done.unwrap().timed_out);
    assert!(!test.is_stubborn_running().await);
}

#[tokio::test]
async fn a_command_that_ignores_term_is_killed_with_its_daemons_when_cancelled() {
    let test = TestSandbox::start().await;
    let _socket = test.exec_socket(stubborn()).await;
    test.wait_until_up().await;
    let url = format!("{}/processes/stubborn", test.info.sandbox.http_base_url);
    let answer = reqwest::Client::new().delete(url).bearer_auth(test.info.token.expose()).send().await.unwrap();
    assert_eq!(answer.status(), 204);
    assert!(!test.is_stubborn_running().await);
}

#[tokio::test]
async fn ending_a_shell_kills_its_daemons_before_the_response() {
    let test = TestSandbox::start().await;
    let (http, shells) = (reqwest::Client::new(), format!("{}/shells", test.info.sandbox.http_base_url));
    let body = serde_json::json!({"name": "main", "command": STUBBORN});
    let made = http.post(&shells).bearer_auth(test.info.token.expose()).json(&body).send().await.unwrap();
    assert_eq!(made.status(), 201);
    test.wait_until_up().await;
    assert!(test.is_stubborn_running().await);
    let ended = http.delete(format!("{shells}/main")).bearer_auth(test.info.token.expose()).send().await.unwrap();
    assert_eq!(ended.status(), 204);
    assert!(!test.is_stubborn_running().await);
}

#[tokio::test]
async fn a_command_that_ignores_term_is_killed_with_its_daemons_when_its_client_disconnects() {
    let test = TestSandbox::start().await;
    let socket = test.exec_socket(ExecStart { kill_on_disconnect: true, ..stubborn() }).await;
    test.wait_until_up().await;
    assert!(test.is_stubborn_running().await);
    drop(socket);
    eventually("it to be gone", || async { (!test.is_stubborn_running().await).then_some(()) }).await;
}

#[tokio::test]
async fn background_processes_of_a_command_keep_running() {
    let test = TestSandbox::start().await;
    let left = sh(test.session.dataplane(), "setsid sleep 1003 > /dev/null 2>&1 & echo $!").await;
    let still = sh(test.session.dataplane(), &format!("kill -0 {} && echo there", left.stdout.trim())).await;
    assert_eq!(still.stdout, "there\n");
}

#[tokio::test]
async fn a_program_cannot_change_the_resource_limit_that_marks_its_command() {
    let test = TestSandbox::start().await;
    let tried =
        sh(test.session.dataplane(), "ulimit -x 7 2>&1; ulimit -x unlimited 2>&1; ulimit -x; bash -c 'ulimit -x 7; ulimit -x' 2>&1").await;
    assert!(!tried.stdout.lines().any(|line| line == "7" || line == "unlimited"), "{}", tried.stdout);
}

#[tokio::test]
async fn boxd_answers_during_a_fork_bomb_and_cancelling_ends_it() {
    let test = TestSandbox::start().await;
    let bomb =
        ExecStart { command: Some("f() { f | f & }; f; wait; sleep 1000".into()), command_id: Some("bomb".into()), ..Default::default() };
    let _socket = test.exec_socket(bomb).await;
    let http = reqwest::Client::new();
    let base = &test.info.sandbox.http_base_url;
    for _ in 0..10 {
        let list: serde_json::Value =
            http.get(format!("{base}/processes")).bearer_auth(test.info.token.expose()).send().await.unwrap().json().await.unwrap();
        assert_eq!(list["items"][0]["id"], "bomb");
    }
    let answer = http.delete(format!("{base}/processes/bomb")).bearer_auth(test.info.token.expose()).send().await.unwrap();
    assert_eq!(answer.status(), 204);
    eventually("there to be room for a command again", || async {
        let request = ExecRequest { command: Some("ls /proc | grep -c '^[0-9]'".into()), ..Default::default() };
        let done = test.session.dataplane().exec(&request).await.ok()?;
        (done.exit_code == 0 && done.stdout.trim().parse::<u32>().ok()? < 20).then_some(())
    })
    .await;
}

#[tokio::test]
async fn boxd_answers_in_bounded_memory_while_endless_output_is_not_read() {
    let test = TestSandbox::start().await;
    let start = ExecStart { command: Some("exec yes a line of some length that is printed for ever".into()), ..Default::default() };
    // One client that is connected without reading, and one that has disconnected.
    let _stuck = test.exec_socket(ExecStart { command_id: Some("stuck".into()), ..start.clone() }).await;
    drop(test.exec_socket(ExecStart { command_id: Some("alone".into()), ..start }).await);
    let pid = test.broker.sandbox_pids()[0].1;
    for _ in 0..50 {
        assert_eq!(sh(test.session.dataplane(), "echo here").await.stdout, "here\n");
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let kib: u64 = status.lines().find_map(|l| l.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.trim().parse().ok()).unwrap();
    assert!(kib < 64 * 1024, "boxd takes {kib} KiB");
}

#[tokio::test]
async fn the_standby_pool_returns_to_its_size_after_many_concurrent_commands() {
    let test = TestSandbox::start().await;
    let dataplane = test.session.dataplane();
    let boxd = test.broker.sandbox_pids()[0].1;
    // Init, the spawner, and the standby processes.
    let count = || std::fs::read_to_string(format!("/proc/{boxd}/task/{boxd}/children")).unwrap().split_whitespace().count();
    let is_settled = || async { (count() == 4).then_some(()) };
    for round in 0..3 {
        let all = futures_util::future::join_all((0..40).map(|_| sh(dataplane, "echo done"))).await;
        assert!(all.iter().all(|done| done.stdout == "done\n"), "round {round}: {all:?}");
        eventually("all but those who wait to be gone", is_settled).await;
    }
    assert_eq!(sh(dataplane, "echo again").await.stdout, "again\n");
}
