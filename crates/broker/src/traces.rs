//! Request spans for an exporter. This crate doesn't depend on any exporter.

use std::time::{Duration, SystemTime};

pub use crate::http::trace::TraceContext;

/// A completed request.
#[derive(Clone, Debug)]
pub struct RequestSpan<'a> {
    /// The caller's `traceparent`.
    pub context: Option<TraceContext>,
    pub started: SystemTime,
    pub took: Duration,
    pub method: &'a str,
    /// The route's template, never the path.
    pub route: Option<&'a str>,
    pub status: u16,
    pub error_code: Option<&'a str>,
    pub request_id: &'a str,
    pub session: Option<&'a str>,
    pub sandbox: Option<&'a str>,
}

/// Receives every request after its response. Must not block.
pub trait TraceSink: Send + Sync {
    fn request(&self, span: &RequestSpan<'_>);
}
