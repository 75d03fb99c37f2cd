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
        keyed("post", "/v1/sandbox/sessions/{id}/share", "share", "Let another principal in")
            .about("For the session's owner and operators. Shared again, the new terms count.")
            .takes::<ShareRequest>()
            .gives::<ShareInfo>(201, "Shared.")
            .gives::<ShareInfo>(200, "Shared before; these terms count now.")
            .fails(&[CapabilityDenied, PrincipalNotFound]),
        keyed("get", "/v1/sandbox/sessions/{id}/share", "listShares", "Whom it is shared with")
            .gives::<Page<ShareInfo>>(200, "All of them: there are few."),
        keyed("get", "/v1/sandbox/sessions/{id}/share/{principal}", "getPrincipalAccess", "Whether a principal can enter, and how")
            .about("By a share of the session, and without one: ask it before a share is taken back, and after.")
            .with([Parameter::path("principal", "Its name.")])
            .gives::<PrincipalAccess>(200, "Its share, and every other way into the session's sandbox.")
            .fails(&[PrincipalNotFound]),
        keyed("delete", "/v1/sandbox/sessions/{id}/share/{principal}", "unshare", "Take a share back, with the tokens it gave")
            .with([Parameter::path("principal", "Its name.")])
            .gives_nothing(204, "It has ended.")
            .fails(&[ShareNotFound]),
    ];
    routes
        .into_iter()
        .map(|route| route.with([session_id()]).fails(&[Forbidden, SessionNotFound, SessionExpired]).tag("sessions"))
        .collect()
}
