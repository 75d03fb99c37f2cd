//! Tests of refreshed tokens and extended leases: what a refresh checks, how a rotation ends the old token, what a
//! heartbeat does.

use cobox_protocol::{Timestamp, control::Revocation, key::PrincipalKind};
use serde_json::{Value, json};

use crate::harness::{NEWEST, World, claims, sandbox_id, session_path};

fn time_of(value: &Value) -> i64 {
    serde_json::from_value::<Timestamp>(value.clone()).unwrap().unix()
}

#[tokio::test]
async fn both_refresh_routes_behave_alike_with_their_own_error_formats() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let nobody = "/v1/sandbox/sessions/ssn_00000000000000000000000000";
    for (route, not_found) in [("refresh", "SESSION_NOT_FOUND"), ("refresh-token", "BINDING_NOT_FOUND"), ("heartbeat", "BINDING_NOT_FOUND")]
    {
        assert_eq!(ann.post(&format!("{nobody}/{route}"), json!({})).await.error(404), not_found);
        assert_eq!(ann.post(&format!("/v1/sandbox/sessions/x/{route}"), json!({})).await.error(404), not_found);
        let answer = ann.post(&format!("{}/{route}", session_path(&made)), json!({})).await.ok(200);
        assert_eq!(answer.get("token").is_some(), route != "heartbeat");
    }
    ann.delete(&session_path(&made)).await;
    for route in ["refresh", "refresh-token", "heartbeat"] {
        assert_eq!(ann.post(&format!("{}/{route}", session_path(&made)), json!({})).await.error(410), "SESSION_EXPIRED");
    }
}

#[tokio::test]
async fn a_refresh_checks_the_named_sandbox() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "ensure", "name": "dev" })).await.ok(200);
    let other = ann.ensure("other").await;
    let refresh = format!("{}/refresh", session_path(&made));
    for right in [made["sandbox"]["id"].clone(), json!("dev")] {
        ann.post(&refresh, json!({ "sandbox_id": right })).await.ok(200);
    }
    let wrong = ann.post(&refresh, json!({ "sandbox_id": other["sandbox"]["id"] })).await;
    assert_eq!(wrong.json()["error"]["details"]["sandbox_id"], made["sandbox"]["id"]);
    assert_eq!(wrong.error(409), "SESSION_CONFLICT");
    assert_eq!(ann.post(&refresh, json!({ "sandbox_id": "nobody" })).await.error(404), "SANDBOX_NOT_FOUND");
    let binding = format!("{}/refresh-token", session_path(&made));
    assert_eq!(ann.post(&binding, json!({ "sandbox_id": other["sandbox"]["id"] })).await.error(409), "BINDING_CONFLICT");
}

#[tokio::test]
async fn without_rotation_the_old_token_stays_valid_until_it_expires() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let path = format!("/dp/{}/v1/x", sandbox_id(&made));
    ann.post(&format!("{}/refresh", session_path(&made)), json!({ "current_token": made["token"] })).await.ok(200);
    world.clock.advance(600);
    broker.tick().await;
    ann.with(&made["token"]).get(&path).await.ok(200);
}

#[tokio::test]
async fn a_rotation_ends_the_old_token_after_half_a_minute_and_notifies_its_sandbox() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let (id, refresh) = (sandbox_id(&made), format!("{}/refresh", session_path(&made)));
    let path = format!("/dp/{id}/v1/x");
    assert_eq!(ann.post(&refresh, json!({ "rotate": true })).await.error(400), "INVALID_REQUEST");
    let rotate = json!({ "current_token": made["token"], "rotate": true });
    let renewed = ann.post(&refresh, rotate.clone()).await.ok(200);
    // A retry after a lost response.
    ann.post(&refresh, rotate.clone()).await.ok(200);
    let revoked = || world.provider.boxd(&id).state.lock().unwrap().revoked.clone();
    world.clock.advance(29);
    broker.tick().await;
    ann.with(&made["token"]).get(&path).await.ok(200);
    assert_eq!(revoked(), []);
    world.clock.advance(1);
    broker.tick().await;
    let jti = claims(made["token"].as_str().unwrap())["jti"].as_str().unwrap().to_owned();
    assert_eq!(revoked(), [Revocation::Jti(jti.clone())]);
    assert_eq!(ann.with(&made["token"]).get(&path).await.error(401), "TOKEN_REVOKED");
    ann.with(&renewed["token"]).get(&path).await.ok(200);
    assert_eq!(ann.post(&refresh, rotate.clone()).await.error(401), "TOKEN_REVOKED", "a rotated token proves no possession");
    // Nor later, when it would have expired anyway.
    world.clock.advance(900 + 60);
    assert_eq!(ann.post(&refresh, rotate).await.error(401), "TOKEN_REVOKED");
    let audit = broker.broker.as_ref().unwrap().store().audit("default", None, &NEWEST).await.unwrap();
    let retired: Vec<_> = audit.iter().map(|(_, r)| r).filter(|r| r.action == "token.retired").collect();
    assert_eq!(retired.len(), 1);
    assert_eq!((retired[0].jti.as_deref(), retired[0].principal.as_deref()), (Some(jti.as_str()), Some("ann")));
}

