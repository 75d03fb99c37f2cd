//! State that the whole domain shares: settings, store, provider, clock, keys, and this node's name.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode, SandboxId, Timestamp,
    session::{Dataplane, SandboxAddress},
};
use cobox_provider::Provider;
use tokio::runtime::Handle;

use crate::{
    ballast::Ballast,
    clock::Clock,
    config::Config,
    domain::{
        cluster::nodes::Nodes,
        model::{AuditRecord, Caller, Sandbox, Session},
        token_signer::{MAX_REFRESH_AGE, TokenSigner},
    },
    metrics::{DiskSpace, Metrics},
    oidc::Oidc,
    policy::{HardEnd, Lifetimes, Policy, PolicySource, Subject},
    store::{Ending, ResourceLimits, Store, StoreError},
    thread_authority::ThreadAuthority,
};

pub struct BrokerContext {
    pub config: Config,
    /// Without a trailing slash.
    pub public_url: String,
    pub store: Arc<Store>,
    pub provider: Arc<dyn Provider>,
    pub clock: Arc<dyn Clock>,
    pub tokens: TokenSigner,
    pub policy: Arc<PolicySource>,
    pub oidc: Option<Oidc>,
    pub thread_authority: Option<ThreadAuthority>,
    /// Name of this node; one data directory is one node.
    pub node: String,
    pub nodes: Nodes,
    pub ballast: Ballast,
    /// Runtime for work that continues without its caller: the threads that serve connections end before the broker does.
    pub background: Handle,
    pub metrics: Arc<Metrics>,
    pub started_at: Timestamp,
}

impl BrokerContext {
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Nodes without a heartbeat since this time count as dead.
    pub fn alive_since(&self) -> Timestamp {
        let silence = i64::try_from(self.config.node_timeout_seconds).unwrap_or(i64::MAX);
        Timestamp::from_unix(self.now().unix().saturating_sub(silence))
    }

    /// Limits of a workspace for a resource type with at most `most` items.
    pub fn resource_limits(&self, most: u32) -> ResourceLimits {
        ResourceLimits { most, bytes: self.config.max_stored_bytes_per_workspace, alive_since: self.alive_since() }
    }

    /// URL for clients with a token: the sandbox's own if its provider has a direct URL, otherwise its node's gateway.
    /// Another node's provider isn't asked; that node's gateway serves all of its sandboxes.
    pub fn dataplane(&self, sandbox: &Sandbox) -> Dataplane {
        let is_here = sandbox.node == self.node && sandbox.is_running();
        match is_here.then(|| self.provider.direct_url(&sandbox.id)).flatten() {
            Some(direct) => at(&direct),
            None => self.gateway(sandbox),
        }
    }

    /// URL for clients that only have an API key: a key must never reach a sandbox.
    pub fn gateway(&self, sandbox: &Sandbox) -> Dataplane {
        at(&self.nodes.url_of(&sandbox.node, &sandbox.id))
    }

    pub fn address(&self, sandbox: &Sandbox) -> SandboxAddress {
        let Dataplane { http_base_url, ws_base_url } = self.dataplane(sandbox);
        SandboxAddress { id: sandbox.id.clone(), provider: sandbox.provider.clone(), http_base_url, ws_base_url }
    }

    /// Space of the filesystem with the data directory; `None` if it can't be read.
    pub fn disk_space(&self) -> Option<DiskSpace> {
        let stat = rustix::fs::statvfs(&self.config.data_dir).ok()?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Some(DiskSpace { total_bytes: bytes(stat.f_blocks), available_bytes: bytes(stat.f_bavail) })
    }

    /// The current policy. Read it once per decision.
    pub fn policy(&self) -> Arc<Policy> {
        self.policy.current()
    }

    /// Whether a caller may see a thread, when an external authority manages threads. Anything without a thread is
    /// decided by the broker alone.
    pub async fn may_see(&self, caller: &Caller, thread: Option<&str>) -> Result<(), ApiError> {
        match (&self.thread_authority, thread) {
            (Some(authority), Some(thread)) => authority.check(caller, thread, self.now()).await,
            _ => Ok(()),
        }
    }

