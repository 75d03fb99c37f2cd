//! `GET /capabilities?thread_id=`: the services that a front end can reach for a thread, with their credentials.

use axum::{Json, extract::State};
use cobox_protocol::{
    ErrorCode,
    thread::{Capabilities, Service},
};
use serde::Deserialize;

use super::{Api, auth::Authenticated, error::Failure, paging::Params};

/// Name of the only service so far.
const SANDBOX: &str = "sandbox";
const PROTOCOL: &str = "rest+ws";

#[derive(Deserialize)]
pub struct CapabilitiesQuery {
    thread_id: String,
}

/// Creates and starts nothing: a thread without a session has no services.
pub async fn show(
    State(api): State<Api>,
    auth: Authenticated,
    Params(query): Params<CapabilitiesQuery>,
) -> Result<Json<Capabilities>, Failure> {
    let mut capabilities = Capabilities::default();
    let id = match api.services.threads.session_id_of(&auth.caller, &query.thread_id).await {
        Ok(id) => id,
        Err(e) if e.code == ErrorCode::SessionNotFound => return Ok(Json(capabilities)),
        Err(e) => return Err(e.into()),
    };
    let found = api.services.sessions.get(&auth.request_context(), &id).await?;
    let service = Service {
        // A front end appends the version itself.
        url: found.sandbox.http_base_url.trim_end_matches("/v1").to_owned(),
        token: found.token,
        protocol: PROTOCOL.to_owned(),
        expires_at: found.expires_at,
        refresh_before: found.refresh_before,
        session_id: found.session_id,
    };
    capabilities.services.insert(SANDBOX.to_owned(), service);
    Ok(Json(capabilities))
}
