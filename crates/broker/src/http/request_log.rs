//! The log line of a request. It contains the route's template instead of the path, and no query, because both may
//! contain secrets.

use std::{
    borrow::Cow,
    time::{Duration, SystemTime},
};

use cobox_protocol::{ApiError, RequestId, secret::redact};
use http::{Method, StatusCode};

use super::trace::TraceContext;
use crate::traces::RequestSpan;

/// Maximum length of a path in a log line, in characters.
const MAX_LOGGED_PATH: usize = 256;
/// Prefix of paths that contain a token.
const TOKENS_PATH: &str = "/internal/tokens/";
/// Replaces a token in the log.
const HIDDEN: &str = "[redacted]";

pub struct RequestLine<'a> {
    pub id: &'a RequestId,
    pub method: &'a Method,
    pub route: Option<&'a str>,
    pub path: &'a str,
    pub status: StatusCode,
    pub error: Option<&'a ApiError>,
    pub took: Duration,
    pub principal: Option<&'a str>,
    pub sandbox: Option<&'a str>,
    pub session: Option<&'a str>,
    pub trace: Option<&'a TraceContext>,
}

impl RequestLine<'_> {
    /// Logs server errors at error level and everything else at info level.
    pub fn log(&self) {
        // A macro, because the level of a log statement is fixed at compile time.
        macro_rules! line {
            ($level:ident) => {{
                let Self { id, method, route, status, error, took, principal, sandbox, session, trace, .. } = self;
                let path = self.route.is_none().then(|| without_secrets(self.path).chars().take(MAX_LOGGED_PATH).collect::<String>());
                let (code, cause) = (error.map_or("", |e| e.code.as_str()), error.and_then(|e| e.cause.as_deref()));
                tracing::event!(
                    tracing::Level::$level,
                    request_id = %id,
                    %method,
                    route,
                    path,
                    status = status.as_u16(),
                    code,
                    cause,
                    took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
                    principal = principal.unwrap_or_default(),
                    sandbox,
                    session,
                    trace_id = trace.map(tracing::field::display),
                    "request"
                );
            }};
        }
        if self.status.is_server_error() {
            line!(ERROR);
        } else if tracing::enabled!(tracing::Level::INFO) {
            line!(INFO);
        }
    }

    pub fn span(&self) -> RequestSpan<'_> {
        RequestSpan {
            context: self.trace.copied(),
            started: SystemTime::now().checked_sub(self.took).unwrap_or(SystemTime::UNIX_EPOCH),
            took: self.took,
            method: self.method.as_str(),
            route: self.route,
            status: self.status.as_u16(),
            error_code: self.error.map(|e| e.code.as_str()),
            request_id: self.id.as_str(),
            session: self.session,
            sandbox: self.sandbox,
        }
    }
}

/// Removes secrets from a path for the log. They can be anywhere; in `GET /internal/tokens/{token}` there always is
/// one.
fn without_secrets(path: &str) -> Cow<'_, str> {
    match path.strip_prefix(TOKENS_PATH) {
        Some(after) if !["revoke", "introspect"].contains(&after) => Cow::Owned(format!("{TOKENS_PATH}{HIDDEN}")),
        _ => redact(path),
    }
}
