//! Errors on the wire: the error envelope, the request id in every response, and one log line per request.

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
use cobox_gateway::{AdmittedRequest, ConnectionCache, Rejection};
use cobox_protocol::{ApiError, ErrorCode, RequestId, SandboxId, SessionId, secret::redact};
use http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header};

use super::{
    langsmith,
    request_log::RequestLine,
    trace::{self, TraceContext},
};
use crate::{
    domain::{access::request_context::LoggedIds, model::Principal},
    metrics::{AnsweredRequest, Metrics},
    traces::TraceSink,
};

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Headers that an error response keeps: the allowed methods, and the CORS headers that let a browser show it to a
/// page.
const PRESERVED_HEADERS: [HeaderName; 4] =
    [header::ALLOW, header::ACCESS_CONTROL_ALLOW_ORIGIN, header::ACCESS_CONTROL_EXPOSE_HEADERS, header::VARY];

/// An error to be sent; [`RequestInProgress::answered`] adds the request id.
#[derive(Debug)]
pub struct Failure(ApiError);

impl Failure {
    pub fn code(&self) -> ErrorCode {
        self.0.code
    }
}

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
    Failure(ApiError::new(ErrorCode::MethodNotAllowed, "this path doesn't support this method"))
}

/// Wraps errors that the framework produces itself, such as for a path that is not UTF-8, in the error envelope.
pub async fn wrap_in_envelope(response: Response) -> Response {
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
        _ => ApiError::new(ErrorCode::Internal, "the broker failed to handle this request; try again"),
    };
    Failure(error).into_response()
}

/// Details of a request that become known while it is handled, such as principal and route. Used in the log.
#[derive(Clone, Default)]
pub struct RequestRecord(Arc<RequestRecordParts>);

#[derive(Default)]
struct RequestRecordParts {
    principal: OnceLock<String>,
    route: OnceLock<String>,
    connection: ConnectionCache,
    logged: LoggedIds,
}

impl RequestRecord {
    pub fn new(connection: ConnectionCache) -> Self {
        Self(Arc::new(RequestRecordParts { connection, ..RequestRecordParts::default() }))
    }

    /// Records the principal. Fails if it has too many connections.
    pub fn set_principal(&self, principal: &Principal) -> Result<(), ApiError> {
        // The principal that was authenticated first is kept.
        let _ = self.0.principal.set(principal.name.clone());
        self.0.connection.mark_authenticated(&principal.workspace, &principal.name)
    }

    pub fn logged(&self) -> &LoggedIds {
        &self.0.logged
    }

    /// Records the ids in a path.
    fn path(&self, path: &str) {
        for segment in path.split('/') {
            if let Ok(id) = segment.parse() {
                self.0.logged.set_session(&id);
            } else if let Ok(id) = segment.parse() {
                self.0.logged.set_sandbox(&id);
            }
        }
    }

    /// Records the route. Expects the router's template, never a path.
    pub fn route(&self, template: &str) {
        let _ = self.0.route.set(template.to_owned());
    }
}

/// Reports the matched route to the dispatcher, which can't see where a router leads.
pub async fn record_route(request: Request, next: Next) -> Response {
    if let (Some(record), Some(route)) = (request.extensions().get::<RequestRecord>(), request.extensions().get::<MatchedPath>()) {
        record.route(route.as_str());
        record.path(request.uri().path());
    }
    next.run(request).await
}

/// A request in progress. Adds its id and the error envelope to the response, and writes the log line and the metrics.
/// Both contain the route's template instead of the path, if there is one, and no query: paths and queries may hold
/// secrets.
pub struct RequestInProgress {
    /// The caller's own id if it sent a valid one.
    pub id: RequestId,
    trace: Option<TraceContext>,
    began: Instant,
    method: Method,
    uri: Uri,
    /// The route's template, if it is known without a router.
    pub route: Option<&'static str>,
    /// Filled in by a router's handlers.
    pub record: Option<RequestRecord>,
}

