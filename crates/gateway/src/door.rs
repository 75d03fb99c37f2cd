//! The door: reads target and credential, asks the directory, and hands over to the forwarding.

use std::sync::Arc;

use axum::{
    Router,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
    routing::any,
};
use cobox_protocol::{ApiError, ErrorCode, RequestId, SandboxId, langsmith};
use http::{HeaderValue, Method, Request, StatusCode, Uri, header, uri::PathAndQuery};

use crate::{
    Admission, Credential, Directory, FileLink, KeptUpstream, PassedFor, Target, Usage,
    forward::{Broken, Unanswered, Way, forward, rewrite, upgrade},
    headers::{X_REQUEST_ID, is_websocket},
    slots::{Limits, Slots, Visitor},
    upstream::Upstream,
};

const SANDBOX_PREFIX: &str = "/dp/";
const SESSION_PREFIX: &str = "/v1/sandbox/relay/";
/// As a router reads them.
pub const SANDBOX_PATHS: &str = "/dp/{*rest}";
pub const SESSION_PATHS: &str = "/v1/sandbox/relay/{*rest}";
/// Longest path kept in a use record, in bytes.
const MAX_RECORDED_PATH: usize = 256;

/// The door itself. A [`RequestId`] among a request's extensions is used as it is.
#[derive(Clone)]
pub struct Gateway {
    directory: Arc<dyn Directory>,
    slots: Slots,
}

impl Gateway {
    pub fn new(directory: Arc<dyn Directory>, limits: Limits) -> Self {
        Self { directory, slots: Slots::new(limits) }
    }

    /// The routes by path, to be merged into a broker's.
    pub fn paths(&self) -> Router {
        Router::new().route(SANDBOX_PATHS, any(by_path)).route(SESSION_PATHS, any(by_path)).with_state(self.clone())
    }

    /// A request on a host name of the sandbox's own: all of its path is the sandbox's.
    pub async fn on_own_host(&self, sandbox: SandboxId, request: Request<Body>) -> Response {
        let rest = request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let operation = langsmith::operation(rest.path());
        self.answer(Ok((Target::Sandbox(sandbox), rest)), operation, request).await
    }

    async fn answer(
        &self,
        aim: Result<(Target, PathAndQuery), ApiError>,
        operation: Option<&'static str>,
        request: Request<Body>,
    ) -> Response {
        let request_id = request.extensions().get::<RequestId>().cloned().unwrap_or_else(RequestId::new);
        let answered = match aim {
            Ok((target, rest)) => self.pass(target, rest, request, &request_id).await,
            Err(e) => Err(e),
        };
        let mut response = answered.unwrap_or_else(|e| refusal(&e, operation, &request_id));
        if response.status() == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Ok(id) = HeaderValue::from_str(request_id.as_str()) {
            response.headers_mut().insert(X_REQUEST_ID, id);
        }
        response
    }
}

async fn by_path(State(gateway): State<Gateway>, request: Request<Body>) -> Response {
    let operation = langsmith::operation(rest_of(request.uri().path()).unwrap_or_default());
    gateway.answer(split(request.uri()), operation, request).await
}

impl Gateway {
    async fn pass(
        &self,
        target: Target,
        mut rest: PathAndQuery,
        mut request: Request<Body>,
        request_id: &RequestId,
    ) -> Result<Response, ApiError> {
        let mut credential = Credential::from_headers(request.headers())?;
        if credential.is_none()
            && let Some(link) = FileLink::from_request(request.method(), &rest)
        {
            credential = Some(Credential::Link(link));
            // A link never reaches a sandbox.
            rest = PathAndQuery::try_from(rest.path()).map_err(|e| ApiError::invalid(format!("the path can't be read: {e}")))?;
        }
        let is_websocket = is_websocket(request.method(), request.headers());
        if credential.is_none() && !is_websocket && !is_health_check(request.method(), &rest) {
            return Err(ApiError::new(
                ErrorCode::Unauthenticated,
                "no credential: send `Authorization: Bearer <token or API key>` or `X-Api-Key: <key>`",
            ));
        }
        let admission = self.directory.admit(target, credential, request_id).await?;
        let visitor = admission.caller.as_ref().map_or(Visitor::Stranger, |c| Visitor::Known(c.session.as_ref()));
        let slot = self.slots.take(&admission.sandbox, visitor, is_websocket)?;

        let method = request.method().to_string();
        let path = cut(rest.path(), MAX_RECORDED_PATH);
        *request.uri_mut() = Uri::from(rest);
        let client_side = is_websocket.then(|| hyper::upgrade::on(&mut request));
        let kept = request.extensions().get::<KeptUpstream>().cloned();
        let (parts, body) = request.into_parts();
        let keep = kept.as_ref().and_then(|k| k.place(&admission));
        let way = Way { admission: &admission, request_id, slot, keep };
        let request = rewrite(parts, body, &way, is_websocket);
        let answered = match client_side {
            Some(client_side) => upgrade(self.dial(&admission).await?, request, client_side, way.slot).await,
            None => self.send(request, way, kept).await?,
        };
        let mut response = match answered {
            Ok(response) => response,
            Err(broken) => return Err(self.explain(broken, &admission).await),
        };
        if let Some(caller) = &admission.caller {
            response.extensions_mut().insert(PassedFor(caller.principal.clone()));
        }
        let status = response.status().as_u16();
        self.directory.used(Usage { admission, request_id: request_id.clone(), method, path, status }).await;
        Ok(response)
    }
}

impl Gateway {
    async fn dial(&self, admission: &Admission) -> Result<Upstream, ApiError> {
        let stream = self.directory.dial(admission).await?;
        match Upstream::new(stream).await {
            Ok(upstream) => Ok(upstream),
            Err(error) => Err(self.explain(Broken::Boxd(error), admission).await),
        }
    }

