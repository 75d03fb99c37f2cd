//! Renews a session: issues a fresh token, or extends the lease.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode, SessionId, Timestamp,
    session::{HeartbeatResponse, RefreshRequest, RefreshResponse, State},
};
use cobox_token::Claims;

use super::negotiation::check_sandbox_hint;
use crate::{
    domain::{
        access::{self, request_context::RequestContext, session_access::live_session, token_verification::verify_possession},
        context::{BrokerContext, store_error},
        lifecycle::transitions::Lifecycle,
        model::{AuditRecord, SessionWithSandbox},
        token_signer::{REFRESH_GRACE_SECONDS, TokenFormat},
        tokens::issue::{TokenIssuer, TokenParams},
    },
    store::{Note, RetiredToken},
};

/// How long a replaced token stays valid, so that requests in progress can switch to the new one.
const ROTATION_GRACE: Duration = Duration::from_secs(30);
/// When to retry after too many tokens were replaced: some of those have expired by then.
const RETIRE_AGAIN_SECONDS: u32 = 60;

pub struct SessionRenewal {
    pub context: Arc<BrokerContext>,
    pub lifecycle: Arc<Lifecycle>,
    pub issuer: Arc<TokenIssuer>,
}

impl SessionRenewal {
    pub async fn refresh(
        &self,
        request: &RequestContext<'_>,
        id: &SessionId,
        params: &RefreshRequest,
    ) -> Result<RefreshResponse, ApiError> {
        let format = match (&params.token_format, &params.current_token) {
            (Some(word), _) => word.parse()?,
            (None, Some(token)) => TokenFormat::of(token),
            (None, None) => TokenFormat::Jwt,
        };
        let (bound, entry) = live_session(&self.context, request.caller, id).await?;
        request.about(&bound.session.id, &bound.sandbox.id);
        // Before a sandbox is started for it.
        self.context.may_see(request.caller, bound.session.thread()).await?;
        check_sandbox_hint(&self.context, request.caller, params.sandbox_id.as_deref(), &bound.sandbox).await?;
        let current = self.verify_current_token(request, &bound, params).await?;
        if params.rotate == Some(true) && current.is_none() {
            return Err(ApiError::invalid("rotate: requires current_token, the token to revoke"));
        }
        let mut caller = request.caller.clone();
        let policy = self.context.policy();
        let capabilities = match &current {
            // A refresh renews the token's capabilities and actor; it doesn't widen them.
            Some(claims) => {
                caller.actor = claims.act.clone();
                access::renew(&policy, &caller, claims.scope)?
            }
            None => access::grant(&policy, &caller, None)?,
        };
        let capabilities = entry.limit(capabilities)?;
        let request = &RequestContext { caller: &caller, ..*request };
        let sandbox = self.lifecycle.ensure_found_running(bound.sandbox, request.wait).await?;
        let bound = SessionWithSandbox { sandbox, ..bound };
        let token = TokenParams { format, is_activity: true, origin: entry.origin(), ..TokenParams::new(capabilities) };
        let issued = self.issuer.issue(request, &bound, token).await?;
        if let (Some(true), Some(claims)) = (params.rotate, current) {
            self.retire(request, &bound, claims).await?;
        }
        Ok(RefreshResponse { token: issued.token, expires_at: issued.draft.expires_at, refresh_before: issued.draft.refresh_before })
    }

    /// The claims of the presented token, if there is one. It must belong to this session and this caller.
    async fn verify_current_token(
        &self,
        request: &RequestContext<'_>,
        bound: &SessionWithSandbox,
        params: &RefreshRequest,
    ) -> Result<Option<Claims>, ApiError> {
        let Some(token) = &params.current_token else { return Ok(None) };
        let claims = verify_possession(&self.context, &bound.sandbox, token).await?;
        if claims.sid.as_deref() != Some(bound.session.id.as_str()) || claims.sub != request.caller.principal.name {
            return Err(ApiError::new(ErrorCode::Forbidden, "current_token: belongs to another session or principal"));
        }
        if claims.parent.is_some() {
            let message = "current_token: was delegated from another token and ends with that one; delegate again instead";
            return Err(ApiError::new(ErrorCode::Forbidden, message));
        }
        Ok(Some(claims))
    }

    /// Revokes the presented token after a short grace period. The gateway refuses it without further action; boxd is
    /// notified by the reaper.
    async fn retire(&self, request: &RequestContext<'_>, bound: &SessionWithSandbox, claims: Claims) -> Result<(), ApiError> {
        let context = &self.context;
        let mut audit = AuditRecord::new(context.now(), &bound.session.workspace, "token.retired")
            .by(request.caller, request.request_id)
            .about(bound)
            .detail("replaced by a fresh one");
        audit.jti = Some(claims.jti.clone());
        let retired = RetiredToken {
            workspace: bound.session.workspace.clone(),
            sandbox: bound.sandbox.id.clone(),
            jti: claims.jti,
            from: context.now().plus(ROTATION_GRACE),
            // As long as it would have proved possession.
            until: Timestamp::from_unix(claims.exp.saturating_add(REFRESH_GRACE_SECONDS)),
            audit,
        };
        if context.store.retire_token(&retired).await.map_err(store_error)? {
            return Ok(());
        }
        let message = "rotate: too many tokens of this sandbox were replaced within an hour; try again later, or set `rotate` to false";
        Err(ApiError { retry_after: Some(RETIRE_AGAIN_SECONDS), ..ApiError::new(ErrorCode::RateLimited, message) })
    }

    /// Extends the lease, never a token. A suspended sandbox is started again, within the caller's wait.
    pub async fn heartbeat(&self, request: &RequestContext<'_>, id: &SessionId) -> Result<HeartbeatResponse, ApiError> {
        let context = &self.context;
        let (bound, _) = live_session(&self.context, request.caller, id).await?;
        request.about(&bound.session.id, &bound.sandbox.id);
        let now = context.now();
        context.store.note(&Note { sandboxes: vec![(bound.sandbox.id.clone(), now)], ..Note::default() }).await.map_err(store_error)?;
        let state = match self.lifecycle.ensure_running(&bound.sandbox.id, request.wait).await {
            // Recording the use above ended its idle state.
            Ok(sandbox) => {
                if sandbox.state == State::Idle {
                    State::Active
                } else {
                    sandbox.state
                }
            }
            // The next heartbeat comes anyway, and the lease is extended.
            Err(e) if e.code == ErrorCode::SandboxStarting => bound.sandbox.state,
            Err(e) => return Err(e),
        };
        Ok(HeartbeatResponse { lease_expires_at: context.now().max(now).plus(context.lifetimes(&bound.sandbox).lease), state })
    }
}
