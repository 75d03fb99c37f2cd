//! Tests of keys and principals: how they end, what ends with them, and that at least one operator always remains.

use std::sync::Arc;

use crate::{
    harness::{Client, TestBroker, World, claims, sandbox_id},
    store_suite::{WORKSPACE, api_key, at, audit, ending},
};
use cobox_broker::{
    domain::{
        access::keys::MAX_KEYS_PER_PRINCIPAL,
        model::{ApiKey, AuditRecord},
    },
    store::{DisabledPrincipal, ExpiringKey, RevokedKey, Store, postgres, sqlite},
};
use cobox_protocol::{Timestamp, control::Revocation, key::PrincipalKind};
use cobox_testkit::TestDatabase;
use http::Method;
use serde_json::{Value, json};

async fn operator(broker: &TestBroker) -> Client {
    broker.key("root", PrincipalKind::Operator).await
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

#[tokio::test]
async fn a_key_is_listed_with_its_prefix_and_its_last_use() {
    let world = World::new();
    let broker = world.start().await;
    let root = operator(&broker).await;
    let made = root.post("/v1/keys", json!({ "name": "bot", "kind": "agent" })).await.ok(201);
    let (id, key) = (text(&made["id"]), text(&made["api_key"]));
    assert!(key.starts_with(text(&made["prefix"])) && text(&made["prefix"]).len() < key.len() - 40, "{made}");
    root.with(&made["api_key"]).get("/v1/sandboxes").await.ok(200);
    broker.tick().await;
    let listed = root.get("/v1/keys").await.ok(200)["items"].as_array().unwrap().iter().find(|k| k["id"] == id).unwrap().clone();
    assert_eq!((&listed["prefix"], listed["last_used_at"].is_string()), (&made["prefix"], true));
    assert_eq!(root.get(&format!("/v1/keys/{id}")).await.ok(200), listed);
    assert_eq!(root.with(&made["api_key"]).get(&format!("/v1/keys/{id}")).await.error(403), "FORBIDDEN");
    let audit = root.get("/v1/audit").await.ok(200);
    let record = audit["items"].as_array().unwrap().iter().find(|e| e["action"] == "key.created" && e["principal"] == "root").unwrap();
    assert_eq!(record["detail"], format!("{id} for agent bot"));
    assert!(!audit.to_string().contains(key));
}

#[tokio::test]
async fn a_key_ends_at_its_expiry_and_no_token_outlives_it() {
    let world = World::new();
    let broker = world.start().await;
    let root = operator(&broker).await;
    let made = root.post("/v1/keys", json!({ "name": "bot", "kind": "agent" })).await.ok(201);
    let path = format!("/v1/keys/{}", text(&made["id"]));
    let patch = async |at: Timestamp| root.call(Method::PATCH, &path, Some(json!({ "expires_at": at })), &[]).await;
    let now = cobox_broker::Clock::now(&*world.clock);
    assert_eq!(patch(now).await.error(400), "INVALID_REQUEST");
    let end = now.plus(std::time::Duration::from_secs(100));
    assert_eq!(patch(end).await.ok(200)["expires_at"], json!(end));
    let bot = root.with(&made["api_key"]);
    let session = bot.ensure("t").await;
    assert_eq!(claims(text(&session["token"]))["exp"], end.unix());
    world.clock.advance(100);
    assert_eq!(bot.get("/v1/sandboxes").await.error(401), "UNAUTHENTICATED");
    assert_eq!(patch(end.plus(std::time::Duration::from_secs(900))).await.error(404), "KEY_NOT_FOUND", "an expired key can't be extended");
    assert_eq!(root.with(&made["api_key"]).get("/v1/keys").await.error(401), "UNAUTHENTICATED");
}

#[tokio::test]
async fn an_earlier_expiry_applies_to_existing_tokens_and_a_later_one_does_not() {
    let world = World::new();
    let broker = world.start().await;
    let root = operator(&broker).await;
    let made = root.post("/v1/keys", json!({ "name": "bot", "kind": "agent" })).await.ok(201);
    let bot = root.with(&made["api_key"]);
    let session = bot.ensure("t").await;
    let way = format!("/dp/{}/v1/x", sandbox_id(&session));
    let now = cobox_broker::Clock::now(&*world.clock);
    let expire = async |seconds: u64| {
        let params = json!({ "expires_at": now.plus(std::time::Duration::from_secs(seconds)) });
        root.call(Method::PATCH, &format!("/v1/keys/{}", text(&made["id"])), Some(params), &[]).await.ok(200);
    };
    let reported = || world.provider.boxd(&sandbox_id(&session)).state.lock().unwrap().revoked.clone();
    expire(100).await;
    expire(200).await;
    world.clock.advance(199);
    broker.tick().await;
    bot.with(&session["token"]).get(&way).await.ok(200);
    assert_eq!(reported(), []);
    world.clock.advance(1);
    broker.tick().await;
    assert_eq!(bot.with(&session["token"]).get(&way).await.error(401), "TOKEN_REVOKED");
    assert_eq!(reported(), [Revocation::Grant(text(&made["id"]).to_owned())]);
}

#[tokio::test]
async fn the_last_operator_key_is_never_ended() {
    let world = World::new();
    let broker = world.start().await;
    let root = operator(&broker).await;
    let first = text(&root.get("/v1/keys").await.ok(200)["items"][0]["id"]).to_owned();
    assert_eq!(root.delete(&format!("/v1/keys/{first}")).await.error(403), "FORBIDDEN");
    assert_eq!(root.post("/v1/principals/root/disable", json!({})).await.error(403), "FORBIDDEN");
    let soon = cobox_broker::Clock::now(&*world.clock).plus(std::time::Duration::from_secs(60));
    let params = json!({ "name": "deputy", "kind": "operator", "workspace": "elsewhere", "expires_at": soon });
    let second = root.post("/v1/keys", params).await.ok(201);
    // The second key expires in a minute. With it alone, no operator would be left then.
    let end = async |caller: &Client, id: &str| {
        caller.call(Method::PATCH, &format!("/v1/keys/{id}"), Some(json!({ "expires_at": soon })), &[]).await
    };
    assert_eq!(root.delete(&format!("/v1/keys/{first}")).await.error(403), "FORBIDDEN");
    let deputy = root.with(&second["api_key"]);
    let home =
        text(&root.get("/v1/keys").await.ok(200)["items"].as_array().unwrap().iter().find(|k| k["name"] == "root").unwrap()["workspace"])
            .to_owned();
    let disable_root = format!("/v1/principals/root/disable?workspace={home}");
    assert_eq!(deputy.post(&disable_root, json!({})).await.error(403), "FORBIDDEN");
    assert_eq!(end(&root, &first).await.error(403), "FORBIDDEN");
    let lasting = json!({ "name": "boss", "kind": "operator", "workspace": "elsewhere" });
    let third = root.post("/v1/keys", lasting).await.ok(201);
    let (boss, third) = (root.with(&third["api_key"]), text(&third["id"]).to_owned());
    assert_eq!(root.post(&disable_root, json!({})).await.error(403), "FORBIDDEN", "an operator can't disable itself");
    assert_eq!(root.delete(&format!("/v1/keys/{first}")).await.status, 204, "another operator key exists, in any workspace");
    assert_eq!(root.get("/v1/keys").await.error(401), "UNAUTHENTICATED");
    assert_eq!(boss.delete(&format!("/v1/keys/{}", text(&second["id"]))).await.status, 204, "a key with an expiry is not protected");
    for again in [end(&boss, &third).await, boss.delete(&format!("/v1/keys/{third}")).await] {
        assert_eq!(again.error(403), "FORBIDDEN");
    }
    world.clock.advance(61);
    assert_eq!(boss.delete(&format!("/v1/keys/{third}")).await.error(403), "FORBIDDEN", "an expired key doesn't count as another key");
}

#[tokio::test]
async fn if_every_operator_key_expires_the_last_valid_one_stays() {
    let dir = tempfile::tempdir().unwrap();
    let sqlite: Arc<Store> = Arc::new(sqlite::open(&dir.path().join("db")).await.unwrap());
    let database = TestDatabase::new().await;
    let postgres: Arc<Store> = Arc::new(postgres::open(&database.secret_url()).await.unwrap());
    for store in [sqlite, postgres] {
        let (soon, late) = (api_key("soon", PrincipalKind::Operator), api_key("late", PrincipalKind::Operator));
        let (soon, late) = (ApiKey { expires_at: Some(at(100)), ..soon }, ApiKey { expires_at: Some(at(200)), ..late });
        for key in [&soon, &late] {
            store.add_key(key, &audit("key.created")).await.unwrap();
        }
        assert!(matches!(store.revoke_key(&soon.id, &ending(150)).await.unwrap(), RevokedKey::Revoked(_)));
        assert!(matches!(
            store.expire_key(&late.id, at(300), &AuditRecord { at: at(150), ..audit("key.expires") }).await.unwrap(),
            ExpiringKey::Changed(_)
        ));
        assert!(matches!(store.revoke_key(&late.id, &ending(150)).await.unwrap(), RevokedKey::LastOperator));
        assert_eq!(store.disable_principal(WORKSPACE, "late", &ending(150)).await.unwrap(), DisabledPrincipal::LastOperator);
    }
}

#[tokio::test]
async fn disabling_a_principal_ends_all_its_credentials() {
    let world = World::new();
    let broker = world.start().await;
    let root = operator(&broker).await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let other = root.post("/v1/keys", json!({ "name": "ann", "kind": "human" })).await.ok(201);
    let hers = ann.ensure("t").await;
    let also = root.with(&other["api_key"]).ensure("t").await;
    let his = bob.ensure("t").await;
    let way = format!("/dp/{}/v1/x", sandbox_id(&hers));
    assert_eq!(bob.post("/v1/principals/ann/disable", json!({})).await.error(403), "FORBIDDEN");
    assert_eq!(root.post("/v1/principals/ann/disable?workspace=elsewhere", json!({})).await.error(404), "PRINCIPAL_NOT_FOUND");
    assert_eq!(root.post("/v1/principals/ann/disable", json!({})).await.status, 204);
    assert_eq!(root.post("/v1/principals/ann/disable", json!({})).await.status, 204, "a repeated request succeeds");
    for key in [&ann, &root.with(&other["api_key"])] {
        assert_eq!(key.get("/v1/sandboxes").await.error(401), "UNAUTHENTICATED");
        assert_eq!(key.get(&way).await.error(401), "UNAUTHENTICATED");
    }
    for token in [&hers["token"], &also["token"]] {
        assert_eq!(bob.with(token).get(&way).await.error(401), "TOKEN_REVOKED");
    }
    bob.with(&his["token"]).get(&way).await.ok(200);
    let reported = world.provider.boxd(&sandbox_id(&hers)).state.lock().unwrap().revoked.clone();
    assert!(reported.contains(&Revocation::Principal("ann".into())), "the revocation is pushed before the response: {reported:?}");

    let listed = root.get("/v1/principals").await.ok(200);
    let of = |name: &str| listed["items"].as_array().unwrap().iter().find(|p| p["name"] == name).unwrap().clone();
    assert_eq!((&of("ann")["valid_keys"], &of("ann")["disabled_by"]), (&json!(0), &json!("root")));
    assert_eq!(of("bob")["valid_keys"], 1);
    let page = root.get("/v1/principals?limit=1").await.ok(200);
    assert_eq!((&page["items"][0]["name"], &page["next_cursor"]), (&json!("ann"), &json!("ann")));
    assert_eq!(root.get("/v1/principals?limit=1&cursor=ann").await.ok(200)["items"][0]["name"], "bob");
    assert_eq!(root.post("/v1/keys", json!({ "name": "ann", "kind": "human" })).await.error(403), "FORBIDDEN");

    assert_eq!(root.post("/v1/principals/ann/enable", json!({})).await.status, 204);
    assert_eq!(ann.get("/v1/sandboxes").await.error(401), "UNAUTHENTICATED", "a revoked key stays revoked");
    assert_eq!(bob.with(&hers["token"]).get(&way).await.error(401), "TOKEN_REVOKED", "its token stays revoked");
    let fresh = root.post("/v1/keys", json!({ "name": "ann", "kind": "human" })).await.ok(201);
    let again = root.with(&fresh["api_key"]).ensure("t").await;
    bob.with(&again["token"]).get(&way).await.ok(200);
    let actions: Vec<String> =
        root.get("/v1/audit").await.ok(200)["items"].as_array().unwrap().iter().map(|e| text(&e["action"]).to_owned()).collect();
    assert!(["principal.disabled", "principal.enabled"].iter().all(|a| actions.iter().any(|e| e == a)), "{actions:?}");
}

#[tokio::test]
async fn the_valid_keys_of_a_principal_are_limited() {
    let world = World::new();
    let broker = world.start().await;
    let root = operator(&broker).await;
    let make = async || root.post("/v1/keys", json!({ "name": "bot", "kind": "agent" })).await;
    let first = make().await.ok(201);
    for _ in 1..MAX_KEYS_PER_PRINCIPAL {
        make().await.ok(201);
    }
    assert_eq!(make().await.error(429), "QUOTA_EXCEEDED");
    assert_eq!(root.delete(&format!("/v1/keys/{}", text(&first["id"]))).await.status, 204);
    make().await.ok(201);
}
