//! Events of a real sandbox reach clients that follow its session, also across lost connections.

use std::{io::BufRead, process::Stdio, time::Duration};

use cobox_client::{Client, EventStream, EventsFrom};
use cobox_protocol::{
    event::{EventKind, EventSource, SandboxEvent},
    key::PrincipalKind,
    session::Mode,
};
use cobox_testkit::{CutPolicy, CuttingProxy, EVENT_TIMEOUT, TestBroker, ensure, negotiate, sh};

async fn next(events: &mut EventStream) -> SandboxEvent {
    tokio::time::timeout(EVENT_TIMEOUT, events.next()).await.expect("something happens").expect("no error").expect("the stream continues")
}

async fn next_where(events: &mut EventStream, is_it: impl Fn(&EventKind) -> bool) -> SandboxEvent {
    loop {
        let event = next(events).await;
        if is_it(&event.kind) {
            return event;
        }
    }
}

#[tokio::test]
async fn a_human_receives_the_events_of_an_agent() {
    let broker = TestBroker::start().await;
    let ann = broker.client_of("ann", PrincipalKind::Human, None).await;
    let bot = broker.client_of("bot", PrincipalKind::Agent, None).await;
    let session = ensure(&ann, "t").await;
    let mut events = ann.events(&session.info().session_id, EventsFrom::Start);
    assert!(matches!(next(&mut events).await.kind, EventKind::Created { .. }));
    assert_eq!(next(&mut events).await.kind, EventKind::Active);

    let agent = bot.open(&negotiate("t", Mode::Ensure)).await.unwrap();
    sh(agent.dataplane(), "echo made > made.txt; exit 7").await;
    let connected = next(&mut events).await;
    assert_eq!((connected.kind, connected.principal.as_deref()), (EventKind::Connected, Some("bot")));
    let ran = next(&mut events).await;
    assert_eq!((ran.source, ran.principal.as_deref(), ran.actor.as_deref()), (EventSource::Sandbox, Some("bot"), Some("agent")));
    let EventKind::Exec(end) = ran.kind else { panic!("{ran:?}") };
    assert_eq!((end.command.as_str(), end.exit_code), ("echo made > made.txt; exit 7", Some(7)));
    agent.dataplane().write_file(b"/workspace/main.py", None, cobox_client::Upload::from_bytes("print(1)")).await.unwrap();
    let written = next(&mut events).await;
    let EventKind::FileWritten(file) = written.kind else { panic!("{written:?}") };
    assert_eq!((file.path.as_str(), file.size), ("/workspace/main.py", Some(8)));

    // The command line reports the same events, and ends with the session.
    let mut follow = broker.cobox().args(["--json", "session", "events", "t"]).stdout(Stdio::piped()).spawn().unwrap();
    let lines = std::io::BufReader::new(follow.stdout.take().unwrap()).lines();
    let (has_begun, begins) = tokio::sync::oneshot::channel();
    let types = tokio::task::spawn_blocking(move || {
        let mut types = lines.map(|l| serde_json::from_str::<serde_json::Value>(&l.unwrap()).unwrap()["type"].as_str().unwrap().to_owned());
        let first = types.next();
        has_begun.send(()).unwrap();
        first.into_iter().chain(types).collect::<Vec<_>>()
    });
    // Released only after the follower has started: afterwards the thread has no session to find.
    tokio::time::timeout(EVENT_TIMEOUT, begins).await.unwrap().unwrap();
    ann.release(&session.info().session_id).await.unwrap();
    let types = tokio::time::timeout(EVENT_TIMEOUT, types).await.unwrap().unwrap();
    assert_eq!(types.first().map(String::as_str), Some("created"));
    assert_eq!(types.last().map(String::as_str), Some("terminated"));
    assert!(follow.wait().unwrap().success());
    assert!(matches!(next_where(&mut events, EventKind::is_last).await.kind, EventKind::Terminated { .. }));
    assert!(events.next().await.unwrap().is_none());
}

