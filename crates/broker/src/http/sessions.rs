//! `/v1/sandbox/sessions`: access to the sandbox of a thread or another scope.

use axum::{
    Json,
    extract::{Path, State},
};
use cobox_protocol::{
    ApiError, ErrorCode, SessionId,
    session::{HeartbeatResponse, NegotiateResponse, Page, RefreshRequest, RefreshResponse, SessionInfo, State as LifeState},
};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;

use super::{
    Api,
    auth::Authenticated,
    body::{JsonBody, MaybeJsonBody, NoFields},
    error::Failure,
    negotiation::NegotiationBody,
    paging::{PageQuery, Params, TagParams, page},
};
use crate::store::SessionFilter;

const IDEMPOTENCY_KEY: &str = "idempotency-key";

pub async fn negotiate(
    State(api): State<Api>,
    auth: Authenticated,
    headers: HeaderMap,
    JsonBody(body): JsonBody<NegotiationBody>,
) -> Result<Json<NegotiateResponse>, Failure> {
    let key = idempotency_key(&headers)?;
    let is_full_shape = body.is_full_shape();
    let answer = api.services.negotiator.negotiate(&auth.request_context(), &body.read()?, key).await;
    Ok(Json(if is_full_shape { answer.map_err(full)? } else { answer? }))
}

pub fn idempotency_key(headers: &HeaderMap) -> Result<Option<&str>, ApiError> {
    let unreadable = |_| ApiError::invalid("Idempotency-Key: must be plain ASCII");
    headers.get(IDEMPOTENCY_KEY).map(|v| v.to_str().map_err(unreadable)).transpose()
}

/// Translates an error to the codes of the full shape.
fn full(e: ApiError) -> ApiError {
    ApiError { code: e.code.for_bindings(), ..e }
}

#[derive(Deserialize)]
pub struct SessionsQuery {
    scope_type: Option<String>,
    scope_id: Option<String>,
    state: Option<String>,
    limit: Option<String>,
    cursor: Option<String>,
}

pub async fn list(
    State(api): State<Api>,
    auth: Authenticated,
    Params(query): Params<SessionsQuery>,
    TagParams(tags): TagParams,
) -> Result<Json<Page<SessionInfo>>, Failure> {
    let state = match &query.state {
        Some(word) => Some(
            word.parse::<LifeState>()
                .ok()
                .ok_or_else(|| ApiError::invalid("state: must be provisioning, active, idle, suspended, terminated or failed"))?,
        ),
        None => None,
    };
    let params = PageQuery { limit: query.limit, cursor: query.cursor }.page_params::<SessionId>()?;
    let filter = SessionFilter { scope_type: query.scope_type, scope_id: query.scope_id, tags, state };
    let items = api.services.sessions.list(&auth.caller, &filter, &params).await?;
    Ok(Json(page(items, &params, |s| s.session_id.to_string())))
}

pub async fn show(State(api): State<Api>, auth: Authenticated, Path(id): Path<String>) -> Result<Json<NegotiateResponse>, Failure> {
    let found = api.services.sessions.get(&auth.request_context(), &session_id(&id)?).await?;
    auth.about(&found.session_id, &found.sandbox.id);
    Ok(Json(found))
}

pub async fn refresh(
    State(api): State<Api>,
    auth: Authenticated,
    Path(id): Path<String>,
    MaybeJsonBody(params): MaybeJsonBody<RefreshRequest>,
) -> Result<Json<RefreshResponse>, Failure> {
    Ok(Json(api.services.renewal.refresh(&auth.request_context(), &session_id(&id)?, &params).await?))
}

pub async fn refresh_token(
    State(api): State<Api>,
    auth: Authenticated,
    Path(id): Path<String>,
    MaybeJsonBody(params): MaybeJsonBody<RefreshRequest>,
) -> Result<Json<RefreshResponse>, Failure> {
    let id = session_id(&id).map_err(full)?;
    Ok(Json(api.services.renewal.refresh(&auth.request_context(), &id, &params).await.map_err(full)?))
}

pub async fn heartbeat(
    State(api): State<Api>,
    auth: Authenticated,
    Path(id): Path<String>,
    MaybeJsonBody(NoFields {}): MaybeJsonBody<NoFields>,
) -> Result<Json<HeartbeatResponse>, Failure> {
    let id = session_id(&id).map_err(full)?;
    Ok(Json(api.services.renewal.heartbeat(&auth.request_context(), &id).await.map_err(full)?))
}

pub async fn release(State(api): State<Api>, auth: Authenticated, Path(id): Path<String>) -> Result<StatusCode, Failure> {
    api.services.sessions.release(&auth.caller, &session_id(&id)?, &auth.request_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A malformed id is reported as an unknown session.
pub fn session_id(id: &str) -> Result<SessionId, ApiError> {
    id.parse().map_err(|e| ApiError::new(ErrorCode::SessionNotFound, format!("no such session: {e}")))
}
