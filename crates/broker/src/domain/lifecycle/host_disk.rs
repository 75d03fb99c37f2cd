//! Watches the disks that hold sandboxes' files and the database. All writers are stopped before one is full: a filesystem image that can't
//! get a block from it fails and loses data that its programs had written. A sandbox that still takes space after that, through files mapped
//! into memory, is suspended.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use cobox_protocol::{ApiError, SandboxId};
use cobox_provider::HostDisk;
use futures_util::{StreamExt, future::join_all, stream};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::transitions::{CONCURRENT_SANDBOXES, Lifecycle, unavailable};

/// Longest time between two checks, each of which costs a few system calls.
pub const MAX_INTERVAL: Duration = Duration::from_millis(250);
/// Shortest time between two checks.
const MIN_INTERVAL: Duration = Duration::from_millis(10);
/// A full disk is checked at the shortest interval for this long after it lost space.
const FAST_CHECK_TIME: Duration = Duration::from_secs(1);
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
/// How long the removal of the ballast file waits for growing sandboxes to end.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause before a suspension that failed is tried again.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// What the last check found.
#[derive(Default)]
pub struct HostDiskState {
    is_full: AtomicBool,
    /// Locked during a check: the background task and the reaper both do it.
    trend: tokio::sync::Mutex<Trend>,
    /// The sandboxes of this node while writers are stopped.
    stopped: Mutex<HashMap<SandboxId, StoppedSandbox>>,
}

/// Whether a full disk still loses space.
#[derive(Default)]
struct Trend {
    available: Option<u64>,
    shrank_at: Option<Instant>,
}

#[derive(Clone, Copy)]
enum StoppedSandbox {
    /// Its control push was begun then. What it writes until it has received it is tolerated.
    Notified(Instant),
    /// Bytes of the disk that its images may use, and that they used at the last check.
    Limited {
        max: u64,
        last: u64,
    },
    Suspending,
}

impl HostDiskState {
    pub fn is_full(&self) -> bool {
        self.is_full.load(Ordering::SeqCst)
    }
}

impl Trend {
    /// Time until the next check of a full disk.
    fn pause(&mut self, available: u64) -> Duration {
        if self.available.replace(available).is_none_or(|before| available < before) {
            self.shrank_at = Some(Instant::now());
        }
        if self.shrank_at.is_some_and(|at| at.elapsed() < FAST_CHECK_TIME) { MIN_INTERVAL } else { MAX_INTERVAL }
    }
}

