//! OpenAPI operations of `…/delegate` and `…/file-links`.

use cobox_openapi::{Operation, Parameter};
use cobox_protocol::{
    ErrorCode::*,
    token::{DelegateResponse, FileLinkRequest, FileLinkResponse},
};

use super::{keyed, session_id};
use crate::http::tokens::DelegationBody;

pub fn routes() -> Vec<Operation> {
    let delegate = |path, name, id| {
        keyed("post", path, name, "Delegate: get a narrower token")
            .about(
                "With `parent_token`, or with a token as the credential, the new token ends with that token; otherwise it ends with the \
                 session.",
            )
            .security(&["key", "keyHeader", "token"])
            .with([id])
            .request_body::<DelegationBody>()
            .response::<DelegateResponse>(200, "The token.")
            .errors(&[TokenExpired, TokenRevoked, Forbidden, CapabilityDenied, SessionNotFound, SandboxNotFound, SessionExpired])
    };
    let sandbox = Parameter::path("id", "The sandbox's id or name.");
    let routes = vec![
        delegate("/v1/sandbox/sessions/{id}/delegate", "delegate", session_id()),
        delegate("/sandbox/{id}/delegate", "delegateSandbox", sandbox),
        keyed("post", "/v1/sandbox/sessions/{id}/file-links", "createFileLink", "Get a URL for one file")
            .about("For a browser: anyone with the URL can perform this one operation, for at most 15 minutes.")
            .with([session_id()])
            .request_body::<FileLinkRequest>()
            .response::<FileLinkResponse>(200, "The link.")
            .errors(&[Forbidden, CapabilityDenied, SessionNotFound, SessionExpired]),
    ];
    routes.into_iter().map(|route| route.tag("sessions")).collect()
}
