//! The reaper: periodically checks the sandboxes of this node for leases, hard ends, disk limits and unfinished
//! operations, and cleans up after dead nodes.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use cobox_protocol::{ApiError, SandboxId, Timestamp, session::State};
use cobox_provider::{DiskUsage, FailedDisk, HostDisk, control};
use futures_util::{StreamExt, stream};
use parking_lot::Mutex;

use super::{
    host_disk, quarantine,
    remote_node::apply_lease_of_orphan,
    transitions::{CONCURRENT_SANDBOXES, Lifecycle},
};
use crate::{
    domain::{
        audit::restore_detection::AuditMark,
        context::store_error,
        model::{AuditRecord, COUNT_RUNNING_EVERY, HARD_END, IDEMPOTENCY_KEEP, Intent, Sandbox, SessionWithSandbox},
    },
    policy::{HardEnd, Lifetimes},
    store::{DueTimes, Ending, RetentionLimits, Stored, TimeAccounting},
};

/// How often boxd is asked for its open streams; it is always asked before a sandbox becomes idle or suspended.
const STATUS_INTERVAL: Duration = Duration::from_secs(60);
/// How often a soft disk limit is compared with the usage: counting may mean walking the files.
const MEASURE_DISK_INTERVAL: Duration = Duration::from_secs(2);
/// How often filesystems are checked for failures.
const FAILED_DISK_INTERVAL: Duration = Duration::from_secs(2);
/// How often an operation that failed at the provider is retried.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// A lease that moved by less than this isn't pushed.
const PUSH_LEASE_STEP: Duration = Duration::from_secs(60);
/// A sandbox receives a push at least this often: well within the shortest sensible lease.
const PUSH_INTERVAL: Duration = Duration::from_secs(300);
/// Writers continue when usage is down to this percentage of the disk limit: a little below full, to avoid flapping.
const DISK_CLEAR_PERCENT: u64 = 95;
/// What a stopped writer may still write between two measurements.
const FULL_DISK_GROWTH_BYTES: u64 = 64 << 20;
const PRUNE_INTERVAL: Duration = Duration::from_secs(3600);
/// Ended sessions are answered with an explanation (`410`) for this long, then as unknown (`404`).
const ENDED_KEEP: Duration = Duration::from_secs(30 * 24 * 3600);

/// Reconciles the resources that sandboxes are made of. Implemented by `resources`.
#[async_trait]
pub trait ResourceUpkeep: Send + Sync {
    /// One pass over all resources of this node. Failures are logged and retried in the next pass.
    async fn tick(&self);
}

pub struct Reaper {
    lifecycle: Arc<Lifecycle>,
    resources: Arc<dyn ResourceUpkeep>,
    audit_mark: Arc<AuditMark>,
    check_times: Mutex<HashMap<SandboxId, CheckTimes>>,
    pruned: Mutex<Option<Timestamp>>,
    counted_downtime: Mutex<Option<Timestamp>>,
    failed_disks_checked: Mutex<Option<Timestamp>>,
}

/// When each periodic check of one sandbox last ran.
#[derive(Clone, Copy, Default)]
struct CheckTimes {
    usage_asked_at: Option<Timestamp>,
    requests: Option<u64>,
    disk_measured_at: Option<Timestamp>,
    /// Disk usage at the last measurement.
    used: Option<DiskUsage>,
    retried_at: Option<Timestamp>,
}

impl Reaper {
    pub fn new(lifecycle: Arc<Lifecycle>, resources: Arc<dyn ResourceUpkeep>, audit_mark: Arc<AuditMark>) -> Self {
        Self {
            lifecycle,
            resources,
            audit_mark,
            check_times: Mutex::default(),
            pruned: Mutex::default(),
            counted_downtime: Mutex::default(),
            failed_disks_checked: Mutex::default(),
        }
    }

