//! For whoever runs it: whether the process lives, whether it can do its work, and what can be asked of it.

use axum::{Json, extract::State, response::IntoResponse, routing::get};
use http::header;
use serde_json::{Value, json};

use super::{Api, Routes, error::Failure};
use crate::domain::deployment::internal;

pub fn routes() -> Routes {
    Routes::new().route("/healthz", get(healthz)).route("/readyz", get(readyz)).route("/openapi.json", get(openapi))
}

/// Made by `make openapi`, and held to the router by tests.
const OPENAPI: &str = include_str!("../../../../openapi/broker.json");

async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI)
}

async fn healthz() -> Json<Value> {
    Json(json!({ "status": "ok", "version": env!("CARGO_PKG_VERSION") }))
}

async fn readyz(State(api): State<Api>) -> Result<Json<Value>, Failure> {
    api.deployment.store.has_sandboxes(None).await.map_err(internal)?;
    Ok(Json(json!({ "status": "ready" })))
}
