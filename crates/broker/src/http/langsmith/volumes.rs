//! `/v2/sandboxes/volumes`: volumes, as requested by SDKs before 0.7.34.

use axum::{
    Json,
    extract::{Path, State},
    routing::get,
};
use cobox_protocol::{
    ApiError, Timestamp, VolumeId,
    resources::{CreateVolume, VolumeInfo},
};
use http::StatusCode;
use serde::{Deserialize, Serialize};

use super::{Api, Routes, place, quantity};
use crate::http::{auth::Authenticated, body::JsonBody, error::Failure};

pub fn routes() -> Routes {
    Routes::new().at(place!("/volumes"), get(list).post(create)).at(place!("/volumes/{name}"), get(look).patch(change).delete(remove))
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VolumeWish {
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
pub struct VolumeShown {
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
    volumes: Vec<VolumeShown>,
}

async fn create(
    State(api): State<Api>,
    who: Authenticated,
    JsonBody(wish): JsonBody<VolumeWish>,
) -> Result<(StatusCode, Json<VolumeShown>), Failure> {
    let wish = CreateVolume { name: wish.name, size_bytes: quantity::bytes("size", &wish.size)?, access: None };
    Ok((StatusCode::CREATED, Json(shown(api.services.volumes.create_volume(&who.asking(), wish).await?))))
}

async fn list(State(api): State<Api>, who: Authenticated) -> Result<Json<VolumeList>, Failure> {
    Ok(Json(VolumeList { volumes: api.services.volumes.volumes(&who.asking()).await?.into_iter().map(shown).collect() }))
}

async fn look(State(api): State<Api>, who: Authenticated, Path(name): Path<String>) -> Result<Json<VolumeShown>, Failure> {
    Ok(Json(shown(api.services.volumes.volume(&who.asking(), &name).await?)))
}

async fn change(
    State(api): State<Api>,
    who: Authenticated,
    Path(name): Path<String>,
    JsonBody(wish): JsonBody<VolumeChange>,
) -> Result<Json<VolumeShown>, Failure> {
    let volume = api.services.volumes.volume(&who.asking(), &name).await?;
    if let Some(size) = &wish.size
        && quantity::bytes("size", size)? != volume.size_bytes
    {
        let has = quantity::shown_bytes(volume.size_bytes);
        return Err(ApiError::invalid(format!("size: a volume keeps the size it was made with, which is {has}; make another one")).into());
    }
    match &wish.name {
        Some(to) if *to != volume.name => Ok(Json(shown(api.services.volumes.rename_volume(&who.asking(), &name, to).await?))),
        _ => Ok(Json(shown(volume))),
    }
}

async fn remove(State(api): State<Api>, who: Authenticated, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    api.services.volumes.delete_volume(&who.asking(), &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn shown(volume: VolumeInfo) -> VolumeShown {
    VolumeShown {
        id: volume.id,
        name: volume.name,
        size: quantity::shown_bytes(volume.size_bytes),
        storage_class: volume.provider,
        created_at: volume.created_at,
        updated_at: volume.created_at,
    }
}