    /// One pass over everything. Failures are logged and retried in the next pass.
    pub async fn tick(&self) {
        let context = &self.lifecycle.context;
        let now = context.now();
        if let Err(error) = context.store.note(&self.lifecycle.last_used.due(now)).await {
            tracing::error!(%error, "writing last-use times failed");
        }
        if let Err(error) = context.nodes.send_heartbeat(&context.store, &*context.clock).await {
            tracing::error!(%error, "writing the heartbeat failed");
        }
        if let Err(error) = self.count_downtime(now).await {
            // What is due depends on it.
            return tracing::error!(%error, "writing retention times failed; retrying in the next round");
        }
        let due_by = DueTimes {
            now,
            suspended: before(now, context.config.keep_suspended()),
            // On a full disk also those that have not expired: see `purge_for_room`.
            restorable: if self.lifecycle.control_push.host_disk.is_full() { now.plus(context.config.keep_deleted()) } else { now },
        };
        let sandboxes = match context.store.sandboxes_due(&context.node, due_by).await {
            Ok(sandboxes) => sandboxes,
            Err(error) => return tracing::error!(%error, "listing the sandboxes of this node failed"),
        };
        // Regularly, so that time without a broker is not taken for running time.
        if sandboxes.iter().filter_map(|s| s.counted_until).any(|counted| counted.is_due(COUNT_RUNNING_EVERY, now))
            && let Err(error) = context.store.count_running(&context.node, now, TimeAccounting::REGULAR).await
        {
            tracing::error!(%error, "writing running times failed; retrying in the next round");
        }
        host_disk::check(&self.lifecycle).await;
        self.suspend_failed(&sandboxes, now).await;
        let present: HashMap<&SandboxId, bool> = sandboxes.iter().map(|s| (&s.id, s.is_running())).collect();
        self.check_times.lock().retain(|id, _| present.contains_key(id));
        self.lifecycle.last_used.retain(now, |id| present.get(id).copied().unwrap_or(false));
        stream::iter(&sandboxes)
            .for_each_concurrent(CONCURRENT_SANDBOXES, |sandbox| async move {
                if let Err(error) = self.check_sandbox(sandbox, now).await {
                    tracing::warn!(sandbox = %sandbox.id, %error, "checking a sandbox failed; retrying");
                }
            })
            .await;
        self.purge_for_room(&sandboxes, now).await;
        self.resources.tick().await;
        for node in context.nodes.dead(now) {
            self.apply_leases_of_dead_node(&node).await;
        }
        quarantine::tick(context, &self.lifecycle.quarantine, now).await;
        self.audit_mark.save(&context.store, now).await;
        self.prune(now).await;
    }

    async fn count_downtime(&self, now: Timestamp) -> Stored<()> {
        let counted = *self.counted_downtime.lock();
        if counted.is_none_or(|at| at.is_due(COUNT_RUNNING_EVERY, now)) {
            self.lifecycle.count_downtime(now, TimeAccounting::REGULAR).await?;
            *self.counted_downtime.lock() = Some(now);
        }
        Ok(())
    }

    /// Applies what is due to a dead node's sandboxes. Every broker does this; each change is made once.
    async fn apply_leases_of_dead_node(&self, node: &str) {
        let orphans = match self.lifecycle.context.store.sandboxes_due(node, DueTimes::NONE).await {
            Ok(orphans) => orphans,
            Err(error) => return tracing::error!(%error, node, "listing the sandboxes of a dead node failed"),
        };
        for sandbox in orphans {
            if let Err(error) = apply_lease_of_orphan(&self.lifecycle.context, &sandbox).await {
                tracing::warn!(sandbox = %sandbox.id, %error, "checking a dead node's sandbox failed; retrying");
            }
        }
    }

