//! Access to sessions and their sandboxes: directly, by a share, or through the thread authority.

use cobox_protocol::{ApiError, CapabilitySet, ErrorCode, SessionId, session::Access};

use super::rules as access;
use crate::domain::{
    context::{BrokerContext, store_error},
    model::{Caller, Principal, Sandbox, Session, SessionWithSandbox, Share},
    token_signer::TokenOrigin,
};

/// Threads of one sandbox that are checked with the thread authority before access is refused.
const MAX_THREADS_ASKED: u32 = 16;

/// How a principal got access to a session: directly, or by a share that limits the capabilities.
#[derive(Clone, Debug, Default)]
pub struct SessionEntry {
    pub share: Option<Share>,
}

impl SessionEntry {
    /// The capabilities within the share, if there is one.
    pub fn limit(&self, requested: CapabilitySet) -> Result<CapabilitySet, ApiError> {
        let Some(share) = &self.share else { return Ok(requested) };
        let granted = requested.intersection(share.capabilities);
        if granted.is_empty() {
            let message =
                format!("none of the requested capabilities is shared with {}; shared are {:?}", share.principal, share.capabilities);
            return Err(ApiError::new(ErrorCode::CapabilityDenied, message));
        }
        Ok(granted)
    }

    pub fn origin(&self) -> TokenOrigin<'_> {
        TokenOrigin { parent: None, share: self.share.as_ref() }
    }
}

/// Whether a principal may use a session, and how. Shares are only looked up if there is no direct access.
pub async fn enter(context: &BrokerContext, principal: &Principal, session: &Session, sandbox: &Sandbox) -> Result<SessionEntry, ApiError> {
    let refused = match access::may_use(principal, session).and_then(|()| access::may_use(principal, sandbox)) {
        Ok(()) => return Ok(SessionEntry::default()),
        Err(refused) => refused,
    };
    if !may_be_shared(principal, session, sandbox) || !access::is_visible(principal, session) {
        return Err(refused);
    }
    let share = context.store.share_of(&session.id, &principal.name).await.map_err(store_error)?;
    match share.filter(|s| !s.is_over(context.now())) {
        Some(share) => Ok(SessionEntry { share: Some(share) }),
        None => Err(refused),
    }
}

/// A principal without access to a sandbox can't share it either.
pub fn may_be_shared(principal: &Principal, session: &Session, sandbox: &Sandbox) -> bool {
    sandbox.access == Access::Workspace || sandbox.owner == session.owner || sandbox.owner == principal.name
}

/// The session if it has not ended and this caller may use it, with how the caller got access.
pub async fn live_session(
    context: &BrokerContext,
    caller: &Caller,
    id: &SessionId,
) -> Result<(SessionWithSandbox, SessionEntry), ApiError> {
    let bound = visible_session(context, caller, id).await?;
    let entry = enter(context, &caller.principal, &bound.session, &bound.sandbox).await?;
    if bound.session.ended_at.is_some() {
        return Err(session_expired(&bound.session));
    }
    Ok((bound, entry))
}

/// The session, ended or not, if the caller's workspace has it.
pub async fn visible_session(context: &BrokerContext, caller: &Caller, id: &SessionId) -> Result<SessionWithSandbox, ApiError> {
    let found = match caller.prefetched_session.take(|s| s.id == *id) {
        Some(bound) => Some(bound),
        None => context.store.session(id).await.map_err(store_error)?,
    };
    found.filter(|b| access::is_visible(&caller.principal, &b.session)).ok_or_else(|| not_found(id))
}

/// The session through which a principal uses a sandbox; `None` if the sandbox has no sessions.
pub async fn find_entry(
    context: &BrokerContext,
    principal: &Principal,
    sandbox: &Sandbox,
) -> Result<(Option<Session>, SessionEntry), ApiError> {
    let sessions = context.store.sessions_on(&sandbox.id).await.map_err(store_error)?;
    let mut is_refused = None;
    for session in sessions {
        match enter(context, principal, &session, sandbox).await {
            Ok(entry) => return Ok((Some(session), entry)),
            Err(e) => is_refused = is_refused.or(Some(e)),
        }
    }
    match is_refused {
        // A sandbox with sessions can only be used through one of them.
        Some(refused) => Err(refused),
        None => access::may_use(principal, sandbox).map(|()| (None, SessionEntry::default())),
    }
}

/// Whether the external thread authority lets a caller use a sandbox, through its session or without one.
pub async fn may_see(context: &BrokerContext, caller: &Caller, sandbox: &Sandbox, session: Option<&Session>) -> Result<(), ApiError> {
    match session {
        Some(session) => context.may_see(caller, session.thread()).await,
        None => check_threads_of_sandbox(context, caller, sandbox).await,
    }
}

/// A sandbox that threads use is open to its owner, and to principals that may see one of these threads; if no thread
/// uses it any more, one of its former threads.
pub async fn check_threads_of_sandbox(context: &BrokerContext, caller: &Caller, sandbox: &Sandbox) -> Result<(), ApiError> {
    if context.thread_authority.is_none() || sandbox.owner == caller.principal.name {
        return Ok(());
    }
    let sessions = context.store.sessions_on(&sandbox.id).await.map_err(store_error)?;
    let mut threads: Vec<String> =
        sessions.iter().filter_map(Session::thread).take(MAX_THREADS_ASKED as usize).map(str::to_owned).collect();
    if threads.is_empty() {
        threads = context.store.past_threads(&sandbox.id, MAX_THREADS_ASKED).await.map_err(store_error)?;
    }
    let mut refused = None;
    for thread in threads {
        match context.may_see(caller, Some(&thread)).await {
            Ok(()) => return Ok(()),
            Err(e) => refused = refused.or(Some(e)),
        }
    }
    refused.map_or(Ok(()), Err)
}

pub fn not_found(id: &SessionId) -> ApiError {
    ApiError::new(ErrorCode::SessionNotFound, format!("there is no session {id}"))
}

pub fn session_expired(session: &Session) -> ApiError {
    let why = session.end_reason.as_deref().unwrap_or("it ended");
    ApiError::new(ErrorCode::SessionExpired, format!("session {} is over: {why}; ensure a new one", session.id))
}
