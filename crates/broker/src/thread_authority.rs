//! Thread authorization by a LangGraph deployment: asks it whether a caller may access a thread before a sandbox is
//! bound to the thread.

use std::{collections::HashMap, path::PathBuf, time::Duration};

use cobox_protocol::{ApiError, ErrorCode, Secret, Timestamp, id::is_external_id};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use parking_lot::Mutex;
use reqwest::Url;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::{
    config::ConfigError,
    domain::model::Caller,
    outbound::{Outbound, is_loopback, read_url},
};

/// Maximum time a positive answer is cached, for the same caller with the same credential. Negative answers are never
/// cached.
const MAX_REMEMBER_SECONDS: u32 = 30;
/// Maximum number of cached answers: more callers than a broker has in so short a time.
const MAX_REMEMBERED: usize = 10_000;
/// How much of a thread is read to recognize it, in bytes. The broker doesn't use its content.
const MAX_READ_BYTES: usize = 64 * 1024;
/// Maximum size of a credential that is forwarded, in bytes.
const MAX_CREDENTIAL_BYTES: usize = 16 * 1024;

/// The `[thread_authority]` section of the broker's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ThreadAuthorityConfig {
    /// URL of the deployment. Requests go to `/threads/{thread_id}` below it.
    pub url: String,
    /// Request header with the caller's credential for the deployment.
    #[serde(default = "default_credential_header")]
    pub credential_header: String,
    /// Header under which the credential is forwarded.
    #[serde(default = "default_forward_as")]
    pub forward_as: String,
    /// File with one key that replaces the callers' credentials, sent as `X-Api-Key`.
    pub service_key_file: Option<PathBuf>,
    /// With that key: header that names the caller to the deployment.
    pub user_header: Option<String>,
    #[serde(default = "default_remember")]
    pub remember_seconds: u32,
}

fn default_credential_header() -> String {
    "x-thread-authorization".to_owned()
}
fn default_forward_as() -> String {
    "authorization".to_owned()
}
fn default_remember() -> u32 {
    MAX_REMEMBER_SECONDS
}

impl ThreadAuthorityConfig {
    pub fn validate(&self) -> Result<(), ConfigError> {
        let invalid = |field, problem: &str| Err(ConfigError::Invalid { field, problem: problem.to_owned() });
        if let Err(problem) = read_url(&self.url) {
            return invalid("thread_authority.url", problem);
        }
        let headers = [
            ("thread_authority.credential_header", Some(&self.credential_header)),
            ("thread_authority.forward_as", Some(&self.forward_as)),
            ("thread_authority.user_header", self.user_header.as_ref()),
        ];
        for (field, name) in headers {
            if name.is_some_and(|n| HeaderName::try_from(n).is_err()) {
                return invalid(field, "must be a header name");
            }
        }
        // This header must not carry the broker's own credentials, which must not reach other systems. And the gateway
        // must keep it from sandboxes.
        if !self.credential_header.to_ascii_lowercase().ends_with("-authorization") {
            return invalid(
                "thread_authority.credential_header",
                "must end in -authorization, because the gateway doesn't forward such headers",
            );
        }
        if self.service_key_file.is_some() != self.user_header.is_some() {
            return invalid("thread_authority.service_key_file", "requires user_header, which names the user, and vice versa");
        }
        // A client that watches events is checked twice a second.
        if !(1..=MAX_REMEMBER_SECONDS).contains(&self.remember_seconds) {
            return invalid("thread_authority.remember_seconds", "must be from 1 to 30");
        }
        Ok(())
    }
}

/// The credential sent to the deployment.
enum DeploymentCredential {
    /// The caller's own credential.
    Callers { from: HeaderName, to: HeaderName },
    /// One key for all callers, and the caller's name.
    Service { key: Secret, user: HeaderName },
}

pub struct ThreadAuthority {
    url: Url,
    credential: DeploymentCredential,
    remember: Duration,
    outbound: Outbound,
    /// Expiry of cached positive answers, keyed by a hash of the question and the credential.
    remembered: Mutex<HashMap<[u8; 32], Timestamp>>,
}

impl ThreadAuthority {
    pub fn new(config: &ThreadAuthorityConfig) -> Result<Self, String> {
        let url = read_url(&config.url)?;
        let header = |name: &str| HeaderName::try_from(name).map_err(|e| e.to_string());
        let credential = match (&config.service_key_file, &config.user_header) {
            (Some(file), Some(user)) => {
                let text = std::fs::read_to_string(file).map_err(|e| format!("{} can't be read: {e}", file.display()))?;
                let key = Secret::new(text.trim());
                if key.expose().is_empty() || HeaderValue::from_str(key.expose()).is_err() {
                    return Err(format!("{} must contain a key", file.display()));
                }
                DeploymentCredential::Service { key, user: header(user)? }
            }
            _ => DeploymentCredential::Callers { from: header(&config.credential_header)?, to: header(&config.forward_as)? },
        };
        let remember = Duration::from_secs(config.remember_seconds.into());
        Ok(Self { outbound: Outbound::new(is_loopback(&url))?, url, credential, remember, remembered: Mutex::default() })
    }

    /// Extracts the caller's credential for the deployment from a request's headers.
    pub fn credential(&self, headers: &HeaderMap) -> Option<Secret> {
        let DeploymentCredential::Callers { from, .. } = &self.credential else { return None };
        headers.get(from)?.to_str().ok().filter(|v| !v.is_empty() && v.len() <= MAX_CREDENTIAL_BYTES).map(Secret::new)
    }