    /// Over the connection the caller's last request used where there is one, else over a fresh one.
    async fn send(&self, request: Request<Body>, way: Way<'_>, kept: Option<KeptUpstream>) -> Result<Result<Response, Broken>, ApiError> {
        let (admission, request_id) = (way.admission, way.request_id);
        let idle = match kept.filter(|_| admission.is_running) {
            Some(kept) => kept.take(admission).await,
            None => None,
        };
        let upstream = match idle {
            Some(upstream) => {
                self.directory.touch(admission);
                upstream
            }
            None => self.dial(admission).await?,
        };
        match forward(upstream, request, way).await {
            Ok(response) => Ok(Ok(response)),
            Err(Unanswered::Broken(broken)) => Ok(Err(broken)),
            Err(Unanswered::Unsent(unsent)) => {
                let (request, slot, keep) = *unsent;
                let way = Way { admission, request_id, slot, keep };
                match forward(self.dial(admission).await?, request, way).await {
                    Ok(response) => Ok(Ok(response)),
                    Err(Unanswered::Broken(broken)) => Ok(Err(broken)),
                    Err(Unanswered::Unsent(_)) => Err(no_answer(&admission.sandbox)),
                }
            }
        }
    }

    async fn explain(&self, broken: Broken, admission: &Admission) -> ApiError {
        let sandbox = &admission.sandbox;
        match broken {
            Broken::Caller(cause) => {
                tracing::debug!(%sandbox, %cause, "a caller went away");
                return ApiError::invalid("the request's body broke off");
            }
            Broken::Boxd(cause) => {
                if let Err(over) = self.directory.vanished(admission).await {
                    tracing::debug!(%sandbox, %cause, "boxd ended with its session");
                    return over;
                }
                tracing::warn!(%sandbox, %cause, "boxd did not answer");
            }
            Broken::Protocol => tracing::warn!(%sandbox, "boxd switched protocols unasked"),
        }
        no_answer(sandbox)
    }
}

fn no_answer(sandbox: &SandboxId) -> ApiError {
    ApiError::new(ErrorCode::ProviderUnavailable, format!("boxd of {sandbox} did not answer; try again"))
}

/// The path as boxd would see it.
fn rest_of(path: &str) -> Option<&str> {
    let after = path.strip_prefix(SANDBOX_PREFIX).or_else(|| path.strip_prefix(SESSION_PREFIX))?;
    after.find('/').map(|i| &after[i..])
}

/// Takes the prefix off the raw path, so that the rest reaches boxd byte for byte as it was sent.
fn split(uri: &Uri) -> Result<(Target, PathAndQuery), ApiError> {
    let raw = uri.path_and_query().map_or("", PathAndQuery::as_str);
    let (after, is_session) = match (raw.strip_prefix(SANDBOX_PREFIX), raw.strip_prefix(SESSION_PREFIX)) {
        (Some(after), _) => (after, false),
        (None, Some(after)) => (after, true),
        (None, None) => return Err(ApiError::new(ErrorCode::RouteNotFound, "there is nothing at this path")),
    };
    let end = after.find(['/', '?']).unwrap_or(after.len());
    let (id, rest) = after.split_at(end);
    let target = if is_session {
        Target::Session(id.parse().map_err(|e| ApiError::new(ErrorCode::SessionNotFound, format!("no such session: {e}")))?)
    } else {
        Target::Sandbox(id.parse().map_err(|e| ApiError::new(ErrorCode::SandboxNotFound, format!("no such sandbox: {e}")))?)
    };
    let rest = if rest.starts_with('/') { rest.to_owned() } else { format!("/{rest}") };
    let rest = PathAndQuery::try_from(rest).map_err(|e| ApiError::invalid(format!("the path can't be read: {e}")))?;
    Ok((target, rest))
}

fn is_health_check(method: &Method, rest: &PathAndQuery) -> bool {
    method == Method::GET && matches!(rest.path(), "/healthz" | "/v1/healthz")
}

fn cut(s: &str, max: usize) -> String {
    let end = (0..=max.min(s.len())).rev().find(|i| s.is_char_boundary(*i)).unwrap_or(0);
    s[..end].to_owned()
}

/// In the dialect of the route that was asked for.
fn refusal(error: &ApiError, operation: Option<&'static str>, request_id: &RequestId) -> Response {
    let status = StatusCode::from_u16(error.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = match operation {
        Some(operation) => (status, axum::Json(langsmith::error_body(error, operation, request_id))).into_response(),
        None => (status, axum::Json(error.envelope(request_id))).into_response(),
    };
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_the_path_is_kept_byte_for_byte() {
        let id = cobox_protocol::SandboxId::new();
        for rest in ["/v1/files/a%2Fb%20c?x=%2F&y", "//v1//..%2f/", "/?", "/"] {
            let (target, got) = split(&format!("/dp/{id}{rest}").parse().unwrap()).unwrap();
            assert_eq!(target, Target::Sandbox(id.clone()));
            assert_eq!(got.as_str(), rest);
        }
        assert_eq!(split(&format!("/dp/{id}").parse().unwrap()).unwrap().1.as_str(), "/");
        assert_eq!(split(&format!("/dp/{id}?a=1").parse().unwrap()).unwrap().1.as_str(), "/?a=1");
    }

    #[test]
    fn an_id_that_is_none_is_not_found() {
        assert_eq!(split(&"/dp/sb_%2e%2e/v1".parse().unwrap()).unwrap_err().code, ErrorCode::SandboxNotFound);
        assert_eq!(split(&"/v1/sandbox/relay/x/v1".parse().unwrap()).unwrap_err().code, ErrorCode::SessionNotFound);
    }
}
