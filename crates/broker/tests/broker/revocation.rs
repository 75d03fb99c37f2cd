//! Tests of revocation: tokens by a common property, a sandbox's key gracefully or immediately, and a sandbox by an
//! operator.

use crate::harness::{Client, NEWEST, World, claims, eventually, sandbox_id, session_path};
use cobox_broker::{
    Clock,
    domain::{model::AuditRecord, token_signer::MAX_REVOCATIONS},
    store::{RetiredToken, RevokeParams, RevokedTokens},
};
use cobox_protocol::{Timestamp, control::Revocation, key::PrincipalKind};
use cobox_testkit::TestDatabase;
use serde_json::{Value, json};

const REVOKE: &str = "/internal/tokens/revoke";

fn claim(answer: &Value, name: &str) -> String {
    claims(answer["token"].as_str().unwrap())[name].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn tokens_are_revoked_by_a_common_property_and_their_owners_get_new_ones() {
    for by in ["jti", "grant", "session", "principal", "sandbox"] {
        let world = World::new();
        let broker = world.start().await;
        let (ann, bob, root) = (broker.human("ann").await, broker.human("bob").await, broker.key("root", PrincipalKind::Operator).await);
        let (made, other) = (ann.ensure("t").await, bob.ensure("other").await);
        let (id, path) = (sandbox_id(&made), format!("/dp/{}/v1/x", sandbox_id(&made)));
        let bobs = bob.ensure("t").await;
        let value = match by {
            "jti" => claim(&made, "jti"),
            "grant" => claim(&made, "grant"),
            "session" => made["session_id"].as_str().unwrap().to_owned(),
            "principal" => "ann".to_owned(),
            _ => id.to_string(),
        };
        let body = json!({ by: value });
        assert_eq!(ann.post(REVOKE, body.clone()).await.error(403), "FORBIDDEN");
        let revoked = root.post(REVOKE, body).await.ok(200);
        assert_eq!(revoked.get("sequence").is_some(), by != "sandbox");
        assert_eq!(ann.with(&made["token"]).get(&path).await.error(401), "TOKEN_REVOKED", "by {by}");
        let refresh = format!("{}/refresh", session_path(&made));
        assert_eq!(ann.post(&refresh, json!({ "current_token": made["token"] })).await.error(401), "TOKEN_REVOKED", "by {by}");
        // The state pushed to boxd has the same effect.
        let state = world.provider.boxd(&id).state.lock().unwrap().clone();
        let keys = cobox_token::Keyset::new(&state.issuer, &id, &state.keys).unwrap();
        let now = Timestamp::from_unix(claims(made["token"].as_str().unwrap())["iat"].as_i64().unwrap());
        let reported = keys.verify(made["token"].as_str().unwrap(), now);
        let is_refused = reported.map_or(true, |claims| cobox_token::RevocationView::new(&state.revoked).covers(&claims));
        assert!(is_refused, "by {by}");

        let is_bob_hit = by == "session" || by == "sandbox";
        assert_eq!(bob.with(&bobs["token"]).get(&path).await.status, if is_bob_hit { 401 } else { 200 }, "by {by}");
        bob.with(&other["token"]).get(&format!("/dp/{}/v1/x", sandbox_id(&other))).await.ok(200);
        // Exceeds the maximum clock skew.
        world.clock.advance(6);
        let fresh = ann.ensure("t").await;
        assert_eq!(fresh["session_id"], made["session_id"]);
        ann.with(&fresh["token"]).get(&path).await.ok(200);
        // The old token is no longer accepted, for as long as a refresh would otherwise have accepted it.
        world.clock.advance(900 + 3500);
        assert_eq!(ann.post(&refresh, json!({ "current_token": made["token"] })).await.error(401), "TOKEN_REVOKED", "by {by}");
    }
}

#[tokio::test]
async fn a_revocation_names_exactly_one_existing_item() {
    let world = World::new();
    let broker = world.start().await;
    let root = broker.key("root", PrincipalKind::Operator).await;
    for body in [json!({}), json!({ "jti": "a", "grant": "b" }), json!({ "jti": "" }), json!({ "token": "x" }), json!({ "jti": "a\u{0}" })]
    {
        assert_eq!(root.post(REVOKE, body).await.error(400), "INVALID_REQUEST");
    }
    assert_eq!(root.post(REVOKE, json!({ "session": "x" })).await.error(404), "SESSION_NOT_FOUND");
    assert_eq!(root.post(REVOKE, json!({ "sandbox": "x" })).await.error(404), "SANDBOX_NOT_FOUND");
    assert_eq!(root.post(REVOKE, json!({ "principal": "nobody" })).await.error(404), "PRINCIPAL_NOT_FOUND");
    assert_eq!(root.post(REVOKE, json!({ "grant": "key_00000000000000000000000000" })).await.error(404), "KEY_NOT_FOUND");
    let one = root.post(REVOKE, json!({ "jti": "tok_00000000000000000000000000" })).await.ok(200)["sequence"].as_u64().unwrap();
    let two = root.post(REVOKE, json!({ "jti": "shr_00000000000000000000000000" })).await.ok(200)["sequence"].as_u64().unwrap();
    assert!(two > one);
    let audit = broker.broker.as_ref().unwrap().store().audit("default", None, &NEWEST).await.unwrap();
    assert_eq!(audit.iter().filter(|(_, r)| r.action == "tokens.revoked" && r.principal.as_deref() == Some("root")).count(), 2);
}

#[tokio::test]
async fn a_secret_sent_as_an_id_is_refused_and_stored_nowhere() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, root) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await);
    let opaque = json!({ "thread_id": "t", "mode": "ensure", "token_format": "opaque" });
    let made = ann.post("/v1/sandbox/sessions", opaque).await.ok(200);
    let (token, key) = (made["token"].as_str().unwrap(), ann.key.as_ref().unwrap().expose());
    for body in [json!({ "jti": token }), json!({ "jti": key }), json!({ "grant": key }), json!({ "grant": token }), json!({ "jti": "a" })]
    {
        let refused = root.post(REVOKE, body).await;
        let message = String::from_utf8_lossy(&refused.bytes).into_owned();
        assert!(!message.contains(token) && !message.contains(key), "{message}");
        assert_eq!(refused.error(400), "INVALID_REQUEST");
    }
    assert_eq!(world.provider.boxd(&sandbox_id(&made)).state.lock().unwrap().revoked, []);
    let audit = broker.broker.as_ref().unwrap().store().audit("default", None, &NEWEST).await.unwrap();
    assert!(audit.iter().all(|(_, r)| r.action != "tokens.revoked"));
}