    async fn check_sandbox(&self, sandbox: &Sandbox, now: Timestamp) -> Result<(), ApiError> {
        if sandbox.intent.is_some() {
            // While another task holds the lock nothing can be tried, so this round must not put off the next try.
            if !self.lifecycle.is_busy(&sandbox.id) && self.is_check_due(&sandbox.id, |s| &mut s.retried_at, RETRY_INTERVAL, now) {
                self.lifecycle.finish_intent(sandbox).await;
            }
            return Ok(());
        }
        match sandbox.state {
            State::Active | State::Idle => self.check_running_sandbox(sandbox, now).await,
            State::Suspended => self.check_suspended_sandbox(sandbox, now).await,
            State::Terminated if sandbox.restore_until.is_some_and(|until| until <= now) => {
                let reason = "the time in which it could be restored is over";
                tracing::info!(sandbox = %sandbox.id, reason, "a deleted sandbox is purged");
                let audit = AuditRecord::of_sandbox(now, sandbox, "sandbox.purged", reason);
                self.lifecycle.purge(sandbox, &audit).await
            }
            State::Provisioning | State::Terminated | State::Failed => Ok(()),
        }
    }

    async fn check_running_sandbox(&self, sandbox: &Sandbox, now: Timestamp) -> Result<(), ApiError> {
        let (lifecycle, context) = (&self.lifecycle, &self.lifecycle.context);
        if lifecycle.is_busy(&sandbox.id) {
            return Ok(());
        }
        let Lifetimes { idle_timeout, lease, hard_ttl } = context.lifetimes(sandbox);
        if sandbox.active_until(now) >= hard_ttl && self.end_overdue(sandbox, now).await? {
            return Ok(());
        }
        let idle_time = |s: &Sandbox| now.saturating_since(lifecycle.last_use(s));
        if sandbox.pool.is_some() && idle_time(sandbox) >= idle_timeout / 2 {
            // A standby sandbox must keep running until it is taken.
            lifecycle.last_used.record_sandbox_use(&sandbox.id, now);
        }
        let is_silent = idle_time(sandbox) >= idle_timeout;
        if self.is_check_due(&sandbox.id, |s| &mut s.usage_asked_at, if is_silent { Duration::ZERO } else { STATUS_INTERVAL }, now)
            && self.is_in_use(sandbox).await
        {
            lifecycle.last_used.record_sandbox_use(&sandbox.id, now);
            // This was not a request through the gateway, so boxd's count must not be compared with it.
            lifecycle.last_used.take_forwarded(&sandbox.id);
        }
        if idle_time(sandbox) >= lease {
            lifecycle.suspend(&sandbox.id, "its lease ran out", |s| idle_time(s) >= lease).await?;
            return Ok(());
        }
        if sandbox.state == State::Active && idle_time(sandbox) >= idle_timeout {
            let idle = Sandbox { state: State::Idle, ..sandbox.clone() };
            let audit = AuditRecord::of_sandbox(now, sandbox, "sandbox.idle", "no activity");
            // A concurrent change wins; the next tick checks again.
            context.store.replace_sandbox(sandbox, &idle, Some(&audit)).await.map_err(store_error)?;
        }
        if sandbox.state == State::Idle && idle_time(sandbox) < idle_timeout {
            // It became idle while its use was being recorded.
            let active = Sandbox { state: State::Active, last_active_at: lifecycle.last_use(sandbox), ..sandbox.clone() };
            context.store.replace_sandbox(sandbox, &active, None).await.map_err(store_error)?;
        }
        self.measure_disk(sandbox, now).await?;
        self.push_if_due(sandbox, now).await
    }

