//! The door: reads target and credential, asks the directory, and hands over to the forwarding.

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
    Admission, Credential, Directory, FileLink, Kept, PassedFor, Reach, Refused, Target, TooSlow, Usage,
    adapted::Stand,
    forward::{Broken, Unanswered, Way, forward, holding, rewrite, upgrade},
    headers::is_websocket,
    slots::{Limits, Slot, Slots},
    socket::Socket,
    upstream::Upstream,
};

/// See [`FILE_FOLLOW_HEADER`].
const X_FILE_FOLLOW: HeaderName = HeaderName::from_static(FILE_FOLLOW_HEADER);
const SANDBOX_PREFIX: &str = "/dp/";
const SESSION_PREFIX: &str = "/v1/sandbox/relay/";
/// Where the gateway is, as a router writes it.
pub const PATHS: [&str; 2] = ["/dp/{*rest}", "/v1/sandbox/relay/{*rest}"];
/// Longest path kept in a use record, in bytes.
const MAX_RECORDED_PATH: usize = 256;
/// Longest answer to a health check, in bytes; boxd's is below 100.
const MAX_HEALTH_BYTES: usize = 4096;
/// How long a health check may take: a boxd that needs longer is not well.
const HEALTH_WITHIN: Duration = Duration::from_secs(5);
/// In a use record, where an answer's status stands: nobody was there to take one.
const CLIENT_WENT_AWAY: u16 = 499;

/// The door itself.
#[derive(Clone)]
pub struct Gateway {
    pub(crate) directory: Arc<dyn Directory>,
    pub(crate) slots: Slots,
}

impl Gateway {
    pub fn new(directory: Arc<dyn Directory>, limits: Limits) -> Self {
        Self { directory, slots: Slots::new(limits) }
    }

