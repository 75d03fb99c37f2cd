//! Sandbox operations that only the LangSmith API has: create one that runs within a time limit or not at all, stop, and
//! start again.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode, SandboxId,
    sandbox::{CreateSandbox, SandboxInfo},
    session::State,
    tags::{TagFilter, Tags},
};
use tokio::time::Instant;

use super::sandboxes::Sandboxes;
use crate::{
    domain::{
        access::{
            self,
            request_context::Asking,
            sandbox_lookup::{find, not_found},
        },
        context::{Deployment, internal},
        lifecycle::transitions::{Lifecycle, RESUME_FAILED, gone},
        model::{AuditRecord, Intent, Sandbox},
    },
    store::{Note, PageWish, Viewer},
};

/// How long a start or stop waits for the provider; after that it goes on in the background. SDKs wait ten seconds for an
/// answer and then poll.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// How long a sandbox that could not be created is still found by its name.
const FAILED_SHOWN: Duration = Duration::from_secs(3600);
/// How often the store is polled until another node's broker has stopped the sandbox.
const LOOK_EVERY: Duration = Duration::from_millis(100);
const STOPPED: &str = "it was stopped";

/// A sandbox, with details that a polling client needs and that its state doesn't show.
pub struct Boxed {
    pub info: SandboxInfo,
    pub is_resuming: bool,
    /// The last attempt to resume it failed; it may be tried again.
    pub could_not_resume: bool,
}

impl From<SandboxInfo> for Boxed {
    fn from(info: SandboxInfo) -> Self {
        Self { info, is_resuming: false, could_not_resume: false }
    }
}

pub struct LangSmithSandboxes {
    pub deployment: Arc<Deployment>,
    pub lifecycle: Arc<Lifecycle>,
    pub sandboxes: Arc<Sandboxes>,
}

impl LangSmithSandboxes {
    /// Creates a sandbox that runs before the caller's wait is over, or none: the caller wouldn't know the name of one
    /// that runs later.
    pub async fn create_running(&self, asking: &Asking<'_>, wish: CreateSandbox) -> Result<SandboxInfo, ApiError> {
        let made = self.sandboxes.create(asking, wish).await?;
        if made.state != State::Provisioning {
            return Ok(made);
        }
        let sandbox = self.deployment.load_sandbox(&made.id).await?;
        if sandbox.is_running() {
            return self.sandboxes.get(asking.caller, made.id.as_str()).await;
        }
        const REASON: &str = "it took longer to start than its maker waited";
        let audit =
            AuditRecord::of_sandbox(self.deployment.now(), &sandbox, "sandbox.deleted", REASON).by(asking.caller, asking.request_id);
        let d = &self.deployment;
        d.store.end_sandbox(&sandbox.id, State::Terminated, &d.ending(REASON, audit)).await.map_err(internal)?;
        let (lifecycle, id) = (self.lifecycle.clone(), sandbox.id.clone());
        // The start may still be in progress. The deletion is stored and completes after it.
        d.background.spawn(async move { lifecycle.destroy(&id).await });
        let message = format!("the sandbox did not run within {} seconds, and was deleted again", asking.wait.as_secs());
        Err(ApiError::new(ErrorCode::SandboxStarting, message))
    }

    /// As [`Sandboxes::get`], but also returns one that could not be created, so that a polling client learns the reason.
    pub async fn look(&self, asking: &Asking<'_>, id_or_name: &str) -> Result<Boxed, ApiError> {
        let (d, principal) = (&self.deployment, &asking.caller.principal);
        let sandbox = match find(d, asking.caller, id_or_name).await {
            Err(e) if e.code == ErrorCode::SandboxNotFound => {
                let found = match id_or_name.parse::<SandboxId>() {
                    Ok(id) => d.store.sandbox(&id).await.map_err(internal)?,
                    Err(_) => {
                        let ended = d.store.sandbox_once_named(&principal.workspace, id_or_name).await.map_err(internal)?;
                        ended.filter(|s| s.ended_at.is_some_and(|at| d.now().saturating_since(at) < FAILED_SHOWN))
                    }
                };
                found.filter(|s| s.state == State::Failed && access::is_visible(principal, s)).ok_or_else(not_found)?
            }
            found => found?,
        };
        access::may_use(principal, &sandbox)?;
        self.boxed(sandbox).await
    }

    /// The sandboxes that the caller may use, newest first, without the sessions that use them.
    pub async fn list(&self, asking: &Asking<'_>, filters: &[TagFilter], page: &PageWish) -> Result<Vec<Boxed>, ApiError> {
        let store = &self.deployment.store;
        let found = store.sandboxes(&Viewer::from(&asking.caller.principal), filters, page).await.map_err(internal)?;
        let mut tags = store.sandbox_tags(&found.iter().map(|s| &s.id).collect::<Vec<_>>()).await.map_err(internal)?;
        let each = |sandbox: Sandbox| {
            let tags = tags.remove(sandbox.id.as_str()).unwrap_or_default();
            self.boxed_with(sandbox, tags)
        };
        Ok(found.into_iter().map(each).collect())
    }