    /// Purges deleted sandboxes before they expire, oldest first, while the host's disk has less than its reserve: at
    /// that point no sandbox of the node can write.
    async fn purge_for_room(&self, sandboxes: &[Sandbox], now: Timestamp) {
        let is_kept = |s: &&Sandbox| s.intent.is_none() && s.restore_until.is_some_and(|until| until > now);
        let mut kept: Vec<&Sandbox> = sandboxes.iter().filter(is_kept).collect();
        kept.sort_by_key(|s| (s.ended_at, s.id.clone()));
        for sandbox in kept {
            let is_full = |disk: &HostDisk| disk.holds_sandboxes && disk.available < disk.reserve;
            let Some(disk) = self.lifecycle.context.provider.host_disk().await.filter(is_full) else { return };
            let HostDisk { available, reserve, .. } = disk;
            let reason = format!("the host's disk has {available} bytes left, less than its reserve of {reserve}");
            tracing::warn!(sandbox = %sandbox.id, owner = sandbox.owner, reason, "a deleted sandbox is purged before it expires, to free disk space");
            let audit = AuditRecord::of_sandbox(now, sandbox, "sandbox.purged", &reason);
            if let Err(error) = self.lifecycle.purge(sandbox, &audit).await {
                tracing::warn!(sandbox = %sandbox.id, %error, "purging a deleted sandbox failed; retrying");
            }
        }
    }

    /// Ends sessions past their hard end, then suspends the sandbox, or ends it if the policy requires that. Returns
    /// whether the sandbox needs no further attention in this round.
    async fn end_overdue(&self, sandbox: &Sandbox, now: Timestamp) -> Result<bool, ApiError> {
        let (lifecycle, context) = (&self.lifecycle, &self.lifecycle.context);
        if sandbox.pool.is_some() {
            // If a request took it in the meantime, it has its full time.
            lifecycle.end_pool_member(sandbox, HARD_END).await?;
            return Ok(true);
        }
        let is_deleted = !sandbox.outlives_sessions() && context.hard_end(sandbox) == HardEnd::Delete;
        let sessions = context.store.sessions_on(&sandbox.id).await.map_err(store_error)?;
        let had_sessions = !sessions.is_empty();
        let mut left = sessions.len();
        for session in sessions {
            let bound = SessionWithSandbox { session, sandbox: sandbox.clone() };
            if bound.left(context.lifetimes(sandbox).hard_ttl, now).is_zero() {
                tracing::info!(sandbox = %sandbox.id, session = %bound.session.id, "a session reached its hard end");
                let audit = AuditRecord::new(now, &sandbox.workspace, "session.ended").about(&bound).detail(HARD_END);
                lifecycle
                    .end_session(&bound, Ending { keeps_sandbox: !is_deleted, ..context.restorable_ending(sandbox, HARD_END, audit) })
                    .await?;
                left -= 1;
            }
        }
        if left > 0 {
            return Ok(false);
        }
        if is_deleted {
            if !had_sessions {
                let audit = AuditRecord::of_sandbox(now, sandbox, "sandbox.ended", HARD_END);
                // A session that was bound to it in the meantime keeps it.
                if context
                    .store
                    .end_unbound_sandbox(&sandbox.id, &context.restorable_ending(sandbox, HARD_END, audit))
                    .await
                    .map_err(store_error)?
                    .is_some()
                {
                    lifecycle.destroy(&sandbox.id).await;
                }
            }
            return Ok(true);
        }
        lifecycle.suspend(&sandbox.id, HARD_END, |_| true).await?;
        // Its next period begins with its next use.
        context.store.renew_sandbox(&sandbox.id).await.map_err(store_error)?;
        Ok(true)
    }

    /// Whether boxd has open streams, or has answered more requests than were forwarded from here.
    async fn is_in_use(&self, sandbox: &Sandbox) -> bool {
        let forwarded = self.lifecycle.last_used.take_forwarded(&sandbox.id);
        let status = match control::fetch_status(&*self.lifecycle.context.provider, &sandbox.id).await {
            Ok(status) => status,
            Err(error) => {
                // The watcher detects whether boxd died; no answer means no activity.
                tracing::debug!(sandbox = %sandbox.id, %error, "fetching boxd's status failed");
                return false;
            }
        };
        let mut check_times = self.check_times.lock();
        let before = check_times.entry(sandbox.id.clone()).or_default().requests.replace(status.requests);
        let unseen = before.is_some_and(|before| status.requests.saturating_sub(before) > forwarded);
        status.open_streams > 0 || unseen
    }

