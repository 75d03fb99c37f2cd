//! Errors as the LangSmith SDKs read them: the SDKs derive each exception class from a status, an error type or a list
//! of fields.

use cobox_protocol::{ApiError, ErrorCode, RequestId};
use serde_json::{Value, json};

/// The status of an error in this API.
pub const fn status(code: ErrorCode) -> u16 {
    match code {
        // These clients expect 422 for an invalid field and 408 for a start that took too long.
        ErrorCode::InvalidRequest => 422,
        ErrorCode::SandboxStarting => 408,
        // These clients don't know 410.
        ErrorCode::SessionExpired => 404,
        other => other.status(),
    }
}

/// Like [`status`], for pools: a wait that timed out is 504.
pub const fn status_of_pools(code: ErrorCode) -> u16 {
    match code {
        ErrorCode::SandboxStarting => 504,
        other => status(other),
    }
}

pub fn body(error: &ApiError, request_id: &RequestId) -> Value {
    if error.code == ErrorCode::InvalidRequest {
        let message = format!("{} (error_id={request_id})", error.message);
        return json!({ "detail": [{ "loc": ["body", field(&error.message)], "msg": message, "type": "value_error" }] });
    }
    json!({ "detail": { "error": error_type(error.code), "message": error.message, "error_id": request_id } })
}

/// The field that caused an error. The broker's messages begin with it.
fn field(message: &str) -> &str {
    let named = message.split_once(": ").map_or("", |(field, _)| field);
    let is_name = !named.is_empty() && named.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.[]-".contains(&b));
    // The clients show only the last part.
    if is_name { named.rsplit('.').next().unwrap_or(named) } else { "__root__" }
}

fn error_type(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::Unauthenticated | ErrorCode::TokenExpired | ErrorCode::TokenRevoked => "Unauthorized",
        ErrorCode::Forbidden | ErrorCode::CapabilityDenied => "Forbidden",
        ErrorCode::SandboxNotFound | ErrorCode::SessionExpired | ErrorCode::RouteNotFound => "NotFound",
        ErrorCode::TemplateNotFound => "TemplateNotFound",
        ErrorCode::SnapshotNotFound | ErrorCode::VolumeNotFound | ErrorCode::PoolNotFound => "NotFound",
        ErrorCode::InUse => "ResourceInUse",
        ErrorCode::SandboxConflict | ErrorCode::NameTaken => "Conflict",
        ErrorCode::RateLimited | ErrorCode::QuotaExceeded => "QuotaExceeded",
        ErrorCode::SandboxStarting => "Timeout",
        // These clients' term for a sandbox for which no machine was found.
        ErrorCode::ProviderUnavailable => "Unschedulable",
        ErrorCode::Unsupported => "NotImplemented",
        ErrorCode::MethodNotAllowed => "MethodNotAllowed",
        ErrorCode::TooLarge => "TooLarge",
        _ => "InternalError",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_field_is_named_as_the_sdk_expects() {
        let loc = |message: &str| body(&ApiError::invalid(message), &RequestId::new())["detail"][0]["loc"][1].clone();
        assert_eq!(loc("name: is taken"), "name");
        assert_eq!(loc("run_config.user: can't be had"), "user");
        assert_eq!(loc("the body: is not JSON: x"), "__root__");
        assert_eq!(loc("no colon"), "__root__");
    }
}
