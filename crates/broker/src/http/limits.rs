//! Rate limits at the door: what an address that shows bad credentials still may, and which routes are paid for apart.

use std::{
    hash::{BuildHasher, RandomState},
    net::IpAddr,
    sync::{LazyLock, atomic::Ordering::Relaxed},
};

use axum::{extract::Request, response::Response};
use cobox_protocol::ApiError;
use http::{HeaderMap, Method, StatusCode, header};

use super::{Api, error::Seen};
use crate::domain::{
    model::Principal,
    rates::{Class, Source},
};

/// See [`is_for_anybody`].
const FOR_ANYBODY: [&str; 5] = ["/healthz", "/readyz", "/metrics", "/openapi.json", "/webhooks/threads"];

/// The other end of the connection.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub IpAddr);

/// Around everything that looks at credentials, the gateway too: a request that may be tried, watched for whether its credential is good.
pub struct Watch {
    source: Source,
    /// Which credential was shown, where it is looked at.
    credential: Option<Option<u64>>,
}

impl Watch {
    /// Nothing for what wants no credential.
    pub fn begin(api: &Api, Peer(address): Peer, request: &Request) -> Result<Option<Self>, ApiError> {
        if is_for_anybody(request) {
            return Ok(None);
        }
        let (rates, source) = (&api.rates, Source::from(address));
        // While nobody fails, nobody is looked at.
        let credential = if rates.is_quiet() { None } else { Some(credential(request.headers())) };
        if let Some(credential) = credential {
            rates.may_try(source, credential, api.deployment.now()).inspect_err(|_| {
                api.metrics.rate_limited.fetch_add(1, Relaxed);
            })?;
        }
        Ok(Some(Self { source, credential }))
    }

    /// `is_known`: somebody was let in, whatever the sandbox then made of it.
    pub fn end(self, api: &Api, response: &Response, is_known: bool) {
        let is_refused = match response.extensions().get::<ApiError>() {
            Some(error) => error.code.status() == StatusCode::UNAUTHORIZED.as_u16(),
            None => response.status() == StatusCode::UNAUTHORIZED,
        };
        match self.credential {
            _ if is_refused && !is_known => api.rates.failed(self.source, api.deployment.now()),
            Some(Some(credential)) if is_known => api.rates.succeeded(self.source, credential),
            _ => {}
        }
    }
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
