//! Tests of commands as event streams, and of the process list.

mod support;

use cobox_protocol::process::{ProcessKind, ProcessList, ProcessState};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use support::{
    SOON, TestBoxd,
    exec_client::{ExecClient, command, named},
};

struct Events {
    body: hyper::body::Incoming,
    text: String,
}

#[derive(Debug)]
struct Event {
    name: String,
    id: String,
    data: Value,
}

impl Events {
    async fn open(boxd: &TestBoxd, body: Value, last: Option<&str>) -> Self {
        let mut call = boxd.post("/v1/exec", body.to_string()).header("accept", "text/event-stream");
        if let Some(last) = last {
            call = call.header("last-event-id", last);
        }
        let response = call.open().await;
        assert_eq!((response.status().as_u16(), response.headers()["content-type"].to_str().unwrap()), (200, "text/event-stream"));
        Self { body: response.into_body(), text: String::new() }
    }

    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| event.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(": ")).map(str::to_owned);
                let event = field("event").map(|name| Event {
                    name,
                    id: field("id").unwrap(),
                    data: serde_json::from_str(&field("data").unwrap()).unwrap(),
                });
                self.text = rest.to_owned();
                match event {
                    Some(event) => return Some(event),
                    None => continue,
                }
            }
            let frame = tokio::time::timeout(SOON, self.body.frame()).await.expect("an event arrives in time")?.unwrap();
            self.text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
        }
    }
}

#[tokio::test]
async fn output_beyond_the_requested_limit_is_reported_as_a_gap() {
    let boxd = TestBoxd::start();
    let request = json!({"command": "seq 1 100000; echo err >&2", "command_id": "cut", "max_output_bytes": 7});
    let all = (1..=100_000).map(|n: u32| n.to_string().len() as u64 + 1).sum::<u64>();
    for from in [0, 4, 1000] {
        let mut events = Events::open(&boxd, request.clone(), Some(&format!("{from}-0"))).await;
        let (mut stdout, mut stderr, mut gaps) = (String::new(), String::new(), vec![]);
        let exit = loop {
            let event = events.next().await.unwrap();
            match event.name.as_str() {
                "stdout" => stdout += event.data["data"].as_str().unwrap(),
                "stderr" => stderr += event.data["data"].as_str().unwrap(),
                "gap" => {
                    gaps.push((event.data["stream"].clone(), event.data["from"].as_u64().unwrap(), event.data["to"].as_u64().unwrap()))
                }
                "exit" => break event,
                _ => {}
            }
        };
        assert_eq!(exit.data["exit_code"], 0);
        assert_eq!((stdout.as_str(), stderr.as_str()), ("1\n2\n3\n4".get(from..7).unwrap_or_default(), "err\n"));
        assert_eq!(gaps, [(json!("stdout"), 7.max(from as u64), all)]);
    }
}

