//! `…/delegate` and `…/file-links`: tokens derived from a caller's own permissions, and links for browsers.

use axum::{
    Json,
    extract::{FromRequestParts, Path, State},
};
use cobox_gateway::Credential;
use cobox_protocol::{
    ApiError, RequestId, Secret,
    token::{DelegateResponse, FileLinkRequest, FileLinkResponse},
};
use http::request::Parts;
use serde::Deserialize;
use serde_json::Value;

use super::{
    Api,
    auth::Authenticated,
    body::JsonBody,
    error::{Failure, RequestRecord},
    negotiation::actor,
    sessions::session_id,
};
use crate::domain::{
    access::{
        RequestedCapabilities,
        rate_limiter::{ChargeRequest, RequestClass},
    },
    model::Principal,
    tokens::{
        delegation::{DelegationParams, DelegationTarget, Delegator},
        file_links::{FileLinkParams, LinkMethod},
    },
};

const SESSIONS: &str = "/v1/sandbox/sessions/";

fn unreadable_path() -> ApiError {
    ApiError::invalid("the path: can't be read; it must be UTF-8, percent-encoded")
}

/// A caller with a key, or a client that has only a token.
pub enum Presenter {
    Caller(Box<Authenticated>),
    Holder { token: Secret, request_id: RequestId, record: Option<RequestRecord> },
}

impl FromRequestParts<Api> for Presenter {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, Failure> {
        // A token of an OIDC issuer is treated like a key.
        let is_ours = |token: &Secret| !api.context.oidc.as_ref().is_some_and(|o| o.is_of_issuer(token));
        if let Some(Credential::Token(token)) = Credential::from_headers(&parts.headers)?
            && is_ours(&token)
        {
            // The principal is known only after the token has been verified together with its target.
            let Path(id) = Path::<String>::from_request_parts(parts, api).await.map_err(|_| unreadable_path())?;
            let target = if parts.uri.path().starts_with(SESSIONS) {
                DelegationTarget::Session(session_id(&id)?)
            } else {
                DelegationTarget::Sandbox(&id)
            };
            api.services.delegations.check_holder(target, &token).await?;
            let request_id = parts.extensions.get::<RequestId>().cloned().unwrap_or_else(RequestId::new);
            let record = parts.extensions.get::<RequestRecord>().cloned();
            return Ok(Presenter::Holder { token, request_id, record });
        }
        Authenticated::from_request_parts(parts, api).await.map(|auth| Presenter::Caller(Box::new(auth)))
    }
}

impl Presenter {
    fn record(&self) -> Option<&RequestRecord> {
        match self {
            Presenter::Caller(_) => None,
            Presenter::Holder { record, .. } => record.as_ref(),
        }
    }

    fn delegator<'a>(&'a self, charge: ChargeRequest<'a>) -> Delegator<'a> {
        match self {
            // A caller with a key has already been counted by the rate limiter.
            Presenter::Caller(auth) => Delegator::Caller(auth.request_context()),
            Presenter::Holder { token, request_id, .. } => Delegator::Holder { token: token.clone(), request_id, charge },
        }
    }
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct DelegationBody {
    #[serde(alias = "requested_capabilities")]
    capabilities: Option<Vec<String>>,
    scopes: Option<Vec<String>>,
    ttl: Option<u32>,
    parent_token: Option<Secret>,
    actor: Option<Value>,
    token_format: Option<String>,
}

impl DelegationBody {
    fn read(&self) -> Result<DelegationParams<'_>, ApiError> {
        Ok(DelegationParams {
            capabilities: requested(self.capabilities.as_ref(), self.scopes.as_ref())?,
            ttl: self.ttl,
            parent: self.parent_token.clone(),
            actor: self.actor.as_ref().map(actor).transpose()?,
            format: self.token_format.as_deref().map(str::parse).transpose()?,
        })
    }
}

/// The field is accepted under either name, but not under both.
pub fn requested<'a>(
    capabilities: Option<&'a Vec<String>>,
    scopes: Option<&'a Vec<String>>,
) -> Result<RequestedCapabilities<'a>, ApiError> {
    match (capabilities, scopes) {
        (Some(_), Some(_)) => Err(ApiError::invalid("scopes: is a legacy name of capabilities; send one of them")),
        (Some(words), None) => Ok(RequestedCapabilities { field: "capabilities", words }),
        (None, Some(words)) => Ok(RequestedCapabilities { field: "scopes", words }),
        (None, None) => Err(ApiError::invalid("capabilities: is missing; list the capabilities to allow")),
    }
}

pub async fn of_session(
    State(api): State<Api>,
    auth: Presenter,
    Path(id): Path<String>,
    JsonBody(body): JsonBody<DelegationBody>,
) -> Result<Json<DelegateResponse>, Failure> {
    let charge = |holder: &Principal| api.charge(auth.record(), holder, RequestClass::Request);
    Ok(Json(api.services.delegations.delegate(auth.delegator(&charge), DelegationTarget::Session(session_id(&id)?), body.read()?).await?))
}

pub async fn of_sandbox(
    State(api): State<Api>,
    auth: Presenter,
    Path(id): Path<String>,
    JsonBody(body): JsonBody<DelegationBody>,
) -> Result<Json<DelegateResponse>, Failure> {
    let charge = |holder: &Principal| api.charge(auth.record(), holder, RequestClass::Request);
    Ok(Json(api.services.delegations.delegate(auth.delegator(&charge), DelegationTarget::Sandbox(&id), body.read()?).await?))
}

pub async fn file_link(
    State(api): State<Api>,
    auth: Authenticated,
    Path(id): Path<String>,
    JsonBody(params): JsonBody<FileLinkRequest>,
) -> Result<Json<FileLinkResponse>, Failure> {
    let unknown = || ApiError::invalid("method: must be GET or PUT");
    let method = params.method.as_deref().map_or(Some(LinkMethod::Get), LinkMethod::parse).ok_or_else(unknown)?;
    Ok(Json(
        api.services
            .file_links
            .of_session(&auth.request_context(), &session_id(&id)?, FileLinkParams { path: &params.path, method, ttl: params.ttl })
            .await?,
    ))
}
