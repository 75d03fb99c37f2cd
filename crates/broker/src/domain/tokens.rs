//! Tokens: minted here, for one principal and one sandbox, with a key derived from the deployment's master key.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_protocol::{
    ApiError, CapabilitySet, ErrorCode, SandboxId, Secret, Timestamp, TokenId,
    control::{Alg, VerifyKeySpec},
};
use cobox_token::{Claims, Keyset, LEEWAY_SECONDS, MasterKey, RevocationView, TokenError};

use super::model::{Bound, Caller, Sandbox, Session};
use crate::{
    config::{MAX_TOKEN_TTL_SECONDS, MIN_TOKEN_TTL_SECONDS},
    policy::PolicySource,
    store::RevocationList,
};

/// Who issues every token of every deployment.
pub const ISSUER: &str = "cobox";
/// After this nobody accepts any token issued now: the longest life and the clocks' leeway, twice over.
pub const LONGEST_TOKEN_LIFE: Duration = Duration::from_secs(MAX_TOKEN_TTL_SECONDS + 2 * LEEWAY_SECONDS as u64);
/// How long an expired token still proves possession on refresh.
pub const REFRESH_GRACE_SECONDS: i64 = 3600;

/// Keys kept at hand: more sandboxes than a node has in use at once.
const MAX_KEYSETS: usize = 1024;

pub struct Tokens {
    master: MasterKey,
    alg: Alg,
    default_ttl: Duration,
    /// Says how long a token may live at most.
    policy: Arc<PolicySource>,
    /// Keys in use: deriving one costs as much as checking a token.
    keysets: Mutex<HashMap<(SandboxId, u32), Arc<Keyset>>>,
}

/// A token with what its receiver must know about it.
#[derive(Clone, Debug)]
pub struct Issued {
    pub token: Secret,
    pub jti: TokenId,
    pub expires_at: Timestamp,
    pub refresh_before: Timestamp,
    pub capabilities: CapabilitySet,
}

/// What a token is to allow.
pub struct Wish<'a> {
    pub caller: &'a Caller,
    pub sandbox: &'a Sandbox,
    pub session: Option<&'a Session>,
    pub capabilities: CapabilitySet,
    pub ttl: Option<Duration>,
    /// What is left until the session's hard end.
    pub left: Duration,
    pub now: Timestamp,
}

impl<'a> Wish<'a> {
    pub fn for_session(caller: &'a Caller, bound: &'a Bound, capabilities: CapabilitySet, hard_ttl: Duration, now: Timestamp) -> Self {
        Self {
            caller,
            sandbox: &bound.sandbox,
            session: Some(&bound.session),
            capabilities,
            ttl: None,
            left: bound.left(hard_ttl, now),
            now,
        }
    }
}

impl Tokens {
    pub fn new(master: MasterKey, alg: Alg, default_ttl: Duration, policy: Arc<PolicySource>) -> Self {
        Self { master, alg, default_ttl, policy, keysets: Mutex::default() }
    }

    pub fn mint(&self, wish: &Wish) -> Issued {
        let wished = wish.ttl.unwrap_or(self.default_ttl);
        let longest = self.policy.current().token_ttl(&wish.caller.subject(), self.default_ttl);
        let ttl = wished.max(Duration::from_secs(MIN_TOKEN_TTL_SECONDS)).min(longest).min(wish.left);
        let (now, jti) = (wish.now, TokenId::new());
        let expires_at = now.plus(ttl);
        let principal = &wish.caller.principal;
        let claims = Claims {
            iss: ISSUER.to_owned(),
            sub: principal.name.clone(),
            aud: wish.sandbox.id.clone(),
            sid: wish.session.map(|s| s.id.to_string()),
            thread_id: wish.session.and_then(Session::thread).map(str::to_owned),
            scope: wish.capabilities,
            iat: now.unix(),
            nbf: now.unix(),
            exp: expires_at.unix(),
            jti: jti.to_string(),
            act: wish.caller.actor.clone(),
            generation: wish.sandbox.generation,
            grant: wish.caller.key.to_string(),
        };
        let token = self.master.derive(&wish.sandbox.id, wish.sandbox.generation, self.alg).mint(&claims);
        Issued { token, jti, expires_at, refresh_before: now.plus(ttl * 2 / 3), capabilities: wish.capabilities }
    }

    /// What the sandbox needs to verify on its own.
    pub fn verify_keys(&self, sandbox: &Sandbox) -> Vec<VerifyKeySpec> {
        vec![self.master.derive(&sandbox.id, sandbox.generation, self.alg).verify_spec()]
    }

    /// The same check boxd makes, so that a token it would refuse never reaches it.
    pub fn verify(&self, sandbox: &Sandbox, token: &Secret, revoked: &RevocationList, now: Timestamp) -> Result<Claims, ApiError> {
        let claims = self.keyset(sandbox)?.verify(token.expose(), now).map_err(refused)?;
        if RevocationView::new(&revoked.list).covers(&claims) {
            return Err(refused(TokenError::Revoked));
        }
        Ok(claims)
    }

    /// Like [`Tokens::verify`], but a token that expired within the last hour still counts.
    pub fn verify_possession(
        &self,
        sandbox: &Sandbox,
        token: &Secret,
        revoked: &RevocationList,
        now: Timestamp,
    ) -> Result<Claims, ApiError> {
        let expires_at = claimed_expiry(token).ok_or_else(|| refused(TokenError::Malformed))?;
        if now.unix() >= expires_at.saturating_add(REFRESH_GRACE_SECONDS) {
            return Err(refused(TokenError::Expired));
        }
        self.verify(sandbox, token, revoked, Timestamp::from_unix(now.unix().min(expires_at - 1)))
    }

    fn keyset(&self, sandbox: &Sandbox) -> Result<Arc<Keyset>, ApiError> {
        let of = (sandbox.id.clone(), sandbox.generation);
        if let Some(known) = self.keysets.lock().unwrap_or_else(PoisonError::into_inner).get(&of) {
            return Ok(known.clone());
        }
        let keyset = Keyset::new(ISSUER, &sandbox.id, &self.verify_keys(sandbox)).map_err(|e| {
            tracing::error!(error = e, "a derived key can't be used");
            ApiError::new(ErrorCode::Internal, "the broker's keys can't be used; tell the operator")
        })?;
        let keyset = Arc::new(keyset);
        let mut keysets = self.keysets.lock().unwrap_or_else(PoisonError::into_inner);
        if keysets.len() >= MAX_KEYSETS {
            keysets.clear();
        }
        keysets.insert(of, keyset.clone());
        Ok(keyset)
    }
}

fn refused(e: TokenError) -> ApiError {
    ApiError::new(e.code(), e.to_string())
}

/// What the token says of its end, not yet verified: good enough to choose the moment to verify it at.
fn claimed_expiry(token: &Secret) -> Option<i64> {
    #[derive(serde::Deserialize)]
    struct Expiry {
        exp: i64,
    }
    let payload = token.expose().split('.').nth(1)?;
    let Expiry { exp } = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()?;
    (exp > 0).then_some(exp)
}
