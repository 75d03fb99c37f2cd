//! Delegation: issues a narrower token, from a caller's own grant or from a token that a client holds.

use std::sync::Arc;

use cobox_protocol::{ApiError, ErrorCode, RequestId, Secret, SessionId, token::DelegateResponse};
use cobox_token::{Claims, TokenError};

use super::issue::{TokenIssuer, TokenWish};
use crate::domain::{
    access::{
        self, ActorWish, Requested,
        rate_limiter::Pay,
        request_context::Asking,
        sandbox_lookup::find,
        session_access::{Entry, expired, living, visible, way_in},
        token_verification::verify,
    },
    context::{Deployment, internal},
    model::{Caller, Principal, Sandbox, Session},
    token_signer::{Lineage, TokenFormat, refused},
};

/// The client that requests the delegation.
pub enum Delegator<'a> {
    Caller(Asking<'a>),
    /// A client with a token and no key: the token becomes the parent.
    Holder {
        token: Secret,
        request_id: &'a RequestId,
        /// Charges the rate limit of the token's principal, which is only known once the token is verified.
        pay: Pay<'a>,
    },
}

/// What the new token is for.
pub enum Of<'a> {
    Session(SessionId),
    /// By id, or by name if the caller's workspace is known.
    Sandbox(&'a str),
}

pub struct Delegation<'a> {
    pub capabilities: Requested<'a>,
    pub ttl: Option<u32>,
    pub parent: Option<Secret>,
    pub actor: Option<ActorWish>,
    pub format: Option<TokenFormat>,
}

pub struct Delegations {
    pub deployment: Arc<Deployment>,
    pub issuer: Arc<TokenIssuer>,
}

impl Delegations {
    pub async fn delegate(&self, by: Delegator<'_>, of: Of<'_>, wish: Delegation<'_>) -> Result<DelegateResponse, ApiError> {
        if wish.ttl == Some(0) {
            return Err(ApiError::invalid("ttl: must be at least 1 second"));
        }
        match (by, wish.parent.clone()) {
            (Delegator::Caller(asking), None) => self.delegate_own(&asking, of, wish).await,
            (Delegator::Caller(asking), Some(parent)) => {
                let place = self.place(&asking.caller.principal, of).await?;
                let claims = verify(&self.deployment, &place.0, &parent).await?;
                let recorded = Recorded { caller: Some(asking.caller), request_id: asking.request_id };
                self.delegate_from(recorded, place, claims, &parent, wish).await
            }
            (Delegator::Holder { token, request_id, pay }, parent) => {
                let parent = parent.unwrap_or(token);
                let (place, claims) = self.place_of_holder(of, &parent).await?;
                pay(&principal_of(&claims, &place.0))?;
                self.delegate_from(Recorded { caller: None, request_id }, place, claims, &parent, wish).await
            }
        }
    }

    /// Verifies that a token is valid for the given target, before the rest of its request is read.
    pub async fn check_holder(&self, of: Of<'_>, token: &Secret) -> Result<(), ApiError> {
        self.place_of_holder(of, token).await.map(drop)
    }

