//! The control plane over HTTP: thin handlers, one file per resource, no decisions.

mod audit;
mod auth;
mod body;
mod capabilities;
mod cors;
mod dispatcher;
mod error;
mod events;
mod internal;
mod keys;
mod langsmith;
mod negotiation;
#[cfg(test)]
mod openapi;
mod ops;
mod paging;
mod principals;
mod query;
mod rate_limits;
mod request_log;
mod routes;
mod sandboxes;
mod sessions;
mod shares;
mod snapshots;
mod templates;
mod threads;
mod tokens;
pub mod trace;
mod volumes;
mod webhooks;

use std::sync::Arc;

use axum::middleware;
use cobox_gateway::{ClientAddress, Domain, Gateway};

pub use dispatcher::Dispatcher;
pub use rate_limits::Peer;
pub use routes::paths;

use crate::{
    domain::{
        access::{rate_limiter::RateLimiter, recent_operators::RecentOperators, webhook::Webhook},
        audit::audit_writer::AuditTrail,
        context::BrokerContext,
        events::event_streams::EventStreams,
        lifecycle::quarantine::Quarantine,
    },
    health::Health,
    metrics::Metrics,
    services::Services,
    traces::TraceSink,
};

/// State shared by the routes.
#[derive(Clone)]
pub struct Api {
    pub services: Arc<Services>,
    pub context: Arc<BrokerContext>,
    /// Set if signed notices are accepted.
    pub webhook: Option<Arc<Webhook>>,
    pub events: Arc<EventStreams>,
    pub audit: AuditTrail,
    pub rate_limiter: Arc<RateLimiter<ClientAddress>>,
    pub quarantine: Arc<Quarantine>,
    pub health: Arc<Health>,
    pub metrics: Arc<Metrics>,
    /// Credential of a metrics scraper, accepted in place of an operator's key.
    pub scraper: Option<Arc<cobox_protocol::Secret>>,
    /// Keys that may read the metrics during an outage of the database.
    pub operators: Arc<RecentOperators>,
    pub traces: Option<Arc<dyn TraceSink>>,
}

/// The dispatchers of the broker's own address and of the dataplane's separate address, if it has one.
pub struct Dispatchers {
    pub main: Dispatcher,
    pub dataplane: Dispatcher,
}

pub fn dispatchers(api: &Api, gateway: &Gateway) -> Dispatchers {
    let config = &api.context.config;
    let dispatcher = |serves_paths, router| Dispatcher {
        api: api.clone(),
        cors: cors::CorsRules::new(&config.cors),
        // The name was validated with the rest of the configuration.
        domain: config.dataplane_domain.as_deref().and_then(|name| Domain::new(name).ok()),
        gateway: gateway.clone(),
        serves_paths,
        router,
    };
    let router = routes::router()
        .layer(middleware::from_fn(query::refuse_unknown))
        .layer(middleware::map_response(error::wrap_in_envelope))
        .method_not_allowed_fallback(error::method_not_allowed)
        .with_state(api.clone())
        .fallback(error::route_not_found)
        .layer(middleware::from_fn(error::record_route));
    let is_here = !config.has_own_origin() || config.dataplane_on_main_origin;
    Dispatchers { main: dispatcher(is_here, Some(router)), dataplane: dispatcher(true, None) }
}