#[tokio::test]
async fn a_revocation_applies_in_the_workspace_of_the_revoked_item() {
    for by in ["jti", "grant", "share"] {
        let world = World::new();
        let broker = world.start().await;
        let (eve, root) = (broker.stranger().await, broker.key("root", PrincipalKind::Operator).await);
        let mut made = eve.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "ensure", "access": "owner" })).await.ok(200);
        let body = match by {
            "share" => {
                let params = json!({ "name": "dora", "kind": "human", "workspace": "elsewhere" });
                let dora = root.with(&root.post("/v1/keys", params).await.ok(201)["api_key"]);
                let shared = json!({ "principal": "dora", "capabilities": ["fs_read"] });
                let shared = eve.post(&format!("{}/share", session_path(&made)), shared).await.ok(201);
                made = dora.ensure("t").await;
                json!({ "jti": shared["id"] })
            }
            by => json!({ by: claim(&made, by) }),
        };
        root.post(REVOKE, body).await.ok(200);
        let path = format!("/dp/{}/v1/x", sandbox_id(&made));
        assert_eq!(eve.with(&made["token"]).get(&path).await.error(401), "TOKEN_REVOKED", "by {by}");
    }
}

#[tokio::test]
async fn a_revocation_survives_a_restart() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, root) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await);
    let made = ann.ensure("t").await;
    let boxd = world.provider.boxd(&sandbox_id(&made));
    root.post(REVOKE, json!({ "principal": "ann" })).await.ok(200);
    let reported = boxd.state.lock().unwrap().revoked.clone();
    broker.kill().await;
    boxd.state.lock().unwrap().revoked.clear();
    let again = world.start().await;
    assert_eq!(boxd.state.lock().unwrap().revoked, reported, "the revocations are pushed before any request passes");
    let path = format!("/dp/{}/v1/x", sandbox_id(&made));
    assert_eq!(ann.at(&again).with(&made["token"]).get(&path).await.error(401), "TOKEN_REVOKED");
}