    /// Checks whether a caller may access a thread. If the deployment doesn't answer, access is refused with an error
    /// that permits a retry.
    pub async fn check(&self, caller: &Caller, thread: &str, now: Timestamp) -> Result<(), ApiError> {
        let request_for = self.request_for(caller, thread);
        if self.is_remembered(&request_for, now) {
            return Ok(());
        }
        let url = self.thread_url(thread).ok_or_else(|| no_such_thread(thread))?;
        let answered = self.outbound.get_start(&url, self.headers(caller)?, MAX_READ_BYTES).await;
        match answered {
            Ok((StatusCode::OK, body)) if is_thread(&body, thread) => {
                self.remember(request_for, now);
                Ok(())
            }
            Ok((StatusCode::OK, _)) => {
                tracing::error!(url = %self.url, "the thread authority's response is not a thread; check its URL");
                Err(unavailable())
            }
            Ok((StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _)) => {
                Err(ApiError::new(ErrorCode::Forbidden, format!("the thread authority denies you access to thread `{thread}`")))
            }
            // An id that the deployment rejects as invalid is an unknown thread.
            Ok((StatusCode::NOT_FOUND | StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY, _)) => Err(no_such_thread(thread)),
            Ok((status, _)) => {
                tracing::warn!(status = status.as_u16(), "the thread authority sent an unexpected status");
                Err(unavailable())
            }
            Err(why) => {
                tracing::warn!(%why, "the thread authority did not answer");
                Err(unavailable())
            }
        }
    }

    fn headers(&self, caller: &Caller) -> Result<HeaderMap, ApiError> {
        let mut headers = HeaderMap::new();
        let refused = |why: String| ApiError::new(ErrorCode::Forbidden, why);
        match &self.credential {
            DeploymentCredential::Callers { from, to } => {
                let missing = || refused(format!("access to a thread requires a credential for the thread authority; send it as `{from}`"));
                let credential = caller.thread_credential.as_ref().ok_or_else(missing)?;
                headers.insert(to, sensitive(credential.expose()).ok_or_else(missing)?);
            }
            DeploymentCredential::Service { key, user } => {
                let unsayable =
                    || refused("your name is not a valid header value, so the thread authority can't check your access".to_owned());
                headers.insert(HeaderName::from_static("x-api-key"), sensitive(key.expose()).ok_or_else(unsayable)?);
                let name = HeaderValue::from_str(&caller.principal.name).map_err(|_| unsayable())?;
                headers.insert(user, name);
            }
        }
        Ok(headers)
    }

    /// A URL below the configured one and nowhere else.
    fn thread_url(&self, thread: &str) -> Option<Url> {
        // URL normalization would resolve these as path segments.
        if !is_external_id(thread) || matches!(thread, "." | "..") {
            return None;
        }
        let mut url = self.url.clone();
        url.path_segments_mut().ok()?.pop_if_empty().push("threads").push(thread);
        Some(url)
    }

    /// Hashes everything that the answer may depend on.
    fn request_for(&self, caller: &Caller, thread: &str) -> [u8; 32] {
        let mut hash = Sha256::new();
        let credential = caller.thread_credential.as_ref().map_or("", |c| c.expose());
        for part in [&caller.principal.workspace, &caller.principal.name, caller.key.as_str(), credential, thread] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part.as_bytes());
        }
        hash.finalize().into()
    }

    fn is_remembered(&self, request_for: &[u8; 32], now: Timestamp) -> bool {
        self.remembered.lock().get(request_for).is_some_and(|until| *until > now)
    }

    fn remember(&self, request_for: [u8; 32], now: Timestamp) {
        let mut remembered = self.remembered.lock();
        if remembered.len() >= MAX_REMEMBERED {
            remembered.retain(|_, until| *until > now);
        }
        if remembered.len() >= MAX_REMEMBERED {
            remembered.clear();
        }
        remembered.insert(request_for, now.plus(self.remember));
    }
}

fn sensitive(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// True if a response describes this thread: a page that answers every request with 200 must not grant access.
fn is_thread(body: &[u8], thread: &str) -> bool {
    let text = String::from_utf8_lossy(body);
    let Ok(id) = serde_json::to_string(thread) else { return false };
    let after = |key: usize| text[key + "\"thread_id\"".len()..].trim_start().strip_prefix(':').map(str::trim_start);
    text.trim_start().starts_with('{')
        && text.match_indices("\"thread_id\"").any(|(at, _)| after(at).is_some_and(|rest| rest.starts_with(&id)))
}

fn no_such_thread(thread: &str) -> ApiError {
    ApiError::new(ErrorCode::SessionNotFound, format!("the thread authority has no thread `{thread}`"))
}

fn unavailable() -> ApiError {
    ApiError::new(ErrorCode::ProviderUnavailable, "the thread authority is unavailable; try again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_requested_only_below_the_configured_url() {
        let of = |url: &str, thread: &str| {
            let config: ThreadAuthorityConfig = toml::from_str(&format!("url = {url:?}")).unwrap();
            ThreadAuthority::new(&config).unwrap().thread_url(thread).map(|u| u.to_string())
        };
        assert_eq!(of("http://127.0.0.1:1", "t-1").unwrap(), "http://127.0.0.1:1/threads/t-1");
        assert_eq!(of("http://127.0.0.1:1/base/", "a/../b?c#d%2f").unwrap(), "http://127.0.0.1:1/base/threads/a%2F..%2Fb%3Fc%23d%252f");
        for step in [".", ".."] {
            assert_eq!(of("http://127.0.0.1:1", step), None);
        }
    }

    #[test]
    fn only_a_response_about_the_thread_grants_access() {
        assert!(is_thread(br#"{"created_at":"x", "thread_id" : "t1", "values":{"a"#, "t1"));
        assert!(!is_thread(br#"{"thread_id":"t12"}"#, "t1"));
        assert!(!is_thread(br#"<html>"thread_id":"t1"</html>"#, "t1"));
        assert!(!is_thread(b"{}", "t1"));
    }
}
