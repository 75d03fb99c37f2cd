//! Rate limits at the door: what an address that shows bad credentials still may, and which routes are paid for apart.

use std::{
    hash::{BuildHasher, RandomState},
    net::IpAddr,
    sync::{Arc, LazyLock, atomic::Ordering::Relaxed},
};

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use cobox_protocol::ApiError;
use http::{HeaderMap, Method, StatusCode, header};

use super::{Api, error::Failure};
use crate::domain::{
    model::Principal,
    rates::{Class, Source},
};

/// The other end of the connection, put among a request's extensions by whoever accepted it.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub IpAddr);

/// Around everything that looks at credentials, the gateway too.
pub async fn by_address(State(api): State<Arc<Api>>, request: Request, next: Next) -> Response {
    let Some(Peer(address)) = request.extensions().get::<Peer>().copied() else { return next.run(request).await };
    let (rates, source) = (api.rates.clone(), Source::from(address));
    // While nobody fails, nobody is looked at.
    let credential = if rates.is_quiet() { None } else { Some(credential(request.headers())) };
    if let Some(credential) = credential
        && let Err(refused) = rates.may_try(source, credential, api.deployment.now())
    {
        api.metrics.rate_limited.fetch_add(1, Relaxed);
        return Failure::from(refused).into_response();
    }
    let response = next.run(request).await;
    let is_refused = match response.extensions().get::<ApiError>() {
        Some(error) => error.code.status() == StatusCode::UNAUTHORIZED.as_u16(),
        None => response.status() == StatusCode::UNAUTHORIZED,
    };
    match credential {
        _ if is_refused => rates.failed(source, api.deployment.now()),
        Some(Some(credential)) => rates.succeeded(source, credential),
        _ => {}
    }
    response
}

/// Which credential was shown, as a number that means nothing outside this process.
fn credential(headers: &HeaderMap) -> Option<u64> {
    static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    let shown = headers.get(header::AUTHORIZATION).or_else(|| headers.get("x-api-key"))?;
    Some(HASHER.hash_one(shown.as_bytes()))
}

impl Api {
    /// Counts a request of somebody we know, or says when to come again.
    pub fn pay(&self, principal: &Principal, class: Class) -> Result<(), ApiError> {
        self.rates.ask(principal, class, self.deployment.now()).inspect_err(|_| {
            self.metrics.rate_limited.fetch_add(1, Relaxed);
        })
    }
}

/// See [`Class`].
pub fn class(method: &Method, route: &str) -> Class {
    let is_upkeep = *method == Method::DELETE || ["/heartbeat", "/refresh", "/refresh-token"].iter().any(|end| route.ends_with(end));
    if is_upkeep { Class::Upkeep } else { Class::Request }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeping_and_ending_what_one_has_is_paid_for_apart() {
        assert_eq!(class(&Method::POST, "/v1/sandbox/sessions/{id}/heartbeat"), Class::Upkeep);
        assert_eq!(class(&Method::DELETE, "/v1/sandbox/sessions/{id}"), Class::Upkeep);
        assert_eq!(class(&Method::POST, "/threads/{thread_id}/sandbox/refresh"), Class::Upkeep);
        assert_eq!(class(&Method::POST, "/v1/sandbox/sessions"), Class::Request);
        assert_eq!(class(&Method::GET, "/v1/sandbox/sessions/{id}"), Class::Request);
    }
}
