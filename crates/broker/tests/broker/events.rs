//! Tests of a session's event stream and of who receives which events.

use std::time::Duration;

use cobox_protocol::key::PrincipalKind;
use cobox_testkit::TestDatabase;
use http::Method;
use http_body_util::BodyExt;
use serde_json::{Value, json};

use crate::harness::{EventReader, World, eventually, sandbox_id, session_path};

fn exec(seq: u64, session: &Value, command: &str) -> Value {
    let what = json!({ "type": "exec", "command": command, "exit_code": 0, "duration_ms": 1 });
    json!({ "seq": seq, "at": "2030-01-01T00:00:00Z", "principal": "ann\u{1b}", "actor": "human", "session_id": session["session_id"], "what": what })
}

fn written(seq: u64, session: &Value, path: &str) -> Value {
    let what = json!({ "type": "file_written", "path": path, "size": 3 });
    json!({ "seq": seq, "at": "2020-01-01T00:00:00Z", "principal": "bot", "actor": "agent", "session_id": session["session_id"], "what": what })
}

#[tokio::test]
async fn the_events_of_a_session_come_in_order_and_end_with_it() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let session = ann.ensure("t").await;
    let id = sandbox_id(&session);
    let mut events = ann.watch(&session, "", &[]).await;
    let created = events.event().await;
    assert_eq!((&created["type"], &created["principal"], &created["actor"]), (&json!("created"), &json!("ann"), &json!("human")));
    assert_eq!((&created["session_id"], &created["sandbox_id"]), (&session["session_id"], &json!(id)));
    assert_eq!((&created["source"], &created["state"]), (&json!("broker"), &json!("provisioning")));
    assert!(created["at"].as_str().unwrap().ends_with('Z') && created["id"].as_str().unwrap().starts_with("evt_"));
    assert_eq!(events.event().await["type"], "active");

    world.clock.advance(901);
    broker.tick().await;
    assert_eq!(events.event().await["type"], "idle");
    ann.post(&format!("{}/heartbeat", session_path(&session)), json!({})).await.ok(200);
    assert_eq!(events.event().await["type"], "active");
    world.clock.advance(3601);
    broker.tick().await;
    let suspended = events.event().await;
    assert_eq!((&suspended["type"], &suspended["reason"]), (&json!("suspended"), &json!("its lease ran out")));
    ann.ensure("t").await;
    assert_eq!(events.event().await["type"], "resumed");
    ann.call(Method::PATCH, &format!("/v1/sandboxes/{id}"), Some(json!({ "name": "dev", "tags": { "a": "hidden" } })), &[]).await.ok(200);
    let changed = events.event().await;
    assert_eq!((&changed["type"], &changed["change"], &changed["principal"]), (&json!("changed"), &json!("name=dev +a"), &json!("ann")));
    ann.delete(&session_path(&session)).await.ok(204);
    let ended = events.event().await;
    assert_eq!((&ended["type"], &ended["reason"], &ended["principal"]), (&json!("terminated"), &json!("it was released"), &json!("ann")));
    assert!(events.next().await.is_none(), "no event follows the end");

    // A client that reconnects late gets the remaining events and then the end of the stream.
    let mut rest = ann.watch(&session, "", &[("last-event-id", suspended["id"].as_str().unwrap())]).await;
    assert_eq!(rest.until("terminated").await, ["resumed", "changed", "terminated"]);
    assert!(rest.next().await.is_none());
    let over = ann.begin_watch(&session, "", &[("last-event-id", ended["id"].as_str().unwrap())]).await;
    assert_eq!(over.status(), 410);
}

