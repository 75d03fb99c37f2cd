//! OpenAPI operations of `/internal/…`, for operators.

use cobox_openapi::{Operation, Parameter, read};
use cobox_protocol::{
    ErrorCode::*,
    token::{Introspection, RevokeRequest, RevokeResponse, RotateKeyRequest, RotateKeyResponse},
};

use super::keyed;

/// RFC 7662's form.
#[derive(schemars::JsonSchema)]
#[allow(dead_code, reason = "says what the form has in it")]
struct IntrospectForm {
    token: String,
}

pub fn routes() -> Vec<Operation> {
    let sandbox = || Parameter::path("id", "The sandbox's id.");
    let routes = vec![
        keyed("post", "/internal/tokens/introspect", "introspect", "What a token says, and whether it counts")
            .takes_as("application/x-www-form-urlencoded", read::<IntrospectForm>())
            .gives::<Introspection>(200, "Of one that doesn't count only that.")
            .fails(&[TooLarge]),
        keyed("get", "/internal/tokens/{token}", "lookAtToken", "The same, with the token in the path, which no log shows")
            .with([Parameter::path("token", "The token.")])
            .gives::<Introspection>(200, "Of one that doesn't count only that."),
        keyed("post", "/internal/tokens/revoke", "revoke", "End tokens, and the streams that are open with them")
            .takes::<RevokeRequest>()
            .gives::<RevokeResponse>(200, "They have ended.")
            .fails(&[SessionNotFound, SandboxNotFound, KeyNotFound, PrincipalNotFound]),
        keyed("post", "/internal/sandboxes/{id}/rotate-key", "rotateKey", "Give a sandbox its next key")
            .with([sandbox()])
            .takes::<RotateKeyRequest>()
            .body_optional()
            .gives::<RotateKeyResponse>(200, "Tokens are signed with it from now on.")
            .fails(&[SandboxNotFound, SandboxConflict]),
        keyed("delete", "/internal/sandboxes/{id}", "endSandbox", "End a sandbox, whoever it belongs to")
            .with([sandbox()])
            .gives_nothing(204, "It has ended.")
            .fails(&[SandboxNotFound]),
    ];
    routes.into_iter().map(|route| route.tag("operators").fails(&[Forbidden])).collect()
}
