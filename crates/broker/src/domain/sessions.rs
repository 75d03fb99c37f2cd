//! Sessions: negotiating access to a thread's sandbox, refreshing it, giving it back.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, CapabilitySet, ErrorCode, RequestId, SandboxId, SessionId,
    id::is_foreign_id,
    session::{
        Access, Binding, Credentials, LeasePolicy, Mode, NegotiateRequest, NegotiateResponse, RefreshRequest, RefreshResponse, Scope,
        SessionInfo, State,
    },
};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{
    access::{self, ActorWish, Requested},
    activity::WRITE_EVERY,
    audit::AuditRecord,
    deployment::{Deployment, internal},
    lifecycle::Lifecycle,
    model::{Bound, Caller, Intent, Sandbox, Session, THREAD_SCOPE},
    tokens::{Issued, Wish},
};
use crate::store::{EnsureWish, Ensured, Idempotency, Leftover, Note, PageWish, SessionFilter, Viewer};

/// How often `ensure` starts over when the session it found is ended under its hands.
const ENSURE_ATTEMPTS: usize = 3;
/// How long a release waits for the provider; past it the rest is done behind the answer.
const RELEASE_WAIT: Duration = Duration::from_secs(10);

pub struct Sessions {
    pub deployment: Arc<Deployment>,
    pub lifecycle: Arc<Lifecycle>,
}

/// What a caller asks for, in whichever shape it said so.
#[derive(Debug, Serialize)]
pub struct Negotiation {
    #[serde(flatten)]
    pub request: NegotiateRequest,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actor: Option<ActorWish>,
    /// The sandbox it believes the thread to use, by id or name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
}

/// How a caller asks, beside what it asks for.
pub struct Asking<'a> {
    pub caller: &'a Caller,
    pub request_id: &'a RequestId,
    /// How long it wants to wait for a sandbox that starts.
    pub wait: Duration,
}

impl Sessions {
    pub async fn negotiate(
        &self,
        asking: &Asking<'_>,
        wish: &Negotiation,
        idempotency_key: Option<&str>,
    ) -> Result<NegotiateResponse, ApiError> {
        let request = &wish.request;
        if !is_foreign_id(&request.thread_id) {
            return Err(ApiError::invalid("thread_id: must have 1 to 256 characters and no control characters"));
        }
        if request.ttl == Some(0) {
            return Err(ApiError::invalid("ttl: must be at least 1 second"));
        }
        let requested = match (&request.requested_capabilities, &request.scopes) {
            (Some(_), Some(_)) => return Err(ApiError::invalid("scopes: is another name of requested_capabilities; send one of them")),
            (Some(words), None) => Some(Requested { field: "requested_capabilities", words }),
            (None, Some(words)) => Some(Requested { field: "scopes", words }),
            (None, None) => None,
        };
        let caller = access::act(asking.caller, wish.actor.as_ref())?;
        let asking = &Asking { caller: &caller, ..*asking };
        let capabilities = access::grant(&caller, requested)?;
        let mut attempt = 1;
        loop {
            let found = match request.mode {
                Mode::Get => self.find(&caller, &request.thread_id).await?,
                Mode::Ensure => self.ensure(asking, wish, idempotency_key).await?,
            };
            access::may_use(&caller.principal, &found.session)?;
            if let Some(hint) = &wish.sandbox {
                self.must_be(&caller, hint, &found.sandbox).await?;
            }
            match self.lifecycle.bring_up_found(found.sandbox, asking.wait).await {
                Ok(sandbox) => {
                    let bound = Bound { session: found.session, sandbox };
                    return self.answer(asking, bound, capabilities, request.ttl).await;
                }
                Err(e) if e.code == ErrorCode::SessionExpired && request.mode == Mode::Ensure && attempt < ENSURE_ATTEMPTS => attempt += 1,
                Err(e) => return Err(e),
            }
        }
    }

    /// A hint may say what is so already; it moves no thread to another sandbox.
    async fn must_be(&self, caller: &Caller, hint: &str, bound: &Sandbox) -> Result<(), ApiError> {
        if hint == bound.id.as_str() {
            return Ok(());
        }
        let hinted = super::sandboxes::find(&self.deployment, caller, hint).await?;
        if hinted.id == bound.id {
            return Ok(());
        }
        let message = format!("the thread uses {}, not {}; release its session to use another sandbox", bound.id, hinted.id);
        Err(ApiError::new(ErrorCode::SessionConflict, message).with_details(serde_json::json!({ "sandbox_id": bound.id })))
    }

