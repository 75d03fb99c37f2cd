//! `/v1/sandbox/sessions/{id}/share`: which other principals may enter a session.

use axum::{
    Json,
    extract::{Path, State},
};
use cobox_protocol::{
    session::Page,
    token::{PrincipalAccess, ShareInfo, ShareRequest},
};
use http::StatusCode;

use super::{Api, auth::Authenticated, body::JsonBody, error::Failure, sessions::session_id, tokens::requested};
use crate::domain::sessions::shares::ShareParams;

pub async fn share(
    State(api): State<Api>,
    auth: Authenticated,
    Path(id): Path<String>,
    JsonBody(body): JsonBody<ShareRequest>,
) -> Result<(StatusCode, Json<ShareInfo>), Failure> {
    let capabilities = requested(body.capabilities.as_ref(), body.scopes.as_ref())?;
    let params = ShareParams { principal: &body.principal, capabilities, expires_at: body.expires_at };
    let (share, is_new) = api.services.shares.create(&auth.request_context(), &session_id(&id)?, params).await?;
    Ok((if is_new { StatusCode::CREATED } else { StatusCode::OK }, Json(share)))
}

/// Returns all of them, because there are few.
pub async fn list(State(api): State<Api>, auth: Authenticated, Path(id): Path<String>) -> Result<Json<Page<ShareInfo>>, Failure> {
    let items = api.services.shares.list(&auth.caller, &session_id(&id)?).await?;
    Ok(Json(Page { items, next_cursor: None }))
}

pub async fn principal_access(
    State(api): State<Api>,
    auth: Authenticated,
    Path((id, principal)): Path<(String, String)>,
) -> Result<Json<PrincipalAccess>, Failure> {
    Ok(Json(api.services.shares.principal_access(&auth.caller, &session_id(&id)?, &principal).await?))
}

pub async fn unshare(
    State(api): State<Api>,
    auth: Authenticated,
    Path((id, principal)): Path<(String, String)>,
) -> Result<StatusCode, Failure> {
    api.services.shares.delete(&auth.request_context(), &session_id(&id)?, &principal).await?;
    Ok(StatusCode::NO_CONTENT)
}