    async fn boxed(&self, sandbox: Sandbox) -> Result<Boxed, ApiError> {
        let mut tags = self.deployment.store.sandbox_tags(&[&sandbox.id]).await.map_err(internal)?;
        let tags = tags.remove(sandbox.id.as_str()).unwrap_or_default();
        Ok(self.boxed_with(sandbox, tags))
    }

    fn boxed_with(&self, sandbox: Sandbox, tags: Tags) -> Boxed {
        let is_suspended = sandbox.state == State::Suspended;
        let has_failed = sandbox.reason.as_deref().is_some_and(|reason| reason.starts_with(RESUME_FAILED));
        Boxed {
            is_resuming: is_suspended && sandbox.intent == Some(Intent::Resume),
            could_not_resume: is_suspended && has_failed,
            info: self.sandboxes.info_of(sandbox, tags, Vec::new()),
        }
    }

    /// Begins to start a stopped sandbox; the start continues without the caller.
    pub async fn begin_start(&self, asking: &Asking<'_>, id_or_name: &str) -> Result<Boxed, ApiError> {
        let sandbox = find(&self.deployment, asking.caller, id_or_name).await?;
        access::may_use(&asking.caller.principal, &sandbox)?;
        // A start that its owner requested counts as a use.
        self.lifecycle.activity.sandbox_asked_for(&sandbox.id, self.deployment.now());
        self.note(asking, &sandbox, "sandbox.start_asked").await?;
        let sandbox = match self.lifecycle.bring_up(&sandbox.id, ANSWER_WITHIN).await {
            Ok(running) => running,
            // The client learns the reason when it polls.
            Err(e) if matches!(e.code, ErrorCode::SandboxStarting | ErrorCode::ProviderUnavailable) => {
                self.deployment.load_sandbox(&sandbox.id).await?
            }
            Err(e) => return Err(e),
        };
        self.boxed(sandbox).await
    }

    /// Ends the sandbox's programs and keeps its files until the next use. For its owner and operators.
    pub async fn stop(&self, asking: &Asking<'_>, id_or_name: &str) -> Result<Boxed, ApiError> {
        let sandbox = find(&self.deployment, asking.caller, id_or_name).await?;
        access::may_end(&asking.caller.principal, &sandbox)?;
        self.note(asking, &sandbox, "sandbox.stop_asked").await?;
        let id = sandbox.id.clone();
        if self.deployment.is_here(&sandbox) {
            let lifecycle = self.lifecycle.clone();
            // In a task: if the caller disconnects, the stop must not stay half done until the next reaper pass.
            let stopping = self.deployment.background.spawn(async move { lifecycle.suspend(&id, STOPPED, |_| true).await });
            if let Ok(stopped) = tokio::time::timeout(ANSWER_WITHIN, stopping).await {
                stopped.map_err(|_| ApiError::new(ErrorCode::Internal, "stopping was interrupted; try again"))??;
            }
        } else {
            self.stop_elsewhere(&id).await?;
        }
        let sandbox = self.deployment.load_sandbox(&sandbox.id).await?;
        if sandbox.ended_at.is_some() {
            return Err(gone(&sandbox));
        }
        self.boxed(sandbox).await
    }

    /// Stores the intent for the sandbox's own broker, and polls for a while whether it was carried out.
    async fn stop_elsewhere(&self, id: &SandboxId) -> Result<(), ApiError> {
        let deadline = Instant::now() + ANSWER_WITHIN;
        loop {
            let sandbox = self.deployment.load_sandbox(id).await?;
            if !sandbox.is_running() || sandbox.ended_at.is_some() {
                return Ok(());
            }
            if sandbox.intent.is_none() {
                let begun = sandbox.with_intent(Intent::Suspend);
                // A concurrent change wins; the next iteration sees it.
                self.deployment.store.replace_sandbox(&sandbox, &begun, None).await.map_err(internal)?;
            }
            if Instant::now() >= deadline {
                return Ok(());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn note(&self, asking: &Asking<'_>, sandbox: &Sandbox, action: &'static str) -> Result<(), ApiError> {
        let audit = AuditRecord::of_sandbox(self.deployment.now(), sandbox, action, "asked for").by(asking.caller, asking.request_id);
        self.deployment.store.note(&Note { audit: vec![audit], ..Note::default() }).await.map_err(internal)
    }
}
