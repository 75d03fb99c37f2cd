//! Tests of request validation and its errors: fields, actors, notices, credentials and cursors.

use cobox_protocol::{SandboxId, key::PrincipalKind};
use http::Method;
use serde_json::{Value, json};

use crate::harness::{Answer, Client, NEWEST, World, claims, sandbox_id, session_path};

const SESSIONS: &str = "/v1/sandbox/sessions";

fn negotiate_request(extra: Value) -> Value {
    let mut body = json!({ "thread_id": "t", "mode": "ensure" });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[track_caller]
fn refused(answer: Answer, status: u16, code: &str, words: &str) {
    let message = answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
    assert_eq!(answer.error(status), code);
    assert!(message.contains(words), "{message}");
}

#[tokio::test]
async fn a_human_may_act_as_an_agent_and_no_principal_as_a_higher_kind() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let bot = broker.key("bot", PrincipalKind::Agent).await;
    for actor in [json!("agent"), json!({ "type": "agent" }), json!({ "type": "agent", "id": "helper" })] {
        let made = ann.post(SESSIONS, negotiate_request(json!({ "actor": actor }))).await.ok(200);
        assert_eq!(made["credentials"]["granted_capabilities"], json!(["fs_read", "fs_write", "exec", "shell_observe"]));
        let claims = claims(made["token"].as_str().unwrap());
        assert_eq!(claims["sub"], "ann");
        let id = actor.get("id").cloned().unwrap_or(json!("ann"));
        assert_eq!(claims["act"], json!({ "type": "agent", "id": id }));
        // A refresh doesn't widen its permissions.
        let renewed = ann.post(&format!("{}/refresh", session_path(&made)), json!({ "current_token": made["token"] })).await.ok(200);
        let renewed = self::claims(renewed["token"].as_str().unwrap());
        assert_eq!((&renewed["act"], &renewed["scope"]), (&claims["act"], &claims["scope"]));
    }
    let issued = broker.broker.as_ref().unwrap().store().audit("default", None, &NEWEST).await.unwrap();
    let issued: Vec<_> = issued.iter().map(|(_, r)| r).filter(|r| r.action == "token.issued").collect();
    assert_eq!(issued.len(), 6);
    assert!(issued.iter().all(|r| r.principal.as_deref() == Some("ann") && r.actor.as_deref() == Some("agent")));

    ann.post(SESSIONS, negotiate_request(json!({ "actor": "human" }))).await.ok(200);
    bot.post(SESSIONS, negotiate_request(json!({ "actor": { "type": "agent", "id": "bot" } }))).await.ok(200);
    for (caller, actor) in [(&bot, json!("human")), (&bot, json!({ "type": "operator" })), (&ann, json!("operator"))] {
        refused(caller.post(SESSIONS, negotiate_request(json!({ "actor": actor }))).await, 403, "FORBIDDEN", "can't act as");
    }
    refused(
        ann.post(SESSIONS, negotiate_request(json!({ "actor": { "type": "human", "id": "bob" } }))).await,
        403,
        "FORBIDDEN",
        "another human",
    );
    refused(ann.post(SESSIONS, negotiate_request(json!({ "actor": "robot" }))).await, 400, "INVALID_REQUEST", "actor: `robot`");
    refused(ann.post(SESSIONS, negotiate_request(json!({ "actor": 3 }))).await, 400, "INVALID_REQUEST", "actor: must be");
}

