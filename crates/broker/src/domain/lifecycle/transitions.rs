//! Starts, suspends and destroys sandboxes: stores the intent, asks the provider, then settles the outcome.
//!
//! Everything about one sandbox happens under its lock. A start runs in a task of its own: its caller may disconnect, and
//! callers that arrive before it has ended wait for the same start. Control pushes to running sandboxes are in
//! `control_push`.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use cobox_protocol::{ApiError, ErrorCode, SandboxId, Timestamp, control, session::State};
use cobox_provider::ProviderError;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::{
    control_push::ControlPush,
    locks::{SandboxLock, SandboxLocks},
    quarantine::Quarantine,
    remote_node::ensure_running_on_remote_node,
};
use crate::{
    domain::{
        access::last_used::LastUsed,
        context::{BrokerContext, store_error},
        events::report_collector::ReportCollector,
        model::{AuditRecord, Intent, Sandbox, SessionWithSandbox},
    },
    metrics::StartMetrics,
    store::{Ending, SandboxAfterSession, Stored, TimeAccounting},
};

/// Sandboxes handled concurrently when a workspace is notified or a node is checked.
pub const CONCURRENT_SANDBOXES: usize = 16;
/// Longest stored reason of a provider's failure, in characters.
const MAX_REASON_CHARS: usize = 500;

/// How long a release waits for the provider; after that it continues in the background.
const RELEASE_WAIT: Duration = Duration::from_secs(10);

/// Prefix of the reason of a suspended sandbox whose last resume failed.
pub const RESUME_FAILED: &str = "it could not be resumed: ";

pub type StartResult = Result<Sandbox, ApiError>;

pub struct Lifecycle {
    pub context: Arc<BrokerContext>,
    pub last_used: Arc<LastUsed>,
    reports: ReportCollector,
    pub quarantine: Arc<Quarantine>,
    pub control_push: Arc<ControlPush>,
    pub(super) locks: SandboxLocks,
    starts: Mutex<HashMap<SandboxId, watch::Receiver<Option<StartResult>>>>,
}

impl Lifecycle {
    pub fn new(context: Arc<BrokerContext>, last_used: Arc<LastUsed>, quarantine: Arc<Quarantine>) -> Self {
        let locks = SandboxLocks::default();
        Self {
            reports: ReportCollector::new(context.clone()),
            control_push: Arc::new(ControlPush::new(context.clone(), last_used.clone(), locks.clone())),
            context,
            last_used,
            quarantine,
            locks,
            starts: Mutex::default(),
        }
    }

    /// Returns when the sandbox runs, and starts it if needed. After `wait` the answer is `423` and the start continues.
    pub async fn ensure_running(self: &Arc<Self>, id: &SandboxId, wait: Duration) -> StartResult {
        let sandbox = self.context.load_sandbox(id).await?;
        if !self.context.is_here(&sandbox) {
            return ensure_running_on_remote_node(&self.context, id, wait).await;
        }
        if sandbox.is_running() && sandbox.intent.is_none() {
            return Ok(sandbox);
        }
        let mut start = self.join_start(id);
        let outcome = tokio::time::timeout(wait, start.wait_for(Option::is_some)).await;
        match outcome {
            Ok(Ok(outcome)) => outcome.clone().unwrap_or_else(|| Err(interrupted(id))),
            Ok(Err(_)) => Err(interrupted(id)),
            Err(_) => Err(starting(id)),
        }
    }

    /// As [`Lifecycle::ensure_running`], for a sandbox that was just read.
    pub async fn ensure_found_running(self: &Arc<Self>, sandbox: Sandbox, wait: Duration) -> StartResult {
        if self.context.is_here(&sandbox) && sandbox.is_running() && sandbox.intent.is_none() {
            return Ok(sandbox);
        }
        self.ensure_running(&sandbox.id, wait).await
    }

    /// The start in progress, or a new one.
    fn join_start(self: &Arc<Self>, id: &SandboxId) -> watch::Receiver<Option<StartResult>> {
        let mut starts = self.starts.lock();
        if let Some(running) = starts.get(id)
            // An error means that its task ended without an outcome.
            && running.has_changed().is_ok()
        {
            return running.clone();
        }
        let (done, outcome) = watch::channel(None);
        starts.insert(id.clone(), outcome.clone());
        let (this, id) = (self.clone(), id.clone());
        self.context.background.spawn(async move {
            let lock = this.locks.lock(&id).await;
            let outcome = this.start_locked(&id, &lock).await;
            drop(lock);
            this.starts.lock().remove(&id);
            // All waiting callers may be gone.
            let _ = done.send(Some(outcome));
        });
        outcome
    }

