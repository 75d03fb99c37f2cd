//! API dialect of the LangSmith sandbox SDK: its routes directly below a sandbox's root, and its error format.

pub mod boxes;
pub mod exec;

use serde_json::{Value, json};

use crate::{ApiError, ErrorCode, RequestId};

pub const EXECUTE: &str = "/execute";
pub const EXECUTE_WS: &str = "/execute/ws";
pub const EXECUTE_START: &str = "/execute/stream/start";
pub const EXECUTE_RESUME: &str = "/execute/stream/resume";
pub const UPLOAD: &str = "/upload";
pub const DOWNLOAD: &str = "/download";
pub const GLOB: &str = "/glob";
pub const GREP: &str = "/grep";
pub const TUNNEL: &str = "/tunnel";

/// Operation name that errors of a LangSmith route use; `None` for native routes.
pub fn operation(route: &str) -> Option<&'static str> {
    match route {
        EXECUTE | EXECUTE_WS | EXECUTE_START | EXECUTE_RESUME => Some("CommandError"),
        UPLOAD => Some("WriteError"),
        DOWNLOAD | GLOB | GREP => Some("ReadError"),
        TUNNEL => Some("ConnectionError"),
        _ => None,
    }
}

/// HTTP status of an error in this dialect. Of the statuses for a temporary failure, the SDK retries only 503.
pub const fn status(code: ErrorCode) -> u16 {
    match code {
        ErrorCode::SandboxStarting => ErrorCode::ProviderUnavailable.status(),
        other => other.status(),
    }
}

/// Body of an error in this dialect.
pub fn error_body(error: &ApiError, operation: &'static str, request_id: &RequestId) -> Value {
    json!({ "detail": { "error": error_type(error.code, operation), "message": error.message, "error_id": request_id } })
}

/// Error type by which the SDK distinguishes errors.
pub fn error_type(code: ErrorCode, operation: &'static str) -> &'static str {
    match code {
        ErrorCode::Unauthenticated | ErrorCode::TokenExpired | ErrorCode::TokenRevoked => "Unauthorized",
        ErrorCode::Forbidden | ErrorCode::CapabilityDenied => "PermissionDenied",
        ErrorCode::FileNotFound => "FileNotFound",
        ErrorCode::SandboxNotFound | ErrorCode::SessionNotFound | ErrorCode::SessionExpired => "SandboxNotFound",
        ErrorCode::CommandNotFound => "CommandNotFound",
        ErrorCode::CommandExpired => "SessionExpired",
        // The SDK reports this type as a sandbox that is not ready, instead of a failed operation.
        ErrorCode::SandboxStarting | ErrorCode::ProviderUnavailable | ErrorCode::BackendUnavailable => "ServiceUnavailable",
        ErrorCode::RateLimited => "RateLimited",
        ErrorCode::MethodNotAllowed => "MethodNotAllowed",
        ErrorCode::Unsupported => "NotImplemented",
        _ => operation,
    }
}
