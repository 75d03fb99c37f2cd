//! Tests of the operation routes: readiness and metrics.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, atomic::Ordering},
};

use cobox_broker::{RequestSpan, TraceContext, TraceSink};
use cobox_protocol::key::PrincipalKind;
use http::Method;
use serde_json::{Value, json};

use crate::{
    harness::{Client, World, eventually, sandbox_id, session_path},
    log_capture::Log,
};

#[tokio::test]
async fn readiness_names_the_part_that_failed() {
    let log = Log::capture();
    let world = World::new();
    let broker = world.start().await;
    let anyone = Client { addr: broker.addr, key: None };
    let ready = anyone.get("/readyz").await.ok(200);
    assert_eq!(ready, json!({ "status": "ready", "checks": { "store": "ok", "provider": "ok", "node": "ok", "clock": "ok" } }));
    world.provider.is_ready.store(false, Ordering::SeqCst);
    // The result of a check is cached for a moment.
    eventually("the provider's failure to show", async || anyone.get("/readyz").await.status == 503).await;
    let unready = anyone.get("/readyz").await;
    assert_eq!(unready.json()["error"]["details"]["checks"], json!({ "store": "ok", "provider": "failed", "node": "ok", "clock": "ok" }));
    assert_eq!(unready.json()["error"]["details"]["causes"], json!({ "provider": "unavailable" }));
    assert!(!String::from_utf8_lossy(&unready.bytes).contains("secret host details"));
    let line = log.request(unready.headers["x-request-id"].to_str().unwrap());
    assert_eq!(line["cause"], "provider (unavailable)");
    assert_eq!(unready.error(503), "BACKEND_UNAVAILABLE");
    // The next check repeats nothing in the log.
    let checked = world.provider.ready_checks.load(Ordering::SeqCst);
    eventually("the provider is checked again", async || {
        anyone.get("/readyz").await.error(503);
        world.provider.ready_checks.load(Ordering::SeqCst) > checked
    })
    .await;
    let causes: Vec<Value> = log.lines().into_iter().filter(|l| l["message"] == "not ready").collect();
    assert!(causes.len() == 1 && causes[0]["problem"].as_str().unwrap().contains("secret host details"), "{causes:#?}");
    world.provider.is_ready.store(true, Ordering::SeqCst);
    eventually("the broker to be ready again", async || anyone.get("/readyz").await.status == 200).await;
    log.line("ready again").await;
    assert_eq!(anyone.get("/healthz").await.ok(200)["status"], "ok");
}

