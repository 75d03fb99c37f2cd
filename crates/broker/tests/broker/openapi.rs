//! Compares the OpenAPI document with the broker: every route and every response must be documented.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use cobox_protocol::key::PrincipalKind;
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::harness::{Client, World, session_path};

static DOCUMENT: LazyLock<Value> = LazyLock::new(|| serde_json::from_str(include_str!("../../../../openapi/broker.json")).unwrap());

const METHODS: [&str; 7] = ["get", "head", "post", "put", "patch", "delete", "options"];

fn paths() -> impl Iterator<Item = (&'static String, &'static Value)> {
    DOCUMENT["paths"].as_object().unwrap().iter()
}

/// Whether a path matches a template. The gateway's last parameter matches the rest of the path.
fn matches_template(template: &str, path: &str) -> bool {
    let (mut template, mut path) = (template.split('/'), path.split('/'));
    loop {
        match (template.next(), path.next()) {
            (None, None) => return true,
            (Some("{rest}"), Some(_)) => return true,
            (Some(word), Some(segment)) if word.starts_with('{') && !segment.is_empty() || word == segment => {}
            _ => return false,
        }
    }
}

/// Called with every response in any test, so that all responses are documented.
#[track_caller]
pub fn must_be_documented(method: &Method, path: &str, status: StatusCode) {
    let Some((template, operations)) = paths().find(|(template, _)| matches_template(template, path)) else { return };
    let Some(operation) = operations.get(method.as_str().to_ascii_lowercase()) else { return };
    let answers = &operation["responses"];
    assert!(
        answers.get(status.as_str()).is_some() || answers.get("default").is_some(),
        "{method} {path} answered {status}, which `{template}` doesn't have in openapi/broker.json; add it in crates/broker/src/http/openapi"
    );
}

/// The document's spelling of a router path.
fn spelled(path: &str) -> String {
    match path {
        "/dp/{*rest}" => "/dp/{sandbox_id}/{rest}".to_owned(),
        "/v1/sandbox/relay/{*rest}" => "/v1/sandbox/relay/{session_id}/{rest}".to_owned(),
        other => other.to_owned(),
    }
}

/// Replaces the parameters with an example value.
fn example(path: &str) -> String {
    path.split('/').map(|part| if part.starts_with('{') { "x" } else { part }).collect::<Vec<_>>().join("/")
}

/// Every documented operation, with ids in place of the parameters.
pub fn operations() -> Vec<(Method, String)> {
    let mut operations = Vec::new();
    for (path, methods) in paths() {
        let path = example(&path.replace("{sandbox_id}", "sb_00000000000000000000000000"));
        let path = path.replace("/relay/x", "/relay/ssn_00000000000000000000000000");
        let path = path.replace("/sessions/x", "/sessions/ssn_00000000000000000000000000");
        for method in methods.as_object().unwrap().keys() {
            operations.push((Method::from_bytes(method.to_ascii_uppercase().as_bytes()).unwrap(), path.clone()));
        }
    }
    operations
}

#[tokio::test]
async fn the_routes_of_the_router_and_of_the_document_are_the_same() {
    let world = World::new();
    let broker = world.start().await;
    let anyone = Client { addr: broker.addr, key: None };
    let mut real = BTreeMap::new();
    for path in cobox_broker::paths() {
        // An unknown method is answered with the list of allowed ones; the gateway accepts any.
        let answer = anyone.call(Method::from_bytes(b"BREW").unwrap(), &example(&path), None, &[]).await;
        let methods: BTreeSet<String> = match answer.headers.get("allow") {
            // HEAD is available with every GET and not documented separately.
            Some(allowed) => allowed.to_str().unwrap().split(',').map(|m| m.trim().to_ascii_lowercase()).filter(|m| m != "head").collect(),
            None => METHODS.map(str::to_owned).into(),
        };
        real.insert(spelled(&path), methods);
    }
    let documented: BTreeMap<String, BTreeSet<String>> =
        paths().map(|(path, operations)| (path.clone(), operations.as_object().unwrap().keys().cloned().collect())).collect();
    for (path, methods) in &real {
        assert_eq!(documented.get(path), Some(methods), "{path}: document it in crates/broker/src/http/openapi, then run `make openapi`");
    }
    let imagined: Vec<_> = documented.keys().filter(|path| !real.contains_key(*path)).collect();
    assert!(imagined.is_empty(), "the document has routes that don't exist: {imagined:?}");
}

