//! Tests of a LangGraph deployment as the authority over threads. A small server replaces it and answers `GET
//! /threads/{id}` as observed from `langgraph-api`; `make soak` uses the real one.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU16, AtomicUsize, Ordering},
    },
};

use axum::{
    Json, Router,
    extract::{Path, State},
    response::{IntoResponse, Response},
    routing::get,
};
use cobox_protocol::key::PrincipalKind;
use http::{HeaderMap, Method, StatusCode};
use serde_json::json;

use crate::harness::{Answer, Client, World, sandbox_id, session_path};

const SESSIONS: &str = "/v1/sandbox/sessions";

/// The owners of threads, by the credential they send.
#[derive(Default)]
struct FakeAuthority {
    seen_by: Mutex<HashMap<String, String>>,
    request_count: AtomicUsize,
    /// If not 0, the status of every response.
    failing: AtomicU16,
    headers: Mutex<HeaderMap>,
}

async fn thread(State(d): State<Arc<FakeAuthority>>, Path(thread): Path<String>, headers: HeaderMap) -> Response {
    d.request_count.fetch_add(1, Ordering::SeqCst);
    *d.headers.lock().unwrap() = headers.clone();
    if let Ok(status) = StatusCode::from_u16(d.failing.load(Ordering::SeqCst)) {
        return (status, Json(json!({ "thread_id": thread }))).into_response();
    }
    let user = ["authorization", "x-user"].iter().find_map(|h| headers.get(*h)).and_then(|v| v.to_str().ok());
    let Some(user) = user else { return (StatusCode::UNAUTHORIZED, Json(json!({ "detail": "no" }))).into_response() };
    // LangGraph answers 404 for another user's thread.
    match d.seen_by.lock().unwrap().get(&thread) {
        Some(owner) if owner == user => Json(json!({ "thread_id": thread, "status": "idle", "values": {} })).into_response(),
        Some(_) if user == "Bearer outsider" => StatusCode::FORBIDDEN.into_response(),
        _ => (StatusCode::NOT_FOUND, Json(json!({ "detail": "Thread not found" }))).into_response(),
    }
}

async fn start() -> (Arc<FakeAuthority>, String) {
    let authority = Arc::new(FakeAuthority::default());
    let router = Router::new().route("/threads/{thread}", get(thread)).fallback(|| async { "welcome" }).with_state(authority.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (authority, url)
}

fn world_with_authority(url: &str, more: &str) -> World {
    let mut world = World::new();
    world.config.thread_authority = Some(toml::from_str(&format!("url = {url:?}\n{more}")).unwrap());
    world
}

async fn ask(principal: &Client, thread: &str, mode: &str, credential: Option<&str>) -> Answer {
    let headers: Vec<(&str, &str)> = credential.map(|c| ("x-thread-authorization", c)).into_iter().collect();
    principal.call(Method::POST, SESSIONS, Some(json!({ "thread_id": thread, "mode": mode })), &headers).await
}

#[tokio::test]
async fn only_callers_who_may_see_a_thread_bind_a_sandbox_to_it() {
    let (authority, url) = start().await;
    authority.seen_by.lock().unwrap().insert("t".into(), "Bearer ann".into());
    let world = world_with_authority(&url, "");
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);

    assert_eq!(
        ask(&bob, "t", "ensure", Some("Bearer bob")).await.error(404),
        "SESSION_NOT_FOUND",
        "the same error as the thread authority's for a foreign thread"
    );
    assert_eq!(ask(&bob, "t", "ensure", Some("Bearer outsider")).await.error(403), "FORBIDDEN");
    let silent = ask(&bob, "t", "ensure", None).await;
    assert!(silent.json()["error"]["message"].as_str().unwrap().contains("x-thread-authorization"));
    assert_eq!(silent.error(403), "FORBIDDEN");
    assert_eq!(ask(&ann, "other", "ensure", Some("Bearer ann")).await.error(404), "SESSION_NOT_FOUND");
    for step in ["..", "."] {
        assert_eq!(ask(&ann, step, "ensure", Some("Bearer ann")).await.error(404), "SESSION_NOT_FOUND");
    }
    assert_eq!(world.provider.starts.load(Ordering::SeqCst), 0, "a denied request creates nothing");

    let made = ask(&ann, "t", "ensure", Some("Bearer ann")).await.ok(200);
    let request_count = authority.headers.lock().unwrap().clone();
    assert_eq!(request_count["authorization"], "Bearer ann");
    assert!(!format!("{request_count:?}").contains("cbx_"), "the broker's key is not forwarded");
    for mode in ["get", "ensure", "create_only"] {
        assert_eq!(
            ask(&bob, "t", mode, Some("Bearer bob")).await.error(404),
            "SESSION_NOT_FOUND",
            "an existing session can't be joined: {mode}"
        );
    }
    // Every other route to a token of that thread.
    let path = session_path(&made);
    assert_eq!(bob.get(&path).await.error(403), "FORBIDDEN");
    assert_eq!(bob.post(&format!("{path}/refresh"), json!({})).await.error(403), "FORBIDDEN");
    let hint = json!({ "scope": { "type": "assistant", "id": "b" }, "mode": "ensure", "sandbox_hint": sandbox_id(&made) });
    assert_eq!(bob.post(SESSIONS, hint).await.error(403), "FORBIDDEN", "the sandbox itself is refused too");
    let delegate = json!({ "capabilities": ["exec"] });
    assert_eq!(bob.post(&format!("{path}/delegate"), delegate).await.error(403), "FORBIDDEN");
    assert_eq!(bob.get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.error(403), "FORBIDDEN");
    assert_eq!(bob.get("/threads/t/sandbox").await.error(403), "FORBIDDEN");
    assert_eq!(bob.get(&format!("{path}/events")).await.error(403), "FORBIDDEN");
    assert_eq!(bob.get("/capabilities?thread_id=t").await.error(403), "FORBIDDEN");
    let with = [("x-thread-authorization", "Bearer ann")];
    ann.call(Method::POST, &format!("{path}/refresh"), None, &with).await.ok(200);
    ann.with(&made["token"]).get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.ok(200);
    // The deployment doesn't control scopes other than threads.
    let body = json!({ "scope": { "type": "assistant", "id": "a" }, "mode": "ensure" });
    bob.post(SESSIONS, body).await.ok(200);
    assert_eq!(ann.delete(&path).await.status, 204, "its owner may always release it");
}

