//! Webhook signatures: HMAC-SHA256 over timestamp and body, with a shared secret.

use std::time::Duration;

use cobox_protocol::{ApiError, ErrorCode, Secret, Timestamp};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::audit_hash::from_hex;

/// Maximum difference between a notice's timestamp and now: clocks differ, and senders retry for a while.
const WINDOW: Duration = Duration::from_secs(300);
/// Shortest accepted secret, in bytes: a shorter one might be guessed.
pub const MIN_SECRET_BYTES: usize = 16;
/// Prefix of a signature, so that other algorithms can be added.
const VERSION: &str = "v1=";

pub struct Webhook(Secret);

impl Webhook {
    /// `None` when the secret is too short.
    pub fn new(secret: &str) -> Option<Self> {
        let secret = secret.trim();
        (secret.len() >= MIN_SECRET_BYTES).then(|| Self(Secret::new(secret)))
    }

    /// Returns when the notice was sent, after verifying that its sender has the secret and that it is recent.
    /// `signature` may hold several, separated by commas, while a sender changes its secret: one valid signature is
    /// enough.
    pub fn verify(&self, timestamp: &str, signature: &str, body: &[u8], now: Timestamp) -> Result<Timestamp, ApiError> {
        let refused = |why: &str| ApiError::new(ErrorCode::Unauthenticated, why.to_owned());
        let sent_at: i64 = timestamp.parse().map_err(|_| refused("x-cobox-timestamp: must be whole seconds since 1970"))?;
        let is_genuine = signature.split(',').filter_map(|s| from_hex(s.trim().strip_prefix(VERSION)?)).any(|mac| {
            let expected = Hmac::<Sha256>::new_from_slice(self.0.expose().as_bytes());
            // Compares in constant time.
            expected.is_ok_and(|hmac| hmac.chain_update(timestamp).chain_update(".").chain_update(body).verify_slice(&mac).is_ok())
        });
        // Before the timestamp is checked: an unauthenticated client must learn nothing about this clock.
        if !is_genuine {
            return Err(refused("x-cobox-signature: is not v1= and the HMAC-SHA256 of the timestamp, a dot and the body"));
        }
        if now.unix().abs_diff(sent_at) > WINDOW.as_secs() {
            return Err(refused("x-cobox-timestamp: is too far from now; check the clocks"));
        }
        Ok(Timestamp::from_unix(sent_at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "0123456789abcdef";

    fn sign(secret: &str, timestamp: &str, body: &[u8]) -> String {
        let mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
        let mac = mac.chain_update(timestamp).chain_update(".").chain_update(body).finalize().into_bytes();
        VERSION.to_owned() + &mac.iter().map(|b| format!("{b:02x}")).collect::<String>()
    }

    #[test]
    fn a_notice_is_accepted_with_the_secret_and_only_while_recent() {
        let (webhook, now) = (Webhook::new(&format!("{SECRET}\n")).unwrap(), Timestamp::from_unix(10_000));
        let verify = |timestamp: &str, signature: &str, body: &[u8]| webhook.verify(timestamp, signature, body, now).is_ok();
        assert!(verify("10000", &sign(SECRET, "10000", b"{}"), b"{}"));
        assert!(verify("9700", &sign(SECRET, "9700", b"{}"), b"{}"));
        assert!(verify("10300", &sign(SECRET, "10300", b"{}"), b"{}"));
        let two = format!("{}, {}", sign("another-secret-16", "10000", b"{}"), sign(SECRET, "10000", b"{}"));
        assert!(verify("10000", &two, b"{}"));
        for (timestamp, signature, body) in [
            ("9699", sign(SECRET, "9699", b"{}"), &b"{}"[..]),
            ("10301", sign(SECRET, "10301", b"{}"), b"{}"),
            ("10000", sign(SECRET, "10001", b"{}"), b"{}"),
            ("10000", sign(SECRET, "10000", b"{}"), b"{ }"),
            ("10000", sign("another-secret-16", "10000", b"{}"), b"{}"),
            ("10000", sign(SECRET, "10000", b"{}").replace("v1=", ""), b"{}"),
            ("10000", "v1=".to_owned(), b"{}"),
            ("10000", format!("v1={}", "ü".repeat(32)), b"{}"),
            ("now", sign(SECRET, "now", b"{}"), b"{}"),
        ] {
            assert!(!verify(timestamp, &signature, body), "{timestamp} {signature}");
        }
        assert!(Webhook::new("short").is_none());
        assert_eq!(from_hex(&"0f".repeat(32)), Some([15; 32]));
        assert_eq!(from_hex(&"+f".repeat(32)), None);
    }
}
