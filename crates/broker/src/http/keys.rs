//! `/v1/keys`: API keys, for operators.

use axum::{
    Json,
    extract::{Path, State},
};
use cobox_protocol::{
    ApiError, ErrorCode, KeyId,
    key::{CreateKey, CreatedKey, ExpireKey, KeyInfo},
    session::Page,
};
use http::StatusCode;

use super::{
    Api,
    auth::Authenticated,
    body::JsonBody,
    error::Failure,
    paging::{PageQuery, Params, page},
};

pub async fn create(
    State(api): State<Api>,
    auth: Authenticated,
    JsonBody(params): JsonBody<CreateKey>,
) -> Result<(StatusCode, Json<CreatedKey>), Failure> {
    Ok((StatusCode::CREATED, Json(api.services.keys.create(&auth.caller, params, &auth.request_id).await?)))
}

pub async fn list(State(api): State<Api>, auth: Authenticated, Params(query): Params<PageQuery>) -> Result<Json<Page<KeyInfo>>, Failure> {
    let params = query.page_params::<KeyId>()?;
    let items = api.services.keys.list(&auth.caller, &params).await?;
    Ok(Json(page(items, &params, |k| k.id.to_string())))
}

pub async fn revoke(State(api): State<Api>, auth: Authenticated, Path(id): Path<String>) -> Result<StatusCode, Failure> {
    api.services.keys.revoke(&auth.caller, &key_id(&id)?, &auth.request_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub async fn show(State(api): State<Api>, auth: Authenticated, Path(id): Path<String>) -> Result<Json<KeyInfo>, Failure> {
    Ok(Json(api.services.keys.get(&auth.caller, &key_id(&id)?).await?))
}

pub async fn expire(
    State(api): State<Api>,
    auth: Authenticated,
    Path(id): Path<String>,
    JsonBody(params): JsonBody<ExpireKey>,
) -> Result<Json<KeyInfo>, Failure> {
    Ok(Json(api.services.keys.expire(&auth.caller, &key_id(&id)?, &params, &auth.request_id).await?))
}

fn key_id(id: &str) -> Result<KeyId, ApiError> {
    id.parse().map_err(|e| ApiError::new(ErrorCode::KeyNotFound, format!("no such key: {e}")))
}
