//! Tests of the host's disk: writers stop before it is full, and a sandbox whose filesystem failed is suspended until
//! its next start.

use std::sync::atomic::Ordering;

use cobox_provider::{FailedDisk, HostDisk, ImageUsage};

use cobox_protocol::SandboxId;

use crate::harness::{Client, World, eventually, sandbox_id};

fn disk(available: u64, unwritten: u64) -> HostDisk {
    HostDisk { available, unwritten, reserve: 1000, holds_sandboxes: true }
}

#[tokio::test]
async fn all_writers_stop_below_the_reserve_and_continue_a_quarter_above_it() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let ids = [sandbox_id(&ann.ensure("a").await), sandbox_id(&ann.ensure("b").await)];
    let set = |available| *world.provider.host_disk.lock().unwrap() = Some(disk(available, 0));
    let are_stopped = || ids.each_ref().map(|id| world.provider.boxd(id).state.lock().unwrap().disk_full);
    set(1000);
    broker.tick().await;
    assert_eq!(are_stopped(), [false, false]);
    set(999);
    // A background task does this without a tick.
    eventually("both sandboxes to be stopped from writing", || async { are_stopped() == [true, true] }).await;
    set(1249);
    broker.tick().await;
    assert_eq!(are_stopped(), [true, true], "the state must not alternate at the threshold");
    set(1250);
    eventually("both sandboxes to be allowed to write", || async { are_stopped() == [false, false] }).await;
}

#[tokio::test]
async fn writers_stop_before_what_they_wrote_is_on_the_disk() {
    let world = World::new();
    let broker = world.start().await;
    let id = sandbox_id(&broker.human("ann").await.ensure("a").await);
    let is_stopped = || world.provider.boxd(&id).state.lock().unwrap().disk_full;
    *world.provider.host_disk.lock().unwrap() = Some(disk(5000, 4000));
    broker.tick().await;
    assert!(!is_stopped());
    *world.provider.host_disk.lock().unwrap() = Some(disk(5000, 4001));
    eventually("the sandbox to be stopped from writing", || async { is_stopped() }).await;
}

const MIB: u64 = 1 << 20;

fn set_usage(world: &World, id: &SandboxId, allocated: u64, unwritten: u64) {
    let usage = ImageUsage { allocated: allocated * MIB, unwritten: unwritten * MIB };
    world.provider.image_usage.lock().unwrap().insert(id.clone(), usage);
}

/// Lets a sandbox's image grow until the sandbox is suspended.
async fn grow_until_suspended(world: &World, client: &Client, id: &SandboxId) {
    eventually("it is suspended", || async {
        world.provider.image_usage.lock().unwrap().get_mut(id).unwrap().allocated += 20 * MIB;
        client.state(id).await == "suspended"
    })
    .await;
    let displayed = client.get(&format!("/v1/sandboxes/{id}")).await.ok(200);
    assert!(displayed["reason"].as_str().unwrap().contains("while the host's disk was full"), "{displayed}");
}

#[tokio::test]
async fn a_sandbox_that_grows_after_writers_were_stopped_is_suspended() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let (growing, flushing) = (sandbox_id(&ann.ensure("a").await), sandbox_id(&ann.ensure("b").await));
    set_usage(&world, &growing, 10, 0);
    set_usage(&world, &flushing, 10, 90);
    *world.provider.host_disk.lock().unwrap() = Some(disk(999, 0));
    let are_stopped = || [&growing, &flushing].map(|id| world.provider.boxd(id).state.lock().unwrap().disk_full);
    eventually("both sandboxes to be stopped from writing", || async { are_stopped() == [true, true] }).await;
    broker.tick().await;
    // What had been written before the stop reaches the disk; the other one writes more.
    set_usage(&world, &flushing, 100, 0);
    set_usage(&world, &growing, 30, 0);
    broker.tick().await;
    assert_eq!(
        (ann.state(&growing).await, ann.state(&flushing).await),
        ("active".into(), "active".into()),
        "a sandbox that stopped writing is not suspended"
    );
    *world.provider.host_disk.lock().unwrap() = Some(disk(499, 0));
    grow_until_suspended(&world, &ann, &growing).await;
    assert_eq!(ann.state(&flushing).await, "active");

    // Its user can return, for example to delete files.
    ann.ensure("a").await;
    for _ in 0..3 {
        broker.tick().await;
        assert_eq!(ann.state(&growing).await, "active", "it doesn't grow any more");
    }
    grow_until_suspended(&world, &ann, &growing).await;
}

#[tokio::test]
async fn a_sandbox_that_starts_on_a_full_disk_and_grows_is_suspended() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let early = sandbox_id(&ann.ensure("early").await);
    set_usage(&world, &early, 10, 0);
    *world.provider.host_disk.lock().unwrap() = Some(disk(499, 0));
    eventually("it is stopped", || async { world.provider.boxd(&early).state.lock().unwrap().disk_full }).await;
    broker.tick().await;
    let late = sandbox_id(&ann.ensure("late").await);
    set_usage(&world, &late, 10, 60);
    grow_until_suspended(&world, &ann, &late).await;
    assert_eq!(ann.state(&early).await, "active");
}

#[tokio::test]
async fn a_sandbox_that_does_not_answer_delays_no_suspension_of_another() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let (silent, growing) = (sandbox_id(&ann.ensure("a").await), sandbox_id(&ann.ensure("b").await));
    set_usage(&world, &silent, 10, 0);
    set_usage(&world, &growing, 10, 0);
    world.provider.boxd(&silent).ignores_pushes.store(true, Ordering::SeqCst);
    *world.provider.host_disk.lock().unwrap() = Some(disk(499, 0));
    grow_until_suspended(&world, &ann, &growing).await;
    assert_eq!(ann.state(&silent).await, "active");
}

#[tokio::test]
async fn space_is_set_aside_for_the_database_also_if_sandboxes_are_elsewhere() {
    let world = World::new();
    assert!(world.provider.host_disk.lock().unwrap().is_none());
    let _broker = world.start().await;
    eventually("the ballast file exists", || async { world.config.data_dir.join("ballast").exists() }).await;
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
    let displayed = ann.get(&format!("/v1/sandboxes/{failed}")).await.ok(200);
    assert!(displayed["reason"].as_str().unwrap().contains("filesystem failed"), "{displayed}");
    world.provider.failed_disks.lock().unwrap().clear();
    assert_eq!(sandbox_id(&ann.ensure("a").await), failed);
}
