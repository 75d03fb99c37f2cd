//! Tests of authentication: which tokens are accepted, which are refused, and how revocation ends access.

mod support;

use std::time::Instant;

use cobox_protocol::{
    SandboxId,
    control::{Alg, Revocation},
};
use cobox_token::MasterKey;
use http::Method;
use http_body_util::BodyExt;
use support::{SOON, TestBoxd};

#[tokio::test]
async fn every_route_but_health_requires_a_token() {
    let boxd = TestBoxd::start();
    for path in ["/healthz", "/v1/healthz"] {
        boxd.get(path).without("authorization").send().await.ok(200);
    }
    for (method, path) in [
        (Method::GET, "/v1/files/workspace/a"),
        (Method::PUT, "/v1/files/workspace/a"),
        (Method::DELETE, "/v1/files/workspace/a"),
        (Method::GET, "/v1/archive?path=/workspace"),
        (Method::PUT, "/v1/archive?path=/workspace"),
        (Method::POST, "/v1/exec"),
    ] {
        boxd.call(method, path).without("authorization").send().await.refused(401, "UNAUTHENTICATED");
    }
}

#[tokio::test]
async fn a_token_is_accepted_only_from_the_bearer_header() {
    let boxd = TestBoxd::start();
    let token = boxd.token("fs_read");
    let call = || boxd.get("/v1/archive?path=/workspace").without("authorization");
    call().header("authorization", &format!("Basic {}", token.expose())).send().await.refused(401, "UNAUTHENTICATED");
    call().header("x-api-key", token.expose()).send().await.refused(401, "UNAUTHENTICATED");
    call().header("cookie", &format!("token={}", token.expose())).send().await.refused(401, "UNAUTHENTICATED");
    let in_query = format!("/v1/archive?path=/workspace&token={}", token.expose());
    boxd.get(&in_query).without("authorization").send().await.refused(401, "UNAUTHENTICATED");
    call().header("authorization", &format!("bearer {}", token.expose())).send().await.ok(200);
}

#[tokio::test]
async fn forged_foreign_and_expired_tokens_are_refused_with_their_codes() {
    let boxd = TestBoxd::start();
    let other = SandboxId::new();
    let other_key = MasterKey::from_bytes([7; 32]).derive(&other, 1, Alg::EdDsa);
    let forger = MasterKey::from_bytes([8; 32]).derive(&boxd.sandbox_id, 1, Alg::EdDsa);
    let mut foreign = boxd.claims("fs_read");
    foreign.aud = other;
    let mut expired = boxd.claims("fs_read");
    expired.exp = expired.iat - 60;
    let mut early = boxd.claims("fs_read");
    early.nbf += 600;
    for (token, code) in [
        (other_key.mint(&foreign), "UNAUTHENTICATED"),
        (boxd.key.mint(&foreign), "UNAUTHENTICATED"),
        (forger.mint(&boxd.claims("fs_read")), "UNAUTHENTICATED"),
        (boxd.key.mint(&early), "UNAUTHENTICATED"),
        (boxd.key.mint(&expired), "TOKEN_EXPIRED"),
    ] {
        let answer = boxd.get("/v1/archive?path=/workspace").token(&token).send().await;
        let message = answer.refused(401, code);
        assert!(!message.contains(token.expose()));
    }
}

#[tokio::test]
async fn a_missing_capability_is_denied_and_named() {
    let boxd = TestBoxd::start();
    for (method, path, held, needed) in [
        (Method::GET, "/v1/files/workspace/a", "fs_write exec shell", "`fs_read`"),
        (Method::HEAD, "/v1/files/workspace/a", "fs_write exec shell", ""),
        (Method::PUT, "/v1/files/workspace/a", "fs_read exec shell", "`fs_write`"),
        (Method::DELETE, "/v1/files/workspace/a", "fs_read exec shell", "`fs_write`"),
        (Method::GET, "/v1/archive?path=/workspace", "fs_write exec shell", "`fs_read`"),
        (Method::PUT, "/v1/archive?path=/workspace", "fs_read exec shell", "`fs_write`"),
        (Method::POST, "/v1/exec", "fs_read fs_write shell", "`exec`"),
    ] {
        let is_head = method == Method::HEAD;
        let answer = boxd.call(method, path).token(&boxd.token(held)).send().await;
        if is_head {
            assert_eq!(answer.status, 403);
        } else {
            assert!(answer.refused(403, "CAPABILITY_DENIED").contains(needed));
        }
    }
}

