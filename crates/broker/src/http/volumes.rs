//! `/v1/volumes`: storage that outlives sandboxes.

use axum::{
    Json,
    extract::{Path, State},
};
use cobox_protocol::{
    resources::{CreateVolume, VolumeInfo},
    session::Page,
};
use http::StatusCode;

use super::{Api, auth::Authenticated, body::JsonBody, error::Failure};

pub async fn create(
    State(api): State<Api>,
    auth: Authenticated,
    JsonBody(params): JsonBody<CreateVolume>,
) -> Result<(StatusCode, Json<VolumeInfo>), Failure> {
    Ok((StatusCode::CREATED, Json(api.services.volumes.create(&auth.request_context(), params).await?)))
}

/// Returns all of them, because there are few.
pub async fn list(State(api): State<Api>, auth: Authenticated) -> Result<Json<Page<VolumeInfo>>, Failure> {
    Ok(Json(Page { items: api.services.volumes.list(&auth.request_context()).await?, next_cursor: None }))
}

pub async fn show(State(api): State<Api>, auth: Authenticated, Path(name_or_id): Path<String>) -> Result<Json<VolumeInfo>, Failure> {
    Ok(Json(api.services.volumes.get(&auth.request_context(), &name_or_id).await?))
}

pub async fn remove(State(api): State<Api>, auth: Authenticated, Path(name_or_id): Path<String>) -> Result<StatusCode, Failure> {
    api.services.volumes.delete(&auth.request_context(), &name_or_id).await?;
    Ok(StatusCode::NO_CONTENT)
}
