//! Watches the disk that holds sandboxes' files and, unless it is elsewhere, the database. All writers are stopped before
//! it is full: a filesystem image that can't get a block from it fails and loses data that its programs had written. A
//! sandbox that still takes space after that, through files mapped into memory, is suspended.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use cobox_protocol::SandboxId;
use cobox_provider::{HostDisk, SandboxSpec};
use futures_util::{StreamExt, stream};
use parking_lot::Mutex;

use super::transitions::{CONCURRENT_SANDBOXES, Lifecycle};

/// Longest time between two checks, each of which costs two system calls.
pub const MAX_INTERVAL: Duration = Duration::from_millis(250);
/// Shortest time between two checks.
const MIN_INTERVAL: Duration = Duration::from_millis(10);
/// Writing speed of a fast disk, in bytes per millisecond. The next check is due before such a disk is at its reserve.
const DISK_SPEED: u64 = 4 << 20;
/// Writers continue when a quarter more than the reserve is free, so that they don't stop and start at the threshold.
const CLEAR_DIVISOR: u64 = 4;
/// Sandboxes that still grow are suspended when less than this fraction of the reserve is free.
const GROWTH_DIVISOR: u64 = 2;
/// Growth of a stopped sandbox that is tolerated, in bytes: metadata, and blocks that the filesystem allocates in advance.
const TOLERATED_GROWTH: u64 = 16 << 20;
/// Time limit for the push to one sandbox; the reaper repeats it.
const PUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// What the last check found.
#[derive(Default)]
pub struct HostDiskState {
    is_full: AtomicBool,
    /// The sandboxes that were running when writers were stopped; `None` until they are known.
    stopped: Mutex<Option<HashMap<SandboxId, StoppedSandbox>>>,
}

struct StoppedSandbox {
    spec: SandboxSpec,
    /// Bytes of the disk that its images may use when everything written before the stop has reached them.
    max_allocated: u64,
}

impl HostDiskState {
    pub fn is_full(&self) -> bool {
        self.is_full.load(Ordering::SeqCst)
    }
}

/// Checks the disk at an interval; never returns.
pub async fn watch(lifecycle: Arc<Lifecycle>) {
    loop {
        let pause = check(&lifecycle).await;
        tokio::time::sleep(pause).await;
    }
}

/// Stops all writers of this node when less than the reserve is free, and lets them continue when there is more again. Returns
/// the time until the next check.
pub async fn check(lifecycle: &Arc<Lifecycle>) -> Duration {
    let Some(disk) = lifecycle.context.provider.host_disk().await else { return MAX_INTERVAL };
    match lifecycle.context.ballast.release_if_full() {
        Ok(false) => {}
        Ok(true) => {
            tracing::error!(available_bytes = disk.available, "the host's disk is full; the broker uses its reserved space")
        }
        Err(error) => tracing::error!(%error, "the host's disk is full, and releasing the reserved space failed"),
    }
    let was_full = lifecycle.control_push.host_disk.is_full();
    let is_full = disk.writable() < if was_full { clear_at(disk) } else { disk.reserve };
    if is_full != was_full {
        lifecycle.control_push.host_disk.is_full.store(is_full, Ordering::SeqCst);
        push_to_all(lifecycle, disk, is_full).await;
    }
    if is_full {
        suspend_growing(lifecycle, disk).await;
        return MAX_INTERVAL;
    }
    lifecycle.control_push.host_disk.stopped.lock().take();
    if disk.writable() >= clear_at(disk)
        && let Err(error) = lifecycle.context.ballast.set_aside(disk.reserve)
    {
        tracing::warn!(%error, "reserving disk space failed; retrying");
    }
    interval(disk)
}

fn clear_at(disk: HostDisk) -> u64 {
    disk.reserve.saturating_add(disk.reserve / CLEAR_DIVISOR)
}

