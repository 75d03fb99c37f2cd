//! `openapi/boxd.json`: made from the types that go over the wire and one table of routes, and compared with what boxd really serves.
//!
//! `make openapi` writes it.

mod operation;
mod routes;
#[path = "../support/mod.rs"]
mod support;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use http::Method;
use serde_json::{Value, json};

use self::{
    operation::{Operation, Schemas},
    support::TestBoxd,
};

/// Set, the test writes the document instead of comparing it.
const WRITE: &str = "COBOX_WRITE_OPENAPI";
const ABOUT: &str = "What a human's and an agent's client say to boxd, the daemon inside a sandbox. Every error has the same envelope, but on the \
`langsmith` routes, which have that SDK's. Every answer has `X-Request-Id`. Names that are not UTF-8 are percent-encoded in URLs and come beside \
the text as `…_b64` in JSON.";

fn document() -> Value {
    let mut schemas = Schemas::default();
    let mut paths: BTreeMap<&str, BTreeMap<&str, Value>> = BTreeMap::new();
    for operation in routes::all() {
        let twice = paths.entry(operation.path).or_default().insert(operation.method, operation.render(&mut schemas));
        assert!(twice.is_none(), "{} {} is in the table twice", operation.method, operation.path);
    }
    let (schemas, refusals) = schemas.into_components();
    json!({
        "openapi": "3.1.0",
        "info": { "title": "boxd", "version": "1", "description": ABOUT, "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" } },
        "servers": [{
            "url": "{dataplane}",
            "description": "As the broker told it, without its `/v1`.",
            "variables": { "dataplane": { "default": "http://127.0.0.1:7717/dp/sb_00000000000000000000000000" } },
        }],
        "tags": [
            { "name": "health" },
            { "name": "exec", "description": "Commands and what runs." },
            { "name": "shells", "description": "Terminals that human and agent share." },
            { "name": "files", "description": "Files, one or many." },
            { "name": "tree", "description": "The file system around them." },
            { "name": "langsmith", "description": "The LangSmith sandbox SDK's own routes." },
        ],
        "security": [{ "token": [] }],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": refusals,
            "securitySchemes": {
                "token": {
                    "type": "http", "scheme": "bearer", "bearerFormat": "JWT",
                    "description": "A sandbox's token from the broker; the words of a requirement are the capabilities it must have.",
                },
            },
        },
    })
}

fn file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../openapi/boxd.json")
}

#[test]
fn the_document_that_is_checked_in_is_what_the_code_says() {
    let made = serde_json::to_string_pretty(&document()).unwrap() + "\n";
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(file(), &made).unwrap();
    }
    let kept = std::fs::read_to_string(file()).unwrap_or_default();
    let differs = made.lines().zip(kept.lines()).position(|(made, kept)| made != kept);
    assert!(made == kept, "openapi/boxd.json is not what the code says (line {differs:?}); run `make openapi` and look at the difference");
}

#[test]
fn every_reference_leads_somewhere_and_every_name_is_used_once() {
    fn references<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
        match value {
            Value::Object(fields) => fields.iter().for_each(|(name, value)| match value {
                Value::String(target) if name == "$ref" => drop(found.insert(target)),
                other => references(other, found),
            }),
            Value::Array(items) => items.iter().for_each(|item| references(item, found)),
            _ => {}
        }
    }
    let document = document();
    let mut found = BTreeSet::new();
    references(&document, &mut found);
    for target in found {
        assert!(document.pointer(target.trim_start_matches('#')).is_some(), "{target}");
    }
    let mut ids = BTreeSet::new();
    for (path, operations) in document["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            assert!(ids.insert(operation["operationId"].as_str().unwrap()), "{method} {path} has another's operationId");
        }
    }
}

/// The methods of each path, as the router has them: a path is asked for with a method nobody has, and answers with those it takes.
async fn served(boxd: &TestBoxd) -> BTreeMap<&'static str, BTreeSet<String>> {
    let mut served = BTreeMap::new();
    for path in boxd::server::client_paths() {
        let answer = boxd.call(Method::from_bytes(b"BREW").unwrap(), &example(path)).without("authorization").send().await;
        assert_eq!(answer.status.as_u16(), 405, "{path}");
        let methods = answer.header("allow").split(',').map(|m| m.trim().to_ascii_lowercase()).collect();
        served.insert(path, methods);
    }
    served
}

/// A path with something in place of its parameters.
fn example(path: &str) -> String {
    path.replace("{*path}", "workspace/a").replace("{path}", "workspace/a").replace("{id}", "x").replace("{shell}", "x")
}

/// How the document spells a path of the router; `None` where it stands for the same as another.
fn spelled(path: &str, method: &str) -> Option<String> {
    // These are files of the root too, and the root itself, which `/v1/files/{path}` describes.
    let is_a_file = match path {
        "/v1/files" | "/v1/files/" => true,
        "/v1/files/upload" => method != "post",
        "/v1/files/download" => method != "get",
        _ => false,
    };
    (!is_a_file).then(|| path.replace("{*", "{"))
}

#[tokio::test]
async fn the_routes_of_the_router_and_of_the_document_are_the_same() {
    let boxd = TestBoxd::start();
    let mut real = BTreeSet::new();
    for (path, methods) in served(&boxd).await {
        for method in methods {
            if let Some(spelled) = spelled(path, &method) {
                // A router answers HEAD wherever there is a GET; told is where that is of use.
                if method != "head" || path.starts_with("/v1/files") || path == "/download" {
                    real.insert((spelled, method));
                }
            }
        }
    }
    let documented: BTreeSet<(String, String)> = routes::all().iter().map(|o| (o.path.to_owned(), o.method.to_owned())).collect();
    let undocumented: Vec<_> = real.difference(&documented).collect();
    let imagined: Vec<_> = documented.difference(&real).collect();
    assert!(undocumented.is_empty(), "add to tests/openapi/routes: {undocumented:?}");
    assert!(imagined.is_empty(), "no such route: {imagined:?}");
}

#[tokio::test]
async fn every_documented_route_wants_a_token_and_the_capability_it_names() {
    let boxd = TestBoxd::start();
    let operations: Vec<Operation> = routes::all();
    for operation in operations.iter().filter(|o| !o.needed().is_empty()) {
        let (method, path) = (Method::from_bytes(operation.method.to_ascii_uppercase().as_bytes()).unwrap(), example(operation.path));
        let stranger = boxd.call(method.clone(), &path).without("authorization");
        let stranger = if operation.is_socket() { as_socket(stranger) } else { stranger };
        let answer = stranger.send().await;
        // A socket may still say who it is in its first frame.
        assert_eq!(answer.status.as_u16(), if operation.is_socket() { 101 } else { 401 }, "{method} {path}: {answer:?}");
        for missing in operation.needed() {
            let others = ["fs_read", "fs_write", "exec", "shell", "shell_observe"];
            let scope: Vec<&str> = others
                .into_iter()
                .filter(|word| *word != missing.word() && !(missing.word() == "shell_observe" && *word == "shell"))
                .collect();
            let call = boxd.call(method.clone(), &path).token(&boxd.token(&scope.join(" ")));
            let call = if operation.is_socket() { as_socket(call) } else { call };
            assert_eq!(call.send().await.status.as_u16(), 403, "{method} {path} without {missing}");
        }
    }
}

fn as_socket(call: support::Call<'_>) -> support::Call<'_> {
    let handshake = [
        ("connection", "upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA=="),
    ];
    handshake.into_iter().fold(call, |call, (name, value)| call.header(name, value))
}