    async fn start_locked(self: &Arc<Self>, id: &SandboxId, lock: &SandboxLock) -> StartResult {
        let mut sandbox = self.context.load_sandbox(id).await?;
        if sandbox.intent == Some(Intent::Suspend) {
            sandbox = self.finish_suspend(&sandbox, "interrupted", lock).await?;
        }
        match sandbox.state {
            State::Active | State::Idle => Ok(sandbox),
            State::Provisioning => self.provision(sandbox).await,
            State::Suspended => self.resume(sandbox).await,
            State::Terminated | State::Failed => Err(gone(&sandbox)),
        }
    }

    async fn provision(self: &Arc<Self>, sandbox: Sandbox) -> StartResult {
        let context = &self.context;
        match self.start(&sandbox, &context.metrics.created).await {
            Ok(()) => self.settle_started(&sandbox, "sandbox.started").await,
            Err(error) => {
                let reason = self.log_failure(&sandbox, "starting", &error);
                let audit = AuditRecord::of_sandbox(context.now(), &sandbox, "sandbox.failed", &reason);
                context.store.end_sandbox(&sandbox.id, State::Failed, &context.ending(&reason, audit)).await.map_err(store_error)?;
                self.destroy_locked(&sandbox.id).await;
                Err(unavailable(&sandbox.id, "could not be started", &reason))
            }
        }
    }

    async fn resume(self: &Arc<Self>, sandbox: Sandbox) -> StartResult {
        let context = &self.context;
        let begun = sandbox.with_intent(Intent::Resume);
        if sandbox.intent != Some(Intent::Resume) && !context.store.replace_sandbox(&sandbox, &begun, None).await.map_err(store_error)? {
            return Err(gone(&self.context.load_sandbox(&sandbox.id).await?));
        }
        match self.start(&begun, &context.metrics.resumed).await {
            Ok(()) => self.settle_started(&begun, "sandbox.resumed").await,
            Err(error) => {
                let reason = self.log_failure(&sandbox, "resuming", &error);
                // A half-started sandbox must not keep running. If this fails too, the next check of the node finds it.
                if let Err(error) = context.provider.suspend(&sandbox.id).await {
                    tracing::warn!(sandbox = %sandbox.id, %error, "stopping a sandbox after a failed resume failed");
                }
                let back = Sandbox { intent: None, reason: Some(format!("{RESUME_FAILED}{reason}")), ..begun.clone() };
                context.store.replace_sandbox(&begun, &back, None).await.map_err(store_error)?;
                Err(unavailable(&sandbox.id, "could not be resumed", &reason))
            }
        }
    }

    async fn start(&self, sandbox: &Sandbox, metrics: &StartMetrics) -> Result<(), ProviderError> {
        let began = Instant::now();
        let started = async {
            // The lease begins with this start: one that counts from the last use may be over, and boxd would end
            // itself.
            let starting = Sandbox { last_active_at: self.context.now(), ..sandbox.clone() };
            let (state, pushed) = self.control_push.control_state(&starting).await.map_err(|e| ProviderError::Unavailable(e.message))?;
            self.context.provider.start(&sandbox.id, &sandbox.spec, &state).await?;
            self.control_push.remember_pushed(&sandbox.id, pushed);
            Ok(())
        };
        let started = started.await;
        match &started {
            Ok(()) => metrics.took.add(began.elapsed()),
            Err(_) => drop(metrics.failed.fetch_add(1, Relaxed)),
        }
        started
    }

    async fn settle_started(self: &Arc<Self>, begun: &Sandbox, action: &'static str) -> StartResult {
        let context = &self.context;
        let now = context.now();
        let started = Sandbox { last_active_at: now, ..begun.started(now) };
        let audit = AuditRecord::of_sandbox(now, begun, action, context.provider.name());
        if !context.store.replace_sandbox(begun, &started, Some(&audit)).await.map_err(store_error)? {
            // Ended while it was starting; the task that ended it waits for the lock to destroy it.
            return Err(gone(&self.context.load_sandbox(&begun.id).await?));
        }
        self.watch(&begun.id);
        Ok(started)
    }

