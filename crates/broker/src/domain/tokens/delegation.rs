//! Delegation: issues a narrower token, from a caller's own grant or from a token that a client holds.

use std::sync::Arc;

use cobox_protocol::{ApiError, ErrorCode, RequestId, Secret, SessionId, token::DelegateResponse};
use cobox_token::{Claims, TokenError};

use super::issue::{TokenIssuer, TokenParams};
use crate::domain::{
    access::{
        self, ActorParams, RequestedCapabilities,
        rate_limiter::ChargeRequest,
        request_context::RequestContext,
        sandbox_lookup::find,
        session_access::{SessionEntry, find_entry, live_session, session_expired, visible_session},
        token_verification::verify,
    },
    context::{BrokerContext, store_error},
    model::{Caller, Principal, Sandbox, Session},
    token_signer::{TokenFormat, TokenOrigin, token_refused},
};

/// The client that requests the delegation.
pub enum Delegator<'a> {
    Caller(RequestContext<'a>),
    /// A client with a token and no key: the token becomes the parent.
    Holder {
        token: Secret,
        request_id: &'a RequestId,
        /// Charges the rate limit of the token's principal, which is only known once the token is verified.
        charge: ChargeRequest<'a>,
    },
}

/// What the new token is for.
pub enum DelegationTarget<'a> {
    Session(SessionId),
    /// By id, or by name if the caller's workspace is known.
    Sandbox(&'a str),
}

pub struct DelegationParams<'a> {
    pub capabilities: RequestedCapabilities<'a>,
    pub ttl: Option<u32>,
    pub parent: Option<Secret>,
    pub actor: Option<ActorParams>,
    pub format: Option<TokenFormat>,
}

pub struct Delegations {
    pub context: Arc<BrokerContext>,
    pub issuer: Arc<TokenIssuer>,
}

impl Delegations {
    pub async fn delegate(
        &self,
        by: Delegator<'_>,
        target_name: DelegationTarget<'_>,
        params: DelegationParams<'_>,
    ) -> Result<DelegateResponse, ApiError> {
        if params.ttl == Some(0) {
            return Err(ApiError::invalid("ttl: must be at least 1 second"));
        }
        match (by, params.parent.clone()) {
            (Delegator::Caller(request), None) => self.delegate_own(&request, target_name, params).await,
            (Delegator::Caller(request), Some(parent)) => {
                let target = self.target(&request.caller.principal, target_name).await?;
                let claims = verify(&self.context, &target.0, &parent).await?;
                let audited_caller = AuditedRequester { caller: Some(request.caller), request_id: request.request_id };
                self.delegate_from(audited_caller, target, claims, &parent, params).await
            }
            (Delegator::Holder { token, request_id, charge }, parent) => {
                let parent = parent.unwrap_or(token);
                let (target, claims) = self.target_of_holder(target_name, &parent).await?;
                charge(&principal_of(&claims, &target.0))?;
                self.delegate_from(AuditedRequester { caller: None, request_id }, target, claims, &parent, params).await
            }
        }
    }

    /// Verifies that a token is valid for the given target, before the rest of its request is read.
    pub async fn check_holder(&self, target_name: DelegationTarget<'_>, token: &Secret) -> Result<(), ApiError> {
        self.target_of_holder(target_name, token).await.map(drop)
    }

    /// Narrower than the caller's own grant, with an independent lifetime.
    async fn delegate_own(
        &self,
        request: &RequestContext<'_>,
        target_name: DelegationTarget<'_>,
        params: DelegationParams<'_>,
    ) -> Result<DelegateResponse, ApiError> {
        let caller = access::act(request.caller, params.actor.as_ref())?;
        let request = &RequestContext { caller: &caller, ..*request };
        let (sandbox, session, entry) = match target_name {
            DelegationTarget::Session(id) => {
                let (bound, entry) = live_session(&self.context, &caller, &id).await?;
                (bound.sandbox, Some(bound.session), entry)
            }
            DelegationTarget::Sandbox(id_or_name) => {
                let sandbox = find(&self.context, &caller, id_or_name).await?;
                let (session, entry): (Option<Session>, SessionEntry) = find_entry(&self.context, &caller.principal, &sandbox).await?;
                (sandbox, session, entry)
            }
        };
        let capabilities = entry.limit(access::grant(&self.context.policy(), &caller, Some(params.capabilities))?)?;
        let token = TokenParams {
            ttl: params.ttl,
            format: params.format.unwrap_or_default(),
            origin: entry.origin(),
            ..TokenParams::new(capabilities)
        };
        let issued = self.issuer.issue_in(request, &sandbox, session.as_ref(), token).await?;
        Ok(DelegateResponse {
            token: issued.token,
            expires_at: issued.draft.expires_at,
            refresh_before: Some(issued.draft.refresh_before),
            granted_capabilities: issued.draft.capabilities,
            scopes: issued.draft.capabilities.legacy_names(),
            jti: issued.draft.jti.to_string(),
        })
    }