fn interval(disk: HostDisk) -> Duration {
    let above_reserve = disk.writable().saturating_sub(disk.reserve);
    Duration::from_millis(above_reserve / DISK_SPEED).clamp(MIN_INTERVAL, MAX_INTERVAL)
}

async fn push_to_all(lifecycle: &Arc<Lifecycle>, disk: HostDisk, is_full: bool) {
    if is_full {
        tracing::error!(
            available_bytes = disk.available,
            unwritten_bytes = disk.unwritten,
            reserve_bytes = disk.reserve,
            "the host's disk is nearly full; all sandboxes are stopped from writing until space is free; remove files, snapshots or \
             sandboxes"
        );
    } else {
        tracing::info!(available_bytes = disk.available, "the host's disk has free space again; sandboxes may write");
    }
    stream::iter(lifecycle.control_push.pushed_ids())
        .for_each_concurrent(CONCURRENT_SANDBOXES, |id| async move {
            match tokio::time::timeout(PUSH_TIMEOUT, lifecycle.control_push.push(&id)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(sandbox = %id, %error, "control push about the disk failed; retrying"),
                Err(_) => tracing::warn!(sandbox = %id, "control push about the disk timed out; retrying"),
            }
        })
        .await;
}

/// Suspends the sandboxes whose images have grown since writers were stopped, if the disk is at risk.
async fn suspend_growing(lifecycle: &Arc<Lifecycle>, disk: HostDisk) {
    const REASON: &str = "it went on writing while the host's disk was full";
    let context = &lifecycle.context;
    let stopped = lifecycle.control_push.host_disk.stopped.lock().take();
    let mut stopped = match stopped {
        Some(stopped) => stopped,
        None => match running_sandboxes(lifecycle).await {
            Ok(stopped) => stopped,
            Err(error) => return tracing::warn!(%error, "listing the sandboxes that stopped writing failed; retrying"),
        },
    };
    if disk.available < disk.reserve / GROWTH_DIVISOR {
        for (id, sandbox) in &mut stopped {
            let Some(usage) = context.provider.image_usage(id, &sandbox.spec).await.filter(|u| u.allocated > sandbox.max_allocated) else {
                continue;
            };
            tracing::warn!(sandbox = %id, allocated_bytes = usage.allocated, "a sandbox is suspended: {REASON}");
            if let Err(error) = lifecycle.suspend(id, REASON, |_| true).await {
                tracing::warn!(sandbox = %id, %error, "suspending a sandbox that fills the host's disk failed; retrying");
            }
        }
    }
    lifecycle.control_push.host_disk.stopped.lock().replace(stopped);
}

async fn running_sandboxes(lifecycle: &Lifecycle) -> Result<HashMap<SandboxId, StoppedSandbox>, crate::store::StoreError> {
    let context = &lifecycle.context;
    let mut stopped = HashMap::new();
    for sandbox in context.store.sandboxes_of_node(&context.node).await?.into_iter().filter(|s| s.is_running()) {
        let Some(usage) = context.provider.image_usage(&sandbox.id, &sandbox.spec).await else { continue };
        let max_allocated = usage.allocated.saturating_add(usage.unwritten).saturating_add(TOLERATED_GROWTH);
        stopped.insert(sandbox.id, StoppedSandbox { spec: sandbox.spec, max_allocated });
    }
    Ok(stopped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_is_checked_again_before_a_fast_disk_could_reach_its_reserve() {
        const GIB: u64 = 1 << 30;
        let after = |available, unwritten| interval(HostDisk { available, unwritten, reserve: GIB });
        assert_eq!(after(100 * GIB, 0), MAX_INTERVAL);
        assert_eq!(after(3 * GIB / 2, 0), Duration::from_millis(128));
        assert_eq!(after(3 * GIB / 2, GIB / 4), Duration::from_millis(64));
        assert_eq!((after(GIB, 0), after(0, GIB)), (MIN_INTERVAL, MIN_INTERVAL));
    }
}
