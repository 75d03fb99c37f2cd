//! `/v2/sandboxes/pools`: pools, as requested by SDKs before 0.7.34.

use std::time::Duration;

use axum::{
    Json,
    extract::{Path, State},
};
use cobox_protocol::{PoolId, Timestamp};
use http::StatusCode;
use serde::{Deserialize, Serialize};

use crate::{
    domain::resources::{pools::PoolParams, records::Pool},
    http::{Api, auth::Authenticated, body::JsonBody, error::Failure},
};

/// Default time to wait for the whole pool, as in the SDKs.
const DEFAULT_WAIT: Duration = Duration::from_secs(30);
const MAX_WAIT: Duration = Duration::from_secs(300);

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PoolRequest {
    name: String,
    template_name: String,
    replicas: u32,
    #[serde(default)]
    wait_for_ready: Option<bool>,
    /// How long to wait for the pool to be ready, in seconds.
    #[serde(default)]
    timeout: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PoolChange {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    replicas: Option<u32>,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(rename = "PoolShown"))]
pub struct PoolResponse {
    id: PoolId,
    name: String,
    template_name: String,
    replicas: u32,
    /// How many wait ready.
    ready_replicas: u32,
    /// Why fewer wait than are wanted, where that isn't only a matter of moments.
    status_message: Option<String>,
    created_at: Timestamp,
    updated_at: Timestamp,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PoolList {
    pools: Vec<PoolResponse>,
}

pub async fn create(
    State(api): State<Api>,
    auth: Authenticated,
    JsonBody(params): JsonBody<PoolRequest>,
) -> Result<(StatusCode, Json<PoolResponse>), Failure> {
    let pool_params = PoolParams { name: params.name, template: params.template_name, replicas: params.replicas };
    let pool = api.services.pools.create(&auth.request_context(), pool_params).await?;
    if params.wait_for_ready.unwrap_or(true) {
        let wait = params.timeout.map_or(DEFAULT_WAIT, Duration::from_secs).min(MAX_WAIT);
        if let Err(late) = api.services.pools.wait_until_full(&pool, wait).await {
            // The SDK retries by itself, and must not find the name taken by its own first attempt.
            api.services.pools.delete(&auth.request_context(), &pool.name).await?;
            return Err(late.into());
        }
    }
    Ok((StatusCode::CREATED, Json(to_response(&api, pool).await?)))
}

pub async fn list(State(api): State<Api>, auth: Authenticated) -> Result<Json<PoolList>, Failure> {
    let mut pools = Vec::new();
    for pool in api.services.pools.list(&auth.request_context()).await? {
        pools.push(to_response(&api, pool).await?);
    }
    Ok(Json(PoolList { pools }))
}

pub async fn show(State(api): State<Api>, auth: Authenticated, Path(name): Path<String>) -> Result<Json<PoolResponse>, Failure> {
    Ok(Json(to_response(&api, api.services.pools.get(&auth.request_context(), &name).await?).await?))
}

pub async fn change(
    State(api): State<Api>,
    auth: Authenticated,
    Path(name): Path<String>,
    JsonBody(params): JsonBody<PoolChange>,
) -> Result<Json<PoolResponse>, Failure> {
    Ok(Json(to_response(&api, api.services.pools.change(&auth.request_context(), &name, params.name, params.replicas).await?).await?))
}

pub async fn remove(State(api): State<Api>, auth: Authenticated, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    api.services.pools.delete(&auth.request_context(), &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn to_response(api: &Api, pool: Pool) -> Result<PoolResponse, Failure> {
    Ok(PoolResponse {
        ready_replicas: api.services.pools.ready_members(&pool).await?.min(pool.replicas),
        id: pool.id,
        name: pool.name,
        template_name: pool.template,
        replicas: pool.replicas,
        status_message: pool.trouble.reason,
        created_at: pool.created_at,
        updated_at: pool.updated_at,
    })
}