#[tokio::test]
async fn the_presented_token_must_be_recent_and_of_this_session_and_principal() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let body = |thread: &str| json!({ "thread_id": thread, "mode": "ensure", "name": "dev" });
    let one = ann.post("/v1/sandbox/sessions", body("one")).await.ok(200);
    let two = ann.post("/v1/sandbox/sessions", body("two")).await.ok(200);
    let refresh = format!("{}/refresh", session_path(&one));
    // The same sandbox and therefore the same keys: only the session differs.
    assert_eq!(ann.post(&refresh, json!({ "current_token": two["token"] })).await.error(403), "FORBIDDEN");
    let bobs = bob.post("/v1/sandbox/sessions", body("one")).await.ok(200);
    assert_eq!(ann.post(&refresh, json!({ "current_token": bobs["token"] })).await.error(403), "FORBIDDEN");
    bob.post(&refresh, json!({ "current_token": bobs["token"] })).await.ok(200);
    world.clock.advance(900 + 3599);
    ann.post(&refresh, json!({ "current_token": one["token"] })).await.ok(200);
    world.clock.advance(1);
    assert_eq!(ann.post(&refresh, json!({ "current_token": one["token"] })).await.error(401), "TOKEN_EXPIRED");
}

#[tokio::test]
async fn a_heartbeat_of_either_side_extends_the_lease_but_no_token() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bot) = (broker.human("ann").await, broker.key("bot", PrincipalKind::Agent).await);
    let made = ann.ensure("t").await;
    let (id, heartbeat) = (sandbox_id(&made), format!("{}/heartbeat", session_path(&made)));
    for caller in [&ann, &bot] {
        world.clock.advance(1000);
        broker.tick().await;
        assert_eq!(ann.state(&id).await, "idle");
        let beat = caller.post(&heartbeat, json!({})).await.ok(200);
        assert_eq!(beat["state"], "active");
        assert_eq!(beat.as_object().unwrap().len(), 2);
        let looked = ann.get(&session_path(&made)).await.ok(200);
        assert_eq!((&looked["binding"]["lease_expires_at"], &looked["binding"]["state"]), (&beat["lease_expires_at"], &json!("active")));
    }
    let path = format!("/dp/{id}/v1/x");
    assert_eq!(ann.with(&made["token"]).get(&path).await.error(401), "TOKEN_EXPIRED");
    world.clock.advance(3599);
    broker.tick().await;
    assert_eq!(ann.state(&id).await, "idle");
    world.clock.advance(1);
    broker.tick().await;
    assert_eq!(ann.state(&id).await, "suspended");
    let beat = ann.post(&heartbeat, json!({})).await.ok(200);
    assert_eq!(beat["state"], "active", "a heartbeat resumes the sandbox");
    assert_eq!(world.provider.running(), 1);
    assert_eq!(time_of(&beat["lease_expires_at"]) - time_of(&made["binding"]["lease_expires_at"]), 2000 + 3600);
}

#[tokio::test]
async fn a_heartbeat_during_the_start_reports_it_and_another_workspace_finds_nothing() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, eve) = (broker.human("ann").await, broker.stranger().await);
    world.provider.may_start.send_replace(false);
    let body = json!({ "thread_id": "t", "mode": "ensure" });
    ann.call(http::Method::POST, "/v1/sandbox/sessions", Some(body), &[("prefer", "wait=0")]).await.error(423);
    let listed = ann.get("/v1/sandbox/sessions").await.ok(200);
    let heartbeat = format!("{}/heartbeat", session_path(&listed["items"][0]));
    let beat = ann.call(http::Method::POST, &heartbeat, None, &[("prefer", "wait=0")]).await.ok(200);
    assert_eq!(beat["state"], "provisioning");
    assert_eq!(eve.post(&heartbeat, json!({})).await.error(404), "BINDING_NOT_FOUND");
    world.provider.may_start.send_replace(true);
}