    /// A sandbox that outlived a broker gets the whole state before it gets traffic.
    pub async fn adopt(self: &Arc<Self>, id: &SandboxId) -> Result<(), ApiError> {
        self.control_push.resync(id).await?;
        self.watch(id);
        Ok(())
    }

    /// Lets boxd notify its clients why the sandbox stops, and collects what it still reports. Best effort: the waits are
    /// short, and nothing depends on it.
    async fn announce_stop(&self, sandbox: &Sandbox, ending: control::StopReason) {
        if self.control_push.announce_stop(sandbox, ending).await {
            self.reports.collect_last(sandbox).await;
        }
    }

    /// Collects the sandbox's reports, and suspends it as soon as its boxd is gone, for any reason.
    pub fn watch(self: &Arc<Self>, id: &SandboxId) {
        let (this, id) = (self.clone(), id.clone());
        self.context.background.spawn(async move {
            tokio::select! {
                () = this.context.provider.ended(&id) => {}
                () = this.reports.follow(&id) => {}
            }
            this.check_running(&id).await;
        });
    }

    /// Settles a sandbox that runs according to the store but not according to the provider.
    pub async fn check_running(self: &Arc<Self>, id: &SandboxId) {
        let lock = self.locks.lock(id).await;
        if self.context.provider.is_running(id).await {
            return;
        }
        if let Err(error) = self.suspend_locked(id, "its boxd ended", &lock, |_| true).await {
            tracing::warn!(sandbox = %id, %error, "recording an ended sandbox as suspended failed; retrying");
        }
    }

    /// Suspends a running sandbox if `is_due` still holds under the lock. Returns whether it did.
    pub async fn suspend(&self, id: &SandboxId, reason: &str, is_due: impl Fn(&Sandbox) -> bool) -> Result<bool, ApiError> {
        let lock = self.locks.lock(id).await;
        self.suspend_locked(id, reason, &lock, is_due).await
    }

    pub(super) async fn suspend_locked(
        &self,
        id: &SandboxId,
        reason: &str,
        lock: &SandboxLock,
        is_due: impl Fn(&Sandbox) -> bool,
    ) -> Result<bool, ApiError> {
        let mut sandbox = self.context.load_sandbox(id).await?;
        // For another node's sandbox the intent is stored, and its own broker acts on it.
        if !sandbox.is_running() || !self.context.is_here(&sandbox) {
            return Ok(false);
        }
        if sandbox.intent.is_none() {
            if !is_due(&sandbox) {
                return Ok(false);
            }
            let begun = sandbox.with_intent(Intent::Suspend);
            if !self.context.store.replace_sandbox(&sandbox, &begun, None).await.map_err(store_error)? {
                return Ok(false);
            }
            sandbox = begun;
        }
        self.finish_suspend(&sandbox, reason, lock).await?;
        Ok(true)
    }

    async fn finish_suspend(&self, begun: &Sandbox, reason: &str, _lock: &SandboxLock) -> StartResult {
        let context = &self.context;
        if !context.provider.can_suspend() {
            return self.end_instead(begun, reason).await;
        }
        self.announce_stop(begun, control::StopReason::Suspended).await;
        if let Err(error) = context.provider.suspend(&begun.id).await {
            let reason = self.log_failure(begun, "suspending", &error);
            return Err(unavailable(&begun.id, "could not be suspended", &reason));
        }
        self.control_push.forget(&begun.id);
        let now = context.now();
        // If the lease expired before this was noticed, the running time ended with the lease.
        let suspended = begun.suspended(now.min(context.lease_end(begun)).max(begun.last_active_at), reason);
        let suspended = Sandbox { suspended_at: Some(now), ..suspended };
        let audit = AuditRecord::of_sandbox(now, begun, "sandbox.suspended", reason);
        if !context.store.replace_sandbox(begun, &suspended, Some(&audit)).await.map_err(store_error)? {
            return Err(gone(&self.context.load_sandbox(&begun.id).await?));
        }
        tracing::info!(sandbox = %begun.id, reason, "a sandbox was suspended");
        Ok(suspended)
    }

