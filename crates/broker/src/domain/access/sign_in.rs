//! Sign-in with a token of an OIDC issuer: its bearer becomes a principal like one with an API key, under a grant that
//! can be revoked.

use cobox_protocol::{ApiError, ErrorCode, KeyId, Secret};
use sha2::{Digest, Sha256};

use super::{keys::not_added, last_used::LastUsed};
use crate::{
    domain::{
        context::{BrokerContext, store_error},
        model::{ApiKey, AuditRecord, Caller, Identity, Principal},
    },
    oidc::{OidcRefusal, VerifiedIdentity},
    store::AddedKey,
};

/// Authenticates the bearer of a token that claims to be from the configured issuer. Gives the same error for every
/// reason, so that it reveals nothing.
pub async fn sign_in(context: &BrokerContext, last_used: &LastUsed, token: &Secret) -> Result<Option<Caller>, ApiError> {
    let Some(oidc) = context.oidc.as_ref().filter(|o| o.is_of_issuer(token)) else { return Ok(None) };
    let now = context.now();
    let verified = match oidc.verify(token, now).await {
        Ok(verified) => verified,
        Err(OidcRefusal::NoKeys) => {
            let message = "the OIDC issuer's keys can't be fetched, so its tokens can't be verified; try again";
            return Err(ApiError::new(ErrorCode::ProviderUnavailable, message));
        }
        Err(reason) => {
            tracing::debug!(%reason, "an OIDC token was refused");
            return Err(refused());
        }
    };
    let stored = match context.store.identity(&verified.principal, &hash(&verified.identity)).await.map_err(store_error)? {
        Some(stored) => stored,
        None => create_identity(context, &verified).await?,
    };
    if stored.revoked_at.is_some() {
        return Err(refused());
    }
    if stored.principal.kind != verified.principal.kind {
        return Err(kind_differs(&stored, &verified));
    }
    last_used.record_key_use(&stored.id, now);
    Ok(Some(Caller { until: Some(verified.until), ..Caller::new(stored.principal, stored.id) }))
}

async fn create_identity(context: &BrokerContext, verified: &VerifiedIdentity) -> Result<ApiKey, ApiError> {
    let (principal, identity) = (&verified.principal, &verified.identity);
    let key = ApiKey {
        id: KeyId::new(),
        principal: principal.clone(),
        hash: hash(identity),
        created_at: context.now(),
        expires_at: None,
        last_used_at: None,
        revoked_at: None,
        identity: Some(identity.clone()),
    };
    let mut audit = AuditRecord::new(context.now(), &principal.workspace, "key.created");
    audit.principal = Some(principal.name.clone());
    audit.actor = Some(principal.kind.as_str().to_owned());
    let audit = audit.detail(format!("{} for {} {}, vouched for by {}", key.id, principal.kind.as_str(), principal.name, identity.issuer));
    match context.store.add_key(&key, &audit).await.map_err(store_error)? {
        AddedKey::Added => Ok(key),
        AddedKey::Known(known) => Ok(*known),
        AddedKey::Disabled => Err(refused()),
        AddedKey::KindDiffers(kind) => {
            let stored = ApiKey { principal: Principal { kind, ..principal.clone() }, ..key };
            Err(kind_differs(&stored, verified))
        }
        other => Err(not_added(principal, &other)),
    }
}

/// Can't collide with an API key: no key hashes to the same value.
fn hash(identity: &Identity) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in [&identity.issuer, &identity.subject] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().into()
}

fn refused() -> ApiError {
    ApiError::new(ErrorCode::Unauthenticated, "the OIDC token is not accepted here")
}

fn kind_differs(stored: &ApiKey, verified: &VerifiedIdentity) -> ApiError {
    let (name, stored_kind, token_kind) = (&stored.principal.name, stored.principal.kind.as_str(), verified.principal.kind.as_str());
    ApiError::new(
        ErrorCode::Forbidden,
        format!("{name} is {stored_kind}, but the token's kind is {token_kind}; the kind of a principal can't change"),
    )
}
