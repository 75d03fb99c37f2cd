//! Events of a session and its sandbox: the stored records, and streams to clients that are authorized to watch.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, CapabilitySet, ErrorCode, EventId, Secret, SessionId,
    event::{EventKind, SandboxEvent},
};
use tokio::{
    sync::{broadcast, broadcast::error::RecvError},
    time::Instant,
};

use super::stream_limiter::{StreamLimiter, StreamPermit};
use crate::{
    domain::{
        access::{
            self,
            keys::Keys,
            rate_limiter::ChargeRequest,
            session_access::{enter, session_expired},
            token_verification::verify,
        },
        context::{BrokerContext, store_error},
        model::{Caller, Event, Principal, SessionWithSandbox},
    },
    store::{ChangeNotice, EventBounds},
};

/// Events per read. Bounds a stream's memory to some hundred KiB.
const PAGE_EVENTS: u32 = 64;
/// How often a stream checks that its client is still authorized and that no event was missed. Hints trigger both
/// earlier.
const RECHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Interval of heartbeats on an idle stream, so that proxies don't close the connection.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(15);

/// Where a stream begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamStart {
    /// Every stored event of the session.
    Start,
    /// Only events from now on.
    Now,
    After(EventId),
}

pub struct EventStreams {
    context: Arc<BrokerContext>,
    keys: Arc<Keys>,
    limiter: StreamLimiter,
}

/// The credential that a client presents to watch.
pub enum Credential {
    ApiKey(Secret),
    Token(Secret),
    /// A file link; it can't open an event stream.
    FileLink,
}

/// The credentials of a watching client, checked again while it watches.
pub struct StreamCredentials {
    pub credential: Option<Credential>,
    /// Credential for the external thread authority.
    pub for_threads: Option<Secret>,
}

/// A session, and what the watching client may see of it.
struct AdmittedClient {
    bound: SessionWithSandbox,
    capabilities: CapabilitySet,
    principal: Principal,
}

impl EventStreams {
    pub fn new(context: Arc<BrokerContext>, keys: Arc<Keys>) -> Self {
        Self { context, keys, limiter: StreamLimiter::default() }
    }

    /// Opens a stream of a session's events, for a key that may use the session or a token of it. A session that has
    /// ended is streamed to its last event.
    pub async fn open(
        self: &Arc<Self>,
        credentials: StreamCredentials,
        id: &SessionId,
        from: StreamStart,
        charge: ChargeRequest<'_>,
    ) -> Result<EventStream, ApiError> {
        let context = &self.context;
        // Before the first read, so that no change in between is missed.
        let notices = context.store.notices();
        let AdmittedClient { bound, capabilities, principal } = self.admit(&credentials, id).await?;
        charge(&principal)?;
        let permit = self.limiter.acquire(&principal, id)?;
        let (after, has_gap) = self.begin(&bound, &from).await?;
        let begins_at = (from == StreamStart::Now).then(|| EventId::numbered(context.now(), after));
        let mut stream = EventStream {
            streams: self.clone(),
            credentials,
            capabilities,
            end: None,
            bound,
            begins_at,
            after,
            has_unreported_gap: has_gap,
            gap_reported_until: 0,
            notices,
            next_recheck: Instant::now() + RECHECK_INTERVAL,
            next_heartbeat: Instant::now() + HEARTBEAT_INTERVAL,
            ready: None,
            _permit: permit,
        };
        if stream.bound.session.ended_at.is_some() {
            stream.find_end().await?;
            // A client that has seen the last event has no reason to reconnect.
            stream.ready = stream.read().await?;
            if stream.ready.is_none() {
                return Err(session_expired(&stream.bound.session));
            }
        }
        Ok(stream)
    }