impl StoppedSandbox {
    fn limited(allocated: u64, unwritten: u64) -> Self {
        Self::Limited { max: allocated.saturating_add(unwritten).saturating_add(TOLERATED_GROWTH), last: allocated }
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
    let (context, state) = (&lifecycle.context, &lifecycle.control_push.host_disk);
    let mut trend = state.trend.lock().await;
    let disk = context.provider.host_disk().await;
    if let Err(error) = release_ballast_if_full(lifecycle).await {
        tracing::error!(%error, "the host's disk is full, and removing the ballast file failed");
    }
    let Some(disk) = disk else {
        set_ballast_aside(lifecycle, u64::MAX);
        return MAX_INTERVAL;
    };
    let was_full = state.is_full();
    let is_full = disk.writable() < if was_full { clear_at(disk) } else { disk.reserve };
    if is_full != was_full {
        state.is_full.store(is_full, Ordering::SeqCst);
        push_to_all(lifecycle, disk, is_full);
    }
    if is_full {
        if disk.writable() < disk.reserve / GROWTH_DIVISOR {
            suspend_growing(lifecycle, false).await;
        }
        return trend.pause(disk.available);
    }
    *trend = Trend::default();
    state.stopped.lock().clear();
    if disk.writable() >= clear_at(disk) {
        set_ballast_aside(lifecycle, disk.reserve);
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

/// The sandboxes that grow end first: the space is for the broker.
async fn release_ballast_if_full(lifecycle: &Arc<Lifecycle>) -> std::io::Result<()> {
    let ballast = &lifecycle.context.ballast;
    if !ballast.is_needed()? {
        return Ok(());
    }
    let ended = suspend_growing(lifecycle, true).await;
    if tokio::time::timeout(END_TIMEOUT, join_all(ended)).await.is_err() {
        tracing::warn!("sandboxes that fill the host's disk did not end in time");
    }
    ballast.release()?;
    tracing::error!("the host's disk is full; the ballast file was removed");
    Ok(())
}

fn set_ballast_aside(lifecycle: &Lifecycle, reserve: u64) {
    if let Err(error) = lifecycle.context.ballast.set_aside(reserve) {
        tracing::warn!(%error, "reserving disk space failed; retrying");
    }
}

/// Notifies the sandboxes in the background: the check must not wait for a slow one.
fn push_to_all(lifecycle: &Arc<Lifecycle>, disk: HostDisk, is_full: bool) {
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
    let ids = lifecycle.control_push.pushed_ids();
    if is_full {
        let now = Instant::now();
        *lifecycle.control_push.host_disk.stopped.lock() = ids.iter().map(|id| (id.clone(), StoppedSandbox::Notified(now))).collect();
    }
    let lifecycle = lifecycle.clone();
    lifecycle.context.background.clone().spawn(async move {
        stream::iter(&ids).for_each_concurrent(CONCURRENT_SANDBOXES, |id| push_to_one(&lifecycle, id)).await;
        if is_full {
            // What was written before the stop is on the disk then, and doesn't count as growth. Unwritten data alone doesn't show all of it.
            let written = tokio::task::spawn_blocking(rustix::fs::sync);
            if tokio::time::timeout(PUSH_TIMEOUT, written).await.is_err() {
                tracing::warn!("writing all data to disk takes long");
            }
            stream::iter(&ids).for_each_concurrent(CONCURRENT_SANDBOXES, |id| limit_one(&lifecycle, id)).await;
        }
    });
}

async fn push_to_one(lifecycle: &Lifecycle, id: &SandboxId) {
    match tokio::time::timeout(PUSH_TIMEOUT, lifecycle.control_push.push(id)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(sandbox = %id, %error, "control push about the disk failed; retrying"),
        Err(_) => tracing::warn!(sandbox = %id, "control push about the disk timed out; retrying"),
    }
}

/// Limits what a stopped sandbox's images may use.
async fn limit_one(lifecycle: &Lifecycle, id: &SandboxId) {
    let usage = match lifecycle.context.load_sandbox(id).await {
        Ok(sandbox) => lifecycle.context.provider.image_usage(id, &sandbox.spec).await,
        // The next check that needs it measures it.
        Err(_) => None,
    };
    if let (Some(usage), Some(sandbox @ StoppedSandbox::Notified(_))) = (usage, lifecycle.control_push.host_disk.stopped.lock().get_mut(id))
    {
        *sandbox = StoppedSandbox::limited(usage.allocated, usage.unwritten);
    }
}

/// Suspends the sandboxes whose images have grown since writers were stopped, in the background; with `is_any_growth`, also those
/// that grew since the last check by less than is tolerated. Each receiver resolves when the processes of one have ended.
async fn suspend_growing(lifecycle: &Arc<Lifecycle>, is_any_growth: bool) -> Vec<oneshot::Receiver<()>> {
    let (context, state) = (&lifecycle.context, &lifecycle.control_push.host_disk);
    let mut running = match context.store.sandboxes_of_node(&context.node).await {
        Ok(sandboxes) => sandboxes,
        Err(error) => {
            tracing::warn!(%error, "listing the sandboxes that stopped writing failed; retrying");
            return Vec::new();
        }
    };
    running.retain(|sandbox| sandbox.is_running() && sandbox.intent.is_none());
    let ids: HashSet<&SandboxId> = running.iter().map(|sandbox| &sandbox.id).collect();
    state.stopped.lock().retain(|id, _| ids.contains(id));
    let mut ending = Vec::new();
    for sandbox in &running {
        let before = state.stopped.lock().get(&sandbox.id).copied();
        let is_busy = match before {
            Some(StoppedSandbox::Notified(at)) => at.elapsed() < PUSH_TIMEOUT,
            Some(StoppedSandbox::Suspending) => true,
            Some(StoppedSandbox::Limited { .. }) | None => false,
        };
        if is_busy {
            continue;
        }
        let Some(usage) = context.provider.image_usage(&sandbox.id, &sandbox.spec).await else { continue };
        let now = match before {
            Some(StoppedSandbox::Limited { max, last }) if usage.allocated > if is_any_growth { last } else { max } => {
                StoppedSandbox::Suspending
            }
            Some(StoppedSandbox::Limited { max, .. }) => StoppedSandbox::Limited { max, last: usage.allocated },
            Some(_) => StoppedSandbox::limited(usage.allocated, usage.unwritten),
            // It started after the stop: all that is unwritten was written through mapped files.
            None => StoppedSandbox::limited(usage.allocated, 0),
        };
        state.stopped.lock().insert(sandbox.id.clone(), now);
        if let (StoppedSandbox::Suspending, Some(StoppedSandbox::Limited { max, last })) = (now, before) {
            let (sandbox, allocated) = (&sandbox.id, usage.allocated);
            tracing::warn!(%sandbox, allocated, max, last, "a sandbox grows while the host's disk is full; ending its processes");
            let (ended, receiver) = oneshot::channel();
            ending.push(receiver);
            context.background.spawn(suspend(lifecycle.clone(), sandbox.clone(), allocated, ended));
        }
    }
    ending
}

async fn suspend(lifecycle: Arc<Lifecycle>, id: SandboxId, allocated: u64, ended: oneshot::Sender<()>) {
    const REASON: &str = "it went on writing while the host's disk was full";
    match end_and_suspend(&lifecycle, &id, REASON, ended).await {
        Ok(true) => tracing::warn!(sandbox = %id, allocated_bytes = allocated, "a sandbox was suspended: {REASON}"),
        // It was suspended or deleted in the meantime.
        Ok(false) => {}
        Err(error) => {
            tracing::warn!(sandbox = %id, %error, "suspending a sandbox that fills the host's disk failed; retrying");
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }
    // After a resume its user may delete files: it gets a new limit. After an error it is suspended when it grows again.
    lifecycle.control_push.host_disk.stopped.lock().remove(&id);
}

/// Ends the processes first, because all other steps take time or space. Returns whether it was running.
async fn end_and_suspend(lifecycle: &Lifecycle, id: &SandboxId, reason: &str, ended: oneshot::Sender<()>) -> Result<bool, ApiError> {
    let context = &lifecycle.context;
    let lock = lifecycle.locks.lock(id).await;
    let sandbox = context.load_sandbox(id).await?;
    if !sandbox.is_running() || !context.is_here(&sandbox) {
        return Ok(false);
    }
    if context.provider.can_suspend() {
        context.provider.suspend(id).await.map_err(|e| unavailable(id, "could not be suspended", &e.to_string()))?;
    }
    // The check may have stopped waiting.
    let _ = ended.send(());
    lifecycle.suspend_locked(id, reason, &lock, |_| true).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_is_checked_again_before_a_fast_disk_could_reach_its_reserve() {
        const GIB: u64 = 1 << 30;
        let after = |available, unwritten| interval(HostDisk { available, unwritten, reserve: GIB, holds_sandboxes: true });
        assert_eq!(after(100 * GIB, 0), MAX_INTERVAL);
        assert_eq!(after(3 * GIB / 2, 0), Duration::from_millis(128));
        assert_eq!(after(3 * GIB / 2, GIB / 4), Duration::from_millis(64));
        assert_eq!((after(GIB, 0), after(0, GIB)), (MIN_INTERVAL, MIN_INTERVAL));
    }
}
