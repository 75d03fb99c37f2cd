//! The document of the broker's routes, against the broker: no route and no answer that isn't in it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use http::{Method, StatusCode};
use serde_json::Value;

use crate::harness::{Client, World};

static DOCUMENT: LazyLock<Value> = LazyLock::new(|| serde_json::from_str(include_str!("../../../../openapi/broker.json")).unwrap());

const METHODS: [&str; 7] = ["get", "head", "post", "put", "patch", "delete", "options"];

fn paths() -> impl Iterator<Item = (&'static String, &'static Value)> {
    DOCUMENT["paths"].as_object().unwrap().iter()
}

/// Whether a path is one of a template; the last parameter of the gateway's takes all that is left.
fn fits(template: &str, path: &str) -> bool {
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

/// Called with every answer any test gets: what a client may meet is written down.
#[track_caller]
pub fn must_be_documented(method: &Method, path: &str, status: StatusCode) {
    let Some((template, operations)) = paths().find(|(template, _)| fits(template, path)) else { return };
    let Some(operation) = operations.get(method.as_str().to_ascii_lowercase()) else { return };
    let answers = &operation["responses"];
    assert!(
        answers.get(status.as_str()).is_some() || answers.get("default").is_some(),
        "{method} {path} answered {status}, which `{template}` doesn't have in openapi/broker.json; add it in crates/broker/src/http/openapi"
    );
}

/// How the document spells a path of the router.
fn spelled(path: &str) -> String {
    match path {
        "/dp/{*rest}" => "/dp/{sandbox_id}/{rest}".to_owned(),
        "/v1/sandbox/relay/{*rest}" => "/v1/sandbox/relay/{session_id}/{rest}".to_owned(),
        other => other.to_owned(),
    }
}

/// Something in place of the parameters.
fn example(path: &str) -> String {
    path.split('/').map(|part| if part.starts_with('{') { "x" } else { part }).collect::<Vec<_>>().join("/")
}

#[tokio::test]
async fn the_routes_of_the_router_and_of_the_document_are_the_same() {
    let world = World::new();
    let broker = world.start().await;
    let anyone = Client { addr: broker.addr, key: None };
    let mut real = BTreeMap::new();
    for path in cobox_broker::paths() {
        // A method that nobody has is answered with those there are; the gateway takes any.
        let answer = anyone.call(Method::from_bytes(b"BREW").unwrap(), &example(path), None, &[]).await;
        let methods: BTreeSet<String> = match answer.headers.get("allow") {
            // HEAD is there wherever GET is, and needs no telling.
            Some(allowed) => allowed.to_str().unwrap().split(',').map(|m| m.trim().to_ascii_lowercase()).filter(|m| m != "head").collect(),
            None => METHODS.map(str::to_owned).into(),
        };
        real.insert(spelled(path), methods);
    }
    let documented: BTreeMap<String, BTreeSet<String>> =
        paths().map(|(path, operations)| (path.clone(), operations.as_object().unwrap().keys().cloned().collect())).collect();
    for (path, methods) in &real {
        assert_eq!(documented.get(path), Some(methods), "{path}: tell of it in crates/broker/src/http/openapi, then `make openapi`");
    }
    let imagined: Vec<_> = documented.keys().filter(|path| !real.contains_key(*path)).collect();
    assert!(imagined.is_empty(), "no such route: {imagined:?}");
}

#[tokio::test]
async fn the_document_is_served_to_anybody_and_says_what_needs_a_key() {
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
            // The webhook's signature is a parameter like any other here.
            assert_eq!(is_refused, !is_open, "{method} {path}: {}", answer.status);
        }
    }
}

#[tokio::test]
async fn a_path_that_is_not_text_is_refused_like_anything_else() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    for path in ["/threads/%ff/sandbox", "/v1/sandboxes/%c3%28", "/v1/sandbox/sessions/%80"] {
        assert_eq!(ann.get(path).await.error(400), "INVALID_REQUEST", "{path}");
    }
    assert_eq!(ann.get("/v1/sandboxes?limit=%ff").await.error(400), "INVALID_REQUEST");
}
