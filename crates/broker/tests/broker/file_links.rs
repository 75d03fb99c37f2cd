//! Tests of file links: access to one file for any client that has the URL, without another credential.

use cobox_protocol::{Timestamp, key::PrincipalKind};
use http::Method;
use serde_json::{Value, json};

use crate::harness::{Client, World, claims, sandbox_id, session_path};

/// The path and query of a link, as a browser would request them.
fn path(link: &Value) -> String {
    let url = link["url"].as_str().unwrap();
    url[url.find("/dp/").unwrap()..].to_owned()
}

#[tokio::test]
async fn a_link_opens_one_file_for_one_method_and_is_not_forwarded() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let (id, links) = (sandbox_id(&made), format!("{}/file-links", session_path(&made)));
    let browser = Client { key: None, ..ann.clone() };
    let got = ann.post(&links, json!({ "path": "/workspace/a b?.txt" })).await.ok(200);
    assert_eq!((&got["method"], &got["path"]), (&json!("GET"), &json!("/workspace/a b?.txt")));
    assert!(got["url"].as_str().unwrap().starts_with(&format!("http://{}/dp/{id}/v1/files/workspace/a%20b%3F.txt?link=", broker.addr)));
    for method in [Method::GET, Method::HEAD] {
        let answer = browser.call(method, &path(&got), None, &[]).await;
        assert_eq!((answer.status.as_u16(), &answer.headers["x-content-type-options"]), (200, &"nosniff".parse().unwrap()));
        assert_eq!(
            (&answer.headers["content-security-policy"], &answer.headers["referrer-policy"]),
            (&"sandbox".parse().unwrap(), &"no-referrer".parse().unwrap())
        );
    }
    let seen = world.provider.boxd(&id).seen.lock().unwrap().last().unwrap().clone();
    assert_eq!(seen.uri, "/v1/files/workspace/a%20b%3F.txt");
    assert_eq!(seen.headers["x-file-follow"], "false", "a symbolic link in the file's place is not followed");
    let sent = claims(seen.headers["authorization"].to_str().unwrap().strip_prefix("Bearer ").unwrap());
    assert_eq!((&sent["scope"], &sent["jti"], sent.get("file")), (&json!("fs:ro"), &got["jti"], None));

    let link = path(&got).split_once("?link=").unwrap().1.to_owned();
    for (method, other) in [
        (Method::PUT, path(&got)),
        (Method::DELETE, path(&got)),
        (Method::GET, format!("/dp/{id}/v1/files/workspace/other?link={link}")),
        (Method::GET, format!("/dp/{id}/v1/files/workspace/a%20b%3F.txt/..?link={link}")),
    ] {
        assert_eq!(browser.call(method, &other, None, &[]).await.error(403), "FORBIDDEN", "{other}");
    }
    for nowhere in [format!("/dp/{id}/v1/exec?link={link}"), format!("/dp/{id}/v1/archive?path=/workspace&link={link}")] {
        assert_eq!(browser.get(&nowhere).await.error(401), "UNAUTHENTICATED");
    }
    // A link is not a token, and a token is not a link.
    assert_eq!(ann.with(&json!(link)).get(&format!("/dp/{id}/v1/x")).await.error(401), "UNAUTHENTICATED");
    let forged = format!("/dp/{id}/v1/files/workspace/a?link={}", made["token"].as_str().unwrap());
    assert_eq!(browser.get(&forged).await.error(401), "UNAUTHENTICATED");

    let put = ann.post(&links, json!({ "path": "/workspace/up", "method": "put", "ttl": 60 })).await.ok(200);
    assert_eq!(browser.call(Method::PUT, &path(&put), None, &[]).await.status, 200);
    assert_eq!(browser.get(&path(&put)).await.error(403), "FORBIDDEN");
}

#[tokio::test]
async fn a_query_parameter_beside_a_link_is_checked_as_on_any_other_route() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let links = format!("{}/file-links", session_path(&made));
    let browser = Client { key: None, ..ann.clone() };
    let got = ann.post(&links, json!({ "path": "/download" })).await.ok(200);
    for unknown in ["restrict=1", "path=/workspace/other", "h%61sh=sha256", "sync=false", "x"] {
        let answer = browser.get(&format!("{}&{unknown}", path(&got))).await;
        let message = answer.message();
        assert_eq!(answer.error(400), "INVALID_REQUEST", "{unknown}");
        assert!(message.contains("is not a query parameter of this route"), "{message}");
    }
    assert!(world.provider.boxd(&sandbox_id(&made)).seen.lock().unwrap().is_empty());
    browser.get(&format!("{}&hash=sha256", path(&got))).await.ok(200);
    let seen = world.provider.boxd(&sandbox_id(&made)).seen.lock().unwrap().last().unwrap().clone();
    assert_eq!(seen.uri, "/v1/files/download?hash=sha256");
    // A client with an invalid link learns nothing about the parameter.
    assert_eq!(browser.get(&format!("/dp/{}/v1/files/a?link=x.y.z&restrict=1", sandbox_id(&made))).await.error(401), "UNAUTHENTICATED");
}