    async fn find(&self, caller: &Caller, thread: &str) -> Result<Bound, ApiError> {
        let found = self.deployment.store.session_of(&caller.principal.workspace, THREAD_SCOPE, thread).await.map_err(internal)?;
        found.ok_or_else(|| {
            ApiError::new(ErrorCode::SessionNotFound, format!("thread `{thread}` has no session; use mode `ensure` to make one"))
        })
    }

    async fn ensure(&self, asking: &Asking<'_>, wish: &Negotiation, idempotency_key: Option<&str>) -> Result<Bound, ApiError> {
        let d = &self.deployment;
        let principal = &asking.caller.principal;
        // Most of the time it is there already, and reading is much cheaper than a transaction that may write.
        if idempotency_key.is_none() || wish.sandbox.is_some() {
            let known = d.store.session_of(&principal.workspace, THREAD_SCOPE, &wish.request.thread_id).await.map_err(internal)?;
            match known {
                Some(bound) if idempotency_key.is_none() => return Ok(bound),
                None if wish.sandbox.is_some() => {
                    return Err(ApiError::invalid(
                        "sandbox_id (or sandbox_hint): a new session for a sandbox that exists already is not supported by this version; leave it out",
                    ));
                }
                _ => {}
            }
        }
        let idempotency = idempotency_key.map(|key| idempotency(&principal.name, key, wish)).transpose()?;
        let fresh = self.fresh(asking.caller, &wish.request);
        let audit = AuditRecord::new(d.now(), &principal.workspace, "session.created").by(asking.caller, asking.request_id).about(&fresh);
        let quota = d.config.max_sandboxes_per_workspace;
        match d.store.ensure(&EnsureWish { fresh, quota, idempotency, audit }).await.map_err(internal)? {
            Ensured::Created(bound) | Ensured::Existing(bound) => Ok(bound),
            Ensured::Replayed(bound) if bound.session.ended_at.is_none() => Ok(bound),
            Ensured::Replayed(bound) => Err(expired(&bound.session)),
            Ensured::KeyReused => {
                Err(ApiError::new(ErrorCode::IdempotencyConflict, "this Idempotency-Key came with another request before; use a new one"))
            }
            Ensured::QuotaReached => Err(ApiError::new(
                ErrorCode::RateLimited,
                format!("the workspace has {quota} sandboxes, which is its limit; release some first"),
            )),
        }
    }

    fn fresh(&self, caller: &Caller, wish: &NegotiateRequest) -> Bound {
        let d = &self.deployment;
        let sandbox = new_sandbox(d, caller, None, wish.access.unwrap_or_default());
        let session = Session {
            id: SessionId::new(),
            workspace: sandbox.workspace.clone(),
            scope_type: THREAD_SCOPE.to_owned(),
            scope_id: wish.thread_id.clone(),
            sandbox: sandbox.id.clone(),
            owner: sandbox.owner.clone(),
            access: sandbox.access,
            created_at: sandbox.created_at,
            active_base: Duration::ZERO,
            ended_at: None,
            end_reason: None,
        };
        Bound { session, sandbox }
    }

    /// Negotiation's answer for a session by its id. Looking is no activity and wakes nothing.
    pub async fn get(&self, asking: &Asking<'_>, id: &SessionId) -> Result<NegotiateResponse, ApiError> {
        let bound = self.living(asking.caller, id).await?;
        let issued = self.issue(asking, &bound, access::grant(asking.caller, None)?, None, false).await?;
        Ok(self.response(&bound, issued))
    }

    pub async fn refresh(&self, asking: &Asking<'_>, id: &SessionId, wish: &RefreshRequest) -> Result<RefreshResponse, ApiError> {
        let d = &self.deployment;
        let bound = self.living(asking.caller, id).await?;
        let mut caller = asking.caller.clone();
        let mut capabilities = access::grant(&caller, None)?;
        if let Some(token) = &wish.current_token {
            let revoked = d.store.revocations(&bound.sandbox, d.now()).await.map_err(internal)?;
            let claims = d.tokens.verify_possession(&bound.sandbox, token, &revoked, d.now())?;
            if claims.sid.as_deref() != Some(id.as_str()) || claims.sub != caller.principal.name {
                return Err(ApiError::new(ErrorCode::Forbidden, "current_token: is of another session or another principal"));
            }
            // Refreshing renews what one had, and as whom; it doesn't widen it.
            capabilities = capabilities.intersection(claims.scope);
            caller.actor = claims.act;
        }
        let asking = &Asking { caller: &caller, ..*asking };
        let sandbox = self.lifecycle.bring_up_found(bound.sandbox, asking.wait).await?;
        let issued = self.issue(asking, &Bound { session: bound.session, sandbox }, capabilities, None, true).await?;
        Ok(RefreshResponse { token: issued.token, expires_at: issued.expires_at, refresh_before: issued.refresh_before })
    }

