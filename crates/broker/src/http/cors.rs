//! CORS: which pages of which origins may speak to the broker and, through it, to sandboxes. Nobody's, unless told.
//!
//! Credentials are headers, never cookies, so `Access-Control-Allow-Credentials` is never sent.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use cobox_protocol::{ApiError, ErrorCode};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};

use super::error::Failure;
use crate::config::Cors;

/// How long a browser may remember a preflight's answer, in seconds.
const MAX_AGE_SECONDS: &str = "600";
/// What a page may read beside the few headers every page may.
const EXPOSED: &str = "x-request-id, retry-after, etag, content-range, accept-ranges, content-disposition, x-file-mode, www-authenticate";

/// The configured answers, ready to be sent.
pub struct CorsRules {
    origins: Vec<HeaderValue>,
    is_open: bool,
    methods: HeaderValue,
    headers: HeaderValue,
}

impl CorsRules {
    /// `None` when no origin is allowed: nothing is then said about CORS at all. The configuration has been validated.
    pub fn new(cors: &Cors) -> Option<Arc<Self>> {
        let origins: Vec<HeaderValue> = cors.allow_origins.iter().filter_map(|o| HeaderValue::from_str(o).ok()).collect();
        if origins.is_empty() {
            return None;
        }
        let list = |words: &[String]| HeaderValue::from_str(&words.join(", ")).ok();
        Some(Arc::new(Self {
            is_open: origins.iter().any(|o| o == Cors::ANY),
            origins,
            methods: list(&cors.methods())?,
            headers: list(&cors.headers())?,
        }))
    }

    fn allowed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        if self.is_open {
            return Some(HeaderValue::from_static(Cors::ANY));
        }
        self.origins.iter().find(|o| *o == origin).cloned()
    }
}

/// Around everything else, so that a preflight, which carries no credentials, is answered before anybody asks for them.
pub async fn apply(State(rules): State<Arc<CorsRules>>, request: Request, next: Next) -> Response {
    let allowed = rules.allowed(request.headers());
    let is_preflight = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ORIGIN)
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match (is_preflight, &allowed) {
        (true, None) => {
            Failure::from(ApiError::new(ErrorCode::Forbidden, "pages of this origin may not speak to this broker")).into_response()
        }
        (true, Some(_)) => {
            let mut response = StatusCode::NO_CONTENT.into_response();
            let headers = response.headers_mut();
            headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, rules.methods.clone());
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, rules.headers.clone());
            headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE_SECONDS));
            response
        }
        (false, _) => next.run(request).await,
    };
    let headers = response.headers_mut();
    if let Some(origin) = allowed {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
    }
    // The same URL answers other origins otherwise.
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    response
}
