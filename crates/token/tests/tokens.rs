//! Tokens of honest clients and of attackers.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_protocol::{
    CapabilitySet, SandboxId, Timestamp, TokenId,
    control::{Alg, Revocation},
    key::PrincipalKind,
};
use cobox_token::{Actor, Claims, Keyset, MasterKey, RevocationView, SigningKey, TokenError};
use proptest::prelude::*;

const NOW: i64 = 1_800_000_000;

fn claims(aud: &SandboxId) -> Claims {
    Claims {
        iss: "cobox".into(),
        sub: "ada".into(),
        aud: aud.clone(),
        sid: Some("ssn_1".into()),
        thread_id: Some("t".into()),
        scope: CapabilitySet::HUMAN_DEFAULT,
        iat: NOW,
        nbf: NOW,
        exp: NOW + 900,
        jti: TokenId::new().to_string(),
        act: Actor { kind: PrincipalKind::Human, id: "ada".into() },
        generation: 1,
        grant: "g".into(),
        parent: None,
        via: Vec::new(),
        file: None,
    }
}

fn setup(alg: Alg) -> (SandboxId, SigningKey, Keyset) {
    let id = SandboxId::new();
    let key = MasterKey::from_bytes([7; 32]).derive(&id, 1, alg);
    let set = Keyset::new("cobox", &id, &[key.verify_spec()]).unwrap();
    (id, key, set)
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_unix(NOW + seconds)
}

/// Replaces the header of a token, as an attacker without the key would.
fn with_header(token: &str, header: serde_json::Value) -> String {
    let rest = token.split_once('.').unwrap().1;
    format!("{}.{rest}", URL_SAFE_NO_PAD.encode(header.to_string()))
}

#[test]
fn both_algorithms_verify_their_tokens_and_keep_every_claim() {
    for alg in [Alg::EdDsa, Alg::Hs256] {
        let (id, key, set) = setup(alg);
        let c = claims(&id);
        assert_eq!(set.verify(key.mint(&c).expose(), at(0)).unwrap(), c);
    }
}

#[test]
fn the_scope_claim_uses_the_older_spelling() {
    let (id, key, _) = setup(Alg::EdDsa);
    let token = key.mint(&claims(&id));
    let payload = URL_SAFE_NO_PAD.decode(token.expose().split('.').nth(1).unwrap()).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&payload).unwrap();
    assert_eq!(json["scope"], "fs:rw process shell");
    assert_eq!(json["gen"], 1);
    assert_eq!(json["act"], serde_json::json!({"type": "human", "id": "ada"}));
}

#[test]
fn time_is_checked_with_five_seconds_of_leeway() {
    let (id, key, set) = setup(Alg::EdDsa);
    let token = key.mint(&claims(&id));
    assert!(set.verify(token.expose(), at(904)).is_ok());
    assert_eq!(set.verify(token.expose(), at(905)), Err(TokenError::Expired));
    assert!(set.verify(token.expose(), at(-5)).is_ok());
    assert_eq!(set.verify(token.expose(), at(-6)), Err(TokenError::NotYetValid));
}

#[test]
fn forged_tokens_are_rejected() {
    let (id, key, set) = setup(Alg::EdDsa);
    let good = key.mint(&claims(&id)).expose().to_owned();
    let kid = key.kid().to_owned();
    let no_signature = format!("{}.", good.rsplit_once('.').unwrap().0);
    let other_master = MasterKey::from_bytes([8; 32]).derive(&id, 1, Alg::EdDsa).mint(&claims(&id)).expose().to_owned();
    let other_id = SandboxId::new();
    let other_sandbox = MasterKey::from_bytes([7; 32]).derive(&other_id, 1, Alg::EdDsa);
    let next_generation = MasterKey::from_bytes([7; 32]).derive(&id, 2, Alg::EdDsa);
    let mut foreign = claims(&id);
    foreign.iss = "another".into();
    let mut other_audience = claims(&id);
    other_audience.aud = other_id.clone();

    // The classic algorithm confusion: the public key used as an HMAC secret.
    let public = key.verify_spec();
    let mut confused = public.clone();
    confused.alg = Alg::Hs256;
    assert!(Keyset::new("cobox", &id, &[confused]).is_ok());

    for (name, token, expected) in [
        ("alg none", with_header(&no_signature, serde_json::json!({"alg": "none", "typ": "JWT", "kid": kid})), TokenError::BadSignature),
        (
            "alg none, signature kept",
            with_header(&good, serde_json::json!({"alg": "none", "typ": "JWT", "kid": kid})),
            TokenError::BadSignature,
        ),
        (
            "alg HS256 on an EdDSA key",
            with_header(&good, serde_json::json!({"alg": "HS256", "typ": "JWT", "kid": kid})),
            TokenError::BadSignature,
        ),
        ("no kid", with_header(&good, serde_json::json!({"alg": "EdDSA", "typ": "JWT"})), TokenError::Malformed),
        ("unknown kid", with_header(&good, serde_json::json!({"alg": "EdDSA", "typ": "JWT", "kid": "x"})), TokenError::UnknownKey),
        ("crit", with_header(&good, serde_json::json!({"alg": "EdDSA", "typ": "JWT", "kid": kid, "crit": ["x"]})), TokenError::Malformed),
        ("another typ", with_header(&good, serde_json::json!({"alg": "EdDSA", "typ": "file", "kid": kid})), TokenError::Malformed),
        ("another master key", other_master, TokenError::BadSignature),
        ("another sandbox's key", other_sandbox.mint(&other_audience).expose().to_owned(), TokenError::UnknownKey),
        ("a generation not pushed", next_generation.mint(&claims(&id)).expose().to_owned(), TokenError::UnknownKey),
        ("another issuer", key.mint(&foreign).expose().to_owned(), TokenError::WrongIssuer),
        ("another audience", key.mint(&other_audience).expose().to_owned(), TokenError::WrongAudience),
        ("empty", String::new(), TokenError::Malformed),
        ("dots", "..".into(), TokenError::Malformed),
        ("too long", "a".repeat(10_000), TokenError::Malformed),
    ] {
        assert_eq!(set.verify(&token, at(1)), Err(expected), "{name}");
    }
}