    /// Narrower than the caller's own grant, with an independent lifetime.
    async fn delegate_own(&self, asking: &Asking<'_>, of: Of<'_>, wish: Delegation<'_>) -> Result<DelegateResponse, ApiError> {
        let caller = access::act(asking.caller, wish.actor.as_ref())?;
        let asking = &Asking { caller: &caller, ..*asking };
        let (sandbox, session, entry) = match of {
            Of::Session(id) => {
                let (bound, entry) = living(&self.deployment, &caller, &id).await?;
                (bound.sandbox, Some(bound.session), entry)
            }
            Of::Sandbox(id_or_name) => {
                let sandbox = find(&self.deployment, &caller, id_or_name).await?;
                let (session, entry): (Option<Session>, Entry) = way_in(&self.deployment, &caller.principal, &sandbox).await?;
                (sandbox, session, entry)
            }
        };
        let capabilities = entry.bound(access::grant(&self.deployment.policy(), &caller, Some(wish.capabilities))?)?;
        let token =
            TokenWish { ttl: wish.ttl, format: wish.format.unwrap_or_default(), lineage: entry.lineage(), ..TokenWish::new(capabilities) };
        let issued = self.issuer.issue_in(asking, &sandbox, session.as_ref(), token).await?;
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
        by: Recorded<'_>,
        (sandbox, session): (Sandbox, Option<Session>),
        parent: Claims,
        shown: &Secret,
        wish: Delegation<'_>,
    ) -> Result<DelegateResponse, ApiError> {
        let d = &self.deployment;
        if parent.exp <= d.now().unix() {
            return Err(refused(TokenError::Expired));
        }
        let session = match (session, parent.sid.as_deref()) {
            (Some(session), Some(sid)) if session.id.as_str() == sid => Some(session),
            (None, None) => None,
            (None, Some(sid)) => Some(self.session_of_parent(&sandbox, sid).await?),
            _ => return Err(ApiError::new(ErrorCode::Forbidden, "parent_token: is of another session")),
        };
        // The new token belongs to the parent's principal, no matter which client presents it.
        let principal = principal_of(&parent, &sandbox);
        let key = parent.grant.parse().unwrap_or_else(|_| cobox_protocol::KeyId::new());
        let own = Caller { actor: parent.act.clone(), ..Caller::new(principal, key) };
        let own = access::act(&own, wish.actor.as_ref())?;
        let granted = access::grant(&d.policy(), &own, Some(wish.capabilities))?.intersection(parent.scope);
        if granted.is_empty() {
            let message = format!("none of it is allowed by parent_token; it allows {:?}", parent.scope);
            return Err(ApiError::new(ErrorCode::CapabilityDenied, message));
        }
        let lineage = Lineage { parent: Some(&parent), share: None };
        if lineage.is_too_long() {
            return Err(ApiError::invalid("parent_token: was delegated too often; delegate from an earlier one"));
        }
        let token =
            TokenWish { ttl: wish.ttl, format: wish.format.unwrap_or_else(|| TokenFormat::of(shown)), lineage, ..TokenWish::new(granted) };
        let recorded = by.caller.map_or_else(|| own.clone(), |caller| Caller { actor: own.actor.clone(), ..caller.clone() });
        let asking = Asking { caller: &recorded, request_id: by.request_id, wait: std::time::Duration::ZERO, client: "", logged: None };
        let issued = self.issuer.issue_in(&asking, &sandbox, session.as_ref(), token).await?;
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
        let gone = || ApiError::new(ErrorCode::Forbidden, "parent_token: its session is not of this sandbox");
        let id: SessionId = sid.parse().map_err(|_| gone())?;
        let found = self.deployment.store.session(&id).await.map_err(internal)?.ok_or_else(gone)?;
        match found.session {
            session if session.sandbox != sandbox.id => Err(gone()),
            session if session.ended_at.is_some() => Err(expired(&session)),
            session => Ok(session),
        }
    }

    /// The target that a caller names, if its workspace has it. The parent token decides whether it may be used.
    async fn place(&self, principal: &Principal, of: Of<'_>) -> Result<(Sandbox, Option<Session>), ApiError> {
        let caller = Caller::new(principal.clone(), cobox_protocol::KeyId::new());
        match of {
            Of::Session(id) => {
                let bound = visible(&self.deployment, &caller, &id).await?;
                if bound.session.ended_at.is_some() {
                    return Err(expired(&bound.session));
                }
                Ok((bound.sandbox, Some(bound.session)))
            }
            Of::Sandbox(id_or_name) => Ok((find(&self.deployment, &caller, id_or_name).await?, None)),
        }
    }

    /// Gives the same answer for a missing target and for one that the token isn't for, so that unauthenticated clients
    /// learn nothing.
    async fn place_of_holder(&self, of: Of<'_>, parent: &Secret) -> Result<((Sandbox, Option<Session>), Claims), ApiError> {
        let store = &self.deployment.store;
        let found = match of {
            Of::Session(id) => store.session(&id).await.map_err(internal)?.map(|b| (b.sandbox, Some(b.session))),
            Of::Sandbox(id) => match id.parse() {
                Ok(id) => store.sandbox(&id).await.map_err(internal)?.filter(|s| s.pool.is_none()).map(|s| (s, None)),
                Err(_) => None,
            },
        };
        let place = found.ok_or_else(|| refused(TokenError::WrongAudience))?;
        let claims = verify(&self.deployment, &place.0, parent).await?;
        if place.0.ended_at.is_some() {
            return Err(refused(TokenError::WrongAudience));
        }
        Ok((place, claims))
    }
}

fn principal_of(claims: &Claims, sandbox: &Sandbox) -> Principal {
    Principal { workspace: sandbox.workspace.clone(), name: claims.sub.clone(), kind: claims.act.kind }
}

/// The requester to record in the audit; without a key, the principal of the token.
struct Recorded<'a> {
    caller: Option<&'a Caller>,
    request_id: &'a RequestId,
}
