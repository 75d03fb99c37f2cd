//! API keys: authenticate callers. The store only has their hashes, and revoking a key also revokes its tokens.

use std::sync::Arc;

use async_trait::async_trait;
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_protocol::{
    ApiError, ErrorCode, KeyId, RequestId, Secret, SessionId, Timestamp,
    id::is_external_id,
    key::{API_KEY_PREFIX, CreateKey, CreatedKey, ExpireKey, KeyInfo},
};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::{last_used::LastUsed, sign_in::sign_in};
use crate::{
    domain::{
        access,
        context::{BrokerContext, store_error},
        model::{ApiKey, AuditRecord, Caller, PrefetchedSession, Principal},
    },
    store::{AddedKey, ExpiringKey, PageParams, RevokedKey},
};

/// Valid keys per principal: enough to give every machine its own, few enough to keep track of.
pub const MAX_KEYS_PER_PRINCIPAL: u64 = 100;
/// Principals per workspace; an identity provider may send many.
pub const MAX_PRINCIPALS_PER_WORKSPACE: u64 = 10_000;

/// A key is the prefix, the 26 characters of its id, `_`, and 43 characters for 32 random bytes.
const ULID_CHARS: usize = 26;
const SECRET_BYTES: usize = 32;

/// Sends revocations to running sandboxes. Implemented by `lifecycle`.
#[async_trait]
pub trait RevocationPush: Send + Sync {
    /// Pushes to every running sandbox of a workspace on this node. A push that failed is repeated later.
    async fn push_to_workspace(&self, workspace: &str);
}

pub struct Keys {
    pub context: Arc<BrokerContext>,
    pub revocation_push: Arc<dyn RevocationPush>,
    pub last_used: Arc<LastUsed>,
}

impl Keys {
    /// Returns the same error for every reason, so that it reveals nothing.
    pub async fn authenticate(&self, key: &Secret) -> Result<Caller, ApiError> {
        self.authenticate_with_session(key, None).await
    }

    /// As [`Keys::authenticate`], and prefetches the session that the request will need next.
    pub async fn authenticate_with_session(&self, key: &Secret, session: Option<&SessionId>) -> Result<Caller, ApiError> {
        let refused = || ApiError::new(ErrorCode::Unauthenticated, "the API key is unknown, expired or revoked");
        let id = key_id(key).ok_or_else(refused)?;
        let store = &self.context.store;
        let (stored, prefetched_session) = match session {
            None => (store.key(&id).await.map_err(store_error)?.ok_or_else(refused)?, None),
            Some(session) => store.key_and_session(&id, session).await.map_err(store_error)?.ok_or_else(refused)?,
        };
        let is_genuine: bool = hash(key).ct_eq(&stored.hash).into();
        let now = self.context.now();
        if !is_genuine || stored.identity.is_some() || stored.revoked_at.is_some() || stored.expires_at.is_some_and(|t| t <= now) {
            return Err(refused());
        }
        self.last_used.record_key_use(&id, now);
        Ok(Caller {
            until: stored.expires_at,
            prefetched_session: PrefetchedSession::new(prefetched_session),
            ..Caller::new(stored.principal, id)
        })
    }

    /// Authenticates the bearer of a token that claims to be from the configured issuer; `None` for another token.
    pub async fn sign_in(&self, token: &Secret) -> Result<Option<Caller>, ApiError> {
        sign_in(&self.context, &self.last_used, token).await
    }

    pub async fn create(&self, caller: &Caller, params: CreateKey, request_id: &RequestId) -> Result<CreatedKey, ApiError> {
        access::must_be_operator(&caller.principal, "manage keys")?;
        let principal = Principal {
            workspace: params.workspace.unwrap_or_else(|| caller.principal.workspace.clone()),
            name: params.name,
            kind: params.kind,
        };
        let audit = AuditRecord::new(self.context.now(), &principal.workspace, "key.created").by(caller, request_id);
        self.add(principal, params.expires_at, audit).await
    }