#[tokio::test]
async fn the_document_is_public_and_marks_routes_that_need_a_key() {
    let world = World::new();
    let broker = world.start().await;
    let anyone = Client { addr: broker.addr, key: None };
    let served = anyone.get("/openapi.json").await;
    assert_eq!(served.headers["content-type"], "application/json");
    assert_eq!(served.ok(200), *DOCUMENT);
    for (path, operations) in paths() {
        for (method, operation) in operations.as_object().unwrap() {
            let is_open = operation["security"].as_array().unwrap().is_empty();
            let method = Method::from_bytes(method.to_ascii_uppercase().as_bytes()).unwrap();
            let path = example(&path.replace("{sandbox_id}", "sb_00000000000000000000000000"));
            let path = path.replace("/relay/x", "/relay/ssn_00000000000000000000000000");
            let path = path.replace("/sessions/x", "/sessions/ssn_00000000000000000000000000");
            let answer = anyone.call(method.clone(), &path, None, &[]).await;
            let is_refused = answer.status == StatusCode::UNAUTHORIZED;
            // The webhook's signature is documented as a parameter.
            assert_eq!(is_refused, !is_open, "{method} {path}: {}", answer.status);
        }
    }
}

#[tokio::test]
async fn a_path_that_is_not_utf8_is_refused_with_the_error_envelope() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    for path in ["/threads/%ff/sandbox", "/v1/sandboxes/%c3%28", "/v1/sandbox/sessions/%80"] {
        assert_eq!(ann.get(path).await.error(400), "INVALID_REQUEST", "{path}");
    }
    assert_eq!(ann.get("/v1/sandboxes?limit=%ff").await.error(400), "INVALID_REQUEST");
}

/// Every operation of the broker's own routes. The gateway's routes belong to boxd, and the LangSmith routes accept
/// anything that those SDKs send.
fn own_operations() -> impl Iterator<Item = (Method, String, &'static Value)> {
    paths().flat_map(|(path, operations)| {
        operations.as_object().unwrap().iter().filter_map(move |(method, operation)| {
            let is_own = !["gateway", "langsmith"].contains(&operation["tags"][0].as_str().unwrap());
            let path = example(path).replace("/sessions/x", "/sessions/ssn_00000000000000000000000000");
            is_own.then(|| (Method::from_bytes(method.to_ascii_uppercase().as_bytes()).unwrap(), path, operation))
        })
    })
}

#[tokio::test]
async fn an_unknown_query_parameter_is_refused_by_name_on_every_route() {
    let world = World::new();
    let broker = world.start().await;
    let admin = broker.key("root", PrincipalKind::Operator).await;
    for (method, path, _) in own_operations() {
        let answer = admin.call(method.clone(), &format!("{path}?restrict=1"), None, &[]).await;
        let message = answer.message();
        assert_eq!(answer.error(400), "INVALID_REQUEST", "{method} {path}");
        assert!(message.starts_with("restrict: is not a query parameter of this route"), "{method} {path}: {message}");
    }
}

#[tokio::test]
async fn an_unknown_field_is_refused_by_name_on_every_route_that_takes_a_body() {
    let world = World::new();
    let broker = world.start().await;
    let admin = broker.key("root", PrincipalKind::Operator).await;
    let mut count = 0;
    for (method, path, operation) in own_operations() {
        let content = operation["requestBody"]["content"].as_object();
        // The form has its own test below, and a webhook is refused because of its signature first.
        let is_json = content.is_none_or(|content| content.contains_key("application/json")) && path != "/webhooks/threads";
        if !is_json || [Method::GET, Method::DELETE].contains(&method) {
            continue;
        }
        let answer = admin.call(method.clone(), &path, Some(json!({ "restrict": ["ls"] })), &[]).await;
        let message = answer.message();
        assert_eq!(answer.error(400), "INVALID_REQUEST", "{method} {path}");
        assert!(message.starts_with("restrict: is not a field of this request"), "{method} {path}: {message}");
        count += 1;
    }
    assert!(count > 15, "only {count} routes were tried");
}

#[tokio::test]
async fn routes_without_a_body_refuse_one_after_authentication() {
    let world = World::new();
    let broker = world.start().await;
    let admin = broker.key("root", PrincipalKind::Operator).await;
    let anyone = Client { key: None, ..admin.clone() };
    let watched = admin.ensure("watched").await;
    let mut count = 0;
    for (method, path, operation) in own_operations() {
        let needs_key = operation["security"].as_array().is_some_and(|security| !security.is_empty());
        if operation.get("requestBody").is_some() || !needs_key {
            continue;
        }
        // A stream finds its session before it reads anything else, and does not end.
        let is_stream = path.ends_with("/events");
        let path = if is_stream { format!("{}/events", session_path(&watched)) } else { path };
        let with = |caller: &Client, body: Value| {
            let (caller, method, path) = (caller.clone(), method.clone(), path.clone());
            async move { caller.call(method, &path, Some(body), &[]).await }
        };
        assert_eq!(with(&anyone, json!({ "dry_run": true })).await.error(401), "UNAUTHENTICATED", "{method} {path}");
        let answer = with(&admin, json!({ "dry_run": true })).await;
        let message = answer.message();
        assert_eq!(answer.error(400), "INVALID_REQUEST", "{method} {path}");
        assert!(message.starts_with("dry_run: is not a field of this request"), "{method} {path}: {message}");
        assert!(is_stream || !with(&admin, json!({})).await.message().contains("takes no body"), "{method} {path}");
        count += 1;
    }
    assert!(count > 15, "only {count} routes were tried");
    // The request for a dry run was refused and had no effect.
    let made = admin.ensure("t").await;
    assert_eq!(
        admin.call(Method::DELETE, &session_path(&made), Some(json!({ "keep_files": true })), &[]).await.error(400),
        "INVALID_REQUEST"
    );
    assert_eq!(admin.get(&session_path(&made)).await.ok(200)["session_id"], made["session_id"]);
}

