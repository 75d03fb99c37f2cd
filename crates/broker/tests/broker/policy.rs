//! Tests of the policy file: granted capabilities, lifetimes and quotas, and how a changed file affects a running
//! broker.

use cobox_protocol::key::PrincipalKind;
use http::Method;
use serde_json::{Value, json};

use crate::harness::{NEWEST, World, claims, eventually, sandbox_id, session_path};

const SESSIONS: &str = "/v1/sandbox/sessions";

/// A world that starts with this policy.
fn world_with_policy(policy: &str) -> World {
    let world = World::new();
    write(&world, policy);
    world
}

fn write(world: &World, policy: &str) {
    std::fs::create_dir_all(&world.config.data_dir).unwrap();
    std::fs::write(world.config.data_dir.join("policy.toml"), policy).unwrap();
}

fn granted(session: &Value) -> String {
    let words = session["credentials"]["granted_capabilities"].as_array().unwrap();
    words.iter().map(|w| w.as_str().unwrap()).collect::<Vec<_>>().join(" ")
}

#[tokio::test]
async fn a_grant_is_the_request_within_the_policy_on_every_route() {
    let world = world_with_policy(
        "[human]\ncapabilities = [\"fs:rw\", \"exec\", \"shell\", \"ports\"]\n[[rule]]\nprincipal = \"bob\"\ncapabilities = [\"fs_read\"]\n",
    );
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ann.ensure("t").await;
    assert_eq!(granted(&made), "fs_read fs_write exec shell", "allowed capabilities beyond the defaults are granted on request");
    let ask = |words: &'static [&'static str]| json!({ "thread_id": "t", "mode": "get", "requested_capabilities": words });
    let more = ann.post(SESSIONS, ask(&["ports", "exec"])).await.ok(200);
    assert_eq!(granted(&more), "exec ports");
    assert_eq!(granted(&bob.ensure("t").await), "fs_read");
    assert_eq!(granted(&bob.get(&session_path(&made)).await.ok(200)), "fs_read");
    let denied = bob.post(SESSIONS, ask(&["exec"])).await;
    assert!(denied.json()["error"]["message"].as_str().unwrap().contains("allowed are fs_read"));
    assert_eq!(denied.error(403), "CAPABILITY_DENIED");
    let acting = json!({ "thread_id": "t", "mode": "get", "actor": "agent", "scopes": ["fs:rw"] });
    assert_eq!(granted(&bob.post(SESSIONS, acting).await.ok(200)), "fs_read", "a rule about a principal applies whatever it acts as");

    let refresh = |token: &Value| json!({ "current_token": token });
    let again = ann.post(&format!("{}/refresh", session_path(&made)), refresh(&more["token"])).await.ok(200);
    assert_eq!(claims(again["token"].as_str().unwrap())["scope"], "process ports", "a refresh keeps the granted capabilities");
    bob.get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.ok(200);
    let id = sandbox_id(&made);
    let issued = async || {
        let records = broker.broker.as_ref().unwrap().store().audit("default", Some(&id), &NEWEST).await.unwrap();
        let swapped = |r: &cobox_broker::domain::model::AuditRecord| {
            r.action == "token.issued" && r.principal.as_deref() == Some("bob") && r.detail.as_deref() == Some("fs_read")
        };
        records.iter().filter(|(_, r)| swapped(r)).count() >= 4
    };
    eventually("a gateway token under the same policy", issued).await;
}

