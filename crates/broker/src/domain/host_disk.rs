//! Watches the disk that holds sandboxes' files and, unless it is elsewhere, the database. All writers are stopped before
//! it is full: a filesystem image that can't get a block from it fails and loses data that its programs had written.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures_util::{StreamExt, stream};

use super::lifecycle::{CONCURRENT_SANDBOXES, Lifecycle};

/// Interval of the check, which costs one system call. A fast disk takes 2 GB a second: a quarter of that fits into the
/// reserve.
pub const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Writers continue when a quarter more than the reserve is free, so that they don't stop and start at the threshold.
const CLEAR_DIVISOR: u64 = 4;
/// Time limit for the push to one sandbox; the reaper repeats it.
const TELL_WITHIN: Duration = Duration::from_secs(2);

/// Checks the disk at an interval; never returns.
pub async fn watch(lifecycle: Arc<Lifecycle>) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        look(&lifecycle).await;
    }
}

/// Stops all writers of this node when less than the reserve is free, and lets them continue when there is more again.
pub async fn look(lifecycle: &Arc<Lifecycle>) {
    let Some(disk) = lifecycle.deployment.provider.host_disk().await else { return };
    let was_full = lifecycle.is_host_full.load(Ordering::SeqCst);
    let enough = if was_full { disk.reserve.saturating_add(disk.reserve / CLEAR_DIVISOR) } else { disk.reserve };
    let is_full = disk.available < enough;
    if is_full == was_full {
        return;
    }
    lifecycle.is_host_full.store(is_full, Ordering::SeqCst);
    if is_full {
        tracing::error!(
            available_bytes = disk.available,
            reserve_bytes = disk.reserve,
            "the host's disk is nearly full: all sandboxes are stopped from writing until there is room; remove files, snapshots or sandboxes"
        );
    } else {
        tracing::info!(available_bytes = disk.available, "the host's disk has room again: sandboxes may write");
    }
    stream::iter(lifecycle.told_ids())
        .for_each_concurrent(CONCURRENT_SANDBOXES, |id| async move {
            match tokio::time::timeout(TELL_WITHIN, lifecycle.tell(&id)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(sandbox = %id, %error, "control push about the disk failed; retrying"),
                Err(_) => tracing::warn!(sandbox = %id, "control push about the disk timed out; retrying"),
            }
        })
        .await;
}