#[tokio::test]
async fn old_tokens_stay_valid_after_a_graceful_rotation_and_end_with_an_immediate_one() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, root) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await);
    let made = ann.ensure("t").await;
    let (id, path) = (sandbox_id(&made), format!("/dp/{}/v1/x", sandbox_id(&made)));
    let rotate = format!("/internal/sandboxes/{id}/rotate-key");
    let key_ids = || world.provider.boxd(&id).state.lock().unwrap().keys.iter().map(|k| k.kid.clone()).collect::<Vec<_>>();
    let kids = |generations: &[u32]| generations.iter().map(|g| format!("{id}.{g}")).collect::<Vec<_>>();
    assert_eq!(ann.post(&rotate, json!({})).await.error(403), "FORBIDDEN");
    assert_eq!(root.post("/internal/sandboxes/x/rotate-key", json!({})).await.error(404), "SANDBOX_NOT_FOUND");
    assert_eq!(root.post(&rotate, json!({ "mode": "soon" })).await.error(400), "INVALID_REQUEST");

    let rotated = root.post(&rotate, json!({ "mode": "graceful" })).await.ok(200);
    assert_eq!((&rotated["generation"], rotated["old_keys_until"].is_string()), (&json!(2), true));
    assert_eq!(key_ids(), kids(&[1, 2]));
    ann.with(&made["token"]).get(&path).await.ok(200);
    let second = ann.ensure("t").await;
    assert_eq!(claims(second["token"].as_str().unwrap())["gen"], 2);
    let renewed = ann.post(&format!("{}/refresh", session_path(&made)), json!({ "current_token": made["token"] })).await.ok(200);
    assert_eq!(claims(renewed["token"].as_str().unwrap())["gen"], 2);
    // A second rotation would keep the first key valid for longer.
    let refused = root.post(&rotate, json!({ "mode": "graceful" })).await;
    assert_eq!(refused.headers["retry-after"], "3610");
    assert_eq!(refused.error(409), "SANDBOX_CONFLICT");
    assert_eq!(key_ids(), kids(&[1, 2]));
    for token in [&made["token"], &second["token"]] {
        ann.with(token).get(&path).await.ok(200);
    }
    // Old keys are removed once no token signed with them can be valid.
    world.clock.advance(3700);
    ann.post(&format!("{}/heartbeat", session_path(&made)), json!({})).await.ok(200);
    broker.tick().await;
    assert_eq!(key_ids(), kids(&[2]));

    let third = ann.ensure("t").await;
    root.post(&rotate, json!({ "mode": "graceful" })).await.ok(200);
    let rotated = root.call(http::Method::POST, &rotate, None, &[]).await.ok(200);
    assert_eq!((&rotated["generation"], rotated.get("old_keys_until")), (&json!(4), None));
    assert_eq!(key_ids(), kids(&[4]));
    assert_eq!(ann.with(&third["token"]).get(&path).await.error(401), "TOKEN_REVOKED");
    let fresh = ann.ensure("t").await;
    ann.with(&fresh["token"]).get(&path).await.ok(200);
    // A suspended sandbox gets the push when it wakes.
    world.clock.advance(3600);
    broker.tick().await;
    assert_eq!(ann.state(&id).await, "suspended");
    root.post(&rotate, json!({})).await.ok(200);
    let woken = ann.ensure("t").await;
    assert_eq!((key_ids(), &claims(woken["token"].as_str().unwrap())["gen"]), (kids(&[5]), &json!(5)));
}