#[tokio::test]
async fn an_unknown_restriction_is_refused() {
    let world = World::new();
    let broker = world.start().await;
    let admin = broker.key("root", PrincipalKind::Operator).await;
    let made = admin.ensure("t").await;
    let delegate = format!("{}/delegate", session_path(&made));
    for (path, body, field) in [
        (delegate.as_str(), json!({ "capabilities": ["exec"], "commands": ["ls"] }), "commands"),
        (&delegate, json!({ "capabilities": ["exec"], "actor": { "type": "agent", "only": "ls" } }), "actor.only"),
        ("/v1/sandbox/sessions", json!({ "scope": { "type": "thread", "id": "t", "only": "ls" }, "mode": "ensure" }), "only"),
        ("/v1/sandboxes", json!({ "resources": { "network": false } }), "network"),
    ] {
        let answer = admin.post(path, body).await;
        let message = answer.message();
        assert_eq!(answer.error(400), "INVALID_REQUEST");
        assert!(message.starts_with(&format!("{field}: is not a field of this request")), "{message}");
    }
    let request = http::Request::post("/internal/tokens/introspect").body("token=t&only=x".into()).unwrap();
    let answer = admin.send(request).await;
    assert!(answer.message().starts_with("only: is not a field"), "{}", answer.message());
    assert_eq!(answer.error(400), "INVALID_REQUEST");
}

#[tokio::test]
async fn the_audit_is_filtered_by_jti() {
    let world = World::new();
    let broker = world.start().await;
    let admin = broker.key("root", PrincipalKind::Operator).await;
    let made = admin.ensure("t").await;
    let narrow = admin.post(&format!("{}/delegate", session_path(&made)), json!({ "capabilities": ["exec"] })).await.ok(200);
    let jti = narrow["jti"].as_str().unwrap();
    let found = admin.get(&format!("/v1/audit?jti={jti}")).await.ok(200);
    let items = found["items"].as_array().unwrap();
    assert!(!items.is_empty() && items.iter().all(|item| item["jti"] == narrow["jti"]), "{items:?}");
    assert_eq!(found, admin.get(&format!("/v1/audit?token={jti}")).await.ok(200));
    assert_eq!(admin.get(&format!("/v1/audit?token={jti}&jti={jti}")).await.error(400), "INVALID_REQUEST");
}

#[test]
fn every_request_schema_of_the_document_is_closed() {
    fn open_objects(schema: &Value, at: &str, open: &mut Vec<String>, closed: &mut BTreeSet<String>) {
        match schema.get("$ref").and_then(Value::as_str) {
            Some(reference) => open_objects(DOCUMENT.pointer(reference.trim_start_matches('#')).unwrap(), at, open, closed),
            None => {
                if let Some(fields) = schema["properties"].as_object() {
                    if schema["additionalProperties"] == Value::Bool(false) {
                        closed.insert(at.to_owned());
                    } else {
                        open.push(at.to_owned());
                    }
                    fields.iter().for_each(|(name, field)| open_objects(field, &format!("{at}.{name}"), open, closed));
                }
                for kind in ["anyOf", "oneOf", "allOf"] {
                    schema[kind].as_array().into_iter().flatten().for_each(|other| open_objects(other, at, open, closed));
                }
            }
        }
    }
    let (mut open, mut closed) = (Vec::new(), BTreeSet::new());
    for (method, path, operation) in own_operations() {
        if let Some(schema) = operation.pointer("/requestBody/content/application~1json/schema") {
            open_objects(schema, &format!("{method} {path}"), &mut open, &mut closed);
        }
    }
    // `scope` and `actor` are parsed by hand, because responses contain them too; see negotiating.rs.
    open.retain(|at| !at.ends_with(".scope") && !at.ends_with(".actor"));
    // A schema combined with a closed object, such as one that lists required fields, permits no further fields.
    open.retain(|at| !closed.contains(at));
    assert!(open.is_empty(), "add deny_unknown_fields to these requests: {open:?}");
}
