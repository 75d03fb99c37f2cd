//! `/v1/sandboxes`: sandboxes themselves.

use axum::{
    Json,
    extract::{Path, State},
    routing::get,
};
use cobox_protocol::{
    SandboxId,
    sandbox::{CreateSandbox, PatchSandbox, SandboxInfo},
    session::Page,
};
use http::StatusCode;

use super::{
    Api, Routes,
    auth::Authenticated,
    body::{JsonBody, MaybeJsonBody},
    error::Failure,
    paging::{PageQuery, Params, TagParams, page},
};

pub fn routes() -> Routes {
    Routes::new().route("/v1/sandboxes", get(list).post(create)).route("/v1/sandboxes/{id_or_name}", get(look).patch(change).delete(remove))
}

async fn create(
    State(api): State<Api>,
    who: Authenticated,
    MaybeJsonBody(wish): MaybeJsonBody<CreateSandbox>,
) -> Result<(StatusCode, Json<SandboxInfo>), Failure> {
    Ok((StatusCode::CREATED, Json(api.sandboxes.create(&who.asking(), wish).await?)))
}

async fn list(
    State(api): State<Api>,
    who: Authenticated,
    Params(query): Params<PageQuery>,
    TagParams(tags): TagParams,
) -> Result<Json<Page<SandboxInfo>>, Failure> {
    let wish = query.wish::<SandboxId>()?;
    let items = api.sandboxes.list(&who.caller, &tags, &wish).await?;
    Ok(Json(page(items, &wish, |s| s.id.to_string())))
}

async fn look(State(api): State<Api>, who: Authenticated, Path(id_or_name): Path<String>) -> Result<Json<SandboxInfo>, Failure> {
    Ok(Json(api.sandboxes.get(&who.caller, &id_or_name).await?))
}

async fn change(
    State(api): State<Api>,
    who: Authenticated,
    Path(id_or_name): Path<String>,
    JsonBody(wish): JsonBody<PatchSandbox>,
) -> Result<Json<SandboxInfo>, Failure> {
    Ok(Json(api.sandboxes.patch(&who.asking(), &id_or_name, wish).await?))
}

async fn remove(State(api): State<Api>, who: Authenticated, Path(id_or_name): Path<String>) -> Result<StatusCode, Failure> {
    api.sandboxes.delete(&who.caller, &id_or_name, &who.request_id).await?;
    Ok(StatusCode::NO_CONTENT)
}
