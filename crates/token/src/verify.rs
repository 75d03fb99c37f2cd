//! The check of a token: the key id fixes algorithm and key, then signature, issuer, audience, time.

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

/// How far two clocks may disagree.
pub const LEEWAY_SECONDS: i64 = 5;
/// Longest token looked at: ours are below 1 KiB, and a longer one only costs time.
const MAX_TOKEN_BYTES: usize = 4096;
/// Longest file link looked at: it holds a path, which may have 4096 bytes and be three times that with its escapes.
const MAX_LINK_BYTES: usize = 32 * 1024;
/// Tokens whose signature is known to be good, so that it is checked once and not with every request. A sandbox has a handful in use.
const MAX_KNOWN: usize = 64;
pub(crate) const TYP: &str = "JWT";
/// The type of file links: never mistaken for tokens, because neither is accepted in the other's place.
pub(crate) const LINK_TYP: &str = "cobox-file-link+jwt";

#[derive(Serialize, Deserialize)]
pub(crate) struct Header {
    alg: String,
    typ: String,
    kid: String,
    /// Extensions a reader must understand. We know none, so a token that has any is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    crit: Option<serde_json::Value>,
}

impl Header {
    pub(crate) fn new(alg: Alg, kid: &str, typ: &str) -> Self {
        Self { alg: alg_word(alg).to_owned(), typ: typ.to_owned(), kid: kid.to_owned(), crit: None }
    }
}

const fn alg_word(alg: Alg) -> &'static str {
    match alg {
        Alg::EdDsa => "EdDSA",
        Alg::Hs256 => "HS256",
    }
}

/// Why a token was refused. The words say nothing of the token itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("the token is malformed")]
    Malformed,
    #[error("the token is signed with a key this sandbox doesn't know")]
    UnknownKey,
    #[error("the token's signature is wrong")]
    BadSignature,
    #[error("the token was issued by somebody else")]
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
    /// What genuine tokens say, by their hash.
    known: Mutex<HashMap<[u8; 32], Claims>>,
}

impl Keyset {
    /// Keys that can't be read are an error: a sandbox that silently knows fewer would lock its users out.
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
        Ok(Self { issuer: issuer.to_owned(), audience: audience.clone(), keys, known: Mutex::default() })
    }

    pub fn verify(&self, token: &str, now: Timestamp) -> Result<Claims, TokenError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(TokenError::Malformed);
        }
        let hash: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(&hash).cloned();
        let claims = match known {
            Some(claims) => claims,
            None => {
                let claims = self.verify_signature(token, TYP)?;
                let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
                if known.len() >= MAX_KNOWN {
                    known.clear();
                }
                known.insert(hash, claims.clone());
                claims
            }
        };
        in_time(claims, now)
    }

    /// What a file link says. Not remembered: it is used once or twice.
    pub fn verify_link(&self, link: &str, now: Timestamp) -> Result<Claims, TokenError> {
        if link.len() > MAX_LINK_BYTES {
            return Err(TokenError::Malformed);
        }
        in_time(self.verify_signature(link, LINK_TYP)?, now)
    }

    /// All that doesn't change with time.
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
        // The key decides the algorithm; the header may only agree.
        let is_genuine = match key {
            VerifyKey::EdDsa(k) if header.alg == alg_word(Alg::EdDsa) => {
                Signature::from_slice(&signature).is_ok_and(|s| k.verify_strict(signed.as_bytes(), &s).is_ok())
            }
            VerifyKey::Hs256(k) if header.alg == alg_word(Alg::Hs256) => HmacSha256::new_from_slice(k).is_ok_and(|mut mac| {
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

fn in_time(claims: Claims, now: Timestamp) -> Result<Claims, TokenError> {
    if now.unix() >= claims.exp.saturating_add(LEEWAY_SECONDS) {
        return Err(TokenError::Expired);
    }
    if now.unix() < claims.nbf.saturating_sub(LEEWAY_SECONDS) {
        return Err(TokenError::NotYetValid);
    }
    Ok(claims)
}
