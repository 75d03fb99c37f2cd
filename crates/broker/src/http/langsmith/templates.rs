//! `/v2/sandboxes/templates`: templates, as requested by SDKs before 0.7.34.

use axum::{
    Json,
    extract::{Path, State},
};
use cobox_protocol::{
    ApiError, Timestamp,
    resources::{CreateTemplate, MountParams, Resources},
};
use http::StatusCode;
use serde::{Deserialize, Serialize};

use super::quantity;
use crate::{
    domain::resources::templates::ResolvedTemplate,
    http::{Api, auth::Authenticated, body::JsonBody, error::Failure},
};

/// Image name of a template without an image: these clients require a string.
const NO_IMAGE: &str = "default";

#[derive(Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(rename = "ResourceWords"))]
pub struct ResourceFields {
    /// As `500m` or `2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// As `512Mi` or `1Gi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VolumeMount {
    pub volume_name: String,
    pub mount_path: String,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(rename = "TemplateWish"))]
pub struct TemplateParams {
    name: String,
    /// An image of the provider; omitted or `default`: the provider's default image.
    #[serde(default)]
    image: Option<String>,
    #[serde(default)]
    resources: Option<ResourceFields>,
    #[serde(default)]
    volume_mounts: Option<Vec<VolumeMount>>,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Rename {
    name: String,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(rename = "TemplateShown"))]
pub struct TemplateResponse {
    /// Its name: a template has no other id.
    id: String,
    name: String,
    image: String,
    resources: ResourceFields,
    volume_mounts: Vec<VolumeMount>,
    created_at: Option<Timestamp>,
    updated_at: Option<Timestamp>,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TemplateList {
    templates: Vec<TemplateResponse>,
}

pub async fn create(
    State(api): State<Api>,
    auth: Authenticated,
    JsonBody(params): JsonBody<TemplateParams>,
) -> Result<(StatusCode, Json<TemplateResponse>), Failure> {
    Ok((StatusCode::CREATED, Json(to_response(api.services.templates.create(&auth.request_context(), read(params)?).await?))))
}

pub async fn list(State(api): State<Api>, auth: Authenticated) -> Result<Json<TemplateList>, Failure> {
    let templates = api.services.templates.list(&auth.request_context()).await?.into_iter().map(to_response).collect();
    Ok(Json(TemplateList { templates }))
}

pub async fn show(State(api): State<Api>, auth: Authenticated, Path(name): Path<String>) -> Result<Json<TemplateResponse>, Failure> {
    Ok(Json(to_response(api.services.templates.get(&auth.request_context(), &name).await?)))
}

pub async fn change(
    State(api): State<Api>,
    auth: Authenticated,
    Path(name): Path<String>,
    JsonBody(params): JsonBody<Rename>,
) -> Result<Json<TemplateResponse>, Failure> {
    Ok(Json(to_response(api.services.templates.rename(&auth.request_context(), &name, &params.name).await?)))
}

pub async fn remove(State(api): State<Api>, auth: Authenticated, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    api.services.templates.delete(&auth.request_context(), &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn read(params: TemplateParams) -> Result<CreateTemplate, ApiError> {
    let fields = params.resources.unwrap_or_default();
    let bytes = |field, text: Option<String>| text.as_deref().map(|t| quantity::bytes(field, t)).transpose();
    Ok(CreateTemplate {
        name: params.name,
        image: params.image.filter(|image| !image.is_empty() && image != NO_IMAGE),
        resources: Resources {
            cpus: fields.cpu.as_deref().map(|t| quantity::cpus("resources.cpu", t)).transpose()?,
            memory_bytes: bytes("resources.memory", fields.memory)?,
            disk_bytes: bytes("resources.storage", fields.storage)?,
            processes: None,
        },
        mounts: params
            .volume_mounts
            .unwrap_or_default()
            .into_iter()
            .map(|m| MountParams { volume: m.volume_name, path: m.mount_path, read_only: false })
            .collect(),
        ..CreateTemplate::default()
    })
}

fn to_response(template: ResolvedTemplate) -> TemplateResponse {
    let Resources { cpus, memory_bytes, disk_bytes, .. } = template.spec.resources;
    TemplateResponse {
        id: template.name.clone(),
        name: template.name,
        image: template.spec.image.unwrap_or_else(|| NO_IMAGE.to_owned()),
        resources: ResourceFields {
            cpu: cpus.map(quantity::shown_cpus),
            memory: memory_bytes.map(quantity::shown_bytes),
            storage: disk_bytes.map(quantity::shown_bytes),
        },
        volume_mounts: template.spec.mounts.into_iter().map(|m| VolumeMount { volume_name: m.volume, mount_path: m.path }).collect(),
        created_at: template.own.as_ref().map(|t| t.created_at),
        updated_at: template.own.as_ref().map(|t| t.updated_at),
    }
}
