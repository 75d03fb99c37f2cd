//! `/threads/{thread_id}/sandbox`: the sessions of threads, in the request and response shapes of the first clients.

use axum::{
    Json,
    extract::{Path, State},
};
use cobox_protocol::{
    session::{HeartbeatResponse, RefreshRequest, RefreshResponse},
    thread::ThreadSandbox,
};
use http::{HeaderMap, StatusCode};

use super::{
    Api,
    auth::Authenticated,
    body::{MaybeJsonBody, NoFields},
    error::Failure,
    negotiation::NegotiationBody,
    sessions::idempotency_key,
};

pub async fn negotiate(
    State(api): State<Api>,
    auth: Authenticated,
    Path(thread): Path<String>,
    headers: HeaderMap,
    MaybeJsonBody(body): MaybeJsonBody<NegotiationBody>,
) -> Result<Json<ThreadSandbox>, Failure> {
    let params = body.read_for_thread(&thread)?;
    let found = api.services.negotiator.negotiate(&auth.request_context(), &params, idempotency_key(&headers)?).await?;
    Ok(Json(found.into()))
}

pub async fn show(State(api): State<Api>, auth: Authenticated, Path(thread): Path<String>) -> Result<Json<ThreadSandbox>, Failure> {
    let id = api.services.threads.session_id_of(&auth.caller, &thread).await?;
    let found = api.services.sessions.get(&auth.request_context(), &id).await?;
    auth.about(&found.session_id, &found.sandbox.id);
    Ok(Json(found.into()))
}

/// On this route the presented token expires soon afterwards, unless the caller requests otherwise.
pub async fn refresh(
    State(api): State<Api>,
    auth: Authenticated,
    Path(thread): Path<String>,
    MaybeJsonBody(params): MaybeJsonBody<RefreshRequest>,
) -> Result<Json<RefreshResponse>, Failure> {
    let id = api.services.threads.session_id_of(&auth.caller, &thread).await?;
    let rotate = params.rotate.or(params.current_token.is_some().then_some(true));
    Ok(Json(api.services.renewal.refresh(&auth.request_context(), &id, &RefreshRequest { rotate, ..params }).await?))
}

pub async fn heartbeat(
    State(api): State<Api>,
    auth: Authenticated,
    Path(thread): Path<String>,
    MaybeJsonBody(NoFields {}): MaybeJsonBody<NoFields>,
) -> Result<Json<HeartbeatResponse>, Failure> {
    let id = api.services.threads.session_id_of(&auth.caller, &thread).await?;
    Ok(Json(api.services.renewal.heartbeat(&auth.request_context(), &id).await?))
}

pub async fn release(State(api): State<Api>, auth: Authenticated, Path(thread): Path<String>) -> Result<StatusCode, Failure> {
    let id = api.services.threads.session_id_of(&auth.caller, &thread).await?;
    api.services.sessions.release(&auth.caller, &id, &auth.request_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub async fn end(State(api): State<Api>, auth: Authenticated, Path(thread): Path<String>) -> Result<StatusCode, Failure> {
    api.services.threads.end_of_thread(&auth.caller, &thread, &auth.request_id).await?;
    Ok(StatusCode::NO_CONTENT)
}
