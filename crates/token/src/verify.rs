//! Verification of tokens: the key id fixes key and algorithm, then signature, issuer, audience and time are checked.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use base64::{Engine, engine::general_purpose::STANDARD, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_protocol::{
    ErrorCode, SandboxId, Timestamp,
    control::{Alg, VerifyKeySpec},
};
use ed25519_dalek::{Signature, VerifyingKey};
use hmac::{KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{Claims, key_id, keys::HmacSha256};

/// Tolerated difference between two clocks.
pub const LEEWAY_SECONDS: i64 = 5;
/// Maximum size of a token. Tokens are below 1 KiB; verifying a longer one would only cost time.
const MAX_TOKEN_BYTES: usize = 4096;
/// Maximum size of a file link. It contains a path, which may have 4096 bytes, and three times that when escaped.
const MAX_LINK_BYTES: usize = 32 * 1024;
/// Number of tokens whose verified signature is remembered, so that it is not checked with every request. A sandbox has
/// a handful in use.
const MAX_VERIFIED_TOKENS: usize = 64;
pub(crate) const TYP: &str = "JWT";
/// The `typ` of file links. Tokens have another, so neither is accepted in place of the other.
pub(crate) const LINK_TYP: &str = "cobox-file-link+jwt";

#[derive(Serialize, Deserialize)]
pub(crate) struct Header {
    alg: String,
    typ: String,
    kid: String,
    /// Extensions that a verifier must understand. None are supported, so a token with any is rejected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    crit: Option<serde_json::Value>,
}

impl Header {
    pub(crate) fn new(alg: Alg, kid: &str, typ: &str) -> Self {
        Self { alg: alg_name(alg).to_owned(), typ: typ.to_owned(), kid: kid.to_owned(), crit: None }
    }
}

const fn alg_name(alg: Alg) -> &'static str {
    match alg {
        Alg::EdDsa => "EdDSA",
        Alg::Hs256 => "HS256",
    }
}

/// Why a token was rejected. The messages reveal nothing about the token itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("the token is malformed")]
    Malformed,
    #[error("the token is signed with a key that is unknown to this sandbox")]
    UnknownKey,
    #[error("the token's signature is invalid")]
    BadSignature,
    #[error("the token was issued by another issuer")]
    WrongIssuer,
    #[error("the token is for another sandbox")]
    WrongAudience,
    #[error("the token is not valid yet; check the clocks")]
    NotYetValid,
    #[error("the token has expired; refresh it")]
    Expired,
    #[error("the token was revoked")]
    Revoked,
}

impl TokenError {
    pub const fn code(self) -> ErrorCode {
        match self {
            TokenError::Expired => ErrorCode::TokenExpired,
            TokenError::Revoked => ErrorCode::TokenRevoked,
            _ => ErrorCode::Unauthenticated,
        }
    }
}

enum VerifyKey {
    EdDsa(VerifyingKey),
    Hs256(Vec<u8>),
}

/// The keys of one sandbox, by key id.
pub struct Keyset {
    issuer: String,
    audience: SandboxId,
    keys: HashMap<String, VerifyKey>,
    /// Claims of verified tokens, by the token's hash.
    verified: Mutex<HashMap<[u8; 32], Claims>>,
}

impl Keyset {
    /// Invalid keys are an error: a sandbox that silently ignored some would lock its users out.
    pub fn new(issuer: &str, audience: &SandboxId, specs: &[VerifyKeySpec]) -> Result<Self, String> {
        let mut keys = HashMap::new();
        for spec in specs {
            let bytes = STANDARD.decode(spec.key.expose()).map_err(|_| format!("key {} is not base64", spec.kid))?;
            let key = match spec.alg {
                Alg::EdDsa => {
                    let bytes = bytes.as_slice().try_into().map_err(|_| format!("key {} is not 32 bytes", spec.kid))?;
                    VerifyKey::EdDsa(VerifyingKey::from_bytes(bytes).map_err(|_| format!("key {} is not on the curve", spec.kid))?)
                }
                Alg::Hs256 if bytes.len() >= 32 => VerifyKey::Hs256(bytes),
                Alg::Hs256 => return Err(format!("key {} is shorter than 32 bytes", spec.kid)),
            };
            keys.insert(spec.kid.clone(), key);
        }
        Ok(Self { issuer: issuer.to_owned(), audience: audience.clone(), keys, verified: Mutex::default() })
    }

