//! `/v1/audit`: the audit records of a workspace and the hash chains that prove their integrity, for operators.

use axum::{Json, extract::State};
use cobox_protocol::{
    ApiError,
    audit::{AuditEntry, AuditHeads, AuditLink},
    session::Page,
};
use serde::Deserialize;

use super::{
    Api,
    auth::Authenticated,
    error::Failure,
    paging::{PageQuery, Params, page},
};

/// Maximum number of links in a response. Clients that read millions need fewer requests, and a response stays below 2
/// MB.
const MAX_LINKS: u32 = 1000;

#[derive(Deserialize)]
pub struct AuditQuery {
    limit: Option<String>,
    cursor: Option<String>,
    /// Id of a sandbox, which may have ended.
    sandbox: Option<String>,
    /// Id of a token.
    #[serde(alias = "jti")]
    token: Option<String>,
}

pub async fn list(
    State(api): State<Api>,
    auth: Authenticated,
    Params(query): Params<AuditQuery>,
) -> Result<Json<Page<AuditEntry>>, Failure> {
    let params = PageQuery { limit: query.limit, cursor: query.cursor }.page_params::<u64>()?;
    if query.sandbox.is_some() && query.token.is_some() {
        return Err(ApiError::invalid("token: send it or sandbox, not both").into());
    }
    let items = api.services.audit_log.records(&auth.caller, query.sandbox.as_deref(), query.token.as_deref(), &params).await?;
    Ok(Json(page(items, &params, |e| e.sequence.to_string())))
}

pub async fn heads(State(api): State<Api>, auth: Authenticated) -> Result<Json<AuditHeads>, Failure> {
    Ok(Json(AuditHeads { items: api.services.audit_log.heads(&auth.caller, &auth.request_id).await? }))
}

#[derive(Deserialize)]
pub struct LinksQuery {
    writer: String,
    after: Option<String>,
    limit: Option<String>,
}

/// Returns the oldest first, unlike other lists: a chain is verified from its beginning.
pub async fn links(
    State(api): State<Api>,
    auth: Authenticated,
    Params(query): Params<LinksQuery>,
) -> Result<Json<Page<AuditLink>>, Failure> {
    let number = |field: &str, value: Option<String>, default: u64, most: u64| match value.map_or(Ok(default), |v| v.parse()) {
        Ok(n) if n <= most => Ok(n),
        _ => Err(ApiError::invalid(format!("{field}: must be a whole number up to {most}"))),
    };
    let after = number("after", query.after, 0, i64::MAX as u64)?;
    let limit = number("limit", query.limit, u64::from(MAX_LINKS), u64::from(MAX_LINKS))?.max(1);
    let limit = u32::try_from(limit).unwrap_or(MAX_LINKS);
    let items = api.services.audit_log.links(&auth.caller, &query.writer, after, limit).await?;
    let next_cursor = items.last().filter(|_| items.len() == limit as usize).map(|l| l.number.to_string());
    Ok(Json(Page { items, next_cursor }))
}