    pub async fn release(&self, caller: &Caller, id: &SessionId, request_id: &RequestId) -> Result<(), ApiError> {
        let bound = self.visible(caller, id).await?;
        if bound.session.ended_at.is_some() {
            return Err(not_found(id));
        }
        access::may_end(&caller.principal, &bound.session)?;
        let audit =
            AuditRecord::new(self.deployment.now(), &bound.session.workspace, "session.released").by(caller, request_id).about(&bound);
        self.end(&bound, "it was released", audit).await
    }

    /// Ends a session, and its sandbox by the rules. Durable when it returns.
    pub async fn end(&self, bound: &Bound, reason: &'static str, audit: AuditRecord) -> Result<(), ApiError> {
        let d = &self.deployment;
        let leftover = d.store.end_session(&bound.session.id, &d.ending(reason, audit)).await.map_err(internal)?;
        let Some(leftover) = leftover else { return Ok(()) };
        let (lifecycle, id) = (self.lifecycle.clone(), bound.sandbox.id.clone());
        let rest = d.background.spawn(async move {
            let outcome = match leftover {
                Leftover::InUse => lifecycle.tell(&id).await,
                Leftover::Suspend => lifecycle.suspend(&id, reason, |_| true).await.map(drop),
                Leftover::Destroy => {
                    lifecycle.destroy(&id).await;
                    Ok(())
                }
            };
            if let Err(error) = outcome {
                tracing::warn!(sandbox = %id, %error, "an ended session's sandbox is not settled yet; the reaper goes on");
            }
        });
        // The promise is kept already: what is left is written down as an intent.
        let _ = tokio::time::timeout(RELEASE_WAIT, rest).await;
        Ok(())
    }

    pub async fn list(&self, caller: &Caller, filter: &SessionFilter, page: &PageWish) -> Result<Vec<SessionInfo>, ApiError> {
        let viewer = Viewer::from(&caller.principal);
        let found = self.deployment.store.sessions(&viewer, filter, page).await.map_err(internal)?;
        Ok(found.into_iter().map(|bound| self.info(bound)).collect())
    }

    fn info(&self, bound: Bound) -> SessionInfo {
        let (state, lease_expires_at) = (bound.state(), self.lifecycle.lease_end(&bound.sandbox));
        let last_active_at = self.lifecycle.last_use(&bound.sandbox);
        let Bound { session, sandbox } = bound;
        SessionInfo {
            session_id: session.id,
            thread_id: session.scope_id,
            sandbox_id: sandbox.id,
            provider: sandbox.provider,
            state,
            owner: session.owner,
            access: session.access,
            created_at: session.created_at,
            last_active_at,
            lease_expires_at,
        }
    }

    /// The session if this caller may use it and it isn't over.
    async fn living(&self, caller: &Caller, id: &SessionId) -> Result<Bound, ApiError> {
        let bound = self.visible(caller, id).await?;
        access::may_use(&caller.principal, &bound.session)?;
        if bound.session.ended_at.is_some() {
            return Err(expired(&bound.session));
        }
        Ok(bound)
    }

    async fn visible(&self, caller: &Caller, id: &SessionId) -> Result<Bound, ApiError> {
        let found = self.deployment.store.session(id).await.map_err(internal)?;
        found.filter(|b| access::is_visible(&caller.principal, &b.session)).ok_or_else(|| not_found(id))
    }

    async fn answer(
        &self,
        asking: &Asking<'_>,
        bound: Bound,
        capabilities: CapabilitySet,
        ttl: Option<u32>,
    ) -> Result<NegotiateResponse, ApiError> {
        let mut bound = bound;
        let issued = self.issue(asking, &bound, capabilities, ttl, true).await?;
        bound.sandbox.last_active_at = self.deployment.now();
        bound.sandbox.state = State::Active;
        Ok(self.response(&bound, issued))
    }

