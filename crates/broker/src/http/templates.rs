//! `/v1/templates`: named specifications of sandboxes.

use axum::{
    Json,
    extract::{Path, State},
    routing::get,
};
use cobox_protocol::{
    resources::{CreateTemplate, TemplateInfo},
    session::Page,
};
use http::StatusCode;

use super::{Api, Routes, auth::Authenticated, body::JsonBody, error::Failure};
use crate::domain::resources::templates::Found;

pub fn routes() -> Routes {
    Routes::new().route("/v1/templates", get(list).post(create)).route("/v1/templates/{name}", get(look).delete(remove))
}

async fn create(
    State(api): State<Api>,
    who: Authenticated,
    JsonBody(wish): JsonBody<CreateTemplate>,
) -> Result<(StatusCode, Json<TemplateInfo>), Failure> {
    Ok((StatusCode::CREATED, Json(api.services.templates.create_template(&who.asking(), wish).await?.info())))
}

/// Returns all of them, because there are few.
async fn list(State(api): State<Api>, who: Authenticated) -> Result<Json<Page<TemplateInfo>>, Failure> {
    let items = api.services.templates.templates(&who.asking()).await?.into_iter().map(Found::info).collect();
    Ok(Json(Page { items, next_cursor: None }))
}

async fn look(State(api): State<Api>, who: Authenticated, Path(name): Path<String>) -> Result<Json<TemplateInfo>, Failure> {
    Ok(Json(api.services.templates.template(&who.asking(), &name).await?.info()))
}

async fn remove(State(api): State<Api>, who: Authenticated, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    api.services.templates.delete_template(&who.asking(), &name).await?;
    Ok(StatusCode::NO_CONTENT)
}
