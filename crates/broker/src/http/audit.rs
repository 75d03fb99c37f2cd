//! `/v1/audit`: who did what in a workspace, for its operators.

use axum::{Json, extract::State, routing::get};
use cobox_protocol::{audit::AuditEntry, session::Page};
use serde::Deserialize;

use super::{
    Api, Routes,
    auth::Authenticated,
    error::Failure,
    paging::{PageQuery, Params, page},
};

pub fn routes() -> Routes {
    Routes::new().route("/v1/audit", get(list))
}

#[derive(Deserialize)]
struct AuditQuery {
    #[serde(flatten)]
    page: PageQuery,
    /// A sandbox's id; ended ones can be asked about too.
    sandbox: Option<String>,
}

async fn list(State(api): State<Api>, who: Authenticated, Params(query): Params<AuditQuery>) -> Result<Json<Page<AuditEntry>>, Failure> {
    let wish = query.page.wish::<u64>()?;
    let items = api.sandboxes.audit(&who.caller, query.sandbox.as_deref(), &wish).await?;
    Ok(Json(page(items, &wish, |e| e.sequence.to_string())))
}
