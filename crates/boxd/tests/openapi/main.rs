//! Generates `openapi/boxd.json` from the protocol's types and a table of routes, and compares it with the routes that
//! boxd serves.
//!
//! `make openapi` writes the file.

mod routes;
#[path = "../support/mod.rs"]
mod support;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use cobox_openapi::{Document, Operation, assert_checked_in, assert_valid};
use cobox_protocol::{Capability, langsmith, route::ROUTES};
use http::Method;
use serde_json::{Value, json};

use self::support::TestBoxd;

const ABOUT: &str = "The API of boxd, the daemon inside a sandbox, for clients of humans and agents. All errors have the same envelope, except on the \
                   `langsmith` routes, which use the envelope of that SDK. Every response has `X-Request-Id`. Names that are not UTF-8 are \
                   percent-encoded in URLs and additionally returned as `…_b64` in JSON.";

fn document() -> Value {
    let document = Document {
        title: "boxd",
        about: ABOUT,
        server: json!({
            "url": "{dataplane}",
            "description": "As the broker returned it, without `/v1`.",
            "variables": { "dataplane": { "default": "http://127.0.0.1:7717/dp/sb_00000000000000000000000000" } },
        }),
        tags: &[
            ("health", "Health check."),
            ("exec", "Commands and processes."),
            ("shells", "Terminals that humans and agents share."),
            ("files", "Reading and writing files."),
            ("tree", "Directories, search and watching."),
            ("langsmith", "Routes of the LangSmith sandbox SDK."),
        ],
        security: json!([{ "token": [] }]),
        security_schemes: json!({
            "token": {
                "type": "http", "scheme": "bearer", "bearerFormat": "JWT",
                "description": "A sandbox's token, issued by the broker; the scopes of a security requirement are the capabilities that it must have.",
            },
        }),
    };
    document.render(&routes::all())
}

#[test]
fn the_checked_in_document_matches_the_code() {
    assert_checked_in(&document(), &PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../openapi/boxd.json"));
}

#[test]
fn every_reference_resolves_and_every_name_is_used_once() {
    assert_valid(&document());
}

/// The methods of each path according to the router: a request with an unknown method returns the allowed ones.
async fn served(boxd: &TestBoxd) -> BTreeMap<&'static str, BTreeSet<String>> {
    let mut served = BTreeMap::new();
    for path in boxd::routes::client_paths() {
        let answer = boxd.call(Method::from_bytes(b"BREW").unwrap(), &example(path)).without("authorization").send().await;
        assert_eq!(answer.status.as_u16(), 405, "{path}");
        let methods = answer.header("allow").split(',').map(|m| m.trim().to_ascii_lowercase()).collect();
        served.insert(path, methods);
    }
    served
}

/// A path with example values for its parameters.
fn example(path: &str) -> String {
    path.replace("{*path}", "workspace/a").replace("{path}", "workspace/a").replace("{id}", "x").replace("{shell}", "x")
}

/// The document's spelling of a router's path; `None` if it is an alias of another.
fn documented_path(path: &str, method: &str) -> Option<String> {
    // Files in the root, and the root itself, are described by `/v1/files/{path}`.
    let is_a_file = match path {
        "/v1/files" | "/v1/files/" => true,
        "/v1/files/upload" => method != "post",
        "/v1/files/download" => method != "get",
        _ => false,
    };
    (!is_a_file).then(|| path.replace("{*", "{"))
}