    /// Mints a token; that it was issued, and the activity, are durable before anybody gets it.
    async fn issue(
        &self,
        asking: &Asking<'_>,
        bound: &Bound,
        capabilities: CapabilitySet,
        ttl: Option<u32>,
        is_activity: bool,
    ) -> Result<Issued, ApiError> {
        let d = &self.deployment;
        let now = d.now();
        let mut wish = Wish::for_session(asking.caller, bound, capabilities, d.config.hard_ttl(), now);
        wish.ttl = ttl.map(|s| Duration::from_secs(s.into()));
        let issued = d.tokens.mint(&wish);
        let mut audit = AuditRecord::new(now, &bound.session.workspace, "token.issued")
            .by(asking.caller, asking.request_id)
            .about(bound)
            .detail(capabilities.words().join(" "));
        audit.jti = Some(issued.jti.to_string());
        let mut sandboxes = Vec::new();
        if is_activity {
            let sandbox = &bound.sandbox;
            self.lifecycle.activity.sandbox_asked_for(&sandbox.id, now);
            // What the store has is good enough while it is this fresh: a second row to change would double the time of a refresh.
            if sandbox.state == State::Idle || now.saturating_since(sandbox.last_active_at) >= WRITE_EVERY {
                sandboxes.push((sandbox.id.clone(), now));
            }
        }
        d.store.note(&Note { sandboxes, audit: vec![audit], ..Note::default() }).await.map_err(internal)?;
        Ok(issued)
    }

    fn response(&self, bound: &Bound, issued: Issued) -> NegotiateResponse {
        let d = &self.deployment;
        let (session, sandbox) = (&bound.session, &bound.sandbox);
        NegotiateResponse {
            session_id: session.id.clone(),
            thread_id: session.scope_id.clone(),
            sandbox: d.address(sandbox),
            token: issued.token.clone(),
            expires_at: issued.expires_at,
            refresh_before: issued.refresh_before,
            scopes: issued.capabilities.older_words(),
            binding: Binding {
                id: session.id.clone(),
                scope: Scope { kind: session.scope_type.clone(), id: session.scope_id.clone() },
                sandbox_id: sandbox.id.clone(),
                provider: sandbox.provider.clone(),
                state: bound.state(),
                lease_expires_at: self.lifecycle.lease_end(sandbox),
            },
            dataplane: d.dataplane(sandbox),
            credentials: Credentials {
                token_type: "Bearer".to_owned(),
                access_token: issued.token,
                expires_at: issued.expires_at,
                granted_capabilities: issued.capabilities,
            },
            policy: LeasePolicy { idle_timeout_seconds: d.config.idle_timeout_seconds, hard_ttl_seconds: d.config.hard_ttl_seconds },
        }
    }
}

/// The row of a sandbox about to be made.
pub fn new_sandbox(d: &Deployment, caller: &Caller, name: Option<String>, access: Access) -> Sandbox {
    let now = d.now();
    Sandbox {
        id: SandboxId::new(),
        workspace: caller.principal.workspace.clone(),
        name,
        owner: caller.principal.name.clone(),
        access,
        provider: d.provider.name().to_owned(),
        node: d.node.clone(),
        generation: 1,
        state: State::Provisioning,
        intent: Some(Intent::Create),
        reason: None,
        is_kept: false,
        created_at: now,
        last_active_at: now,
        running_since: None,
        active: Duration::ZERO,
        suspended_at: None,
        ended_at: None,
    }
}

fn idempotency(principal: &str, key: &str, wish: &Negotiation) -> Result<Idempotency, ApiError> {
    if !is_foreign_id(key) {
        return Err(ApiError::invalid("Idempotency-Key: must have 1 to 256 characters"));
    }
    // The request as we understood it: spaces and unknown fields make no difference.
    let canonical =
        serde_json::to_vec(wish).map_err(|e| ApiError::new(ErrorCode::Internal, format!("the request can't be hashed: {e}")))?;
    Ok(Idempotency { principal: principal.to_owned(), key: key.to_owned(), request_hash: Sha256::digest(canonical).into() })
}

fn not_found(id: &SessionId) -> ApiError {
    ApiError::new(ErrorCode::SessionNotFound, format!("there is no session {id}"))
}

fn expired(session: &Session) -> ApiError {
    let why = session.end_reason.as_deref().unwrap_or("it ended");
    ApiError::new(ErrorCode::SessionExpired, format!("session {} is over: {why}; ensure a new one", session.id))
}