#[tokio::test]
async fn above_the_revocation_limit_a_sandbox_refuses_rotation_and_the_next_revocation_ends_all_its_tokens() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "ensure", "access": "owner" })).await.ok(200);
    let (id, path) = (sandbox_id(&made), format!("/dp/{}/v1/x", sandbox_id(&made)));
    let (share, refresh) = (format!("{}/share", session_path(&made)), format!("{}/refresh", session_path(&made)));
    ann.post(&share, json!({ "principal": "bob", "capabilities": ["fs_read"] })).await.ok(201);
    let bobs = bob.ensure("t").await;
    let (now, store) = (world.clock.now(), broker.broker.as_ref().unwrap().store());
    for n in 0..MAX_REVOCATIONS {
        let retired = RetiredToken {
            workspace: "default".into(),
            sandbox: id.clone(),
            jti: format!("tok_{n}"),
            from: now,
            until: now.plus(std::time::Duration::from_secs(600)),
            audit: AuditRecord::new(now, "default", "token.retired"),
        };
        assert!(store.retire_token(&retired).await.unwrap());
    }
    let rotate = |token: &Value, rotate: bool| json!({ "current_token": token, "rotate": rotate });
    let refused = ann.post(&refresh, rotate(&made["token"], true)).await;
    assert_eq!(refused.headers["retry-after"], "60");
    assert_eq!(refused.error(429), "RATE_LIMITED");
    ann.post(&refresh, rotate(&made["token"], false)).await.ok(200);
    ann.with(&made["token"]).get(&path).await.ok(200);

    assert_eq!(ann.delete(&format!("{share}/bob")).await.status, 204, "a revocation is never refused by a limit");
    for token in [&bobs["token"], &made["token"]] {
        assert_eq!(ann.with(token).get(&path).await.error(401), "TOKEN_REVOKED");
    }
    let reported = world.provider.boxd(&id).state.lock().unwrap().clone();
    assert_eq!(reported.keys.iter().map(|k| k.kid.as_str()).collect::<Vec<_>>(), [format!("{id}.2")]);
    assert_eq!(reported.revoked.len(), 1, "the rotation of the key replaces single revocations");
    let fresh = ann.ensure("t").await;
    ann.with(&fresh["token"]).get(&path).await.ok(200);
    ann.post(&refresh, rotate(&fresh["token"], true)).await.ok(200);
}

#[tokio::test]
async fn above_its_revocation_limit_a_workspace_gets_new_keys() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, root, eve) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await, broker.stranger().await);
    let (made, elsewhere) = (ann.ensure("t").await, eve.ensure("t").await);
    let (id, path) = (sandbox_id(&made), format!("/dp/{}/v1/x", sandbox_id(&made)));
    let (now, store) = (world.clock.now(), broker.broker.as_ref().unwrap().store());
    let until = now.plus(std::time::Duration::from_secs(600));
    let revoke = async |jti: String| {
        let audit = AuditRecord::new(now, "default", "tokens.revoked");
        let params = RevokeParams { workspace: "default".into(), sandbox: None, tokens: RevokedTokens::Jti(jti), until, audit };
        store.revoke(&params).await.unwrap();
    };
    let sandbox = store.sandbox(&id).await.unwrap().unwrap();
    let listed = async || store.revocations(&sandbox, now).await.unwrap().list.len();
    for _ in 0..3 {
        revoke("tok_again".into()).await;
    }
    assert_eq!(listed().await, 1, "a repeated revocation is stored once");
    for n in 1..MAX_REVOCATIONS {
        revoke(format!("tok_{n}")).await;
    }
    assert_eq!(listed().await, MAX_REVOCATIONS as usize);
    ann.with(&made["token"]).get(&path).await.ok(200);

    let bob = broker.human("bob").await.ensure("t").await;
    root.post(REVOKE, json!({ "principal": "bob" })).await.ok(200);
    for token in [&made["token"], &bob["token"]] {
        assert_eq!(ann.with(token).get(&path).await.error(401), "TOKEN_REVOKED");
    }
    let reported = world.provider.boxd(&id).state.lock().unwrap().clone();
    assert_eq!(reported.keys.iter().map(|k| k.kid.as_str()).collect::<Vec<_>>(), [format!("{id}.2")]);
    assert_eq!(reported.revoked.len(), 1, "the rotation of the keys replaces single revocations");
    ann.with(&ann.ensure("t").await["token"]).get(&path).await.ok(200);
    eve.with(&elsewhere["token"]).get(&format!("/dp/{}/v1/x", sandbox_id(&elsewhere))).await.ok(200);
    let recorded = store.audit("default", None, &NEWEST).await.unwrap();
    assert!(recorded.iter().any(|(_, r)| r.action == "workspace.keys_rotated"));
}