#[tokio::test]
async fn every_kind_of_revocation_applies_from_its_push_on() {
    let mut boxd = TestBoxd::start();
    let claims = boxd.claims("fs_read");
    let token = boxd.key.mint(&claims);
    for revocation in [
        Revocation::Jti(claims.jti.clone()),
        Revocation::Grant(claims.grant.clone()),
        Revocation::Session(claims.sid.clone().unwrap()),
        Revocation::Principal(claims.sub.clone()),
    ] {
        boxd.revoke(vec![]).await;
        boxd.get("/v1/archive?path=/workspace").token(&token).send().await.ok(200);
        boxd.revoke(vec![revocation]).await;
        boxd.get("/v1/archive?path=/workspace").token(&token).send().await.refused(401, "TOKEN_REVOKED");
    }
}

#[tokio::test]
async fn a_revoked_token_ends_its_download_even_if_the_client_reads_nothing() {
    let mut boxd = TestBoxd::start();
    std::fs::File::create(boxd.host("/workspace/big")).unwrap().set_len(1 << 30).unwrap();
    let claims = boxd.claims("fs_read");
    let answer = boxd.get("/v1/files/workspace/big").token(&boxd.key.mint(&claims)).open().await;
    let pushed = Instant::now();
    boxd.revoke(vec![Revocation::Jti(claims.jti)]).await;
    let rest = tokio::time::timeout(SOON, answer.into_body().collect()).await.unwrap();
    assert!(rest.is_err(), "a download cut short must not look complete");
    assert!(pushed.elapsed().as_secs_f32() < 1.0);
    tokio::time::timeout(SOON, boxd.idle()).await.unwrap();
}

#[tokio::test]
async fn a_replaced_key_opens_no_stream_and_its_open_streams_end() {
    let mut boxd = TestBoxd::start();
    std::fs::File::create(boxd.host("/workspace/big")).unwrap().set_len(1 << 30).unwrap();
    let token = boxd.token("fs_read");
    let answer = boxd.get("/v1/files/workspace/big").token(&token).open().await;
    boxd.state.keys = vec![MasterKey::from_bytes([7; 32]).derive(&boxd.sandbox_id, 2, Alg::EdDsa).verify_spec()];
    boxd.push().await;
    assert!(tokio::time::timeout(SOON, answer.into_body().collect()).await.unwrap().is_err());
    boxd.get("/v1/files/workspace/big").token(&token).send().await.refused(401, "UNAUTHENTICATED");
}

#[tokio::test]
async fn unknown_routes_and_methods_get_the_error_envelope_with_a_request_id() {
    let boxd = TestBoxd::start();
    boxd.get("/v1/nothing").send().await.refused(404, "ROUTE_NOT_FOUND");
    boxd.call(Method::PATCH, "/v1/exec").send().await.refused(405, "METHOD_NOT_ALLOWED");
    let given = "req_01j0000000000000000000000a";
    let answer = boxd.get("/healthz").header("x-request-id", given).send().await;
    assert_eq!(answer.header("x-request-id"), given);
    let answer = boxd.get("/healthz").header("x-request-id", "not a boxd response").send().await;
    assert!(answer.header("x-request-id").starts_with("req_"));
    // The clients' socket doesn't serve the control routes.
    boxd.get("/control/status").send().await.refused(404, "ROUTE_NOT_FOUND");
}
