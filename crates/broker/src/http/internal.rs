//! `/internal/…`: token introspection and revocation, rotation of a sandbox's key, and ending a sandbox. For operators.

use axum::{
    Json,
    extract::{Path, Request, State},
    response::IntoResponse,
};
use cobox_protocol::{
    ApiError, Secret,
    secret::redact,
    token::{Introspection, RevokeRequest, RevokeResponse, RotateKeyRequest, RotateKeyResponse},
};
use http::{HeaderName, StatusCode, header};

use super::{
    Api,
    auth::Authenticated,
    body::{self, JsonBody, MaybeJsonBody},
    error::Failure,
};
use crate::domain::access::token_verification;

/// RFC 7662 defines both. The hint has no effect, because a token shows its own type.
const INTROSPECT_FIELDS: [&str; 2] = ["token", "token_type_hint"];
/// Maximum length of an unknown field's name in an error, in characters.
const MAX_SHOWN_CHARS: usize = 64;

/// RFC 7662 sends the token in a form.
pub async fn introspect(State(api): State<Api>, auth: Authenticated, request: Request) -> Result<impl IntoResponse, Failure> {
    let bytes = body::read(request.into_body()).await?;
    if let Some((name, _)) = form_urlencoded::parse(&bytes).find(|(name, _)| !INTROSPECT_FIELDS.contains(&name.as_ref())) {
        let printable: String = redact(&name).chars().take(MAX_SHOWN_CHARS).collect();
        return Err(ApiError::invalid(format!("{printable}: is not a field of this request; known are `token`, `token_type_hint`")).into());
    }
    let missing = || ApiError::invalid("token: is missing; send it as application/x-www-form-urlencoded");
    let token =
        form_urlencoded::parse(&bytes).find(|(name, _)| name == "token").map(|(_, token)| Secret::new(token)).ok_or_else(missing)?;
    answer(&api, &auth, &token).await
}

pub async fn show(State(api): State<Api>, auth: Authenticated, Path(token): Path<String>) -> Result<impl IntoResponse, Failure> {
    answer(&api, &auth, &Secret::new(token)).await
}

type Uncached = ([(HeaderName, &'static str); 1], Json<Introspection>);

async fn answer(api: &Api, auth: &Authenticated, token: &Secret) -> Result<Uncached, Failure> {
    let introspection = token_verification::introspect(&api.context, &auth.caller, token).await?;
    Ok(([(header::CACHE_CONTROL, "no-store")], Json(introspection)))
}

pub async fn revoke(
    State(api): State<Api>,
    auth: Authenticated,
    JsonBody(params): JsonBody<RevokeRequest>,
) -> Result<Json<RevokeResponse>, Failure> {
    Ok(Json(api.services.revocations.revoke(&auth.caller, &params, &auth.request_id).await?))
}

pub async fn rotate_key(
    State(api): State<Api>,
    auth: Authenticated,
    Path(id): Path<String>,
    MaybeJsonBody(params): MaybeJsonBody<RotateKeyRequest>,
) -> Result<Json<RotateKeyResponse>, Failure> {
    Ok(Json(api.services.revocations.rotate(&auth.caller, &id, params.mode, &auth.request_id).await?))
}

pub async fn end_sandbox(State(api): State<Api>, auth: Authenticated, Path(id): Path<String>) -> Result<StatusCode, Failure> {
    api.services.revocations.end_sandbox(&auth.caller, &id, &auth.request_id).await?;
    Ok(StatusCode::NO_CONTENT)
}
