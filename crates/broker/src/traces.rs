//! Requests as spans, for whoever exports them: this crate knows no exporter.

use std::time::{Duration, SystemTime};

pub use crate::http::trace::TraceContext;

/// A request that was answered.
#[derive(Clone, Debug)]
pub struct RequestSpan<'a> {
    /// What the caller sent as `traceparent`.
    pub context: Option<TraceContext>,
    pub started: SystemTime,
    pub took: Duration,
    pub method: &'a str,
    /// Its template, never the path.
    pub route: Option<&'a str>,
    pub status: u16,
    pub error_code: Option<&'a str>,
    pub request_id: &'a str,
    pub session: Option<&'a str>,
    pub sandbox: Option<&'a str>,
}

/// Takes every request when it was answered. Must not block.
pub trait TraceSink: Send + Sync {
    fn request(&self, span: &RequestSpan<'_>);
}