impl RequestInProgress {
    pub fn new(request: &mut Request) -> Self {
        let (method, uri) = (request.method().clone(), request.uri().clone());
        let given = request.headers().get(&X_REQUEST_ID).and_then(|v| v.to_str().ok()).and_then(|v| v.parse().ok());
        let trace = TraceContext::from_headers(request.headers());
        if trace.is_none() {
            // The gateway forwards the headers: an invalid context must not go further, and the state is part of it.
            trace::HEADERS.iter().for_each(|name| drop(request.headers_mut().remove(*name)));
        }
        Self { id: given.unwrap_or_else(RequestId::new), trace, began: Instant::now(), method, uri, route: None, record: None }
    }

    /// True if the request's principal is known.
    pub fn has_principal(&self) -> bool {
        self.record.as_ref().is_some_and(|record| record.0.principal.get().is_some())
    }

    pub fn answered(self, mut response: Response, metrics: &Metrics, traces: Option<&dyn TraceSink>) -> Response {
        let Self { id, trace, began, method, uri, route, record } = self;
        let passed = response.extensions_mut().remove::<AdmittedRequest>();
        let error = match response.extensions_mut().remove::<ApiError>() {
            Some(error) => {
                let mut headers = std::mem::take(response.headers_mut());
                response = render(&error, &id, &ErrorFormat::of(&uri));
                for name in PRESERVED_HEADERS {
                    if let Some(value) = headers.remove(&name) {
                        response.headers_mut().insert(name, value);
                    }
                }
                Some(error)
            }
            None => response.extensions_mut().remove::<Rejection>().map(|Rejection(error)| error),
        };
        if let Ok(value) = HeaderValue::from_str(id.as_str()) {
            response.headers_mut().insert(X_REQUEST_ID, value);
        }
        let (took, status) = (began.elapsed(), response.status());
        let record = record.as_ref().map(|record| &record.0);
        let route = route.or_else(|| record?.route.get().map(String::as_str));
        metrics.request(&AnsweredRequest {
            route,
            method: &method,
            status,
            error: error.as_ref().map(|e| e.code),
            dataplane: passed.as_ref().and_then(|passed| passed.route),
            took,
        });
        let caller = passed.as_ref().and_then(|passed| passed.admission.caller.as_ref());
        let recorded_principal = record.and_then(|record| record.principal.get()).map(String::as_str);
        let (session, sandbox) = record.map_or((None, None), |record| (record.logged.session(), record.logged.sandbox()));
        let line = RequestLine {
            id: &id,
            method: &method,
            route,
            path: uri.path(),
            status,
            error: error.as_ref(),
            took,
            principal: recorded_principal.or_else(|| caller.map(|c| c.principal.as_str())),
            sandbox: passed.as_ref().map(|p| &p.admission.sandbox).or(sandbox.as_ref()).map(SandboxId::as_str),
            session: caller.and_then(|c| c.session.as_ref()).or(session.as_ref()).map(SessionId::as_str),
            trace: trace.as_ref(),
        };
        line.log();
        if let Some(traces) = traces {
            traces.request(&line.span());
        }
        response
    }
}

/// The API whose error format applies.
enum ErrorFormat {
    Ours,
    /// Contains the request's path, which determines the format.
    LangSmith(Uri),
}

impl ErrorFormat {
    fn of(uri: &Uri) -> Self {
        if langsmith::is_langsmith_path(uri.path()) { ErrorFormat::LangSmith(uri.clone()) } else { ErrorFormat::Ours }
    }
}

fn render(error: &ApiError, id: &RequestId, format: &ErrorFormat) -> Response {
    let error = &ApiError { message: redact(&error.message).into_owned(), ..error.clone() };
    let (status, mut response) = match format {
        ErrorFormat::Ours => (error.code.status(), Json(error.envelope(id)).into_response()),
        ErrorFormat::LangSmith(uri) => (langsmith::status(uri.path(), error.code), Json(langsmith::error::body(error, id)).into_response()),
    };
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    *response.status_mut() = status;
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}
