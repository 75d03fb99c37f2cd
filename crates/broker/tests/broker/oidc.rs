//! Tests of OIDC authentication against a real HTTP server in the role of the issuer, with tokens signed by real keys.

use std::{
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{Router, extract::State, http::header::LOCATION, response::IntoResponse, routing::get};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_broker::Clock;
use cobox_protocol::{Secret, key::PrincipalKind};
use hmac::{Hmac, KeyInit, Mac};
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair, RSA_PKCS1_SHA256, RsaKeyPair},
};
use serde_json::{Value, json};

use crate::harness::{Client, TestBroker, World, claims, sandbox_id};

const REFUSED: &str = "the OIDC token is not accepted here";

/// Documents of the issuer, which tests may change, with counts of the requests for them.
#[derive(Default)]
struct Documents {
    discovery: Mutex<Value>,
    keys: Mutex<Vec<u8>>,
    request_count: AtomicUsize,
}

struct Issuer {
    url: String,
    documents: Arc<Documents>,
}

impl Issuer {
    async fn start() -> Self {
        let documents = Arc::new(Documents::default());
        let router = Router::new()
            .route(
                "/.well-known/openid-configuration",
                get(|State(d): State<Arc<Documents>>| async move { d.discovery.lock().unwrap().to_string() }),
            )
            .route(
                "/jwks",
                get(|State(d): State<Arc<Documents>>| async move {
                    d.request_count.fetch_add(1, Ordering::SeqCst);
                    d.keys.lock().unwrap().clone()
                }),
            )
            .route("/elsewhere", get(|| async { (http::StatusCode::FOUND, [(LOCATION, "/jwks")]).into_response() }))
            .with_state(documents.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        *documents.discovery.lock().unwrap() = json!({ "issuer": url, "jwks_uri": format!("{url}/jwks") });
        let issuer = Self { url, documents };
        issuer.has(&[rsa(), ec(), ed()]);
        issuer
    }

    fn has(&self, keys: &[&Key]) {
        let keys: Vec<Value> = keys.iter().map(|k| k.jwk.clone()).collect();
        *self.documents.keys.lock().unwrap() = json!({ "keys": keys }).to_string().into_bytes();
    }

    fn request_count(&self) -> usize {
        self.documents.request_count.load(Ordering::SeqCst)
    }

    /// A world whose broker trusts this issuer; `more` contains further lines of its configuration.
    fn world(&self, more: &str) -> World {
        let mut world = World::new();
        world.config.oidc = Some(toml::from_str(&format!("issuer = {:?}\naudience = \"cobox\"\n{more}", self.url)).unwrap());
        world
    }

    fn claims(&self, world: &World, sub: &str) -> Value {
        let now = world.clock.now().unix();
        json!({ "iss": self.url, "aud": "cobox", "sub": sub, "iat": now, "exp": now + 600 })
    }
}

enum Private {
    Rsa(RsaKeyPair),
    Ec(EcdsaKeyPair),
    Ed(Ed25519KeyPair),
}

struct Key {
    alg: &'static str,
    jwk: Value,
    private: Private,
}

impl Key {
    fn sign(&self, header: &Value, claims: &Value) -> String {
        let message = format!("{}.{}", encode(header), encode(claims));
        let random = SystemRandom::new();
        let signature = match &self.private {
            Private::Rsa(pair) => {
                let mut signature = vec![0; pair.public().modulus_len()];
                pair.sign(&RSA_PKCS1_SHA256, &random, message.as_bytes(), &mut signature).unwrap();
                signature
            }
            Private::Ec(pair) => pair.sign(&random, message.as_bytes()).unwrap().as_ref().to_vec(),
            Private::Ed(pair) => pair.sign(message.as_bytes()).as_ref().to_vec(),
        };
        format!("{message}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    fn token(&self, claims: &Value) -> String {
        self.sign(&json!({ "alg": self.alg, "kid": self.jwk["kid"], "typ": "JWT" }), claims)
    }
}

fn encode(value: &Value) -> String {
    URL_SAFE_NO_PAD.encode(value.to_string())
}

/// ring signs with RSA keys but can't generate them.
fn rsa() -> &'static Key {
    static KEY: OnceLock<Key> = OnceLock::new();
    KEY.get_or_init(|| {
        let made = Command::new("openssl")
            .args(["genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-outform", "DER"])
            .stderr(Stdio::null())
            .output()
            .expect("openssl is installed");
        let pair = RsaKeyPair::from_pkcs8(&made.stdout).or_else(|_| RsaKeyPair::from_der(&made.stdout)).unwrap();
        let part = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        let public = ring::rsa::PublicKeyComponents::<Vec<u8>>::from(pair.public());
        let jwk = json!({ "kty": "RSA", "kid": "rsa-1", "use": "sig", "alg": "RS256", "n": part(&public.n), "e": part(&public.e) });
        Key { alg: "RS256", jwk, private: Private::Rsa(pair) }
    })
}

fn ec() -> &'static Key {
    static KEY: OnceLock<Key> = OnceLock::new();
    KEY.get_or_init(|| {
        let random = SystemRandom::new();
        let document = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, document.as_ref(), &random).unwrap();
        let point = pair.public_key().as_ref().to_vec();
        let part = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        let jwk = json!({ "kty": "EC", "crv": "P-256", "kid": "ec-1", "x": part(&point[1..33]), "y": part(&point[33..]) });
        Key { alg: "ES256", jwk, private: Private::Ec(pair) }
    })
}

