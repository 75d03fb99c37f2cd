//! Signing keys. HKDF derives one key per sandbox and generation from one master key, so that no keys have to be
//! stored.

use std::fmt;

use base64::{Engine, engine::general_purpose::STANDARD, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_protocol::{
    SandboxId, Secret,
    control::{Alg, VerifyKeySpec},
};
use ed25519_dalek::{Signer, SigningKey as EdSigningKey};
use hkdf::Hkdf;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use zeroize::Zeroize;

use crate::{
    Claims,
    verify::{Header, LINK_TYP, TYP},
};

pub(crate) type HmacSha256 = Hmac<Sha256>;

/// Separates the uses of the master key: bytes derived for another use never equal these.
const HKDF_LABEL: &str = "cobox/sandbox-token-key/v1";
const FINGERPRINT_LABEL: &str = "cobox/master-key-fingerprint/v1";
const AUDIT_SEAL_LABEL: &str = "cobox audit seal";

/// The deployment's only secret. It allows minting tokens for every sandbox.
pub struct MasterKey([u8; 32]);

impl MasterKey {
    pub const LEN: usize = 32;

    pub fn generate() -> Self {
        let mut bytes = [0u8; Self::LEN];
        // Starting with a predictable master key would be worse than not starting.
        getrandom::fill(&mut bytes).expect("the kernel's random source is available");
        Self(bytes)
    }
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }
    /// The key's bytes, only for the file that stores it.
    pub fn expose(&self) -> &[u8; Self::LEN] {
        &self.0
    }

    /// Identifies the key without revealing anything about it.
    pub fn fingerprint(&self) -> String {
        let mut bytes = [0u8; 16];
        Hkdf::<Sha256>::new(None, &self.0)
            .expand(FINGERPRINT_LABEL.as_bytes(), &mut bytes)
            .expect("16 bytes are within the output limit of HKDF-SHA256");
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// The key with which the broker seals its record that it removed the oldest audit records.
    pub fn audit_seal(&self) -> [u8; 32] {
        let mut bytes = [0u8; 32];
        Hkdf::<Sha256>::new(None, &self.0)
            .expand(AUDIT_SEAL_LABEL.as_bytes(), &mut bytes)
            .expect("32 bytes are within the output limit of HKDF-SHA256");
        bytes
    }

    pub fn derive(&self, sandbox: &SandboxId, generation: u32, alg: Alg) -> SigningKey {
        let alg_name = match alg {
            Alg::EdDsa => "EdDSA",
            Alg::Hs256 => "HS256",
        };
        let info = format!("{HKDF_LABEL}\0{alg_name}\0{sandbox}\0{generation}");
        let mut seed = [0u8; 32];
        Hkdf::<Sha256>::new(None, &self.0).expand(info.as_bytes(), &mut seed).expect("32 bytes are within the output limit of HKDF-SHA256");
        let key = match alg {
            Alg::EdDsa => KeyKind::EdDsa(Box::new(EdSigningKey::from_bytes(&seed))),
            Alg::Hs256 => KeyKind::Hs256(seed),
        };
        seed.zeroize();
        SigningKey { kid: key_id(sandbox, generation), key }
    }
}

impl Drop for MasterKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[master key]")
    }
}

/// The `kid` of a sandbox's key.
pub fn key_id(sandbox: &SandboxId, generation: u32) -> String {
    format!("{sandbox}.{generation}")
}

enum KeyKind {
    EdDsa(Box<EdSigningKey>),
    Hs256([u8; 32]),
}

impl Drop for KeyKind {
    fn drop(&mut self) {
        if let KeyKind::Hs256(bytes) = self {
            bytes.zeroize();
        }
    }
}

/// Signs tokens for one sandbox.
pub struct SigningKey {
    kid: String,
    key: KeyKind,
}

impl SigningKey {
    pub fn kid(&self) -> &str {
        &self.kid
    }

    fn alg(&self) -> Alg {
        match self.key {
            KeyKind::EdDsa(_) => Alg::EdDsa,
            KeyKind::Hs256(_) => Alg::Hs256,
        }
    }

    pub fn mint(&self, claims: &Claims) -> Secret {
        self.sign(claims, TYP)
    }

    /// Mints a file link. The `typ` in its header keeps it from being accepted as a token.
    pub fn mint_link(&self, claims: &Claims) -> Secret {
        self.sign(claims, LINK_TYP)
    }

    fn sign(&self, claims: &Claims, typ: &str) -> Secret {
        let header = Header::new(self.alg(), &self.kid, typ);
        let part = |json: serde_json::Result<Vec<u8>>| URL_SAFE_NO_PAD.encode(json.expect("strings and numbers always serialise"));
        let signed = format!("{}.{}", part(serde_json::to_vec(&header)), part(serde_json::to_vec(claims)));
        let signature = match &self.key {
            KeyKind::EdDsa(k) => URL_SAFE_NO_PAD.encode(k.sign(signed.as_bytes()).to_bytes()),
            KeyKind::Hs256(k) => {
                let mut mac = HmacSha256::new_from_slice(k).expect("HMAC accepts keys of any length");
                mac.update(signed.as_bytes());
                URL_SAFE_NO_PAD.encode(mac.finalize().into_bytes())
            }
        };
        Secret::new(format!("{signed}.{signature}"))
    }

    /// The key for a verifier: for EdDSA, the public key.
    pub fn verify_spec(&self) -> VerifyKeySpec {
        let key = match &self.key {
            KeyKind::EdDsa(k) => STANDARD.encode(k.verifying_key().as_bytes()),
            KeyKind::Hs256(k) => STANDARD.encode(k),
        };
        VerifyKeySpec { kid: self.kid.clone(), alg: self.alg(), key: Secret::new(key) }
    }
}
