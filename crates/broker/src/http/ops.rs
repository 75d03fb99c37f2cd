//! `/healthz` and `/readyz`: whether the process lives, and whether it can do its work.

use axum::{Json, Router, extract::State, routing::get};
use serde_json::{Value, json};

use super::{Api, error::Failure};
use crate::domain::deployment::internal;

pub fn routes() -> Router<Api> {
    Router::new().route("/healthz", get(healthz)).route("/readyz", get(readyz))
}

async fn healthz() -> Json<Value> {
    Json(json!({ "status": "ok", "version": env!("CARGO_PKG_VERSION") }))
}

async fn readyz(State(api): State<Api>) -> Result<Json<Value>, Failure> {
    api.deployment.store.has_sandboxes(None).await.map_err(internal)?;
    Ok(Json(json!({ "status": "ready" })))
}
