//! The LangSmith sandbox API under both of its prefixes: a thin layer that translates its shapes to the broker's own
//! sandboxes.

pub mod boxes;
pub mod error;
pub mod pools;
mod quantity;
pub mod snapshots;
pub mod templates;
pub mod volumes;

use cobox_protocol::ErrorCode;

pub const PREFIXES: [&str; 2] = ["/v2/sandboxes", "/api/v2/sandboxes"];

/// True if the path belongs to this API.
pub fn is_langsmith_path(path: &str) -> bool {
    let is_below = |prefix: &str| path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    PREFIXES.into_iter().any(is_below)
}

/// The status of an error on this path.
pub fn status(path: &str, code: ErrorCode) -> u16 {
    let rest = PREFIXES.into_iter().find_map(|prefix| path.strip_prefix(prefix)).unwrap_or_default();
    match rest.strip_prefix("/pools").is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) {
        true => error::status_of_pools(code),
        false => error::status(code),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_has_the_status_that_the_sdk_expects() {
        let of = |path| status(path, ErrorCode::SandboxStarting);
        assert_eq!((of("/v2/sandboxes/boxes"), of("/v2/sandboxes/pools"), of("/api/v2/sandboxes/pools/x")), (408, 504, 504));
        assert_eq!((of("/v2/sandboxes/poolsx"), status("/v2/sandboxes/pools", ErrorCode::InvalidRequest)), (408, 422));
    }

    #[test]
    fn only_paths_below_the_prefixes_belong_to_the_langsmith_api() {
        for path in ["/v2/sandboxes", "/v2/sandboxes/boxes/a%2Fb", "/api/v2/sandboxes/none"] {
            assert!(is_langsmith_path(path), "{path}");
        }
        for path in ["/v1/sandboxes", "/v2/sandboxesx", "/x/v2/sandboxes", "/api/v1"] {
            assert!(!is_langsmith_path(path), "{path}");
        }
    }
}