#[tokio::test]
async fn an_operator_ends_any_sandbox() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, root, eve) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await, broker.stranger().await);
    let made = eve.ensure("t").await;
    let route = format!("/internal/sandboxes/{}", sandbox_id(&made));
    assert_eq!(ann.delete(&route).await.error(403), "FORBIDDEN");
    assert_eq!(root.delete(&route).await.status, 204);
    assert_eq!(eve.get(&session_path(&made)).await.error(410), "SESSION_EXPIRED");
    assert_eq!(world.provider.running(), 0);
    assert_eq!(root.delete(&route).await.error(404), "SANDBOX_NOT_FOUND");
}

#[tokio::test]
async fn a_revocation_is_pushed_to_the_sandboxes_of_other_brokers() {
    let database = TestDatabase::new().await;
    let worlds = World::cluster(&database, 2);
    let (a, b) = (worlds[0].start().await, worlds[1].start().await);
    let (ann, root): (Client, Client) = (a.human("ann").await, b.key("root", PrincipalKind::Operator).await);
    let bob = a.human("bob").await;
    let made = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "ensure", "access": "owner" })).await.ok(200);
    let (id, path) = (sandbox_id(&made), format!("/dp/{}/v1/x", sandbox_id(&made)));
    let boxd = worlds[0].provider.boxd(&id);
    let knows = |wanted: Revocation| {
        let boxd = boxd.clone();
        async move { boxd.state.lock().unwrap().revoked.contains(&wanted) }
    };

    let there = ann.at(&b);
    let share = format!("{}/share", session_path(&made));
    let shared = there.post(&share, json!({ "principal": "bob", "capabilities": ["fs_read"] })).await.ok(201);
    let bobs = bob.ensure("t").await;
    assert_eq!(there.delete(&format!("{share}/bob")).await.status, 204);
    eventually("the push of the share's revocation", || knows(Revocation::Jti(shared["id"].as_str().unwrap().to_owned()))).await;
    assert_eq!(bob.with(&bobs["token"]).get(&path).await.error(401), "TOKEN_REVOKED");

    root.post(REVOKE, json!({ "jti": claim(&made, "jti") })).await.ok(200);
    eventually("the push of the token's revocation", || knows(Revocation::Jti(claim(&made, "jti")))).await;
    assert_eq!(ann.with(&made["token"]).get(&path).await.error(401), "TOKEN_REVOKED");

    let fresh = ann.ensure("t").await;
    root.post(&format!("/internal/sandboxes/{id}/rotate-key"), json!({})).await.ok(200);
    let wanted = format!("{id}.2");
    eventually("the push of the new key", || async { boxd.state.lock().unwrap().keys.iter().all(|k| k.kid == wanted) }).await;
    assert_eq!(ann.with(&fresh["token"]).get(&path).await.error(401), "TOKEN_REVOKED");
}