fn fresh_ed(kid: &str) -> Key {
    let document = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
    let pair = Ed25519KeyPair::from_pkcs8(document.as_ref()).unwrap();
    let jwk = json!({ "kty": "OKP", "crv": "Ed25519", "kid": kid, "x": URL_SAFE_NO_PAD.encode(pair.public_key().as_ref()) });
    Key { alg: "EdDSA", jwk, private: Private::Ed(pair) }
}

fn ed() -> &'static Key {
    static KEY: OnceLock<Key> = OnceLock::new();
    KEY.get_or_init(|| fresh_ed("ed-1"))
}

fn bearer(broker: &TestBroker, token: &str) -> Client {
    Client { addr: broker.addr, key: Some(Secret::new(token)) }
}

#[tokio::test]
async fn the_bearer_of_an_issuer_token_is_a_principal_like_one_with_a_key() {
    let issuer = Issuer::start().await;
    let world = issuer.world("");
    let broker = world.start().await;
    let bob = broker.human("bob").await;
    let mut sessions = Vec::new();
    for key in [rsa(), ec(), ed()] {
        let ann = bearer(&broker, &key.token(&issuer.claims(&world, "ann")));
        let made = ann.ensure("t").await;
        let text = claims(made["token"].as_str().unwrap());
        assert_eq!((&text["sub"], &text["act"]["type"]), (&json!("ann"), &json!("human")));
        assert!(text["grant"].as_str().unwrap().starts_with("key_"));
        sessions.push((made["session_id"].clone(), text["grant"].clone()));

        let id = sandbox_id(&made);
        ann.get(&format!("/dp/{id}/v1/x")).await.ok(200);
        let seen = world.provider.boxd(&id).seen.lock().unwrap().last().unwrap().headers["authorization"].to_str().unwrap().to_owned();
        let passed = seen.strip_prefix("Bearer ").unwrap();
        assert_eq!(claims(passed)["iss"], "cobox", "the gateway replaces it with a Cobox token");
        assert_eq!(claims(passed)["sub"], "ann");
    }
    sessions.dedup();
    assert_eq!(sessions.len(), 1, "one identity for all signing keys: {sessions:?}");
    assert_eq!(bob.ensure("t").await["session_id"], sessions[0].0);
    assert_eq!(issuer.request_count(), 1, "keys are cached");
}

