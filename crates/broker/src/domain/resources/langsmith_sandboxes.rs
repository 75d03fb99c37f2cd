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
            request_context::RequestContext,
            sandbox_lookup::{find, not_found},
        },
        context::{BrokerContext, store_error},
        lifecycle::transitions::{Lifecycle, RESUME_FAILED, gone},
        model::{AuditRecord, Intent, Sandbox},
    },
    store::{Note, PageParams, Viewer},
};

/// How long a start or stop waits for the provider; after that it goes on in the background. SDKs wait ten seconds for an
/// answer and then poll.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// How long a sandbox that could not be created is still found by its name.
const SHOW_FAILED_FOR: Duration = Duration::from_secs(3600);
/// How often the store is polled until another node's broker has stopped the sandbox.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const STOPPED: &str = "it was stopped";

/// A sandbox, with details that a polling client needs and that its state doesn't show.
pub struct PolledSandbox {
    pub info: SandboxInfo,
    pub is_resuming: bool,
    /// The last attempt to resume it failed; it may be tried again.
    pub could_not_resume: bool,
}

impl From<SandboxInfo> for PolledSandbox {
    fn from(info: SandboxInfo) -> Self {
        Self { info, is_resuming: false, could_not_resume: false }
    }
}

pub struct LangSmithSandboxes {
    pub context: Arc<BrokerContext>,
    pub lifecycle: Arc<Lifecycle>,
    pub sandboxes: Arc<Sandboxes>,
}

impl LangSmithSandboxes {
    /// Creates a sandbox that runs before the caller's wait is over, or none: the caller wouldn't know the name of one
    /// that runs later.
    pub async fn create_running(&self, request: &RequestContext<'_>, params: CreateSandbox) -> Result<SandboxInfo, ApiError> {
        let made = self.sandboxes.create(request, params).await?;
        if made.state != State::Provisioning {
            return Ok(made);
        }
        let sandbox = self.context.load_sandbox(&made.id).await?;
        if sandbox.is_running() {
            return self.sandboxes.get(request.caller, made.id.as_str()).await;
        }
        const REASON: &str = "it took longer to start than its maker waited";
        let audit = AuditRecord::of_sandbox(self.context.now(), &sandbox, "sandbox.deleted", REASON).by(request.caller, request.request_id);
        let context = &self.context;
        context.store.end_sandbox(&sandbox.id, State::Terminated, &context.ending(REASON, audit)).await.map_err(store_error)?;
        let (lifecycle, id) = (self.lifecycle.clone(), sandbox.id.clone());
        // The start may still be in progress. The deletion is stored and completes after it.
        context.background.spawn(async move { lifecycle.destroy(&id).await });
        let message = format!("the sandbox did not start within {} seconds and was deleted", request.wait.as_secs());
        Err(ApiError::new(ErrorCode::SandboxStarting, message))
    }

    /// As [`Sandboxes::get`], but also returns one that could not be created, so that a polling client learns the reason.
    pub async fn get(&self, request: &RequestContext<'_>, id_or_name: &str) -> Result<PolledSandbox, ApiError> {
        let (context, principal) = (&self.context, &request.caller.principal);
        let sandbox = match find(context, request.caller, id_or_name).await {
            Err(e) if e.code == ErrorCode::SandboxNotFound => {
                let found = match id_or_name.parse::<SandboxId>() {
                    Ok(id) => context.store.sandbox(&id).await.map_err(store_error)?,
                    Err(_) => {
                        let ended = context.store.sandbox_once_named(&principal.workspace, id_or_name).await.map_err(store_error)?;
                        ended.filter(|s| s.ended_at.is_some_and(|at| context.now().saturating_since(at) < SHOW_FAILED_FOR))
                    }
                };
                found.filter(|s| s.state == State::Failed && access::is_visible(principal, s)).ok_or_else(not_found)?
            }
            found => found?,
        };
        access::may_use(principal, &sandbox)?;
        self.with_poll_details(sandbox).await
    }

    /// The sandboxes that the caller may use, newest first, without the sessions that use them.
    pub async fn list(
        &self,
        request: &RequestContext<'_>,
        filters: &[TagFilter],
        page: &PageParams,
    ) -> Result<Vec<PolledSandbox>, ApiError> {
        let store = &self.context.store;
        let found = store.sandboxes(&Viewer::from(&request.caller.principal), filters, page).await.map_err(store_error)?;
        let mut tags = store.sandbox_tags(&found.iter().map(|s| &s.id).collect::<Vec<_>>()).await.map_err(store_error)?;
        let each = |sandbox: Sandbox| {
            let tags = tags.remove(sandbox.id.as_str()).unwrap_or_default();
            self.with_poll_details_and_tags(sandbox, tags)
        };
        Ok(found.into_iter().map(each).collect())
    }