#[tokio::test]
async fn unsupported_and_unknown_options_are_refused_by_name() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    for (field, value, words) in [
        ("provider_preference", json!("docker"), "`docker`"),
        ("token_format", json!("saml"), "`saml`"),
        ("token_format", json!("paper"), "`paper`"),
        ("template", json!("python"), "`python`"),
        ("name", json!("../box"), "letters"),
        ("keep", json!("yes"), "boolean"),
        ("tags", json!(["a"]), "object"),
        ("tags", json!({ "a": 1 }), "string"),
        ("tags", json!({ "scope": "x" }), "set by the broker"),
        ("scope.type", json!({ "type": "planet", "id": "w" }), "`planet`"),
        ("from_the_future", json!(1), "is not a field of this request"),
    ] {
        let answer = ann.post(SESSIONS, negotiate_request(json!({ (field.split('.').next().unwrap()): value }))).await;
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with(field), "{field}: {message}");
        refused(answer, 400, "INVALID_REQUEST", words);
    }
    refused(
        ann.post(SESSIONS, negotiate_request(json!({ "sandbox_id": SandboxId::new() }))).await,
        404,
        "SANDBOX_NOT_FOUND",
        "no such sandbox",
    );
    let harmless = json!({
        "provider_preference": "auto", "token_format": "jwt", "keep": false, "tags": {}, "name": null, "template": ""
    });
    ann.post(SESSIONS, negotiate_request(harmless)).await.ok(200);
    ann.post(SESSIONS, negotiate_request(json!({ "provider_preference": "fake", "tags": [] }))).await.ok(200);
    assert_eq!(world.provider.starts.load(std::sync::atomic::Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_thread_named_as_a_scope_gets_the_full_response() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let scope = json!({ "type": "thread", "id": "t" });
    refused(ann.post(SESSIONS, json!({ "scope": scope, "mode": "attach_only" })).await, 404, "BINDING_NOT_FOUND", "`t`");
    let made = ann.ensure("t").await;
    let found = ann.post(SESSIONS, json!({ "scope": scope, "mode": "attach_only" })).await.ok(200);
    assert_eq!(found["session_id"], made["session_id"]);
    refused(
        ann.post(SESSIONS, negotiate_request(json!({ "scope": { "type": "thread", "id": "u" } }))).await,
        400,
        "INVALID_REQUEST",
        "scope",
    );
    refused(ann.post(SESSIONS, json!({ "mode": "get" })).await, 400, "INVALID_REQUEST", "thread_id: is missing");
}

#[tokio::test]
async fn a_sandbox_hint_must_match_the_sandbox_of_the_thread() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let (made, other) = (ann.ensure("t").await, ann.ensure("other").await);
    for field in ["sandbox_id", "sandbox_hint"] {
        let found = ann.post(SESSIONS, negotiate_request(json!({ field: sandbox_id(&made) }))).await.ok(200);
        assert_eq!(found["session_id"], made["session_id"]);
        let conflict = ann.post(SESSIONS, negotiate_request(json!({ field: sandbox_id(&other) }))).await;
        assert_eq!(conflict.json()["error"]["details"]["sandbox_id"], made["sandbox"]["id"]);
        assert_eq!(conflict.error(409), "SESSION_CONFLICT");
        refused(
            ann.post(SESSIONS, negotiate_request(json!({ field: SandboxId::new() }))).await,
            404,
            "SANDBOX_NOT_FOUND",
            "no such sandbox",
        );
    }
}

#[tokio::test]
async fn a_refusal_names_the_field_in_plain_language() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    for (extra, words) in [
        (json!({ "mode": "grab" }), "mode: `grab`"),
        (json!({ "access": "all" }), "access: `all` is not known; it must be `workspace` or `owner`"),
        (json!({ "thread_id": 3 }), "thread_id: must be a string, not 3"),
        (json!({ "ttl": 0 }), "ttl: must be at least 1 second"),
        (json!({ "ttl": -5 }), "ttl: must be a whole number"),
        (json!({ "scopes": ["root"] }), "scopes: `root`"),
        (json!({ "requested_capabilities": ["root"] }), "requested_capabilities: `root`"),
    ] {
        refused(ann.post(SESSIONS, negotiate_request(extra)).await, 400, "INVALID_REQUEST", words);
    }
    refused(ann.post(SESSIONS, json!([])).await, 400, "INVALID_REQUEST", "the body: must be a JSON object");
    for path in [SESSIONS, "/v1/sandboxes"] {
        for (query, words) in
            [("limit=0", "limit: "), ("limit=x", "limit: "), ("cursor=nonsense", "cursor: "), ("limit=1&limit=2", "limit")]
        {
            refused(ann.get(&format!("{path}?{query}")).await, 400, "INVALID_REQUEST", words);
        }
    }
    refused(ann.get(&format!("{SESSIONS}?state=asleep")).await, 400, "INVALID_REQUEST", "state: must be");
}

#[tokio::test]
async fn the_error_of_a_wrong_credential_names_the_accepted_ones() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let nobody = Client { key: None, ..ann.clone() };
    let (control, dataplane_path) = (SESSIONS.to_owned(), format!("/dp/{}/v1/x", sandbox_id(&made)));
    for path in [&control, &dataplane_path] {
        for header in [("authorization", "Bearer sk-123"), ("x-api-key", "sk-123")] {
            let answer = nobody.call(Method::GET, path, None, &[header]).await;
            assert_eq!(answer.headers["www-authenticate"], "Bearer");
            refused(answer, 401, "UNAUTHENTICATED", "the credential is not an API key: API keys start with cbx_");
        }
        assert_eq!(nobody.get(path).await.headers["www-authenticate"], "Bearer");
    }
    refused(ann.with(&made["token"]).get(&control).await, 401, "UNAUTHENTICATED", "the broker requires an API key");
    // Authentication fails before the body is checked.
    refused(nobody.post(SESSIONS, serde_json::json!({ "mode": 7 })).await, 401, "UNAUTHENTICATED", "no credential");
    refused(ann.post(SESSIONS, serde_json::json!({ "mode": 7 })).await, 400, "INVALID_REQUEST", "mode");
}
