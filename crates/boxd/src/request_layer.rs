//! Common parts of all responses: the request id, errors in the format of the caller's API, and an audit record.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use axum::{
    Json,
    body::HttpBody,
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use cobox_protocol::{
    ApiError, Capability, ErrorCode, RequestId, Timestamp,
    audit::{SandboxClaim, claim_text},
    langsmith,
    route::{self, Route},
    secret::redact,
};
use cobox_token::Claims;
use http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use percent_encoding::percent_decode_str;
use serde_json::json;

use crate::{body::UnexpectedBody, pending_records::PendingRecords, server::Server};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Status recorded if the client disconnected before the response; the gateway uses the same.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// An error response. Its body is rendered where the request's id and error format are known.
#[derive(Debug)]
pub struct ErrorResponse(pub ApiError);

impl From<ApiError> for ErrorResponse {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

/// The error, stored in the response's extensions until then.
#[derive(Clone)]
struct PendingError(ApiError);

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let mut response = status_of(&self.0).into_response();
        response.extensions_mut().insert(PendingError(self.0));
        response
    }
}

/// Facts about a request, collected for its audit record.
pub struct RequestRecord {
    pub request_id: RequestId,
    started: Instant,
    method: Method,
    /// The route's pattern, not the path, because a path is client data and unbounded.
    route: String,
    capability: OnceLock<Capability>,
    claims: OnceLock<Arc<Claims>>,
    target: OnceLock<String>,
    is_recorded: AtomicBool,
}

impl RequestRecord {
    fn new(request: &Request) -> Self {
        let sent_id = request.headers().get(&REQUEST_ID).and_then(|v| v.to_str().ok()).and_then(|v| v.parse::<RequestId>().ok());
        Self {
            request_id: sent_id.unwrap_or_else(RequestId::new),
            started: Instant::now(),
            method: request.method().clone(),
            route: request.extensions().get::<MatchedPath>().map_or("-".to_owned(), |m| m.as_str().to_owned()),
            capability: OnceLock::new(),
            claims: OnceLock::new(),
            target: OnceLock::new(),
            is_recorded: AtomicBool::new(false),
        }
    }

    // Only a stream that was authorized again sets a second value. The first one, from the start of the request, is
    // kept.
    pub fn set_capability(&self, capability: Capability) {
        let _ = self.capability.set(capability);
    }
    pub fn set_claims(&self, claims: Arc<Claims>) {
        let _ = self.claims.set(claims);
    }
    /// Sets the file, command, shell or process that the request is about.
    pub fn set_target(&self, target: &str) {
        let _ = self.target.set(claim_text(&redact(target)));
    }

    /// Adds the request's audit record on the first call.
    pub fn record_once(&self, sandbox_claims: &PendingRecords<SandboxClaim>, status: u16, error: Option<ErrorCode>) {
        if self.is_recorded.swap(true, Ordering::Relaxed) {
            return;
        }
        let claims = self.claims.get();
        sandbox_claims.add(|seq| SandboxClaim {
            seq,
            at: Timestamp::now(),
            request_id: self.request_id.to_string(),
            jti: claims.map(|c| c.jti.clone()),
            principal: claims.map(|c| c.sub.clone()),
            actor: claims.map(|c| c.act.kind),
            session_id: claims.and_then(|c| c.sid.clone()),
            capability: self.capability.get().map(|c| c.as_str().to_owned()),
            method: self.method.to_string(),
            route: self.route.clone(),
            target: self.target.get().cloned(),
            status,
            error: error.map(|e| e.as_str().to_owned()),
            duration_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        });
    }
}

/// The outermost layer of the client routes: every request leaves an audit record.
pub async fn client_layer(State(server): State<Arc<Server>>, request: Request, next: Next) -> Response {
    let record = Arc::new(RequestRecord::new(&request));
    let mut audit = AuditOnDrop { record, target: target_from_uri(request.uri()), server, status: CLIENT_CLOSED_REQUEST, error: None };
    let (response, error) = run_request(request, next, &audit.record).await;
    (audit.status, audit.error) = (response.status().as_u16(), error);
    let server = audit.server.clone();
    server.run_after_response(move || drop(audit));
    response
}

/// A client request. Dropping it adds its audit record: after the response, or when its connection ends before there is
/// one.
struct AuditOnDrop {
    record: Arc<RequestRecord>,
    /// The target according to the URL.
    target: Option<String>,
    server: Arc<Server>,
    status: u16,
    error: Option<ErrorCode>,
}

