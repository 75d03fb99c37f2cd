//! The only place that authorizes requests: holds the keys and revocations of the broker's last push, and ends the
//! streams whose token is revoked.

use std::{
    collections::{HashMap, HashSet},
    marker::PhantomData,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use axum::extract::FromRequestParts;
use cobox_protocol::{
    ApiError, Capability, ErrorCode, SandboxId, Timestamp,
    control::{BoxdStatus, ControlState, StopReason},
    key::{API_KEY_PREFIX, OPAQUE_TOKEN_PREFIX},
};
use cobox_token::{Claims, Keyset, RevocationView, TokenError, key_id};
use http::{HeaderMap, header, request::Parts};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    body::UnexpectedBody,
    clock::{Clock, sleep_until},
    http_listener::Connection,
    request_layer::{ErrorResponse, RequestRecord},
    server::Server,
};

/// Contents of the last control push.
pub struct PushedState {
    pub version: u64,
    pub lease_expires_at: Timestamp,
    pub disk_full: bool,
    pub ending: Option<StopReason>,
    keys: Keyset,
    key_ids: HashSet<String>,
    revoked: RevocationView,
}

impl PushedState {
    fn new(sandbox: &SandboxId, state: &ControlState) -> Result<Self, String> {
        Ok(Self {
            version: state.version,
            lease_expires_at: state.lease_expires_at,
            disk_full: state.disk_full,
            ending: state.stop_reason,
            keys: Keyset::new(&state.issuer, sandbox, &state.keys)?,
            key_ids: state.keys.iter().map(|k| k.kid.clone()).collect(),
            revoked: RevocationView::new(&state.revoked),
        })
    }

    /// Why a correctly signed token is refused: the sandbox is ending, or the token was revoked by id or with its
    /// signing key.
    fn refusal(&self, claims: &Claims) -> Option<ApiError> {
        if let Some(ending) = self.ending {
            return Some(ending.error());
        }
        let is_revoked = self.revoked.covers(claims) || !self.key_ids.contains(&key_id(&claims.aud, claims.generation));
        is_revoked.then(revoked_error)
    }
}

pub struct Authority {
    sandbox: SandboxId,
    pub clock: Arc<dyn Clock>,
    pushed_state: watch::Sender<Arc<PushedState>>,
    requests: AtomicU64,
    /// When the broker last sent a request, or when boxd started. Monotonic, because the wall clock may jump.
    last_broker_request: Mutex<Instant>,
    /// One per running request or shell, so bounded by the limits on those.
    streams: Mutex<HashMap<u64, StreamEntry>>,
    next_stream: AtomicU64,
    stream_closed: Notify,
}

struct StreamEntry {
    claims: Arc<Claims>,
    ended: CancellationToken,
    connection: Option<CancellationToken>,
}

impl Authority {
    pub fn new(sandbox: SandboxId, state: &ControlState, clock: Arc<dyn Clock>) -> Result<Self, String> {
        let pushed_state = PushedState::new(&sandbox, state)?;
        Ok(Self {
            sandbox,
            clock,
            pushed_state: watch::Sender::new(Arc::new(pushed_state)),
            requests: AtomicU64::new(0),
            last_broker_request: Mutex::new(Instant::now()),
            streams: Mutex::new(HashMap::new()),
            next_stream: AtomicU64::new(0),
            stream_closed: Notify::new(),
        })
    }

    /// Applies a push unless a newer one was applied before, and ends the streams that it revokes.
    pub fn apply_push(&self, state: &ControlState) -> Result<(), String> {
        let pushed_state = Arc::new(PushedState::new(&self.sandbox, state)?);
        let is_applied = self.pushed_state.send_if_modified(|current| {
            let is_newer = pushed_state.version >= current.version;
            if is_newer {
                *current = pushed_state.clone();
            }
            is_newer
        });
        if is_applied {
            for stream in self.streams().values().filter(|s| pushed_state.refusal(&s.claims).is_some()) {
                stream.end();
            }
        }
        Ok(())
    }

    pub fn pushed_state(&self) -> Arc<PushedState> {
        self.pushed_state.borrow().clone()
    }

    pub fn subscribe(&self) -> watch::Receiver<Arc<PushedState>> {
        self.pushed_state.subscribe()
    }

