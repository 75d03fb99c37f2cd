//! Errors on the wire: the envelope, the request's id on everything, and one log line a request.

use std::time::Instant;

use axum::{
    Json,
    extract::Request,
    middleware::Next,
    response::{IntoResponse, Response},
};
use cobox_protocol::{
    ApiError, ErrorCode, RequestId,
    key::{API_KEY_PREFIX, OPAQUE_TOKEN_PREFIX},
    secret::redact,
};
use http::{HeaderName, HeaderValue, StatusCode, header};

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// What was said beside an error and stays: which methods there are, and whether a browser may show it to a page.
const STAYS: [HeaderName; 4] = [header::ALLOW, header::ACCESS_CONTROL_ALLOW_ORIGIN, header::ACCESS_CONTROL_EXPOSE_HEADERS, header::VARY];
/// Longest path in a log line, in characters.
const MAX_LOGGED_PATH: usize = 256;
/// What stands in a log in place of a secret.
const HIDDEN: &str = "[hidden]";
/// No token is shorter: a header and a signature alone are longer.
const SHORTEST_JWT: usize = 80;

/// An error on its way out; it gets its request's id in [`identify`].
#[derive(Debug)]
pub struct Failure(ApiError);

impl From<ApiError> for Failure {
    fn from(e: ApiError) -> Self {
        Self(e)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = StatusCode::INTERNAL_SERVER_ERROR.into_response();
        response.extensions_mut().insert(self.0);
        response
    }
}

pub async fn route_not_found() -> Failure {
    Failure(ApiError::new(ErrorCode::RouteNotFound, "there is nothing at this path"))
}

pub async fn method_not_allowed() -> Failure {
    Failure(ApiError::new(ErrorCode::MethodNotAllowed, "this path doesn't know that method"))
}

/// What the framework refuses by itself, such as a path that is not UTF-8, has the envelope too.
pub async fn in_the_envelope(response: Response) -> Response {
    let status = response.status();
    let is_refusal = status.is_client_error() || status.is_server_error();
    if !is_refusal || response.extensions().get::<ApiError>().is_some() {
        return response;
    }
    let error = match status {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::new(ErrorCode::TooLarge, "the request is too large"),
        status if status.is_client_error() => {
            ApiError::invalid("the path or the query: can't be read; both must be UTF-8, percent-encoded")
        }
        _ => ApiError::new(ErrorCode::Internal, "the broker could not answer this; try again"),
    };
    Failure(error).into_response()
}

/// Gives every request an id, every error its envelope, and the log a line without query and credentials.
pub async fn identify(mut request: Request, next: Next) -> Response {
    let id = RequestId::new();
    let began = Instant::now();
    let method = request.method().clone();
    let path: String = without_secrets(request.uri().path()).chars().take(MAX_LOGGED_PATH).collect();
    request.extensions_mut().insert(id.clone());
    let mut response = next.run(request).await;
    let code = match response.extensions_mut().remove::<ApiError>() {
        Some(error) => {
            let mut said = std::mem::take(response.headers_mut());
            response = envelope(&error, &id);
            for name in STAYS {
                if let Some(value) = said.remove(&name) {
                    response.headers_mut().insert(name, value);
                }
            }
            error.code.as_str()
        }
        None => "",
    };
    if let Ok(value) = HeaderValue::from_str(id.as_str()) {
        response.headers_mut().insert(X_REQUEST_ID, value);
    }
    let took_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    tracing::info!(request_id = %id, %method, path, status = response.status().as_u16(), code, took_ms, "request");
    response
}

/// A path as the log may have it: `GET /internal/tokens/{token}` is one of many ways to put a secret into it.
fn without_secrets(path: &str) -> String {
    let is_secret = |segment: &str| {
        let starts = |prefix| segment.contains(prefix);
        let is_jwt = segment.split('.').count() == 3 && segment.len() >= SHORTEST_JWT;
        starts(API_KEY_PREFIX) || starts(OPAQUE_TOKEN_PREFIX) || is_jwt
    };
    let mut before = "";
    let shown = path.split('/').map(|segment| {
        let follows_tokens = before == "tokens" && !["", "revoke", "introspect"].contains(&segment);
        before = segment;
        if follows_tokens || is_secret(segment) { HIDDEN } else { segment }
    });
    shown.collect::<Vec<_>>().join("/")
}

fn envelope(error: &ApiError, id: &RequestId) -> Response {
    let status = StatusCode::from_u16(error.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut said = error.envelope(id);
    said.error.message = redact(&said.error.message).into_owned();
    let mut response = (status, Json(said)).into_response();
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}
