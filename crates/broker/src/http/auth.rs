//! Authenticates the caller, by an API key in `Authorization: Bearer` or `X-Api-Key` or by an OIDC token, and reads how
//! long the caller is ready to wait.

use std::time::Duration;

use axum::extract::{FromRequestParts, MatchedPath};
use cobox_gateway::Credential;
use cobox_protocol::{ApiError, ErrorCode, RequestId, SandboxId, SessionId};
use http::{HeaderMap, Uri, request::Parts};

use super::{
    Api,
    body::UnexpectedBody,
    error::{Failure, RequestRecord},
    rate_limits,
};
use crate::domain::{access::request_context::RequestContext, model::Caller};

/// How long to wait without `Prefer: wait=N`.
const DEFAULT_WAIT: Duration = Duration::from_secs(10);
/// Shorter than the time after which proxies usually close an idle connection.
const MAX_WAIT: Duration = Duration::from_secs(55);

/// Maximum length of a recorded client name, in characters.
const MAX_CLIENT_NAME: usize = 64;
const UNNAMED_CLIENT: &str = "unknown";

/// A request whose caller is authenticated.
pub struct Authenticated {
    pub caller: Caller,
    pub request_id: RequestId,
    pub wait: Duration,
    client: String,
    record: Option<RequestRecord>,
}

impl Authenticated {
    /// Records, for the log, the session and the sandbox that were found or created for the request.
    pub fn about(&self, session: &SessionId, sandbox: &SandboxId) {
        self.request_context().about(session, sandbox);
    }

    pub fn request_context(&self) -> RequestContext<'_> {
        let logged = self.record.as_ref().map(RequestRecord::logged);
        RequestContext { caller: &self.caller, request_id: &self.request_id, wait: self.wait, client: &self.client, logged }
    }
}

impl FromRequestParts<Api> for Authenticated {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, Failure> {
        // If the path names a session, it is read together with the key. A session named in the body isn't: no body is
        // read before its sender is authenticated.
        let session = session_in(&parts.uri);
        let caller = match Credential::from_headers(&parts.headers)? {
            Some(Credential::ApiKey(key)) => api.services.keys.authenticate_with_session(&key, session.as_ref()).await?,
            Some(Credential::Token(token)) => api.services.keys.sign_in(&token).await?.ok_or_else(no_token)?,
            Some(Credential::Link(_)) => return Err(no_token().into()),
            None => return Err(refused("no credential: send `Authorization: Bearer <API key>` or `X-Api-Key: <key>`").into()),
        };
        let route = parts.extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str);
        api.charge(parts.extensions.get::<RequestRecord>(), &caller.principal, rate_limits::class(&parts.method, route))?;
        UnexpectedBody::must_be_empty(&parts.extensions).await?;
        let authority = api.context.thread_authority.as_ref();
        let caller = Caller { thread_credential: authority.and_then(|a| a.credential(&parts.headers)), ..caller };
        let request_id = parts.extensions.get::<RequestId>().cloned().unwrap_or_else(RequestId::new);
        let record = parts.extensions.get::<RequestRecord>().cloned();
        Ok(Self { caller, request_id, wait: preferred_wait(&parts.headers), client: client_name(&parts.headers), record })
    }
}

/// The session named in the path.
fn session_in(uri: &Uri) -> Option<SessionId> {
    let id = uri.path().strip_prefix("/v1/sandbox/sessions/")?.split('/').next()?;
    id.parse().ok()
}

fn no_token() -> ApiError {
    refused("the credential is a sandbox's token; the broker requires an API key")
}

fn refused(message: &str) -> ApiError {
    ApiError::new(ErrorCode::Unauthenticated, message)
}

/// The name a client gives itself, without its version.
fn client_name(headers: &HeaderMap) -> String {
    let agent = headers.get(http::header::USER_AGENT).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let name: String = agent.chars().take_while(|c| !matches!(c, '/' | ' ' | '(')).take(MAX_CLIENT_NAME).collect();
    if name.is_empty() { UNNAMED_CLIENT.to_owned() } else { name }
}

/// An unreadable preference is ignored.
fn preferred_wait(headers: &HeaderMap) -> Duration {
    headers
        .get_all("prefer")
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split([',', ';']))
        .find_map(|p| p.trim().strip_prefix("wait=")?.trim().parse().ok())
        .map_or(DEFAULT_WAIT, |seconds| Duration::from_secs(seconds).min(MAX_WAIT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preferred_wait_is_read_and_bounded() {
        let wait = |value: &str| preferred_wait(&HeaderMap::from_iter([(http::HeaderName::from_static("prefer"), value.parse().unwrap())]));
        assert_eq!(wait("respond-async, wait=3"), Duration::from_secs(3));
        assert_eq!(wait("wait=0"), Duration::ZERO);
        assert_eq!(wait("wait=99999"), MAX_WAIT);
        assert_eq!(wait("wait=soon"), DEFAULT_WAIT);
    }
}