#[tokio::test]
async fn files_of_a_thread_are_visible_to_the_owner_and_to_callers_who_may_see_the_thread() {
    let (authority, url) = start().await;
    authority.seen_by.lock().unwrap().insert("t".into(), "Bearer ann".into());
    authority.seen_by.lock().unwrap().insert("b".into(), "Bearer bob".into());
    let mut world = world_with_authority(&url, "");
    let policy = world.config.data_dir.with_file_name("policy.toml");
    std::fs::write(&policy, "[human]\ncapabilities = [\"fs_read\", \"fs_write\", \"exec\", \"snapshot\"]\n").unwrap();
    world.config.policy_file = Some(policy);
    let broker = world.start().await;
    let (ann, bob, op) = (broker.human("ann").await, broker.human("bob").await, broker.key("op", PrincipalKind::Operator).await);
    let with = |principal: &'static str| [("x-thread-authorization", principal)];
    let params = json!({ "thread_id": "t", "mode": "ensure", "name": "desk" });
    let made = ann.call(Method::POST, SESSIONS, Some(params), &with("Bearer ann")).await.ok(200);
    let id = sandbox_id(&made);
    let (files, snapshots) = (format!("/dp/{id}/v1/x"), format!("/v1/sandboxes/{id}/snapshots"));
    let delegated = (format!("/sandbox/{id}/delegate"), json!({ "capabilities": ["exec"] }));
    let delegate =
        async |principal: &Client, with: &[(&str, &str)]| principal.call(Method::POST, &delegated.0, Some(delegated.1.clone()), with).await;
    let attach = async |principal: &Client, scope: serde_json::Value, credential: &'static str| {
        let params = json!({ "scope": scope, "mode": "ensure", "sandbox_hint": "desk" });
        principal.call(Method::POST, SESSIONS, Some(params), &with(credential)).await
    };
    let (own, assistant) = (json!({ "type": "thread", "id": "b" }), json!({ "type": "assistant", "id": "b" }));
    let refused_bob = async || {
        assert_eq!(bob.get(&files).await.error(403), "FORBIDDEN");
        assert_eq!(delegate(&bob, &with("Bearer bob")).await.error(404), "SESSION_NOT_FOUND");
        assert_eq!(attach(&bob, own.clone(), "Bearer bob").await.error(404), "BINDING_NOT_FOUND");
        assert_eq!(attach(&bob, assistant.clone(), "Bearer bob").await.error(404), "BINDING_NOT_FOUND");
        assert_eq!(op.get(&files).await.error(403), "FORBIDDEN", "an operator needs the authority's permission too");
        let take =
            async |principal: &Client| principal.call(Method::POST, &snapshots, Some(json!({ "name": "s" })), &with("Bearer bob")).await;
        assert_eq!(take(&bob).await.error(404), "SESSION_NOT_FOUND", "a snapshot contains the thread's files");
        assert_eq!(take(&op).await.error(404), "SESSION_NOT_FOUND");
    };
    refused_bob().await;
    let take = async |credential| ann.call(Method::POST, &snapshots, Some(json!({ "name": "s" })), &with(credential)).await.ok(202);
    assert_eq!(take("Bearer ann").await["access"], "owner", "the authority can't be asked about a snapshot later");
    assert_eq!(ann.delete(&session_path(&made)).await.status, 204);
    refused_bob().await;
    assert_eq!(take("Bearer ann").await["access"], "owner");
    // Nor after the session has been forgotten, which the sandbox outlives.
    for _ in 0..32 {
        world.clock.advance(24 * 3600);
        ann.get(&files).await.ok(200);
        broker.tick().await;
    }
    refused_bob().await;
    authority.failing.store(500, Ordering::SeqCst);
    assert_eq!(delegate(&bob, &with("Bearer bob")).await.error(503), "PROVIDER_UNAVAILABLE");
    authority.failing.store(0, Ordering::SeqCst);

    // Callers that may see the thread are admitted, and so is the creator of the sandbox, because the thread may be
    // gone by now.
    delegate(&bob, &with("Bearer ann")).await.ok(200);
    authority.seen_by.lock().unwrap().remove("t");
    ann.get(&files).await.ok(200);
    delegate(&ann, &[]).await.ok(200);
    authority.seen_by.lock().unwrap().insert("a".into(), "Bearer ann".into());
    attach(&ann, json!({ "type": "thread", "id": "a" }), "Bearer ann").await.ok(200);
    // Access to a sandbox that no thread ever used is decided by the broker alone.
    let plain = ann.post("/v1/sandboxes", json!({ "name": "plain" })).await.ok(201);
    bob.get(&format!("/dp/{}/v1/x", plain["id"].as_str().unwrap())).await.ok(200);
    assert_eq!(ann.post("/v1/sandboxes/plain/snapshots", json!({ "name": "p" })).await.ok(202)["access"], "workspace");
}

