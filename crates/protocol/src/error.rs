//! The error envelope of control plane and dataplane: a stable code, a message for the caller, whether a retry can help, and the request
//! id.

use serde::{Deserialize, Serialize};

use crate::RequestId;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $status:literal, $retryable:literal;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorCode { $($(#[$doc])* $name,)* }

        impl ErrorCode {
            pub const ALL: &'static [ErrorCode] = &[$(ErrorCode::$name,)*];
            pub const fn as_str(self) -> &'static str {
                match self { $(ErrorCode::$name => $code,)* }
            }
            pub const fn status(self) -> u16 {
                match self { $(ErrorCode::$name => $status,)* }
            }
            /// Whether the same request may succeed later without being changed.
            pub const fn retryable(self) -> bool {
                match self { $(ErrorCode::$name => $retryable,)* }
            }
        }
    };
}

codes! {
    InvalidRequest = "INVALID_REQUEST", 400, false;
    Unauthenticated = "UNAUTHENTICATED", 401, false;
    TokenExpired = "TOKEN_EXPIRED", 401, false;
    TokenRevoked = "TOKEN_REVOKED", 401, false;
    Forbidden = "FORBIDDEN", 403, false;
    CapabilityDenied = "CAPABILITY_DENIED", 403, false;
    SessionNotFound = "SESSION_NOT_FOUND", 404, false;
    SandboxNotFound = "SANDBOX_NOT_FOUND", 404, false;
    FileNotFound = "FILE_NOT_FOUND", 404, false;
    ShellNotFound = "SHELL_NOT_FOUND", 404, false;
    CommandNotFound = "COMMAND_NOT_FOUND", 404, false;
    KeyNotFound = "KEY_NOT_FOUND", 404, false;
    PrincipalNotFound = "PRINCIPAL_NOT_FOUND", 404, false;
    ShareNotFound = "SHARE_NOT_FOUND", 404, false;
    TemplateNotFound = "TEMPLATE_NOT_FOUND", 404, false;
    SnapshotNotFound = "SNAPSHOT_NOT_FOUND", 404, false;
    VolumeNotFound = "VOLUME_NOT_FOUND", 404, false;
    PoolNotFound = "POOL_NOT_FOUND", 404, false;
    RouteNotFound = "ROUTE_NOT_FOUND", 404, false;
    MethodNotAllowed = "METHOD_NOT_ALLOWED", 405, false;
    SessionConflict = "SESSION_CONFLICT", 409, false;
    /// [`ErrorCode::SessionNotFound`] for clients of the binding API.
    BindingNotFound = "BINDING_NOT_FOUND", 404, false;
    BindingConflict = "BINDING_CONFLICT", 409, false;
    SandboxConflict = "SANDBOX_CONFLICT", 409, false;
    /// Another object of the workspace has this name.
    NameTaken = "NAME_TAKEN", 409, false;
    /// Other objects depend on it and must be removed first.
    InUse = "IN_USE", 409, false;
    IdempotencyConflict = "IDEMPOTENCY_CONFLICT", 409, false;
    FileExists = "FILE_EXISTS", 409, false;
    ShellBusy = "SHELL_BUSY", 409, true;
    ShellExists = "SHELL_EXISTS", 409, false;
    SessionExpired = "SESSION_EXPIRED", 410, false;
    /// The command has run, and its output is no longer kept.
    CommandExpired = "COMMAND_EXPIRED", 410, false;
    FileChanged = "FILE_CHANGED", 412, false;
    TooLarge = "TOO_LARGE", 413, false;
    RangeNotSatisfiable = "RANGE_NOT_SATISFIABLE", 416, false;
    SandboxStarting = "SANDBOX_STARTING", 423, true;
    RateLimited = "RATE_LIMITED", 429, true;
    /// The maximum number of objects exists. Waiting does not help; deleting some does.
    QuotaExceeded = "QUOTA_EXCEEDED", 429, false;
    Internal = "INTERNAL", 500, true;
    /// A feature of the API that this deployment does not support; a retry never succeeds.
    Unsupported = "UNSUPPORTED", 400, false;
    ProviderUnavailable = "PROVIDER_UNAVAILABLE", 503, true;
    BackendUnavailable = "BACKEND_UNAVAILABLE", 503, true;
    /// The sandbox has used up its disk quota. Deleting files resolves it.
    DiskFull = "DISK_FULL", 507, false;
}

impl ErrorCode {
    /// The code for clients of the binding API, which uses other names for some codes.
    pub const fn for_bindings(self) -> Self {
        match self {
            ErrorCode::SessionNotFound => ErrorCode::BindingNotFound,
            ErrorCode::SessionConflict => ErrorCode::BindingConflict,
            ErrorCode::ProviderUnavailable => ErrorCode::BackendUnavailable,
            other => other,
        }
    }
}

impl Serialize for ErrorCode {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.as_str())
    }
}

/// An error without a request id yet.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}: {message}{}", .code.as_str(), .cause.as_ref().map(|c| format!(" ({c})")).unwrap_or_default())]
pub struct ApiError {
    pub code: ErrorCode,
    pub message: String,
    pub details: Option<serde_json::Value>,
    /// Seconds until a retry is useful, sent as `Retry-After`.
    pub retry_after: Option<u32>,
    /// Cause for the log. It may contain hosts, paths or tables, so it is never sent to the client.
    pub cause: Option<String>,
}

/// Retry delay in seconds after a backend was unavailable: a database restart or failover takes a few seconds.
const BACKEND_RETRY_AFTER: u32 = 2;

impl ApiError {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        let retry_after = match code {
            ErrorCode::SandboxStarting | ErrorCode::RateLimited => Some(1),
            ErrorCode::BackendUnavailable => Some(BACKEND_RETRY_AFTER),
            _ => None,
        };
        Self { code, message: message.into(), details: None, retry_after, cause: None }
    }
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidRequest, message)
    }
    pub fn with_details(mut self, details: serde_json::Value) -> Self {
        self.details = Some(details);
        self
    }
    /// Adds the cause for the log.
    pub fn with_cause(mut self, cause: impl Into<String>) -> Self {
        self.cause = Some(cause.into());
        self
    }
    pub fn envelope(&self, request_id: &RequestId) -> Envelope {
        Envelope {
            error: ErrorBody {
                code: self.code.as_str().to_owned(),
                message: self.message.clone(),
                retryable: self.code.retryable(),
                request_id: request_id.to_string(),
                details: self.details.clone(),
            },
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Envelope {
    pub error: ErrorBody,
}

/// The error in an envelope. `code` is a string, because clients must handle codes newer than themselves.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ErrorBody {
    #[cfg_attr(feature = "schema", schemars(with = "ErrorCode"))]
    pub code: String,
    pub message: String,
    pub retryable: bool,
    pub request_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<serde_json::Value>,
}