/// Keys and seals that deployed brokers derived from their master key: another result would end every token and fail every audit.
#[test]
fn keys_derived_from_a_master_key_never_change() {
    let master = MasterKey::from_bytes([7; 32]);
    let id: SandboxId = "sb_01h455vb4pex5vsknk084sn02q".parse().unwrap();
    let public = master.derive(&id, 3, Alg::EdDsa);
    let secret = master.derive(&id, 3, Alg::Hs256);
    assert_eq!(master.fingerprint(), "NcMtBudNRPc4lr2vbqQkyg");
    assert_eq!(URL_SAFE_NO_PAD.encode(master.audit_seal()), "oRuELMZcuTF4WKZv2Fy7T70dqHhNJ48XqGMgMfWbNFY");
    assert_eq!(public.kid(), "sb_01h455vb4pex5vsknk084sn02q.3");
    assert_eq!(public.verify_spec().key.expose(), "7WT3QSdLyWYtMVIyGCgLtrsgDBlild7vW7ge7VwHnNk=");
    assert_eq!(secret.verify_spec().key.expose(), "lmWNfVJ708pqmXpOvjFNml+JSEY/Nhbey1hr5aJLKP4=");
    let claims = Claims { jti: "tok_1".into(), ..claims(&id) };
    // It covers the header and every claim.
    let signature = |key: &SigningKey| key.mint(&claims).expose().rsplit_once('.').unwrap().1.to_owned();
    assert_eq!(signature(&secret), "GlFPqiOI2mB0FbG2NdckvkLFZuYzyaQPYtNizYZO3tc");
    assert_eq!(signature(&public), "PG3ZaoMOZi_1L2t-J5JsVf2PKf-tvkjEIx9rxaKoTXnBAqVJ6Wd4_QmIGKJiEup3hXRel9d9fWttoh49TldiDQ");
}

#[test]
fn keys_depend_only_on_sandbox_generation_and_algorithm() {
    let master = MasterKey::from_bytes([1; 32]);
    let (a, b) = (SandboxId::new(), SandboxId::new());
    let key = |id: &SandboxId, generation, alg| master.derive(id, generation, alg).verify_spec().key.expose().to_owned();
    assert_eq!(key(&a, 1, Alg::EdDsa), key(&a, 1, Alg::EdDsa));
    assert_ne!(key(&a, 1, Alg::EdDsa), key(&b, 1, Alg::EdDsa));
    assert_ne!(key(&a, 1, Alg::EdDsa), key(&a, 2, Alg::EdDsa));
    assert_ne!(key(&a, 1, Alg::EdDsa), key(&a, 1, Alg::Hs256));
}

#[test]
fn tokens_are_revoked_by_id_grant_session_and_principal() {
    let c = claims(&SandboxId::new());
    assert!(!RevocationView::default().covers(&c));
    for r in [
        Revocation::Jti(c.jti.clone()),
        Revocation::Grant("g".into()),
        Revocation::Session("ssn_1".into()),
        Revocation::Principal("ada".into()),
    ] {
        assert!(RevocationView::new(std::slice::from_ref(&r)).covers(&c), "{r:?}");
    }
    assert!(!RevocationView::new(&[Revocation::Session("ssn_2".into())]).covers(&c));
}

proptest! {
    #[test]
    fn a_token_with_any_changed_byte_is_rejected(pos in 0usize..600, to in 0u8..128) {
        let (id, key, set) = setup(Alg::EdDsa);
        let good = key.mint(&claims(&id)).expose().to_owned();
        let mut bytes = good.clone().into_bytes();
        let pos = pos % bytes.len();
        prop_assume!(bytes[pos] != to);
        bytes[pos] = to;
        let changed = String::from_utf8(bytes).unwrap();
        prop_assert!(set.verify(&changed, at(1)).is_err());
    }

    #[test]
    fn arbitrary_text_is_rejected_without_a_panic(s in ".{0,200}") {
        let (_, _, set) = setup(Alg::EdDsa);
        prop_assert!(set.verify(&s, at(0)).is_err());
    }
}
