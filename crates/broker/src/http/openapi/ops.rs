//! OpenAPI operations of `/healthz`, `/readyz`, `/metrics` and `/openapi.json`, for the operation of a broker.

use cobox_openapi::{Operation, Shape};
use cobox_protocol::ErrorCode::*;
use serde_json::json;

use super::keyed;

pub fn routes() -> Vec<Operation> {
    let open = |path, id, summary| Operation::new("get", path, id, summary).tag("operations").fails(&[InvalidRequest]);
    let status =
        |word: &str| Shape::Plain(json!({ "type": "object", "required": ["status"], "properties": { "status": { "const": word } } }));
    vec![
        open("/healthz", "health", "Whether the process answers").gives_as(200, "It does.", "application/json", status("ok")),
        open("/readyz", "ready", "Whether it can do its work")
            .about("`details.checks` of a refusal says which of `store`, `provider` and `node` failed, and `details.causes` the category of each cause; the log has the whole cause. `checks.clock` is `skewed` while the clocks of two brokers differ by more than 2 s, with `clock_skew_seconds`; that alone is no refusal.")
            .gives_as(200, "It can.", "application/json", status("ready"))
            .fails(&[BackendUnavailable]),
        keyed("get", "/metrics", "metrics", "What it counts, in Prometheus' text")
            .tag("operations")
            .about("With an operator's key, or the token in `metrics.token_file`; without one where `metrics.public` is set.")
            .gives_as(200, "The metrics.", "text/plain", Shape::Plain(json!({ "type": "string" })))
            .fails(&[Internal]),
        open("/openapi.json", "openapi", "This document").gives_as(
            200,
            "It.",
            "application/json",
            Shape::Plain(json!({ "type": "object", "required": ["openapi", "paths"] })),
        ),
    ]
}