#[tokio::test]
async fn the_policy_limits_lifetimes_and_the_response_shows_them() {
    let world = world_with_policy(
        "[human]\ntoken_ttl_seconds = 3600\n[[rule]]\nkind = \"agent\"\ntoken_ttl_seconds = 120\nidle_timeout_seconds = 60\nlease_seconds = 100\nhard_ttl_seconds = 500\n",
    );
    let broker = world.start().await;
    let (ann, bot) = (broker.human("ann").await, broker.key("bot", PrincipalKind::Agent).await);
    let life = |session: &Value| {
        let claims = claims(session["token"].as_str().unwrap());
        claims["exp"].as_i64().unwrap() - claims["iat"].as_i64().unwrap()
    };
    let made = ann.ensure("hers").await;
    assert_eq!(life(&made), 900, "a higher limit doesn't change the default lifetime");
    let long = ann.post(SESSIONS, json!({ "thread_id": "hers", "mode": "get", "ttl": 9000 })).await.ok(200);
    assert_eq!(life(&long), 3600);
    assert_eq!(made["policy"], json!({ "idle_timeout_seconds": 900, "hard_ttl_seconds": 28800 }));
    let its = bot.ensure("its").await;
    assert_eq!(life(&its), 120);
    assert_eq!(its["policy"], json!({ "idle_timeout_seconds": 60, "hard_ttl_seconds": 500 }));
    let beat = bot.post(&format!("{}/heartbeat", session_path(&its)), json!({})).await.ok(200);
    assert_eq!(beat["lease_expires_at"], its["binding"]["lease_expires_at"]);

    world.clock.advance(61);
    broker.tick().await;
    for _ in 0..3 {
        assert_eq!(bot.state(&sandbox_id(&its)).await, "idle", "it stays idle");
        world.clock.advance(1);
        broker.tick().await;
    }
    assert_eq!(ann.state(&sandbox_id(&made)).await, "active");
    world.clock.advance(40);
    broker.tick().await;
    assert_eq!(bot.state(&sandbox_id(&its)).await, "suspended");
    bot.ensure("its").await;
    for _ in 0..7 {
        broker.run_for(&world.clock, 50).await;
        bot.post(&format!("{}/heartbeat", session_path(&its)), json!({})).await.ok(200);
    }
    let last = bot.ensure("its").await;
    assert!(life(&last) < 120, "no token outlives the hard end: {}", life(&last));
    broker.run_for(&world.clock, 50).await;
    assert_eq!(bot.get(&session_path(&its)).await.error(410), "SESSION_EXPIRED");
}

#[tokio::test]
async fn a_policy_can_delete_sandboxes_at_their_hard_end() {
    let mut world = world_with_policy("[[rule]]\nkind = \"agent\"\nhard_end = \"delete\"\n");
    world.config.hard_ttl_seconds = 60;
    let broker = world.start().await;
    let (ann, bot) = (broker.human("ann").await, broker.key("bot", PrincipalKind::Agent).await);
    let (hers, its) = (sandbox_id(&ann.ensure("hers").await), sandbox_id(&bot.ensure("its").await));
    broker.run_for(&world.clock, 60).await;
    assert_eq!(ann.state(&hers).await, "suspended");
    assert_eq!(bot.state(&its).await, "gone");
    assert_ne!(sandbox_id(&bot.ensure("its").await), its);
}

#[tokio::test]
async fn sandboxes_are_counted_by_owner_and_by_workspace() {
    let world = world_with_policy(
        "[[rule]]\nkind = \"agent\"\nmax_sandboxes = 1\n[[rule]]\nworkspace = \"default\"\nmax_sandboxes_per_workspace = 3\n",
    );
    let broker = world.start().await;
    let (ann, bot) = (broker.human("ann").await, broker.key("bot", PrincipalKind::Agent).await);
    let first = bot.ensure("1").await;
    let refused = bot.post(SESSIONS, json!({ "thread_id": "2", "mode": "ensure" })).await;
    assert!(refused.json()["error"]["message"].as_str().unwrap().contains("you have 1"));
    assert_eq!(refused.error(429), "QUOTA_EXCEEDED");
    assert_eq!(bot.post("/v1/sandboxes", json!({})).await.error(429), "QUOTA_EXCEEDED");
    let shared = ann.ensure("2").await;
    assert_eq!(bot.ensure("2").await["session_id"], shared["session_id"], "joining creates no sandbox");
    ann.ensure("3").await;
    assert_eq!(ann.post("/v1/sandboxes", json!({})).await.error(429), "QUOTA_EXCEEDED");
    assert_eq!(bot.delete(&session_path(&first)).await.status, 204);
    bot.ensure("4").await;
}

