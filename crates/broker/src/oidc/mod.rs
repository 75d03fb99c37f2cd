//! OIDC as a second way in: a token of a configured issuer, checked with the issuer's public keys, says who its bearer is.

mod jwk;
mod keyring;
mod settings;

use std::sync::Arc;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_protocol::{Secret, Timestamp, id::is_external_id, key::PrincipalKind};
use serde::Deserialize;
use serde_json::{Map, Value};

pub use jwk::Algorithm;
use keyring::{Keyring, Place};
pub use settings::OidcConfig;

use crate::{
    domain::model::{Identity, Principal},
    outbound::read_url,
};

/// Longest token that is looked at, in bytes: those with a hundred groups stay below it.
const MAX_TOKEN_BYTES: usize = 16 * 1024;
/// What a token may call itself. Others, such as logout tokens, are signed with the same keys and mean something else.
const TYPES: [&str; 2] = ["jwt", "at+jwt"];

/// Who bears a good token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vouched {
    pub principal: Principal,
    pub identity: Identity,
    /// Past it the token is no good, the clocks' leeway included.
    pub until: Timestamp,
}

/// Why a token is refused. Only a log reads which it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("{0}")]
    Bad(&'static str),
    #[error("the claim {0} is missing or can't be used")]
    Claim(String),
    #[error("the issuer's keys can't be had")]
    NoKeys,
}

pub struct Oidc {
    config: OidcConfig,
    keyring: Arc<Keyring>,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    typ: Option<String>,
    crit: Option<Value>,
}

impl Oidc {
    pub fn new(config: OidcConfig) -> Result<Self, String> {
        let place = match &config.jwks_url {
            Some(url) => Place::Jwks(read_url(url).map_err(str::to_owned)?),
            None => Place::discover(&config.issuer).map_err(str::to_owned)?,
        };
        Ok(Self { keyring: Arc::new(Keyring::new(place)?), config })
    }

    /// Whether a token says it is of this issuer: then it is for us to check, and nobody else's.
    pub fn is_of_issuer(&self, token: &Secret) -> bool {
        let payload = token.expose().split('.').nth(1).filter(|p| p.len() <= MAX_TOKEN_BYTES);
        let claims = payload.and_then(decode::<Map<String, Value>>);
        claims.is_some_and(|c| c.get("iss").and_then(Value::as_str) == Some(&self.config.issuer))
    }