#[tokio::test]
async fn a_command_is_streamed_as_events_and_resumed_after_the_last_event() {
    let boxd = TestBoxd::start();
    let request = json!({"command": "seq 1 100000; echo err >&2", "command_id": "sse"});
    let mut events = Events::open(&boxd, request.clone(), None).await;
    let ready = events.next().await.unwrap();
    assert_eq!(
        (ready.name.as_str(), ready.data["command_id"].as_str(), ready.data["type"].as_str()),
        ("ready", Some("sse"), Some("ready"))
    );
    let first = events.next().await.unwrap();
    assert_eq!((first.name.as_str(), first.data["offset"].as_u64()), ("stdout", Some(0)));
    let mut stdout = first.data["data"].as_str().unwrap().to_owned();
    assert_eq!(first.id, format!("{}-0", stdout.len()));
    drop(events);
    let mut events = Events::open(&boxd, request.clone(), Some(&first.id)).await;
    let (mut stderr, mut last) = (String::new(), None);
    while let Some(event) = events.next().await {
        match event.name.as_str() {
            "ready" => assert_eq!(event.data["stdout_offset"].as_u64(), Some(stdout.len() as u64)),
            "stdout" => {
                assert_eq!(event.data["offset"].as_u64(), Some(stdout.len() as u64));
                stdout.push_str(event.data["data"].as_str().unwrap());
            }
            "stderr" => stderr.push_str(event.data["data"].as_str().unwrap()),
            _ => last = Some(event),
        }
    }
    let last = last.unwrap();
    assert_eq!((last.name.as_str(), last.data["exit_code"].as_i64(), last.id), ("exit", Some(0), format!("{}-4", stdout.len())));
    assert_eq!(stdout, (1..=100_000).map(|i| format!("{i}\n")).collect::<String>());
    assert_eq!(stderr, "err\n");
    // Resuming by offsets in the request works equally. A client that has everything only gets the exit.
    let request = json!({"command_id": "sse", "stdout_from": stdout.len(), "stderr_from": 4});
    let mut events = Events::open(&boxd, request, None).await;
    assert_eq!(events.next().await.unwrap().name, "ready");
    assert_eq!(events.next().await.unwrap().name, "exit");
    assert!(events.next().await.is_none());
    let odd = boxd.post("/v1/exec", json!({"command_id": "sse"}).to_string()).header("accept", "text/event-stream");
    odd.header("last-event-id", "x").send().await.refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn a_client_that_accepts_events_and_json_gets_the_whole_answer() {
    let boxd = TestBoxd::start();
    let call = boxd.post("/v1/exec", json!({"command": "echo hi"}).to_string()).header("accept", "application/json, text/event-stream");
    assert_eq!(call.send().await.ok(200).json::<Value>()["stdout"], "hi\n");
}

#[tokio::test]
async fn a_repeated_request_with_a_command_id_returns_the_same_answer_and_runs_once() {
    let boxd = TestBoxd::start();
    let request = json!({"command": "echo run >> runs; echo out; echo err >&2; exit 4", "command_id": "same"}).to_string();
    for _ in 0..3 {
        let done: Value = boxd.post("/v1/exec", request.clone()).send().await.ok(200).json();
        assert_eq!((done["stdout"].as_str(), done["stderr"].as_str(), done["exit_code"].as_i64()), (Some("out\n"), Some("err\n"), Some(4)));
    }
    assert_eq!(std::fs::read_to_string(boxd.host("/workspace/runs")).unwrap(), "run\n");
}

async fn processes(boxd: &TestBoxd) -> ProcessList {
    boxd.get("/v1/processes").send().await.ok(200).json()
}

#[tokio::test]
async fn commands_are_listed_with_their_principal_and_exit() {
    let boxd = TestBoxd::start();
    assert!(processes(&boxd).await.items.is_empty());
    let mut client = ExecClient::start(&boxd, named("listed", command("echo on; sleep 1000"))).await;
    client.read_until("on").await;
    let listed = processes(&boxd).await.items.remove(0);
    assert_eq!((listed.id.as_str(), listed.kind, listed.state), ("listed", ProcessKind::Command, ProcessState::Running));
    assert_eq!((listed.pid, listed.principal.as_str()), (Some(client.ready.pid), "ada"));
    assert_eq!(listed.argv, ["/bin/sh", "-c", "echo on; sleep 1000"]);
    boxd.post("/v1/processes/listed/signal", json!({"signal": "TERM"}).to_string()).send().await.ok(204);
    assert_eq!(client.exit().await.1, Some(15));
    let ended = processes(&boxd).await.items.remove(0);
    assert_eq!((ended.state, ended.exit_code, ended.signal), (ProcessState::Ended, Some(143), Some(15)));
    boxd.post("/v1/processes/none/signal", json!({"signal": 9}).to_string()).send().await.refused(404, "COMMAND_NOT_FOUND");
    boxd.post("/v1/processes/listed/signal", json!({"signal": "BAD"}).to_string()).send().await.refused(400, "INVALID_REQUEST");
    boxd.get("/v1/processes").token(&boxd.token("fs_read")).send().await.refused(403, "CAPABILITY_DENIED");
}

#[tokio::test]
async fn a_command_that_runs_in_a_request_is_listed_and_can_be_cancelled() {
    let boxd = TestBoxd::start();
    let waiting = boxd.post("/v1/exec", json!({"command": "touch begun; sleep 1000"}).to_string()).send();
    let cancel = async {
        support::wait_for(|| boxd.host("/workspace/begun").exists()).await;
        let id = processes(&boxd).await.items.remove(0).id;
        boxd.delete(&format!("/v1/processes/{id}")).send().await.ok(204);
    };
    let (answer, ()) = tokio::join!(waiting, cancel);
    assert_eq!(answer.ok(200).json::<Value>()["signal"], 15);
    assert!(processes(&boxd).await.items.is_empty(), "no client can resume it");
}

#[tokio::test]
async fn a_cancelled_command_that_ignores_term_is_killed_with_its_process_tree() {
    let boxd = TestBoxd::start();
    let mut client = ExecClient::start(&boxd, named("stubborn", command(support::DAEMONS))).await;
    let pids = support::daemons(&boxd).await;
    boxd.delete("/v1/processes/stubborn").send().await.ok(204);
    assert!(!pids.iter().any(|pid| support::is_running(pid)));
    assert_eq!(client.exit().await.1, Some(9));
    // Descendants of a command that ended by itself continue until they are cancelled too.
    let mut client = ExecClient::start(&boxd, named("left", command("setsid sleep 1000 > /dev/null 2>&1 & echo $!"))).await;
    assert_eq!(client.exit().await.0, 0);
    let pid = String::from_utf8(client.stdout.clone()).unwrap();
    assert!(support::is_running(&pid));
    boxd.delete("/v1/processes/left").send().await.ok(204);
    assert!(!support::is_running(&pid));
}
