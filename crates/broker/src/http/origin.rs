//! Which hosts are served what: a sandbox's own name leads to that sandbox and to nothing of the broker's.

use axum::{
    Router,
    extract::{Request, State},
    middleware,
    response::{IntoResponse, Response},
    routing::any,
};
use cobox_gateway::{Domain, Gateway, PATHS, Place};
use cobox_protocol::{ApiError, ErrorCode};
use tower::ServiceExt;

use super::error::{Failure, Seen, note_route, route_not_found};

/// How the log and the metrics call what goes to a sandbox by its host name.
const OWN_HOST: &str = "{sandbox}.domain";

/// The gateway's routes by path, and nothing else.
pub fn dataplane_alone(gateway: &Gateway) -> Router {
    gateway.paths().fallback(route_not_found)
}

/// What stands under the broker's own address where the dataplane has another: a word about where it went.
pub fn moved() -> Router {
    PATHS.into_iter().fold(Router::new(), |router, path| router.route(path, any(elsewhere)))
}

async fn elsewhere() -> Failure {
    let message = "sandboxes are not served at this address; each one's own is the http_base_url in every answer that names it";
    ApiError::new(ErrorCode::RouteNotFound, message).into()
}

/// By host name where sandboxes have some: theirs, the domain's own, and all others as before.
pub fn by_host(domain: Domain, gateway: Gateway, others: Router) -> Router {
    let (paths, others) = (dataplane_alone(&gateway), others.layer(middleware::from_fn(note_route)));
    let paths = paths.layer(middleware::from_fn(note_route));
    Router::new().fallback(choose).with_state(Hosts { domain, gateway, paths, others })
}

#[derive(Clone)]
struct Hosts {
    domain: Domain,
    gateway: Gateway,
    paths: Router,
    others: Router,
}

async fn choose(State(hosts): State<Hosts>, request: Request) -> Response {
    match hosts.domain.place(request.uri(), request.headers()) {
        Place::Elsewhere => served(hosts.others, request).await,
        Place::Domain => served(hosts.paths, request).await,
        Place::Sandbox(id) => {
            if let Some(seen) = request.extensions().get::<Seen>() {
                seen.route(OWN_HOST);
            }
            hosts.gateway.on_own_host(id, request).await
        }
        Place::Nothing => Failure::from(ApiError::new(ErrorCode::RouteNotFound, "there is no sandbox of this host name")).into_response(),
        Place::Unclear => Failure::from(ApiError::invalid("the request names no host that can be read, or two of them")).into_response(),
    }
}

async fn served(router: Router, request: Request) -> Response {
    match router.oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}
