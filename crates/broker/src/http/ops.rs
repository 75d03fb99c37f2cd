//! For whoever runs it: whether the process lives, whether it can do its work, what it counts, and what can be asked of it.

use axum::{
    Json,
    extract::{Request, State},
    response::IntoResponse,
    routing::get,
};
use cobox_protocol::{ApiError, ErrorCode, Secret};
use http::{HeaderMap, header};
use serde_json::{Map, Value, json};
use subtle::ConstantTimeEq;

use super::{Api, Routes, auth::Authenticated, error::Failure};
use crate::{domain::health::COUNT_WITHIN, metrics::Gauges};

/// Made by `make openapi`, and held to the router by tests.
pub const OPENAPI: &str = include_str!("../../../../openapi/broker.json");

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
    let mut told: Map<String, Value> = checks.named().into_iter().map(|(name, is_well)| (name.to_owned(), word(is_well).into())).collect();
    told.insert("clock".to_owned(), if checks.clock { "ok" } else { "skewed" }.into());
    if checks.is_ready() {
        let mut answer = json!({ "status": "ready", "checks": told });
        if !checks.clock {
            answer["clock_skew_seconds"] = api.deployment.nodes.skew.largest().as_secs_f64().into();
        }
        return Ok(Json(answer));
    }
    let failed: Vec<&str> = checks.named().into_iter().filter(|(_, is_well)| !is_well).map(|(name, _)| name).collect();
    let message = format!("not ready: {} failed; the broker's log says why", failed.join(", "));
    Err(ApiError::new(ErrorCode::BackendUnavailable, message).with_details(json!({ "checks": told })).into())
}

async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI)
}

/// For operators, for who has the scraper's token, and for anybody where that is wanted.
async fn metrics(State(api): State<Api>, request: Request) -> Result<impl IntoResponse, Failure> {
    if !api.deployment.config.metrics.public && !is_scraper(api.scraper.as_deref(), request.headers()) {
        let (mut parts, _) = request.into_parts();
        let asking = <Authenticated as axum::extract::FromRequestParts<Api>>::from_request_parts(&mut parts, &api);
        // Who has the scraper's token doesn't depend on the database; an operator's key does, and is answered in time all the same.
        let late =
            |_| ApiError::new(ErrorCode::BackendUnavailable, "the broker's database doesn't answer; use the metrics token meanwhile");
        let who = tokio::time::timeout(COUNT_WITHIN, asking).await.map_err(late)??;
        crate::domain::access::must_be_operator(&who.caller.principal, "read the metrics")?;
    }
    let store = &api.deployment.store;
    let counts = api.health.counts().await;
    let nodes = &api.deployment.nodes;
    let gauges = Gauges {
        tokens_issued: api.deployment.tokens.issued(),
        commits: store.commit_times(),
        is_store_up: counts.is_some() && api.health.checks().await.store,
        audit_lost: api.audit.lost(),
        quarantined: api.deployment.quarantine.counts(),
        peers: nodes.counts(api.deployment.now()),
        clock_skew: nodes.skew.largest(),
        store_waits: store.wait_times(),
        disk: api.deployment.disk_space(),
        sandbox_limit: api.deployment.config.max_sandboxes_per_workspace,
        started_at: api.deployment.started_at.unix(),
        counts,
    };
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], api.metrics.text(&gauges)))
}

fn is_scraper(token: Option<&Secret>, headers: &HeaderMap) -> bool {
    let shown = headers.get(header::AUTHORIZATION).and_then(|v| v.as_bytes().strip_prefix(b"Bearer "));
    matches!((token, shown), (Some(token), Some(shown)) if bool::from(token.expose().as_bytes().ct_eq(shown)))
}