    /// Records that the broker sent a request.
    pub fn note_broker_request(&self) {
        *self.last_broker_request.lock() = Instant::now();
    }

    pub fn broker_silence(&self) -> Duration {
        self.last_broker_request.lock().elapsed()
    }

    pub fn status(&self) -> BoxdStatus {
        BoxdStatus {
            sandbox_id: self.sandbox.clone(),
            state_version: self.pushed_state().version,
            requests: self.requests.load(Ordering::Relaxed),
            open_streams: u32::try_from(self.streams().len()).unwrap_or(u32::MAX),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// Resolves when no request and no shell is running.
    pub async fn wait_until_idle(&self) {
        loop {
            // Before the check, so that a stream that closes in between is not missed.
            let closed = self.stream_closed.notified();
            if self.streams().is_empty() {
                return;
            }
            closed.await;
        }
    }

    /// Verifies the token in the `Authorization` header and the capability the request needs.
    pub fn authorize(&self, headers: &HeaderMap, needed: Capability) -> Result<Claims, ApiError> {
        let claims = self.verify(bearer_token(headers)?)?;
        require(&claims, needed)?;
        self.requests.fetch_add(1, Ordering::Relaxed);
        Ok(claims)
    }

    /// Verifies a token that arrived in a frame. It counts as a request.
    pub fn authorize_token(&self, token: &str, needed: Capability) -> Result<Claims, ApiError> {
        let claims = self.verify(token)?;
        require(&claims, needed)?;
        self.requests.fetch_add(1, Ordering::Relaxed);
        Ok(claims)
    }

    /// Resolves with the reason when a token expires.
    pub async fn wait_until_expired(&self, claims: &Claims) -> ApiError {
        sleep_until(&*self.clock, Timestamp::from_unix(claims.exp)).await;
        ApiError::new(ErrorCode::TokenExpired, TokenError::Expired.to_string())
    }

    fn verify(&self, token: &str) -> Result<Claims, ApiError> {
        if token.starts_with(API_KEY_PREFIX) {
            let message = "this is an API key, but a sandbox takes tokens only; request a token from the broker";
            return Err(ApiError::new(ErrorCode::Unauthenticated, message));
        }
        if token.starts_with(OPAQUE_TOKEN_PREFIX) {
            let message = "only the gateway can read an opaque token; access the sandbox through the gateway";
            return Err(ApiError::new(ErrorCode::Unauthenticated, message));
        }
        let pushed_state = self.pushed_state();
        let claims = pushed_state.keys.verify(token, self.clock.now()).map_err(|e| ApiError::new(e.code(), e.to_string()))?;
        match pushed_state.refusal(&claims) {
            Some(refusal) => Err(refusal),
            None => Ok(claims),
        }
    }

    /// Registers a request or shell that ends when its token is revoked.
    pub fn open_stream(self: &Arc<Self>, claims: Arc<Claims>) -> OpenStream {
        let id = self.next_stream.fetch_add(1, Ordering::Relaxed);
        let ended = CancellationToken::new();
        self.streams().insert(id, StreamEntry { claims: claims.clone(), ended: ended.clone(), connection: None });
        // A push between the token check and the line above has already scanned the streams and missed this one.
        if self.pushed_state().refusal(&claims).is_some() {
            ended.cancel();
        }
        OpenStream { authority: self.clone(), id, ended }
    }

    fn streams(&self) -> MutexGuard<'_, HashMap<u64, StreamEntry>> {
        self.streams.lock()
    }
}

impl StreamEntry {
    fn end(&self) {
        self.ended.cancel();
        if let Some(connection) = &self.connection {
            connection.cancel();
        }
    }
}

/// Held for as long as a request or a shell lasts.
pub struct OpenStream {
    authority: Arc<Authority>,
    id: u64,
    ended: CancellationToken,
}

impl OpenStream {
    /// Resolves with the reason when the token is revoked or the sandbox is about to end.
    pub async fn revoked(&self) -> ApiError {
        self.ended.cancelled().await;
        let claims = self.authority.streams().get(&self.id).map(|s| s.claims.clone());
        claims.and_then(|c| self.authority.pushed_state().refusal(&c)).unwrap_or_else(revoked_error)
    }