    pub fn verify(&self, token: &str, now: Timestamp) -> Result<Claims, TokenError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(TokenError::Malformed);
        }
        let hash: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        let verified = self.verified.lock().unwrap_or_else(PoisonError::into_inner).get(&hash).cloned();
        let claims = match verified {
            Some(claims) => claims,
            None => {
                let claims = self.verify_signature(token, TYP)?;
                let mut verified = self.verified.lock().unwrap_or_else(PoisonError::into_inner);
                if verified.len() >= MAX_VERIFIED_TOKENS {
                    verified.clear();
                }
                verified.insert(hash, claims.clone());
                claims
            }
        };
        check_validity_period(claims, now)
    }

    /// Verifies a file link and returns its claims. They are not remembered, because a link is used only once or twice.
    pub fn verify_link(&self, link: &str, now: Timestamp) -> Result<Claims, TokenError> {
        if link.len() > MAX_LINK_BYTES {
            return Err(TokenError::Malformed);
        }
        check_validity_period(self.verify_signature(link, LINK_TYP)?, now)
    }

    /// The checks whose result doesn't change with time.
    fn verify_signature(&self, token: &str, typ: &str) -> Result<Claims, TokenError> {
        let (signed, signature) = token.rsplit_once('.').ok_or(TokenError::Malformed)?;
        let (header, payload) = signed.split_once('.').ok_or(TokenError::Malformed)?;
        let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).map_err(|_| TokenError::Malformed);
        let header: Header = serde_json::from_slice(&decode(header)?).map_err(|_| TokenError::Malformed)?;
        if header.typ != typ || header.crit.is_some() {
            return Err(TokenError::Malformed);
        }
        let key = self.keys.get(&header.kid).ok_or(TokenError::UnknownKey)?;
        let signature = decode(signature)?;
        // The key decides the algorithm; the header must agree with it.
        let is_genuine = match key {
            VerifyKey::EdDsa(k) if header.alg == alg_name(Alg::EdDsa) => {
                Signature::from_slice(&signature).is_ok_and(|s| k.verify_strict(signed.as_bytes(), &s).is_ok())
            }
            VerifyKey::Hs256(k) if header.alg == alg_name(Alg::Hs256) => HmacSha256::new_from_slice(k).is_ok_and(|mut mac| {
                mac.update(signed.as_bytes());
                mac.verify_slice(&signature).is_ok()
            }),
            _ => false,
        };
        if !is_genuine {
            return Err(TokenError::BadSignature);
        }
        let claims: Claims = serde_json::from_slice(&decode(payload)?).map_err(|_| TokenError::Malformed)?;
        if claims.iss != self.issuer {
            return Err(TokenError::WrongIssuer);
        }
        if claims.aud != self.audience {
            return Err(TokenError::WrongAudience);
        }
        if header.kid != key_id(&claims.aud, claims.generation) {
            return Err(TokenError::UnknownKey);
        }
        Ok(claims)
    }
}

fn check_validity_period(claims: Claims, now: Timestamp) -> Result<Claims, TokenError> {
    if now.unix() >= claims.exp.saturating_add(LEEWAY_SECONDS) {
        return Err(TokenError::Expired);
    }
    if now.unix() < claims.nbf.saturating_sub(LEEWAY_SECONDS) {
        return Err(TokenError::NotYetValid);
    }
    Ok(claims)
}
