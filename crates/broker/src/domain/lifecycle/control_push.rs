//! Control push: sends a running sandbox its keys, revocations and lease, and at the end the reason why it stops.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use async_trait::async_trait;
use cobox_protocol::{
    ApiError, SandboxId, Timestamp,
    control::{ControlState, StopReason},
};
use cobox_provider::control;
use futures_util::{StreamExt, stream};
use parking_lot::Mutex;

use super::{
    host_disk::HostDiskState,
    locks::SandboxLocks,
    transitions::{CONCURRENT_SANDBOXES, unavailable},
};
use crate::domain::{
    access::{keys::RevocationPush, last_used::LastUsed},
    context::{BrokerContext, store_error},
    model::Sandbox,
    token_signer::ISSUER,
};

/// Time limit for one push when many are sent, so that a sandbox that is starting or stopping doesn't delay the others.
const PUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a stop waits for boxd to notify its clients: a little longer than boxd itself takes.
const STOP_NOTICE_TIMEOUT: Duration = Duration::from_millis(300);

/// How long a response waits for the push to the sandbox. The gateway already refuses the tokens, and the reaper repeats
/// the push.
pub const PUSH_WAIT: Duration = Duration::from_secs(5);

/// State of the last push, compared later to decide whether another is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PushedState {
    pub at: Timestamp,
    pub lease_end: Timestamp,
    /// Sequence and last start of the pushed revocations.
    pub revocations: (u64, i64),
    pub is_disk_full: bool,
    /// The oldest and the newest accepted generation of its key.
    pub keys: (u32, u32),
}

/// Pushes keys, revocations, lease and the state of the disk to the running sandboxes of this node.
pub struct ControlPush {
    context: Arc<BrokerContext>,
    last_used: Arc<LastUsed>,
    locks: SandboxLocks,
    /// The state last pushed to each running sandbox.
    pushed: Mutex<HashMap<SandboxId, PushedState>>,
    full_disks: Mutex<HashSet<SandboxId>>,
    pub(super) host_disk: HostDiskState,
    /// Version of the last push to any sandbox.
    version: AtomicU64,
}

impl ControlPush {
    pub fn new(context: Arc<BrokerContext>, last_used: Arc<LastUsed>, locks: SandboxLocks) -> Self {
        Self {
            context,
            last_used,
            locks,
            pushed: Mutex::default(),
            full_disks: Mutex::default(),
            host_disk: HostDiskState::default(),
            version: AtomicU64::new(0),
        }
    }

    /// Pushes keys, revocations and lease to a running sandbox. Does nothing if it doesn't run.
    pub async fn push(&self, id: &SandboxId) -> Result<(), ApiError> {
        let _lock = self.locks.lock(id).await;
        let sandbox = self.context.load_sandbox(id).await?;
        if !sandbox.is_running() || !self.context.is_here(&sandbox) {
            return Ok(());
        }
        let (state, pushed) = self.control_state(&sandbox).await?;
        control::push_state(&*self.context.provider, id, &state).await.map_err(|e| unavailable(id, "could not be told", &e.to_string()))?;
        self.remember_pushed(id, pushed);
        Ok(())
    }

    /// As [`ControlPush::push`], with a limited wait; after it the push continues in the background, and the reaper repeats
    /// it if needed.
    pub async fn push_soon(self: &Arc<Self>, id: &SandboxId, wait: Duration) {
        let (this, id) = (self.clone(), id.clone());
        let pushing = self.context.background.spawn(async move {
            if let Err(error) = this.push(&id).await {
                tracing::warn!(sandbox = %id, %error, "control push failed; retrying");
            }
        });
        let _ = tokio::time::timeout(wait, pushing).await;
    }

