//! The gateway's entry points: read target and credential, ask the directory for admission, take a permit and forward the request.

use std::{sync::Arc, time::Duration};

use axum::{
    body::{Body, to_bytes},
    response::{IntoResponse, Response},
};
use cobox_protocol::{
    ApiError, ErrorCode, RequestId, SandboxId,
    files::FILE_FOLLOW_HEADER,
    langsmith, route,
    secret::{has_api_key, redact},
};
use cobox_provider::{Adapter, BoxedStream};
use http::{HeaderName, HeaderValue, Method, Request, StatusCode, Uri, header, uri::PathAndQuery};

use crate::{
    Admission, AdmittedRequest, ConnectionCache, Credential, Directory, FileLink, Rejection, SandboxConnection, Target, TooSlow, Usage,
    adapter_dataplane::AdapterDataplane,
    forward::{ConnectionFailure, ForwardContext, ForwardError, build_request, forward, hold_permit, upgrade},
    headers::is_websocket,
    request_limiter::{Limits, RequestLimiter, RequestPermit},
    upstream::Upstream,
    websocket_relay::WebSocketRelay,
};

/// See [`FILE_FOLLOW_HEADER`].
const X_FILE_FOLLOW: HeaderName = HeaderName::from_static(FILE_FOLLOW_HEADER);
const SANDBOX_PREFIX: &str = "/dp/";
const SESSION_PREFIX: &str = "/v1/sandbox/relay/";
/// The gateway's routes in the syntax of axum's router.
pub const PATHS: [&str; 2] = ["/dp/{*rest}", "/v1/sandbox/relay/{*rest}"];
/// Maximum length of the path in a usage record, in bytes.
const MAX_RECORDED_PATH: usize = 256;
/// Maximum length of the response to a health check, in bytes; boxd's has less than 100.
const MAX_HEALTH_BYTES: usize = 4096;
/// Time for a health check: a boxd that takes longer is not healthy.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);
/// Status in the usage record of a request whose client disconnected before the response.
const CLIENT_DISCONNECTED: u16 = 499;

/// Serves all dataplane requests. Clones share their state.
#[derive(Clone)]
pub struct Gateway {
    pub(crate) directory: Arc<dyn Directory>,
    pub(crate) limiter: RequestLimiter,
}

impl Gateway {
    pub fn new(directory: Arc<dyn Directory>, limits: Limits) -> Self {
        Self { directory, limiter: RequestLimiter::new(limits) }
    }

