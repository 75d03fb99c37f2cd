//! What every answer has in common: a request id, errors in the caller's dialect, and one log line.

use std::{
    sync::{Arc, OnceLock},
    time::Instant,
};

use axum::{
    Json,
    extract::{MatchedPath, Request},
    middleware::Next,
    response::{IntoResponse, Response},
};
use cobox_protocol::{ApiError, Capability, ErrorCode, RequestId, langsmith};
use cobox_token::Claims;
use http::{HeaderName, HeaderValue, StatusCode, header};
use serde_json::json;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// An error on its way out; it gets its body where the request's id and dialect are known.
#[derive(Debug)]
pub struct Failure(pub ApiError);

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

/// The same, as it waits in a response's extensions.
#[derive(Clone)]
struct Unrendered(ApiError);

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = status_of(&self.0).into_response();
        response.extensions_mut().insert(Unrendered(self.0));
        response
    }
}

/// What becomes known of a request on its way, for the log line.
pub struct RequestRecord {
    pub request_id: RequestId,
    capability: OnceLock<Capability>,
    claims: OnceLock<Arc<Claims>>,
}

impl RequestRecord {
    // A second value can only come from a stream that was authorised again; the first is what the request began as.
    pub fn needs(&self, capability: Capability) {
        let _ = self.capability.set(capability);
    }
    pub fn came_from(&self, claims: Arc<Claims>) {
        let _ = self.claims.set(claims);
    }
}

/// The outermost layer.
pub async fn wrap(mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let given = request.headers().get(&REQUEST_ID).and_then(|v| v.to_str().ok()).and_then(|v| v.parse::<RequestId>().ok());
    let record =
        Arc::new(RequestRecord { request_id: given.unwrap_or_else(RequestId::new), capability: OnceLock::new(), claims: OnceLock::new() });
    request.extensions_mut().insert(record.clone());
    let method = request.method().clone();
    // The pattern, not the path: a path is the client's business, and unbounded.
    let route = request.extensions().get::<MatchedPath>().map_or("-".to_owned(), |m| m.as_str().to_owned());

    let mut response = next.run(request).await;
    if let Some(Unrendered(error)) = response.extensions_mut().remove::<Unrendered>() {
        let headers = std::mem::take(response.headers_mut());
        response = render(&error, &route, &record.request_id);
        response.headers_mut().extend(headers.into_iter().filter_map(|(name, value)| {
            let is_of_the_empty_body = name.as_ref().is_some_and(|n| n == header::CONTENT_TYPE || n == header::CONTENT_LENGTH);
            name.filter(|_| !is_of_the_empty_body).map(|n| (n, value))
        }));
    }
    if let Ok(value) = HeaderValue::from_str(record.request_id.as_str()) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    let claims = record.claims.get();
    tracing::info!(
        request_id = %record.request_id,
        jti = claims.map(|c| c.jti.as_str()),
        sub = claims.map(|c| c.sub.as_str()),
        act = claims.map(|c| c.act.kind.word()),
        %method,
        route,
        capability = record.capability.get().map(|c| c.word()),
        status = response.status().as_u16(),
        ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        "request"
    );
    response
}

fn render(error: &ApiError, route: &str, request_id: &RequestId) -> Response {
    if error.code == ErrorCode::Internal {
        tracing::error!(%request_id, message = error.message, "request failed");
    }
    let body = match langsmith::operation(route) {
        Some(operation) => langsmith::error_body(error, operation, request_id),
        None => json!(error.envelope(request_id)),
    };
    let mut response = (status_of(error), Json(body)).into_response();
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if response.status() == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

fn status_of(error: &ApiError) -> StatusCode {
    StatusCode::from_u16(error.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

pub async fn no_such_route() -> Failure {
    Failure(ApiError::new(ErrorCode::RouteNotFound, "there is no such route in a sandbox; see the protocol's dataplane section"))
}

pub async fn no_such_method(request: Request) -> Failure {
    Failure(ApiError::new(ErrorCode::MethodNotAllowed, format!("this route doesn't take {}", request.method())))
}
