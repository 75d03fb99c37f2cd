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
    error::{Failure, RequestInProgress, RequestRecord},
    rate_limits::{Peer, limit_failures},
};

/// Name of requests to a sandbox's host name in the log and the metrics.
const OWN_HOST: &str = "{sandbox}.domain";
/// Name of requests that were answered before routing.
const PREFLIGHT: &str = "preflight";

/// The dispatcher of one listener.
pub struct Dispatcher {
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

impl Dispatcher {
    pub async fn answer(&self, mut request: Request, peer: Peer, cache: &ConnectionCache) -> Response {
        let mut progress = RequestInProgress::new(&mut request);
        let response = match &self.cors {
            None => self.answer_limited(request, peer, cache, &mut progress).await,
            Some(rules) => {
                let allowed = rules.allowed(request.headers());
                let mut response = match rules.preflight(&request) {
                    Some(answer) => {
                        progress.route = Some(PREFLIGHT);
                        answer.unwrap_or_else(|e| Failure::from(e).into_response())
                    }
                    None => self.answer_limited(request, peer, cache, &mut progress).await,
                };
                CorsRules::add_headers(allowed, &mut response);
                response
            }
        };
        progress.answered(response, &self.api.metrics, self.api.traces.as_deref())
    }

    async fn answer_limited(&self, request: Request, peer: Peer, cache: &ConnectionCache, progress: &mut RequestInProgress) -> Response {
        let response = self.route_by_host(request, cache, progress).await;
        // Once a principal is known, a 401 is the sandbox's own answer.
        let is_known =
            response.extensions().get::<AdmittedRequest>().is_some_and(AdmittedRequest::is_authenticated) || progress.has_principal();
        limit_failures(&self.api, peer, response, is_known).await
    }

    /// Routes by host name if sandboxes have host names: a sandbox's own, the domain itself, or any other.
    async fn route_by_host(&self, request: Request, cache: &ConnectionCache, progress: &mut RequestInProgress) -> Response {
        let host_target =
            self.domain.as_ref().map_or(HostTarget::OutsideDomain, |domain| domain.classify(request.uri(), request.headers()));
        let error = match host_target {
            HostTarget::OutsideDomain => {
                return self.route_by_path(request, cache, progress, self.serves_paths, self.router.as_ref()).await;
            }
            HostTarget::DomainItself => return self.route_by_path(request, cache, progress, true, None).await,
            HostTarget::Sandbox(id) => {
                progress.route = Some(OWN_HOST);
                return self.gateway.serve_sandbox_host(id, request, &progress.id, cache).await;
            }
            HostTarget::UnknownInDomain => ApiError::new(ErrorCode::RouteNotFound, "there is no sandbox with this host name"),
            HostTarget::Ambiguous => ApiError::invalid("the request has no valid host, or two different ones"),
        };
        Failure::from(error).into_response()
    }

    async fn route_by_path(
        &self,
        mut request: Request,
        cache: &ConnectionCache,
        progress: &mut RequestInProgress,
        serves_paths: bool,
        router: Option<&Router>,
    ) -> Response {
        if let Some(template) = Gateway::path_template(request.uri().path()) {
            progress.route = Some(template);
            if serves_paths {
                return self.gateway.serve_path(request, &progress.id, cache).await;
            }
            let message = "sandboxes are not served at this address; use the sandbox's http_base_url";
            return Failure::from(ApiError::new(ErrorCode::RouteNotFound, message)).into_response();
        }
        let Some(router) = router else {
            return Failure::from(ApiError::new(ErrorCode::RouteNotFound, "there is nothing at this path")).into_response();
        };
        let record = RequestRecord::new(cache.clone());
        request.extensions_mut().insert(progress.id.clone());
        request.extensions_mut().insert(record.clone());
        progress.record = Some(record);
        match router.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
}