    /// The route among [`PATHS`] that matches a path.
    pub fn path_template(path: &str) -> Option<&'static str> {
        let has_rest = |prefix: &str| path.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty());
        [SANDBOX_PREFIX, SESSION_PREFIX].into_iter().zip(PATHS).find(|(prefix, _)| has_rest(prefix)).map(|(_, template)| template)
    }

    /// Serves a request on one of [`PATHS`]. `cache` belongs to the client's connection.
    pub async fn serve_path(&self, request: Request<Body>, request_id: &RequestId, cache: &ConnectionCache) -> Response {
        let operation = langsmith::operation(path_after_target(request.uri().path()).unwrap_or_default());
        self.respond(split_target(request.uri()), operation, request, request_id, cache).await
    }

    /// Serves a request on a sandbox's own host name, where the whole path belongs to the sandbox.
    pub async fn serve_sandbox_host(
        &self,
        sandbox: SandboxId,
        request: Request<Body>,
        request_id: &RequestId,
        cache: &ConnectionCache,
    ) -> Response {
        let rest = request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let operation = langsmith::operation(rest.path());
        self.respond(Ok((Target::Sandbox(sandbox), rest)), operation, request, request_id, cache).await
    }

    async fn respond(
        &self,
        target: Result<(Target, PathAndQuery), ApiError>,
        operation: Option<&'static str>,
        request: Request<Body>,
        request_id: &RequestId,
        cache: &ConnectionCache,
    ) -> Response {
        let mut admitted = None;
        let result = match target {
            Ok((target, rest)) => self.handle(target, rest, request, request_id, cache, &mut admitted).await,
            Err(e) => Err(e),
        };
        let mut response = result.unwrap_or_else(|e| rejection_response(e, operation, request_id));
        if let Some(admitted) = admitted {
            response.extensions_mut().insert(admitted);
        }
        if response.status() == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl Gateway {
    async fn handle(
        &self,
        target: Target,
        mut rest: PathAndQuery,
        mut request: Request<Body>,
        request_id: &RequestId,
        cache: &ConnectionCache,
        admitted: &mut Option<AdmittedRequest>,
    ) -> Result<Response, ApiError> {
        if has_api_key(rest.as_str()) {
            // It would reach the sandbox, and proxies and clients may have logged it already.
            let message = "the URL contains an API key: send the key in a header, and replace this key, because URLs are logged";
            return Err(ApiError::invalid(message));
        }
        let mut credential = Credential::from_headers(request.headers())?;
        if let Some(link) = FileLink::from_request(request.method(), &rest) {
            // A link never reaches a sandbox, even if another credential is used.
            let stripped = FileLink::strip(&rest);
            rest = PathAndQuery::try_from(stripped).map_err(|e| ApiError::invalid(format!("the path can't be read: {e}")))?;
            credential.get_or_insert(Credential::Link(link));
        }
        let is_websocket = is_websocket(request.method(), request.headers());
        if credential.is_none() && !is_websocket && !is_health_check(request.method(), &rest) {
            return Err(ApiError::new(
                ErrorCode::Unauthenticated,
                "no credential: send `Authorization: Bearer <token or API key>` or `X-Api-Key: <key>`",
            ));
        }
        let is_link = matches!(credential, Some(Credential::Link(_)));
        if is_link {
            request.headers_mut().insert(X_FILE_FOLLOW, HeaderValue::from_static("false"));
        }
        let admission = self.admit(&target, credential, request_id, cache).await?;
        // A link is for the one file of its path, even if that file has the name of a route that takes paths in its query.
        if let Some(route) = route::of_file(request.method().as_str()).filter(|_| is_link) {
            route.check_query(rest.query())?;
        }
        if let Some(caller) = &admission.caller {
            cache.mark_caller(caller)?;
        }
        let permit = match &admission.caller {
            Some(caller) => self.limiter.acquire(&admission.sandbox, caller.session.as_ref(), is_websocket)?,
            None if is_websocket => self.limiter.acquire_unauthenticated(&admission.sandbox, cache.address()),
            None => self.limiter.acquire_health_check(&admission.sandbox).await,
        };

        let path = truncate(rest.path(), MAX_RECORDED_PATH);
        let route = route::find(request.method().as_str(), &path).map(|r| r.template);
        *admitted = Some(AdmittedRequest { admission: admission.clone(), route });
        let pending_usage = PendingUsage::new(self, &admission, request_id, request.method(), route, &path);
        *request.uri_mut() = Uri::from(rest);
        let result = if is_websocket {
            let must_close = permit.must_close();
            tokio::select! {
                result = self.upgrade(request, (target, path), &admission, request_id, permit) => result,
                () = must_close => Err(closed_for_newer()),
            }
        } else if admission.caller.is_none() {
            self.check_health(request, &admission, request_id, permit).await
        } else {
            self.forward(request, &admission, request_id, permit, cache).await
        };
        pending_usage.finish(result.as_ref().map_or_else(|e| e.code.status(), |r| r.status().as_u16())).await;
        result
    }

    /// Reuses the connection's last decision if a new one couldn't differ from it.
    async fn admit(
        &self,
        target: &Target,
        credential: Option<Credential>,
        request_id: &RequestId,
        cache: &ConnectionCache,
    ) -> Result<Arc<Admission>, ApiError> {
        // Read before the decision, so that a change during it invalidates the result.
        let version = self.directory.version();
        if let Some(known) = version.and_then(|version| cache.cached_admission(target, credential.as_ref(), version)) {
            return Ok(known);
        }
        let admission = Arc::new(self.directory.admit(target.clone(), credential.clone(), request_id).await?);
        if let Some(version) = version {
            cache.store_admission(target.clone(), credential, version, &admission);
        }
        Ok(admission)
    }

    async fn upgrade(
        &self,
        mut request: Request<Body>,
        (target, path): (Target, String),
        admission: &Arc<Admission>,
        request_id: &RequestId,
        permit: RequestPermit,
    ) -> Result<Response, ApiError> {
        let client_side = hyper::upgrade::on(&mut request);
        let (parts, body) = request.into_parts();
        let request = build_request(parts, body, admission, request_id, &permit, true);
        match self.directory.connect(admission).await? {
            SandboxConnection::Adapter(adapter) => self.serve_adapter(adapter.as_ref(), request, admission, permit).await,
            SandboxConnection::Boxd(stream) => {
                let upstream = self.handshake(stream, admission).await?;
                let (gateway, sandbox, request_id) = (self.clone(), admission.sandbox.clone(), request_id.clone());
                let relay = WebSocketRelay { gateway, target, sandbox, path, request_id, caller: admission.caller.clone(), permit };
                match upgrade(upstream, request, client_side, relay).await {
                    Ok(response) => Ok(response),
                    Err(failure) => Err(self.failure_to_error(failure, admission).await),
                }
            }
        }
    }

    async fn forward(
        &self,
        request: Request<Body>,
        admission: &Arc<Admission>,
        request_id: &RequestId,
        permit: RequestPermit,
        cache: &ConnectionCache,
    ) -> Result<Response, ApiError> {
        let (parts, body) = request.into_parts();
        let request = build_request(parts, body, admission, request_id, &permit, false);
        let cache_return = cache.reserve(admission);
        // Prefers the connection of the caller's last request.
        let idle = if admission.is_running { cache.take_connection(admission).await } else { None };
        let upstream = match idle {
            Some(upstream) => {
                self.directory.touch(admission);
                upstream
            }
            None => match self.directory.connect(admission).await? {
                SandboxConnection::Adapter(adapter) => return self.serve_adapter(adapter.as_ref(), request, admission, permit).await,
                SandboxConnection::Boxd(stream) => self.handshake(stream, admission).await?,
            },
        };
        let failed = match forward(upstream, request, ForwardContext { permit, cache_return }).await {
            Ok(response) => return Ok(response),
            Err(failed) => failed,
        };
        let failure = match failed {
            ForwardError::ConnectionFailure(failure) => failure,
            ForwardError::NotSent(not_sent) => {
                let (request, context) = *not_sent;
                let SandboxConnection::Boxd(stream) = self.directory.connect(admission).await? else {
                    return Err(boxd_unavailable(&admission.sandbox));
                };
                match forward(self.handshake(stream, admission).await?, request, context).await {
                    Ok(response) => return Ok(response),
                    Err(ForwardError::ConnectionFailure(failure)) => failure,
                    Err(ForwardError::NotSent(_)) => return Err(boxd_unavailable(&admission.sandbox)),
                }
            }
        };
        Err(self.failure_to_error(failure, admission).await)
    }

    /// A health check without a credential. The sandbox gets only its path, and the response is buffered here, so that neither a slow
    /// client nor a slow sandbox holds the permit.
    async fn check_health(
        &self,
        request: Request<Body>,
        admission: &Arc<Admission>,
        request_id: &RequestId,
        permit: RequestPermit,
    ) -> Result<Response, ApiError> {
        let mut bare = Request::new(Body::empty());
        *bare.uri_mut() = request.into_parts().0.uri;
        let (parts, body) = bare.into_parts();
        let request = build_request(parts, body, admission, request_id, &permit, false);
        let checked = async {
            let response = match self.directory.connect(admission).await? {
                SandboxConnection::Adapter(adapter) => return self.serve_adapter(adapter.as_ref(), request, admission, permit).await,
                SandboxConnection::Boxd(stream) => {
                    let upstream = self.handshake(stream, admission).await?;
                    let context = ForwardContext { permit, cache_return: None };
                    forward(upstream, request, context).await.map_err(|_| boxd_unavailable(&admission.sandbox))?
                }
            };
            let (parts, body) = response.into_parts();
            let body = to_bytes(body, MAX_HEALTH_BYTES).await.map_err(|_| boxd_unavailable(&admission.sandbox))?;
            Ok(Response::from_parts(parts, Body::from(body)))
        };
        tokio::time::timeout(HEALTH_TIMEOUT, checked).await.unwrap_or_else(|_| Err(boxd_unavailable(&admission.sandbox)))
    }

    async fn serve_adapter(
        &self,
        adapter: &dyn Adapter,
        request: Request<Body>,
        admission: &Admission,
        permit: RequestPermit,
    ) -> Result<Response, ApiError> {
        let provider = self.directory.provider_name(admission);
        let response = AdapterDataplane { adapter, provider, admission }.handle(request).await?;
        Ok(response.map(|body| hold_permit(body, permit)))
    }

    pub(crate) async fn record_usage(&self, admission: Arc<Admission>, request_id: &RequestId, method: &str, path: &str, status: u16) {
        let route = route::find(method, path).map(|r| r.template);
        let (method, path) = (method.to_owned(), path.to_owned());
        self.directory.record_usage(Usage { admission, request_id: request_id.clone(), method, route, path, status }).await;
    }

    async fn handshake(&self, stream: BoxedStream, admission: &Admission) -> Result<Upstream, ApiError> {
        match Upstream::new(stream).await {
            Ok(upstream) => Ok(upstream),
            Err(error) => Err(self.failure_to_error(ConnectionFailure::Boxd(error), admission).await),
        }
    }

    async fn failure_to_error(&self, failure: ConnectionFailure, admission: &Admission) -> ApiError {
        let sandbox = &admission.sandbox;
        match failure {
            ConnectionFailure::Caller(cause) => {
                tracing::debug!(%sandbox, %cause, "the caller disconnected during its request");
                let too_slow = TooSlow::among_causes(&cause).map(|too_slow| too_slow.to_string());
                return ApiError::invalid(too_slow.unwrap_or_else(|| "the request body ended early".to_owned()));
            }
            ConnectionFailure::Boxd(cause) => {
                if let Err(over) = self.directory.check_not_ended(admission).await {
                    tracing::debug!(%sandbox, %cause, "boxd closed the connection because the session or sandbox has ended");
                    return over;
                }
                tracing::warn!(%sandbox, %cause, "boxd did not respond");
            }
            ConnectionFailure::Protocol => tracing::warn!(%sandbox, "boxd switched protocols without being asked to"),
        }
        boxd_unavailable(sandbox)
    }
}

/// A request that is not recorded yet. It is also recorded when it is dropped because the client disconnected.
struct PendingUsage {
    directory: Arc<dyn Directory>,
    usage: Option<Usage>,
}

impl PendingUsage {
    fn new(
        gateway: &Gateway,
        admission: &Arc<Admission>,
        request_id: &RequestId,
        method: &Method,
        route: Option<&'static str>,
        path: &str,
    ) -> Self {
        // An unauthenticated WebSocket is recorded once its first frame was accepted.
        let usage = admission.caller.is_some().then(|| Usage {
            admission: admission.clone(),
            request_id: request_id.clone(),
            method: method.to_string(),
            route,
            path: path.to_owned(),
            status: CLIENT_DISCONNECTED,
        });
        Self { directory: gateway.directory.clone(), usage }
    }

    async fn finish(mut self, status: u16) {
        if let Some(usage) = self.usage.take() {
            self.directory.record_usage(Usage { status, ..usage }).await;
        }
    }
}

impl Drop for PendingUsage {
    fn drop(&mut self) {
        // Without a runtime the process is exiting.
        if let (Some(usage), Ok(runtime)) = (self.usage.take(), tokio::runtime::Handle::try_current()) {
            let directory = self.directory.clone();
            runtime.spawn(async move { directory.record_usage(usage).await });
        }
    }
}

/// The error for an unauthenticated client whose permit goes to a newer connection.
pub(crate) fn closed_for_newer() -> ApiError {
    let message = "too many connections to this sandbox have not authenticated, and the oldest is closed; send the token as a header";
    ApiError::new(ErrorCode::RateLimited, message)
}

fn boxd_unavailable(sandbox: &SandboxId) -> ApiError {
    ApiError::new(ErrorCode::ProviderUnavailable, format!("boxd of sandbox {sandbox} did not respond; try again"))
}

/// The path that boxd would receive.
fn path_after_target(path: &str) -> Option<&str> {
    let after = path.strip_prefix(SANDBOX_PREFIX).or_else(|| path.strip_prefix(SESSION_PREFIX))?;
    after.find('/').map(|i| &after[i..])
}

/// Splits the raw path into target and rest, so that the rest reaches boxd byte for byte as sent.
fn split_target(uri: &Uri) -> Result<(Target, PathAndQuery), ApiError> {
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

fn truncate(s: &str, max: usize) -> String {
    let end = (0..=max.min(s.len())).rev().find(|i| s.is_char_boundary(*i)).unwrap_or(0);
    s[..end].to_owned()
}

/// Formats an error for the requested route: LangSmith routes have their own error format.
fn rejection_response(error: ApiError, operation: Option<&'static str>, request_id: &RequestId) -> Response {
    let status = if operation.is_some() { langsmith::status(error.code) } else { error.code.status() };
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    // The message may quote an ID, and a client may have sent a credential in its place.
    let error = ApiError { message: redact(&error.message).into_owned(), ..error };
    let mut response = match operation {
        Some(operation) => (status, axum::Json(langsmith::error_body(&error, operation, request_id))).into_response(),
        None => (status, axum::Json(error.envelope(request_id))).into_response(),
    };
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response.extensions_mut().insert(Rejection(error));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_the_path_is_forwarded_byte_for_byte() {
        let id = cobox_protocol::SandboxId::new();
        for rest in ["/v1/files/a%2Fb%20c?x=%2F&y", "//v1//..%2f/", "/?", "/"] {
            let (target, got) = split_target(&format!("/dp/{id}{rest}").parse().unwrap()).unwrap();
            assert_eq!(target, Target::Sandbox(id.clone()));
            assert_eq!(got.as_str(), rest);
        }
        assert_eq!(split_target(&format!("/dp/{id}").parse().unwrap()).unwrap().1.as_str(), "/");
        assert_eq!(split_target(&format!("/dp/{id}?a=1").parse().unwrap()).unwrap().1.as_str(), "/?a=1");
    }

    #[test]
    fn gateway_routes_are_recognized_by_their_prefix() {
        assert_eq!(Gateway::path_template("/dp/sb_x/v1"), Some("/dp/{*rest}"));
        assert_eq!(Gateway::path_template("/v1/sandbox/relay/ssn_x"), Some("/v1/sandbox/relay/{*rest}"));
        for path in ["/dp/", "/dp", "/v1/sandbox/relay/", "/v1/sandbox/sessions", "/", "//dp/x"] {
            assert_eq!(Gateway::path_template(path), None, "{path}");
        }
    }

    #[test]
    fn an_invalid_id_is_reported_as_not_found() {
        assert_eq!(split_target(&"/dp/sb_%2e%2e/v1".parse().unwrap()).unwrap_err().code, ErrorCode::SandboxNotFound);
        assert_eq!(split_target(&"/v1/sandbox/relay/x/v1".parse().unwrap()).unwrap_err().code, ErrorCode::SessionNotFound);
    }
}
