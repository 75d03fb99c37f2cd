//! What every part of the domain stands on: settings, store, provider, clock, keys, and this node's name.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode, Timestamp,
    session::{Dataplane, SandboxAddress},
};
use cobox_provider::Provider;
use tokio::runtime::Handle;

use super::{
    audit_mark::AuditMark,
    model::{Caller, Sandbox},
    nodes::Nodes,
    quarantine::Quarantine,
    tokens::{LONGEST_POSSESSION, Tokens},
};
use crate::{
    clock::Clock,
    config::Config,
    metrics::{DiskSpace, Metrics},
    oidc::Oidc,
    policy::{HardEnd, Lifetimes, Policy, PolicySource, Subject},
    store::{Counting, Ending, Room, Store, StoreError, Stored},
    thread_authority::ThreadAuthority,
};

pub struct Deployment {
    pub config: Config,
    /// Without a slash at the end.
    pub public_url: String,
    pub store: Arc<dyn Store>,
    pub provider: Arc<dyn Provider>,
    pub clock: Arc<dyn Clock>,
    pub tokens: Tokens,
    pub policy: Arc<PolicySource>,
    pub oidc: Option<Oidc>,
    pub thread_authority: Option<ThreadAuthority>,
    /// One data directory is one node.
    pub node: String,
    pub nodes: Nodes,
    /// What the provider has of this node and no record knows.
    pub quarantine: Quarantine,
    pub audit_mark: AuditMark,
    /// For what goes on without whoever asked for it: the threads that serve connections end before the broker does.
    pub background: Handle,
    pub metrics: Arc<Metrics>,
    pub started_at: Timestamp,
}

impl Deployment {
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Nodes that were silent since count as gone.
    pub fn alive_since(&self) -> Timestamp {
        let silence = i64::try_from(self.config.node_timeout_seconds).unwrap_or(i64::MAX);
        Timestamp::from_unix(self.now().unix().saturating_sub(silence))
    }

    /// What a workspace may have of a kind of which there may be so many.
    pub fn room(&self, most: u32) -> Room {
        Room { most, bytes: self.config.max_stored_bytes_per_workspace, alive_since: self.alive_since() }
    }

    /// Where clients with a token reach the sandbox: by itself where its provider says so, else through its node's gateway. Another
    /// node's provider isn't asked: that node's gateway is right for all of its sandboxes.
    pub fn dataplane(&self, sandbox: &Sandbox) -> Dataplane {
        let is_here = sandbox.node == self.node && sandbox.is_running();
        match is_here.then(|| self.provider.direct_url(&sandbox.id)).flatten() {
            Some(direct) => at(&direct),
            None => self.gateway(sandbox),
        }
    }

    /// Where clients with nothing but an API key reach it: a key never goes to a sandbox.
    pub fn gateway(&self, sandbox: &Sandbox) -> Dataplane {
        at(&self.nodes.url_of(&sandbox.node, &sandbox.id))
    }

    pub fn address(&self, sandbox: &Sandbox) -> SandboxAddress {
        let Dataplane { http_base_url, ws_base_url } = self.dataplane(sandbox);
        SandboxAddress { id: sandbox.id.clone(), provider: sandbox.provider.clone(), http_base_url, ws_base_url }
    }

    /// Of the filesystem with the data directory; nothing where it can't be read.
    pub fn disk_space(&self) -> Option<DiskSpace> {
        let stat = rustix::fs::statvfs(&self.config.data_dir).ok()?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Some(DiskSpace { total_bytes: bytes(stat.f_blocks), available_bytes: bytes(stat.f_bavail) })
    }

    /// What is allowed now; one look at it for one decision.
    pub fn policy(&self) -> Arc<Policy> {
        self.policy.current()
    }

    /// Whether a caller may see a thread, where somebody else keeps them. What belongs to no thread is for us alone to decide.
    pub async fn may_see(&self, caller: &Caller, thread: Option<&str>) -> Result<(), ApiError> {
        match (&self.thread_authority, thread) {
            (Some(authority), Some(thread)) => authority.check(caller, thread, self.now()).await,
            _ => Ok(()),
        }
    }

    /// How long a sandbox lives, which follows its owner; of its own wish no longer.
    pub fn lifetimes(&self, sandbox: &Sandbox) -> Lifetimes {
        let given = self.policy().lifetimes(&owner(sandbox), &self.config);
        let lease = sandbox.own_lease.map_or(given.lease, |own| own.min(given.lease));
        Lifetimes { lease, idle_timeout: given.idle_timeout.min(lease), ..given }
    }

    /// What happens to it at its hard end, which follows its owner's policy.
    pub fn hard_end(&self, sandbox: &Sandbox) -> HardEnd {
        self.policy().hard_end(&owner(sandbox))
    }

    /// How long it is kept while it is suspended.
    pub fn keep_suspended(&self, sandbox: &Sandbox) -> Duration {
        let given = self.config.keep_suspended();
        sandbox.own_keep.map_or(given, |own| own.min(given))
    }

    /// Excludes time in which no broker ran on this node from how long suspended, deleted and quarantined items are kept. Before anything is
    /// removed because its time is over.
    pub async fn count_downtime(&self, now: Timestamp, counting: Counting) -> Stored<()> {
        let downtime = self.store.count_downtime(&self.node, now, counting).await?;
        self.quarantine.count(now, counting);
        if !downtime.is_zero() {
            let seconds = downtime.as_secs();
            tracing::info!(
                seconds,
                "no broker ran on this node, or its clock was set forward: suspended and deleted sandboxes are kept that much longer"
            );
        }
        Ok(())
    }

    pub fn lease_end(&self, sandbox: &Sandbox) -> Timestamp {
        sandbox.last_active_at.plus(self.lifetimes(sandbox).lease)
    }

    /// An ending now; what it revokes can't be of use to anybody later.
    pub fn ending(&self, reason: impl Into<String>, audit: super::audit::AuditRecord) -> Ending {
        let now = self.now();
        Ending {
            now,
            reason: reason.into(),
            revoke_until: now.plus(LONGEST_POSSESSION),
            keeps_sandbox: false,
            keep_files: Duration::ZERO,
            audit,
        }
    }

    /// As [`Deployment::ending`], of a sandbox that can be restored for a while.
    pub fn restorable_ending(&self, sandbox: &Sandbox, reason: impl Into<String>, audit: super::audit::AuditRecord) -> Ending {
        Ending { keep_files: self.keep_deleted(sandbox), ..self.ending(reason, audit) }
    }

    /// How long the files of a deleted sandbox are kept, which follows its owner's policy.
    pub fn keep_deleted(&self, sandbox: &Sandbox) -> Duration {
        match self.provider.can_suspend() {
            true => self.policy().keep_deleted(&owner(sandbox), &self.config),
            // What can't be stopped and kept can't be restored.
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

/// The caller learns that it isn't their fault; the log gets the cause with the request's id.
pub fn internal(error: StoreError) -> ApiError {
    let failure = match &error {
        StoreError::Unreachable(_) => ApiError::new(ErrorCode::BackendUnavailable, "the broker can't reach its database; try again"),
        StoreError::Unavailable(_) => {
            ApiError::new(ErrorCode::BackendUnavailable, "the broker's database can't take this now; try again, or ask the operator")
        }
        StoreError::Failed(_) | StoreError::Corrupt(_) => {
            ApiError::new(ErrorCode::Internal, "the broker's database failed; its log has the cause under this request id")
        }
    };
    failure.with_cause(error.to_string())
}
