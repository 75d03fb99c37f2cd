//! Sessions: reads and ends them, and issues tokens for them. `negotiation` creates them.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use cobox_protocol::{
    ApiError, ErrorCode, RequestId, SandboxId, SessionId,
    session::{Access, Binding, Credentials, LeasePolicy, NegotiateResponse, SessionInfo, State},
    tags::Tags,
};
use cobox_provider::SandboxSpec;

use super::{
    access,
    audit::AuditRecord,
    deployment::{Deployment, internal},
    issue::TokenWish,
    lifecycle::Lifecycle,
    model::{Bound, Caller, Intent, Sandbox, Session},
    shares::{Entry, enter},
    tokens::Issued,
};
use crate::store::{Ending, Leftover, PageWish, SessionFilter, Viewer};

/// How long a release waits for the provider; after that it continues in the background.
const RELEASE_WAIT: Duration = Duration::from_secs(10);

pub struct Sessions {
    pub deployment: Arc<Deployment>,
    pub lifecycle: Arc<Lifecycle>,
}

/// The context of a request, apart from its parameters.
pub struct Asking<'a> {
    pub caller: &'a Caller,
    pub request_id: &'a RequestId,
    /// Maximum time to wait for a sandbox that starts.
    pub wait: Duration,
    /// Name of the client program, as it identifies itself.
    pub client: &'a str,
    pub logged: Option<&'a LoggedIds>,
}

impl Asking<'_> {
    /// Records the session and the sandbox that were found or created for the request. Call before anything that can
    /// fail, so that the log line of a failed request has them.
    pub fn about(&self, session: &SessionId, sandbox: &SandboxId) {
        if let Some(logged) = self.logged {
            logged.set_session(session);
            logged.set_sandbox(sandbox);
        }
    }
}

/// The session and the sandbox of a request, for its log line; the latest if there are several.
#[derive(Default)]
pub struct LoggedIds {
    session: Mutex<Option<SessionId>>,
    sandbox: Mutex<Option<SandboxId>>,
}

impl LoggedIds {
    pub fn set_session(&self, id: &SessionId) {
        *self.session.lock().unwrap_or_else(PoisonError::into_inner) = Some(id.clone());
    }

    pub fn set_sandbox(&self, id: &SandboxId) {
        *self.sandbox.lock().unwrap_or_else(PoisonError::into_inner) = Some(id.clone());
    }

