//! Renews a session: issues a fresh token, or extends the lease.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode, SessionId, Timestamp,
    session::{HeartbeatResponse, RefreshRequest, RefreshResponse, State},
};
use cobox_token::Claims;

use super::negotiation::must_be;
use crate::{
    domain::{
        access::{self, request_context::Asking, session_access::living, token_verification::verify_possession},
        context::{Deployment, internal},
        lifecycle::transitions::Lifecycle,
        model::{AuditRecord, Bound},
        token_signer::{REFRESH_GRACE_SECONDS, TokenFormat},
        tokens::issue::{TokenIssuer, TokenWish},
    },
    store::{Note, RetiredToken},
};

/// How long a replaced token stays valid, so that requests in progress can switch to the new one.
const ROTATION_GRACE: Duration = Duration::from_secs(30);
/// When to retry after too many tokens were replaced: some of those have expired by then.
const RETIRE_AGAIN_SECONDS: u32 = 60;

pub struct SessionRenewal {
    pub deployment: Arc<Deployment>,
    pub lifecycle: Arc<Lifecycle>,
    pub issuer: Arc<TokenIssuer>,
}

impl SessionRenewal {
    pub async fn refresh(&self, asking: &Asking<'_>, id: &SessionId, wish: &RefreshRequest) -> Result<RefreshResponse, ApiError> {
        let format = match (&wish.token_format, &wish.current_token) {
            (Some(word), _) => TokenFormat::from_word(word)?,
            (None, Some(token)) => TokenFormat::of(token),
            (None, None) => TokenFormat::Jwt,
        };
        let (bound, entry) = living(&self.deployment, asking.caller, id).await?;
        asking.about(&bound.session.id, &bound.sandbox.id);
        // Before a sandbox is started for it.
        self.deployment.may_see(asking.caller, bound.session.thread()).await?;
        must_be(&self.deployment, asking.caller, wish.sandbox_id.as_deref(), &bound.sandbox).await?;
        let shown = self.possession(asking, &bound, wish).await?;
        if wish.rotate == Some(true) && shown.is_none() {
            return Err(ApiError::invalid("rotate: needs current_token, the token that is to end"));
        }
        let mut caller = asking.caller.clone();
        let policy = self.deployment.policy();
        let capabilities = match &shown {
            // A refresh renews the token's capabilities and actor; it doesn't widen them.
            Some(claims) => {
                caller.actor = claims.act.clone();
                access::renew(&policy, &caller, claims.scope)?
            }
            None => access::grant(&policy, &caller, None)?,
        };
        let capabilities = entry.bound(capabilities)?;
        let asking = &Asking { caller: &caller, ..*asking };
        let sandbox = self.lifecycle.bring_up_found(bound.sandbox, asking.wait).await?;
        let bound = Bound { sandbox, ..bound };
        let token = TokenWish { format, is_activity: true, lineage: entry.lineage(), ..TokenWish::new(capabilities) };
        let issued = self.issuer.issue(asking, &bound, token).await?;
        if let (Some(true), Some(claims)) = (wish.rotate, shown) {
            self.retire(asking, &bound, claims).await?;
        }
        Ok(RefreshResponse { token: issued.token, expires_at: issued.draft.expires_at, refresh_before: issued.draft.refresh_before })
    }

    /// The claims of the presented token, if there is one. It must belong to this session and this caller.
    async fn possession(&self, asking: &Asking<'_>, bound: &Bound, wish: &RefreshRequest) -> Result<Option<Claims>, ApiError> {
        let Some(token) = &wish.current_token else { return Ok(None) };
        let claims = verify_possession(&self.deployment, &bound.sandbox, token).await?;
        if claims.sid.as_deref() != Some(bound.session.id.as_str()) || claims.sub != asking.caller.principal.name {
            return Err(ApiError::new(ErrorCode::Forbidden, "current_token: is of another session or another principal"));
        }
        if claims.parent.is_some() {
            let message = "current_token: was delegated from another token and ends with that one; delegate anew instead";
            return Err(ApiError::new(ErrorCode::Forbidden, message));
        }
        Ok(Some(claims))
    }

    /// Revokes the presented token after a short grace period. The gateway refuses it without further action; boxd is
    /// notified by the reaper.
    async fn retire(&self, asking: &Asking<'_>, bound: &Bound, claims: Claims) -> Result<(), ApiError> {
        let d = &self.deployment;
        let mut audit = AuditRecord::new(d.now(), &bound.session.workspace, "token.retired")
            .by(asking.caller, asking.request_id)
            .about(bound)
            .detail("replaced by a fresh one");
        audit.jti = Some(claims.jti.clone());
        let retired = RetiredToken {
            workspace: bound.session.workspace.clone(),
            sandbox: bound.sandbox.id.clone(),
            jti: claims.jti,
            from: d.now().plus(ROTATION_GRACE),
            // As long as it would have proved possession.
            until: Timestamp::from_unix(claims.exp.saturating_add(REFRESH_GRACE_SECONDS)),
            audit,
        };
        if d.store.retire_token(&retired).await.map_err(internal)? {
            return Ok(());
        }
        let message = "rotate: too many tokens of this sandbox were replaced within the hour; refresh with `\"rotate\": false`, or later";
        Err(ApiError { retry_after: Some(RETIRE_AGAIN_SECONDS), ..ApiError::new(ErrorCode::RateLimited, message) })
    }

    /// Extends the lease, never a token. A suspended sandbox is started again, within the caller's wait.
    pub async fn heartbeat(&self, asking: &Asking<'_>, id: &SessionId) -> Result<HeartbeatResponse, ApiError> {
        let d = &self.deployment;
        let (bound, _) = living(&self.deployment, asking.caller, id).await?;
        asking.about(&bound.session.id, &bound.sandbox.id);
        let now = d.now();
        d.store.note(&Note { sandboxes: vec![(bound.sandbox.id.clone(), now)], ..Note::default() }).await.map_err(internal)?;
        let state = match self.lifecycle.bring_up(&bound.sandbox.id, asking.wait).await {
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
        Ok(HeartbeatResponse { lease_expires_at: d.now().max(now).plus(d.lifetimes(&bound.sandbox).lease), state })
    }
}
