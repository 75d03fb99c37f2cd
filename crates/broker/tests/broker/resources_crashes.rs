//! Tests of a broker that is killed while snapshots, volumes and pools are being created or removed: the next start
//! finishes them, once.

use crate::{
    fake_provider::IMAGE,
    harness::{World, eventually},
};
use cobox_broker::domain::resources::records::TemplateSpec;
use cobox_protocol::SnapshotId;
use serde_json::json;

#[tokio::test]
async fn a_volume_exists_completely_or_not_at_all_after_a_crash() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    world.provider.may_make.send_replace(false);
    let requested = ann.clone();
    let asking = tokio::spawn(async move { requested.post("/v1/volumes", json!({ "name": "data", "size_bytes": 1 << 20 })).await });
    let mounts = json!({ "mounts": [{ "volume": "data", "path": "/data" }] });
    eventually("the start of the creation", || async { ann.get("/v1/volumes/data").await.status == 200 }).await;
    assert_eq!(ann.post("/v1/sandboxes", mounts.clone()).await.error(423), "SANDBOX_STARTING");
    asking.abort();
    broker.kill().await;
    world.provider.may_make.send_replace(true);
    let broker = world.start().await;
    let ann = ann.at(&broker);
    broker.tick().await;
    eventually("the created volume", || async { world.provider.volumes.lock().unwrap().len() == 1 }).await;
    let mut made = ann.post("/v1/sandboxes", mounts.clone()).await;
    while made.status == 423 {
        made = ann.post("/v1/sandboxes", mounts.clone()).await;
    }
    let made = made.ok(201);
    ann.delete(&format!("/v1/sandboxes/{}", made["id"].as_str().unwrap())).await.ok(204);
    world.provider.may_make.send_replace(false);
    ann.delete("/v1/volumes/data").await.ok(204);
    assert_eq!(ann.get("/v1/volumes/data").await.error(404), "VOLUME_NOT_FOUND", "the response precedes the removal of the files");
    broker.kill().await;
    world.provider.may_make.send_replace(true);
    let broker = world.start().await;
    eventually("removal of the files", || async {
        broker.tick().await;
        world.provider.volumes.lock().unwrap().is_empty()
    })
    .await;
    ann.at(&broker).post("/v1/volumes", json!({ "name": "data", "size_bytes": 1 << 20 })).await.ok(201);
}

#[tokio::test]
async fn the_removal_of_a_snapshot_delays_no_request_and_survives_a_crash() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let sandbox = ann.post("/v1/sandboxes", json!({ "name": "dev" })).await.ok(201);
    let path = format!("/v1/sandboxes/{}/snapshots", sandbox["id"].as_str().unwrap());
    let taken: SnapshotId = ann.post(&path, json!({ "name": "s" })).await.ok(202)["id"].as_str().unwrap().parse().unwrap();
    eventually("the copy of the files", || async { world.provider.snapshots.lock().unwrap().contains(&taken) }).await;
    eventually("the snapshot to be ready", || async { ann.get(&format!("/v1/snapshots/{taken}")).await.json()["state"] == "ready" }).await;
    world.provider.may_make.send_replace(false);
    ann.delete(&format!("/v1/snapshots/{taken}")).await.ok(204);
    // Neither the response nor the reaper's round waited for it.
    broker.tick().await;
    assert_eq!(ann.get(&format!("/v1/snapshots/{taken}")).await.ok(200)["state"], "deleting");
    broker.kill().await;
    world.provider.may_make.send_replace(true);
    let broker = world.start().await;
    let ann = ann.at(&broker);
    eventually("removal of the snapshot", || async {
        broker.tick().await;
        ann.get(&format!("/v1/snapshots/{taken}")).await.status == 404
    })
    .await;
    assert!(world.provider.snapshots.lock().unwrap().is_empty());
}

#[tokio::test]
async fn an_interrupted_filling_of_a_pool_is_completed() {
    let mut world = World::new();
    world.config.templates.insert("python".to_owned(), TemplateSpec { image: Some(IMAGE.to_owned()), ..TemplateSpec::default() });
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    world.provider.may_start.send_replace(false);
    ann.post("/v2/sandboxes/pools", json!({ "name": "warm", "template_name": "python", "replicas": 3, "wait_for_ready": false }))
        .await
        .ok(201);
    let starts = || world.provider.made_of.lock().unwrap().len();
    eventually("three starts", || async { starts() == 3 }).await;
    broker.kill().await;
    world.provider.may_start.send_replace(true);
    let broker = world.start().await;
    let ann = ann.at(&broker);
    eventually("three pool members", || async {
        broker.tick().await;
        ann.get("/v2/sandboxes/pools/warm").await.ok(200)["ready_replicas"] == 3
    })
    .await;
    assert_eq!((world.provider.running(), starts()), (3, 3), "no further sandboxes are started");
}
