//! Signs and verifies tokens: each is for one principal and one sandbox, and signed with a key derived from the
//! deployment's master key.

use std::{
    collections::HashMap,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_protocol::{
    ApiError, CapabilitySet, ErrorCode, SandboxId, Secret, Timestamp, TokenId,
    control::{Alg, VerifyKeySpec},
    key::OPAQUE_TOKEN_PREFIX,
    text::{MAX_SHOWN_CHARS, printable},
};
use cobox_token::{Claims, Keyset, LEEWAY_SECONDS, LinkedFile, MasterKey, SigningKey, TokenError, key_id};
use parking_lot::{Mutex, RwLock};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::{
    config::{MAX_TOKEN_TTL_SECONDS, MIN_TOKEN_TTL_SECONDS},
    domain::model::{Caller, Sandbox, Session, Share},
    policy::PolicySource,
    store::RevocationList,
};

/// Issuer of every token of every deployment.
pub const ISSUER: &str = "cobox";
/// After this no token issued now is accepted anywhere: the longest life plus twice the leeway for clocks.
pub const LONGEST_TOKEN_LIFE: Duration = Duration::from_secs(MAX_TOKEN_TTL_SECONDS + 2 * LEEWAY_SECONDS as u64);
/// How long an expired token still proves possession on refresh.
pub const REFRESH_GRACE_SECONDS: i64 = 3600;
/// After this a token issued now doesn't even prove possession.
pub const MAX_REFRESH_AGE: Duration = Duration::from_secs(LONGEST_TOKEN_LIFE.as_secs() + REFRESH_GRACE_SECONDS as u64);
/// Maximum number of active revocations per sandbox, and per workspace as a whole: enough for hundreds of clients that
/// rotate their tokens, while a push to boxd stays small.
pub const MAX_REVOCATIONS: u32 = 2048;
/// Maximum length of a delegation chain: each step makes the token longer.
const MAX_DELEGATION_DEPTH: usize = 8;

/// Number of cached keysets: more than a node has sandboxes in use at once.
const MAX_KEYSETS: usize = 1024;

pub struct TokenSigner {
    master: MasterKey,
    /// The previous master key, for tokens from before it was replaced.
    previous: RwLock<Option<MasterKey>>,
    alg: Alg,
    default_ttl: Duration,
    /// Decides the maximum lifetime of a token.
    policy: Arc<PolicySource>,
    /// Cached keys by sandbox, first and last generation: deriving one costs as much as verifying a token.
    keysets: Mutex<HashMap<(SandboxId, u32, u32), Arc<Keyset>>>,
    issued: AtomicU64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenFormat {
    /// Can be verified by any party that has the sandbox's public key.
    #[default]
    Jwt,
    /// Only the broker can resolve it, so it only works through the gateway.
    Opaque,
}

impl TokenFormat {
    pub fn of(token: &Secret) -> Self {
        if token.expose().starts_with(OPAQUE_TOKEN_PREFIX) { TokenFormat::Opaque } else { TokenFormat::Jwt }
    }
    pub const fn as_str(self) -> &'static str {
        match self {
            TokenFormat::Jwt => "jwt",
            TokenFormat::Opaque => "opaque",
        }
    }
}

impl FromStr for TokenFormat {
    type Err = ApiError;

    fn from_str(word: &str) -> Result<Self, ApiError> {
        [TokenFormat::Jwt, TokenFormat::Opaque].into_iter().find(|f| f.as_str() == word).ok_or_else(|| {
            let word = printable(word, MAX_SHOWN_CHARS);
            ApiError::invalid(format!("token_format: `{word}` is not known; it must be `jwt` or `opaque`"))
        })
    }
}

/// A token with what its receiver must know about it.
#[derive(Clone, Debug)]
pub struct IssuedToken {
    pub token: Secret,
    pub draft: TokenDraft,
}

/// A token without its signature.
#[derive(Clone, Debug)]
pub struct TokenDraft {
    pub jti: TokenId,
    pub expires_at: Timestamp,
    pub refresh_before: Timestamp,
    pub capabilities: CapabilitySet,
    /// Contents of the token.
    pub claims: Claims,
}

/// The origin of a token; the token ends when its origin does.
#[derive(Clone, Copy, Default)]
pub struct TokenOrigin<'a> {
    /// The token it is delegated from, whose principal and grant the new token inherits.
    pub parent: Option<&'a Claims>,
    pub share: Option<&'a Share>,
}

impl TokenOrigin<'_> {
    fn ends_by(&self) -> Option<Timestamp> {
        let parent = self.parent.map(|p| Timestamp::from_unix(p.exp));
        parent.into_iter().chain(self.share.and_then(|s| s.expires_at)).min()
    }

    /// All ancestors except the direct parent.
    fn via(&self) -> Vec<String> {
        let of_parent = self.parent.into_iter().flat_map(|p| p.parent.iter().chain(&p.via).cloned());
        of_parent.chain(self.share.map(|s| s.id.to_string())).collect()
    }

    pub fn is_too_long(&self) -> bool {
        self.via().len() > MAX_DELEGATION_DEPTH
    }
}

