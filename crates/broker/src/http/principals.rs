//! `/v1/principals`: the principals of a workspace, for operators.

use axum::{
    Json,
    extract::{Path, State},
    routing::{get, post},
};
use cobox_protocol::{key::PrincipalInfo, session::Page};
use http::StatusCode;
use serde::Deserialize;

use super::{
    Api, Routes,
    auth::Authenticated,
    body::{MaybeJsonBody, NoFields},
    error::Failure,
    paging::{PageQuery, Params, page},
};

pub fn routes() -> Routes {
    Routes::new()
        .route("/v1/principals", get(list))
        .route("/v1/principals/{name}/disable", post(disable))
        .route("/v1/principals/{name}/enable", post(enable))
}

/// Defaults to the caller's own workspace.
#[derive(Deserialize)]
struct Within {
    workspace: Option<String>,
}

async fn list(
    State(api): State<Api>,
    who: Authenticated,
    Params(within): Params<Within>,
    Params(query): Params<PageQuery>,
) -> Result<Json<Page<PrincipalInfo>>, Failure> {
    let wish = query.wish::<String>()?;
    let items = api.services.principals.list(&who.caller, within.workspace.as_deref(), &wish).await?;
    Ok(Json(page(items, &wish, |p| p.name.clone())))
}

async fn disable(
    State(api): State<Api>,
    who: Authenticated,
    Path(name): Path<String>,
    Params(within): Params<Within>,
    MaybeJsonBody(NoFields {}): MaybeJsonBody<NoFields>,
) -> Result<StatusCode, Failure> {
    api.services.principals.disable(&who.caller, within.workspace.as_deref(), &name, &who.request_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn enable(
    State(api): State<Api>,
    who: Authenticated,
    Path(name): Path<String>,
    Params(within): Params<Within>,
    MaybeJsonBody(NoFields {}): MaybeJsonBody<NoFields>,
) -> Result<StatusCode, Failure> {
    api.services.principals.enable(&who.caller, within.workspace.as_deref(), &name, &who.request_id).await?;
    Ok(StatusCode::NO_CONTENT)
}
