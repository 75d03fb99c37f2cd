//! Access to sessions and their sandboxes: directly, by a share, or through the thread authority.

use cobox_protocol::{ApiError, CapabilitySet, ErrorCode, SessionId, session::Access};

use super::rules as access;
use crate::domain::{
    context::{Deployment, internal},
    model::{Bound, Caller, Principal, Sandbox, Session, Share},
    token_signer::Lineage,
};

/// Threads of one sandbox that are checked with the thread authority before access is refused.
const MAX_THREADS_ASKED: u32 = 16;

/// How a principal got access to a session: directly, or by a share that limits the capabilities.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    pub share: Option<Share>,
}

impl Entry {
    pub fn bound(&self, wished: CapabilitySet) -> Result<CapabilitySet, ApiError> {
        let Some(share) = &self.share else { return Ok(wished) };
        let granted = wished.intersection(share.capabilities);
        if granted.is_empty() {
            let message = format!("none of it was shared with {}; shared was {:?}", share.principal, share.capabilities);
            return Err(ApiError::new(ErrorCode::CapabilityDenied, message));
        }
        Ok(granted)
    }

    pub fn lineage(&self) -> Lineage<'_> {
        Lineage { parent: None, share: self.share.as_ref() }
    }
}

/// Whether a principal may use a session, and how. Shares are only looked up if there is no direct access.
pub async fn enter(d: &Deployment, principal: &Principal, session: &Session, sandbox: &Sandbox) -> Result<Entry, ApiError> {
    let refused = match access::may_use(principal, session).and_then(|()| access::may_use(principal, sandbox)) {
        Ok(()) => return Ok(Entry::default()),
        Err(refused) => refused,
    };
    if !may_be_shared(principal, session, sandbox) || !access::is_visible(principal, session) {
        return Err(refused);
    }
    let share = d.store.share_of(&session.id, &principal.name).await.map_err(internal)?;
    match share.filter(|s| !s.is_over(d.now())) {
        Some(share) => Ok(Entry { share: Some(share) }),
        None => Err(refused),
    }
}

/// A principal without access to a sandbox can't share it either.
pub fn may_be_shared(principal: &Principal, session: &Session, sandbox: &Sandbox) -> bool {
    sandbox.access == Access::Workspace || sandbox.owner == session.owner || sandbox.owner == principal.name
}

/// The session if it has not ended and this caller may use it, with how the caller got access.
pub async fn living(d: &Deployment, caller: &Caller, id: &SessionId) -> Result<(Bound, Entry), ApiError> {
    let bound = visible(d, caller, id).await?;
    let entry = enter(d, &caller.principal, &bound.session, &bound.sandbox).await?;
    if bound.session.ended_at.is_some() {
        return Err(expired(&bound.session));
    }
    Ok((bound, entry))
}

/// The session, ended or not, if the caller's workspace has it.
pub async fn visible(d: &Deployment, caller: &Caller, id: &SessionId) -> Result<Bound, ApiError> {
    let found = match caller.foreseen.take(|s| s.id == *id) {
        Some(bound) => Some(bound),
        None => d.store.session(id).await.map_err(internal)?,
    };
    found.filter(|b| access::is_visible(&caller.principal, &b.session)).ok_or_else(|| not_found(id))
}

/// The session through which a principal uses a sandbox; `None` if the sandbox has no sessions.
pub async fn way_in(d: &Deployment, principal: &Principal, sandbox: &Sandbox) -> Result<(Option<Session>, Entry), ApiError> {
    let sessions = d.store.sessions_on(&sandbox.id).await.map_err(internal)?;
    let mut is_refused = None;
    for session in sessions {
        match enter(d, principal, &session, sandbox).await {
            Ok(entry) => return Ok((Some(session), entry)),
            Err(e) => is_refused = is_refused.or(Some(e)),
        }
    }
    match is_refused {
        // A sandbox with sessions can only be used through one of them.
        Some(refused) => Err(refused),
        None => access::may_use(principal, sandbox).map(|()| (None, Entry::default())),
    }
}

/// Whether the external thread authority lets a caller use a sandbox, through its session or without one.
pub async fn may_see(d: &Deployment, caller: &Caller, sandbox: &Sandbox, session: Option<&Session>) -> Result<(), ApiError> {
    match session {
        Some(session) => d.may_see(caller, session.thread()).await,
        None => may_see_through(d, caller, sandbox).await,
    }
}

/// A sandbox that threads use is open to its owner, and to principals that may see one of these threads; if no thread
/// uses it any more, one of its former threads.
pub async fn may_see_through(d: &Deployment, caller: &Caller, sandbox: &Sandbox) -> Result<(), ApiError> {
    if d.thread_authority.is_none() || sandbox.owner == caller.principal.name {
        return Ok(());
    }
    let sessions = d.store.sessions_on(&sandbox.id).await.map_err(internal)?;
    let mut threads: Vec<String> =
        sessions.iter().filter_map(Session::thread).take(MAX_THREADS_ASKED as usize).map(str::to_owned).collect();
    if threads.is_empty() {
        threads = d.store.past_threads(&sandbox.id, MAX_THREADS_ASKED).await.map_err(internal)?;
    }
    let mut refused = None;
    for thread in threads {
        match d.may_see(caller, Some(&thread)).await {
            Ok(()) => return Ok(()),
            Err(e) => refused = refused.or(Some(e)),
        }
    }
    refused.map_or(Ok(()), Err)
}

pub fn not_found(id: &SessionId) -> ApiError {
    ApiError::new(ErrorCode::SessionNotFound, format!("there is no session {id}"))
}

pub fn expired(session: &Session) -> ApiError {
    let why = session.end_reason.as_deref().unwrap_or("it ended");
    ApiError::new(ErrorCode::SessionExpired, format!("session {} is over: {why}; ensure a new one", session.id))
}
