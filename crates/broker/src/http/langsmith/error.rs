//! Errors as the LangSmith SDKs read them: each of their classes follows from a status, a word, or a list of fields.

use cobox_protocol::{ApiError, ErrorCode, RequestId};
use serde_json::{Value, json};

/// The status of an error in this dialect.
pub const fn status(code: ErrorCode) -> u16 {
    match code {
        // A field that can't be is 422 to these clients, and what took too long to start is 408.
        ErrorCode::InvalidRequest => 422,
        ErrorCode::SandboxStarting => 408,
        // 410 is unknown to them.
        ErrorCode::SessionExpired => 404,
        other => other.status(),
    }
}

/// As [`status`], for pools: waiting for them in vain is 504.
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
    json!({ "detail": { "error": word(error.code), "message": error.message, "error_id": request_id } })
}

/// Which field a refusal is about, as every one of ours begins with it.
fn field(message: &str) -> &str {
    let named = message.split_once(": ").map_or("", |(field, _)| field);
    let is_name = !named.is_empty() && named.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.[]-".contains(&b));
    // The clients show the last part alone.
    if is_name { named.rsplit('.').next().unwrap_or(named) } else { "__root__" }
}

fn word(code: ErrorCode) -> &'static str {
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
        // What these clients call a sandbox that no machine could be found for.
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
    fn a_refused_field_is_named_as_the_sdk_looks_for_it() {
        let loc = |message: &str| body(&ApiError::invalid(message), &RequestId::new())["detail"][0]["loc"][1].clone();
        assert_eq!(loc("name: is taken"), "name");
        assert_eq!(loc("run_config.user: can't be had"), "user");
        assert_eq!(loc("the body: is not JSON: x"), "__root__");
        assert_eq!(loc("no colon"), "__root__");
    }
}
