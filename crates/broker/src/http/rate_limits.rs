//! Rate limits: the response to addresses that send invalid credentials, and which routes have a separate limit.

use std::{net::IpAddr, sync::atomic::Ordering::Relaxed, time::Duration};

use axum::response::{IntoResponse, Response};
use cobox_gateway::ClientAddress;
use cobox_protocol::ApiError;
use http::{Method, StatusCode};

use super::{
    Api,
    error::{Failure, RequestRecord},
};
use crate::domain::{access::rate_limiter::RequestClass, model::Principal};

/// Delay of a refusal when an address exceeds the limit on failures. Every credential is checked, because it may be
/// valid. The delay limits an address to one check a second for each connection it may have.
const REFUSAL_DELAY: Duration = Duration::from_secs(1);

/// Address of the connection's remote end.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub IpAddr);

/// Counts a response to a request without a valid credential against the client's address, including responses of the
/// gateway. Replaces the response if there were too many. Authenticated requests are never counted, and never refused
/// because of other clients' failures.
pub async fn limit_failures(api: &Api, Peer(address): Peer, response: Response, is_known: bool) -> Response {
    let is_refused = match response.extensions().get::<ApiError>() {
        Some(error) => error.code.status() == StatusCode::UNAUTHORIZED.as_u16(),
        None => response.status() == StatusCode::UNAUTHORIZED,
    };
    if !is_refused || is_known {
        return response;
    }
    match api.rate_limiter.charge_failure(ClientAddress::from(address), api.context.now()) {
        Ok(()) => response,
        Err(limited) => {
            api.metrics.rate_limited.fetch_add(1, Relaxed);
            tokio::time::sleep(REFUSAL_DELAY).await;
            Failure::from(limited).into_response()
        }
    }
}

impl Api {
    /// Records the principal and counts the request against its limit. Over the limit, the error says when to retry.
    pub fn charge(&self, record: Option<&RequestRecord>, principal: &Principal, class: RequestClass) -> Result<(), ApiError> {
        if let Some(record) = record {
            record.set_principal(principal)?;
        }
        self.rate_limiter.charge(principal, class, self.context.now()).inspect_err(|_| {
            self.metrics.rate_limited.fetch_add(1, Relaxed);
        })
    }
}

/// The limit class of a request. See [`RequestClass`].
pub fn class(method: &Method, route: &str) -> RequestClass {
    let is_upkeep = *method == Method::DELETE || ["/heartbeat", "/refresh", "/refresh-token"].iter().any(|end| route.ends_with(end));
    if is_upkeep { RequestClass::Upkeep } else { RequestClass::Request }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeping_and_ending_sessions_has_its_own_limit() {
        assert_eq!(class(&Method::POST, "/v1/sandbox/sessions/{id}/heartbeat"), RequestClass::Upkeep);
        assert_eq!(class(&Method::DELETE, "/v1/sandbox/sessions/{id}"), RequestClass::Upkeep);
        assert_eq!(class(&Method::POST, "/threads/{thread_id}/sandbox/refresh"), RequestClass::Upkeep);
        assert_eq!(class(&Method::POST, "/v1/sandbox/sessions"), RequestClass::Request);
        assert_eq!(class(&Method::GET, "/v1/sandbox/sessions/{id}"), RequestClass::Request);
    }
}