impl Drop for AuditOnDrop {
    fn drop(&mut self) {
        // A health check has no caller. A stream adds its record when it is admitted or refused, which may be after its
        // first frame.
        if self.record.capability.get().is_none() || self.status == StatusCode::SWITCHING_PROTOCOLS {
            return;
        }
        if let Some(target) = &self.target {
            self.record.set_target(target);
        }
        self.record.record_once(&self.server.sandbox_claims, self.status, self.error);
    }
}

/// The outermost layer of the control routes.
pub async fn control_layer(request: Request, next: Next) -> Response {
    let record = Arc::new(RequestRecord::new(&request));
    run_request(request, next, &record).await.0
}

async fn run_request(mut request: Request, next: Next, record: &Arc<RequestRecord>) -> (Response, Option<ErrorCode>) {
    request.extensions_mut().insert(record.clone());
    let mut response = match check_query(&request) {
        Ok(()) => {
            if expects_no_body(&request) && !request.body().is_end_stream() {
                let body = std::mem::take(request.body_mut());
                request.extensions_mut().insert(UnexpectedBody::new(body));
            }
            next.run(request).await
        }
        Err(error) => ErrorResponse(error).into_response(),
    };
    let mut error_code = None;
    if let Some(PendingError(error)) = response.extensions_mut().remove::<PendingError>() {
        let headers = std::mem::take(response.headers_mut());
        response = render(&error, &record.route, &record.request_id);
        response.headers_mut().extend(headers.into_iter().filter_map(|(name, value)| {
            let describes_empty_body = name.as_ref().is_some_and(|n| n == header::CONTENT_TYPE || n == header::CONTENT_LENGTH);
            name.filter(|_| !describes_empty_body).map(|n| (n, value))
        }));
        error_code = Some(error.code);
    }
    if let Ok(value) = HeaderValue::from_str(record.request_id.as_str()) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    (response, error_code)
}

/// Rejects unknown query parameters of the client routes. The control routes are not in that table: only the broker
/// calls them, and a newer broker may send more to an older boxd.
fn check_query(request: &Request) -> Result<(), ApiError> {
    let Some(route) = route_of(request) else { return Ok(()) };
    // Without a token, the missing token is the first error; a WebSocket may send its token later.
    let headers = request.headers();
    let has_token = headers.contains_key(header::AUTHORIZATION) || headers.contains_key(header::UPGRADE);
    if has_token || route.needs.is_empty() { route.check_query(request.uri().query()) } else { Ok(()) }
}

/// The LangSmith routes take anything, because those SDKs send more than they document.
fn expects_no_body(request: &Request) -> bool {
    let is_boxd_route = route_of(request).is_some_and(|route| langsmith::operation(route.template).is_none());
    is_boxd_route && [Method::GET, Method::HEAD, Method::DELETE].contains(request.method())
}

fn route_of(request: &Request) -> Option<&'static Route> {
    let (method, path) = (request.method(), request.uri().path());
    // A router answers HEAD wherever there is a GET.
    route::find(method.as_str(), path).or_else(|| route::find("GET", path).filter(|_| *method == Method::HEAD))
}

/// The target of a request according to its URL: the rest of a file's route, or `path` in the query.
fn target_from_uri(uri: &Uri) -> Option<String> {
    let decoded = |raw: &str| percent_decode_str(raw).decode_utf8_lossy().into_owned();
    if let Some(id) = ["/v1/shells/", "/v1/processes/"].into_iter().find_map(|prefix| uri.path().strip_prefix(prefix)) {
        return Some(decoded(id));
    }
    if let Some(path) = uri.path().strip_prefix("/v1/files/").filter(|_| uri.query().is_none_or(|q| !q.starts_with("path="))) {
        return Some(decoded(&format!("/{path}")));
    }
    uri.query()?.split('&').find_map(|pair| pair.strip_prefix("path=")).map(decoded)
}

fn render(error: &ApiError, route: &str, request_id: &RequestId) -> Response {
    if error.code == ErrorCode::Internal {
        tracing::error!(%request_id, message = error.message, "request failed");
    }
    // A credential in a path or name was put there by mistake and must not appear in error messages.
    let error = ApiError { message: redact(&error.message).into_owned(), ..error.clone() };
    let body = match langsmith::operation(route) {
        Some(operation) => langsmith::error_body(&error, operation, request_id),
        None => json!(error.envelope(request_id)),
    };
    let status = if langsmith::operation(route).is_some() { langsmith::status(error.code) } else { error.code.status() };
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, Json(body)).into_response();
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

pub async fn route_not_found() -> ErrorResponse {
    ErrorResponse(ApiError::new(ErrorCode::RouteNotFound, "no such route in a sandbox; see the dataplane section of the protocol"))
}

pub async fn method_not_allowed(request: Request) -> ErrorResponse {
    ErrorResponse(ApiError::new(ErrorCode::MethodNotAllowed, format!("this route does not support {}", request.method())))
}
