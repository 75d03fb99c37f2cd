//! Runs the examples of the documents that this protocol is based on, verbatim: every request works, and the response
//! has all fields of the example's response with the same types.

use cobox_broker::Cors;
use cobox_protocol::Timestamp;
use http::Method;
use serde_json::{Value, json};

use crate::harness::{World, claims};

/// JSON as in those documents, with comments at the ends of lines.
fn read(example: &str) -> Value {
    let plain: Vec<&str> = example.lines().map(|l| l.split(" //").next().unwrap()).collect();
    serde_json::from_str(&plain.join("\n")).unwrap()
}

/// Checks that the response contains every field of the example, with the same type.
#[track_caller]
fn has_all_of(answer: &Value, example: &Value, at: &str) {
    match (example, answer) {
        (Value::Object(fields), Value::Object(provided)) => {
            for (name, field) in fields {
                let at = format!("{at}.{name}");
                has_all_of(provided.get(name).unwrap_or_else(|| panic!("{at} is missing")), field, &at);
            }
        }
        (Value::Array(items), Value::Array(provided)) => {
            assert!(!provided.is_empty(), "{at} is empty");
            provided.iter().for_each(|g| has_all_of(g, &items[0], at));
        }
        (Value::String(text), Value::String(provided)) => {
            assert!(!provided.is_empty(), "{at} is empty");
            if is_time(text) {
                assert!(is_time(provided), "{at} is not a time: {provided}");
            }
            for (scheme, plain) in [("https://", "http://"), ("wss://", "ws://")] {
                assert!(!text.starts_with(scheme) || provided.starts_with(plain), "{at}: {provided}");
            }
        }
        (Value::Number(_), Value::Number(_)) | (Value::Bool(_), Value::Bool(_)) => {}
        _ => panic!("{at} is {answer}, where the example has {example}"),
    }
}

fn is_time(text: &str) -> bool {
    text.ends_with('Z') && serde_json::from_value::<Timestamp>(json!(text)).is_ok()
}

#[tokio::test]
async fn the_thread_routes_answer_their_examples() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("user_xyz").await;
    ann.post("/v1/sandboxes", json!({ "name": "sbx_abc123" })).await.ok(201);

    let request = read(
        r#"{
  "sandbox_id": "sbx_abc123",     // optional, for reconnection
  "scopes": ["fs:rw", "shell"],   // requested capabilities
  "ttl": 900                       // requested TTL in seconds
}"#,
    );
    let response = read(
        r#"{
  "sandbox_id": "sbx_abc123",
  "endpoints": {
    "http": "https://sbx-abc123.sandboxes.example.com",
    "ws":   "wss://sbx-abc123.sandboxes.example.com/ws"
  },
  "token": "<signed-capability-token>",
  "expires_at": "2026-02-26T12:15:00Z",
  "scopes": ["fs:rw", "shell"],
  "refresh_before": "2026-02-26T12:10:00Z"
}"#,
    );
    let made = ann.post("/threads/thr_456/sandbox", request).await.ok(200);
    has_all_of(&made, &response, "sandbox");
    assert_eq!(made["scopes"], response["scopes"]);
    assert!(made["endpoints"]["ws"].as_str().unwrap().ends_with("/ws"));

    let payload = read(
        r#"{
  "sub": "user_xyz",            // who
  "aud": "sbx_abc123",          // which sandbox
  "scope": "fs:rw shell",       // what
  "thread_id": "thr_456",       // context
  "exp": 1740571500,            // when it expires
  "iat": 1740570600,
  "jti": "tok_unique_id"        // for revocation/audit
}"#,
    );
    let claims = claims(made["token"].as_str().unwrap());
    has_all_of(&claims, &payload, "token");
    for same in ["sub", "scope", "thread_id"] {
        assert_eq!(claims[same], payload[same]);
    }
    assert_eq!((&claims["aud"], claims["exp"].as_i64().unwrap() - claims["iat"].as_i64().unwrap()), (&made["sandbox_id"], 900));

    let mut request = read(
        r#"{
  "sandbox_id": "sbx_abc123",
  "current_token": "<old-token>"   // proves possession
}"#,
    );
    request["current_token"] = made["token"].clone();
    let response = read(
        r#"{
  "token": "<new-signed-capability-token>",
  "expires_at": "2026-02-26T12:30:00Z",
  "refresh_before": "2026-02-26T12:25:00Z"
}"#,
    );
    has_all_of(&ann.post("/threads/thr_456/sandbox/refresh", request).await.ok(200), &response, "refresh");
    ann.call(Method::POST, "/threads/thr_456/sandbox/heartbeat", None, &[]).await.ok(200);
    assert_eq!(ann.delete("/threads/thr_456/sandbox").await.status, 204);
}

