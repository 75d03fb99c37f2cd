//! `/v2/sandboxes/volumes`: volumes, as requested by SDKs before 0.7.34.

use axum::{
    Json,
    extract::{Path, State},
};
use cobox_protocol::{
    ApiError, Timestamp, VolumeId,
    resources::{CreateVolume, VolumeInfo},
};
use http::StatusCode;
use serde::{Deserialize, Serialize};

use super::quantity;
use crate::http::{Api, auth::Authenticated, body::JsonBody, error::Failure};

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(rename = "VolumeWish"))]
pub struct VolumeParams {
    name: String,
    /// As `1Gi`.
    size: String,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VolumeChange {
    #[serde(default)]
    name: Option<String>,
    /// Only the size it has.
    #[serde(default)]
    size: Option<String>,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(rename = "VolumeShown"))]
pub struct VolumeResponse {
    id: VolumeId,
    name: String,
    size: String,
    /// The provider's name.
    storage_class: String,
    created_at: Timestamp,
    updated_at: Timestamp,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VolumeList {
    volumes: Vec<VolumeResponse>,
}

pub async fn create(
    State(api): State<Api>,
    auth: Authenticated,
    JsonBody(params): JsonBody<VolumeParams>,
) -> Result<(StatusCode, Json<VolumeResponse>), Failure> {
    let params = CreateVolume { name: params.name, size_bytes: quantity::bytes("size", &params.size)?, access: None };
    Ok((StatusCode::CREATED, Json(to_response(api.services.volumes.create(&auth.request_context(), params).await?))))
}

pub async fn list(State(api): State<Api>, auth: Authenticated) -> Result<Json<VolumeList>, Failure> {
    Ok(Json(VolumeList { volumes: api.services.volumes.list(&auth.request_context()).await?.into_iter().map(to_response).collect() }))
}

pub async fn show(State(api): State<Api>, auth: Authenticated, Path(name): Path<String>) -> Result<Json<VolumeResponse>, Failure> {
    Ok(Json(to_response(api.services.volumes.get(&auth.request_context(), &name).await?)))
}

pub async fn change(
    State(api): State<Api>,
    auth: Authenticated,
    Path(name): Path<String>,
    JsonBody(params): JsonBody<VolumeChange>,
) -> Result<Json<VolumeResponse>, Failure> {
    let volume = api.services.volumes.get(&auth.request_context(), &name).await?;
    if let Some(size) = &params.size
        && quantity::bytes("size", size)? != volume.size_bytes
    {
        let has = quantity::shown_bytes(volume.size_bytes);
        return Err(ApiError::invalid(format!("size: the size of a volume can't change, and is {has}; create another volume")).into());
    }
    match &params.name {
        Some(to) if *to != volume.name => Ok(Json(to_response(api.services.volumes.rename(&auth.request_context(), &name, to).await?))),
        _ => Ok(Json(to_response(volume))),
    }
}

pub async fn remove(State(api): State<Api>, auth: Authenticated, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    api.services.volumes.delete(&auth.request_context(), &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn to_response(volume: VolumeInfo) -> VolumeResponse {
    VolumeResponse {
        id: volume.id,
        name: volume.name,
        size: quantity::shown_bytes(volume.size_bytes),
        storage_class: volume.provider,
        created_at: volume.created_at,
        updated_at: volume.created_at,
    }
}
