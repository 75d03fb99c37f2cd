//! A router that records its paths, so that tests can find undocumented routes. The underlying router doesn't expose
//! them.

use axum::{Router, routing::MethodRouter};

use super::Api;

#[derive(Default)]
pub struct Routes {
    router: Router<Api>,
    paths: Vec<&'static str>,
}

impl Routes {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn route(mut self, path: &'static str, methods: MethodRouter<Api>) -> Self {
        self.paths.push(path);
        Self { router: self.router.route(path, methods), ..self }
    }

    pub fn merge(mut self, other: Routes) -> Self {
        self.paths.extend(other.paths);
        Self { router: self.router.merge(other.router), ..self }
    }

    pub fn paths(self) -> Vec<&'static str> {
        self.paths
    }

    pub fn into_router(self) -> Router<Api> {
        self.router
    }
}
