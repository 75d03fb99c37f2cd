//! `/dp/…` and `/v1/sandbox/relay/…`: requests forwarded to boxd in a sandbox, whose own document describes the
//! responses.

use cobox_openapi::{Operation, Parameter};
use serde_json::json;

const ABOUT: &str = "Forwards the rest of the path to boxd unchanged, and streams bodies and WebSockets. An API key is exchanged for a \
                     token and not forwarded. Responses of boxd keep their status and get `nosniff` and a `sandbox` content security \
                     policy; errors of the gateway have the usual envelope.";

pub fn routes() -> Vec<Operation> {
    let sandbox = || Parameter::path("sandbox_id", "The sandbox's id.").of(json!({ "$ref": "#/components/schemas/SandboxId" }));
    let session = || Parameter::path("session_id", "The session's id.").of(json!({ "$ref": "#/components/schemas/SessionId" }));
    let rest = || Parameter::path("rest", "A path of boxd, such as `v1/exec`; it may contain slashes.");
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
        routes.push(pass(method, "/dp/{sandbox_id}/{rest}", of_sandbox, "Forward a request to a sandbox").with([sandbox(), rest()]));
        routes.push(
            pass(method, "/v1/sandbox/relay/{session_id}/{rest}", of_session, "Forward a request to a session's sandbox")
                .with([session(), rest()]),
        );
    }
    routes
}

fn pass(method: &'static str, path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    Operation::new(method, path, id, summary)
        .tag("gateway")
        .about(ABOUT)
        .security(&["token", "key", "keyHeader"])
        .any_response("The response of boxd, or an error of the gateway.")
}
