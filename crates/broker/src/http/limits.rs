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
use cobox_gateway::PassedFor;
use cobox_protocol::ApiError;
use http::{HeaderMap, Method, StatusCode, header};

use super::{
    Api,
    error::{Failure, Seen},
};
use crate::domain::{
    model::Principal,
    rates::{Class, Source},
};

/// See [`is_for_anybody`].
const FOR_ANYBODY: [&str; 5] = ["/healthz", "/readyz", "/metrics", "/openapi.json", "/webhooks/threads"];

/// The other end of the connection, put among a request's extensions by whoever accepted it.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub IpAddr);

/// Around everything that looks at credentials, the gateway too.
pub async fn by_address(State(api): State<Arc<Api>>, request: Request, next: Next) -> Response {
    let Some(Peer(address)) = request.extensions().get::<Peer>().copied() else { return next.run(request).await };
    if is_for_anybody(&request) {
        return next.run(request).await;
    }
    let seen = request.extensions().get::<Seen>().cloned();
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
    // Somebody who was let in, whatever the sandbox then made of it.
    let is_known = response.extensions().get::<PassedFor>().is_some() || seen.is_some_and(|seen| seen.has_asker());
    match credential {
        _ if is_refused && !is_known => rates.failed(source, api.deployment.now()),
        Some(Some(credential)) if is_known => rates.succeeded(source, credential),
        _ => {}
    }
    response
}

/// What wants no credential of its caller, and gets none: nobody can guess one there, and whoever looks after the broker, or keeps its
/// threads, may come from the same address as somebody who guesses elsewhere.
fn is_for_anybody(request: &Request) -> bool {
    FOR_ANYBODY.contains(&request.uri().path()) && credential(request.headers()).is_none()
}

/// Which credential was shown, as a number that means nothing outside this process.
fn credential(headers: &HeaderMap) -> Option<u64> {
    static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    let shown = headers.get(header::AUTHORIZATION).or_else(|| headers.get("x-api-key"))?;
    Some(HASHER.hash_one(shown.as_bytes()))
}

impl Api {
    /// Notes who asks, and counts the request, or says when to come again.
    pub fn pay(&self, seen: Option<&Seen>, principal: &Principal, class: Class) -> Result<(), ApiError> {
        if let Some(seen) = seen {
            seen.asker(&principal.name);
        }
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