    /// Lets boxd notify connected clients why the sandbox stops. Returns whether the sandbox was running.
    pub(super) async fn announce_stop(&self, sandbox: &Sandbox, ending: StopReason) -> bool {
        let provider = &*self.context.provider;
        if !provider.is_running(&sandbox.id).await {
            return false;
        }
        let pushed = async {
            let (state, _) = self.control_state(sandbox).await?;
            let state = ControlState { stop_reason: Some(ending), ..state };
            control::push_state(provider, &sandbox.id, &state)
                .await
                .map_err(|e| unavailable(&sandbox.id, "could not be told", &e.to_string()))
        };
        match tokio::time::timeout(STOP_NOTICE_TIMEOUT, pushed).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::debug!(sandbox = %sandbox.id, %error, "announcing the end of a sandbox failed"),
            Err(_) => tracing::debug!(sandbox = %sandbox.id, "announcing the end of a sandbox took too long"),
        }
        true
    }

    /// Pushes to every running sandbox of a workspace on this node. The reaper repeats a push that failed.
    pub async fn push_to_workspace(&self, workspace: &str) {
        let running = match self.context.store.running_in(workspace, &self.context.node).await {
            Ok(running) => running,
            Err(error) => return tracing::error!(%error, "the sandboxes to be told could not be read; the reaper tells them"),
        };
        stream::iter(running)
            .for_each_concurrent(CONCURRENT_SANDBOXES, |id| async move {
                match tokio::time::timeout(PUSH_TIMEOUT, self.push(&id)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::warn!(sandbox = %id, %error, "control push failed; retrying"),
                    Err(_) => tracing::warn!(sandbox = %id, "control push took too long; retrying"),
                }
            })
            .await;
    }

    /// Pushes the whole state to a sandbox that outlived a broker.
    pub async fn resync(&self, id: &SandboxId) -> Result<(), ApiError> {
        let status =
            control::fetch_status(&*self.context.provider, id).await.map_err(|e| unavailable(id, "does not answer", &e.to_string()))?;
        // Its version may come from a clock that ran ahead of this one.
        self.version.fetch_max(status.state_version, Ordering::Relaxed);
        self.push(id).await
    }

    pub(super) async fn control_state(&self, sandbox: &Sandbox) -> Result<(ControlState, PushedState), ApiError> {
        let context = &self.context;
        let at = context.now();
        let revocations = context.store.revocations(sandbox, at).await.map_err(store_error)?;
        let pushed = PushedState {
            at,
            lease_end: self.lease_end(sandbox),
            revocations: (revocations.sequence, revocations.last_start),
            is_disk_full: self.is_disk_full(&sandbox.id),
            keys: (sandbox.keys_from(at), sandbox.generation),
        };
        let state = ControlState {
            version: self.next_version(),
            issuer: ISSUER.to_owned(),
            keys: context.tokens.verify_keys(sandbox, at),
            revoked: revocations.list.clone(),
            lease_expires_at: pushed.lease_end,
            disk_full: pushed.is_disk_full,
            stop_reason: None,
        };
        Ok((state, pushed))
    }

    /// Milliseconds of the machine's clock, but at least one more than the last version: it also grows over restarts
    /// within a second.
    fn next_version(&self) -> u64 {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let clock = u64::try_from(since_epoch.as_millis()).unwrap_or(0);
        let step = |last: u64| Some(last.saturating_add(1).max(clock));
        self.version.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step).map_or(clock, |last| last.saturating_add(1).max(clock))
    }

    /// End of the lease, counted from the last use known in memory, which the store may not have yet.
    pub(super) fn lease_end(&self, sandbox: &Sandbox) -> Timestamp {
        self.last_used.last_use_of(sandbox).plus(self.context.lifetimes(sandbox).lease)
    }

    pub fn pushed_state(&self, id: &SandboxId) -> Option<PushedState> {
        self.pushed.lock().get(id).copied()
    }

    /// The running sandboxes to which this broker has pushed state.
    pub(super) fn pushed_ids(&self) -> Vec<SandboxId> {
        self.pushed.lock().keys().cloned().collect()
    }

    /// Whether its writers must stop: its own disk is full, or the host's.
    pub fn is_disk_full(&self, id: &SandboxId) -> bool {
        self.host_disk.is_full() || self.is_own_disk_full(id)
    }

    pub fn is_own_disk_full(&self, id: &SandboxId) -> bool {
        self.full_disks.lock().contains(id)
    }

    pub fn set_disk_full(&self, id: &SandboxId, is_full: bool) {
        let mut full = self.full_disks.lock();
        if is_full {
            full.insert(id.clone())
        } else {
            full.remove(id)
        };
    }

    pub(super) fn remember_pushed(&self, id: &SandboxId, pushed: PushedState) {
        self.pushed.lock().insert(id.clone(), pushed);
    }

    pub(super) fn forget(&self, id: &SandboxId) {
        self.pushed.lock().remove(id);
        self.full_disks.lock().remove(id);
    }
}

#[async_trait]
impl RevocationPush for ControlPush {
    async fn push_to_workspace(&self, workspace: &str) {
        self.push_to_workspace(workspace).await;
    }
}