#[tokio::test]
async fn the_simple_protocol_answers_its_examples() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let get = read("{\n  \"thread_id\": \"thr_123\",\n  \"mode\": \"get\"\n}");
    assert_eq!(ann.post("/v1/sandbox/sessions", get.clone()).await.error(404), "SESSION_NOT_FOUND");
    let mut ensure = get.clone();
    ensure["mode"] = json!("ensure");
    let key = [("idempotency-key", "7f1a3c52-98e5-4d0b-9f2e-0f6f3a1d2c4b")];
    let made = ann.call(Method::POST, "/v1/sandbox/sessions", Some(ensure), &key).await.ok(200);
    let response = read(
        r#"{
  "session_id": "ssn_123",
  "thread_id": "thr_123",
  "sandbox": {
    "id": "sb_123",
    "provider": "langsmith",
    "http_base_url": "https://dp.example.com/v1",
    "ws_base_url": "wss://dp.example.com/v1"
  },
  "token": "opaque_or_jwt_token",
  "expires_at": "2026-02-27T20:20:00Z"
}"#,
    );
    let found = ann.post("/v1/sandbox/sessions", get).await.ok(200);
    for answer in [&made, &found] {
        has_all_of(answer, &response, "session");
        assert_eq!(answer["thread_id"], "thr_123");
        assert!(answer["sandbox"]["http_base_url"].as_str().unwrap().ends_with("/v1"));
    }
    let session = format!("/v1/sandbox/sessions/{}", made["session_id"].as_str().unwrap());
    let response = read("{\n  \"token\": \"new_token\",\n  \"expires_at\": \"2026-02-27T20:50:00Z\"\n}");
    has_all_of(&ann.post(&format!("{session}/refresh"), json!({})).await.ok(200), &response, "refresh");
    let released = ann.delete(&session).await;
    assert_eq!((released.status.as_u16(), released.bytes.len()), (204, 0));
}

#[tokio::test]
async fn the_full_protocol_answers_its_examples() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("usr_1").await;
    ann.post("/v1/sandboxes", json!({ "name": "optional-existing-sandbox" })).await.ok(201);
    let request = read(
        r#"{
  "scope": { "type": "thread", "id": "thr_123" },
  "mode": "ensure",
  "actor": { "type": "human", "id": "usr_1" },
  "requested_capabilities": ["fs_read", "fs_write", "shell", "exec"],
  "sandbox_hint": "optional-existing-sandbox",
  "provider_preference": "auto"
}"#,
    );
    let response = read(
        r#"{
  "binding": {
    "id": "bind_789",
    "scope": { "type": "thread", "id": "thr_123" },
    "sandbox_id": "sb_123",
    "provider": "langsmith",
    "state": "active",
    "lease_expires_at": "2026-02-27T21:00:00Z"
  },
  "dataplane": {
    "http_base_url": "https://dp.example.com/v1",
    "ws_base_url": "wss://dp.example.com/v1"
  },
  "credentials": {
    "token_type": "Bearer",
    "access_token": "short_lived_token",
    "expires_at": "2026-02-27T20:20:00Z",
    "granted_capabilities": ["fs_read", "fs_write", "shell"]
  },
  "policy": {
    "idle_timeout_seconds": 900,
    "hard_ttl_seconds": 28800
  }
}"#,
    );
    let made = ann.post("/v1/sandbox/sessions", request).await.ok(200);
    has_all_of(&made, &response, "binding");
    assert_eq!((&made["binding"]["scope"], &made["binding"]["state"]), (&response["binding"]["scope"], &json!("active")));
    assert_eq!((&made["policy"], &made["credentials"]["token_type"]), (&response["policy"], &json!("Bearer")));
    assert_eq!(made["binding"]["id"], made["session_id"]);

    let binding = format!("/v1/sandbox/sessions/{}", made["binding"]["id"].as_str().unwrap());
    has_all_of(&ann.get(&binding).await.ok(200), &response, "binding");
    ann.call(Method::POST, &format!("{binding}/refresh-token"), None, &[]).await.ok(200);
    let beat = ann.call(Method::POST, &format!("{binding}/heartbeat"), None, &[]).await.ok(200);
    assert!(is_time(beat["lease_expires_at"].as_str().unwrap()));

    let denied = json!({ "scope": { "type": "thread", "id": "thr_123" }, "mode": "ensure", "requested_capabilities": ["ports"] });
    let envelope = read(
        r#"{
  "error": {
    "code": "CAPABILITY_DENIED",
    "message": "shell not granted",
    "retryable": false,
    "request_id": "req_123"
  }
}"#,
    );
    let denied = ann.post("/v1/sandbox/sessions", denied).await;
    has_all_of(&denied.json(), &envelope, "envelope");
    assert_eq!(denied.error(403), "CAPABILITY_DENIED");
    assert_eq!(ann.delete(&binding).await.status, 204);
}