    /// Lifetimes of a sandbox: its owner's policy, which the sandbox's own settings can only shorten.
    pub fn lifetimes(&self, sandbox: &Sandbox) -> Lifetimes {
        let limits = self.policy().lifetimes(&owner(sandbox), &self.config);
        let lease = sandbox.own_lease.map_or(limits.lease, |own| own.min(limits.lease));
        Lifetimes { lease, idle_timeout: limits.idle_timeout.min(lease), ..limits }
    }

    /// Action at the sandbox's hard end, from its owner's policy.
    pub fn hard_end(&self, sandbox: &Sandbox) -> HardEnd {
        self.policy().hard_end(&owner(sandbox))
    }

    /// How long the sandbox is kept while suspended.
    pub fn keep_suspended(&self, sandbox: &Sandbox) -> Duration {
        let limits = self.config.keep_suspended();
        sandbox.own_keep.map_or(limits, |own| own.min(limits))
    }

    /// Maximum remaining lifetime of a new token: until the session's hard end, or the sandbox's if there is no session.
    pub fn remaining_time(&self, sandbox: &Sandbox, session: Option<&Session>, now: Timestamp) -> Duration {
        let base = session.map_or(Duration::ZERO, |s| s.active_base);
        self.lifetimes(sandbox).hard_ttl.saturating_sub(sandbox.active_until(now).saturating_sub(base))
    }

    /// Whether the sandbox is on this node: only its own broker may act on it.
    pub fn is_here(&self, sandbox: &Sandbox) -> bool {
        sandbox.node == self.node
    }

    /// A sandbox, ended or not.
    pub async fn load_sandbox(&self, id: &SandboxId) -> Result<Sandbox, ApiError> {
        let found = self.store.sandbox(id).await.map_err(store_error)?;
        found.ok_or_else(|| ApiError::new(ErrorCode::SandboxNotFound, format!("there is no sandbox {id}")))
    }

    pub fn lease_end(&self, sandbox: &Sandbox) -> Timestamp {
        sandbox.last_active_at.plus(self.lifetimes(sandbox).lease)
    }

    /// An ending at the current time. Revocations are kept for as long as a revoked token could have been used.
    pub fn ending(&self, reason: impl Into<String>, audit: AuditRecord) -> Ending {
        let now = self.now();
        Ending {
            now,
            reason: reason.into(),
            revoke_until: now.plus(MAX_REFRESH_AGE),
            keeps_sandbox: false,
            keep_files: Duration::ZERO,
            audit,
        }
    }

    /// As [`BrokerContext::ending`], for a sandbox that can be restored for a while.
    pub fn restorable_ending(&self, sandbox: &Sandbox, reason: impl Into<String>, audit: AuditRecord) -> Ending {
        Ending { keep_files: self.keep_deleted(sandbox), ..self.ending(reason, audit) }
    }

    /// How long the files of a deleted sandbox are kept, from its owner's policy.
    pub fn keep_deleted(&self, sandbox: &Sandbox) -> Duration {
        match self.provider.can_suspend() {
            true => self.policy().keep_deleted(&owner(sandbox), &self.config),
            // A sandbox that can't be suspended can't be restored either.
            false => Duration::ZERO,
        }
    }
}

fn owner(sandbox: &Sandbox) -> Subject<'_> {
    let kind = sandbox.owner_kind;
    Subject { workspace: &sandbox.workspace, principal: &sandbox.owner, kind, acting: kind }
}

fn at(base: &str) -> Dataplane {
    let http_base_url = format!("{base}/v1");
    // http → ws, https → wss.
    let ws_base_url = http_base_url.replacen("http", "ws", 1);
    Dataplane { http_base_url, ws_base_url }
}

/// The caller learns that the request wasn't at fault; the log gets the cause with the request id.
pub fn store_error(error: StoreError) -> ApiError {
    let failure = match &error {
        StoreError::Unreachable(_) => ApiError::new(ErrorCode::BackendUnavailable, "the broker can't reach its database; try again"),
        StoreError::Unavailable(_) => ApiError::new(
            ErrorCode::BackendUnavailable,
            "the broker's database can't accept this change now; try again, or ask the operator",
        ),
        StoreError::Failed(_) | StoreError::Corrupt(_) => {
            ApiError::new(ErrorCode::Internal, "the broker's database failed; its log has the cause under this request id")
        }
    };
    failure.with_cause(error.to_string())
}
