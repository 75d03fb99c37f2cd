//! The dispatcher: assigns the request id, applies CORS and the limit on unauthenticated clients, and routes each
//! request to a sandbox or to the broker's own routes. It uses plain nested calls, because each layer of a router would
//! box and copy the request, and the gateway receives thousands of them.

use axum::{
    Router,
    extract::Request,
    response::{IntoResponse, Response},
};
use cobox_gateway::{AdmittedRequest, ConnectionCache, Domain, Gateway, HostTarget};
use cobox_protocol::{ApiError, ErrorCode};
use tower::ServiceExt;

use super::{
    Api,
    cors::CorsRules,
    error::{Failure, Seen, Underway},
    limits::{Peer, limit_failures},
};

/// Name of requests to a sandbox's host name in the log and the metrics.
const OWN_HOST: &str = "{sandbox}.domain";
/// Name of requests that were answered before routing.
const PREFLIGHT: &str = "preflight";

/// The dispatcher of one listener.
pub struct Front {
    pub api: Api,
    pub cors: Option<CorsRules>,
    /// Set if sandboxes have host names.
    pub domain: Option<Domain>,
    pub gateway: Gateway,
    /// True if sandboxes can also be reached by path under the broker's own host name.
    pub serves_paths: bool,
    /// The control plane, if this listener serves it.
    pub router: Option<Router>,
}

impl Front {
    pub async fn answer(&self, mut request: Request, peer: Peer, kept: &ConnectionCache) -> Response {
        let mut underway = Underway::new(&mut request);
        let response = match &self.cors {
            None => self.watched(request, peer, kept, &mut underway).await,
            Some(rules) => {
                let allowed = rules.allowed(request.headers());
                let mut response = match rules.preflight(&request) {
                    Some(answer) => {
                        underway.route = Some(PREFLIGHT);
                        answer.unwrap_or_else(|e| Failure::from(e).into_response())
                    }
                    None => self.watched(request, peer, kept, &mut underway).await,
                };
                CorsRules::tell(allowed, &mut response);
                response
            }
        };
        underway.answered(response, &self.api.metrics, self.api.traces.as_deref())
    }

    async fn watched(&self, request: Request, peer: Peer, kept: &ConnectionCache, underway: &mut Underway) -> Response {
        let response = self.placed(request, kept, underway).await;
        // Once a principal is known, a 401 is the sandbox's own answer.
        let is_known =
            response.extensions().get::<AdmittedRequest>().is_some_and(AdmittedRequest::is_authenticated) || underway.has_asker();
        limit_failures(&self.api, peer, response, is_known).await
    }

    /// Routes by host name if sandboxes have host names: a sandbox's own, the domain itself, or any other.
    async fn placed(&self, request: Request, kept: &ConnectionCache, underway: &mut Underway) -> Response {
        let place = self.domain.as_ref().map_or(HostTarget::OutsideDomain, |domain| domain.classify(request.uri(), request.headers()));
        let error = match place {
            HostTarget::OutsideDomain => return self.by_path(request, kept, underway, self.serves_paths, self.router.as_ref()).await,
            HostTarget::DomainItself => return self.by_path(request, kept, underway, true, None).await,
            HostTarget::Sandbox(id) => {
                underway.route = Some(OWN_HOST);
                return self.gateway.serve_sandbox_host(id, request, &underway.id, kept).await;
            }
            HostTarget::UnknownInDomain => ApiError::new(ErrorCode::RouteNotFound, "there is no sandbox of this host name"),
            HostTarget::Ambiguous => ApiError::invalid("the request names no host that can be read, or two of them"),
        };
        Failure::from(error).into_response()
    }

    async fn by_path(
        &self,
        mut request: Request,
        kept: &ConnectionCache,
        underway: &mut Underway,
        serves_paths: bool,
        router: Option<&Router>,
    ) -> Response {
        if let Some(template) = Gateway::path_template(request.uri().path()) {
            underway.route = Some(template);
            if serves_paths {
                return self.gateway.serve_path(request, &underway.id, kept).await;
            }
            let message = "sandboxes are not served at this address; each one's own is the http_base_url in every answer that names it";
            return Failure::from(ApiError::new(ErrorCode::RouteNotFound, message)).into_response();
        }
        let Some(router) = router else {
            return Failure::from(ApiError::new(ErrorCode::RouteNotFound, "there is nothing at this path")).into_response();
        };
        let seen = Seen::new(kept.clone());
        request.extensions_mut().insert(underway.id.clone());
        request.extensions_mut().insert(seen.clone());
        underway.seen = Some(seen);
        match router.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
}
