//! What only the LangSmith API asks of a sandbox: one that runs within a time or isn't there, stopping, and starting again.

use std::time::Duration;

use cobox_protocol::{
    ApiError, ErrorCode, SandboxId,
    sandbox::{CreateSandbox, SandboxInfo},
    session::State,
    tags::{TagFilter, Tags},
};
use tokio::time::Instant;

use super::{
    access,
    audit::AuditRecord,
    deployment::internal,
    lifecycle::{RESUME_FAILED, gone},
    model::{Intent, Sandbox},
    sandboxes::{Sandboxes, find, not_found},
    sessions::Asking,
};
use crate::store::{Note, PageWish, Viewer};

/// How long a start or a stop waits for the provider; past it the rest is done behind the answer. SDKs wait for ten seconds and then ask
/// how it is.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// One that could not be made is found by its name for this long.
const FAILED_SHOWN: Duration = Duration::from_secs(3600);
/// How often the store is asked whether another node's broker has stopped it.
const LOOK_EVERY: Duration = Duration::from_millis(100);
const STOPPED: &str = "it was stopped";

/// A sandbox, and what its state alone doesn't say to who waits for it.
pub struct Boxed {
    pub info: SandboxInfo,
    pub is_resuming: bool,
    /// When it was last tried; it may be tried again.
    pub could_not_resume: bool,
}

impl From<SandboxInfo> for Boxed {
    fn from(info: SandboxInfo) -> Self {
        Self { info, is_resuming: false, could_not_resume: false }
    }
}

impl Sandboxes {
    /// Makes a sandbox that runs by the time the caller waits, or none: it wouldn't know the name of one that came later.
    pub async fn create_running(&self, asking: &Asking<'_>, wish: CreateSandbox) -> Result<SandboxInfo, ApiError> {
        let made = self.create(asking, wish).await?;
        if made.state != State::Provisioning {
            return Ok(made);
        }
        let sandbox = self.lifecycle.load(&made.id).await?;
        if sandbox.is_running() {
            return self.get(asking.caller, made.id.as_str()).await;
        }
        const REASON: &str = "it took longer to start than its maker waited";
        let audit =
            AuditRecord::of_sandbox(self.deployment.now(), &sandbox, "sandbox.deleted", REASON).by(asking.caller, asking.request_id);
        let d = &self.deployment;
        d.store.end_sandbox(&sandbox.id, State::Terminated, &d.ending(REASON, audit)).await.map_err(internal)?;
        let (lifecycle, id) = (self.lifecycle.clone(), sandbox.id.clone());
        // It may still be starting; what is written down already is done when that is over.
        d.background.spawn(async move { lifecycle.destroy(&id).await });
        let message = format!("the sandbox did not run within {} seconds, and was deleted again", asking.wait.as_secs());
        Err(ApiError::new(ErrorCode::SandboxStarting, message))
    }

    /// As [`Sandboxes::get`]; one that could not be made is still shown, so that who waits for it learns why.
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

    /// Those one may use, newest first; without the sessions that use them.
    pub async fn boxes(&self, asking: &Asking<'_>, filters: &[TagFilter], page: &PageWish) -> Result<Vec<Boxed>, ApiError> {
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
            info: self.info_of(sandbox, tags, Vec::new()),
        }
    }

    /// Begins to start a stopped one; it goes on without the caller.
    pub async fn begin_start(&self, asking: &Asking<'_>, id_or_name: &str) -> Result<Boxed, ApiError> {
        let sandbox = find(&self.deployment, asking.caller, id_or_name).await?;
        access::may_use(&asking.caller.principal, &sandbox)?;
        // What its owner asked for is a use.
        self.lifecycle.activity.sandbox_asked_for(&sandbox.id, self.deployment.now());
        self.note(asking, &sandbox, "sandbox.start_asked").await?;
        let sandbox = match self.lifecycle.bring_up(&sandbox.id, ANSWER_WITHIN).await {
            Ok(running) => running,
            // Who asks how it is learns why.
            Err(e) if matches!(e.code, ErrorCode::SandboxStarting | ErrorCode::ProviderUnavailable) => {
                self.lifecycle.load(&sandbox.id).await?
            }
            Err(e) => return Err(e),
        };
        self.boxed(sandbox).await
    }

    /// Ends its programs and keeps its files, until it is used again; for its owner and operators.
    pub async fn stop(&self, asking: &Asking<'_>, id_or_name: &str) -> Result<Boxed, ApiError> {
        let sandbox = find(&self.deployment, asking.caller, id_or_name).await?;
        access::may_end(&asking.caller.principal, &sandbox)?;
        self.note(asking, &sandbox, "sandbox.stop_asked").await?;
        let id = sandbox.id.clone();
        if self.lifecycle.is_here(&sandbox) {
            let lifecycle = self.lifecycle.clone();
            // In a task, so that a caller who hangs up doesn't leave it half done until the reaper comes by.
            let stopping = self.deployment.background.spawn(async move { lifecycle.suspend(&id, STOPPED, |_| true).await });
            if let Ok(stopped) = tokio::time::timeout(ANSWER_WITHIN, stopping).await {
                stopped.map_err(|_| ApiError::new(ErrorCode::Internal, "stopping was interrupted; try again"))??;
            }
        } else {
            self.stop_elsewhere(&id).await?;
        }
        let sandbox = self.lifecycle.load(&sandbox.id).await?;
        if sandbox.ended_at.is_some() {
            return Err(gone(&sandbox));
        }
        self.boxed(sandbox).await
    }

    /// The intent is written for its own broker to find, and looked after for a while.
    async fn stop_elsewhere(&self, id: &SandboxId) -> Result<(), ApiError> {
        let deadline = Instant::now() + ANSWER_WITHIN;
        loop {
            let sandbox = self.lifecycle.load(id).await?;
            if !sandbox.is_running() || sandbox.ended_at.is_some() {
                return Ok(());
            }
            if sandbox.intent.is_none() {
                let begun = sandbox.with_intent(Intent::Suspend);
                // Somebody else's change wins and is looked at next.
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