/// Parameters of a new token.
pub struct DraftParams<'a> {
    pub caller: &'a Caller,
    pub sandbox: &'a Sandbox,
    pub session: Option<&'a Session>,
    pub capabilities: CapabilitySet,
    pub ttl: Option<Duration>,
    /// Time until the session's hard end.
    pub remaining: Duration,
    pub now: Timestamp,
    pub origin: TokenOrigin<'a>,
}

impl TokenSigner {
    pub fn new(master: MasterKey, previous: Option<MasterKey>, alg: Alg, default_ttl: Duration, policy: Arc<PolicySource>) -> Self {
        Self { master, previous: RwLock::new(previous), alg, default_ttl, policy, keysets: Mutex::default(), issued: AtomicU64::default() }
    }

    /// Fingerprint of the master key.
    pub fn fingerprint(&self) -> String {
        self.master.fingerprint()
    }

    fn has_previous(&self) -> bool {
        self.previous.read().is_some()
    }

    /// Drops the previous master key once none of its tokens can be valid. Returns whether there was one.
    pub fn forget_previous(&self) -> bool {
        self.has_previous() && self.previous.write().take().is_some()
    }

    /// Number of tokens issued since the start.
    pub fn issued(&self) -> u64 {
        self.issued.load(Ordering::Relaxed)
    }

    pub fn draft(&self, params: &DraftParams) -> TokenDraft {
        self.issued.fetch_add(1, Ordering::Relaxed);
        let requested = params.ttl.unwrap_or(self.default_ttl);
        let longest = self.policy.current().token_ttl(&params.caller.subject(), self.default_ttl);
        let (now, jti) = (params.now, TokenId::new());
        let good_for = params.caller.until.map_or(Duration::MAX, |until| until.saturating_since(now));
        let ttl = requested.max(Duration::from_secs(MIN_TOKEN_TTL_SECONDS)).min(longest).min(params.remaining).min(good_for);
        let expires_at = params.origin.ends_by().map_or(now.plus(ttl), |end| end.min(now.plus(ttl)));
        let (principal, parent) = (&params.caller.principal, params.origin.parent);
        let claims = Claims {
            iss: ISSUER.to_owned(),
            sub: parent.map_or(&principal.name, |p| &p.sub).clone(),
            aud: params.sandbox.id.clone(),
            sid: params.session.map(|s| s.id.to_string()),
            thread_id: params.session.and_then(Session::thread).map(str::to_owned),
            scope: params.capabilities,
            // Inherits the parent's issue time: a revocation by issue time also ends delegated tokens, including those
            // issued while the revocation is being stored.
            iat: parent.map_or(now.unix(), |p| p.iat),
            nbf: now.unix(),
            exp: expires_at.unix(),
            jti: jti.to_string(),
            act: params.caller.actor.clone(),
            generation: params.sandbox.generation,
            grant: parent.map_or_else(|| params.caller.key.to_string(), |p| p.grant.clone()),
            parent: parent.map(|p| p.jti.clone()),
            via: params.origin.via(),
            file: None,
        };
        let refresh_before = now.plus(expires_at.saturating_since(now) * 2 / 3);
        TokenDraft { jti, expires_at, refresh_before, capabilities: params.capabilities, claims }
    }

    /// The signed token. The same claims give the same token, so that boxd verifies its signature once.
    pub fn sign(&self, sandbox: &Sandbox, claims: &Claims) -> Secret {
        self.key(sandbox, claims.generation).mint(claims)
    }

    /// A file link, derived from a token that was issued for it: one file, with the capability of that token.
    pub fn link(&self, sandbox: &Sandbox, claims: &Claims, file: LinkedFile) -> Secret {
        self.key(sandbox, claims.generation).mint_link(&Claims { file: Some(file), ..claims.clone() })
    }

    fn key(&self, sandbox: &Sandbox, generation: u32) -> SigningKey {
        let previous = self.previous.read();
        let master = previous.as_ref().filter(|_| generation < sandbox.master_from).unwrap_or(&self.master);
        master.derive(&sandbox.id, generation, self.alg)
    }

    /// The keys with which the sandbox verifies tokens on its own.
    pub fn verify_keys(&self, sandbox: &Sandbox, now: Timestamp) -> Vec<VerifyKeySpec> {
        let oldest = sandbox.keys_from(now);
        // Without the previous master key, keys of older generations can't be derived.
        let oldest = if self.has_previous() { oldest } else { oldest.max(sandbox.master_from) };
        (oldest..=sandbox.generation).map(|generation| self.key(sandbox, generation).verify_spec()).collect()
    }

    /// The same check that boxd makes, so that a token it would refuse never reaches it.
    pub fn verify(&self, sandbox: &Sandbox, token: &Secret, revoked: &RevocationList, now: Timestamp) -> Result<Claims, ApiError> {
        self.verify_at(sandbox, token, revoked, now, now)
    }