    /// Claims of the newest token.
    pub fn claims(&self) -> Option<Arc<Claims>> {
        self.authority.streams().get(&self.id).map(|s| s.claims.clone())
    }

    /// Checks a second capability, in addition to the one that admitted the request.
    pub fn require_capability(&self, needed: Capability) -> Result<(), ApiError> {
        self.claims().map_or_else(|| Err(revoked_error()), |claims| require(&claims, needed))
    }

    /// Runs a request's work until it is done or its token is revoked.
    pub async fn until_revoked<T>(&self, work: impl Future<Output = Result<T, ApiError>>) -> Result<T, ApiError> {
        tokio::select! {
            biased;
            reason = self.revoked() => Err(reason),
            result = work => result,
        }
    }

    /// Closes the connection too when the stream ends, because a client that doesn't read its response would not notice
    /// the end.
    pub fn close_with_stream(&self, connection: &Connection) {
        if let Some(stream) = self.authority.streams().get_mut(&self.id) {
            stream.connection = Some(connection.end.clone());
        }
        if self.ended.is_cancelled() {
            connection.end.cancel();
        }
    }

    /// Continues under a fresh token.
    pub fn renew(&self, claims: Arc<Claims>) {
        if let Some(stream) = self.authority.streams().get_mut(&self.id) {
            stream.claims = claims.clone();
        }
        if self.authority.pushed_state().refusal(&claims).is_some() {
            self.ended.cancel();
        }
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.authority.streams().remove(&self.id);
        self.authority.stream_closed.notify_waiters();
    }
}

fn revoked_error() -> ApiError {
    ApiError::new(ErrorCode::TokenRevoked, TokenError::Revoked.to_string())
}

fn bearer_token(headers: &HeaderMap) -> Result<&str, ApiError> {
    let missing = || ApiError::new(ErrorCode::Unauthenticated, "send the sandbox's token as `Authorization: Bearer <token>`");
    let value = headers.get(header::AUTHORIZATION).ok_or_else(missing)?.to_str().map_err(|_| missing())?;
    match value.split_once(' ') {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() => Ok(token.trim()),
        _ => Err(missing()),
    }
}

fn require(claims: &Claims, needed: Capability) -> Result<(), ApiError> {
    if claims.scope.contains(needed) {
        return Ok(());
    }
    let message = format!("the token lacks the capability `{needed}`; request a token with it from the broker");
    Err(ApiError::new(ErrorCode::CapabilityDenied, message).with_details(serde_json::json!({ "capability": needed.as_str() })))
}

/// The capability a handler needs, part of its signature so that it can't be forgotten.
pub trait RequiredCapability: Send + Sync {
    const CAPABILITY: Capability;
}

macro_rules! declare_capabilities {
    ($($name:ident)*) => {$(
        pub struct $name;
        impl RequiredCapability for $name {
            const CAPABILITY: Capability = Capability::$name;
        }
    )*};
}
declare_capabilities! { FsRead FsWrite Exec Shell ShellObserve }

/// An authorized request.
pub struct Caller<N> {
    pub stream: OpenStream,
    pub claims: Arc<Claims>,
    record: Option<Arc<RequestRecord>>,
    required: PhantomData<N>,
}

impl<N> Caller<N> {
    /// Sets the file, command, shell or process that the request is about, for the audit log.
    pub fn set_target(&self, target: &str) {
        if let Some(record) = &self.record {
            record.set_target(target);
        }
    }
}

impl<N: RequiredCapability> FromRequestParts<Arc<Server>> for Caller<N> {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, server: &Arc<Server>) -> Result<Self, ErrorResponse> {
        let record = parts.extensions.get::<Arc<RequestRecord>>().cloned();
        if let Some(record) = &record {
            record.set_capability(N::CAPABILITY);
        }
        let claims = Arc::new(server.authority.authorize(&parts.headers, N::CAPABILITY)?);
        if let Some(record) = &record {
            record.set_claims(claims.clone());
        }
        UnexpectedBody::must_be_empty(&parts.extensions).await?;
        Ok(Self { stream: server.authority.open_stream(claims.clone()), claims, record, required: PhantomData })
    }
}
