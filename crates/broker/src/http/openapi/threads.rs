//! OpenAPI operations of `/threads/…`, the notice of a deleted thread, and the routes of a front end.

use cobox_openapi::{Operation, Parameter};
use cobox_protocol::{
    ErrorCode::*,
    session::{HeartbeatResponse, RefreshRequest, RefreshResponse},
    thread::{Capabilities, ThreadNotice, ThreadNoticeResponse, ThreadSandbox},
};
use serde_json::{Value, json};

use super::{START_ERRORS, idempotency_key, keyed, prefer, thread_authorization};
use crate::http::negotiation::NegotiationBody;

pub fn routes() -> Vec<Operation> {
    let thread = || Parameter::path("thread_id", "The caller's id of the thread.").of(thread_id());
    let routes = vec![
        keyed("post", "/threads/{thread_id}/sandbox", "ensureThreadSandbox", "Ensure the thread's session")
            .with([thread(), idempotency_key(), prefer(), thread_authorization()])
            .request_body::<NegotiationBody>()
            .body_optional()
            .response::<ThreadSandbox>(200, "The session, with a fresh token.")
            .errors(&[
                Forbidden,
                CapabilityDenied,
                SessionNotFound,
                SandboxNotFound,
                SessionConflict,
                SandboxConflict,
                InUse,
                QuotaExceeded,
            ])
            .errors(&[IdempotencyConflict, SessionExpired])
            .errors(&START_ERRORS),
        keyed("get", "/threads/{thread_id}/sandbox", "getThreadSandbox", "Get the thread's session")
            .with([thread()])
            .response::<ThreadSandbox>(200, "The session, with a fresh token.")
            .errors(&[Forbidden, CapabilityDenied, SessionNotFound, SessionExpired]),
        keyed("delete", "/threads/{thread_id}/sandbox", "releaseThreadSandbox", "End the thread's session")
            .with([thread()])
            .empty_response(204, "Ended.")
            .errors(&[Forbidden, SessionNotFound]),
        keyed("post", "/threads/{thread_id}/sandbox/refresh", "refreshThreadSandbox", "Get a fresh token")
            .about("If `current_token` is sent, it is revoked 30 seconds later, unless `rotate` is false.")
            .with([thread(), prefer()])
            .request_body::<RefreshRequest>()
            .body_optional()
            .response::<RefreshResponse>(200, "A fresh token.")
            .errors(&[TokenExpired, TokenRevoked, Forbidden, SessionNotFound, SandboxNotFound, SessionConflict, SessionExpired])
            .errors(&START_ERRORS),
        keyed("post", "/threads/{thread_id}/sandbox/heartbeat", "heartbeatThreadSandbox", "Extend the lease without a new token")
            .with([thread(), prefer()])
            .response::<HeartbeatResponse>(200, "The lease is extended.")
            .errors(&[Forbidden, SessionNotFound, SandboxNotFound, SessionExpired, ProviderUnavailable]),
        keyed("delete", "/threads/{thread_id}", "endThread", "End the session of a deleted thread")
            .with([thread()])
            .empty_response(204, "The thread has no session any more.")
            .errors(&[Forbidden]),
        Operation::new("post", "/webhooks/threads", "threadIsGone", "Receive a signed notice that a thread was deleted or archived")
            .about(
                "The signature is `v1=` and the HMAC-SHA256, in hexadecimal, of the timestamp, a dot and the body. Returns 404 if no \
                 webhook is configured.",
            )
            .with([
                Parameter::header("X-Cobox-Timestamp", "Time of sending, in seconds since 1970.")
                    .of(json!({ "type": "string", "pattern": "^[0-9]{1,18}$" }))
                    .required(),
                Parameter::header("X-Cobox-Signature", "One or more signatures, separated by commas; one valid signature is enough.")
                    .required(),
            ])
            .request_body::<ThreadNotice>()
            .response::<ThreadNoticeResponse>(200, "Accepted.")
            .errors(&[InvalidRequest, Unauthenticated, RouteNotFound, RateLimited, Internal, BackendUnavailable]),
        keyed("get", "/capabilities", "capabilities", "List the services that a front end can reach for a thread")
            .with([Parameter::query("thread_id", "The caller's id of the thread.").of(thread_id()).required()])
            .response::<Capabilities>(200, "The services; none for a thread without a session.")
            .errors(&[Forbidden, CapabilityDenied, SessionExpired]),
    ];
    routes.into_iter().map(|route| route.tag("threads")).collect()
}

fn thread_id() -> Value {
    json!({ "type": "string", "minLength": 1, "maxLength": 256, "pattern": cobox_protocol::schema::NO_CONTROL_CHARACTERS })
}
