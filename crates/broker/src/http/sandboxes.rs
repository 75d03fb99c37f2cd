//! `/v1/sandboxes`: creating, listing, changing and deleting sandboxes.

use axum::{
    Json,
    extract::{Path, State},
    routing::{get, post},
};
use cobox_protocol::{
    ApiError, SandboxId,
    sandbox::{CreateSandbox, PatchSandbox, RestoreResponse, RestoreSandbox, SandboxInfo, SandboxUsage},
    session::Page,
};
use http::StatusCode;
use serde::Deserialize;

use super::{
    Api, Routes,
    auth::Authenticated,
    body::{JsonBody, MaybeJsonBody},
    error::Failure,
    paging::{PageQuery, Params, TagParams, page},
};

#[derive(Deserialize)]
struct Deleted {
    deleted: Option<bool>,
}

#[derive(Deserialize)]
struct Permanent {
    permanent: Option<bool>,
}

pub fn routes() -> Routes {
    Routes::new()
        .route("/v1/sandboxes", get(list).post(create))
        .route("/v1/sandboxes/{id_or_name}", get(look).patch(change).delete(remove))
        .route("/v1/sandboxes/{id_or_name}/restore", post(restore))
        .route("/v1/sandboxes/{id_or_name}/usage", get(usage))
}

async fn create(
    State(api): State<Api>,
    who: Authenticated,
    MaybeJsonBody(wish): MaybeJsonBody<CreateSandbox>,
) -> Result<(StatusCode, Json<SandboxInfo>), Failure> {
    Ok((StatusCode::CREATED, Json(api.services.sandboxes.create(&who.asking(), wish).await?)))
}

async fn list(
    State(api): State<Api>,
    who: Authenticated,
    Params(query): Params<PageQuery>,
    Params(Deleted { deleted }): Params<Deleted>,
    TagParams(tags): TagParams,
) -> Result<Json<Page<SandboxInfo>>, Failure> {
    let wish = query.wish::<SandboxId>()?;
    let items = match deleted.unwrap_or_default() {
        true if !tags.is_empty() => return Err(ApiError::invalid("tag: deleted sandboxes can't be filtered by tags").into()),
        true => api.services.deleted_sandboxes.list(&who.caller, &wish).await?,
        false => api.services.sandboxes.list(&who.caller, &tags, &wish).await?,
    };
    Ok(Json(page(items, &wish, |s| s.id.to_string())))
}

async fn look(State(api): State<Api>, who: Authenticated, Path(id_or_name): Path<String>) -> Result<Json<SandboxInfo>, Failure> {
    Ok(Json(api.services.sandboxes.get(&who.caller, &id_or_name).await?))
}

async fn change(
    State(api): State<Api>,
    who: Authenticated,
    Path(id_or_name): Path<String>,
    JsonBody(wish): JsonBody<PatchSandbox>,
) -> Result<Json<SandboxInfo>, Failure> {
    Ok(Json(api.services.sandboxes.patch(&who.asking(), &id_or_name, wish).await?))
}

async fn remove(
    State(api): State<Api>,
    who: Authenticated,
    Path(id_or_name): Path<String>,
    Params(Permanent { permanent }): Params<Permanent>,
) -> Result<StatusCode, Failure> {
    api.services.sandboxes.delete(&who.caller, &id_or_name, permanent.unwrap_or_default(), &who.request_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn restore(
    State(api): State<Api>,
    who: Authenticated,
    Path(id_or_name): Path<String>,
    MaybeJsonBody(wish): MaybeJsonBody<RestoreSandbox>,
) -> Result<Json<RestoreResponse>, Failure> {
    Ok(Json(api.services.deleted_sandboxes.restore(&who.asking(), &id_or_name, wish).await?))
}

async fn usage(
    State(api): State<Api>,
    who: Authenticated,
    Path(id_or_name): Path<String>,
    Params(Deleted { deleted }): Params<Deleted>,
) -> Result<Json<SandboxUsage>, Failure> {
    Ok(Json(api.services.deleted_sandboxes.usage(&who.caller, &id_or_name, deleted.unwrap_or_default()).await?))
}
