//! Tokens at the real gateway and boxd: each kind of invalid one is refused with its own code.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_protocol::{
    CapabilitySet, SandboxId, Secret, Timestamp,
    control::Alg,
    session::{Mode, NegotiateResponse},
};
use cobox_testkit::{BrokerOptions, TestBroker, ensure, negotiate};
use cobox_token::{Claims, MasterKey};

struct Forge {
    master: MasterKey,
    claims: Claims,
}

/// The claims of a valid token and the broker's master key, to sign variations of them.
fn forge(broker: &TestBroker, info: &NegotiateResponse) -> Forge {
    let bytes = std::fs::read(broker.data_dir().join("master.key")).expect("the master key");
    let bytes: [u8; 32] = match bytes.len() {
        32 => bytes.try_into().unwrap(),
        _ => base64::engine::general_purpose::STANDARD.decode(String::from_utf8(bytes).unwrap().trim()).unwrap().try_into().unwrap(),
    };
    let payload = URL_SAFE_NO_PAD.decode(info.token.expose().split('.').nth(1).unwrap()).unwrap();
    Forge { master: MasterKey::from_bytes(bytes), claims: serde_json::from_slice(&payload).unwrap() }
}

impl Forge {
    fn sign(&self, claims: &Claims) -> Secret {
        self.master.derive(&self.claims.aud, claims.generation, Alg::EdDsa).mint(claims)
    }
}

async fn exec(base: &str, token: &str) -> (u16, String) {
    let response = reqwest::Client::new()
        .post(format!("{base}/exec"))
        .bearer_auth(token)
        .json(&serde_json::json!({"command": "echo reached"}))
        .send()
        .await
        .expect("an answer");
    let status = response.status().as_u16();
    let body: serde_json::Value = response.json().await.expect("JSON");
    assert!(!body.to_string().contains(token) || token.is_empty(), "the answer repeats the token");
    (status, body["error"]["code"].as_str().unwrap_or("none").to_owned())
}

#[tokio::test]
async fn every_kind_of_invalid_token_is_refused_with_its_own_code() {
    let broker = TestBroker::start().await;
    let client = broker.client();
    let mine = client.negotiate(&negotiate("mine", Mode::Ensure)).await.unwrap();
    let other = client.negotiate(&negotiate("other", Mode::Ensure)).await.unwrap();
    let base = &mine.sandbox.http_base_url;
    let f = forge(&broker, &mine);
    let now = Timestamp::now().unix();

    let header = |json: serde_json::Value| {
        let rest = mine.token.expose().split_once('.').unwrap().1;
        format!("{}.{rest}", URL_SAFE_NO_PAD.encode(json.to_string()))
    };
    let with = |change: &dyn Fn(&mut Claims)| {
        let mut claims = f.claims.clone();
        change(&mut claims);
        f.sign(&claims).expose().to_owned()
    };
    let kid = format!("{}.{}", f.claims.aud, f.claims.generation);
    let stranger = MasterKey::generate().derive(&f.claims.aud, f.claims.generation, Alg::EdDsa).mint(&f.claims).expose().to_owned();
    let mut flipped = mine.token.expose().to_owned();
    let last = flipped.pop().unwrap();
    flipped.push(if last == 'A' { 'Q' } else { 'A' });

    for (name, token, status, code) in [
        ("good", mine.token.expose().to_owned(), 200, "none"),
        ("signed by us as it should be", with(&|_| {}), 200, "none"),
        ("none at all", String::new(), 401, "UNAUTHENTICATED"),
        ("garbage", "garbage".into(), 401, "UNAUTHENTICATED"),
        (
            "expired",
            with(&|c| {
                c.iat = now - 1000;
                c.nbf = now - 1000;
                c.exp = now - 100
            }),
            401,
            "TOKEN_EXPIRED",
        ),
        ("not valid yet", with(&|c| c.nbf = now + 1000), 401, "UNAUTHENTICATED"),
        ("of another sandbox", other.token.expose().to_owned(), 401, "UNAUTHENTICATED"),
        ("another sandbox named in it", with(&|c| c.aud = SandboxId::new()), 401, "UNAUTHENTICATED"),
        ("another issuer", with(&|c| c.iss = "evil".into()), 401, "UNAUTHENTICATED"),
        ("another generation's key", with(&|c| c.generation += 1), 401, "UNAUTHENTICATED"),
        ("forged with another key", stranger, 401, "UNAUTHENTICATED"),
        ("one bit off", flipped, 401, "UNAUTHENTICATED"),
        ("alg none", header(serde_json::json!({"alg": "none", "typ": "JWT", "kid": kid})), 401, "UNAUTHENTICATED"),
        ("alg HS256", header(serde_json::json!({"alg": "HS256", "typ": "JWT", "kid": kid})), 401, "UNAUTHENTICATED"),
        ("a wrong kid", header(serde_json::json!({"alg": "EdDSA", "typ": "JWT", "kid": "sb_x.1"})), 401, "UNAUTHENTICATED"),
        ("no exec in it", with(&|c| c.scope = CapabilitySet::parse(["fs_read"]).unwrap()), 403, "CAPABILITY_DENIED"),
    ] {
        assert_eq!(exec(base, &token).await, (status, code.to_owned()), "{name}");
    }
}

