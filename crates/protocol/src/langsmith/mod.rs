//! The LangSmith sandbox SDK's dialect: the routes it knows right under a sandbox's root, and errors as it reads them.

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

/// The operation a route of this dialect does, as its errors name it; `None` for our own routes.
pub fn operation(route: &str) -> Option<&'static str> {
    match route {
        EXECUTE | EXECUTE_WS | EXECUTE_START | EXECUTE_RESUME => Some("CommandError"),
        UPLOAD => Some("WriteError"),
        DOWNLOAD | GLOB | GREP => Some("ReadError"),
        TUNNEL => Some("ConnectionError"),
        _ => None,
    }
}

/// The status of an error in this dialect. The SDK tries again after 503 and after no other that says "not yet".
pub const fn status(code: ErrorCode) -> u16 {
    match code {
        ErrorCode::SandboxStarting => ErrorCode::ProviderUnavailable.status(),
        other => other.status(),
    }
}

/// The body of an error in this dialect.
pub fn error_body(error: &ApiError, operation: &'static str, request_id: &RequestId) -> Value {
    json!({ "detail": { "error": error_type(error.code, operation), "message": error.message, "error_id": request_id } })
}

/// What the SDK tells errors apart by.
pub fn error_type(code: ErrorCode, operation: &'static str) -> &'static str {
    match code {
        ErrorCode::Unauthenticated | ErrorCode::TokenExpired | ErrorCode::TokenRevoked => "Unauthorized",
        ErrorCode::Forbidden | ErrorCode::CapabilityDenied => "PermissionDenied",
        ErrorCode::FileNotFound => "FileNotFound",
        ErrorCode::SandboxNotFound | ErrorCode::SessionNotFound | ErrorCode::SessionExpired => "SandboxNotFound",
        ErrorCode::CommandNotFound => "CommandNotFound",
        ErrorCode::CommandExpired => "SessionExpired",
        // What makes the SDK say that the sandbox isn't ready, rather than that the operation went wrong.
        ErrorCode::SandboxStarting | ErrorCode::ProviderUnavailable | ErrorCode::BackendUnavailable => "ServiceUnavailable",
        ErrorCode::RateLimited => "RateLimited",
        ErrorCode::MethodNotAllowed => "MethodNotAllowed",
        ErrorCode::Unsupported => "NotImplemented",
        _ => operation,
    }
}
