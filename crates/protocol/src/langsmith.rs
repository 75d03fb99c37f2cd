//! Errors as the LangSmith sandbox SDK reads them, on the routes it knows right under a sandbox's root.

use serde_json::{Value, json};

use crate::{ApiError, ErrorCode, RequestId};

pub const EXECUTE: &str = "/execute";
pub const UPLOAD: &str = "/upload";
pub const DOWNLOAD: &str = "/download";
pub const GLOB: &str = "/glob";
pub const GREP: &str = "/grep";

/// The operation a route of this dialect does, as its errors name it; `None` for our own routes.
pub fn operation(route: &str) -> Option<&'static str> {
    match route {
        EXECUTE => Some("CommandError"),
        UPLOAD => Some("WriteError"),
        DOWNLOAD | GLOB | GREP => Some("ReadError"),
        _ => None,
    }
}

/// The body of an error in this dialect.
pub fn error_body(error: &ApiError, operation: &'static str, request_id: &RequestId) -> Value {
    json!({ "detail": { "error": error_type(error.code, operation), "message": error.message, "error_id": request_id } })
}

fn error_type(code: ErrorCode, operation: &'static str) -> &'static str {
    match code {
        ErrorCode::Unauthenticated | ErrorCode::TokenExpired | ErrorCode::TokenRevoked => "Unauthorized",
        ErrorCode::Forbidden | ErrorCode::CapabilityDenied => "PermissionDenied",
        ErrorCode::FileNotFound => "FileNotFound",
        ErrorCode::SandboxNotFound | ErrorCode::SessionNotFound | ErrorCode::SessionExpired => "SandboxNotFound",
        // What makes the SDK say that the sandbox isn't ready, rather than that the operation went wrong.
        ErrorCode::SandboxStarting | ErrorCode::ProviderUnavailable => "ServiceUnavailable",
        ErrorCode::RateLimited => "RateLimited",
        ErrorCode::MethodNotAllowed => "MethodNotAllowed",
        _ => operation,
    }
}
