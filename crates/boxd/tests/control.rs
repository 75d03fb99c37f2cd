//! Tests of the control channel: pushes, status and shutdown.

mod support;

use std::time::Duration;

use cobox_protocol::{
    Timestamp,
    control::{BoxdStatus, Revocation},
};
use http::Method;
use support::{SOON, TestBoxd};

#[tokio::test]
async fn an_older_push_is_answered_and_changes_nothing() {
    let mut boxd = TestBoxd::start();
    let old = boxd.state.clone();
    let status = boxd.revoke(vec![Revocation::Principal("ada".into())]).await;
    assert_eq!(status.state_version, 2);
    let status: BoxdStatus =
        boxd.control(Method::PUT, "/control/state").body(serde_json::to_vec(&old).unwrap()).send().await.ok(200).json();
    assert_eq!(status.state_version, 2);
    boxd.get("/v1/archive?path=/workspace").send().await.refused(401, "TOKEN_REVOKED");
}

#[tokio::test]
async fn a_push_with_unreadable_keys_is_refused_and_the_old_keys_stay() {
    let mut boxd = TestBoxd::start();
    let mut broken = boxd.state.clone();
    broken.version = 9;
    broken.keys[0].key = cobox_protocol::Secret::new("not base64!");
    let answer = boxd.control(Method::PUT, "/control/state").body(serde_json::to_vec(&broken).unwrap()).send().await;
    answer.refused(400, "INVALID_REQUEST");
    boxd.control(Method::PUT, "/control/state").body("{").send().await.refused(400, "INVALID_REQUEST");
    boxd.get("/v1/archive?path=/workspace").send().await.ok(200);
    assert_eq!(boxd.push().await.state_version, 2);
}

#[tokio::test]
async fn the_status_counts_authenticated_requests_only() {
    let boxd = TestBoxd::start();
    boxd.get("/v1/archive?path=/workspace").send().await.ok(200);
    boxd.get("/v1/files/workspace/none").send().await.refused(404, "FILE_NOT_FOUND");
    boxd.get("/v1/files/workspace/none").without("authorization").send().await.refused(401, "UNAUTHENTICATED");
    boxd.get("/healthz").send().await.ok(200);
    let status: BoxdStatus = boxd.control(Method::GET, "/control/status").send().await.ok(200).json();
    assert_eq!((status.requests, status.state_version), (2, 1));
    assert_eq!(status.sandbox_id, boxd.sandbox_id);
}

#[tokio::test]
async fn a_shutdown_is_answered_and_then_boxd_ends() {
    let mut boxd = TestBoxd::start();
    boxd.control(Method::POST, "/control/shutdown").send().await.ok(202);
    tokio::time::timeout(SOON, boxd.served.take().unwrap()).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn boxd_ends_after_its_lease_without_a_broker() {
    let mut boxd = TestBoxd::start_with(|config| {
        config.state.lease_expires_at = Timestamp::from_unix(Timestamp::now().unix() - 3600);
        config.dataplane.lease_grace_seconds = 1;
    });
    tokio::time::timeout(SOON, boxd.served.take().unwrap()).await.unwrap().unwrap().unwrap();
    assert!(boxd.shutdown.is_cancelled());
}

#[tokio::test]
async fn a_lease_that_a_push_ended_still_has_its_grace_period() {
    let mut boxd = TestBoxd::start();
    boxd.state.lease_expires_at = Timestamp::from_unix(Timestamp::now().unix() - 3600);
    assert_eq!(boxd.push().await.state_version, 2);
    // The broker has just sent a push, so it is reachable and decides.
    boxd.get("/healthz").send().await.ok(200);
    assert!(tokio::time::timeout(Duration::from_millis(50), boxd.shutdown.cancelled()).await.is_err());
}

#[tokio::test]
async fn a_full_disk_refuses_writes_and_allows_reads_and_deletes() {
    let mut boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/a", "x").send().await.ok(201);
    boxd.state.disk_full = true;
    boxd.push().await;
    boxd.put("/v1/files/workspace/b", "x").send().await.refused(507, "DISK_FULL");
    let tar = boxd.put("/v1/archive?path=/workspace", "").header("content-type", "application/x-tar").send().await;
    tar.refused(507, "DISK_FULL");
    boxd.get("/v1/files/workspace/a").send().await.ok(200);
    boxd.call(Method::DELETE, "/v1/files/workspace/a").send().await.ok(204);
    boxd.state.disk_full = false;
    boxd.push().await;
    boxd.put("/v1/files/workspace/b", "x").send().await.ok(201);
}