#[tokio::test]
async fn a_client_finds_its_sandbox_again_by_its_tags() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    // `ailsd sandbox create <template> --name <name>`, tagged with `thread_id`, `created_by: ailsd`, `session_id`.
    let tags = json!({ "thread_id": "thr_1", "created_by": "ailsd", "session_id": "run-1" });
    let made = ann.post("/v1/sandboxes", json!({ "name": "dev", "tags": tags })).await.ok(201);
    world.clock.advance(3600);
    broker.tick().await;
    let found = ann.get("/v1/sandboxes?tag=created_by:ailsd&tag=session_id:run-1&tag=thread_id:thr_1").await.ok(200);
    assert_eq!((&found["items"][0]["id"], &found["items"][0]["state"]), (&made["id"], &json!("suspended")));
    let again = json!({ "thread_id": "thr_1", "mode": "ensure", "sandbox_id": found["items"][0]["id"] });
    let run = ann.post("/v1/sandbox/sessions", again).await.ok(200);
    // Values for the next run: `sandbox_id`, `credential`, `dataplane_url`.
    ann.with(&run["token"]).get(&format!("/dp/{}/v1/x", run["sandbox"]["id"].as_str().unwrap())).await.ok(200);
}

#[tokio::test]
async fn a_front_end_gets_its_services_and_its_page_may_request_them() {
    const PAGE: &str = "http://localhost:5173";
    let mut world = World::new();
    let list = |words: &[&str]| words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>();
    world.config.cors = Cors {
        allow_origins: list(&[PAGE]),
        allow_methods: list(&["GET", "POST", "PUT", "DELETE", "OPTIONS"]),
        allow_headers: list(&["Authorization", "Content-Type"]),
    };
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    ann.ensure("thr_1").await;
    let response = read(
        r#"{
  "services": {
    "sandbox": {
      "url": "http://127.0.0.1:2468",
      "token": "<random-hex-token>",  // Plain token, not JWT
      "protocol": "rest+sse"
    }
  }
}"#,
    );
    let answer = ann.call(Method::GET, "/capabilities?thread_id=thr_1", None, &[("origin", PAGE)]).await;
    assert_eq!(answer.headers["access-control-allow-origin"], PAGE);
    has_all_of(&answer.ok(200), &response, "capabilities");
    let requested_value = [("origin", PAGE), ("access-control-request-method", "PUT"), ("access-control-request-headers", "authorization")];
    let preflight = ann.call(Method::OPTIONS, "/capabilities", None, &requested_value).await;
    assert_eq!(preflight.headers["access-control-allow-methods"], "GET, POST, PUT, DELETE, OPTIONS");
    assert_eq!(preflight.headers["access-control-allow-headers"], "Authorization, Content-Type");
}