#[tokio::test]
async fn without_a_response_of_the_authority_access_is_refused() {
    let (authority, url) = start().await;
    authority.seen_by.lock().unwrap().insert("t".into(), "Bearer ann".into());
    let world = world_with_authority(&url, "");
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    for status in [500, 502, 429, 302, 204] {
        authority.failing.store(status, Ordering::SeqCst);
        let answer = ask(&ann, "t", "ensure", Some("Bearer ann")).await;
        assert_eq!(answer.json()["error"]["retryable"], true);
        assert_eq!(answer.error(503), "PROVIDER_UNAVAILABLE", "{status}");
    }
    authority.failing.store(422, Ordering::SeqCst);
    assert_eq!(
        ask(&ann, "t", "ensure", Some("Bearer ann")).await.error(404),
        "SESSION_NOT_FOUND",
        "an id that is invalid at the authority"
    );
    assert_eq!(world.provider.starts.load(Ordering::SeqCst), 0);
    for nobody in ["http://127.0.0.1:1".to_owned(), format!("{url}/wrong/base")] {
        let world = world_with_authority(&nobody, "");
        let broker = world.start().await;
        let ann = broker.human("ann").await;
        assert_eq!(ask(&ann, "t", "ensure", Some("Bearer ann")).await.error(503), "PROVIDER_UNAVAILABLE", "{nobody}");
    }
}

#[tokio::test]
async fn a_positive_answer_is_cached_briefly_and_a_negative_one_never() {
    let (authority, url) = start().await;
    let world = world_with_authority(&url, "remember_seconds = 20\n");
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let request_count = || authority.request_count.load(Ordering::SeqCst);
    assert_eq!(ask(&ann, "t", "ensure", Some("Bearer ann")).await.status, 404);
    authority.seen_by.lock().unwrap().insert("t".into(), "Bearer ann".into());
    ask(&ann, "t", "ensure", Some("Bearer ann")).await.ok(200);
    assert_eq!(request_count(), 2, "a denial was not cached");
    for _ in 0..5 {
        ask(&ann, "t", "ensure", Some("Bearer ann")).await.ok(200);
    }
    assert_eq!(request_count(), 2);
    ask(&bob, "t", "get", Some("Bearer ann")).await.ok(200);
    assert_eq!(request_count(), 3, "permission is cached per caller");
    assert_eq!(ask(&ann, "t", "get", Some("Bearer mallory")).await.status, 404, "permission is cached per credential");
    authority.seen_by.lock().unwrap().clear();
    world.clock.advance(20);
    assert_eq!(ask(&ann, "t", "ensure", Some("Bearer ann")).await.status, 404, "a withdrawn permission");
}