#[tokio::test]
async fn activity_of_a_sandbox_is_streamed_once_bounded_and_marked_as_untrusted() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, op) = (broker.human("ann").await, broker.key("op", PrincipalKind::Operator).await);
    let (session, other) = (ann.ensure("t").await, ann.ensure("u").await);
    let mut events = ann.watch(&session, "?after=now", &[]).await;
    let mut others = ann.watch(&other, "?after=now", &[]).await;
    let boxd = world.provider.boxd(&sandbox_id(&session));
    let mut forged = exec(6, &session, "x");
    forged["what"] = json!({ "type": "exec", "command": "y".repeat(100_000), "exit_code": 1, "duration_ms": 1 });
    let told = vec![
        exec(1, &session, "echo \"a\nevent: sandbox\ndata: {}\""),
        written(2, &session, "/workspace/a\u{0}b"),
        // Reported under another session's id: it is not shown anywhere.
        exec(5, &other, "not mine"),
        forged,
    ];
    boxd.activity_items.send_replace(told);
    let first = events.event().await;
    assert_eq!((&first["type"], &first["command"]), (&json!("exec"), &json!("echo \"a\nevent: sandbox\ndata: {}\"")));
    assert_eq!((&first["source"], &first["principal"], &first["exit_code"]), (&json!("sandbox"), &json!("ann\u{fffd}"), &json!(0)));
    let now = cobox_broker::Clock::now(&*world.clock);
    assert!(first["at"].as_str().unwrap() <= now.to_string().as_str(), "the event must not be in the future");
    assert_eq!(events.event().await["path"], "/workspace/a\u{0}b");
    let gap = events.event().await;
    assert_eq!((&gap["type"], &gap["lost"]), (&json!("gap"), &json!(2)));
    let long = events.event().await;
    assert_eq!((long["command"].as_str().unwrap().len(), &long["truncated"]), (1024, &json!(true)));

    // A repeated report creates no new event, even after the broker has lost its memory of it.
    broker.kill().await;
    let broker = world.start().await;
    let mut events = ann.at(&broker).watch(&session, "", &[("last-event-id", long["id"].as_str().unwrap())]).await;
    let more = [boxd.activity_items.borrow().clone(), vec![exec(7, &session, "next")]].concat();
    boxd.activity_items.send_replace(more);
    assert_eq!(events.event().await["command"], "next");
    // The last reported activity is collected before the sandbox ends.
    op.at(&broker).delete(&format!("/v1/sandboxes/{}", sandbox_id(&session))).await.ok(204);
    assert_eq!(events.until("terminated").await, ["terminated"]);
    drop(others.next());
    let mut all = ann.at(&broker).watch(&other, "", &[]).await;
    ann.at(&broker).delete(&session_path(&other)).await.ok(204);
    assert_eq!(all.until("terminated").await, ["created", "active", "terminated"]);
}

#[tokio::test]
async fn a_stream_from_now_resumes_at_its_start_even_before_the_first_event() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let session = ann.ensure("t").await;
    let mut body = ann.begin_watch(&session, "?after=now", &[]).await.into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    let text = std::str::from_utf8(&first).unwrap();
    let begins_at = text.lines().find_map(|line| line.strip_prefix("id: ")).expect("an id of the first position").to_owned();
    drop(body);
    let sandbox = format!("/v1/sandboxes/{}", sandbox_id(&session));
    ann.call(Method::PATCH, &sandbox, Some(json!({ "name": "dev" })), &[]).await.ok(200);
    let mut events = ann.watch(&session, "", &[("last-event-id", &begins_at)]).await;
    assert_eq!(events.event().await["change"], "name=dev");
}

#[tokio::test]
async fn a_connecting_participant_is_announced_once() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bot) = (broker.human("ann").await, broker.key("bot", PrincipalKind::Agent).await);
    let session = ann.ensure("t").await;
    let token = bot.ensure("t").await["token"].clone();
    let mut events = ann.watch(&session, "?after=now", &[]).await;
    let path = format!("/dp/{}/v1/x", sandbox_id(&session));
    for _ in 0..3 {
        bot.with(&token).get(&path).await;
    }
    let connected = events.event().await;
    assert_eq!((&connected["type"], &connected["principal"], &connected["actor"]), (&json!("connected"), &json!("bot"), &json!("agent")));
    ann.get(&path).await;
    let connected = events.event().await;
    assert_eq!((&connected["type"], &connected["principal"]), (&json!("connected"), &json!("ann")));
    world.clock.advance(301);
    ann.get(&path).await;
    assert_eq!(events.event().await["principal"], "ann", "after a while, use is recorded again");
}

#[tokio::test]
async fn clients_receive_only_permitted_events_of_their_own_session() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let eve = broker.stranger().await;
    let session = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "ensure", "access": "owner" })).await.ok(200);
    let refusal = async |client: &crate::harness::Client| client.begin_watch(&session, "", &[]).await.status().as_u16();
    assert_eq!((refusal(&eve).await, refusal(&bob).await), (404, 403));
    let other = bob.ensure("u").await;
    assert_eq!(refusal(&bob.with(&other["token"])).await, 401, "a token of another session");
    let unknown = ann.begin_watch(&json!({ "session_id": "ssn_00000000000000000000000000" }), "", &[]).await;
    assert_eq!(unknown.status(), 404);
    assert_eq!(ann.begin_watch(&session, "?after=7", &[]).await.status(), 400);

    let narrow = async |scopes: &[&str]| {
        let body = json!({ "thread_id": "t", "mode": "get", "scopes": scopes });
        ann.with(&ann.post("/v1/sandbox/sessions", body).await.ok(200)["token"]).watch(&session, "?after=now", &[]).await
    };
    let (mut files, mut commands, mut neither) = (narrow(&["fs:ro"]).await, narrow(&["shell:ro"]).await, narrow(&["fs_write"]).await);
    let mut all = ann.watch(&session, "?after=now", &[]).await;
    let boxd = world.provider.boxd(&sandbox_id(&session));
    boxd.activity_items.send_replace(vec![exec(1, &session, "make"), written(2, &session, "/a")]);
    assert_eq!((all.event().await["type"].clone(), all.event().await["type"].clone()), (json!("exec"), json!("file_written")));
    ann.delete(&session_path(&session)).await.ok(204);
    assert_eq!(files.until("terminated").await, ["file_written", "terminated"]);
    assert_eq!(commands.until("terminated").await, ["exec", "terminated"]);
    assert_eq!(neither.until("terminated").await, ["terminated"]);
}