    /// Checks whether the credentials allow watching the session.
    async fn admit(&self, credentials: &StreamCredentials, id: &SessionId) -> Result<AdmittedClient, ApiError> {
        let context = &self.context;
        let found = context.store.session(id).await.map_err(store_error)?;
        let credential = credentials.credential.as_ref().ok_or_else(missing_credential)?;
        let caller = match credential {
            Credential::ApiKey(key) => Some(self.keys.authenticate(key).await?),
            Credential::Token(token) => self.keys.sign_in(token).await?,
            Credential::FileLink => None,
        };
        match (credential, caller) {
            (_, Some(caller)) => {
                let caller = Caller { thread_credential: credentials.for_threads.clone(), ..caller };
                let not_found = || ApiError::new(ErrorCode::SessionNotFound, format!("there is no session {id}"));
                let bound = found.filter(|b| access::is_visible(&caller.principal, &b.session)).ok_or_else(not_found)?;
                let entry = enter(context, &caller.principal, &bound.session, &bound.sandbox).await?;
                context.may_see(&caller, bound.session.thread()).await?;
                let capabilities = entry.limit(access::grant(&context.policy(), &caller, None)?)?;
                Ok(AdmittedClient { bound, capabilities, principal: caller.principal })
            }
            (Credential::Token(token), None) => {
                let refused = || ApiError::new(ErrorCode::Unauthenticated, "the token is for another session");
                let bound = found.ok_or_else(refused)?;
                let claims = verify(context, &bound.sandbox, token).await?;
                if claims.sid.as_deref() != Some(id.as_str()) {
                    return Err(refused());
                }
                let principal = Principal { workspace: bound.sandbox.workspace.clone(), name: claims.sub, kind: claims.act.kind };
                Ok(AdmittedClient { bound, capabilities: claims.scope, principal })
            }
            (Credential::ApiKey(_) | Credential::FileLink, None) => {
                Err(ApiError::new(ErrorCode::Unauthenticated, "a file link opens one file and nothing else"))
            }
        }
    }

    /// The number after which to read, and whether events before it are missing.
    async fn begin(&self, bound: &SessionWithSandbox, from: &StreamStart) -> Result<(u64, bool), ApiError> {
        let store = &self.context.store;
        let (sandbox, session) = (&bound.sandbox.id, &bound.session.id);
        let EventBounds { own_first, newest, pruned, .. } = store.event_bounds(sandbox, session).await.map_err(store_error)?;
        match from {
            StreamStart::Now => Ok((newest, false)),
            StreamStart::Start if own_first == 0 => Ok((newest, true)),
            StreamStart::Start => {
                let page = store.events(sandbox, session, own_first - 1, 1).await.map_err(store_error)?;
                let is_whole = page.events.first().is_some_and(|(_, e)| matches!(e.what, EventKind::Created { .. }));
                // The sandbox's remaining events from before the session's first one belong to the session, too.
                if is_whole { Ok((own_first - 1, false)) } else { Ok((pruned, true)) }
            }
            StreamStart::After(id) => match id.number() {
                // An id beyond the newest event was not issued by this broker.
                number if number > newest => Ok((newest, true)),
                number => Ok((number.max(pruned), number < pruned)),
            },
        }
    }
}

pub fn missing_credential() -> ApiError {
    ApiError::new(ErrorCode::Unauthenticated, "no credential: send an API key, or a token of the session")
}

/// The next item of a stream.
#[derive(Debug)]
pub enum StreamItem {
    Events(Vec<SandboxEvent>),
    /// No event; a heartbeat is due.
    Heartbeat,
    /// The stream is over: the session ended, or the error says why the client may not continue.
    End(Option<ApiError>),
}

pub struct EventStream {
    streams: Arc<EventStreams>,
    credentials: StreamCredentials,
    capabilities: CapabilitySet,
    bound: SessionWithSandbox,
    /// Number of the session's last event, if it has ended.
    end: Option<u64>,
    /// Position at which a stream of only new events begins; `None` for other streams.
    begins_at: Option<EventId>,
    /// Number of the last event that was sent or skipped.
    after: u64,
    /// Events before the next one are missing, and this was not reported yet.
    has_unreported_gap: bool,
    /// Number up to which a gap was reported. Events also expire by age, so some older ones may still exist.
    gap_reported_until: u64,
    notices: broadcast::Receiver<ChangeNotice>,
    next_recheck: Instant,
    next_heartbeat: Instant,
    ready: Option<Vec<SandboxEvent>>,
    _permit: StreamPermit,
}

impl EventStream {
    /// The id to resume from before any event was sent: a client that requested `now` again would miss the events in
    /// between.
    pub fn begins_at(&self) -> Option<&EventId> {
        self.begins_at.as_ref()
    }

    /// Cancel-safe: may be dropped while it waits and called again.
    pub async fn next(&mut self) -> StreamItem {
        match self.wait().await {
            Ok(items) => items,
            Err(error) => StreamItem::End(Some(error)),
        }
    }

