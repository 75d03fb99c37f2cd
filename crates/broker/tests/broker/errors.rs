//! Provokes every error of the control plane and checks status, code, whether a retry is possible, and the request id.

use std::{collections::HashSet, sync::atomic::Ordering};

use cobox_protocol::{ErrorCode, key::PrincipalKind};
use http::Method;
use serde_json::{Value, json};

use crate::harness::{Answer, Client, World, sandbox_id, session_path};

const SESSIONS: &str = "/v1/sandbox/sessions";

/// Errors that only boxd returns, errors of the LangSmith API alone, and the one that no client can cause.
const NOT_HERE: [ErrorCode; 13] = [
    ErrorCode::Unsupported,
    ErrorCode::PoolNotFound,
    ErrorCode::FileNotFound,
    ErrorCode::ShellNotFound,
    ErrorCode::CommandNotFound,
    ErrorCode::FileExists,
    ErrorCode::ShellBusy,
    ErrorCode::ShellExists,
    ErrorCode::CommandExpired,
    ErrorCode::FileChanged,
    ErrorCode::RangeNotSatisfiable,
    ErrorCode::DiskFull,
    ErrorCode::Internal,
];

#[derive(Default)]
struct CoveredErrors(HashSet<&'static str>);

impl CoveredErrors {
    #[track_caller]
    fn check(&mut self, answer: Answer, code: ErrorCode) {
        let error = answer.json()["error"].clone();
        assert_eq!(error["retryable"], code.retryable(), "{error}");
        assert_eq!(error["code"], code.as_str(), "{error}");
        assert!(error["request_id"].as_str().unwrap().starts_with("req_"));
        assert!(!error["message"].as_str().unwrap().is_empty());
        let must_wait = matches!(code, ErrorCode::SandboxStarting | ErrorCode::RateLimited);
        assert_eq!(answer.headers.contains_key("retry-after"), must_wait, "{error}");
        assert_eq!(answer.error(code.status()), code.as_str());
        self.0.insert(code.as_str());
    }
}

fn full(extra: Value) -> Value {
    let mut body = json!({ "scope": { "type": "thread", "id": "none" }, "mode": "attach_only" });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn every_error_has_its_status_code_and_message() {
    let mut world = World::new();
    world.config.max_sandboxes_per_workspace = 4;
    let broker = world.start().await;
    let (ann, bob, root) = (broker.human("ann").await, broker.human("bob").await, broker.key("root", PrincipalKind::Operator).await);
    let mut covered = CoveredErrors::default();
    let made = ann.ensure("t").await;
    let named = ann.post("/v1/sandboxes", json!({ "name": "dev", "access": "owner" })).await.ok(201);

    covered.check(ann.post(SESSIONS, json!({ "thread_id": "t", "mode": "grab" })).await, ErrorCode::InvalidRequest);
    covered.check(Client { key: None, ..ann.clone() }.get(SESSIONS).await, ErrorCode::Unauthenticated);
    covered.check(bob.get(&format!("/v1/sandboxes/{}", named["id"].as_str().unwrap())).await, ErrorCode::Forbidden);
    covered.check(ann.post(SESSIONS, json!({ "thread_id": "t", "mode": "get", "scopes": ["ports"] })).await, ErrorCode::CapabilityDenied);
    covered.check(ann.post(SESSIONS, json!({ "thread_id": "none", "mode": "get" })).await, ErrorCode::SessionNotFound);
    covered.check(ann.post(SESSIONS, full(json!({}))).await, ErrorCode::BindingNotFound);
    covered.check(ann.get("/v1/sandboxes/none").await, ErrorCode::SandboxNotFound);
    covered.check(root.delete("/v1/keys/none").await, ErrorCode::KeyNotFound);
    let share = format!("{}/share", session_path(&made));
    covered.check(ann.post(&share, json!({ "principal": "none", "capabilities": ["exec"] })).await, ErrorCode::PrincipalNotFound);
    covered.check(ann.delete(&format!("{share}/bob")).await, ErrorCode::ShareNotFound);
    covered.check(ann.get("/none").await, ErrorCode::RouteNotFound);
    covered.check(ann.call(Method::PUT, SESSIONS, None, &[]).await, ErrorCode::MethodNotAllowed);
    covered.check(ann.post(SESSIONS, json!({ "thread_id": "t", "mode": "create_only" })).await, ErrorCode::SessionConflict);
    let taken = full(json!({ "scope": { "type": "thread", "id": "t" }, "mode": "create_only" }));
    covered.check(ann.post(SESSIONS, taken).await, ErrorCode::BindingConflict);
    covered.check(ann.post("/v1/sandboxes", json!({ "name": "dev" })).await, ErrorCode::SandboxConflict);
    covered.check(ann.get("/v1/templates/none").await, ErrorCode::TemplateNotFound);
    covered.check(ann.get("/v1/snapshots/none").await, ErrorCode::SnapshotNotFound);
    covered.check(ann.get("/v1/volumes/none").await, ErrorCode::VolumeNotFound);
    let volume = json!({ "name": "data", "size_bytes": 1 << 20 });
    ann.post("/v1/volumes", volume.clone()).await.ok(201);
    covered.check(ann.post("/v1/volumes", volume).await, ErrorCode::NameTaken);
    let user = ann.post("/v1/sandboxes", json!({ "mounts": [{ "volume": "data", "path": "/data" }] })).await.ok(201);
    covered.check(ann.delete("/v1/volumes/data").await, ErrorCode::InUse);
    ann.delete(&format!("/v1/sandboxes/{}", user["id"].as_str().unwrap())).await;
    let keyed = async |thread: &str| {
        let body = json!({ "thread_id": thread, "mode": "ensure" });
        ann.call(Method::POST, SESSIONS, Some(body), &[("idempotency-key", "k")]).await
    };
    keyed("t").await.ok(200);
    covered.check(keyed("u").await, ErrorCode::IdempotencyConflict);

    world.provider.failing_starts.store(2, Ordering::SeqCst);
    covered.check(ann.post(SESSIONS, json!({ "thread_id": "fails", "mode": "ensure" })).await, ErrorCode::ProviderUnavailable);
    covered.check(ann.post(SESSIONS, full(json!({ "mode": "ensure" }))).await, ErrorCode::BackendUnavailable);
    world.provider.may_start.send_replace(false);
    let slow = json!({ "thread_id": "slow", "mode": "ensure" });
    covered.check(ann.call(Method::POST, SESSIONS, Some(slow), &[("prefer", "wait=0")]).await, ErrorCode::SandboxStarting);
    world.provider.may_start.send_replace(true);
    ann.ensure("slow").await;
    ann.ensure("fourth").await;
    covered.check(ann.post(SESSIONS, json!({ "thread_id": "fifth", "mode": "ensure" })).await, ErrorCode::QuotaExceeded);
    covered.check(ann.post(SESSIONS, json!({ "thread_id": "x".repeat(2 << 20), "mode": "get" })).await, ErrorCode::TooLarge);

    let path = format!("/dp/{}/v1/x", sandbox_id(&made));
    world.clock.advance(905);
    covered.check(ann.with(&made["token"]).get(&path).await, ErrorCode::TokenExpired);
    let fresh = ann.ensure("t").await;
    ann.delete(&session_path(&made)).await;
    covered.check(ann.with(&fresh["token"]).get(&path).await, ErrorCode::TokenRevoked);
    covered.check(ann.get(&session_path(&made)).await, ErrorCode::SessionExpired);

    let mut hurried = World::new();
    hurried.config.rate_limits.requests_per_second = 1;
    hurried.config.rate_limits.request_burst = 1;
    let broker = hurried.start().await;
    let ann = broker.human("ann").await;
    ann.get(SESSIONS).await.ok(200);
    covered.check(ann.get(SESSIONS).await, ErrorCode::RateLimited);

    let here = ErrorCode::ALL.iter().filter(|c| !NOT_HERE.contains(c)).map(|c| c.as_str());
    let missed: Vec<_> = here.filter(|c| !covered.0.contains(c)).collect();
    assert!(missed.is_empty(), "no request caused {missed:?}");
}
