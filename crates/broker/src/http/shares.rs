//! `/v1/sandbox/sessions/{id}/share`: which other principals may enter a session.

use axum::{
    Json,
    extract::{Path, State},
    routing::{get, post},
};
use cobox_protocol::{
    session::Page,
    token::{PrincipalAccess, ShareInfo, ShareRequest},
};
use http::StatusCode;

use super::{Api, Routes, auth::Authenticated, body::JsonBody, error::Failure, sessions::session_id, tokens::requested};
use crate::domain::sessions::shares::ShareWish;

pub fn routes() -> Routes {
    Routes::new()
        .route("/v1/sandbox/sessions/{id}/share", post(share).get(list))
        .route("/v1/sandbox/sessions/{id}/share/{principal}", get(principal_access).delete(unshare))
}

async fn share(
    State(api): State<Api>,
    who: Authenticated,
    Path(id): Path<String>,
    JsonBody(body): JsonBody<ShareRequest>,
) -> Result<(StatusCode, Json<ShareInfo>), Failure> {
    let capabilities = requested(body.capabilities.as_ref(), body.scopes.as_ref())?;
    let wish = ShareWish { principal: &body.principal, capabilities, expires_at: body.expires_at };
    let (share, is_new) = api.services.shares.share(&who.asking(), &session_id(&id)?, wish).await?;
    Ok((if is_new { StatusCode::CREATED } else { StatusCode::OK }, Json(share)))
}

/// Returns all of them, because there are few.
async fn list(State(api): State<Api>, who: Authenticated, Path(id): Path<String>) -> Result<Json<Page<ShareInfo>>, Failure> {
    let items = api.services.shares.list(&who.caller, &session_id(&id)?).await?;
    Ok(Json(Page { items, next_cursor: None }))
}

async fn principal_access(
    State(api): State<Api>,
    who: Authenticated,
    Path((id, principal)): Path<(String, String)>,
) -> Result<Json<PrincipalAccess>, Failure> {
    Ok(Json(api.services.shares.principal_access(&who.caller, &session_id(&id)?, &principal).await?))
}

async fn unshare(State(api): State<Api>, who: Authenticated, Path((id, principal)): Path<(String, String)>) -> Result<StatusCode, Failure> {
    api.services.shares.unshare(&who.asking(), &session_id(&id)?, &principal).await?;
    Ok(StatusCode::NO_CONTENT)
}
