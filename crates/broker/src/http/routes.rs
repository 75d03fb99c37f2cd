//! A router that remembers its paths, which the router itself doesn't tell: so that none stays undocumented.

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