    /// Which of [`PATHS`] a path is, if it is one.
    pub fn template(path: &str) -> Option<&'static str> {
        let has_more = |prefix: &str| path.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty());
        [SANDBOX_PREFIX, SESSION_PREFIX].into_iter().zip(PATHS).find(|(prefix, _)| has_more(prefix)).map(|(_, template)| template)
    }

    /// A request on one of [`PATHS`]. `kept` is of its connection.
    pub async fn by_path(&self, request: Request<Body>, request_id: &RequestId, kept: &Kept) -> Response {
        let operation = langsmith::operation(rest_of(request.uri().path()).unwrap_or_default());
        self.answer(split(request.uri()), operation, request, request_id, kept).await
    }

    /// A request on a host name of the sandbox's own: all of its path is the sandbox's.
    pub async fn on_own_host(&self, sandbox: SandboxId, request: Request<Body>, request_id: &RequestId, kept: &Kept) -> Response {
        let rest = request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let operation = langsmith::operation(rest.path());
        self.answer(Ok((Target::Sandbox(sandbox), rest)), operation, request, request_id, kept).await
    }

    async fn answer(
        &self,
        aim: Result<(Target, PathAndQuery), ApiError>,
        operation: Option<&'static str>,
        request: Request<Body>,
        request_id: &RequestId,
        kept: &Kept,
    ) -> Response {
        let mut passed = None;
        let answered = match aim {
            Ok((target, rest)) => self.pass(target, rest, request, request_id, kept, &mut passed).await,
            Err(e) => Err(e),
        };
        let mut response = answered.unwrap_or_else(|e| refusal(e, operation, request_id));
        if let Some(passed) = passed {
            response.extensions_mut().insert(passed);
        }
        if response.status() == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl Gateway {
    async fn pass(
        &self,
        target: Target,
        mut rest: PathAndQuery,
        mut request: Request<Body>,
        request_id: &RequestId,
        kept: &Kept,
        passed: &mut Option<PassedFor>,
    ) -> Result<Response, ApiError> {
        if has_api_key(rest.as_str()) {
            // It would reach the sandbox, and has been in logs and histories on the way here.
            let message = "the URL has an API key in it: send the key in a header, and replace this one, because URLs are written down";
            return Err(ApiError::invalid(message));
        }
        let mut credential = Credential::from_headers(request.headers())?;
        if let Some(link) = FileLink::from_request(request.method(), &rest) {
            // A link never reaches a sandbox, whatever else is shown with it.
            let removed = FileLink::removed(&rest);
            rest = PathAndQuery::try_from(removed).map_err(|e| ApiError::invalid(format!("the path can't be read: {e}")))?;
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
        let admission = self.admit(&target, credential, request_id, kept).await?;
        // A link is for the one file of its path, also where a file has the name of a route that takes paths in its query.
        if let Some(route) = route::of_file(request.method().as_str()).filter(|_| is_link) {
            route.check_query(rest.query())?;
        }
        if let Some(caller) = &admission.caller {
            kept.authenticated(caller)?;
        }
        let slot = match &admission.caller {
            Some(caller) => self.slots.take(&admission.sandbox, caller.session.as_ref(), is_websocket)?,
            None if is_websocket => self.slots.take_stranger(&admission.sandbox, kept.source()),
            None => self.slots.take_health_check(&admission.sandbox).await,
        };

        let path = cut(rest.path(), MAX_RECORDED_PATH);
        let route = route::find(request.method().as_str(), &path).map(|r| r.template);
        *passed = Some(PassedFor { admission: admission.clone(), route });
        let recording = Recording::new(self, &admission, request_id, request.method(), route, &path);
        *request.uri_mut() = Uri::from(rest);
        let answered = if is_websocket {
            let must_close = slot.must_close();
            tokio::select! {
                answered = self.upgrade(request, (target, path), &admission, request_id, slot, kept) => answered,
                () = must_close => Err(made_room()),
            }
        } else if admission.caller.is_none() {
            self.check_health(request, &admission, request_id, slot).await
        } else {
            self.forward(request, &admission, request_id, slot, kept).await
        };
        recording.done(answered.as_ref().map_or_else(|e| e.code.status(), |r| r.status().as_u16())).await;
        answered
    }

    /// Decided anew where it could be another decision than the last for this connection.
    async fn admit(
        &self,
        target: &Target,
        credential: Option<Credential>,
        request_id: &RequestId,
        kept: &Kept,
    ) -> Result<Arc<Admission>, ApiError> {
        // Before the decision: what changes meanwhile makes it an old one.
        let stamp = self.directory.stamp();
        if let Some(known) = stamp.and_then(|stamp| kept.admitted(target, credential.as_ref(), stamp)) {
            return Ok(known);
        }
        let admission = Arc::new(self.directory.admit(target.clone(), credential.clone(), request_id).await?);
        if let Some(stamp) = stamp {
            kept.admit(target.clone(), credential, stamp, &admission);
        }
        Ok(admission)
    }

    async fn upgrade(
        &self,
        mut request: Request<Body>,
        (target, path): (Target, String),
        admission: &Arc<Admission>,
        request_id: &RequestId,
        slot: Slot,
        kept: &Kept,
    ) -> Result<Response, ApiError> {
        let client_side = hyper::upgrade::on(&mut request);
        let (parts, body) = request.into_parts();
        let request = rewrite(parts, body, admission, request_id, &slot, true);
        match self.directory.reach(admission).await? {
            Reach::Adapter(adapter) => self.adapt(adapter.as_ref(), request, admission, slot).await,
            Reach::Boxd(stream) => {
                let upstream = self.connect(stream, admission).await?;
                let (gateway, sandbox, request_id) = (self.clone(), admission.sandbox.clone(), request_id.clone());
                let socket = Socket { gateway, target, sandbox, path, request_id, caller: admission.caller.clone(), slot };
                match upgrade(upstream, request, client_side, socket).await {
                    Ok(response) => Ok(response),
                    Err(broken) => Err(self.explain(broken, admission).await),
                }
            }
        }
    }

    async fn forward(
        &self,
        request: Request<Body>,
        admission: &Arc<Admission>,
        request_id: &RequestId,
        slot: Slot,
        kept: &Kept,
    ) -> Result<Response, ApiError> {
        let (parts, body) = request.into_parts();
        let request = rewrite(parts, body, admission, request_id, &slot, false);
        let keep = kept.place(admission);
        // Over the connection the caller's last request used where there is one, else over a fresh one.
        let idle = if admission.is_running { kept.take(admission).await } else { None };
        let upstream = match idle {
            Some(upstream) => {
                self.directory.touch(admission);
                upstream
            }
            None => match self.directory.reach(admission).await? {
                Reach::Adapter(adapter) => return self.adapt(adapter.as_ref(), request, admission, slot).await,
                Reach::Boxd(stream) => self.connect(stream, admission).await?,
            },
        };
        let unanswered = match forward(upstream, request, Way { slot, keep }).await {
            Ok(response) => return Ok(response),
            Err(unanswered) => unanswered,
        };
        let broken = match unanswered {
            Unanswered::Broken(broken) => broken,
            Unanswered::Unsent(unsent) => {
                let (request, way) = *unsent;
                let Reach::Boxd(stream) = self.directory.reach(admission).await? else { return Err(no_answer(&admission.sandbox)) };
                match forward(self.connect(stream, admission).await?, request, way).await {
                    Ok(response) => return Ok(response),
                    Err(Unanswered::Broken(broken)) => broken,
                    Err(Unanswered::Unsent(_)) => return Err(no_answer(&admission.sandbox)),
                }
            }
        };
        Err(self.explain(broken, admission).await)
    }

    /// A health check without a credential. Nothing of the request goes to the sandbox but its path, and the answer is held here, so that
    /// neither a slow client nor a slow sandbox keeps its place.
    async fn check_health(
        &self,
        request: Request<Body>,
        admission: &Arc<Admission>,
        request_id: &RequestId,
        slot: Slot,
    ) -> Result<Response, ApiError> {
        let mut bare = Request::new(Body::empty());
        *bare.uri_mut() = request.into_parts().0.uri;
        let (parts, body) = bare.into_parts();
        let request = rewrite(parts, body, admission, request_id, &slot, false);
        let checked = async {
            let answer = match self.directory.reach(admission).await? {
                Reach::Adapter(adapter) => return self.adapt(adapter.as_ref(), request, admission, slot).await,
                Reach::Boxd(stream) => {
                    let upstream = self.connect(stream, admission).await?;
                    forward(upstream, request, Way { slot, keep: None }).await.map_err(|_| no_answer(&admission.sandbox))?
                }
            };
            let (parts, body) = answer.into_parts();
            let body = to_bytes(body, MAX_HEALTH_BYTES).await.map_err(|_| no_answer(&admission.sandbox))?;
            Ok(Response::from_parts(parts, Body::from(body)))
        };
        tokio::time::timeout(HEALTH_WITHIN, checked).await.unwrap_or_else(|_| Err(no_answer(&admission.sandbox)))
    }

    async fn adapt(&self, adapter: &dyn Adapter, request: Request<Body>, admission: &Admission, slot: Slot) -> Result<Response, ApiError> {
        let provider = self.directory.provider(admission);
        let response = Stand { adapter, provider, admission }.answer(request).await?;
        Ok(response.map(|body| holding(body, slot)))
    }

    /// A use, where somebody was authenticated.
    pub(crate) async fn used(&self, admission: Arc<Admission>, request_id: &RequestId, method: &str, path: &str, status: u16) {
        let route = route::find(method, path).map(|r| r.template);
        let (method, path) = (method.to_owned(), path.to_owned());
        self.directory.used(Usage { admission, request_id: request_id.clone(), method, route, path, status }).await;
    }

    async fn connect(&self, stream: BoxedStream, admission: &Admission) -> Result<Upstream, ApiError> {
        match Upstream::new(stream).await {
            Ok(upstream) => Ok(upstream),
            Err(error) => Err(self.explain(Broken::Boxd(error), admission).await),
        }
    }

    async fn explain(&self, broken: Broken, admission: &Admission) -> ApiError {
        let sandbox = &admission.sandbox;
        match broken {
            Broken::Caller(cause) => {
                tracing::debug!(%sandbox, %cause, "a caller went away");
                let too_slow = TooSlow::among_causes(&cause).map(|too_slow| too_slow.to_string());
                return ApiError::invalid(too_slow.unwrap_or_else(|| "the request's body broke off".to_owned()));
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

/// A use under way. Who goes away before there is an answer has used the sandbox all the same.
struct Recording {
    directory: Arc<dyn Directory>,
    usage: Option<Usage>,
}

impl Recording {
    fn new(
        gateway: &Gateway,
        admission: &Arc<Admission>,
        request_id: &RequestId,
        method: &Method,
        route: Option<&'static str>,
        path: &str,
    ) -> Self {
        // A stranger's use is recorded once it has said who it is.
        let usage = admission.caller.is_some().then(|| Usage {
            admission: admission.clone(),
            request_id: request_id.clone(),
            method: method.to_string(),
            route,
            path: path.to_owned(),
            status: CLIENT_WENT_AWAY,
        });
        Self { directory: gateway.directory.clone(), usage }
    }

    async fn done(mut self, status: u16) {
        if let Some(usage) = self.usage.take() {
            self.directory.used(Usage { status, ..usage }).await;
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // Without a runtime the process is ending.
        if let (Some(usage), Ok(runtime)) = (self.usage.take(), tokio::runtime::Handle::try_current()) {
            let directory = self.directory.clone();
            runtime.spawn(async move { directory.used(usage).await });
        }
    }
}

/// Told to a client that has not authenticated when its place goes to a newer connection.
pub(crate) fn made_room() -> ApiError {
    let message = "too many connections to this sandbox have not authenticated, and the oldest is closed; send the token as a header";
    ApiError::new(ErrorCode::RateLimited, message)
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
fn refusal(error: ApiError, operation: Option<&'static str>, request_id: &RequestId) -> Response {
    let status = if operation.is_some() { langsmith::status(error.code) } else { error.code.status() };
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    // Somebody may have put a credential where an id belongs.
    let error = ApiError { message: redact(&error.message).into_owned(), ..error };
    let mut response = match operation {
        Some(operation) => (status, axum::Json(langsmith::error_body(&error, operation, request_id))).into_response(),
        None => (status, axum::Json(error.envelope(request_id))).into_response(),
    };
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response.extensions_mut().insert(Refused(error));
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
    fn what_is_the_gateways_is_told_by_its_beginning() {
        assert_eq!(Gateway::template("/dp/sb_x/v1"), Some("/dp/{*rest}"));
        assert_eq!(Gateway::template("/v1/sandbox/relay/ssn_x"), Some("/v1/sandbox/relay/{*rest}"));
        for path in ["/dp/", "/dp", "/v1/sandbox/relay/", "/v1/sandbox/sessions", "/", "//dp/x"] {
            assert_eq!(Gateway::template(path), None, "{path}");
        }
    }

    #[test]
    fn an_id_that_is_none_is_not_found() {
        assert_eq!(split(&"/dp/sb_%2e%2e/v1".parse().unwrap()).unwrap_err().code, ErrorCode::SandboxNotFound);
        assert_eq!(split(&"/v1/sandbox/relay/x/v1".parse().unwrap()).unwrap_err().code, ErrorCode::SessionNotFound);
    }
}
