//! Generates `openapi/broker.json`, which describes every route of the broker, from the types on the wire and the
//! tables in this folder.
//!
//! To add a route, add its [`Operation`] to the table of its resource and run `make openapi`. Tests fail if router,
//! table and file disagree, or if a test of the broker receives a response that the document lacks.

pub mod field_schemas;
mod gateway;
mod internal;
mod keys;
mod langsmith;
mod langsmith_resources;
mod ops;
mod resources;
mod sandboxes;
mod sessions;
mod shares;
mod threads;
mod tokens;

use std::path::PathBuf;

use cobox_openapi::{Document, Operation, Parameter, assert_checked_in, assert_valid};
use cobox_protocol::ErrorCode;
use serde_json::{Value, json};

const ABOUT: &str = "The control plane: which sandbox a thread uses, which principals have access, and for how long. Every error has the \
                     same envelope, and every response has `X-Request-Id`; only requests that aren't valid HTTP are refused without them. \
                     boxd's own document describes the requests that the gateway forwards.";

/// Errors that every route behind an API key may return. The last two apply to callers with an issuer's token: the
/// token's principal exists here in another kind, or the issuer can't be reached.
const API_KEY_ERRORS: [ErrorCode; 7] = [
    ErrorCode::InvalidRequest,
    ErrorCode::Unauthenticated,
    ErrorCode::RateLimited,
    ErrorCode::Internal,
    ErrorCode::BackendUnavailable,
    ErrorCode::Forbidden,
    ErrorCode::ProviderUnavailable,
];
/// Errors of routes that start a sandbox.
const START_ERRORS: [ErrorCode; 2] = [ErrorCode::SandboxStarting, ErrorCode::ProviderUnavailable];

fn operations() -> Vec<Operation> {
    [
        sessions::routes(),
        tokens::routes(),
        shares::routes(),
        threads::routes(),
        sandboxes::routes(),
        resources::routes(),
        langsmith::routes(),
        internal::routes(),
        keys::routes(),
        ops::routes(),
        gateway::routes(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn document() -> Value {
    let document = Document {
        title: "Cobox broker",
        about: ABOUT,
        server: json!({ "url": "/" }),
        tags: &[
            ("sessions", "Access to the sandbox of a thread or another scope."),
            ("threads", "The same sessions, in the request and response format of the first clients."),
            ("sandboxes", "Sandboxes, with or without a session."),
            ("kinds", "Sources of sandboxes: templates, snapshots and volumes."),
            ("langsmith", "The LangSmith sandbox API, with its request, response and error formats."),
            ("operators", "Keys, principals, audit records and revocation."),
            ("gateway", "Access to the dataplane of every sandbox."),
            ("operations", "Health and documentation."),
        ],
        security: json!([{ "key": [] }, { "keyHeader": [] }]),
        security_schemes: json!({
            "key": { "type": "http", "scheme": "bearer", "description": "An API key, or a token of the configured OIDC issuer." },
            "keyHeader": { "type": "apiKey", "in": "header", "name": "X-Api-Key", "description": "The same credential in its own header." },
            "token": { "type": "http", "scheme": "bearer", "bearerFormat": "JWT", "description": "A sandbox's token, at the gateway." },
        }),
    };
    document.render(&operations())
}

/// A route that requires an API key.
fn keyed(method: &'static str, path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    Operation::new(method, path, id, summary).security(&["key", "keyHeader"]).errors(&API_KEY_ERRORS)
}

fn session_id() -> Parameter {
    Parameter::path("id", "The session's id.").of(json!({ "$ref": "#/components/schemas/SessionId" }))
}

fn page_of() -> [Parameter; 2] {
    [
        Parameter::query("limit", "Maximum number of items in the page.")
            .of(json!({ "type": "integer", "minimum": 1, "maximum": 200, "default": 50 })),
        Parameter::query("cursor", "The `next_cursor` of the previous page."),
    ]
}

fn tags() -> Parameter {
    Parameter::query("tag", "`key:value`, or `key` for any value. May be repeated: an item must match all of them.").of(json!({
        "type": "array", "maxItems": 8, "items": { "type": "string", "pattern": "^[A-Za-z0-9_./-]{1,64}([:=]|$)" },
    }))
}

fn flag(name: &'static str, about: &'static str) -> Parameter {
    Parameter::query(name, about).of(json!({ "type": "boolean" }))
}

fn prefer() -> Parameter {
    Parameter::header("Prefer", "`wait=N`: seconds to wait for a start; the default is 10, the maximum 55.")
}

fn thread_authorization() -> Parameter {
    Parameter::header("X-Thread-Authorization", "Your credential for the thread authority, if one is configured.")
}

fn idempotency_key() -> Parameter {
    Parameter::header("Idempotency-Key", "For 24 hours, the same request with the same key returns the same session.")
        .of(json!({ "type": "string", "minLength": 1, "maxLength": 256, "pattern": "^[!-~]([ -~]*[!-~])?$" }))
}

#[test]
fn the_checked_in_document_matches_the_code() {
    assert_checked_in(&document(), &PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../openapi/broker.json"));
}

#[test]
fn every_reference_resolves_and_every_name_is_unique() {
    assert_valid(&document());
}