    pub fn session(&self) -> Option<SessionId> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn sandbox(&self) -> Option<SandboxId> {
        self.sandbox.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Sessions {
    /// Negotiation's response for a session by its id. Reading it doesn't count as activity and starts nothing.
    pub async fn get(&self, asking: &Asking<'_>, id: &SessionId) -> Result<NegotiateResponse, ApiError> {
        let (bound, entry) = self.living(asking.caller, id).await?;
        let capabilities = entry.bound(access::grant(&self.deployment.policy(), asking.caller, None)?)?;
        let issued = self.issue(asking, &bound, TokenWish { lineage: entry.lineage(), ..TokenWish::new(capabilities) }).await?;
        Ok(self.response(&bound, issued))
    }

    pub async fn release(&self, caller: &Caller, id: &SessionId, request_id: &RequestId) -> Result<(), ApiError> {
        let bound = self.visible(caller, id).await?;
        if bound.session.ended_at.is_some() {
            return Err(not_found(id));
        }
        access::may_end(&caller.principal, &bound.session)?;
        let audit =
            AuditRecord::new(self.deployment.now(), &bound.session.workspace, "session.released").by(caller, request_id).about(&bound);
        self.end(&bound, self.deployment.restorable_ending(&bound.sandbox, "it was released", audit)).await
    }

    /// Ends a session, and its sandbox according to the rules. Durable when it returns.
    pub async fn end(&self, bound: &Bound, ending: Ending) -> Result<(), ApiError> {
        let d = &self.deployment;
        let leftover = d.store.end_session(&bound.session.id, &ending).await.map_err(internal)?;
        let Some(leftover) = leftover else { return Ok(()) };
        let (lifecycle, id) = (self.lifecycle.clone(), bound.sandbox.id.clone());
        let rest = d.background.spawn(async move {
            let outcome = match leftover {
                Leftover::InUse => lifecycle.tell(&id).await,
                Leftover::Suspend => lifecycle.suspend(&id, &ending.reason, |_| true).await.map(drop),
                Leftover::Destroy => {
                    lifecycle.destroy(&id).await;
                    Ok(())
                }
            };
            if let Err(error) = outcome {
                tracing::warn!(sandbox = %id, %error, "an ended session's sandbox is not settled yet; the reaper goes on");
            }
        });
        // The end is durable already: the remaining work is stored as an intent.
        let _ = tokio::time::timeout(RELEASE_WAIT, rest).await;
        Ok(())
    }

    pub async fn list(&self, caller: &Caller, filter: &SessionFilter, page: &PageWish) -> Result<Vec<SessionInfo>, ApiError> {
        let store = &self.deployment.store;
        let found = store.sessions(&Viewer::from(&caller.principal), filter, page).await.map_err(internal)?;
        let ids: Vec<&SessionId> = found.iter().map(|b| &b.session.id).collect();
        let mut tags = store.session_tags(&ids).await.map_err(internal)?;
        let info = |bound: Bound| {
            let tags = tags.remove(bound.session.id.as_str()).unwrap_or_default();
            SessionInfo { tags, ..self.info(bound) }
        };
        Ok(found.into_iter().map(info).collect())
    }

    fn info(&self, bound: Bound) -> SessionInfo {
        let (state, lease_expires_at) = (bound.state(), self.lifecycle.lease_end(&bound.sandbox));
        let last_active_at = self.lifecycle.last_use(&bound.sandbox);
        let Bound { session, sandbox } = bound;
        SessionInfo {
            scope: session.scope(),
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
            tags: Tags::new(),
        }
    }

    /// The session if it has not ended and this caller may use it, with how the caller got access.
    pub async fn living(&self, caller: &Caller, id: &SessionId) -> Result<(Bound, Entry), ApiError> {
        let bound = self.visible(caller, id).await?;
        let entry = enter(&self.deployment, &caller.principal, &bound.session, &bound.sandbox).await?;
        if bound.session.ended_at.is_some() {
            return Err(expired(&bound.session));
        }
        Ok((bound, entry))
    }

    pub async fn visible(&self, caller: &Caller, id: &SessionId) -> Result<Bound, ApiError> {
        let found = match caller.foreseen.take(|s| s.id == *id) {
            Some(bound) => Some(bound),
            None => self.deployment.store.session(id).await.map_err(internal)?,
        };
        found.filter(|b| access::is_visible(&caller.principal, &b.session)).ok_or_else(|| not_found(id))
    }

    pub async fn answer(&self, asking: &Asking<'_>, bound: Bound, wish: TokenWish<'_>) -> Result<NegotiateResponse, ApiError> {
        let mut bound = bound;
        let issued = self.issue(asking, &bound, TokenWish { is_activity: true, ..wish }).await?;
        bound.sandbox.last_active_at = self.deployment.now();
        bound.sandbox.state = State::Active;
        Ok(self.response(&bound, issued))
    }

    fn response(&self, bound: &Bound, issued: Issued) -> NegotiateResponse {
        let d = &self.deployment;
        let (session, sandbox) = (&bound.session, &bound.sandbox);
        let lifetimes = d.lifetimes(sandbox);
        NegotiateResponse {
            session_id: session.id.clone(),
            thread_id: session.scope_id.clone(),
            sandbox: d.address(sandbox),
            token: issued.token.clone(),
            expires_at: issued.draft.expires_at,
            refresh_before: issued.draft.refresh_before,
            scopes: issued.draft.capabilities.legacy_names(),
            binding: Binding {
                id: session.id.clone(),
                scope: session.scope(),
                sandbox_id: sandbox.id.clone(),
                provider: sandbox.provider.clone(),
                state: bound.state(),
                lease_expires_at: self.lifecycle.lease_end(sandbox),
            },
            dataplane: d.dataplane(sandbox),
            credentials: Credentials {
                token_type: "Bearer".to_owned(),
                access_token: issued.token,
                expires_at: issued.draft.expires_at,
                granted_capabilities: issued.draft.capabilities,
            },
            policy: LeasePolicy { idle_timeout_seconds: lifetimes.idle_timeout.as_secs(), hard_ttl_seconds: lifetimes.hard_ttl.as_secs() },
        }
    }
}

/// The row of a sandbox about to be created, with the provider's default spec.
pub fn new_sandbox(d: &Deployment, caller: &Caller, name: Option<String>, access: Access) -> Sandbox {
    let now = d.now();
    Sandbox {
        id: SandboxId::new(),
        workspace: caller.principal.workspace.clone(),
        name,
        owner: caller.principal.name.clone(),
        owner_kind: caller.principal.kind,
        access,
        provider: d.provider.name().to_owned(),
        node: d.node.clone(),
        generation: 1,
        old_keys: None,
        master_from: 1,
        state: State::Provisioning,
        intent: Some(Intent::Create),
        reason: None,
        is_kept: false,
        own_lease: None,
        own_keep: None,
        created_at: now,
        last_active_at: now,
        counted_until: None,
        active: Duration::ZERO,
        suspended_at: None,
        downtime: Duration::ZERO,
        ended_at: None,
        restore_until: None,
        making: SandboxSpec::default(),
        template: None,
        pool: None,
    }
}

fn not_found(id: &SessionId) -> ApiError {
    ApiError::new(ErrorCode::SessionNotFound, format!("there is no session {id}"))
}

pub fn expired(session: &Session) -> ApiError {
    let why = session.end_reason.as_deref().unwrap_or("it ended");
    ApiError::new(ErrorCode::SessionExpired, format!("session {} is over: {why}; ensure a new one", session.id))
}