#[tokio::test]
async fn the_metrics_show_routes_and_states_and_no_identities() {
    let mut world = World::new();
    world.config.metrics.public = true;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("a-thread-of-anns").await;
    ann.post(&format!("{}/refresh", session_path(&made)), json!({})).await.ok(200);
    ann.get("/no/such/route?token=hidden").await.error(404);
    let anyone = Client { addr: broker.addr, key: None };
    // The broker closes the earlier requests' connections only after their clients have closed them.
    eventually("a single open connection", async || scrape(&anyone).await.contains("\ncobox_connections_open 1\n")).await;
    let metrics = anyone.get("/metrics").await;
    assert_eq!(metrics.status, 200);
    assert!(metrics.headers["content-type"].to_str().unwrap().starts_with("text/plain"));
    let text = String::from_utf8(metrics.bytes.to_vec()).unwrap();
    for line in [
        "cobox_requests_total{route=\"/v1/sandbox/sessions\",method=\"POST\",status=\"200\"} 1",
        "cobox_requests_total{route=\"/v1/sandbox/sessions/{id}/refresh\",method=\"POST\",status=\"200\"} 1",
        "cobox_requests_total{route=\"none\",method=\"GET\",status=\"404\"} 1",
        "cobox_request_duration_seconds_count{route=\"/v1/sandbox/sessions\"} 1",
        "cobox_sandboxes{state=\"active\"} 1",
        "cobox_sessions 1",
        "cobox_revocations 0",
        "cobox_tokens_issued_total 2",
        "cobox_store_up 1",
        "cobox_errors_total{code=\"ROUTE_NOT_FOUND\"} 1",
        "cobox_sandbox_start_duration_seconds_count{kind=\"create\"} 1",
        "cobox_sandbox_starts_failed_total{kind=\"create\"} 0",
        "cobox_workspace_sandboxes_max 1",
        "cobox_sandbox_limit 1000",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
    for part in ["ann", "sb_", "ssn_", "cbx_", "hidden", "a-thread"] {
        assert!(!text.contains(part), "{part}\n{text}");
    }
    let value = |name: &str| -> f64 {
        text.lines().find_map(|l| l.strip_prefix(name)?.trim().parse().ok()).unwrap_or_else(|| panic!("{name}\n{text}"))
    };
    assert!(value("cobox_store_commit_duration_seconds_count") >= 2.0);
    assert!(value("cobox_connection_bytes_total{direction=\"out\"}") > 100.0);
    assert!(value("cobox_store_wait_duration_seconds_count") >= 2.0);
    assert!(value("cobox_database_size_bytes") > 4096.0);
    assert!(value("cobox_data_disk_bytes{kind=\"total\"}") >= value("cobox_data_disk_bytes{kind=\"available\"}"));
    let commit = option_env!("COBOX_COMMIT").unwrap_or("unknown");
    assert!(text.contains(&format!("cobox_build_info{{version=\"{}\",commit=\"{commit}\"}} 1\n", env!("CARGO_PKG_VERSION"))));
}

async fn scrape(client: &Client) -> String {
    String::from_utf8(client.get("/metrics").await.bytes.to_vec()).unwrap()
}

#[tokio::test]
async fn the_limits_of_a_workspace_and_the_fullest_one_are_shown() {
    let mut world = World::new();
    world.config.metrics.public = true;
    world.config.max_volumes_per_workspace = 7;
    let broker = world.start().await;
    let (ann, eve) = (broker.human("ann").await, broker.stranger().await);
    let volume = |name: &str| json!({ "name": name, "size_bytes": 1 << 20 });
    for name in ["a", "b"] {
        ann.post("/v1/volumes", volume(name)).await.ok(201);
    }
    eve.post("/v1/volumes", volume("a")).await.ok(201);
    let made = ann.ensure("t").await;
    ann.post(&format!("/v1/sandboxes/{}/snapshots", sandbox_id(&made)), json!({ "name": "s" })).await.ok(202);
    ann.post("/v1/templates", json!({ "name": "t" })).await.ok(201);
    let text = scrape(&ann).await;
    for line in [
        "cobox_volume_limit 7",
        "cobox_workspace_volumes_max 2",
        "cobox_snapshot_limit 100",
        "cobox_workspace_snapshots_max 1",
        "cobox_template_limit 200",
        "cobox_workspace_templates_max 1",
        "cobox_pool_limit 20",
        "cobox_workspace_pools_max 0",
        "cobox_stored_bytes_limit 1099511627776",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
    let stored = text.lines().find_map(|l| l.strip_prefix("cobox_workspace_stored_bytes_max ")).unwrap();
    assert!(stored.parse::<u64>().unwrap() >= 2 << 20, "{stored}");
}

#[tokio::test]
async fn commands_files_and_failed_starts_are_counted_separately() {
    let mut world = World::new();
    world.config.metrics.public = true;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let token = ann.with(&made["token"]);
    let sandbox = format!("/dp/{}", sandbox_id(&made));
    token.post(&format!("{sandbox}/v1/exec"), json!({})).await;
    for name in ["a", "b"] {
        token.get(&format!("{sandbox}/v1/files/{name}")).await;
    }
    world.provider.failing_starts.store(1, Ordering::SeqCst);
    ann.post("/v1/sandbox/sessions", json!({ "thread_id": "fails", "mode": "ensure" })).await.error(503);
    let text = scrape(&ann).await;
    for line in [
        "cobox_dataplane_request_duration_seconds_count{operation=\"exec\"} 1",
        "cobox_dataplane_request_duration_seconds_count{operation=\"files\"} 2",
        "cobox_sandbox_starts_failed_total{kind=\"create\"} 1",
        "cobox_errors_total{code=\"PROVIDER_UNAVAILABLE\"} 1",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
}

#[tokio::test]
async fn the_documentation_lists_every_metric_and_no_other() {
    let mut world = World::new();
    world.config.metrics.public = true;
    let broker = world.start().await;
    let text = scrape(&Client { addr: broker.addr, key: None }).await;
    let displayed: BTreeSet<&str> = text.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    let docs = include_str!("../../../../docs/operations.md");
    let words = docs.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let listed: BTreeSet<&str> = words.filter(|word| word.starts_with("cobox_") && *word != "cobox_broker").collect();
    assert_eq!(displayed, listed);
}

#[tokio::test]
async fn a_request_is_found_in_the_log_by_its_caller_and_its_sandbox() {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    let log = Log::capture();
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let trace = format!("00-{TRACE}-00f067aa0ba902b7-01");
    let ids = [("x-request-id", "their-own.id:7"), ("traceparent", trace.as_str())];
    let body = json!({ "thread_id": "t", "mode": "ensure" });
    let answer = ann.call(Method::POST, "/v1/sandbox/sessions", Some(body), &ids).await;
    assert_eq!(answer.headers["x-request-id"], "their-own.id:7");
    let made = answer.ok(200);
    let line = log.request("their-own.id:7");
    assert_eq!((&line["trace_id"], &line["level"]), (&json!(TRACE), &json!("INFO")));
    let is_about = |line: &Value| line["session"] == made["session_id"] && line["sandbox"] == made["sandbox"]["id"];
    assert!(is_about(&line), "{line}");
    // The audit contains the id as well.
    let root = broker.key("root", PrincipalKind::Operator).await;
    let audit = root.get("/v1/audit").await.ok(200);
    assert!(audit["items"].as_array().unwrap().iter().any(|r| r["request_id"] == "their-own.id:7"), "{audit}");

    let passed = ann.with(&made["token"]).get(&format!("/dp/{}/v1/files/a", sandbox_id(&made))).await;
    assert!(is_about(&log.request(passed.headers["x-request-id"].to_str().unwrap())));
    let refused = ann.post(&format!("{}/delegate", session_path(&made)), json!({})).await;
    assert_eq!(log.request(refused.headers["x-request-id"].to_str().unwrap())["session"], made["session_id"]);
    // The sandbox fails to start: the session exists all the same.
    world.provider.failing_starts.store(1, Ordering::SeqCst);
    let failed = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "fails", "mode": "ensure" })).await;
    let failed_line = log.request(failed.headers["x-request-id"].to_str().unwrap());
    assert_eq!(failed.error(503), "PROVIDER_UNAVAILABLE");
    assert!(failed_line["session"].as_str().unwrap().starts_with("ssn_"), "{failed_line}");
    assert!(failed_line["sandbox"].as_str().unwrap().starts_with("sb_"), "{failed_line}");
    // An id that could damage a log is replaced.
    for bad in ["a b", &"x".repeat(129), ann.key.as_ref().unwrap().expose()] {
        let answer = ann.call(Method::GET, "/healthz", None, &[("x-request-id", bad), ("traceparent", "00-0-0-0")]).await;
        assert!(answer.headers["x-request-id"].to_str().unwrap().starts_with("req_"), "{bad}");
    }
    // A suspension, which no request caused, is logged too.
    world.clock.advance(3600);
    broker.tick().await;
    let lines = log.lines();
    assert!(lines.iter().any(|l| l["message"] == "a sandbox was suspended" && l["sandbox"] == made["sandbox"]["id"]), "{lines:#?}");
}