#[tokio::test]
async fn every_invalid_token_is_refused_with_the_same_message() {
    let issuer = Issuer::start().await;
    let world = issuer.world("leeway_seconds = 5\n");
    let broker = world.start().await;
    let good = issuer.claims(&world, "ann");
    let now = world.clock.now().unix();
    bearer(&broker, &ed().token(&good)).get("/v1/sandboxes").await.ok(200);
    let with = |change: Value| {
        let mut claims = good.clone();
        for (name, value) in change.as_object().unwrap() {
            match value {
                Value::Null => drop(claims.as_object_mut().unwrap().remove(name)),
                _ => claims[name] = value.clone(),
            }
        }
        claims
    };
    let header = |alg: &str, kid: &str| json!({ "alg": alg, "kid": kid });
    let unsigned = |alg: &str| format!("{}.{}.", encode(&header(alg, "ed-1")), encode(&good));
    // Algorithm confusion: an attacker uses the public key as the secret of an HMAC.
    let confused = |secret: &[u8], kid: &str| {
        let message = format!("{}.{}", encode(&header("HS256", kid)), encode(&good));
        let mut mac = Hmac::<sha2::Sha256>::new_from_slice(secret).unwrap();
        mac.update(message.as_bytes());
        format!("{message}.{}", URL_SAFE_NO_PAD.encode(mac.finalize().into_bytes()))
    };
    let public = |key: &Key, part: &str| URL_SAFE_NO_PAD.decode(key.jwk[part].as_str().unwrap()).unwrap();
    let (message, signature) = {
        let token = ed().token(&good);
        let (m, s) = token.rsplit_once('.').unwrap();
        (m.to_owned(), s.to_owned())
    };
    let bad = [
        ("no algorithm", unsigned("none")),
        ("None", unsigned("None")),
        ("a MAC with the public key", confused(&public(ed(), "x"), "ed-1")),
        ("a MAC with the modulus", confused(&public(rsa(), "n"), "rsa-1")),
        ("a MAC with the document", confused(ed().jwk.to_string().as_bytes(), "ed-1")),
        ("another algorithm's name", ed().sign(&header("RS256", "ed-1"), &good)),
        ("another key's id", ed().sign(&header("EdDSA", "rsa-1"), &good)),
        ("a foreign key with a known id", fresh_ed("ed-1").token(&good)),
        ("an unknown key", fresh_ed("who").token(&good)),
        ("PS256", rsa().sign(&header("PS256", "rsa-1"), &good)),
        ("its own key in the header", fresh_ed("me").sign(&json!({ "alg": "EdDSA", "jwk": ed().jwk }), &good)),
        ("a critical header", ed().sign(&json!({ "alg": "EdDSA", "kid": "ed-1", "crit": ["b64"], "b64": false }), &good)),
        ("a logout token", ed().sign(&json!({ "alg": "EdDSA", "kid": "ed-1", "typ": "logout+jwt" }), &good)),
        ("no key id although there are several keys", rsa().sign(&json!({ "alg": "RS256", "kid": null }), &with(json!({ "aud": "x" })))),
        (
            "its own key at a URL",
            fresh_ed("me").sign(&json!({ "alg": "EdDSA", "jku": format!("{}/mine", issuer.url), "kid": "me" }), &good),
        ),
        ("a certificate in the header", fresh_ed("me").sign(&json!({ "alg": "EdDSA", "x5c": ["MIIB"], "kid": "ed-1" }), &good)),
        ("a key id that is a path", fresh_ed("../../ed-1").token(&good)),
        (
            "an all-zero ES256 signature",
            format!("{}.{}.{}", encode(&header("ES256", "ec-1")), encode(&good), URL_SAFE_NO_PAD.encode([0; 64])),
        ),
        ("an ES256 signature in DER", {
            let token = ec().token(&good);
            let (signed, signature) = token.rsplit_once('.').unwrap();
            let raw = URL_SAFE_NO_PAD.decode(signature).unwrap();
            let number = |n: &[u8]| [&[2, 33, 0][..], n].concat();
            let der = [&[48, 70][..], &number(&raw[..32]), &number(&raw[32..])].concat();
            format!("{signed}.{}", URL_SAFE_NO_PAD.encode(der))
        }),
        ("a padded signature", format!("{message}.{signature}=")),
        ("a repeated claim", {
            let doubled = good.to_string().replacen('{', r#"{"aud":"other","#, 1).replace(r#""aud":"cobox""#, r#""aud":"other""#);
            let message = format!("{}.{}", encode(&header("EdDSA", "ed-1")), URL_SAFE_NO_PAD.encode(doubled));
            let Private::Ed(pair) = &ed().private else { unreachable!() };
            format!("{message}.{}", URL_SAFE_NO_PAD.encode(pair.sign(message.as_bytes())))
        }),
        ("no signature", format!("{message}.")),
        ("a cut signature", format!("{message}.{}", &signature[..40])),
        ("another audience", ed().token(&with(json!({ "aud": "other" })))),
        ("other audiences", ed().token(&with(json!({ "aud": ["a", "b"] })))),
        ("no audience", ed().token(&with(json!({ "aud": null })))),
        ("expired", ed().token(&with(json!({ "exp": now - 6 })))),
        ("no expiry", ed().token(&with(json!({ "exp": null })))),
        ("an expiry that is not a time", ed().token(&with(json!({ "exp": "never" })))),
        ("an expiry out of range", ed().token(&with(json!({ "exp": 1e300 })))),
        ("not yet", ed().token(&with(json!({ "nbf": now + 60 })))),
        ("from the future", ed().token(&with(json!({ "iat": now + 60 })))),
        ("nobody", ed().token(&with(json!({ "sub": null })))),
        ("a name with a control character", ed().token(&with(json!({ "sub": "a\nb" })))),
        ("a number for a name", ed().token(&with(json!({ "sub": 7 })))),
        ("too long", ed().token(&with(json!({ "groups": "x".repeat(17_000) })))),
        ("changed claims", format!("{}.{}.{signature}", message.split('.').next().unwrap(), encode(&with(json!({ "sub": "root" }))))),
    ];
    for (what, token) in &bad {
        let answer = bearer(&broker, token).get("/v1/sandboxes").await;
        assert!(what.contains("too long") || answer.json()["error"]["message"] == REFUSED, "{what}: {}", answer.json());
        assert_eq!(answer.error(401), "UNAUTHENTICATED", "{what}");
    }
    for (what, token) in [
        ("an encrypted token", format!("{}.{}.a.b.c", encode(&json!({ "alg": "RSA-OAEP", "enc": "A256GCM" })), encode(&good))),
        ("two payloads", format!("{message}.{}.{signature}", encode(&with(json!({ "sub": "root" }))))),
    ] {
        assert_eq!(bearer(&broker, &token).get("/v1/sandboxes").await.error(401), "UNAUTHENTICATED", "{what}");
    }
    let other = bearer(&broker, &ed().token(&with(json!({ "iss": "https://other.example" })))).get("/v1/sandboxes").await;
    assert_eq!(other.error(401), "UNAUTHENTICATED");
    bearer(&broker, &ed().token(&with(json!({ "exp": now - 4 })))).get("/v1/sandboxes").await.ok(200);
    bearer(&broker, &ed().token(&with(json!({ "aud": ["x", "cobox"] })))).get("/v1/sandboxes").await.ok(200);
}

#[tokio::test]
async fn rotated_keys_are_fetched_and_unknown_keys_cause_no_request_to_the_issuer() {
    let issuer = Issuer::start().await;
    let world = issuer.world("");
    let broker = world.start().await;
    let is_in = async |key: &Key| bearer(&broker, &key.token(&issuer.claims(&world, "ann"))).get("/v1/sandboxes").await.status == 200;
    assert!(is_in(ed()).await);
    world.clock.advance(20);
    for n in 0..30 {
        assert!(!is_in(&fresh_ed(&format!("stranger-{n}"))).await);
    }
    assert_eq!(issuer.request_count(), 2, "many unknown keys cause one request");
    let next = fresh_ed("ed-2");
    issuer.has(&[&next]);
    assert!(!is_in(&next).await, "the keys were fetched a moment ago");
    assert!(is_in(ed()).await);
    world.clock.advance(10);
    assert!(is_in(&next).await);
    assert_eq!(issuer.request_count(), 3);
    assert!(!is_in(ed()).await, "a key that the issuer withdrew is refused");

    // The issuer fails for a while; its cached keys stay valid for a while.
    *issuer.documents.keys.lock().unwrap() = b"<html>busy</html>".to_vec();
    world.clock.advance(1800);
    assert!(is_in(&next).await);
    world.clock.advance(1900);
    let answer = bearer(&broker, &next.token(&issuer.claims(&world, "ann"))).get("/v1/sandboxes").await;
    assert_eq!(answer.json()["error"]["retryable"], true);
    assert_eq!(answer.error(503), "PROVIDER_UNAVAILABLE");
    issuer.has(&[&next]);
    world.clock.advance(10);
    assert!(is_in(&next).await);
}

#[tokio::test]
async fn an_oversized_redirected_or_foreign_document_is_not_trusted() {
    let issuer = Issuer::start().await;
    let refused = async |more: &str| {
        let world = issuer.world(more);
        let broker = world.start().await;
        bearer(&broker, &ed().token(&issuer.claims(&world, "ann"))).get("/v1/sandboxes").await.status == 503
    };
    assert!(!refused("").await);
    assert!(!refused(&format!("jwks_url = \"{}/jwks\"\n", issuer.url)).await);
    assert!(refused(&format!("jwks_url = \"{}/elsewhere\"\n", issuer.url)).await, "no redirect is followed");
    assert!(refused(&format!("jwks_url = \"{}/none\"\n", issuer.url)).await);
    assert!(refused("jwks_url = \"http://127.0.0.1:1/jwks\"\n").await, "no server listens there");
    *issuer.documents.discovery.lock().unwrap() = json!({ "issuer": "https://other.example", "jwks_uri": format!("{}/jwks", issuer.url) });
    assert!(refused("").await, "another issuer's document");
    *issuer.documents.discovery.lock().unwrap() = json!({ "issuer": issuer.url, "jwks_uri": "http://id.example/jwks" });
    assert!(refused("").await, "keys over plain HTTP");
    let jwks = format!("jwks_url = \"{}/jwks\"\n", issuer.url);
    let filler = json!({ "keys": [ed().jwk], "filler": "x".repeat(300_000) });
    *issuer.documents.keys.lock().unwrap() = filler.to_string().into_bytes();
    assert!(refused(&jwks).await, "too large");
}

#[tokio::test]
async fn an_identity_can_be_revoked_and_nothing_outlives_its_token() {
    let issuer = Issuer::start().await;
    let world = issuer.world("leeway_seconds = 10\n");
    let broker = world.start().await;
    let root = broker.key("root", PrincipalKind::Operator).await;
    let claimed = issuer.claims(&world, "ann");
    let ann = bearer(&broker, &ed().token(&claimed));
    let made = ann.ensure("t").await;
    let way = format!("/dp/{}/v1/x", sandbox_id(&made));
    assert_eq!(
        claims(made["token"].as_str().unwrap())["exp"],
        claimed["exp"].as_i64().unwrap() + 10,
        "the token ends with the ID token plus the leeway"
    );

    let listed = root.get("/v1/keys").await.ok(200);
    let identity = listed["items"].as_array().unwrap().iter().find(|k| k["name"] == "ann").unwrap().clone();
    assert_eq!((&identity["issuer"], &identity["subject"], &identity["prefix"]), (&json!(issuer.url), &json!("ann"), &Value::Null));
    assert_eq!(identity["id"], claims(made["token"].as_str().unwrap())["grant"]);
    assert_eq!(root.delete(&format!("/v1/keys/{}", identity["id"].as_str().unwrap())).await.status, 204);
    assert_eq!(ann.get("/v1/sandboxes").await.error(401), "UNAUTHENTICATED");
    assert_eq!(
        bearer(&broker, &ec().token(&claimed)).get("/v1/sandboxes").await.error(401),
        "UNAUTHENTICATED",
        "a fresh ID token of a disabled principal is refused"
    );
    assert_eq!(root.with(&made["token"]).get(&way).await.error(401), "TOKEN_REVOKED");
    assert_eq!(root.post("/v1/principals/ann/enable", json!({})).await.status, 204);
    let again = ann.ensure("t").await;
    assert_eq!(root.with(&made["token"]).get(&way).await.error(401), "TOKEN_REVOKED", "a revoked token stays revoked");
    root.with(&again["token"]).get(&way).await.ok(200);

    assert_eq!(root.post("/v1/principals/ann/disable", json!({})).await.status, 204);
    assert_eq!(ann.get("/v1/sandboxes").await.error(401), "UNAUTHENTICATED");
    assert_eq!(ann.get(&way).await.error(401), "UNAUTHENTICATED");
    assert_eq!(root.with(&again["token"]).get(&way).await.error(401), "TOKEN_REVOKED");
}

#[tokio::test]
async fn claims_determine_workspace_and_kind() {
    let issuer = Issuer::start().await;
    let world = issuer.world(
        "workspace_claim = \"org\"\nworkspaces = [\"default\", \"acme\"]\nprincipal_claim = \"login\"\nprincipal_prefix = \"sso:\"\nkind_claim = \"roles\"\n[kinds]\n\"cobox-admins\" = \"operator\"\n\"bots\" = \"agent\"\n",
    );
    let broker = world.start().await;
    let caller = async |more: Value| {
        let mut claims = issuer.claims(&world, "u-1");
        claims.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        bearer(&broker, &ed().token(&claims))
    };
    let ann = caller(json!({ "org": "acme", "login": "ann" })).await;
    let made = ann.ensure("t").await;
    assert_eq!(claims(made["token"].as_str().unwrap())["sub"], "sso:ann");
    let root = caller(json!({ "org": "default", "login": "root", "roles": ["users", "cobox-admins", "bots"] })).await;
    let principals = root.get("/v1/principals?workspace=acme").await.ok(200);
    assert_eq!((&principals["items"][0]["name"], &principals["items"][0]["kind"]), (&json!("sso:ann"), &json!("human")));
    let bot = caller(json!({ "org": "acme", "login": "bot", "roles": "bots" })).await.ensure("t").await;
    assert_eq!(claims(bot["token"].as_str().unwrap())["act"]["type"], "agent");
    for more in [
        json!({ "org": "elsewhere", "login": "x" }),
        json!({ "login": "x" }),
        json!({ "org": "acme" }),
        json!({ "org": ["acme"], "login": "x" }),
    ] {
        assert_eq!(caller(more).await.get("/v1/sandboxes").await.error(401), "UNAUTHENTICATED");
    }
    let risen = caller(json!({ "org": "acme", "login": "ann", "roles": ["cobox-admins"] })).await.get("/v1/keys").await;
    assert!(risen.json()["error"]["message"].as_str().unwrap().contains("sso:ann is human"), "{}", risen.json());
    assert_eq!(risen.error(403), "FORBIDDEN", "a token can't change a principal's kind");
}

#[tokio::test]
async fn tokens_of_another_library_are_accepted() {
    let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/tools/python/bin/python3");
    assert!(std::fs::exists(python).unwrap(), "Python with PyJWT is missing: run scripts/setup");
    let issuer = Issuer::start().await;
    let world = issuer.world("");
    let script = r#"
import json, sys
import jwt
from cryptography.hazmat.primitives.asymmetric import rsa, ec, ed25519
claims = json.loads(sys.argv[1])
keys = {"RS256": rsa.generate_private_key(65537, 3072), "ES256": ec.generate_private_key(ec.SECP256R1()), "EdDSA": ed25519.Ed25519PrivateKey.generate()}
jwks, tokens = [], []
for alg, key in keys.items():
    public = jwt.get_algorithm_by_name(alg).to_jwk(key.public_key(), as_dict=True)
    jwks.append({**public, "kid": alg, "use": "sig"})
    tokens.append(jwt.encode(claims, key, algorithm=alg, headers={"kid": alg}))
print(json.dumps({"keys": jwks, "tokens": tokens}))
"#;
    let made = Command::new(python).args(["-c", script, &issuer.claims(&world, "ann").to_string()]).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let made: Value = serde_json::from_slice(&made.stdout).unwrap();
    *issuer.documents.keys.lock().unwrap() = json!({ "keys": made["keys"] }).to_string().into_bytes();
    let broker = world.start().await;
    for token in made["tokens"].as_array().unwrap() {
        bearer(&broker, token.as_str().unwrap()).get("/v1/sandboxes").await.ok(200);
    }
}