#[tokio::test]
async fn the_router_and_the_document_have_the_same_routes() {
    let boxd = TestBoxd::start();
    let mut real = BTreeSet::new();
    for (path, methods) in served(&boxd).await {
        for method in methods {
            if let Some(documented_path) = documented_path(path, &method) {
                // Routers answer HEAD wherever there is a GET. The document only lists HEAD where it is useful.
                if method != "head" || path.starts_with("/v1/files") || path == "/download" {
                    real.insert((documented_path, method));
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

#[test]
fn the_protocols_route_table_matches_the_document() {
    let known: BTreeSet<_> = ROUTES
        .iter()
        .map(|r| (r.template.to_owned(), r.method.to_ascii_lowercase(), r.needs.to_vec()))
        .map(with_capability_names)
        .collect();
    let documented: BTreeSet<_> =
        routes::all().iter().map(|o| (o.path.to_owned(), o.method.to_owned(), o.needed().to_vec())).map(with_capability_names).collect();
    assert_eq!(known, documented, "crates/protocol/src/route.rs and tests/openapi/routes agree");
}

fn with_capability_names((path, method, needs): (String, String, Vec<Capability>)) -> (String, String, Vec<&'static str>) {
    (path, method, needs.into_iter().map(Capability::as_str).collect())
}

#[tokio::test]
async fn every_documented_route_requires_a_token_with_its_capability() {
    let boxd = TestBoxd::start();
    let operations: Vec<Operation> = routes::all();
    for operation in operations.iter().filter(|o| !o.needed().is_empty()) {
        let (method, path) = (Method::from_bytes(operation.method.to_ascii_uppercase().as_bytes()).unwrap(), example(operation.path));
        let stranger = boxd.call(method.clone(), &path).without("authorization");
        let stranger = if operation.is_socket() { as_socket(stranger) } else { stranger };
        let answer = stranger.send().await;
        // A socket may still authenticate with its first frame.
        assert_eq!(answer.status.as_u16(), if operation.is_socket() { 101 } else { 401 }, "{method} {path}: {answer:?}");
        for missing in operation.needed() {
            let others = ["fs_read", "fs_write", "exec", "shell", "shell_observe"];
            let scope: Vec<&str> = others
                .into_iter()
                .filter(|word| *word != missing.as_str() && !(missing.as_str() == "shell_observe" && *word == "shell"))
                .collect();
            let call = boxd.call(method.clone(), &path).token(&boxd.token(&scope.join(" ")));
            let call = if operation.is_socket() { as_socket(call) } else { call };
            assert_eq!(call.send().await.status.as_u16(), 403, "{method} {path} without {missing}");
        }
    }
}

/// Sends an unknown query parameter and an unknown field to each of boxd's own routes.
#[tokio::test]
async fn unknown_fields_and_parameters_are_refused_by_name_on_every_route() {
    let boxd = TestBoxd::start();
    let document = document();
    let is_own = |o: &&Operation| langsmith::operation(o.path).is_none();
    for operation in routes::all().iter().filter(is_own) {
        let method = Method::from_bytes(operation.method.to_ascii_uppercase().as_bytes()).unwrap();
        let path = example(operation.path);
        let call = boxd.call(method.clone(), &format!("{path}?restrict=1"));
        let answer = if operation.is_socket() { as_socket(call) } else { call }.send().await;
        assert_eq!(answer.status.as_u16(), 400, "{method} {path}: {answer:?}");
        // A response to HEAD has no body.
        if method != Method::HEAD {
            let message = answer.refused(400, "INVALID_REQUEST");
            assert!(message.starts_with("restrict: is not a query parameter of this route"), "{method} {path}: {message}");
        }
        let route = &document["paths"][operation.path][operation.method];
        if route.pointer("/requestBody/content/application~1json").is_some() {
            let answer = boxd.call(method.clone(), &path).body(json!({ "restrict": ["ls"] }).to_string()).send().await;
            let message = answer.refused(400, "INVALID_REQUEST");
            assert!(message.starts_with("restrict: is not a field of this request"), "{method} {path}: {message}");
        }
    }
}

#[tokio::test]
async fn an_unexpected_body_is_refused_after_authentication_on_every_route() {
    let boxd = TestBoxd::start();
    std::fs::write(boxd.host("/workspace/a"), "kept").unwrap();
    let document = document();
    let is_own = |o: &&Operation| langsmith::operation(o.path).is_none() && !o.is_socket() && !o.needed().is_empty();
    for operation in routes::all().iter().filter(is_own) {
        if document["paths"][operation.path][operation.method].get("requestBody").is_some() {
            continue;
        }
        let method = Method::from_bytes(operation.method.to_ascii_uppercase().as_bytes()).unwrap();
        let path = example(operation.path);
        let call = || boxd.call(method.clone(), &path).body(r#"{"dry_run": true}"#);
        assert_eq!(call().without("authorization").send().await.status.as_u16(), 401, "{method} {path}");
        let answer = call().send().await.ok(400);
        if method != Method::HEAD {
            let message = answer.refused(400, "INVALID_REQUEST");
            assert!(message.starts_with("dry_run: is not a field of this request"), "{method} {path}: {message}");
        }
    }
    assert_eq!(std::fs::read(boxd.host("/workspace/a")).unwrap(), b"kept");
    boxd.delete("/v1/files/workspace/a").body("{}").send().await.ok(204);
}

#[test]
fn the_documented_query_parameters_are_the_accepted_ones() {
    let document = document();
    for route in ROUTES {
        let operation = &document["paths"][route.template][route.method.to_ascii_lowercase()];
        let parameters = operation["parameters"].as_array().into_iter().flatten().filter(|p| p["in"] == "query");
        let documented: BTreeSet<&str> = parameters.map(|p| p["name"].as_str().unwrap()).collect();
        assert_eq!(documented, route.query.iter().copied().collect(), "{} {}", route.method, route.template);
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