    async fn with_poll_details(&self, sandbox: Sandbox) -> Result<PolledSandbox, ApiError> {
        let mut tags = self.context.store.sandbox_tags(&[&sandbox.id]).await.map_err(store_error)?;
        let tags = tags.remove(sandbox.id.as_str()).unwrap_or_default();
        Ok(self.with_poll_details_and_tags(sandbox, tags))
    }

    fn with_poll_details_and_tags(&self, sandbox: Sandbox, tags: Tags) -> PolledSandbox {
        let is_suspended = sandbox.state == State::Suspended;
        let has_failed = sandbox.reason.as_deref().is_some_and(|reason| reason.starts_with(RESUME_FAILED));
        PolledSandbox {
            is_resuming: is_suspended && sandbox.intent == Some(Intent::Resume),
            could_not_resume: is_suspended && has_failed,
            info: self.sandboxes.info_of(sandbox, tags, Vec::new()),
        }
    }

    /// Begins to start a stopped sandbox; the start continues without the caller.
    pub async fn start(&self, request: &RequestContext<'_>, id_or_name: &str) -> Result<PolledSandbox, ApiError> {
        let sandbox = find(&self.context, request.caller, id_or_name).await?;
        access::may_use(&request.caller.principal, &sandbox)?;
        // A start that its owner requested counts as a use.
        self.lifecycle.last_used.record_sandbox_request(&sandbox.id, self.context.now());
        self.note(request, &sandbox, "sandbox.start_asked").await?;
        let sandbox = match self.lifecycle.ensure_running(&sandbox.id, ANSWER_WITHIN).await {
            Ok(running) => running,
            // The client learns the reason when it polls.
            Err(e) if matches!(e.code, ErrorCode::SandboxStarting | ErrorCode::ProviderUnavailable) => {
                self.context.load_sandbox(&sandbox.id).await?
            }
            Err(e) => return Err(e),
        };
        self.with_poll_details(sandbox).await
    }

    /// Ends the sandbox's programs and keeps its files until the next use. For its owner and operators.
    pub async fn stop(&self, request: &RequestContext<'_>, id_or_name: &str) -> Result<PolledSandbox, ApiError> {
        let sandbox = find(&self.context, request.caller, id_or_name).await?;
        access::may_end(&request.caller.principal, &sandbox)?;
        self.note(request, &sandbox, "sandbox.stop_asked").await?;
        let id = sandbox.id.clone();
        if self.context.is_here(&sandbox) {
            let lifecycle = self.lifecycle.clone();
            // In a task: if the caller disconnects, the stop must not stay half done until the reaper's next round.
            let stopping = self.context.background.spawn(async move { lifecycle.suspend(&id, STOPPED, |_| true).await });
            if let Ok(stopped) = tokio::time::timeout(ANSWER_WITHIN, stopping).await {
                stopped.map_err(|_| ApiError::new(ErrorCode::Internal, "stopping was interrupted; try again"))??;
            }
        } else {
            self.stop_on_remote_node(&id).await?;
        }
        let sandbox = self.context.load_sandbox(&sandbox.id).await?;
        if sandbox.ended_at.is_some() {
            return Err(gone(&sandbox));
        }
        self.with_poll_details(sandbox).await
    }

    /// Stores the intent for the sandbox's own broker, and polls for a while whether it was carried out.
    async fn stop_on_remote_node(&self, id: &SandboxId) -> Result<(), ApiError> {
        let deadline = Instant::now() + ANSWER_WITHIN;
        loop {
            let sandbox = self.context.load_sandbox(id).await?;
            if !sandbox.is_running() || sandbox.ended_at.is_some() {
                return Ok(());
            }
            if sandbox.intent.is_none() {
                let begun = sandbox.with_intent(Intent::Suspend);
                // A concurrent change wins; the next iteration sees it.
                self.context.store.replace_sandbox(&sandbox, &begun, None).await.map_err(store_error)?;
            }
            if Instant::now() >= deadline {
                return Ok(());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn note(&self, request: &RequestContext<'_>, sandbox: &Sandbox, action: &'static str) -> Result<(), ApiError> {
        let audit = AuditRecord::of_sandbox(self.context.now(), sandbox, action, "asked for").by(request.caller, request.request_id);
        self.context.store.note(&Note { audit: vec![audit], ..Note::default() }).await.map_err(store_error)
    }
}
