//! `/dp/…` and `/v1/sandbox/relay/…`: requests forwarded to boxd in a sandbox, whose own document describes the
//! responses.

use cobox_openapi::{Operation, Parameter};
use serde_json::json;

const ABOUT: &str = "The rest of the path goes to boxd as it is, bodies and WebSockets are streamed. An API key is swapped for a token and goes \
no further. Answers of boxd pass with their status, `nosniff` and a `sandbox` policy; errors of the gateway itself have the envelope.";

pub fn routes() -> Vec<Operation> {
    let sandbox = || Parameter::path("sandbox_id", "The sandbox's id.").of(json!({ "$ref": "#/components/schemas/SandboxId" }));
    let session = || Parameter::path("session_id", "The session's id.").of(json!({ "$ref": "#/components/schemas/SessionId" }));
    let rest = || Parameter::path("rest", "boxd's own path, such as `v1/exec`; its slashes stay.");
    let mut routes = Vec::new();
    for (method, of_sandbox, of_session) in [
        ("get", "sandboxGet", "relayGet"),
        ("head", "sandboxHead", "relayHead"),
        ("post", "sandboxPost", "relayPost"),
        ("put", "sandboxPut", "relayPut"),
        ("patch", "sandboxPatch", "relayPatch"),
        ("delete", "sandboxDelete", "relayDelete"),
        ("options", "sandboxOptions", "relayOptions"),
    ] {
        routes.push(pass(method, "/dp/{sandbox_id}/{rest}", of_sandbox, "To a sandbox").with([sandbox(), rest()]));
        routes.push(pass(method, "/v1/sandbox/relay/{session_id}/{rest}", of_session, "To a session's sandbox").with([session(), rest()]));
    }
    routes
}

fn pass(method: &'static str, path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    Operation::new(method, path, id, summary)
        .tag("gateway")
        .about(ABOUT)
        .behind(&["token", "key", "keyHeader"])
        .gives_anything("What boxd answers, or the gateway's refusal.")
}
