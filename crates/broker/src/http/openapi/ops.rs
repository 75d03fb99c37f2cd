//! OpenAPI operations of `/healthz`, `/readyz`, `/metrics` and `/openapi.json`, for the operation of a broker.

use cobox_openapi::{Operation, Shape};
use cobox_protocol::ErrorCode::*;
use serde_json::json;

use super::keyed;

pub fn routes() -> Vec<Operation> {
    let open = |path, id, summary| Operation::new("get", path, id, summary).tag("operations").errors(&[InvalidRequest]);
    let status =
        |word: &str| Shape::Plain(json!({ "type": "object", "required": ["status"], "properties": { "status": { "const": word } } }));
    vec![
        open("/healthz", "health", "Check that the process is alive").response_as(200, "Alive.", "application/json", status("ok")),
        open("/readyz", "ready", "Check that the broker is ready to serve requests")
            .about(
                "If the broker is not ready, `details.checks` names which of `store`, `provider` and `node` failed, and `details.causes` \
                 the category of each cause; the full cause is in the log. `checks.clock` is `skewed`, with `clock_skew_seconds`, while \
                 the clocks of two brokers differ by more than 2 s; this alone doesn't make the broker unready.",
            )
            .response_as(200, "Ready.", "application/json", status("ready"))
            .errors(&[BackendUnavailable]),
        keyed("get", "/metrics", "metrics", "Get the metrics in the Prometheus text format")
            .tag("operations")
            .about("Requires an operator's key or the token in `metrics.token_file`; no credential if `metrics.public` is set.")
            .response_as(200, "The metrics.", "text/plain", Shape::Plain(json!({ "type": "string" })))
            .errors(&[Internal]),
        open("/openapi.json", "openapi", "Get this document").response_as(
            200,
            "The document.",
            "application/json",
            Shape::Plain(json!({ "type": "object", "required": ["openapi", "paths"] })),
        ),
    ]
}
