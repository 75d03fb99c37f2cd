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
            .takes_as("application/x-www-form-urlencoded", read::<IntrospectForm>())
            .gives::<Introspection>(200, "The token's claims; for an inactive token only `active`.")
            .fails(&[TooLarge]),
        keyed("get", "/internal/tokens/{token}", "lookAtToken", "Introspect a token in the path, which is never logged")
            .with([Parameter::path("token", "The token.")])
            .gives::<Introspection>(200, "The token's claims; for an inactive token only `active`."),
        keyed("post", "/internal/tokens/revoke", "revoke", "Revoke tokens and close the streams that use them")
            .takes::<RevokeRequest>()
            .gives::<RevokeResponse>(200, "Revoked.")
            .fails(&[SessionNotFound, SandboxNotFound, KeyNotFound, PrincipalNotFound]),
        keyed("post", "/internal/sandboxes/{id}/rotate-key", "rotateKey", "Rotate a sandbox's token key")
            .with([sandbox()])
            .takes::<RotateKeyRequest>()
            .body_optional()
            .gives::<RotateKeyResponse>(200, "Rotated; new tokens are signed with the new key.")
            .fails(&[SandboxNotFound, SandboxConflict]),
        keyed("delete", "/internal/sandboxes/{id}", "endSandbox", "Delete a sandbox of any owner")
            .with([sandbox()])
            .gives_nothing(204, "Deleted.")
            .fails(&[SandboxNotFound]),
    ];
    routes.into_iter().map(|route| route.tag("operators").fails(&[Forbidden])).collect()
}
