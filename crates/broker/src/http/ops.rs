//! For whoever runs it: whether the process lives, whether it can do its work, what it counts, and what can be asked of it.

use axum::{
    Json,
    extract::{Request, State},
    response::IntoResponse,
    routing::get,
};
use cobox_protocol::{ApiError, ErrorCode};
use http::{HeaderMap, header};
use serde_json::{Map, Value, json};

use super::{Api, Routes, auth::Authenticated, error::Failure, limits::Peer};
use crate::metrics::Gauges;

/// Made by `make openapi`, and held to the router by tests.
const OPENAPI: &str = include_str!("../../../../openapi/broker.json");
/// What proxies add: a request that has one did not start on this machine, whatever its address says.
const FORWARDED: [&str; 4] = ["forwarded", "x-forwarded-for", "x-real-ip", "via"];

pub fn routes() -> Routes {
    Routes::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(openapi))
}

async fn healthz() -> Json<Value> {
    Json(json!({ "status": "ok", "version": env!("CARGO_PKG_VERSION") }))
}

async fn readyz(State(api): State<Api>) -> Result<Json<Value>, Failure> {
    let checks = api.health.checks().await;
    let word = |is_well| if is_well { "ok" } else { "failed" };
    let told: Map<String, Value> = checks.named().into_iter().map(|(name, is_well)| (name.to_owned(), word(is_well).into())).collect();
    if checks.is_ready() {
        return Ok(Json(json!({ "status": "ready", "checks": told })));
    }
    let failed: Vec<&str> = checks.named().into_iter().filter(|(_, is_well)| !is_well).map(|(name, _)| name).collect();
    let message = format!("not ready: {} failed; the broker's log says why", failed.join(", "));
    Err(ApiError::new(ErrorCode::BackendUnavailable, message).with_details(json!({ "checks": told })).into())
}

async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI)
}

/// For programs on this machine, and for operators from elsewhere.
async fn metrics(State(api): State<Api>, request: Request) -> Result<impl IntoResponse, Failure> {
    let is_local = request.extensions().get::<Peer>().is_some_and(|Peer(address)| address.to_canonical().is_loopback());
    if !is_local || is_forwarded(request.headers()) {
        let (mut parts, _) = request.into_parts();
        let who = <Authenticated as axum::extract::FromRequestParts<Api>>::from_request_parts(&mut parts, &api).await?;
        crate::domain::access::must_be_operator(&who.caller.principal, "read the metrics from another machine")?;
    }
    let store = &api.deployment.store;
    let counts = store.counts(api.deployment.now()).await;
    if let Err(error) = &counts {
        tracing::warn!(%error, "the store could not be counted");
    }
    let gauges = Gauges { tokens_issued: api.deployment.tokens.issued(), commits: store.commit_times(), counts: counts.ok() };
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], api.metrics.text(&gauges)))
}

fn is_forwarded(headers: &HeaderMap) -> bool {
    FORWARDED.iter().any(|name| headers.contains_key(*name))
}