    async fn wait(&mut self) -> Result<StreamItem, ApiError> {
        loop {
            if let Some(events) = self.ready.take() {
                return Ok(StreamItem::Events(events));
            }
            if self.end.is_none() && Instant::now() >= self.next_recheck {
                self.next_recheck = Instant::now() + RECHECK_INTERVAL;
                self.recheck().await?;
            }
            if let Some(events) = self.read().await? {
                self.next_heartbeat = Instant::now() + HEARTBEAT_INTERVAL;
                return Ok(StreamItem::Events(events));
            }
            if self.end.is_some() {
                return Ok(StreamItem::End(None));
            }
            tokio::select! {
                is_about_admission = next_change(&mut self.notices, &self.bound) => if is_about_admission {
                    self.next_recheck = Instant::now();
                },
                () = tokio::time::sleep_until(self.next_recheck.min(self.next_heartbeat)) => {}
            }
            if Instant::now() >= self.next_heartbeat {
                self.next_heartbeat = Instant::now() + HEARTBEAT_INTERVAL;
                return Ok(StreamItem::Heartbeat);
            }
        }
    }

    /// Checks that the session continues and the client is still authorized. The end of the session takes precedence over
    /// the fact that its tokens are invalid by then.
    async fn recheck(&mut self) -> Result<(), ApiError> {
        let store = &self.streams.context.store;
        let found = store.session(&self.bound.session.id).await.map_err(store_error)?;
        if found.is_none_or(|b| b.session.ended_at.is_some()) {
            return self.find_end().await;
        }
        let admitted = self.streams.admit(&self.credentials, &self.bound.session.id).await?;
        (self.bound, self.capabilities) = (admitted.bound, admitted.capabilities);
        Ok(())
    }

    async fn find_end(&mut self) -> Result<(), ApiError> {
        let store = &self.streams.context.store;
        let bounds = store.event_bounds(&self.bound.sandbox.id, &self.bound.session.id).await.map_err(store_error)?;
        self.end = Some(bounds.own_end);
        Ok(())
    }

    /// The next events that this client may see.
    async fn read(&mut self) -> Result<Option<Vec<SandboxEvent>>, ApiError> {
        let context = &self.streams.context;
        loop {
            let page =
                context.store.events(&self.bound.sandbox.id, &self.bound.session.id, self.after, PAGE_EVENTS).await.map_err(store_error)?;
            let has_gap = std::mem::take(&mut self.has_unreported_gap) || page.pruned > self.after.max(self.gap_reported_until);
            self.gap_reported_until = self.gap_reported_until.max(page.pruned);
            let mut items = Vec::new();
            if has_gap {
                // Has the number of the event before the next one, so that a client that resumes there isn't sent the
                // gap again.
                let number = page.pruned.max(self.after);
                items.push(self.public_event(number, Event::of_session(context.now(), &self.bound.session, EventKind::Gap { lost: None })));
            }
            let mut is_all = page.events.len() < PAGE_EVENTS as usize;
            for (number, event) in page.events {
                // A sandbox may outlive the session.
                if self.end.is_some_and(|end| number > end) {
                    is_all = true;
                    break;
                }
                self.after = number;
                if event.what.is_last() {
                    self.end = Some(number);
                }
                if event.what.is_shown_to(self.capabilities) {
                    items.push(self.public_event(number, event));
                }
            }
            if !items.is_empty() {
                return Ok(Some(items));
            }
            if is_all {
                return Ok(None);
            }
        }
    }

    fn public_event(&self, number: u64, event: Event) -> SandboxEvent {
        SandboxEvent {
            id: EventId::numbered(event.at, number),
            at: event.at,
            session_id: self.bound.session.id.clone(),
            sandbox_id: event.sandbox,
            principal: event.principal,
            actor: event.actor,
            source: event.source,
            kind: event.what,
        }
    }
}

/// Resolves when there may be new events. Returns whether authorization may have changed too.
async fn next_change(notices: &mut broadcast::Receiver<ChangeNotice>, bound: &SessionWithSandbox) -> bool {
    loop {
        match notices.recv().await {
            Ok(ChangeNotice::Events(id)) if id == bound.sandbox.id => return false,
            Ok(ChangeNotice::Sandbox(id)) if id == bound.sandbox.id => return true,
            Ok(ChangeNotice::Workspace(workspace)) if workspace == bound.session.workspace => return true,
            Ok(ChangeNotice::Any) | Err(RecvError::Lagged(_)) => return true,
            Ok(_) => {}
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}
