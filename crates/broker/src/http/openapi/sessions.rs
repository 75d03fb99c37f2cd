//! OpenAPI operations of `/v1/sandbox/sessions`.

use cobox_openapi::{Operation, Parameter, Shape, read, written};
use cobox_protocol::{
    Envelope,
    ErrorCode::*,
    event::{ERROR_NAME, EVENT_NAME, SandboxEvent},
    session::{HeartbeatResponse, NegotiateResponse, Page, RefreshRequest, RefreshResponse, SessionInfo},
};
use serde_json::json;

use super::{START_ERRORS, idempotency_key, keyed, page_of, prefer, session_id, tags, thread_authorization};
use crate::http::negotiation::NegotiationBody;

pub fn routes() -> Vec<Operation> {
    let needed = json!({
        "required": ["mode"], "properties": { "mode": { "type": "string" } },
        "anyOf": [
            { "required": ["thread_id"], "properties": { "thread_id": { "type": "string" } } },
            { "required": ["scope"], "properties": { "scope": { "type": "object" } } },
        ],
    });
    let refresh = |path, name, summary| {
        keyed("post", path, name, summary)
            .with([session_id(), prefer()])
            .request_body::<RefreshRequest>()
            .body_optional()
            .response::<RefreshResponse>(200, "A fresh token.")
            .errors(&[TokenExpired, TokenRevoked, Forbidden, SandboxNotFound, SessionExpired])
    };
    let routes = vec![
        keyed("post", "/v1/sandbox/sessions", "negotiate", "Get, ensure or create a session")
            .about("A request with `scope` gets the error codes of the binding API (`BINDING_…`, `BACKEND_…`).")
            .with([idempotency_key(), prefer(), thread_authorization()])
            .request_body_as("application/json", read::<NegotiationBody>().and(needed))
            .response::<NegotiateResponse>(200, "The session, with a fresh token.")
            .errors(&[Forbidden, CapabilityDenied, SessionNotFound, BindingNotFound, SandboxNotFound, QuotaExceeded])
            .errors(&[SessionConflict, BindingConflict, SandboxConflict, IdempotencyConflict, InUse, SessionExpired, TooLarge])
            .errors(&START_ERRORS)
            .errors(&[BackendUnavailable]),
        keyed("get", "/v1/sandbox/sessions", "listSessions", "List the sessions you may use")
            .with([
                Parameter::query("scope_type", "Only sessions of scopes of this type."),
                Parameter::query("scope_id", "Only sessions of scopes with this id."),
                Parameter::query("state", "Only sessions in this state; by default, all that have not ended.")
                    .of(json!({ "$ref": "#/components/schemas/State" })),
                tags(),
            ])
            .with(page_of())
            .response::<Page<SessionInfo>>(200, "A page, newest first."),
        keyed("get", "/v1/sandbox/sessions/{id}", "getSession", "Get a session")
            .about("Returns the same as negotiation, with a fresh token. Doesn't count as activity and starts nothing.")
            .with([session_id()])
            .response::<NegotiateResponse>(200, "The session.")
            .errors(&[Forbidden, CapabilityDenied, SessionNotFound, SessionExpired]),
        keyed("delete", "/v1/sandbox/sessions/{id}", "releaseSession", "End a session")
            .about("For its owner and operators. Its sandbox is deleted too, unless it is named, kept or used by another session.")
            .with([session_id()])
            .empty_response(204, "Ended.")
            .errors(&[Forbidden, SessionNotFound]),
        refresh("/v1/sandbox/sessions/{id}/refresh", "refresh", "Get a fresh token")
            .errors(&[SessionNotFound, SessionConflict])
            .errors(&START_ERRORS),
        refresh("/v1/sandbox/sessions/{id}/refresh-token", "refreshToken", "Get a fresh token, with the error codes of the binding API")
            .errors(&[BindingNotFound, BindingConflict, SandboxStarting, BackendUnavailable]),
        keyed("post", "/v1/sandbox/sessions/{id}/heartbeat", "heartbeat", "Extend the lease without a new token")
            .with([session_id(), prefer()])
            .response::<HeartbeatResponse>(200, "The lease is extended.")
            .errors(&[Forbidden, BindingNotFound, SandboxNotFound, SessionExpired, BackendUnavailable]),
        keyed("get", "/v1/sandbox/sessions/{id}/events", "events", "Stream the events of a session")
            .about(
                "Server-sent events, by default from the session's beginning. Excludes events of files and commands that the credential \
                 gives no access to. Periodic `:` lines keep the connection open.",
            )
            .security(&["key", "keyHeader", "token"])
            .with([
                session_id(),
                Parameter::header("Last-Event-ID", "Continues after this event; `now` for new events only."),
                Parameter::query("after", "The same, for clients that can't send the header. The header takes precedence."),
            ])
            .response_as(200, "The events, until the session or the credential ends.", "text/event-stream", Shape::Plain(json!({})))
            .events([(EVENT_NAME, written::<SandboxEvent>()), (ERROR_NAME, written::<Envelope>())])
            .errors(&[TokenExpired, TokenRevoked, Forbidden, CapabilityDenied, SessionNotFound, SessionExpired]),
    ];
    routes.into_iter().map(|route| route.tag("sessions")).collect()
}