#[tokio::test]
async fn the_broker_can_ask_the_authority_with_its_own_key() {
    let (authority, url) = start().await;
    authority.seen_by.lock().unwrap().insert("t".into(), "ann".into());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("key");
    std::fs::write(&file, "lsv2_service\n").unwrap();
    let world = world_with_authority(&url, &format!("service_key_file = {file:?}\nuser_header = \"x-user\"\n"));
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ask(&ann, "t", "ensure", Some("Bearer ignored")).await.ok(200);
    let request_count = authority.headers.lock().unwrap().clone();
    assert_eq!((&request_count["x-api-key"], &request_count["x-user"]), (&"lsv2_service".parse().unwrap(), &"ann".parse().unwrap()));
    assert!(!request_count.contains_key("authorization"));
    ann.get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.ok(200);
    assert_eq!(bob.get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.error(404), "SESSION_NOT_FOUND");
}

/// A `langgraph dev` server whose users authenticate with `Bearer <name>` and see only their own threads; ends with the
/// test.
struct LangGraph {
    program: std::process::Child,
    url: String,
    _dir: tempfile::TempDir,
}

const AUTH: &str = r#"
from langgraph_sdk import Auth
auth = Auth()

@auth.authenticate
async def authenticate(authorization: str | None) -> str:
    if not authorization or not authorization.startswith("Bearer "):
        raise Auth.exceptions.HTTPException(status_code=401, detail="who are you?")
    return authorization.removeprefix("Bearer ")

@auth.on.threads
async def own_threads(ctx, value):
    if isinstance(value, dict):
        value.setdefault("metadata", {})["owner"] = ctx.user.identity
    return {"owner": ctx.user.identity}
"#;
const GRAPH: &str = r#"
from typing import TypedDict
from langgraph.graph import START, StateGraph
class State(TypedDict):
    x: str
builder = StateGraph(State)
builder.add_node("n", lambda s: s)
builder.add_edge(START, "n")
graph = builder.compile()
"#;

impl LangGraph {
    async fn start(program: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let settings = json!({
            "dependencies": ["."], "graphs": { "g": "./graph.py:graph" },
            "auth": { "path": "./auth.py:auth", "disable_studio_auth": true },
        });
        for (name, text) in [("auth.py", AUTH), ("graph.py", GRAPH), ("langgraph.json", &settings.to_string())] {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let program = std::process::Command::new(program)
            .args(["dev", "--host", "127.0.0.1", "--port", &port.to_string(), "--no-browser", "--no-reload"])
            .current_dir(dir.path())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let authority = Self { program, url: format!("http://127.0.0.1:{port}"), _dir: dir };
        let addr = format!("127.0.0.1:{port}");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
        while tokio::net::TcpStream::connect(&addr).await.is_err() {
            assert!(std::time::Instant::now() < deadline, "langgraph did not start");
            tokio::task::yield_now().await;
        }
        authority
    }

    async fn make_thread(&self, user: &str) -> String {
        let addr = self.url.strip_prefix("http://").unwrap().parse().unwrap();
        let client = Client { addr, key: None };
        let made =
            client.call(Method::POST, "/threads", Some(json!({})), &[("authorization", user), ("content-type", "application/json")]).await;
        made.ok(200)["thread_id"].as_str().unwrap().to_owned()
    }
}

impl Drop for LangGraph {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

#[tokio::test]
#[ignore = "takes a LangGraph deployment, which `make soak` installs"]
async fn soak_a_real_deployment_grants_and_refuses_access() {
    let program = std::env::var("COBOX_TEST_LANGGRAPH").expect("names the program of langgraph-cli[inmem]");
    let authority = LangGraph::start(&program).await;
    let thread = &authority.make_thread("Bearer ann").await;
    let world = world_with_authority(&authority.url, "");
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    ask(&ann, thread, "ensure", Some("Bearer ann")).await.ok(200);
    assert_eq!(ask(&bob, thread, "ensure", Some("Bearer bob")).await.error(404), "SESSION_NOT_FOUND");
    assert_eq!(ask(&bob, thread, "ensure", Some("nonsense")).await.error(403), "FORBIDDEN");
    assert_eq!(ask(&ann, "not-a-uuid", "ensure", Some("Bearer ann")).await.error(404), "SESSION_NOT_FOUND");
    assert_eq!(ask(&ann, "00000000-0000-4000-8000-000000000000", "ensure", Some("Bearer ann")).await.error(404), "SESSION_NOT_FOUND");
}
