//! `/v2/sandboxes/snapshots`, taking a snapshot of a box, and the unsupported image registries.

use axum::{
    Json,
    extract::{Path, State},
};
use cobox_protocol::{
    ApiError, ErrorCode, SandboxId, SnapshotId, Timestamp,
    resources::{Env, SnapshotState},
};
use cobox_provider::SandboxRoot;
use http::StatusCode;
use serde::{Deserialize, Serialize};

use crate::{
    domain::resources::{records::Snapshot, snapshots::SnapshotParams},
    http::{Api, auth::Authenticated, body::JsonBody, error::Failure, paging::Params},
    store::SnapshotFilter,
};

const DEFAULT_LIMIT: u32 = 50;
/// Maximum number of items per page, as in the SDKs.
const MAX_LIMIT: u32 = 500;

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(rename = "RunWords"))]
pub struct RunFields {
    #[serde(default)]
    user: Option<String>,
    #[serde(default)]
    work_dir: Option<String>,
    #[serde(default)]
    env_vars: Option<std::collections::BTreeMap<String, String>>,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct SnapshotRequest {
    name: String,
    #[serde(default)]
    tag: Option<String>,
    /// An image of the provider. Omit it when the snapshot is taken from a box.
    #[serde(default)]
    docker_image: Option<String>,
    #[serde(default)]
    fs_capacity_bytes: Option<u64>,
    #[serde(default)]
    registry_id: Option<String>,
    #[serde(default)]
    run_config: Option<RunFields>,
}

#[derive(Debug, Deserialize)]
pub struct ListSnapshotsQuery {
    name_contains: Option<String>,
    limit: Option<u32>,
    offset: Option<u32>,
}

#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(rename = "SnapshotShown"))]
pub struct SnapshotResponse {
    id: SnapshotId,
    name: String,
    status: SnapshotState,
    status_message: Option<String>,
    /// The disk of sandboxes from it; 0 where that is the provider's to say.
    fs_capacity_bytes: u64,
    fs_used_bytes: Option<u64>,
    docker_image: Option<String>,
    source_sandbox_id: Option<SandboxId>,
    created_by: String,
    created_at: Timestamp,
    updated_at: Timestamp,
    /// Tags that currently refer to this snapshot.
    tags: Vec<String>,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct SnapshotList {
    snapshots: Vec<SnapshotResponse>,
    /// The same again, for clients that look here.
    items: Vec<SnapshotResponse>,
    next_cursor: Option<String>,
    offset: u32,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct SnapshotTag {
    tag: String,
    snapshot_id: SnapshotId,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct SnapshotTags {
    name: String,
    tags: Vec<SnapshotTag>,
}

pub async fn take(
    State(api): State<Api>,
    auth: Authenticated,
    Path(name): Path<String>,
    JsonBody(params): JsonBody<SnapshotRequest>,
) -> Result<(StatusCode, Json<SnapshotResponse>), Failure> {
    if params.docker_image.is_some() {
        return Err(ApiError::invalid("docker_image: a snapshot contains the box's files, not an image inside it; leave it out").into());
    }
    let snapshot = api.services.snapshots.take(&auth.request_context(), &name, read(&params)?).await?;
    Ok((StatusCode::CREATED, Json(to_response(&api, &auth, snapshot).await?)))
}

pub async fn create(
    State(api): State<Api>,
    auth: Authenticated,
    JsonBody(params): JsonBody<SnapshotRequest>,
) -> Result<(StatusCode, Json<SnapshotResponse>), Failure> {
    let image = params.docker_image.as_deref().filter(|i| !i.is_empty());
    let image = image.ok_or_else(|| ApiError::invalid("docker_image: is missing"))?;
    let named = api.services.snapshots.create_of_image(&auth.request_context(), image, read(&params)?).await?;
    Ok((StatusCode::CREATED, Json(to_response(&api, &auth, named).await?)))
}

pub async fn list(
    State(api): State<Api>,
    auth: Authenticated,
    Params(query): Params<ListSnapshotsQuery>,
) -> Result<Json<SnapshotList>, Failure> {
    let limit = query.limit.unwrap_or(DEFAULT_LIMIT);
    if !(1..=MAX_LIMIT).contains(&limit) {
        return Err(ApiError::invalid(format!("limit: must be a whole number from 1 to {MAX_LIMIT}")).into());
    }
    let offset = query.offset.unwrap_or_default();
    let filter =
        SnapshotFilter { name_contains: query.name_contains.filter(|n| !n.is_empty()), limit, offset, ..SnapshotFilter::default() };
    let mut snapshots = Vec::new();
    for snapshot in api.services.snapshots.list(&auth.request_context(), &filter).await? {
        snapshots.push(to_response(&api, &auth, snapshot).await?);
    }
    Ok(Json(SnapshotList { items: snapshots.clone(), snapshots, next_cursor: None, offset }))
}

pub async fn show(State(api): State<Api>, auth: Authenticated, Path(reference): Path<String>) -> Result<Json<SnapshotResponse>, Failure> {
    Ok(Json(to_response(&api, &auth, api.services.snapshots.get(&auth.request_context(), &reference).await?).await?))
}

pub async fn remove(State(api): State<Api>, auth: Authenticated, Path(reference): Path<String>) -> Result<StatusCode, Failure> {
    api.services.snapshots.delete(&auth.request_context(), &reference).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub async fn by_name(State(api): State<Api>, auth: Authenticated, Path(name): Path<String>) -> Result<Json<SnapshotTags>, Failure> {
    let filter = SnapshotFilter { name: Some(name.clone()), limit: MAX_LIMIT, ..SnapshotFilter::default() };
    let mut tags = Vec::new();
    for snapshot in api.services.snapshots.list(&auth.request_context(), &filter).await? {
        tags.extend(
            api.services
                .snapshots
                .tag_of(&auth.request_context(), &snapshot)
                .await?
                .map(|tag| SnapshotTag { tag, snapshot_id: snapshot.id }),
        );
    }
    if tags.is_empty() {
        return Err(ApiError::new(ErrorCode::SnapshotNotFound, "there is no snapshot with this name").into());
    }
    Ok(Json(SnapshotTags { name, tags }))
}

pub async fn no_registries(_: Authenticated) -> Failure {
    let message = "this deployment has no container engine and no registries; an operator can name root filesystems under [local.images]";
    ApiError::new(ErrorCode::Unsupported, message).into()
}

fn read(params: &SnapshotRequest) -> Result<SnapshotParams<'_>, ApiError> {
    if params.registry_id.as_deref().is_some_and(|id| !id.is_empty()) {
        return Err(ApiError::invalid("registry_id: there are no registries here; leave it out"));
    }
    let mut env = Env::default();
    if let Some(config) = &params.run_config {
        for (field, value) in [("user", &config.user), ("work_dir", &config.work_dir)] {
            if value.as_deref().is_some_and(|v| !v.is_empty()) {
                return Err(ApiError::invalid(format!("run_config.{field}: is not supported here; set it for each command")));
            }
        }
        env = Env(config.env_vars.clone().unwrap_or_default());
    }
    Ok(SnapshotParams { name: &params.name, tag: params.tag.as_deref(), disk_bytes: params.fs_capacity_bytes.filter(|b| *b > 0), env })
}

async fn to_response(api: &Api, auth: &Authenticated, snapshot: Snapshot) -> Result<SnapshotResponse, Failure> {
    let tags = api.services.snapshots.tag_of(&auth.request_context(), &snapshot).await?.into_iter().collect();
    let docker_image = match &snapshot.spec.root {
        Some(SandboxRoot::Image(image)) if snapshot.sandbox.is_none() => Some(image.clone()),
        _ => None,
    };
    Ok(SnapshotResponse {
        id: snapshot.id,
        name: snapshot.name,
        status: snapshot.state,
        status_message: snapshot.reason,
        fs_capacity_bytes: snapshot.spec.resources.disk_bytes.unwrap_or(0),
        fs_used_bytes: snapshot.size_bytes,
        docker_image,
        source_sandbox_id: snapshot.sandbox,
        created_by: snapshot.owner,
        created_at: snapshot.created_at,
        updated_at: snapshot.updated_at,
        tags,
    })
}
