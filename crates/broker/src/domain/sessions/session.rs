//! Sessions: reads and ends them, and issues tokens for them. `negotiation` creates them.

use std::sync::Arc;

use cobox_protocol::{
    ApiError, RequestId, SessionId,
    session::{Binding, Credentials, LeasePolicy, NegotiateResponse, SessionInfo, State},
    tags::Tags,
};

use crate::{
    domain::{
        access::{
            self,
            request_context::RequestContext,
            session_access::{self, live_session, visible_session},
        },
        context::{BrokerContext, store_error},
        lifecycle::transitions::Lifecycle,
        model::{AuditRecord, Caller, SessionWithSandbox},
        token_signer::IssuedToken,
        tokens::issue::{TokenIssuer, TokenParams},
    },
    store::{PageParams, SessionFilter, Viewer},
};

pub struct Sessions {
    pub context: Arc<BrokerContext>,
    pub lifecycle: Arc<Lifecycle>,
    pub issuer: Arc<TokenIssuer>,
}

impl Sessions {
    /// Negotiation's response for a session by its id. Reading it doesn't count as activity and starts nothing.
    pub async fn get(&self, request: &RequestContext<'_>, id: &SessionId) -> Result<NegotiateResponse, ApiError> {
        let (bound, entry) = live_session(&self.context, request.caller, id).await?;
        let capabilities = entry.limit(access::grant(&self.context.policy(), request.caller, None)?)?;
        let issued = self.issuer.issue(request, &bound, TokenParams { origin: entry.origin(), ..TokenParams::new(capabilities) }).await?;
        Ok(self.response(&bound, issued))
    }

    pub async fn release(&self, caller: &Caller, id: &SessionId, request_id: &RequestId) -> Result<(), ApiError> {
        let bound = visible_session(&self.context, caller, id).await?;
        if bound.session.ended_at.is_some() {
            return Err(session_access::not_found(id));
        }
        access::may_end(&caller.principal, &bound.session)?;
        let audit = AuditRecord::new(self.context.now(), &bound.session.workspace, "session.released").by(caller, request_id).about(&bound);
        self.lifecycle.end_session(&bound, self.context.restorable_ending(&bound.sandbox, "it was released", audit)).await
    }

    pub async fn list(&self, caller: &Caller, filter: &SessionFilter, page: &PageParams) -> Result<Vec<SessionInfo>, ApiError> {
        let store = &self.context.store;
        let found = store.sessions(&Viewer::from(&caller.principal), filter, page).await.map_err(store_error)?;
        let ids: Vec<&SessionId> = found.iter().map(|b| &b.session.id).collect();
        let mut tags = store.session_tags(&ids).await.map_err(store_error)?;
        let info = |bound: SessionWithSandbox| {
            let tags = tags.remove(bound.session.id.as_str()).unwrap_or_default();
            SessionInfo { tags, ..self.info(bound) }
        };
        Ok(found.into_iter().map(info).collect())
    }

    fn info(&self, bound: SessionWithSandbox) -> SessionInfo {
        let (state, lease_expires_at) = (bound.state(), self.lifecycle.lease_end(&bound.sandbox));
        let last_active_at = self.lifecycle.last_use(&bound.sandbox);
        let SessionWithSandbox { session, sandbox } = bound;
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

    pub async fn answer(
        &self,
        request: &RequestContext<'_>,
        bound: SessionWithSandbox,
        params: TokenParams<'_>,
    ) -> Result<NegotiateResponse, ApiError> {
        let mut bound = bound;
        let issued = self.issuer.issue(request, &bound, TokenParams { is_activity: true, ..params }).await?;
        bound.sandbox.last_active_at = self.context.now();
        bound.sandbox.state = State::Active;
        Ok(self.response(&bound, issued))
    }

    fn response(&self, bound: &SessionWithSandbox, issued: IssuedToken) -> NegotiateResponse {
        let context = &self.context;
        let (session, sandbox) = (&bound.session, &bound.sandbox);
        let lifetimes = context.lifetimes(sandbox);
        NegotiateResponse {
            session_id: session.id.clone(),
            thread_id: session.scope_id.clone(),
            sandbox: context.address(sandbox),
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
            dataplane: context.dataplane(sandbox),
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
