//! CORS: which origins' pages may access the broker and, through it, sandboxes. None by default.
//!
//! Credentials are headers, never cookies, so `Access-Control-Allow-Credentials` is never sent.

use axum::{
    extract::Request,
    response::{IntoResponse, Response},
};
use cobox_protocol::{ApiError, ErrorCode};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};

use crate::config::Cors;

/// How long a browser may cache the response to a preflight, in seconds.
const MAX_AGE_SECONDS: &str = "600";
/// Response headers that a page may read in addition to those that CORS always allows.
const EXPOSED: &str = "x-request-id, retry-after, etag, content-range, accept-ranges, content-disposition, x-file-mode, www-authenticate";

/// The configured header values, ready to be sent.
pub struct CorsRules {
    origins: Vec<HeaderValue>,
    is_open: bool,
    methods: HeaderValue,
    headers: HeaderValue,
}

impl CorsRules {
    /// Returns `None` if no origin is allowed: responses then have no CORS headers. Expects a validated configuration.
    pub fn new(cors: &Cors) -> Option<Self> {
        let origins: Vec<HeaderValue> = cors.allow_origins.iter().filter_map(|o| HeaderValue::from_str(o).ok()).collect();
        if origins.is_empty() {
            return None;
        }
        let list = |words: &[String]| HeaderValue::from_str(&words.join(", ")).ok();
        Some(Self {
            is_open: origins.iter().any(|o| o == Cors::ANY),
            origins,
            methods: list(&cors.methods())?,
            headers: list(&cors.headers())?,
        })
    }

    pub fn allowed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        if self.is_open {
            return Some(HeaderValue::from_static(Cors::ANY));
        }
        self.origins.iter().find(|o| *o == origin).cloned()
    }
}

impl CorsRules {
    /// Answers a preflight before authentication, because it carries no credentials. Returns an error if the origin
    /// isn't allowed.
    pub fn preflight(&self, request: &Request) -> Option<Result<Response, ApiError>> {
        let headers = request.headers();
        let is_preflight = request.method() == Method::OPTIONS
            && headers.contains_key(header::ORIGIN)
            && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
        if !is_preflight {
            return None;
        }
        if self.allowed(headers).is_none() {
            return Some(Err(ApiError::new(ErrorCode::Forbidden, "this origin is not allowed to use this broker")));
        }
        let mut response = StatusCode::NO_CONTENT.into_response();
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, self.methods.clone());
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, self.headers.clone());
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE_SECONDS));
        Some(Ok(response))
    }

    /// Adds the CORS headers of a response; `allowed` is the request's allowed origin.
    pub fn add_headers(allowed: Option<HeaderValue>, response: &mut Response) {
        let headers = response.headers_mut();
        if let Some(origin) = allowed {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
        }
        // The response differs by origin.
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
}
