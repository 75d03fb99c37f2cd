//! The control plane over HTTP: thin, one resource a file, no decisions.

mod audit;
mod auth;
mod body;
mod error;
mod keys;
mod negotiation;
mod ops;
mod paging;
mod sandboxes;
mod sessions;

use std::sync::Arc;

use axum::{Router, middleware};
use cobox_gateway::Directory;

use crate::domain::{deployment::Deployment, keys::Keys, sandboxes::Sandboxes, sessions::Sessions};

/// What the routes speak to.
#[derive(Clone)]
pub struct Api {
    pub keys: Arc<Keys>,
    pub sessions: Arc<Sessions>,
    pub sandboxes: Arc<Sandboxes>,
    pub deployment: Arc<Deployment>,
}

pub fn router(api: Api, directory: Arc<dyn Directory>) -> Router {
    Router::new()
        .merge(sessions::routes())
        .merge(sandboxes::routes())
        .merge(keys::routes())
        .merge(audit::routes())
        .merge(ops::routes())
        .method_not_allowed_fallback(error::method_not_allowed)
        .with_state(api)
        .merge(cobox_gateway::router(directory))
        .fallback(error::route_not_found)
        .layer(middleware::from_fn(error::identify))
}
