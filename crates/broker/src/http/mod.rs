//! The control plane over HTTP: thin, one resource a file, no decisions.

mod audit;
mod auth;
mod body;
mod capabilities;
mod cors;
mod error;
mod events;
mod keys;
mod negotiation;
mod ops;
mod paging;
mod sandboxes;
mod sessions;
mod threads;
mod webhooks;

use std::sync::Arc;

use axum::{Router, middleware};
use cobox_gateway::Directory;

use crate::domain::{deployment::Deployment, events::Events, keys::Keys, sandboxes::Sandboxes, sessions::Sessions, webhook::Webhook};

/// What the routes speak to.
#[derive(Clone)]
pub struct Api {
    pub keys: Arc<Keys>,
    pub sessions: Arc<Sessions>,
    pub sandboxes: Arc<Sandboxes>,
    pub deployment: Arc<Deployment>,
    /// Where signed notices are taken.
    pub webhook: Option<Arc<Webhook>>,
    pub events: Arc<Events>,
}

pub fn router(api: Api, directory: Arc<dyn Directory>) -> Router {
    let cors = cors::CorsRules::new(&api.deployment.config.cors);
    let router = Router::new()
        .merge(sessions::routes())
        .merge(events::routes())
        .merge(threads::routes())
        .merge(webhooks::routes())
        .merge(capabilities::routes())
        .merge(sandboxes::routes())
        .merge(keys::routes())
        .merge(audit::routes())
        .merge(ops::routes())
        .method_not_allowed_fallback(error::method_not_allowed)
        .with_state(api)
        .merge(cobox_gateway::router(directory))
        .fallback(error::route_not_found);
    let router = match cors {
        Some(rules) => router.layer(middleware::from_fn_with_state(rules, cors::apply)),
        None => router,
    };
    router.layer(middleware::from_fn(error::identify))
}