#[tokio::test]
async fn a_link_is_short_lived_and_ends_with_its_session_its_key_or_its_revocation() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, root) = (broker.human("ann").await, broker.key("root", PrincipalKind::Operator).await);
    let browser = Client { key: None, ..ann.clone() };
    let made = ann.ensure("t").await;
    let links = format!("{}/file-links", session_path(&made));
    let link = async |ttl: Option<u32>| ann.post(&links, json!({ "path": "/workspace/a", "ttl": ttl })).await.ok(200);
    let time = |v: &Value| serde_json::from_value::<Timestamp>(v.clone()).unwrap().unix();
    let now = time(&made["expires_at"]) - 900;
    assert_eq!(time(&link(Some(86_400)).await["expires_at"]) - now, 900);
    let short = link(Some(60)).await;
    assert_eq!(time(&short["expires_at"]) - now, 60);
    world.clock.advance(65);
    assert_eq!(browser.get(&path(&short)).await.error(401), "TOKEN_EXPIRED");
    let revoked = link(None).await;
    root.post("/internal/tokens/revoke", json!({ "jti": revoked["jti"] })).await.ok(200);
    assert_eq!(browser.get(&path(&revoked)).await.error(401), "TOKEN_REVOKED");
    let of_key = link(None).await;
    browser.get(&path(&of_key)).await.ok(200);
    let grant = claims(made["token"].as_str().unwrap())["grant"].as_str().unwrap().to_owned();
    root.delete(&format!("/v1/keys/{grant}")).await;
    assert_eq!(browser.get(&path(&of_key)).await.error(401), "TOKEN_REVOKED");
    let bob = broker.human("bob").await;
    let of_session = bob.post(&links, json!({ "path": "/workspace/a" })).await.ok(200);
    root.delete(&session_path(&made)).await;
    assert_eq!(browser.get(&path(&of_session)).await.error(401), "TOKEN_REVOKED");
    assert_eq!(bob.post(&links, json!({ "path": "/workspace/a" })).await.error(410), "SESSION_EXPIRED");
}

#[tokio::test]
async fn a_link_is_not_forwarded_whatever_other_credential_is_sent() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    *world.provider.direct.lock().unwrap() = Some("https://node7.example.com:4000".to_owned());
    let made = ann.ensure("t").await;
    assert!(made["sandbox"]["http_base_url"].as_str().unwrap().starts_with("https://node7.example.com:4000/"));
    let got = ann.post(&format!("{}/file-links", session_path(&made)), json!({ "path": "/workspace/a" })).await.ok(200);
    let id = sandbox_id(&made);
    assert!(got["url"].as_str().unwrap().starts_with(&format!("http://{}/dp/{id}/v1/files/workspace/a?link=", broker.addr)));
    for caller in [ann.with(&made["token"]), ann.clone()] {
        caller.get(&format!("{}&x=%2F", path(&got))).await.ok(200);
        let seen = world.provider.boxd(&id).seen.lock().unwrap().last().unwrap().clone();
        assert_eq!(seen.uri, "/v1/files/workspace/a?x=%2F");
    }
}

#[tokio::test]
async fn a_link_grants_no_more_than_its_creator_has() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob) = (broker.human("ann").await, broker.human("bob").await);
    let made = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "t", "mode": "ensure", "access": "owner" })).await.ok(200);
    let links = format!("{}/file-links", session_path(&made));
    assert_eq!(bob.post(&links, json!({ "path": "/a" })).await.error(403), "FORBIDDEN");
    ann.post(&format!("{}/share", session_path(&made)), json!({ "principal": "bob", "capabilities": ["fs_read"] })).await.ok(201);
    let got = bob.post(&links, json!({ "path": "/a" })).await.ok(200);
    assert_eq!(bob.post(&links, json!({ "path": "/a", "method": "PUT" })).await.error(403), "CAPABILITY_DENIED");
    let browser = Client { key: None, ..ann.clone() };
    browser.get(&path(&got)).await.ok(200);
    ann.delete(&format!("{}/share/bob", session_path(&made))).await;
    assert_eq!(browser.get(&path(&got)).await.error(401), "TOKEN_REVOKED");
    for bad in ["", "a", "/a/../b", "/./a", "/a\u{0}"] {
        assert_eq!(ann.post(&links, json!({ "path": bad })).await.error(400), "INVALID_REQUEST", "{bad:?}");
    }
    assert_eq!(ann.post(&links, json!({ "path": "/a", "method": "DELETE" })).await.error(400), "INVALID_REQUEST");
}