    /// Narrower than the given token, expires no later, and is revoked with it. This gives the holder of the token
    /// nothing that the token itself doesn't allow.
    async fn delegate_from(
        &self,
        by: AuditedRequester<'_>,
        (sandbox, session): (Sandbox, Option<Session>),
        parent: Claims,
        parent_token: &Secret,
        params: DelegationParams<'_>,
    ) -> Result<DelegateResponse, ApiError> {
        let context = &self.context;
        if parent.exp <= context.now().unix() {
            return Err(token_refused(TokenError::Expired));
        }
        let session = match (session, parent.sid.as_deref()) {
            (Some(session), Some(sid)) if session.id.as_str() == sid => Some(session),
            (None, None) => None,
            (None, Some(sid)) => Some(self.session_of_parent(&sandbox, sid).await?),
            _ => return Err(ApiError::new(ErrorCode::Forbidden, "parent_token: belongs to another session")),
        };
        // The new token belongs to the parent's principal, no matter which client presents it.
        let principal = principal_of(&parent, &sandbox);
        let key = parent.grant.parse().unwrap_or_else(|_| cobox_protocol::KeyId::new());
        let own = Caller { actor: parent.act.clone(), ..Caller::new(principal, key) };
        let own = access::act(&own, params.actor.as_ref())?;
        let granted = access::grant(&context.policy(), &own, Some(params.capabilities))?.intersection(parent.scope);
        if granted.is_empty() {
            let message = format!("none of the requested capabilities is allowed by parent_token; it allows {:?}", parent.scope);
            return Err(ApiError::new(ErrorCode::CapabilityDenied, message));
        }
        let origin = TokenOrigin { parent: Some(&parent), share: None };
        if origin.is_too_long() {
            return Err(ApiError::invalid("parent_token: its chain of delegations is too long; delegate from an earlier token"));
        }
        let token = TokenParams {
            ttl: params.ttl,
            format: params.format.unwrap_or_else(|| TokenFormat::of(parent_token)),
            origin,
            ..TokenParams::new(granted)
        };
        let audited_caller = by.caller.map_or_else(|| own.clone(), |caller| Caller { actor: own.actor.clone(), ..caller.clone() });
        let request = RequestContext {
            caller: &audited_caller,
            request_id: by.request_id,
            wait: std::time::Duration::ZERO,
            client: "",
            logged: None,
        };
        let issued = self.issuer.issue_in(&request, &sandbox, session.as_ref(), token).await?;
        Ok(DelegateResponse {
            token: issued.token,
            expires_at: issued.draft.expires_at,
            refresh_before: None,
            granted_capabilities: issued.draft.capabilities,
            scopes: issued.draft.capabilities.legacy_names(),
            jti: issued.draft.jti.to_string(),
        })
    }

    async fn session_of_parent(&self, sandbox: &Sandbox, sid: &str) -> Result<Session, ApiError> {
        let gone = || ApiError::new(ErrorCode::Forbidden, "parent_token: its session uses another sandbox");
        let id: SessionId = sid.parse().map_err(|_| gone())?;
        let found = self.context.store.session(&id).await.map_err(store_error)?.ok_or_else(gone)?;
        match found.session {
            session if session.sandbox != sandbox.id => Err(gone()),
            session if session.ended_at.is_some() => Err(session_expired(&session)),
            session => Ok(session),
        }
    }

    /// The target that a caller names, if its workspace has it. The parent token decides whether it may be used.
    async fn target(&self, principal: &Principal, target_name: DelegationTarget<'_>) -> Result<(Sandbox, Option<Session>), ApiError> {
        let caller = Caller::new(principal.clone(), cobox_protocol::KeyId::new());
        match target_name {
            DelegationTarget::Session(id) => {
                let bound = visible_session(&self.context, &caller, &id).await?;
                if bound.session.ended_at.is_some() {
                    return Err(session_expired(&bound.session));
                }
                Ok((bound.sandbox, Some(bound.session)))
            }
            DelegationTarget::Sandbox(id_or_name) => Ok((find(&self.context, &caller, id_or_name).await?, None)),
        }
    }

    /// Gives the same answer for a missing target and for one that the token isn't for, so that unauthenticated clients
    /// learn nothing.
    async fn target_of_holder(
        &self,
        target_name: DelegationTarget<'_>,
        parent: &Secret,
    ) -> Result<((Sandbox, Option<Session>), Claims), ApiError> {
        let store = &self.context.store;
        let found = match target_name {
            DelegationTarget::Session(id) => store.session(&id).await.map_err(store_error)?.map(|b| (b.sandbox, Some(b.session))),
            DelegationTarget::Sandbox(id) => match id.parse() {
                Ok(id) => store.sandbox(&id).await.map_err(store_error)?.filter(|s| s.pool.is_none()).map(|s| (s, None)),
                Err(_) => None,
            },
        };
        let target = found.ok_or_else(|| token_refused(TokenError::WrongAudience))?;
        let claims = verify(&self.context, &target.0, parent).await?;
        if target.0.ended_at.is_some() {
            return Err(token_refused(TokenError::WrongAudience));
        }
        Ok((target, claims))
    }
}

fn principal_of(claims: &Claims, sandbox: &Sandbox) -> Principal {
    Principal { workspace: sandbox.workspace.clone(), name: claims.sub.clone(), kind: claims.act.kind }
}

/// The requester to record in the audit; without a key, the principal of the token.
struct AuditedRequester<'a> {
    caller: Option<&'a Caller>,
    request_id: &'a RequestId,
}