    /// Above its disk limit a sandbox's writers are stopped. One that still fills the disk is suspended: nothing inside
    /// can prevent that, and it frees files that are open but deleted.
    async fn measure_disk(&self, sandbox: &Sandbox, now: Timestamp) -> Result<(), ApiError> {
        if !self.is_check_due(&sandbox.id, |s| &mut s.disk_measured_at, MEASURE_DISK_INTERVAL, now) {
            return Ok(());
        }
        let Some(disk) = self.lifecycle.context.provider.disk_usage(&sandbox.id, &sandbox.spec).await else { return Ok(()) };
        let before = {
            let mut check_times = self.check_times.lock();
            check_times.entry(sandbox.id.clone()).or_default().used.replace(disk)
        };
        let was_full = self.lifecycle.control_push.is_own_disk_full(&sandbox.id);
        let is_full = disk.used >= disk.limit || was_full && disk.used >= disk.limit / 100 * DISK_CLEAR_PERCENT;
        if is_full != was_full {
            tracing::info!(sandbox = %sandbox.id, used = disk.used, limit = disk.limit, is_full, "a sandbox crossed its disk limit");
            self.lifecycle.control_push.set_disk_full(&sandbox.id, is_full);
        }
        let has_grown =
            |before: DiskUsage| before.location == disk.location && disk.used.saturating_sub(before.used) > FULL_DISK_GROWTH_BYTES;
        if was_full && before.is_some_and(has_grown) {
            tracing::warn!(sandbox = %sandbox.id, used = disk.used, limit = disk.limit, "a sandbox exceeds its disk limit; suspending it");
            self.check_times.lock().remove(&sandbox.id);
            self.lifecycle.suspend(&sandbox.id, "it went on filling its disk past its allowance", |_| true).await?;
        }
        Ok(())
    }

    /// Suspends sandboxes on a filesystem that takes no more writes: the next start checks the filesystem and mounts it
    /// again.
    async fn suspend_failed(&self, sandboxes: &[Sandbox], now: Timestamp) {
        const REASON: &str = "its filesystem failed, because the host's disk was full or broken; the next start checks it";
        {
            let mut checked = self.failed_disks_checked.lock();
            if checked.is_some_and(|at| now.saturating_since(at) < FAILED_DISK_INTERVAL) {
                return;
            }
            *checked = Some(now);
        }
        let failed = self.lifecycle.context.provider.failed_disks().await;
        let uses = |sandbox: &Sandbox, disk: &FailedDisk| match disk {
            FailedDisk::Sandbox(id) => sandbox.id == *id,
            FailedDisk::Volume(id) => sandbox.spec.mounts.iter().any(|m| m.volume == *id),
        };
        for sandbox in sandboxes.iter().filter(|s| s.is_running() && s.intent.is_none() && failed.iter().any(|disk| uses(s, disk))) {
            tracing::error!(sandbox = %sandbox.id, "the filesystem of a sandbox failed and accepts no more writes; suspending the sandbox");
            if let Err(error) = self.lifecycle.suspend(&sandbox.id, REASON, |_| true).await {
                tracing::warn!(sandbox = %sandbox.id, %error, "suspending a sandbox on a failed filesystem failed; retrying");
            }
        }
    }

    async fn push_if_due(&self, sandbox: &Sandbox, now: Timestamp) -> Result<(), ApiError> {
        let (lifecycle, context) = (&self.lifecycle, &self.lifecycle.context);
        let revocations = context.store.revocations(sandbox, now).await.map_err(store_error)?;
        let revocations = (revocations.sequence, revocations.last_start);
        let is_due = lifecycle.control_push.pushed_state(&sandbox.id).is_none_or(|pushed| {
            pushed.revocations != revocations
                || pushed.keys != (sandbox.keys_from(now), sandbox.generation)
                || pushed.is_disk_full != lifecycle.control_push.is_disk_full(&sandbox.id)
                || lifecycle.lease_end(sandbox).saturating_since(pushed.lease_end) >= PUSH_LEASE_STEP
                || pushed.at.is_due(PUSH_INTERVAL, now)
        });
        if is_due { lifecycle.control_push.push(&sandbox.id).await } else { Ok(()) }
    }

