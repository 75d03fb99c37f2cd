//! Sharing: another principal of the workspace gets into a session with at most what it was given, until that is taken back.

use std::time::Duration;

use cobox_protocol::{
    ApiError, CapabilitySet, ErrorCode, SessionId, ShareId, Timestamp, id::is_external_id, session::Access, token::ShareInfo,
};

use super::{
    access::{self, Requested},
    audit::AuditRecord,
    deployment::{Deployment, internal},
    model::{Bound, Caller, Principal, Sandbox, Session, Share},
    sessions::{Asking, Sessions, expired},
    tokens::Lineage,
};
use crate::store::Shared;

/// Shares of one session: more people than look at one sandbox, and a list still fits in one answer.
const MAX_SHARES: u32 = 100;
/// Threads of one sandbox that are asked about before a caller is refused it.
const MAX_THREADS_ASKED: u32 = 16;
/// How long an answer waits for the sandbox to be told; the gateway refuses the tokens already, and the reaper tells it again.
pub const TELL_WAIT: Duration = Duration::from_secs(5);

/// How somebody came into a session: by right, or by a share that bounds what they get.
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

/// Whether a principal may use a session, and by what. A share is asked for only where there is no right.
pub async fn enter(d: &Deployment, principal: &Principal, session: &Session, sandbox: &Sandbox) -> Result<Entry, ApiError> {
    let refused = match access::may_use(principal, session).and_then(|()| access::may_use(principal, sandbox)) {
        Ok(()) => return Ok(Entry::default()),
        Err(refused) => refused,
    };
    // Who may not use a sandbox can't let others into it either.
    let may_be_shared = sandbox.access == Access::Workspace || sandbox.owner == session.owner || sandbox.owner == principal.name;
    if !may_be_shared || !access::is_visible(principal, session) {
        return Err(refused);
    }
    let share = d.store.share_of(&session.id, &principal.name).await.map_err(internal)?;
    match share.filter(|s| !s.is_over(d.now())) {
        Some(share) => Ok(Entry { share: Some(share) }),
        None => Err(refused),
    }
}

/// The session through which a principal uses a sandbox: one of those it is in, or none where it is in none.
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
        // A sandbox in sessions is used through one of them, or not at all.
        Some(refused) => Err(refused),
        None => access::may_use(principal, sandbox).map(|()| (None, Entry::default())),
    }
}

/// Whether somebody else who keeps the threads lets a caller use a sandbox: through its session, or without one.
pub async fn may_see(d: &Deployment, caller: &Caller, sandbox: &Sandbox, session: Option<&Session>) -> Result<(), ApiError> {
    match session {
        Some(session) => d.may_see(caller, session.thread()).await,
        None => may_see_through(d, caller, sandbox).await,
    }
}

/// A sandbox that threads use is joined by who made it, and by who may see one of them; where none uses it any more, one of those
/// that did.
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

/// A share as it is asked for.
pub struct ShareWish<'a> {
    pub principal: &'a str,
    pub capabilities: Requested<'a>,
    pub expires_at: Option<Timestamp>,
}