#[tokio::test]
async fn every_event_arrives_once_over_lost_connections() {
    const COMMANDS: usize = 40;
    let broker = TestBroker::start().await;
    let proxy =
        CuttingProxy::in_front_of(broker.url(), CutPolicy { count: 20, within_bytes: 4096, within: Duration::from_millis(400) }, 7).await;
    let session = ensure(&broker.client(), "t").await;
    let watcher = Client::new(&proxy.url(), broker.key().clone()).unwrap();
    let mut events = watcher.events(&session.info().session_id, EventsFrom::Start);
    let mut commands = Vec::new();
    while commands.len() < COMMANDS {
        // In pairs, so that some happen without a connection and others with one.
        for n in commands.len()..commands.len() + 2 {
            sh(session.dataplane(), &format!("echo {n}")).await;
        }
        for _ in 0..2 {
            match next_where(&mut events, |w| matches!(w, EventKind::Exec(_) | EventKind::Gap { .. })).await.kind {
                EventKind::Exec(end) => commands.push(end.command),
                other => panic!("something was lost: {other:?}"),
            }
        }
    }
    assert_eq!(commands, (0..COMMANDS).map(|n| format!("echo {n}")).collect::<Vec<_>>());
    assert!(proxy.cuts() > 0, "nothing was cut");
}

/// The output lines of a running command.
struct CommandOutput {
    child: std::process::Child,
    lines: tokio::sync::mpsc::Receiver<String>,
}

impl CommandOutput {
    fn start(mut command: std::process::Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = tokio::sync::mpsc::channel(1000);
        for stream in [Box::new(child.stdout.take().unwrap()) as Box<dyn std::io::Read + Send>, Box::new(child.stderr.take().unwrap())] {
            let sender = sender.clone();
            std::thread::spawn(move || {
                for line in std::io::BufReader::new(stream).lines().map_while(Result::ok) {
                    let _ = sender.blocking_send(line);
                }
            });
        }
        Self { child, lines }
    }

    async fn wait_for(&mut self, text: &str) -> String {
        loop {
            let line =
                tokio::time::timeout(EVENT_TIMEOUT, self.lines.recv()).await.unwrap_or_else(|_| panic!("waited in vain for `{text}`"));
            let line = line.unwrap_or_else(|| panic!("it ended without printing `{text}`"));
            if line.contains(text) {
                return line;
            }
        }
    }
}

impl Drop for CommandOutput {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn watch_describes_every_session_of_a_thread() {
    let broker = TestBroker::start().await;
    let mut command = broker.cobox();
    command.args(["watch", "t"]);
    let mut watch = CommandOutput::start(command);
    watch.wait_for("thread t has no session; waiting for one").await;

    let bot = broker.client_of("bot", PrincipalKind::Agent, None).await;
    let session = bot.open(&negotiate("t", Mode::Ensure)).await.unwrap();
    watch.wait_for("bot (agent) created the session").await;
    sh(session.dataplane(), "exit 7").await;
    watch.wait_for("bot (agent) ran exit 7 → exit 7").await;
    session.dataplane().write_file(b"/workspace/\x1b[2Ja", None, cobox_client::Upload::from_bytes("12345678")).await.unwrap();
    watch.wait_for("bot (agent) wrote /workspace/\\u{1b}[2Ja (8 bytes)").await;
    let first = session.info().session_id.clone();
    drop(session);
    bot.release(&first).await.unwrap();
    watch.wait_for("the session ended").await;

    let session = bot.open(&negotiate("t", Mode::Ensure)).await.unwrap();
    watch.wait_for("bot (agent) created the session").await;
    drop(session);
    drop(watch);

    // A client that starts later gets new events, the whole history, or everything after a given event.
    let mut command = broker.cobox();
    command.args(["--json", "watch", "t", "--history"]);
    let mut watch = CommandOutput::start(command);
    let made: serde_json::Value = serde_json::from_str(&watch.wait_for("\"created\"").await).unwrap();
    let mut command = broker.cobox();
    command.args(["--json", "watch", "t", "--after", made["id"].as_str().unwrap()]);
    let mut after = CommandOutput::start(command);
    let next: serde_json::Value = serde_json::from_str(&after.wait_for("\"type\"").await).unwrap();
    assert_eq!(next["type"], "active");
}