/// The error code with which a stream ended.
async fn refused(mut events: EventReader) -> String {
    loop {
        let (name, data) = events.next().await.expect("an error event with the reason");
        if name == "error" {
            assert!(events.next().await.is_none());
            return data["error"]["code"].as_str().unwrap().to_owned();
        }
    }
}

#[tokio::test]
async fn a_stream_ends_with_the_credential_it_was_opened_with() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, op) = (broker.human("ann").await, broker.key("op", PrincipalKind::Operator).await);
    let session = ann.ensure("t").await;
    let (by_key, by_token) = (ann.watch(&session, "", &[]).await, ann.with(&session["token"]).watch(&session, "", &[]).await);
    let key = op.get("/v1/keys").await.ok(200)["items"].as_array().unwrap().iter().find(|k| k["name"] == "ann").unwrap()["id"].clone();
    let began = std::time::Instant::now();
    op.delete(&format!("/v1/keys/{}", key.as_str().unwrap())).await.ok(204);
    assert_eq!((refused(by_key).await, refused(by_token).await), ("UNAUTHENTICATED".into(), "TOKEN_REVOKED".into()));
    assert!(began.elapsed() < Duration::from_secs(15), "the end must not wait for the next heartbeat");

    let bob = broker.human("bob").await;
    let expiring = bob.ensure("t").await;
    let by_token = bob.with(&expiring["token"]).watch(&session, "", &[]).await;
    world.clock.advance(1000);
    assert_eq!(refused(by_token).await, "TOKEN_EXPIRED");
}

#[tokio::test]
async fn the_streams_of_one_session_are_limited() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let (session, other) = (ann.ensure("t").await, ann.ensure("u").await);
    let holder = ann.with(&session["token"]);
    let mut streams = Vec::new();
    for _ in 0..64 {
        streams.push(holder.watch(&session, "?after=now", &[]).await);
    }
    for by in [&holder, &bob] {
        assert_eq!(by.begin_watch(&session, "", &[]).await.status(), 429);
    }
    drop(ann.watch(&other, "", &[]).await);
    streams.pop();
    eventually("a place", || async { holder.begin_watch(&session, "", &[]).await.status() == 200 }).await;
}

#[tokio::test]
async fn resuming_too_late_reports_a_gap() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let (session, quiet) = (ann.ensure("t").await, ann.ensure("quiet").await);
    let mut events = ann.watch(&session, "", &[]).await;
    let first = events.event().await;
    events.until("active").await;
    let boxd = world.provider.boxd(&sandbox_id(&session));
    boxd.activity_items.send_replace((1..=20).map(|n| exec(n, &session, &n.to_string())).collect());
    let mut newest = Value::Null;
    for _ in 0..20 {
        newest = events.event().await;
    }
    let store = broker.broker.as_ref().unwrap().store().clone();
    store.trim_events("default", 5).await.unwrap();
    let back = async |id: &str| ann.watch(&session, "", &[("last-event-id", id)]).await;
    for mut late in [back(first["id"].as_str().unwrap()).await, ann.watch(&session, "", &[]).await] {
        let gap = late.event().await;
        assert_eq!(gap["type"], "gap");
        let next = late.event().await;
        assert_eq!(next["command"], "16");
        // A client that has received the gap event doesn't receive it again.
        assert_eq!(back(gap["id"].as_str().unwrap()).await.event().await["command"], "16");
    }
    boxd.activity_items.send_modify(|all| all.push(exec(21, &session, "21")));
    assert_eq!(back(newest["id"].as_str().unwrap()).await.event().await["command"], "21");
    // An id that never existed.
    let mut future = back("evt_0000000000zzzzzzzzzzzzzzzz").await;
    assert_eq!(future.event().await["type"], "gap");
    // A client that saw all events of the other session missed none of them, regardless of removals.
    let mut quiet_events = ann.watch(&quiet, "?after=now", &[]).await;
    ann.delete(&session_path(&quiet)).await.ok(204);
    assert_eq!(quiet_events.until("terminated").await, ["terminated"]);
    store.prune_events(cobox_broker::Clock::now(&*world.clock).plus(Duration::from_secs(1)), 100).await.unwrap();
    assert_eq!(back(newest["id"].as_str().unwrap()).await.event().await["type"], "gap");
}

