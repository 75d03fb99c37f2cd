//! OpenAPI operations of `/internal/…`, for operators.

use cobox_openapi::{Operation, Parameter, read};
use cobox_protocol::{
    ErrorCode::*,
    token::{Introspection, RevokeRequest, RevokeResponse, RotateKeyRequest, RotateKeyResponse},
};

use super::keyed;

/// RFC 7662's form.
#[derive(schemars::JsonSchema)]
#[allow(dead_code, reason = "documents the fields of the form")]
struct IntrospectForm {
    token: String,
}

pub fn routes() -> Vec<Operation> {
    let sandbox = || Parameter::path("id", "The sandbox's id.");
    let routes = vec![
        keyed("post", "/internal/tokens/introspect", "introspect", "Introspect a token")
            .request_body_as("application/x-www-form-urlencoded", read::<IntrospectForm>())
            .response::<Introspection>(200, "The token's claims; for an inactive token only `active`.")
            .errors(&[TooLarge]),
        keyed("get", "/internal/tokens/{token}", "lookAtToken", "Introspect a token in the path, which is never logged")
            .with([Parameter::path("token", "The token.")])
            .response::<Introspection>(200, "The token's claims; for an inactive token only `active`."),
        keyed("post", "/internal/tokens/revoke", "revoke", "Revoke tokens and close the streams that use them")
            .request_body::<RevokeRequest>()
            .response::<RevokeResponse>(200, "Revoked.")
            .errors(&[SessionNotFound, SandboxNotFound, KeyNotFound, PrincipalNotFound]),
        keyed("post", "/internal/sandboxes/{id}/rotate-key", "rotateKey", "Rotate a sandbox's token key")
            .with([sandbox()])
            .request_body::<RotateKeyRequest>()
            .body_optional()
            .response::<RotateKeyResponse>(200, "Rotated; new tokens are signed with the new key.")
            .errors(&[SandboxNotFound, SandboxConflict]),
        keyed("delete", "/internal/sandboxes/{id}", "endSandbox", "Delete a sandbox of any owner")
            .with([sandbox()])
            .empty_response(204, "Deleted.")
            .errors(&[SandboxNotFound]),
    ];
    routes.into_iter().map(|route| route.tag("operators").errors(&[Forbidden])).collect()
}