impl Sessions {
    /// Answers with the share, and whether it is new.
    pub async fn share(&self, asking: &Asking<'_>, id: &SessionId, wish: ShareWish<'_>) -> Result<(ShareInfo, bool), ApiError> {
        let d = &self.deployment;
        let bound = self.shareable(asking.caller, id).await?;
        let Requested { field, words } = wish.capabilities;
        let capabilities = CapabilitySet::parse(words).map_err(|e| ApiError::invalid(format!("{field}: {e}")))?;
        if capabilities.is_empty() {
            return Err(ApiError::invalid(format!("{field}: must name at least one")));
        }
        if wish.expires_at.is_some_and(|at| at <= d.now()) {
            return Err(ApiError::invalid("expires_at: is in the past"));
        }
        let name = wish.principal;
        if name == bound.session.owner {
            return Err(ApiError::invalid(format!("principal: {} made the session, and may use it already", cut(name))));
        }
        let known = if is_external_id(name) { d.store.principal(&bound.session.workspace, name).await.map_err(internal)? } else { None };
        if known.is_none() {
            let message = format!("the workspace has no principal `{}`; see `cobox keys list`", cut(name));
            return Err(ApiError::new(ErrorCode::PrincipalNotFound, message));
        }
        let share = Share {
            id: ShareId::new(),
            workspace: bound.session.workspace.clone(),
            session: bound.session.id.clone(),
            principal: name.to_owned(),
            capabilities,
            shared_by: asking.caller.principal.name.clone(),
            created_at: d.now(),
            expires_at: wish.expires_at,
        };
        let audit = AuditRecord::new(d.now(), &share.workspace, "session.shared")
            .by(asking.caller, asking.request_id)
            .about(&bound)
            .detail(format!("{} with {name}: {}", share.id, capabilities.names().join(" ")));
        let ending = d.ending("its share was replaced", audit);
        match d.store.share(&share, MAX_SHARES, &ending).await.map_err(internal)? {
            Shared::Added(share) => Ok((info(share, &bound), true)),
            Shared::Changed(changed) => {
                if changed.id == share.id {
                    // Tokens of the one before it have ended.
                    self.tell_soon(&bound).await;
                }
                Ok((info(changed, &bound), false))
            }
            Shared::TooMany => {
                Err(ApiError::invalid(format!("principal: the session is shared with {MAX_SHARES} others, which is the most; revoke one")))
            }
            Shared::SessionGone => Err(expired(&bound.session)),
        }
    }

    pub async fn shares(&self, caller: &Caller, id: &SessionId) -> Result<Vec<ShareInfo>, ApiError> {
        let bound = self.shareable(caller, id).await?;
        let found = self.deployment.store.shares(id).await.map_err(internal)?;
        let now = self.deployment.now();
        Ok(found.into_iter().filter(|s| !s.is_over(now)).map(|s| info(s, &bound)).collect())
    }

    /// Ends a share with the tokens that came by it: durable when it returns, and the sandbox has been told or will be again.
    pub async fn unshare(&self, asking: &Asking<'_>, id: &SessionId, principal: &str) -> Result<(), ApiError> {
        let d = &self.deployment;
        let bound = self.shareable(asking.caller, id).await?;
        let audit = AuditRecord::new(d.now(), &bound.session.workspace, "session.unshared")
            .by(asking.caller, asking.request_id)
            .about(&bound)
            .detail(cut(principal));
        let ended = d.store.unshare(id, principal, &d.ending("its share was revoked", audit)).await.map_err(internal)?;
        if ended.is_none() {
            let message = format!("the session is not shared with `{}`", cut(principal));
            return Err(ApiError::new(ErrorCode::ShareNotFound, message));
        }
        self.tell_soon(&bound).await;
        Ok(())
    }

    /// Goes on when the caller doesn't wait for it.
    async fn tell_soon(&self, bound: &Bound) {
        self.lifecycle.tell_soon(&bound.sandbox.id, TELL_WAIT).await;
    }

    async fn shareable(&self, caller: &Caller, id: &SessionId) -> Result<Bound, ApiError> {
        let bound = self.visible(caller, id).await?;
        access::may_end(&caller.principal, &bound.session)?;
        if bound.session.ended_at.is_some() {
            return Err(expired(&bound.session));
        }
        Ok(bound)
    }
}

fn info(share: Share, bound: &Bound) -> ShareInfo {
    ShareInfo {
        id: share.id,
        session_id: share.session,
        principal: share.principal,
        capabilities: share.capabilities,
        scopes: share.capabilities.legacy_names(),
        shared_by: share.shared_by,
        created_at: share.created_at,
        expires_at: share.expires_at,
        is_limit: bound.session.access == Access::Owner || bound.sandbox.access == Access::Owner,
    }
}

/// As much of a caller's word as a message or a record repeats.
fn cut(word: &str) -> String {
    word.chars().filter(|c| !c.is_control()).take(64).collect()
}