#[tokio::test]
async fn only_the_requested_capabilities_are_granted() {
    let broker = TestBroker::start().await;
    let client = broker.client();
    ensure(&client, "t").await;
    let mut request = negotiate("t", Mode::Get);
    request.requested_capabilities = Some(vec!["fs:ro".into()]);
    let narrow = client.negotiate(&request).await.unwrap();
    assert_eq!(narrow.scopes, ["fs:ro"]);
    assert_eq!(narrow.credentials.granted_capabilities.names(), ["fs_read"]);
    assert_eq!(exec(&narrow.sandbox.http_base_url, narrow.token.expose()).await, (403, "CAPABILITY_DENIED".into()));
    let put = reqwest::Client::new()
        .put(format!("{}/files/workspace/x", narrow.sandbox.http_base_url))
        .bearer_auth(narrow.token.expose())
        .body("x")
        .send()
        .await
        .unwrap();
    assert_eq!(put.status(), 403);

    request.requested_capabilities = Some(vec!["fs_read".into(), "everything".into()]);
    let e = client.negotiate(&request).await.unwrap_err();
    assert!(e.to_string().contains("everything"), "{e}");
}

#[tokio::test]
async fn tokens_of_a_released_session_are_refused() {
    let broker = TestBroker::start().await;
    let client = broker.client();
    let info = client.negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
    assert_eq!(exec(&info.sandbox.http_base_url, info.token.expose()).await.0, 200);
    client.release(&info.session_id).await.unwrap();
    let (status, _) = exec(&info.sandbox.http_base_url, info.token.expose()).await;
    assert!(matches!(status, 401 | 404), "{status}");
}

#[tokio::test]
async fn hs256_tokens_work_like_eddsa_tokens() {
    let broker = TestBroker::start_with(BrokerOptions { config: "alg = \"HS256\"\n".into(), ..BrokerOptions::default() }).await;
    let info = broker.client().negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
    let header = URL_SAFE_NO_PAD.decode(info.token.expose().split('.').next().unwrap()).unwrap();
    assert!(String::from_utf8(header).unwrap().contains("HS256"));
    assert_eq!(exec(&info.sandbox.http_base_url, info.token.expose()).await.0, 200);
}

#[tokio::test]
async fn neither_keys_nor_tokens_reach_logs_or_the_sandbox() {
    let broker = TestBroker::start().await;
    let info = broker.client().negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
    // With an API key, which the gateway replaces by a token.
    let answer = reqwest::Client::new()
        .post(format!("{}/exec", info.sandbox.http_base_url))
        .header("X-Api-Key", broker.key().expose())
        .json(&serde_json::json!({"command": "env; cat /proc/*/environ 2>/dev/null; true"}))
        .send()
        .await
        .unwrap();
    assert_eq!(answer.status(), 200);
    let inside = answer.text().await.unwrap();
    for secret in [broker.key().expose(), info.token.expose()] {
        assert!(!inside.contains(secret), "a workload sees it");
        assert!(!broker.log().contains(secret), "the log has it");
    }
}