    pub async fn verify(&self, token: &Secret, now: Timestamp) -> Result<Vouched, Refused> {
        let token = token.expose();
        if token.len() > MAX_TOKEN_BYTES {
            return Err(Refused::Bad("it is too long"));
        }
        let malformed = || Refused::Bad("it is malformed");
        let (signed, signature) = token.rsplit_once('.').ok_or_else(malformed)?;
        let (header, payload) = signed.split_once('.').ok_or_else(malformed)?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| malformed())?;
        let header: Header = decode(header).ok_or_else(malformed)?;
        if header.crit.is_some() {
            return Err(Refused::Bad("it has a critical header"));
        }
        if header.typ.as_ref().is_some_and(|t| !TYPES.contains(&t.to_ascii_lowercase().trim_start_matches("application/"))) {
            return Err(Refused::Bad("it is another kind of token"));
        }
        let algorithm = Algorithm::from_word(&header.alg).filter(|a| self.config.algorithms.contains(a));
        let algorithm = algorithm.ok_or(Refused::Bad("its algorithm is not allowed"))?;
        let claims: Map<String, Value> = decode(payload).ok_or_else(malformed)?;
        // Before any key is fetched for it: what can't be good must not cost the issuer a question.
        let until = self.check_claims(&claims, now)?;
        let fits = |key: &jwk::Jwk| key.algorithm() == algorithm && (header.kid.is_none() || key.kid == header.kid);
        let keys = self.keyring.keys(|known| known.iter().any(fits), now).await.ok_or(Refused::NoKeys)?;
        let mut fitting = keys.iter().filter(|k| fits(k));
        let key = fitting.next().ok_or(Refused::Bad("its key is not the issuer's"))?;
        if header.kid.is_none() && fitting.next().is_some() {
            return Err(Refused::Bad("it names no key, and the issuer has several"));
        }
        if !key.has_signed(signed.as_bytes(), &signature) {
            return Err(Refused::Bad("its signature is wrong"));
        }
        self.vouched(&claims, until)
    }

    fn check_claims(&self, claims: &Map<String, Value>, now: Timestamp) -> Result<Timestamp, Refused> {
        let config = &self.config;
        if claims.get("iss").and_then(Value::as_str) != Some(&config.issuer) {
            return Err(Refused::Bad("it is of another issuer"));
        }
        let is_meant = match claims.get("aud") {
            Some(Value::String(one)) => config.audience.contains(one),
            Some(Value::Array(many)) => many.iter().filter_map(Value::as_str).any(|a| config.audience.contains(a)),
            _ => false,
        };
        if !is_meant {
            return Err(Refused::Bad("it is meant for another audience"));
        }
        let moment = |name: &str| match claims.get(name) {
            None => Ok(None),
            Some(value) => seconds(value).map(Some).ok_or_else(|| Refused::Claim(name.to_owned())),
        };
        let leeway = i64::from(config.leeway_seconds);
        let end = moment("exp")?.ok_or_else(|| Refused::Claim("exp".to_owned()))?.saturating_add(leeway);
        if end <= now.unix() {
            return Err(Refused::Bad("it has expired"));
        }
        for name in ["nbf", "iat"] {
            if moment(name)?.is_some_and(|t| t.saturating_sub(leeway) > now.unix()) {
                return Err(Refused::Bad("it is not good yet"));
            }
        }
        Ok(Timestamp::from_unix(end))
    }

    fn vouched(&self, claims: &Map<String, Value>, until: Timestamp) -> Result<Vouched, Refused> {
        let config = &self.config;
        let word = |name: &str| {
            let value = claims.get(name).and_then(Value::as_str).filter(|v| is_external_id(v));
            value.map(str::to_owned).ok_or_else(|| Refused::Claim(name.to_owned()))
        };
        let workspace = match &config.workspace_claim {
            Some(claim) => word(claim)?,
            None => config.workspace.clone(),
        };
        if !config.workspaces.is_empty() && !config.workspaces.contains(&workspace) {
            return Err(Refused::Bad("its workspace is not let in"));
        }
        let name = format!("{}{}", config.principal_prefix, word(&config.principal_claim)?);
        if !is_external_id(&name) {
            return Err(Refused::Claim(config.principal_claim.clone()));
        }
        let principal = Principal { workspace, name, kind: self.kind(claims) };
        Ok(Vouched { principal, identity: Identity { issuer: config.issuer.clone(), subject: word("sub")? }, until })
    }

    /// The most that any of the claim's values stands for.
    fn kind(&self, claims: &Map<String, Value>) -> PrincipalKind {
        let config = &self.config;
        let values: Vec<&str> = match config.kind_claim.as_ref().and_then(|c| claims.get(c)) {
            Some(Value::String(one)) => vec![one],
            Some(Value::Array(many)) => many.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let stands_for = |kind| config.kinds.iter().any(|(value, k)| *k == kind && values.contains(&value.as_str()));
        let found = [PrincipalKind::Operator, PrincipalKind::Human, PrincipalKind::Agent].into_iter().find(|k| stands_for(*k));
        found.unwrap_or(config.kind)
    }
}

fn decode<T: serde::de::DeserializeOwned>(part: &str) -> Option<T> {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).ok()?).ok()
}

/// Whole seconds; some issuers write them as a fraction.
fn seconds(value: &Value) -> Option<i64> {
    // A fraction is cut off, and what is out of range is no time.
    value
        .as_i64()
        .or_else(|| value.as_f64().filter(|f| f.is_finite() && f.abs() < 1e12).map(|f| f as i64))
        .filter(|t| (0..1 << 40).contains(t))
}
