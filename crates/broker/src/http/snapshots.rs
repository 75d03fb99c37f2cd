//! `/v1/snapshots`, and taking a snapshot of a sandbox.

use axum::{
    Json,
    extract::{Path, State},
};
use cobox_protocol::{
    resources::{SnapshotInfo, TakeSnapshot},
    session::Page,
};
use http::StatusCode;
use serde::Deserialize;

use super::{Api, auth::Authenticated, body::JsonBody, error::Failure, paging::Params};
use crate::{
    domain::resources::{records::Snapshot, snapshots::SnapshotParams},
    store::SnapshotFilter,
};

/// Maximum number of listed snapshots: as many as a workspace usually has.
const MAX_PAGE_SIZE: u32 = 500;

#[derive(Deserialize)]
pub struct SnapshotsQuery {
    name: Option<String>,
}

pub async fn take(
    State(api): State<Api>,
    auth: Authenticated,
    Path(id_or_name): Path<String>,
    JsonBody(params): JsonBody<TakeSnapshot>,
) -> Result<(StatusCode, Json<SnapshotInfo>), Failure> {
    let snapshot_params = SnapshotParams { name: &params.name, tag: params.tag.as_deref(), ..SnapshotParams::default() };
    let snapshot = api.services.snapshots.take(&auth.request_context(), &id_or_name, snapshot_params).await?;
    Ok((StatusCode::ACCEPTED, Json(snapshot.info())))
}

pub async fn list(
    State(api): State<Api>,
    auth: Authenticated,
    Params(query): Params<SnapshotsQuery>,
) -> Result<Json<Page<SnapshotInfo>>, Failure> {
    let filter = SnapshotFilter { name: query.name, limit: MAX_PAGE_SIZE, ..SnapshotFilter::default() };
    let items = api.services.snapshots.list(&auth.request_context(), &filter).await?.into_iter().map(Snapshot::info).collect();
    Ok(Json(Page { items, next_cursor: None }))
}

pub async fn show(State(api): State<Api>, auth: Authenticated, Path(reference): Path<String>) -> Result<Json<SnapshotInfo>, Failure> {
    Ok(Json(api.services.snapshots.get(&auth.request_context(), &reference).await?.info()))
}

pub async fn remove(State(api): State<Api>, auth: Authenticated, Path(reference): Path<String>) -> Result<StatusCode, Failure> {
    api.services.snapshots.delete(&auth.request_context(), &reference).await?;
    Ok(StatusCode::NO_CONTENT)
}
