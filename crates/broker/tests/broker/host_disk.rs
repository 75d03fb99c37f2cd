//! Tests of the host's disk: writers stop before it is full, and a sandbox whose filesystem failed is suspended until
//! its next start.

use cobox_provider::{FailedDisk, HostDisk};

use crate::harness::{World, eventually, sandbox_id};

#[tokio::test]
async fn all_writers_stop_below_the_reserve_and_go_on_a_quarter_above_it() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let ids = [sandbox_id(&ann.ensure("a").await), sandbox_id(&ann.ensure("b").await)];
    let set = |available| *world.provider.host_disk.lock().unwrap() = Some(HostDisk { available, reserve: 1000 });
    let are_stopped = || ids.each_ref().map(|id| world.provider.boxd(id).state.lock().unwrap().disk_full);
    set(1000);
    broker.tick().await;
    assert_eq!(are_stopped(), [false, false]);
    set(999);
    // A background task does this without a tick.
    eventually("both are stopped", || async { are_stopped() == [true, true] }).await;
    set(1249);
    broker.tick().await;
    assert_eq!(are_stopped(), [true, true], "at the edge they would stop and go");
    set(1250);
    eventually("both go on", || async { are_stopped() == [false, false] }).await;
}

#[tokio::test]
async fn a_sandbox_whose_filesystem_failed_is_suspended_with_the_reason_and_starts_again() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let (failed, well) = (sandbox_id(&ann.ensure("a").await), sandbox_id(&ann.ensure("b").await));
    *world.provider.failed_disks.lock().unwrap() = vec![FailedDisk::Sandbox(failed.clone())];
    world.clock.advance(10);
    broker.tick().await;
    assert_eq!((ann.state(&failed).await, ann.state(&well).await), ("suspended".into(), "active".into()));
    let shown = ann.get(&format!("/v1/sandboxes/{failed}")).await.ok(200);
    assert!(shown["reason"].as_str().unwrap().contains("filesystem failed"), "{shown}");
    world.provider.failed_disks.lock().unwrap().clear();
    assert_eq!(sandbox_id(&ann.ensure("a").await), failed);
}