    /// The first key of a deployment, created by a process with access to its data directory.
    pub async fn bootstrap(&self, principal: Principal) -> Result<CreatedKey, ApiError> {
        let audit = AuditRecord::new(self.context.now(), &principal.workspace, "key.created").detail("made at the broker itself");
        self.add(principal, None, audit).await
    }

    async fn add(&self, principal: Principal, expires_at: Option<Timestamp>, audit: AuditRecord) -> Result<CreatedKey, ApiError> {
        for (field, value) in [("name", &principal.name), ("workspace", &principal.workspace)] {
            if !is_external_id(value) {
                return Err(ApiError::invalid(format!("{field}: must have 1 to 256 characters and no control characters")));
            }
        }
        let now = self.context.now();
        if expires_at.is_some_and(|t| t <= now) {
            return Err(ApiError::invalid("expires_at: is in the past"));
        }
        let (id, api_key) = generate();
        let key = ApiKey {
            id,
            principal,
            hash: hash(&api_key),
            created_at: now,
            expires_at,
            last_used_at: None,
            revoked_at: None,
            identity: None,
        };
        let audit = audit.detail(format!("{} for {} {}", key.id, key.principal.kind.as_str(), key.principal.name));
        match self.context.store.add_key(&key, &audit).await.map_err(store_error)? {
            AddedKey::Added => Ok(CreatedKey { info: info(key), api_key }),
            other => Err(not_added(&key.principal, &other)),
        }
    }

    /// Newest first, of all workspaces: operators manage the whole deployment.
    pub async fn list(&self, caller: &Caller, page: &PageParams) -> Result<Vec<KeyInfo>, ApiError> {
        access::must_be_operator(&caller.principal, "manage keys")?;
        let keys = self.context.store.keys(page).await.map_err(store_error)?;
        Ok(keys.into_iter().map(info).collect())
    }

    /// Sets when a key expires.
    pub async fn expire(&self, caller: &Caller, id: &KeyId, params: &ExpireKey, request_id: &RequestId) -> Result<KeyInfo, ApiError> {
        access::must_be_operator(&caller.principal, "manage keys")?;
        let context = &self.context;
        if params.expires_at <= context.now() {
            return Err(ApiError::invalid("expires_at: is in the past; to end a key now, revoke it"));
        }
        let audit = AuditRecord::new(context.now(), &caller.principal.workspace, "key.expires").by(caller, request_id);
        let audit = audit.detail(format!("{id} at {}", params.expires_at));
        match context.store.expire_key(id, params.expires_at, &audit).await.map_err(store_error)? {
            ExpiringKey::Changed(key) => Ok(info(*key)),
            ExpiringKey::NotThere => Err(not_there(id)),
            ExpiringKey::LastOperator => Err(last_operator(&id.to_string(), "")),
        }
    }

    pub async fn get(&self, caller: &Caller, id: &KeyId) -> Result<KeyInfo, ApiError> {
        access::must_be_operator(&caller.principal, "manage keys")?;
        let found = self.context.store.key(id).await.map_err(store_error)?;
        found.map(info).ok_or_else(|| ApiError::new(ErrorCode::KeyNotFound, format!("there is no key {id}")))
    }

    /// Durable when it returns. Every running sandbox of the workspace was notified, or the push is retried.
    pub async fn revoke(&self, caller: &Caller, id: &KeyId, request_id: &RequestId) -> Result<(), ApiError> {
        access::must_be_operator(&caller.principal, "manage keys")?;
        let context = &self.context;
        let audit =
            AuditRecord::new(context.now(), &caller.principal.workspace, "key.revoked").by(caller, request_id).detail(id.to_string());
        match context.store.revoke_key(id, &context.ending("revoked", audit)).await.map_err(store_error)? {
            RevokedKey::Revoked(key) => {
                self.revocation_push.push_to_workspace(&key.principal.workspace).await;
                Ok(())
            }
            RevokedKey::NotThere => Err(not_there(id)),
            RevokedKey::LastOperator => Err(last_operator(&id.to_string(), "")),
        }
    }
}

