//! `/v1/sandboxes`: creating, listing, changing and deleting sandboxes.

use axum::{
    Json,
    extract::{Path, State},
};
use cobox_protocol::{
    ApiError, SandboxId,
    sandbox::{CreateSandbox, PatchSandbox, RestoreResponse, RestoreSandbox, SandboxInfo, SandboxUsage},
    session::Page,
};
use http::StatusCode;
use serde::Deserialize;

use super::{
    Api,
    auth::Authenticated,
    body::{JsonBody, MaybeJsonBody},
    error::Failure,
    paging::{PageQuery, Params, TagParams, page},
};

#[derive(Deserialize)]
pub struct DeletedQuery {
    deleted: Option<bool>,
}

#[derive(Deserialize)]
pub struct PermanentQuery {
    permanent: Option<bool>,
}

pub async fn create(
    State(api): State<Api>,
    auth: Authenticated,
    MaybeJsonBody(params): MaybeJsonBody<CreateSandbox>,
) -> Result<(StatusCode, Json<SandboxInfo>), Failure> {
    Ok((StatusCode::CREATED, Json(api.services.sandboxes.create(&auth.request_context(), params).await?)))
}

pub async fn list(
    State(api): State<Api>,
    auth: Authenticated,
    Params(query): Params<PageQuery>,
    Params(DeletedQuery { deleted }): Params<DeletedQuery>,
    TagParams(tags): TagParams,
) -> Result<Json<Page<SandboxInfo>>, Failure> {
    let params = query.page_params::<SandboxId>()?;
    let items = match deleted.unwrap_or_default() {
        true if !tags.is_empty() => return Err(ApiError::invalid("tag: deleted sandboxes can't be filtered by tags").into()),
        true => api.services.deleted_sandboxes.list(&auth.caller, &params).await?,
        false => api.services.sandboxes.list(&auth.caller, &tags, &params).await?,
    };
    Ok(Json(page(items, &params, |s| s.id.to_string())))
}

pub async fn show(State(api): State<Api>, auth: Authenticated, Path(id_or_name): Path<String>) -> Result<Json<SandboxInfo>, Failure> {
    Ok(Json(api.services.sandboxes.get(&auth.caller, &id_or_name).await?))
}

pub async fn change(
    State(api): State<Api>,
    auth: Authenticated,
    Path(id_or_name): Path<String>,
    JsonBody(params): JsonBody<PatchSandbox>,
) -> Result<Json<SandboxInfo>, Failure> {
    Ok(Json(api.services.sandboxes.patch(&auth.request_context(), &id_or_name, params).await?))
}

pub async fn remove(
    State(api): State<Api>,
    auth: Authenticated,
    Path(id_or_name): Path<String>,
    Params(PermanentQuery { permanent }): Params<PermanentQuery>,
) -> Result<StatusCode, Failure> {
    api.services.sandboxes.delete(&auth.caller, &id_or_name, permanent.unwrap_or_default(), &auth.request_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub async fn restore(
    State(api): State<Api>,
    auth: Authenticated,
    Path(id_or_name): Path<String>,
    MaybeJsonBody(params): MaybeJsonBody<RestoreSandbox>,
) -> Result<Json<RestoreResponse>, Failure> {
    Ok(Json(api.services.deleted_sandboxes.restore(&auth.request_context(), &id_or_name, params).await?))
}

pub async fn usage(
    State(api): State<Api>,
    auth: Authenticated,
    Path(id_or_name): Path<String>,
    Params(DeletedQuery { deleted }): Params<DeletedQuery>,
) -> Result<Json<SandboxUsage>, Failure> {
    Ok(Json(api.services.deleted_sandboxes.usage(&auth.caller, &id_or_name, deleted.unwrap_or_default()).await?))
}
