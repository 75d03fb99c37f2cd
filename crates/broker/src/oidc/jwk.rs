//! An issuer's public keys (JWKS) and the verification of signatures. The key alone determines the algorithm.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use ring::signature::{self, RsaPublicKeyComponents, UnparsedPublicKey};
use serde::{Deserialize, Serialize};

/// Maximum number of keys of one issuer; real issuers have a handful.
const MAX_KEYS: usize = 100;
/// Maximum length of a key component, in bytes: 8192 bits, the longest RSA key that is supported.
const MAX_PART_BYTES: usize = 1024;
/// Length of a P-256 coordinate and of an Ed25519 key, in bytes.
const CURVE_BYTES: usize = 32;

/// Signature algorithms with which only the issuer can sign. `none` and the HMACs are excluded: the key that
/// verifies an HMAC can also create one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Algorithm {
    #[serde(rename = "RS256")]
    Rs256,
    #[serde(rename = "ES256")]
    Es256,
    #[serde(rename = "EdDSA")]
    EdDsa,
}

impl Algorithm {
    pub const ALL: [Algorithm; 3] = [Algorithm::Rs256, Algorithm::Es256, Algorithm::EdDsa];

    pub fn parse(word: &str) -> Option<Self> {
        match word {
            "RS256" => Some(Algorithm::Rs256),
            "ES256" => Some(Algorithm::Es256),
            "EdDSA" => Some(Algorithm::EdDsa),
            _ => None,
        }
    }
}

enum Public {
    Rsa(RsaPublicKeyComponents<Vec<u8>>),
    P256(Vec<u8>),
    Ed25519(Vec<u8>),
}

pub struct Jwk {
    pub kid: Option<String>,
    public: Public,
}

impl Jwk {
    pub fn algorithm(&self) -> Algorithm {
        match self.public {
            Public::Rsa(_) => Algorithm::Rs256,
            Public::P256(_) => Algorithm::Es256,
            Public::Ed25519(_) => Algorithm::EdDsa,
        }
    }

    pub fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        let verified = match &self.public {
            // ring rejects keys shorter than 2048 bits.
            Public::Rsa(key) => key.verify(&signature::RSA_PKCS1_2048_8192_SHA256, message, signature),
            Public::P256(point) => UnparsedPublicKey::new(&signature::ECDSA_P256_SHA256_FIXED, point).verify(message, signature),
            Public::Ed25519(key) => UnparsedPublicKey::new(&signature::ED25519, key).verify(message, signature),
        };
        verified.is_ok()
    }
}

#[derive(Deserialize)]
struct Document {
    keys: Vec<serde_json::Value>,
}

#[derive(Deserialize)]
struct KeyEntry {
    kty: String,
    kid: Option<String>,
    #[serde(rename = "use")]
    used_for: Option<String>,
    alg: Option<String>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

/// Reads the usable keys of a JWKS document. Keys of unsupported types are skipped: they are meant for other consumers.
pub fn read(document: &[u8]) -> Result<Vec<Jwk>, &'static str> {
    let document: Document = serde_json::from_slice(document).map_err(|_| "it is not a JWKS document")?;
    if document.keys.len() > MAX_KEYS {
        return Err("it has too many keys");
    }
    let keys: Vec<Jwk> =
        document.keys.into_iter().filter_map(|v| serde_json::from_value(v).ok().and_then(|e: KeyEntry| usable(&e))).collect();
    if keys.is_empty() { Err("it has no key for RS256, ES256 or EdDSA") } else { Ok(keys) }
}

fn usable(entry: &KeyEntry) -> Option<Jwk> {
    if entry.used_for.as_deref().is_some_and(|u| u != "sig") {
        return None;
    }
    let public = match (entry.kty.as_str(), entry.crv.as_deref()) {
        ("RSA", _) => Public::Rsa(RsaPublicKeyComponents { n: part(&entry.n)?, e: part(&entry.e)? }),
        ("EC", Some("P-256")) => Public::P256([&[4][..], &coordinate(&entry.x)?, &coordinate(&entry.y)?].concat()),
        ("OKP", Some("Ed25519")) => Public::Ed25519(coordinate(&entry.x)?),
        _ => return None,
    };
    let key = Jwk { kid: entry.kid.clone(), public };
    // A key whose `alg` names another algorithm is not used for this one.
    let is_meant = entry.alg.as_deref().is_none_or(|word| Algorithm::parse(word) == Some(key.algorithm()));
    is_meant.then_some(key)
}

fn part(text: &Option<String>) -> Option<Vec<u8>> {
    let bytes = URL_SAFE_NO_PAD.decode(text.as_ref()?).ok()?;
    // Some issuers write a redundant leading zero.
    let bytes: Vec<u8> = bytes.into_iter().skip_while(|b| *b == 0).collect();
    (!bytes.is_empty() && bytes.len() <= MAX_PART_BYTES).then_some(bytes)
}

fn coordinate(text: &Option<String>) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text.as_ref()?).ok().filter(|b| b.len() == CURVE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_other_kinds_are_skipped_and_an_empty_set_is_an_error() {
        let x = URL_SAFE_NO_PAD.encode([1; 32]);
        let good = format!(r#"{{"kty":"OKP","crv":"Ed25519","x":"{x}","kid":"a"}}"#);
        let bad = [
            r#"{"kty":"oct","k":"c2VjcmV0"}"#.to_owned(),
            format!(r#"{{"kty":"OKP","crv":"X25519","x":"{x}"}}"#),
            format!(r#"{{"kty":"OKP","crv":"Ed25519","x":"{x}","use":"enc"}}"#),
            format!(r#"{{"kty":"OKP","crv":"Ed25519","x":"{x}","alg":"HS256"}}"#),
            r#"{"kty":"EC","crv":"P-256","x":"AA","y":"AA"}"#.to_owned(),
            r#"{"kty":"RSA","n":"","e":"AQAB"}"#.to_owned(),
            "3".to_owned(),
        ];
        let found = read(format!(r#"{{"keys":[{},{good}]}}"#, bad.join(",")).as_bytes()).unwrap();
        assert_eq!(found.iter().map(|k| (k.kid.as_deref(), k.algorithm())).collect::<Vec<_>>(), [(Some("a"), Algorithm::EdDsa)]);
        assert!(read(format!(r#"{{"keys":[{}]}}"#, bad.join(",")).as_bytes()).is_err());
        assert!(read(b"{}").is_err() && read(b"[").is_err());
        assert!(read(format!(r#"{{"keys":[{}]}}"#, vec![good; 101].join(",")).as_bytes()).is_err());
    }
}
