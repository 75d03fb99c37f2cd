//! OpenAPI operations of `…/share`.

use cobox_openapi::{Operation, Parameter};
use cobox_protocol::{
    ErrorCode::*,
    session::Page,
    token::{PrincipalAccess, ShareInfo, ShareRequest},
};

use super::{keyed, session_id};

pub fn routes() -> Vec<Operation> {
    let routes = vec![
        keyed("post", "/v1/sandbox/sessions/{id}/share", "share", "Share a session with another principal")
            .about("For the session's owner and operators. Sharing again replaces the terms.")
            .request_body::<ShareRequest>()
            .response::<ShareInfo>(201, "Shared.")
            .response::<ShareInfo>(200, "Shared before; the new terms apply.")
            .errors(&[CapabilityDenied, PrincipalNotFound]),
        keyed("get", "/v1/sandbox/sessions/{id}/share", "listShares", "List the shares of a session")
            .response::<Page<ShareInfo>>(200, "All shares."),
        keyed("get", "/v1/sandbox/sessions/{id}/share/{principal}", "getPrincipalAccess", "Check whether and how a principal has access")
            .about("Covers the share of the session and every other access path. Check it before and after revoking a share.")
            .with([Parameter::path("principal", "The principal's name.")])
            .response::<PrincipalAccess>(200, "The principal's share, and its other access paths to the session's sandbox.")
            .errors(&[PrincipalNotFound]),
        keyed("delete", "/v1/sandbox/sessions/{id}/share/{principal}", "unshare", "Revoke a share and the tokens issued under it")
            .with([Parameter::path("principal", "The principal's name.")])
            .empty_response(204, "Revoked.")
            .errors(&[ShareNotFound]),
    ];
    routes
        .into_iter()
        .map(|route| route.with([session_id()]).errors(&[Forbidden, SessionNotFound, SessionExpired]).tag("sessions"))
        .collect()
}