    /// For providers that can't suspend: ends the sandbox if its time is over or it doesn't run any more, otherwise
    /// leaves it running.
    async fn end_instead(&self, begun: &Sandbox, reason: &str) -> StartResult {
        let context = &self.context;
        let now = context.now();
        let is_over = self.lease_end(begun) <= now || begun.active_until(now) >= context.lifetimes(begun).hard_ttl;
        if !is_over && context.provider.is_running(&begun.id).await {
            let running = Sandbox { intent: None, ..begun.clone() };
            context.store.replace_sandbox(begun, &running, None).await.map_err(store_error)?;
            return Ok(running);
        }
        let reason = format!("{reason}, and its provider can't suspend");
        let audit = AuditRecord::of_sandbox(now, begun, "sandbox.ended", &reason);
        context.store.end_sandbox(&begun.id, State::Terminated, &context.ending(&reason, audit)).await.map_err(store_error)?;
        self.destroy_locked(&begun.id).await;
        self.context.load_sandbox(&begun.id).await
    }

    /// Ends a session, and its sandbox according to the rules. Durable when it returns.
    pub async fn end_session(self: &Arc<Self>, bound: &SessionWithSandbox, ending: Ending) -> Result<(), ApiError> {
        let context = &self.context;
        let leftover = context.store.end_session(&bound.session.id, &ending).await.map_err(store_error)?;
        let Some(leftover) = leftover else { return Ok(()) };
        let (lifecycle, id) = (self.clone(), bound.sandbox.id.clone());
        let rest = context.background.spawn(async move {
            let outcome = match leftover {
                SandboxAfterSession::InUse => lifecycle.control_push.push(&id).await,
                SandboxAfterSession::Suspend => lifecycle.suspend(&id, &ending.reason, |_| true).await.map(drop),
                SandboxAfterSession::Destroy => {
                    lifecycle.destroy(&id).await;
                    Ok(())
                }
            };
            if let Err(error) = outcome {
                tracing::warn!(sandbox = %id, %error, "settling an ended session's sandbox failed; the reaper retries");
            }
        });
        // The end is durable already: the remaining work is stored as an intent.
        let _ = tokio::time::timeout(RELEASE_WAIT, rest).await;
        Ok(())
    }

    /// Excludes time in which no broker ran on this node from the retention of suspended, deleted and quarantined items.
    /// Must run before any expired item is removed.
    pub async fn count_downtime(&self, now: Timestamp, counting: TimeAccounting) -> Stored<()> {
        let downtime = self.context.store.count_downtime(&self.context.node, now, counting).await?;
        self.quarantine.count(now, counting);
        if !downtime.is_zero() {
            let seconds = downtime.as_secs();
            tracing::info!(
                seconds,
                "no broker ran on this node, or its clock was set forward; suspended and deleted sandboxes are kept longer by this time"
            );
        }
        Ok(())
    }

    /// Ends a sandbox and its sessions. It can be restored for as long as the policy allows. Durable when it returns; the
    /// provider is asked at once.
    pub async fn terminate(self: &Arc<Self>, sandbox: &Sandbox, reason: &str, audit: AuditRecord) -> Result<(), ApiError> {
        let context = &self.context;
        self.end(sandbox, &context.restorable_ending(sandbox, reason, audit)).await
    }

    /// As [`Lifecycle::terminate`], but the sandbox can't be restored.
    pub async fn terminate_permanently(self: &Arc<Self>, sandbox: &Sandbox, reason: &str, audit: AuditRecord) -> Result<(), ApiError> {
        self.end(sandbox, &self.context.ending(reason, audit)).await
    }

    async fn end(&self, sandbox: &Sandbox, ending: &Ending) -> Result<(), ApiError> {
        self.context.store.end_sandbox(&sandbox.id, State::Terminated, ending).await.map_err(store_error)?;
        self.destroy(&sandbox.id).await;
        Ok(())
    }

    /// Ends a standby sandbox of a pool. It leaves the pool first, so that no request takes a sandbox that is about to end.
    pub async fn end_pool_member(self: &Arc<Self>, member: &Sandbox, reason: &str) -> Result<(), ApiError> {
        let context = &self.context;
        if context.store.leave_pool(member).await.map_err(store_error)? {
            let audit = AuditRecord::of_sandbox(context.now(), member, "sandbox.ended", reason);
            self.terminate(member, reason, audit).await?;
        }
        Ok(())
    }

    /// Removes the files of a deleted sandbox, which then can't be restored. Durable when it returns, as
    /// [`Lifecycle::terminate`].
    pub async fn purge(&self, deleted: &Sandbox, audit: &AuditRecord) -> Result<(), ApiError> {
        let reason = audit.detail.clone().or_else(|| deleted.reason.clone());
        let purged = Sandbox { intent: Some(Intent::Destroy), restore_until: None, reason, ..deleted.clone() };
        // False if it was restored or is already being purged.
        if self.context.store.replace_sandbox(deleted, &purged, Some(audit)).await.map_err(store_error)? {
            self.destroy(&deleted.id).await;
        }
        Ok(())
    }

