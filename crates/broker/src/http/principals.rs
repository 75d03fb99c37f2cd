//! `/v1/principals`: the principals of a workspace, for operators.

use axum::{
    Json,
    extract::{Path, State},
};
use cobox_protocol::{key::PrincipalInfo, session::Page};
use http::StatusCode;
use serde::Deserialize;

use super::{
    Api,
    auth::Authenticated,
    body::{MaybeJsonBody, NoFields},
    error::Failure,
    paging::{PageQuery, Params, page},
};

/// Defaults to the caller's own workspace.
#[derive(Deserialize)]
pub struct WorkspaceQuery {
    workspace: Option<String>,
}

pub async fn list(
    State(api): State<Api>,
    auth: Authenticated,
    Params(workspace): Params<WorkspaceQuery>,
    Params(query): Params<PageQuery>,
) -> Result<Json<Page<PrincipalInfo>>, Failure> {
    let params = query.page_params::<String>()?;
    let items = api.services.principals.list(&auth.caller, workspace.workspace.as_deref(), &params).await?;
    Ok(Json(page(items, &params, |p| p.name.clone())))
}

pub async fn disable(
    State(api): State<Api>,
    auth: Authenticated,
    Path(name): Path<String>,
    Params(workspace): Params<WorkspaceQuery>,
    MaybeJsonBody(NoFields {}): MaybeJsonBody<NoFields>,
) -> Result<StatusCode, Failure> {
    api.services.principals.disable(&auth.caller, workspace.workspace.as_deref(), &name, &auth.request_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub async fn enable(
    State(api): State<Api>,
    auth: Authenticated,
    Path(name): Path<String>,
    Params(workspace): Params<WorkspaceQuery>,
    MaybeJsonBody(NoFields {}): MaybeJsonBody<NoFields>,
) -> Result<StatusCode, Failure> {
    api.services.principals.enable(&auth.caller, workspace.workspace.as_deref(), &name, &auth.request_id).await?;
    Ok(StatusCode::NO_CONTENT)
}