#[tokio::test]
async fn providers_templates_and_access_follow_the_policy() {
    let world = world_with_policy(
        "[[rule]]\nkind = \"agent\"\nproviders = [\"other\"]\ntemplates = [\"python\"]\n[[rule]]\nkind = \"human\"\ndefault_access = \"owner\"\n",
    );
    let broker = world.start().await;
    let (ann, bob, bot) = (broker.human("ann").await, broker.human("bob").await, broker.key("bot", PrincipalKind::Agent).await);
    let ensure = |extra: Value| {
        let mut body = json!({ "thread_id": "t", "mode": "ensure" });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    assert_eq!(bot.post(SESSIONS, ensure(json!({}))).await.error(403), "FORBIDDEN", "the policy doesn't allow the provider");
    assert_eq!(bot.post("/v1/sandboxes", json!({})).await.error(403), "FORBIDDEN");
    assert_eq!(bot.post(SESSIONS, ensure(json!({ "template": "rust" }))).await.error(403), "FORBIDDEN");
    assert_eq!(
        bot.post(SESSIONS, ensure(json!({ "template": "python" }))).await.error(400),
        "INVALID_REQUEST",
        "the template is allowed but doesn't exist"
    );
    ann.ensure("t").await;
    assert_eq!(bob.post(SESSIONS, ensure(json!({}))).await.error(403), "FORBIDDEN", "the policy makes the session private by default");
    let open = json!({ "thread_id": "open", "mode": "ensure", "access": "workspace" });
    let open = ann.post(SESSIONS, open).await.ok(200);
    assert_eq!(bob.ensure("open").await["session_id"], open["session_id"]);
    assert_eq!(bot.ensure("open").await["session_id"], open["session_id"], "an existing session may be joined");
    let made = ann.post("/v1/sandboxes", json!({ "name": "dev" })).await.ok(201);
    assert_eq!(made["access"], "owner");
}

#[tokio::test]
async fn a_changed_policy_file_takes_effect_without_a_restart_and_a_broken_one_never() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let before = ann.ensure("t").await;
    assert_eq!(granted(&before), "fs_read fs_write exec shell");
    write(&world, "[human]\ncapabilities = [\"fs_read\"]\n");
    // The broker detects the change by itself.
    eventually("the new policy to take effect", async || granted(&ann.ensure("t").await) == "fs_read").await;
    let id = sandbox_id(&before);
    ann.with(&before["token"]).get(&format!("/dp/{id}/v1/x")).await.ok(200);
    let refresh = json!({ "current_token": before["token"] });
    let fresh = ann.post(&format!("{}/refresh", session_path(&before)), refresh).await.ok(200);
    assert_eq!(
        claims(fresh["token"].as_str().unwrap())["scope"],
        "fs:ro",
        "an issued token stays valid; its successor follows the new policy"
    );

    let reload = async || broker.broker.as_ref().unwrap().reload_policy().await;
    write(&world, "[human]\ncapabilites = []\n");
    let reported = reload().await.unwrap_err().to_string();
    assert!(reported.contains("line 2") && reported.contains("did you mean `capabilities`?"), "{reported}");
    assert_eq!(granted(&ann.ensure("t").await), "fs_read");
    std::fs::remove_file(world.config.data_dir.join("policy.toml")).unwrap();
    assert!(reload().await.is_err());
    assert_eq!(granted(&ann.ensure("t").await), "fs_read", "a missing policy file keeps the last policy in effect");
    write(&world, "[human]\ncapabilities = []\n");
    reload().await.unwrap();
    assert_eq!(ann.post(SESSIONS, json!({ "thread_id": "t", "mode": "get" })).await.error(403), "CAPABILITY_DENIED");
    assert_eq!(ann.call(Method::GET, &format!("/dp/{id}/v1/x"), None, &[]).await.error(403), "CAPABILITY_DENIED");
    let root = broker.key("root", PrincipalKind::Operator).await;
    let audit = root.get("/v1/audit").await.ok(200);
    assert!(audit["items"].as_array().unwrap().iter().any(|e| e["action"] == "policy.read"), "{audit}");
}

#[tokio::test]
async fn a_broker_does_not_start_with_a_broken_policy() {
    for (text, named) in [("[[rule]]\nkind = \"robot\"\nmax_sandboxes = 1\n", false), ("x = 1\n", true)] {
        let mut world = World::new();
        write(&world, text);
        if named {
            let file = world.config.data_dir.with_file_name("mine.toml");
            std::fs::rename(world.config.data_dir.join("policy.toml"), &file).unwrap();
            world.config.policy_file = Some(file);
        }
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let started = cobox_broker::Broker::start(world.whole_config().await, world.provider.clone(), listener).await;
        let reported = started.err().expect("the broker must not start").to_string();
        assert!(reported.contains("line "), "{reported}");
    }
}