#[tokio::test]
async fn the_metrics_are_for_operators_and_holders_of_the_scraper_token() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, "a-long-word-for-prometheus\n").unwrap();
    let mut world = World::new();
    world.config.metrics.token_file = Some(file.clone());
    let broker = world.start().await;
    let (ann, root) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await);
    let nobody = Client { key: None, ..ann.clone() };
    let with = |token: &str| nobody.with(&json!(token));
    // A proxy on this machine may not identify itself.
    for headers in [&[][..], &[("x-forwarded-for", "203.0.113.1")], &[("forwarded", "for=203.0.113.1")], &[("via", "nginx")]] {
        let read = async |client: &Client| client.call(Method::GET, "/metrics", None, headers).await;
        assert_eq!(read(&nobody).await.error(401), "UNAUTHENTICATED");
        assert_eq!(read(&with("a-long-word-for-prometheu")).await.error(401), "UNAUTHENTICATED");
        assert_eq!(read(&ann).await.error(403), "FORBIDDEN");
        assert_eq!(read(&root).await.status, 200);
        assert_eq!(read(&with("a-long-word-for-prometheus")).await.status, 200);
    }
    assert_eq!(with("a-long-word-for-prometheus").get("/v1/keys").await.error(401), "UNAUTHENTICATED");
    broker.kill().await;
    std::fs::write(&file, "short").unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let started = cobox_broker::Broker::start(world.whole_config().await, world.provider.clone(), listener).await;
    assert!(started.err().unwrap().to_string().contains("metrics.token_file"));
}

#[derive(Default)]
struct Spans(Mutex<Vec<(Option<TraceContext>, String, u16)>>);

impl TraceSink for Spans {
    fn request(&self, span: &RequestSpan<'_>) {
        self.0.lock().unwrap().push((span.context, format!("{} {}", span.method, span.route.unwrap_or_default()), span.status));
    }
}

#[tokio::test]
async fn every_request_is_a_span_of_its_callers_trace() {
    let spans = Arc::<Spans>::default();
    let world = World::new();
    let broker = world.start_tracing(Some(spans.clone())).await;
    let anyone = Client { addr: broker.addr, key: None };
    let trace = [("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00")];
    anyone.call(Method::GET, "/v1/sandboxes", None, &trace).await.error(401);
    anyone.get("/healthz").await.ok(200);
    let got = spans.0.lock().unwrap().clone();
    assert_eq!((got[0].1.as_str(), got[0].2, got[1].1.as_str(), got[1].0), ("GET /v1/sandboxes", 401, "GET /healthz", None));
    let context = got[0].0.unwrap();
    assert_eq!((context.to_string().as_str(), context.is_sampled), ("4bf92f3577b34da6a3ce929d0e0e4736", false));
}