#[tokio::test]
async fn a_gap_after_the_end_of_a_session_is_reported_once() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let join = async |thread: &str| {
        let body = json!({ "thread_id": thread, "mode": "ensure", "name": "shared" });
        ann.post("/v1/sandbox/sessions", body).await.ok(200)
    };
    let lasting = join("lasting").await;
    let began = cobox_broker::Clock::now(&*world.clock);
    world.clock.advance(100);
    let short = join("short").await;
    let id = sandbox_id(&short);
    assert_eq!(id, sandbox_id(&lasting));
    ann.delete(&session_path(&short)).await.ok(204);
    // Reported after the other session ended, but with a time long before: removed by age, while the session's own
    // events are kept.
    let mut events = ann.watch(&lasting, "?after=now", &[]).await;
    world.provider.boxd(&id).activity_items.send_replace(vec![written(1, &lasting, "/a")]);
    assert_eq!(events.event().await["type"], "file_written");
    ann.call(Method::PATCH, &format!("/v1/sandboxes/{id}"), Some(json!({ "tags": { "a": "b" } })), &[]).await.ok(200);
    assert_eq!(events.event().await["type"], "changed");
    let store = broker.broker.as_ref().unwrap().store().clone();
    store.prune_events(began.plus(Duration::from_secs(50)), 100).await.unwrap();
    let mut told = ann.watch(&short, "", &[]).await;
    assert_eq!(told.until("terminated").await, ["gap", "created", "terminated"]);
    assert!(told.next().await.is_none(), "no event follows the end");
}

#[tokio::test]
async fn events_of_one_broker_are_streamed_by_another() {
    let database = TestDatabase::new().await;
    let worlds = World::cluster(&database, 2);
    let (one, two) = (worlds[0].start().await, worlds[1].start().await);
    let ann = one.human("ann").await;
    let session = ann.ensure("t").await;
    let mut events = ann.at(&two).watch(&session, "", &[]).await;
    assert_eq!(events.until("active").await, ["created", "active"]);
    let boxd = worlds[0].provider.boxd(&sandbox_id(&session));
    for n in 1..=50 {
        boxd.activity_items.send_modify(|all| all.push(exec(n, &session, &n.to_string())));
        assert_eq!(events.event().await["command"], n.to_string());
    }
    ann.delete(&session_path(&session)).await.ok(204);
    assert_eq!(events.until("terminated").await, ["terminated"]);
    assert!(events.next().await.is_none());
}

#[tokio::test]
async fn a_sandbox_that_fails_to_start_ends_its_session_with_the_reason() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    world.provider.may_start.send_replace(false);
    let body = json!({ "thread_id": "t", "mode": "ensure" });
    let starting = ann.call(Method::POST, "/v1/sandbox/sessions", Some(body), &[("prefer", "wait=0")]).await;
    assert_eq!(starting.error(423), "SANDBOX_STARTING");
    let session = ann.get("/v1/sandbox/sessions").await.ok(200)["items"][0].clone();
    let mut events = ann.watch(&session, "", &[]).await;
    assert_eq!(events.event().await["type"], "created");
    world.provider.failing_starts.store(1, std::sync::atomic::Ordering::SeqCst);
    world.provider.may_start.send_replace(true);
    let failed = events.event().await;
    assert_eq!(failed["type"], "failed");
    assert!(failed["reason"].as_str().unwrap().contains("set to fail"), "{failed}");
    assert!(events.next().await.is_none());
}

#[tokio::test]
async fn sharing_a_session_is_an_event() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, _bob) = (broker.human("ann").await, broker.human("bob").await);
    let session = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "ensure", "access": "owner" })).await.ok(200);
    let mut events = ann.watch(&session, "?after=now", &[]).await;
    let share = format!("{}/share", session_path(&session));
    ann.post(&share, json!({ "principal": "bob", "capabilities": ["fs_read"] })).await;
    let shared = events.event().await;
    assert_eq!((&shared["type"], &shared["with"], &shared["principal"]), (&json!("shared"), &json!("bob"), &json!("ann")));
    assert_eq!(shared["capabilities"], json!(["fs_read"]));
    ann.delete(&format!("{share}/bob")).await.ok(204);
    let unshared = events.event().await;
    assert_eq!((&unshared["type"], &unshared["with"]), (&json!("unshared"), &json!("bob")));
}
