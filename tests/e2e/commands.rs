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

struct Cell {
    broker: TestBroker,
    session: cobox_client::Session,
    info: NegotiateResponse,
}

impl Cell {
    async fn start() -> Self {
        let broker = TestBroker::start().await;
        let client = broker.client();
        let session = client.open(&negotiate("commands", Mode::Ensure)).await.unwrap();
        let info = client.negotiate(&negotiate("commands", Mode::Ensure)).await.unwrap();
        Self { broker, session, info }
    }

    /// Whether the program, its child or its daemon is running.
    async fn is_stubborn_there(&self) -> bool {
        let found = sh(self.session.dataplane(), "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 100[12]'").await;
        found.stdout.trim() != "0"
    }

    async fn is_up(&self) {
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
async fn a_stubborn_command_is_gone_with_its_daemons_after_its_time() {
    let cell = Cell::start().await;
    let request = ExecRequest { command: Some(STUBBORN.into()), timeout_seconds: Some(2.0), ..Default::default() };
    let (done, ()) = tokio::join!(cell.session.dataplane().exec(&request), cell.is_up());
    assert!(done.unwrap().timed_out);
    assert!(!cell.is_stubborn_there().await);
}

#[tokio::test]
async fn a_stubborn_command_is_gone_with_its_daemons_when_it_is_cancelled() {
    let cell = Cell::start().await;
    let _socket = cell.exec_socket(stubborn()).await;
    cell.is_up().await;
    let url = format!("{}/processes/stubborn", cell.info.sandbox.http_base_url);
    let answer = reqwest::Client::new().delete(url).bearer_auth(cell.info.token.expose()).send().await.unwrap();
    assert_eq!(answer.status(), 204);
    assert!(!cell.is_stubborn_there().await);
}

#[tokio::test]
async fn a_shell_that_was_ended_is_gone_with_its_daemons_when_the_answer_comes() {
    let cell = Cell::start().await;
    let (http, shells) = (reqwest::Client::new(), format!("{}/shells", cell.info.sandbox.http_base_url));
    let body = serde_json::json!({"name": "main", "command": STUBBORN});
    let made = http.post(&shells).bearer_auth(cell.info.token.expose()).json(&body).send().await.unwrap();
    assert_eq!(made.status(), 201);
    cell.is_up().await;
    assert!(cell.is_stubborn_there().await);
    let ended = http.delete(format!("{shells}/main")).bearer_auth(cell.info.token.expose()).send().await.unwrap();
    assert_eq!(ended.status(), 204);
    assert!(!cell.is_stubborn_there().await);
}

#[tokio::test]
async fn a_stubborn_command_is_gone_with_its_daemons_when_its_client_is() {
    let cell = Cell::start().await;
    let socket = cell.exec_socket(ExecStart { kill_on_disconnect: true, ..stubborn() }).await;
    cell.is_up().await;
    assert!(cell.is_stubborn_there().await);
    drop(socket);
    eventually("it to be gone", || async { (!cell.is_stubborn_there().await).then_some(()) }).await;
}

#[tokio::test]
async fn what_a_command_leaves_in_the_background_goes_on() {
    let cell = Cell::start().await;
    let left = sh(cell.session.dataplane(), "setsid sleep 1003 > /dev/null 2>&1 & echo $!").await;
    let still = sh(cell.session.dataplane(), &format!("kill -0 {} && echo there", left.stdout.trim())).await;
    assert_eq!(still.stdout, "there\n");
}

#[tokio::test]
async fn a_mark_can_be_neither_changed_nor_lost_by_those_who_have_it() {
    let cell = Cell::start().await;
    let tried =
        sh(cell.session.dataplane(), "ulimit -x 7 2>&1; ulimit -x unlimited 2>&1; ulimit -x; bash -c 'ulimit -x 7; ulimit -x' 2>&1").await;
    assert!(!tried.stdout.lines().any(|line| line == "7" || line == "unlimited"), "{}", tried.stdout);
}

#[tokio::test]
async fn during_a_fork_bomb_boxd_answers_and_cancelling_ends_it() {
    let cell = Cell::start().await;
    let bomb =
        ExecStart { command: Some("f() { f | f & }; f; wait; sleep 1000".into()), command_id: Some("bomb".into()), ..Default::default() };
    let _socket = cell.exec_socket(bomb).await;
    let http = reqwest::Client::new();
    let base = &cell.info.sandbox.http_base_url;
    for _ in 0..10 {
        let list: serde_json::Value =
            http.get(format!("{base}/processes")).bearer_auth(cell.info.token.expose()).send().await.unwrap().json().await.unwrap();
        assert_eq!(list["items"][0]["id"], "bomb");
    }
    let answer = http.delete(format!("{base}/processes/bomb")).bearer_auth(cell.info.token.expose()).send().await.unwrap();
    assert_eq!(answer.status(), 204);
    eventually("there to be room for a command again", || async {
        let request = ExecRequest { command: Some("ls /proc | grep -c '^[0-9]'".into()), ..Default::default() };
        let done = cell.session.dataplane().exec(&request).await.ok()?;
        (done.exit_code == 0 && done.stdout.trim().parse::<u32>().ok()? < 20).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_print_loop_that_nobody_reads_leaves_boxd_answering_in_bounded_memory() {
    let cell = Cell::start().await;
    let start = ExecStart { command: Some("exec yes a line of some length that is printed for ever".into()), ..Default::default() };
    // One client that is connected without reading, and one that has disconnected.
    let _stuck = cell.exec_socket(ExecStart { command_id: Some("stuck".into()), ..start.clone() }).await;
    drop(cell.exec_socket(ExecStart { command_id: Some("alone".into()), ..start }).await);
    let pid = cell.broker.sandbox_pids()[0].1;
    for _ in 0..50 {
        assert_eq!(sh(cell.session.dataplane(), "echo here").await.stdout, "here\n");
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let kib: u64 = status.lines().find_map(|l| l.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.trim().parse().ok()).unwrap();
    assert!(kib < 64 * 1024, "boxd takes {kib} KiB");
}

#[tokio::test]
async fn after_many_commands_at_once_no_more_processes_wait_than_before() {
    let cell = Cell::start().await;
    let dataplane = cell.session.dataplane();
    let boxd = cell.broker.sandbox_pids()[0].1;
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