    /// Stops an ended sandbox, and removes its files unless it can be restored. A failure is logged and retried by the
    /// reaper.
    pub async fn destroy(&self, id: &SandboxId) {
        let _lock = self.locks.lock(id).await;
        self.destroy_locked(id).await;
    }

    async fn destroy_locked(&self, id: &SandboxId) {
        let context = &self.context;
        let outcome = async {
            let sandbox = self.context.load_sandbox(id).await?;
            if sandbox.intent != Some(Intent::Destroy) || !self.context.is_here(&sandbox) {
                return Ok(());
            }
            self.announce_stop(&sandbox, control::StopReason::Ended).await;
            let now = context.now();
            // Also if the retention time seems to be over: only the reaper knows how much of that time counts.
            if sandbox.restore_until.is_some() {
                context.provider.suspend(id).await.map_err(|e| unavailable(id, "could not be stopped", &e.to_string()))?;
                self.control_push.forget(id);
                context.store.replace_sandbox(&sandbox, &Sandbox { intent: None, ..sandbox.clone() }, None).await.map_err(store_error)?;
                return Ok(());
            }
            context.provider.destroy(id).await.map_err(|e| unavailable(id, "could not be destroyed", &e.to_string()))?;
            self.control_push.forget(id);
            let audit = AuditRecord::of_sandbox(now, &sandbox, "sandbox.destroyed", sandbox.reason.as_deref().unwrap_or_default());
            context
                .store
                .replace_sandbox(&sandbox, &Sandbox { intent: None, restore_until: None, ..sandbox.clone() }, Some(&audit))
                .await
                .map_err(store_error)?;
            Ok::<(), ApiError>(())
        };
        if let Err(error) = outcome.await {
            tracing::warn!(sandbox = %id, %error, "destroying a sandbox failed; retrying");
        }
    }

    /// Completes an intent that was not settled, unless another task is working on the sandbox.
    pub async fn finish_intent(self: &Arc<Self>, sandbox: &Sandbox) {
        let id = &sandbox.id;
        let Some(lock) = self.locks.try_lock(id) else { return };
        match sandbox.intent {
            Some(Intent::Destroy) => self.destroy_locked(id).await,
            Some(Intent::Suspend) => {
                // On failure the intent stays, and this is retried.
                let _ = self.suspend_locked(id, "interrupted", &lock, |_| true).await;
            }
            Some(Intent::Create | Intent::Resume) => {
                drop(lock);
                self.join_start(id);
            }
            None => {}
        }
    }

    /// End of the lease, counted from the last use known in memory, which the store may not have yet.
    pub fn lease_end(&self, sandbox: &Sandbox) -> Timestamp {
        self.control_push.lease_end(sandbox)
    }

    pub fn last_use(&self, sandbox: &Sandbox) -> Timestamp {
        self.last_used.last_use_of(sandbox)
    }

    pub fn is_busy(&self, id: &SandboxId) -> bool {
        self.locks.is_held(id)
    }

    fn log_failure(&self, sandbox: &Sandbox, doing: &str, error: &ProviderError) -> String {
        let provider = self.context.provider.name();
        tracing::error!(sandbox = %sandbox.id, provider, %error, "{doing} a sandbox failed");
        error.to_string().chars().take(MAX_REASON_CHARS).collect()
    }
}

pub fn gone(sandbox: &Sandbox) -> ApiError {
    let why = sandbox.reason.as_deref().unwrap_or("it was ended");
    ApiError::new(ErrorCode::SessionExpired, format!("sandbox {} is gone: {why}; ensure a new session", sandbox.id))
}

pub fn unavailable(id: &SandboxId, what: &str, why: &str) -> ApiError {
    ApiError::new(ErrorCode::ProviderUnavailable, format!("sandbox {id} {what}: {why}"))
}

pub fn starting(id: &SandboxId) -> ApiError {
    ApiError::new(ErrorCode::SandboxStarting, format!("sandbox {id} is still starting; ask again"))
        .with_details(serde_json::json!({ "sandbox_id": id }))
}

fn interrupted(id: &SandboxId) -> ApiError {
    ApiError::new(ErrorCode::ProviderUnavailable, format!("starting sandbox {id} was interrupted; try again"))
}
