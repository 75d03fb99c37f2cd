//! The only place that authorizes requests: holds the keys and revocations of the broker's last push, and ends the
//! streams whose token is revoked.

use std::{
    collections::{HashMap, HashSet},
    marker::PhantomData,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
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
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    answer::{Failure, RequestRecord},
    body::UnwantedBody,
    clock::{Clock, until},
    listen::Connection,
    server::Server,
};

/// Contents of the last control push.
pub struct View {
    pub version: u64,
    pub lease_expires_at: Timestamp,
    pub disk_full: bool,
    pub ending: Option<StopReason>,
    keys: Keyset,
    key_ids: HashSet<String>,
    revoked: RevocationView,
}

impl View {
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
        is_revoked.then(revoked)
    }
}

pub struct Authority {
    sandbox: SandboxId,
    pub clock: Arc<dyn Clock>,
    view: watch::Sender<Arc<View>>,
    requests: AtomicU64,
    /// When the broker last sent a request, or when boxd started. Monotonic, because the wall clock may jump.
    last_broker_request: Mutex<Instant>,
    /// One per running request or shell, so bounded by the limits on those.
    streams: Mutex<HashMap<u64, Stream>>,
    next_stream: AtomicU64,
    stream_closed: Notify,
}

struct Stream {
    claims: Arc<Claims>,
    ended: CancellationToken,
    connection: Option<CancellationToken>,
}

impl Authority {
    pub fn new(sandbox: SandboxId, state: &ControlState, clock: Arc<dyn Clock>) -> Result<Self, String> {
        let view = View::new(&sandbox, state)?;
        Ok(Self {
            sandbox,
            clock,
            view: watch::Sender::new(Arc::new(view)),
            requests: AtomicU64::new(0),
            last_broker_request: Mutex::new(Instant::now()),
            streams: Mutex::new(HashMap::new()),
            next_stream: AtomicU64::new(0),
            stream_closed: Notify::new(),
        })
    }

    /// Applies a push unless a newer one was applied before, and ends the streams that it revokes.
    pub fn replace(&self, state: &ControlState) -> Result<(), String> {
        let view = Arc::new(View::new(&self.sandbox, state)?);
        let is_taken = self.view.send_if_modified(|current| {
            let is_newer = view.version >= current.version;
            if is_newer {
                *current = view.clone();
            }
            is_newer
        });
        if is_taken {
            for stream in self.streams().values().filter(|s| view.refusal(&s.claims).is_some()) {
                stream.end();
            }
        }
        Ok(())
    }

    pub fn view(&self) -> Arc<View> {
        self.view.borrow().clone()
    }

    pub fn subscribe(&self) -> watch::Receiver<Arc<View>> {
        self.view.subscribe()
    }