    async fn check_suspended_sandbox(&self, sandbox: &Sandbox, now: Timestamp) -> Result<(), ApiError> {
        // The next boxd process starts counting from zero.
        self.check_times.lock().entry(sandbox.id.clone()).or_default().requests = None;
        let keep = self.lifecycle.context.keep_suspended(sandbox);
        if sandbox.kept_for(now) < keep {
            return Ok(());
        }
        const REASON: &str = "it was suspended for too long";
        tracing::warn!(sandbox = %sandbox.id, keep_seconds = keep.as_secs(), "ending a sandbox: {REASON}");
        let audit = AuditRecord::of_sandbox(now, sandbox, "sandbox.ended", REASON);
        self.lifecycle.terminate(sandbox, REASON, audit).await
    }

    async fn prune(&self, now: Timestamp) {
        {
            let mut pruned = self.pruned.lock();
            if pruned.is_some_and(|at| !at.is_due(PRUNE_INTERVAL, now)) {
                return;
            }
            *pruned = Some(now);
        }
        let context = &self.lifecycle.context;
        let horizon = RetentionLimits {
            now,
            idempotency_before: before(now, IDEMPOTENCY_KEEP),
            ended_before: before(now, ENDED_KEEP),
            audit_before: before(now, Duration::from_secs(context.config.audit_keep_seconds)),
        };
        if let Err(error) = context.store.prune(&horizon).await {
            tracing::error!(%error, "removing old rows failed");
        }
        let events_before = before(now, Duration::from_secs(context.config.events_keep_seconds));
        if let Err(error) = context.store.prune_events(events_before, context.config.events_keep_per_workspace).await {
            tracing::error!(%error, "removing old events failed");
        }
    }

    /// Whether a periodic check is due; if so, marks it as done now.
    fn is_check_due(
        &self,
        id: &SandboxId,
        of: impl Fn(&mut CheckTimes) -> &mut Option<Timestamp>,
        every: Duration,
        now: Timestamp,
    ) -> bool {
        let mut check_times = self.check_times.lock();
        let last = of(check_times.entry(id.clone()).or_default());
        let is_due = last.is_none_or(|at| at.is_due(every, now));
        if is_due {
            *last = Some(now);
        }
        is_due
    }

    /// Suspends everything that runs here, for a broker that is shut down permanently.
    pub async fn suspend_all(&self) -> Result<Vec<SandboxId>, ApiError> {
        let context = &self.lifecycle.context;
        let sandboxes = context.store.sandboxes_of_node(&context.node).await.map_err(store_error)?;
        let running =
            sandboxes.into_iter().filter(|s| s.is_running() || s.intent == Some(Intent::Create) || s.intent == Some(Intent::Resume));
        let suspended = stream::iter(running)
            .map(|sandbox| async move {
                match self.lifecycle.suspend(&sandbox.id, "the broker was stopped", |_| true).await {
                    Ok(is_suspended) => is_suspended.then_some(sandbox.id),
                    Err(error) => {
                        tracing::error!(sandbox = %sandbox.id, %error, "suspending a sandbox failed; the next start of the broker retries");
                        None
                    }
                }
            })
            .buffer_unordered(CONCURRENT_SANDBOXES)
            .collect::<Vec<_>>()
            .await;
        Ok(suspended.into_iter().flatten().collect())
    }
}

fn before(now: Timestamp, span: Duration) -> Timestamp {
    Timestamp::from_unix(now.unix().saturating_sub(i64::try_from(span.as_secs()).unwrap_or(i64::MAX)))
}
