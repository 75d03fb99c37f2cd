//! OIDC as a second authentication method: verifies an issuer's token with its public keys and maps it to a principal.

mod jwk;
mod keyring;
mod settings;

use std::sync::Arc;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_protocol::{Secret, Timestamp, id::is_external_id, key::PrincipalKind};
use serde::Deserialize;
use serde_json::{Map, Value};

pub use jwk::Algorithm;
use keyring::{KeySource, Keyring};
pub use settings::OidcConfig;

use crate::{
    domain::model::{Identity, Principal},
    outbound::read_url,
};

/// Maximum size of a token, in bytes. Tokens with a hundred groups stay below it.
const MAX_TOKEN_BYTES: usize = 16 * 1024;
/// Accepted values of `typ`. Other tokens, such as logout tokens, are signed with the same keys but have other
/// meanings.
const TYPES: [&str; 2] = ["jwt", "at+jwt"];

/// The principal and identity of a verified token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedIdentity {
    pub principal: Principal,
    pub identity: Identity,
    /// When the token becomes invalid, including the leeway for clock skew.
    pub until: Timestamp,
}

/// Why a token is refused. The reason appears only in the log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OidcRefusal {
    #[error("{0}")]
    Bad(&'static str),
    #[error("the claim {0} is missing or can't be used")]
    Claim(String),
    #[error("the issuer's keys can't be fetched")]
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
            Some(url) => KeySource::Jwks(read_url(url).map_err(str::to_owned)?),
            None => KeySource::discover(&config.issuer).map_err(str::to_owned)?,
        };
        Ok(Self { keyring: Arc::new(Keyring::new(place)?), config })
    }

    /// Returns true if the token claims this issuer. Such a token must be verified here and by no other method.
    pub fn is_of_issuer(&self, token: &Secret) -> bool {
        let payload = token.expose().split('.').nth(1).filter(|p| p.len() <= MAX_TOKEN_BYTES);
        let claims = payload.and_then(decode::<Map<String, Value>>);
        claims.is_some_and(|c| c.get("iss").and_then(Value::as_str) == Some(&self.config.issuer))
    }

    pub async fn verify(&self, token: &Secret, now: Timestamp) -> Result<VerifiedIdentity, OidcRefusal> {
        let token = token.expose();
        if token.len() > MAX_TOKEN_BYTES {
            return Err(OidcRefusal::Bad("it is too long"));
        }
        let malformed = || OidcRefusal::Bad("it is malformed");
        let (signed, signature) = token.rsplit_once('.').ok_or_else(malformed)?;
        let (header, payload) = signed.split_once('.').ok_or_else(malformed)?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| malformed())?;
        let header: Header = decode(header).ok_or_else(malformed)?;
        if header.crit.is_some() {
            return Err(OidcRefusal::Bad("it has a critical header"));
        }
        if header.typ.as_ref().is_some_and(|t| !TYPES.contains(&t.to_ascii_lowercase().trim_start_matches("application/"))) {
            return Err(OidcRefusal::Bad("it is another kind of token"));
        }
        let algorithm = Algorithm::parse(&header.alg).filter(|a| self.config.algorithms.contains(a));
        let algorithm = algorithm.ok_or(OidcRefusal::Bad("its algorithm is not allowed"))?;
        let claims: Map<String, Value> = decode(payload).ok_or_else(malformed)?;
        // Check the claims before fetching any key: an invalid token must not cause a request to the issuer.
        let until = self.check_claims(&claims, now)?;
        let fits = |key: &jwk::Jwk| key.algorithm() == algorithm && (header.kid.is_none() || key.kid == header.kid);
        let keys = self.keyring.keys(|known| known.iter().any(fits), now).await.ok_or(OidcRefusal::NoKeys)?;
        let mut fitting = keys.iter().filter(|k| fits(k));
        let key = fitting.next().ok_or(OidcRefusal::Bad("its key is not the issuer's"))?;
        if header.kid.is_none() && fitting.next().is_some() {
            return Err(OidcRefusal::Bad("it names no key, and the issuer has several"));
        }
        if !key.has_signed(signed.as_bytes(), &signature) {
            return Err(OidcRefusal::Bad("its signature is wrong"));
        }
        self.verified_identity(&claims, until)
    }

    fn check_claims(&self, claims: &Map<String, Value>, now: Timestamp) -> Result<Timestamp, OidcRefusal> {
        let config = &self.config;
        if claims.get("iss").and_then(Value::as_str) != Some(&config.issuer) {
            return Err(OidcRefusal::Bad("it was issued by another issuer"));
        }
        let is_meant = match claims.get("aud") {
            Some(Value::String(one)) => config.audience.contains(one),
            Some(Value::Array(many)) => many.iter().filter_map(Value::as_str).any(|a| config.audience.contains(a)),
            _ => false,
        };
        if !is_meant {
            return Err(OidcRefusal::Bad("it is meant for another audience"));
        }
        let moment = |name: &str| match claims.get(name) {
            None => Ok(None),
            Some(value) => seconds(value).map(Some).ok_or_else(|| OidcRefusal::Claim(name.to_owned())),
        };
        let leeway = i64::from(config.leeway_seconds);
        let end = moment("exp")?.ok_or_else(|| OidcRefusal::Claim("exp".to_owned()))?.saturating_add(leeway);
        if end <= now.unix() {
            return Err(OidcRefusal::Bad("it has expired"));
        }
        for name in ["nbf", "iat"] {
            if moment(name)?.is_some_and(|t| t.saturating_sub(leeway) > now.unix()) {
                return Err(OidcRefusal::Bad("it is not valid yet"));
            }
        }
        Ok(Timestamp::from_unix(end))
    }

    fn verified_identity(&self, claims: &Map<String, Value>, until: Timestamp) -> Result<VerifiedIdentity, OidcRefusal> {
        let config = &self.config;
        let word = |name: &str| {
            let value = claims.get(name).and_then(Value::as_str).filter(|v| is_external_id(v));
            value.map(str::to_owned).ok_or_else(|| OidcRefusal::Claim(name.to_owned()))
        };
        let workspace = match &config.workspace_claim {
            Some(claim) => word(claim)?,
            None => config.workspace.clone(),
        };
        if !config.workspaces.is_empty() && !config.workspaces.contains(&workspace) {
            return Err(OidcRefusal::Bad("its workspace is not allowed"));
        }
        let name = format!("{}{}", config.principal_prefix, word(&config.principal_claim)?);
        if !is_external_id(&name) {
            return Err(OidcRefusal::Claim(config.principal_claim.clone()));
        }
        let principal = Principal { workspace, name, kind: self.kind(claims) };
        Ok(VerifiedIdentity { principal, identity: Identity { issuer: config.issuer.clone(), subject: word("sub")? }, until })
    }

    /// The most privileged kind that any of the claim's values maps to.
    fn kind(&self, claims: &Map<String, Value>) -> PrincipalKind {
        let config = &self.config;
        let values: Vec<&str> = match config.kind_claim.as_ref().and_then(|c| claims.get(c)) {
            Some(Value::String(one)) => vec![one],
            Some(Value::Array(many)) => many.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let maps_to = |kind| config.kinds.iter().any(|(value, k)| *k == kind && values.contains(&value.as_str()));
        let found = [PrincipalKind::Operator, PrincipalKind::Human, PrincipalKind::Agent].into_iter().find(|k| maps_to(*k));
        found.unwrap_or(config.kind)
    }
}

fn decode<T: serde::de::DeserializeOwned>(part: &str) -> Option<T> {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).ok()?).ok()
}

/// Reads a timestamp in whole seconds. Some issuers write a fraction, which is truncated.
fn seconds(value: &Value) -> Option<i64> {
    // Values that are out of range are rejected.
    value
        .as_i64()
        .or_else(|| value.as_f64().filter(|f| f.is_finite() && f.abs() < 1e12).map(|f| f as i64))
        .filter(|t| (0..1 << 40).contains(t))
}
