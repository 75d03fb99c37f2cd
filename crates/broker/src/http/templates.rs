//! `/v1/templates`: named specifications of sandboxes.

use axum::{
    Json,
    extract::{Path, State},
};
use cobox_protocol::{
    resources::{CreateTemplate, TemplateInfo},
    session::Page,
};
use http::StatusCode;

use super::{Api, auth::Authenticated, body::JsonBody, error::Failure};
use crate::domain::resources::templates::ResolvedTemplate;

pub async fn create(
    State(api): State<Api>,
    auth: Authenticated,
    JsonBody(params): JsonBody<CreateTemplate>,
) -> Result<(StatusCode, Json<TemplateInfo>), Failure> {
    Ok((StatusCode::CREATED, Json(api.services.templates.create(&auth.request_context(), params).await?.info())))
}

/// Returns all of them, because there are few.
pub async fn list(State(api): State<Api>, auth: Authenticated) -> Result<Json<Page<TemplateInfo>>, Failure> {
    let items = api.services.templates.list(&auth.request_context()).await?.into_iter().map(ResolvedTemplate::info).collect();
    Ok(Json(Page { items, next_cursor: None }))
}

pub async fn show(State(api): State<Api>, auth: Authenticated, Path(name): Path<String>) -> Result<Json<TemplateInfo>, Failure> {
    Ok(Json(api.services.templates.get(&auth.request_context(), &name).await?.info()))
}

pub async fn remove(State(api): State<Api>, auth: Authenticated, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    api.services.templates.delete(&auth.request_context(), &name).await?;
    Ok(StatusCode::NO_CONTENT)
}