/// Error of a change after which no lasting operator key would be left to manage the deployment: at once, or when the
/// other keys expire.
pub fn last_operator(subject: &str, beneficiary: &str) -> ApiError {
    let message = format!("{subject}: no operator key without an expiry would remain; create one{beneficiary} first");
    ApiError::new(ErrorCode::Forbidden, message)
}

fn not_there(id: &KeyId) -> ApiError {
    ApiError::new(ErrorCode::KeyNotFound, format!("there is no key {id}, or it has ended already"))
}

/// Why a principal got no key.
pub fn not_added(principal: &Principal, outcome: &AddedKey) -> ApiError {
    let name = &principal.name;
    match outcome {
        AddedKey::KindDiffers(kind) => ApiError::invalid(format!("kind: {name} already exists as {}; choose another name", kind.as_str())),
        AddedKey::Disabled => ApiError::new(ErrorCode::Forbidden, format!("{name} is disabled; enable the principal first")),
        AddedKey::TooManyKeys => {
            let message = format!("{name} has {MAX_KEYS_PER_PRINCIPAL} valid keys, which is the limit; revoke some first");
            ApiError::new(ErrorCode::QuotaExceeded, message)
        }
        AddedKey::TooManyPrincipals => {
            let message = format!("workspace {} has {MAX_PRINCIPALS_PER_WORKSPACE} principals, which is the limit", principal.workspace);
            ApiError::new(ErrorCode::QuotaExceeded, message)
        }
        AddedKey::Added | AddedKey::Known(_) => ApiError::new(ErrorCode::Internal, "a key was created but not returned; try again"),
    }
}

fn info(key: ApiKey) -> KeyInfo {
    let prefix = key.identity.is_none().then(|| format!("{API_KEY_PREFIX}{}", ulid(&key.id)));
    let (issuer, subject) = key.identity.map(|i| (i.issuer, i.subject)).unzip();
    KeyInfo {
        prefix,
        issuer,
        subject,
        id: key.id,
        name: key.principal.name,
        kind: key.principal.kind,
        workspace: key.principal.workspace,
        created_at: key.created_at,
        expires_at: key.expires_at,
        last_used_at: key.last_used_at,
        revoked_at: key.revoked_at,
    }
}

fn generate() -> (KeyId, Secret) {
    let id = KeyId::new();
    let mut random = [0u8; SECRET_BYTES];
    // A guessable key would be worse than a crash.
    getrandom::fill(&mut random).expect("the kernel's random source is available");
    let key = Secret::new(format!("{API_KEY_PREFIX}{}_{}", ulid(&id), URL_SAFE_NO_PAD.encode(random)));
    (id, key)
}

/// The part of a key that is not secret.
fn ulid(id: &KeyId) -> &str {
    &id.as_str()[id.as_str().len() - ULID_CHARS..]
}

fn key_id(key: &Secret) -> Option<KeyId> {
    let (ulid, _) = key.expose().strip_prefix(API_KEY_PREFIX)?.split_at_checked(ULID_CHARS)?;
    format!("key_{ulid}").parse().ok()
}

/// A key has 256 random bits: its hash needs neither salt nor many rounds.
pub(super) fn hash(key: &Secret) -> [u8; 32] {
    Sha256::digest(key.expose().as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_contains_its_id_and_keys_are_unique() {
        let (id, key) = generate();
        assert_eq!(key.expose().len(), 4 + 26 + 1 + 43);
        assert_eq!(key_id(&key), Some(id));
        assert_ne!(hash(&key), hash(&generate().1));
        for bad in ["", "cbx_", "cbx_é0000000000000000000000000", "sk-1"] {
            assert_eq!(key_id(&Secret::new(bad)), None, "{bad}");
        }
    }
}
