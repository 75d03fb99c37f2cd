//! `/v1/keys`: API keys, for operators.

use axum::{
    Json,
    extract::{Path, State},
    routing::{delete, get},
};
use cobox_protocol::{
    ApiError, ErrorCode, KeyId,
    key::{CreateKey, CreatedKey, KeyInfo},
    session::Page,
};
use http::StatusCode;

use super::{
    Api, Routes,
    auth::Authenticated,
    body::JsonBody,
    error::Failure,
    paging::{PageQuery, Params, page},
};

pub fn routes() -> Routes {
    Routes::new().route("/v1/keys", get(list).post(create)).route("/v1/keys/{id}", delete(revoke))
}

async fn create(
    State(api): State<Api>,
    who: Authenticated,
    JsonBody(wish): JsonBody<CreateKey>,
) -> Result<(StatusCode, Json<CreatedKey>), Failure> {
    Ok((StatusCode::CREATED, Json(api.keys.create(&who.caller, wish, &who.request_id).await?)))
}

async fn list(State(api): State<Api>, who: Authenticated, Params(query): Params<PageQuery>) -> Result<Json<Page<KeyInfo>>, Failure> {
    let wish = query.wish::<KeyId>()?;
    let items = api.keys.list(&who.caller, &wish).await?;
    Ok(Json(page(items, &wish, |k| k.id.to_string())))
}

async fn revoke(State(api): State<Api>, who: Authenticated, Path(id): Path<String>) -> Result<StatusCode, Failure> {
    let id: KeyId = id.parse().map_err(|e| ApiError::new(ErrorCode::KeyNotFound, format!("no such key: {e}")))?;
    api.keys.revoke(&who.caller, &id, &who.request_id).await?;
    Ok(StatusCode::NO_CONTENT)
}