    /// Records that the broker sent a request.
    pub fn note_broker_request(&self) {
        *self.last_broker_request.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    pub fn broker_silence(&self) -> Duration {
        self.last_broker_request.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    pub fn status(&self) -> BoxdStatus {
        BoxdStatus {
            sandbox_id: self.sandbox.clone(),
            state_version: self.view().version,
            requests: self.requests.load(Ordering::Relaxed),
            open_streams: u32::try_from(self.streams().len()).unwrap_or(u32::MAX),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// Resolves when no request and no shell is running.
    pub async fn quiet(&self) {
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
        let claims = self.verify(bearer(headers)?)?;
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
    pub async fn expired(&self, claims: &Claims) -> ApiError {
        until(&*self.clock, Timestamp::from_unix(claims.exp)).await;
        ApiError::new(ErrorCode::TokenExpired, TokenError::Expired.to_string())
    }

    fn verify(&self, token: &str) -> Result<Claims, ApiError> {
        if token.starts_with(API_KEY_PREFIX) {
            let message = "this is an API key; a sandbox takes tokens only: negotiate with the broker for one";
            return Err(ApiError::new(ErrorCode::Unauthenticated, message));
        }
        if token.starts_with(OPAQUE_TOKEN_PREFIX) {
            let message = "an opaque token is read by the gateway alone; use the sandbox through it";
            return Err(ApiError::new(ErrorCode::Unauthenticated, message));
        }
        let view = self.view();
        let claims = view.keys.verify(token, self.clock.now()).map_err(|e| ApiError::new(e.code(), e.to_string()))?;
        match view.refusal(&claims) {
            Some(refusal) => Err(refusal),
            None => Ok(claims),
        }
    }

    /// Registers a request or shell that ends when its token is revoked.
    pub fn open(self: &Arc<Self>, claims: Arc<Claims>) -> OpenStream {
        let id = self.next_stream.fetch_add(1, Ordering::Relaxed);
        let ended = CancellationToken::new();
        self.streams().insert(id, Stream { claims: claims.clone(), ended: ended.clone(), connection: None });
        // A push between the token check and the line above has already scanned the streams and missed this one.
        if self.view().refusal(&claims).is_some() {
            ended.cancel();
        }
        OpenStream { authority: self.clone(), id, ended }
    }

    fn streams(&self) -> MutexGuard<'_, HashMap<u64, Stream>> {
        // Each change to the map is a single call, so a panic elsewhere can't leave it half done.
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stream {
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
        claims.and_then(|c| self.authority.view().refusal(&c)).unwrap_or_else(revoked)
    }

    /// Claims of the newest token.
    pub fn claims(&self) -> Option<Arc<Claims>> {
        self.authority.streams().get(&self.id).map(|s| s.claims.clone())
    }

    /// Checks a second capability, in addition to the one that admitted the request.
    pub fn also_needs(&self, needed: Capability) -> Result<(), ApiError> {
        self.claims().map_or_else(|| Err(revoked()), |claims| require(&claims, needed))
    }

    /// Runs a request's work until it is done or its token is revoked.
    pub async fn until_revoked<T>(&self, work: impl Future<Output = Result<T, ApiError>>) -> Result<T, ApiError> {
        tokio::select! {
            biased;
            why = self.revoked() => Err(why),
            done = work => done,
        }
    }

    /// Closes the connection too when the stream ends, because a client that doesn't read its response would not notice
    /// the end.
    pub fn ends_connection(&self, connection: &Connection) {
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
        if self.authority.view().refusal(&claims).is_some() {
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

fn revoked() -> ApiError {
    ApiError::new(ErrorCode::TokenRevoked, TokenError::Revoked.to_string())
}

fn bearer(headers: &HeaderMap) -> Result<&str, ApiError> {
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
    let message = format!("this needs the capability `{needed}`, which the token doesn't have; ask the broker for a token with it");
    Err(ApiError::new(ErrorCode::CapabilityDenied, message).with_details(serde_json::json!({ "capability": needed.as_str() })))
}

/// The capability a handler needs, part of its signature so that it can't be forgotten.
pub trait Need: Send + Sync {
    const CAPABILITY: Capability;
}

macro_rules! needs {
    ($($name:ident)*) => {$(
        pub struct $name;
        impl Need for $name {
            const CAPABILITY: Capability = Capability::$name;
        }
    )*};
}
needs! { FsRead FsWrite Exec Shell ShellObserve }

/// An authorized request.
pub struct Caller<N> {
    pub stream: OpenStream,
    pub claims: Arc<Claims>,
    record: Option<Arc<RequestRecord>>,
    need: PhantomData<N>,
}

impl<N> Caller<N> {
    /// Sets the file, command, shell or process that the request is about, for the audit log.
    pub fn aims_at(&self, target: &str) {
        if let Some(record) = &self.record {
            record.aims_at(target);
        }
    }
}

impl<N: Need> FromRequestParts<Arc<Server>> for Caller<N> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, server: &Arc<Server>) -> Result<Self, Failure> {
        let record = parts.extensions.get::<Arc<RequestRecord>>().cloned();
        if let Some(record) = &record {
            record.needs(N::CAPABILITY);
        }
        let claims = Arc::new(server.authority.authorize(&parts.headers, N::CAPABILITY)?);
        if let Some(record) = &record {
            record.came_from(claims.clone());
        }
        UnwantedBody::must_be_empty(&parts.extensions).await?;
        Ok(Self { stream: server.authority.open(claims.clone()), claims, record, need: PhantomData })
    }
}