    fn verify_at(
        &self,
        sandbox: &Sandbox,
        token: &Secret,
        revoked: &RevocationList,
        now: Timestamp,
        at: Timestamp,
    ) -> Result<Claims, ApiError> {
        let claims = self.keyset(sandbox, now)?.verify(token.expose(), at).map_err(|e| match e {
            // The holder should learn that the token was once valid.
            TokenError::UnknownKey if is_of_old_key(sandbox, token) => token_refused(TokenError::Revoked),
            e => token_refused(e),
        })?;
        check_not_revoked(&claims, revoked)?;
        Ok(claims)
    }

    /// The claims of a file link, after verification.
    pub fn verify_link(&self, sandbox: &Sandbox, link: &Secret, revoked: &RevocationList, now: Timestamp) -> Result<Claims, ApiError> {
        let claims = self.keyset(sandbox, now)?.verify_link(link.expose(), now).map_err(|e| match e {
            TokenError::UnknownKey if is_of_old_key(sandbox, link) => token_refused(TokenError::Revoked),
            e => token_refused(e),
        })?;
        check_not_revoked(&claims, revoked)?;
        Ok(claims)
    }

    /// As [`TokenSigner::verify`], for the stored claims of an opaque token: the store replaces the signature.
    pub fn verify_stored(&self, sandbox: &Sandbox, claims: &Claims, revoked: &RevocationList, now: Timestamp) -> Result<(), ApiError> {
        if claims.aud != sandbox.id {
            return Err(token_refused(TokenError::WrongAudience));
        }
        if claims.generation < sandbox.keys_from(now) {
            return Err(token_refused(TokenError::Revoked));
        }
        if now.unix() >= claims.exp.saturating_add(LEEWAY_SECONDS) {
            return Err(token_refused(TokenError::Expired));
        }
        check_not_revoked(claims, revoked)
    }

    /// Like [`TokenSigner::verify`], but a token that expired within the last hour still counts.
    pub fn verify_possession(
        &self,
        sandbox: &Sandbox,
        token: &Secret,
        revoked: &RevocationList,
        now: Timestamp,
    ) -> Result<Claims, ApiError> {
        let expires_at =
            unverified_claims(token).map(|c| c.exp).filter(|exp| *exp > 0).ok_or_else(|| token_refused(TokenError::Malformed))?;
        self.verify_at(sandbox, token, revoked, now, possession_check_time(expires_at, now)?)
    }

    fn keyset(&self, sandbox: &Sandbox, now: Timestamp) -> Result<Arc<Keyset>, ApiError> {
        let of = (sandbox.id.clone(), sandbox.keys_from(now), sandbox.generation);
        if let Some(known) = self.keysets.lock().get(&of) {
            return Ok(known.clone());
        }
        let keyset = Keyset::new(ISSUER, &sandbox.id, &self.verify_keys(sandbox, now)).map_err(|e| {
            tracing::error!(error = e, "a derived key can't be used");
            ApiError::new(ErrorCode::Internal, "the broker's keys can't be used; contact the operator")
        })?;
        let keyset = Arc::new(keyset);
        let mut keysets = self.keysets.lock();
        if keysets.len() >= MAX_KEYSETS {
            keysets.clear();
        }
        keysets.insert(of, keyset.clone());
        Ok(keyset)
    }
}

pub fn token_refused(e: TokenError) -> ApiError {
    ApiError::new(e.code(), e.to_string())
}

fn check_not_revoked(claims: &Claims, revoked: &RevocationList) -> Result<(), ApiError> {
    if revoked.covers(claims) { Err(token_refused(TokenError::Revoked)) } else { Ok(()) }
}

/// The time at which to verify a token that may have expired up to an hour ago.
pub fn possession_check_time(expires_at: i64, now: Timestamp) -> Result<Timestamp, ApiError> {
    if now.unix() >= expires_at.saturating_add(REFRESH_GRACE_SECONDS) {
        return Err(token_refused(TokenError::Expired));
    }
    Ok(Timestamp::from_unix(now.unix().min(expires_at - 1)))
}

/// The hash under which an opaque token is stored.
pub fn hash(token: &Secret) -> [u8; 32] {
    Sha256::digest(token.expose().as_bytes()).into()
}

/// Unverified claims of a token, only used to choose how to verify it.
#[derive(serde::Deserialize)]
pub struct UnverifiedClaims {
    pub exp: i64,
    pub aud: SandboxId,
    #[serde(rename = "gen")]
    generation: u32,
}

pub fn unverified_claims(token: &Secret) -> Option<UnverifiedClaims> {
    let payload = token.expose().split('.').nth(1)?;
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()
}

/// Whether the token claims to be signed with a key of this sandbox that was replaced since.
fn is_of_old_key(sandbox: &Sandbox, token: &Secret) -> bool {
    #[derive(serde::Deserialize)]
    struct Header {
        kid: String,
    }
    let header = token.expose().split('.').next().and_then(|h| URL_SAFE_NO_PAD.decode(h).ok());
    let Some(Header { kid }) = header.and_then(|h| serde_json::from_slice(&h).ok()) else { return false };
    unverified_claims(token)
        .is_some_and(|c| c.aud == sandbox.id && c.generation < sandbox.generation && kid == key_id(&c.aud, c.generation))
}
