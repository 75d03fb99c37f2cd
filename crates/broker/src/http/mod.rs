//! The control plane over HTTP: thin, one resource a file, no decisions.

mod audit;
mod auth;
mod body;
mod capabilities;
mod cors;
mod error;
mod keys;
mod negotiation;
#[cfg(test)]
mod openapi;
mod ops;
mod paging;
mod routes;
mod sandboxes;
mod sessions;
mod threads;
mod webhooks;

use std::sync::Arc;

use axum::{Router, middleware};
use cobox_gateway::Directory;
use routes::Routes;

use crate::domain::{deployment::Deployment, keys::Keys, sandboxes::Sandboxes, sessions::Sessions, webhook::Webhook};

/// What the routes speak to.
#[derive(Clone)]
pub struct Api {
    pub keys: Arc<Keys>,
    pub sessions: Arc<Sessions>,
    pub sandboxes: Arc<Sandboxes>,
    pub deployment: Arc<Deployment>,
    /// Where signed notices are taken.
    pub webhook: Option<Arc<Webhook>>,
}

pub fn router(api: Api, directory: Arc<dyn Directory>) -> Router {
    let cors = cors::CorsRules::new(&api.deployment.config.cors);
    let router = control_plane()
        .into_router()
        .layer(middleware::map_response(error::in_the_envelope))
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

/// Every route but the gateway's. A new one is told in `openapi/` too.
fn control_plane() -> Routes {
    Routes::new()
        .merge(sessions::routes())
        .merge(threads::routes())
        .merge(webhooks::routes())
        .merge(capabilities::routes())
        .merge(sandboxes::routes())
        .merge(keys::routes())
        .merge(audit::routes())
        .merge(ops::routes())
}

/// The path of every route, the gateway's too: what is documented is compared with them.
pub fn paths() -> Vec<&'static str> {
    let mut paths = control_plane().paths();
    paths.extend(cobox_gateway::PATHS);
    paths
}
